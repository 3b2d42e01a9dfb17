"""The published study: its tables are what report.py makes of the data beside them."""

import ast
import re
import shutil
import subprocess

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


def test_edited_copies_are_what_their_names_say(tmp_path):
    """The page's sed commands still find their lines: each copy differs in them alone and is valid Python."""
    scripts = {name: (ROOT / f"{name}_continuous_action.py").read_text().splitlines() for name in ("sdar", "sac")}
    for name in scripts:
        shutil.copy(ROOT / f"{name}_continuous_action.py", tmp_path)
    commands = re.search(r"^mkdir -p edited\n.*?(?=^for )", RESULTS, re.S | re.M)[0]
    subprocess.run(["bash", "-ec", commands], cwd=tmp_path, check=True)
    changed = {}
    for path in (tmp_path / "edited").iterdir():
        text = path.read_text()
        ast.parse(text)
        pairs = zip(scripts[path.stem.split("-")[0]], text.splitlines(), strict=True)
        changed[path.stem] = sum(ours != theirs for ours, theirs in pairs)
    assert changed == {"sdar-always": 2, "sdar-warm": 2, "sdar-expalpha": 1, "sac-both": 2}
