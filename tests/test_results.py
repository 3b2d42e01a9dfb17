"""What is published: the tables are what report.py makes of the data beside them."""

import csv
import re
import statistics

import pytest
import tyro

import report
from tests.conftest import ROOT

PAGES = {
    name: (ROOT / "docs" / name).read_text() for name in ("results.md", "history.md", "persistence.md", "baselines.md")
}
MARKED = r"<!-- (\S+) of (.+?) -->\n\n(.*?)\n\n"
TABLES = [table for page in PAGES.values() for table in re.findall(MARKED, page, re.S)]


@pytest.mark.parametrize("page", PAGES)
def test_every_table_names_where_it_comes_from(page):
    """Those of report.py have a space after the bar, others do not."""
    assert len(re.findall(MARKED, PAGES[page], re.S)) == PAGES[page].count("\n| ---") > 0


@pytest.mark.parametrize("options", sorted({options for _, options, _ in TABLES}))
def test_tables_are_redrawn_from_the_data(options, tmp_path, monkeypatch):
    tables = [(name, table) for name, others, table in TABLES if others == options]
    monkeypatch.chdir(ROOT / "docs" / "results")
    # Figures and bootstrap intervals are what takes time, and the latter are in two tables alone.
    monkeypatch.setattr(report.Page, "figure", lambda page, name, figure, caption: report.plt.close(figure))
    bootstrap = () if dict(tables).keys() & {"aggregates", "auc_intervals"} else ("--bootstrap", "1")
    words = ["--from-csv", *options.split(), *bootstrap, "--out", str(tmp_path / "report")]
    report.main(tyro.cli(report.Args, args=words))
    for name, table in tables:
        written = (tmp_path / "report" / "tables" / f"{name}.md").read_text()
        assert table == written[written.index("| ") :].strip(), name


def test_the_table_of_selectors_is_redrawn_from_the_data():
    """Mean and standard error over the agents; a rule beside the learned selection it has its rates from."""
    with open(ROOT / "docs" / "results" / "selectors.csv") as file:
        played = list(csv.DictReader(file))
    (table,) = re.findall(r"<!-- selectors.csv -->\n\n(.*?)\n\n", PAGES["results.md"], re.S)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    assert {(row[0], row[1]) for row in rows} == {(p["task"], p["mode"]) for p in played}
    for task, mode, agents, apr, *cells in rows:
        for selector, cell in zip(("learned", "periodic", "random"), cells, strict=True):
            wanted = [p for p in played if (p["task"], p["mode"], p["selector"]) == (task, mode, selector)]
            returns = [float(p["return"]) for p in wanted]
            assert len({p["run"] for p in wanted}) == len(wanted) == int(agents)
            error = statistics.stdev(returns) / len(returns) ** 0.5
            assert cell.strip("*") == f"{statistics.mean(returns):.0f} ± {error:.0f}"
            if selector == "learned":
                assert apr == f"{statistics.mean(float(p['apr']) for p in wanted):.2f}"
