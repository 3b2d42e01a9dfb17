"""The pages: links that lead somewhere, commands that the programs take, options that exist."""

import re
import shlex
from pathlib import Path

import pytest
import tyro

import evaluate
import report
import speed
from tests.conftest import ROOT, SCRIPTS, load

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    for link in links:
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_every_page_can_be_found_from_the_readme():
    linked = set(re.findall(r"\]\((docs/\w+\.md)", PAGES[0].read_text()))
    assert linked == {f"docs/{page.name}" for page in PAGES[1:]}


def test_a_script_names_its_page():
    for script in SCRIPTS:
        (page,) = re.findall(r"docs/\w+\.md", load(script).__doc__)
        assert f"`{script}.py`" in (ROOT / page).read_text()


def commands(page: Path) -> list[list[str]]:
    """The lines of its shell snippets, as a shell reads them."""
    snippets = "\n".join(re.findall(r"```bash\n(.*?)```", page.read_text(), re.S)).replace("\\\n", " ")
    return [shlex.split(line, comments=True) for line in snippets.splitlines() if "$" not in line]


@pytest.mark.parametrize("page", [p for p in PAGES if p.name != "history.md"], ids=lambda page: page.name)
def test_programs_take_what_the_pages_say(page):
    """history.md is left out: its commands are those of the commits that it names."""
    programs = {f"{script}.py": load(script).Args for script in SCRIPTS}
    programs |= {"evaluate.py": evaluate.Args, "report.py": report.Args, "speed.py": speed.Command}
    for words in commands(page):
        if len(words) > 1 and words[1] in programs:
            tyro.cli(programs[words[1]], args=words[2:])


def test_every_tag_is_explained(tmp_path):
    """What the scripts log, from their sources, is on the pages."""
    pages = "".join((ROOT / "docs" / name).read_text() for name in ("sdar.md", "baselines.md"))
    for script in SCRIPTS:
        tags = re.findall(r'"((?:losses|repetition|alpha)/\w+)"', Path(load(script).__file__).read_text())
        assert tags
        for tag in tags:
            name = tag if tag in pages else tag.split("/")[1]
            assert re.search(rf"`{name}(_\w)?`", pages), f"{script}: {tag}"
