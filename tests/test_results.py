"""The published study: its tables are what report.py makes of the data beside them."""

import re

import pytest
import tyro

import report
from tests.conftest import ROOT

RESULTS = (ROOT / "docs" / "results.md").read_text()
TABLES = re.findall(r"<!-- (\S+) of (.+?) -->\n\n(.*?)\n\n", RESULTS, re.S)


def test_every_table_names_where_it_comes_from():
    assert len(TABLES) == RESULTS.count("\n| ---") > 0


@pytest.mark.parametrize("options", sorted({options for _, options, _ in TABLES}))
def test_tables_are_redrawn_from_the_data(options, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT / "docs" / "results")
    report.main(tyro.cli(report.Args, args=["--out", str(tmp_path / "report"), "--from-csv", *options.split()]))
    for name, others, table in TABLES:
        if others == options:
            written = (tmp_path / "report" / "tables" / f"{name}.md").read_text()
            assert table == written[written.index("| ") :].strip(), name
