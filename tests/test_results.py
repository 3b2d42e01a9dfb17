"""The published study: its tables are what report.py makes of the data beside them."""

import re

import pytest

import report
from tests.conftest import ROOT

RESULTS = (ROOT / "docs" / "results.md").read_text()
TABLES = re.findall(r"<!-- (\S+) of (.+?) -->\n\n(.*?)\n\n", RESULTS, re.S)


def test_every_table_names_where_it_comes_from():
    assert len(TABLES) == RESULTS.count("\n| ---") > 0


@pytest.mark.parametrize("sources", sorted({sources for _, sources, _ in TABLES}))
def test_tables_are_redrawn_from_the_data(sources, tmp_path):
    files = tuple(ROOT / "docs" / "results" / name for name in sources.split())
    report.main(report.Args(from_csv=files, out=tmp_path / "report", bootstrap=50))
    for name, others, table in TABLES:
        if others == sources:
            written = (tmp_path / "report" / "tables" / f"{name}.md").read_text()
            assert table == written[written.index("| ") :].strip(), name
