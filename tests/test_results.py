"""What is published: the tables are what report.py makes of the data beside them.

`python -m tests.test_results` writes them anew.
"""

import csv
import re
import statistics
import tempfile
from pathlib import Path

import pytest
import tyro

import report
from tests.conftest import ROOT

NAMES = ("README.md", *(f"docs/{name}.md" for name in ("results", "tables", "history", "persistence", "baselines")))
PAGES = {name: (ROOT / name).read_text() for name in NAMES}
MARKED = r"<!-- (\S+) of (.+?) -->\n\n(.*?)\n\n"
TABLES = [table for page in PAGES.values() for table in re.findall(MARKED, page, re.S)]


def drawn(options: str, out: Path) -> dict[str, str]:
    """The tables that the pages have of this data, by name, as report.py makes them."""
    names = [name for name, others, _ in TABLES if others == options]
    # Bootstrap intervals are what takes time, besides the figures, and they are in two tables alone.
    bootstrap = () if {*names} & {"aggregates", "auc_intervals"} else ("--bootstrap", "1")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT / "docs" / "results")
        patch.setattr(report.Page, "figure", lambda page, name, figure, caption: report.plt.close(figure))
        report.main(tyro.cli(report.Args, args=["--from-csv", *options.split(), *bootstrap, "--out", str(out)]))
    written = {name: (out / "tables" / f"{name}.md").read_text() for name in names}
    return {name: text[text.index("| ") :].strip() for name, text in written.items()}


@pytest.mark.parametrize("page", PAGES)
def test_every_table_names_where_it_comes_from(page):
    """Those of report.py have a space after the bar, others do not."""
    assert len(re.findall(MARKED, PAGES[page], re.S)) == PAGES[page].count("\n| ---") > 0


@pytest.mark.parametrize("options", sorted({options for _, options, _ in TABLES}))
def test_tables_are_redrawn_from_the_data(options, tmp_path):
    tables = drawn(options, tmp_path / "report")
    for name, others, table in TABLES:
        if others == options:
            assert table == tables[name], name


def test_the_table_of_selectors_is_redrawn_from_the_data():
    """Mean and standard error over the agents; a rule beside the learned selection it has its rates from."""
    with open(ROOT / "docs" / "results" / "selectors.csv") as file:
        played = list(csv.DictReader(file))
    (table,) = re.findall(r"<!-- selectors.csv -->\n\n(.*?)\n\n", PAGES["docs/results.md"], re.S)
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


def write_pages() -> None:
    with tempfile.TemporaryDirectory() as folder:
        datasets = sorted({options for _, options, _ in TABLES})
        tables = {options: drawn(options, Path(folder) / str(i)) for i, options in enumerate(datasets)}
    for name, page in PAGES.items():
        for table, options, text in re.findall(MARKED, page, re.S):
            mark = f"<!-- {table} of {options} -->\n\n"
            page = page.replace(mark + text, mark + tables[options][table])
        (ROOT / name).write_text(page)


if __name__ == "__main__":
    write_pages()
