"""report.py: known curves in, hand-computed numbers out."""

import csv
import json
import math
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rliable import metrics

import report
from sdar_utils.logs import append_row, evaluation_row
from sdar_utils.tables import markdown
from tests.conftest import ROOT, evaluations, load, train

TASK = "tests.tasks:Ending-v0"  # its random return is 0 + 1 + 2 + 3 + 4 whatever is done


def summary(value: float, apr: tuple[float, ...], afr: float) -> dict[str, Any]:
    """What sdar_utils.evaluation.summarise says of an evaluation."""
    return {
        "episodes": 10,
        "return": value,
        "return_standard_error": 0.5,
        "length": value,
        "decisions_per_step": 0.5,
        "repeat_rate": 0.5,
        "apr": sum(apr) / len(apr),
        "afr": 2 * afr,
        "afr_per_dim": afr,
        "apr_dim": list(apr),
    }


def make_run(
    runs: Path,
    script: str = "sdar_continuous_action",
    seed: int = 1,
    returns: dict[int, float] | None = None,
    task: str = TASK,
    budget: int = 100,
    apr: tuple[float, ...] = (2.0, 4.0),
    afr: float = 0.5,
    name: str | None = None,
    **settings,
) -> Path:
    """A run directory as the scripts leave it, with evaluations of our choosing; a second takes 10 steps.

    Stochastic play has a return lower by 1 and rates twice as high.
    """
    returns = {0: 10.0, 50: 20.0, 100: 30.0} if returns is None else returns
    directory = runs / (name or f"{task}__{settings.get('exp_name', script)}__{seed}")
    directory.mkdir(parents=True)
    values = {"exp_name": script, "env_id": task, "seed": seed, "total_timesteps": budget, "hidden_dim": 16, **settings}
    (directory / "args.json").write_text(json.dumps({"args": values, "script": script, "commit": "0123456789abcdef"}))
    for step, value in returns.items():
        stochastic = summary(value - 1, tuple(2 * rate for rate in apr), 2 * afr)
        row = evaluation_row({"greedy": summary(value, apr, afr), "stochastic": stochastic})
        append_row(directory / "evaluations.csv", {"step": step, "seconds": f"{step / 10:.3f}", **row})
    return directory


def build(*paths: Path, out: Path, **values) -> Path:
    report.main(report.Args(paths=paths, out=out, bootstrap=50, **values))
    return out


def records(out: Path, table: str) -> list[dict[str, str]]:
    with open(out / "tables" / f"{table}.csv", newline="") as file:
        return list(csv.DictReader(file))


def find(rows: list[dict[str, str]], **wanted: str) -> dict[str, str]:
    (row,) = [row for row in rows if all(row[key] == value for key, value in wanted.items())]
    return row


# The measures.


def test_auc_is_the_mean_height_of_the_curve():
    line = np.array([0.0, 10.0, 30.0, 100.0])
    assert report.area_under_curve(line, line) == pytest.approx(50)  # of f(x) = x over [0, 100], however it is sampled
    assert report.area_under_curve(line, np.full(4, 7.0)) == pytest.approx(7)
    assert report.area_under_curve(np.array([0.0, 50.0, 100.0]), np.array([0.0, 0.0, 8.0])) == pytest.approx(2)


def test_n_score_and_standard_error():
    assert report.n_score(15.0, 10.0, 20.0) == 0.5
    assert report.n_score(10.0, 10.0, 20.0) == 0
    assert report.standard_error([1.0, 2.0, 3.0]) == pytest.approx(1 / math.sqrt(3))
    assert math.isnan(report.standard_error([1.0]))


def test_reaching_a_return_is_the_means_business():
    """One run is there at step 50, their mean only at step 100."""
    steps, seconds = np.array([0, 50, 100]), np.array([0.0, 5.0, 10.0])
    curves = ([0.0, 40.0, 40.0], [0.0, 10.0, 40.0])
    points = [{"step": steps, "seconds": seconds, "return": np.array(curve)} for curve in curves]
    group = report.Group([report.Run("r", TASK, "SDAR", i, 100, p) for i, p in enumerate(points)])
    assert report.reach(group, 30) == (100, 10)
    assert report.reach(group, 20) == (50, 5)
    assert report.reach(group, 41) is None


def test_probability_of_improvement_is_rliables():
    generator = np.random.default_rng(0)
    x, y = generator.integers(0, 4, (5, 3)), generator.integers(0, 4, (7, 3))  # with ties, and unequal seeds
    assert report.probability_of_improvement(x, y) == pytest.approx(metrics.probability_of_improvement(x, y))


@pytest.mark.parametrize(
    ("value", "text"),
    [(13122.4, "13122"), (275.93, "275.9"), (-22.512, "-22.51"), (0.0123, "0.01"), (0, "0.00"), (math.inf, "∞")],
)
def test_numbers_are_plain_decimals(value, text):
    assert report.number(value) == text


def test_markdown_tables():
    assert markdown(["a", "b"], [["x|y", ""], ["1", "2"]]) == "| a | b |\n| --- | --- |\n| x\\|y |  |\n| 1 | 2 |"
    aligned = "| task |      n |\n| ---- | -----: |\n| Ant  |     -1 |\n| b    | 20 ± 3 |"
    assert markdown(["task", "n"], [["Ant", "-1"], ["b", "20 ± 3"]], align=True) == aligned
    assert markdown(["n"], [["1"]], align=True) == "|   n |\n| --: |\n|   1 |"  # a rule of one colon would be none
    assert markdown(["n", "m"], [], align=True) == "| n   | m   |\n| --- | --- |"


# The tables, from evaluations.csv to CSV, against numbers worked out by hand.


@pytest.fixture(scope="module")
def study(tmp_path_factory) -> Path:
    """SAC ends at 30 and 34 (mean 32), SDAR at 50 and 54 (mean 52); the random policy has 10."""
    root = tmp_path_factory.mktemp("study")
    for seed, more in ((1, 0), (2, 4)):
        make_run(root / "runs", "sac_continuous_action", seed, {0: 10, 50: 20 + more, 100: 30 + more}, apr=(1.0, 1.0))
        make_run(root / "runs", "sdar_continuous_action", seed, {0: 10, 50: 40 + more, 100: 50 + more}, apr=(2.0, 6.0))
    return build(root / "runs", out=root / "report")


def test_the_papers_row_is_there_for_algorithms_it_has_printed():
    row = ["*paper*", "*return*", "", "*15131 ± 1279*"]
    assert report.papers_rows(report.PAPER_RETURN, "HalfCheetah", ["paper", "return"], ["SDAR p0.1", "SDAR"]) == [row]
    assert report.papers_rows(report.PAPER_RETURN, "HalfCheetah", ["paper", "return"], ["SDAR p0.1"]) == []
    assert report.papers_rows(report.PAPER_RETURN, "Reacher", ["paper", "return"], ["SDAR"]) == []


def test_returns_with_standard_errors(study):
    sac = find(records(study, "table2_return"), algorithm="SAC")
    sdar = find(records(study, "table2_return"), algorithm="SDAR")
    assert float(sac["return"]) == 32
    assert float(sdar["return"]) == 52
    assert float(sac["standard_error"]) == pytest.approx(2)  # of 30 and 34: 2.83 / √2
    assert float(sac["n_score"]) == pytest.approx(1)
    assert float(sdar["n_score"]) == pytest.approx((52 - 10) / (32 - 10))
    assert (float(sdar["apr"]), float(sdar["afr"]), float(sdar["afr_per_dim"])) == (4, 1, 0.5)
    assert (float(sdar["apr_stochastic"]), float(sdar["afr_per_dim_stochastic"])) == (8, 1)
    assert (sdar["seeds"], sdar["steps"]) == ("2", "100")


def test_auc_scores(study):
    """Mean heights: SAC (15 + 25)/2 = 20 and (17 + 29)/2 = 23, SDAR 35 and 38; the best algorithm's mean is 36.5."""
    sac = find(records(study, "auc_by_task"), algorithm="SAC")
    sdar = find(records(study, "auc_by_task"), algorithm="SDAR")
    assert float(sac["normalised_auc"]) == pytest.approx((21.5 - 10) / (36.5 - 10))
    assert float(sac["standard_error"]) == pytest.approx(1.5 / 26.5)
    assert float(sdar["normalised_auc"]) == pytest.approx(1)
    average = find(records(study, "table1_auc"), algorithm="SAC", category="average")
    assert float(average["normalised_auc"]) == pytest.approx((21.5 - 10) / (36.5 - 10))


def test_mean_returns_over_training_with_intervals(study):
    """Resamples of two runs are as low as the lower one and as high as the higher one; stochastic play has 1 less."""
    rows = records(study, "auc_intervals")
    for play, less in (("greedy", 0), ("stochastic", 1)):
        for algorithm, low, high in (("SAC", 20, 23), ("SDAR", 35, 38)):
            row = find(rows, algorithm=algorithm, play=play, measure="mean_return")
            numbers = [float(row[name]) + less for name in ("low_95", "estimate", "high_95")]
            assert numbers == pytest.approx([low, (low + high) / 2, high])
    better = find(rows, algorithm="SAC", play="stochastic", measure="probability_sdar_is_better")
    assert [float(better[name]) for name in ("low_95", "estimate", "high_95")] == [1, 1, 1]


def test_overlapping_runs_are_better_by_chance(tmp_path):
    """Mean heights 1, 3 of SDAR and 2, 2 of SAC: one run of two is better."""
    for seed, heights in ((1, (1, 2)), (2, (3, 2))):
        for script, height in zip(("sdar_continuous_action", "sac_continuous_action"), heights, strict=True):
            make_run(tmp_path / "runs", script, seed, {0: height, 100: height})
    rows = records(build(tmp_path / "runs", out=tmp_path / "report"), "auc_intervals")
    better = find(rows, algorithm="SAC", play="greedy", measure="probability_sdar_is_better")
    assert [float(better[name]) for name in ("low_95", "estimate", "high_95")] == [0, 0.5, 1]


def test_time_to_reach_sacs_final_return(study):
    """SDAR's mean is 42 at step 50 already, above SAC's final 32; ten steps a second."""
    rows = records(study, "time_cost")
    sac, sdar = find(rows, algorithm="SAC"), find(rows, algorithm="SDAR")
    assert (float(sac["steps"]), float(sac["seconds"])) == (100, 10)
    assert (float(sdar["steps"]), float(sdar["seconds"])) == (50, 5)


def test_apr_by_dimension(study):
    rows = records(study, "table3_dimensions")
    assert [float(find(rows, algorithm="SDAR", dimension=d)["apr"]) for d in "01"] == [2, 6]
    assert [float(find(rows, algorithm="SAC", dimension=d)["apr"]) for d in "01"] == [1, 1]


def test_aggregates(study):
    """Two runs of one task: the IQM of two values is their mean, and every run of SDAR beats every one of SAC."""
    rows = records(study, "aggregates")
    iqm = find(rows, algorithm="SDAR", measure="iqm", score="n_score")
    assert float(iqm["estimate"]) == pytest.approx((52 - 10) / (32 - 10))
    assert float(iqm["low_95"]) == pytest.approx((50 - 10) / (32 - 10))
    iqm = find(rows, algorithm="SAC", measure="iqm", score="normalised_auc")
    assert float(iqm["estimate"]) == pytest.approx((21.5 - 10) / (36.5 - 10))
    assert float(iqm["high_95"]) == pytest.approx((23 - 10) / (36.5 - 10))
    for score in ("n_score", "normalised_auc"):
        better = find(rows, algorithm="SAC", measure="probability_sdar_is_better", score=score)
        assert (float(better["estimate"]), float(better["low_95"])) == (1, 1)


def test_curve_is_the_mean_with_standard_errors(study):
    (task,) = report.choose(report.read_evaluations(study / "evaluations.csv")[0], None, [])
    figure, axis = report.plt.subplots()
    report.draw_curves(axis, task, report.palette(["SAC", "SDAR"]), count_seeds=True)
    lines = {line.get_label(): line for line in axis.lines}
    assert lines["SDAR (2 seeds)"].get_xydata().tolist() == [[0, 10], [50, 42], [100, 52]]
    assert lines["SDAR (2 seeds)"].get_color() == "#d62728"
    band = axis.collections[1].get_paths()[0].vertices
    assert sorted(set(band[band[:, 0] == 100, 1])) == pytest.approx([50, 54])  # 52 ± 2
    report.plt.close(figure)


def test_sweeps_are_variants_that_differ_in_a_number():
    names = ["SAC", "SDAR p0.5", "SDAR p0.05", "SDAR p.1", "SDAR lambda-0.4", "SDAR lambda-0.6", "SDAR K4", "TAAC lr 2"]
    assert report.sweeps(names) == {"SDAR p": {0.05: "SDAR p0.05", 0.1: "SDAR p.1", 0.5: "SDAR p0.5"}}


def test_a_sweep_is_drawn_as_mean_and_error_against_its_number(tmp_path):
    for p, final in (("0.1", 30), ("0.2", 40), ("0.9", 50)):
        for seed in (1, 2):
            name = f"sdar_continuous_action-p{p}"
            make_run(tmp_path / "runs", seed=seed, returns={0: 0, 100: final + seed}, apr=(4.0, 4.0), exp_name=name)
    out = build(tmp_path / "runs", out=tmp_path / "report")
    assert (out / "figures" / "sweep-SDAR-p.png").exists()
    tasks = report.choose(report.read_evaluations(out / "evaluations.csv")[0], None, [])
    ((title, members),) = report.sweeps(tasks[0].groups).items()
    returns, apr, _ = report.sweep_figure(tasks, members, title).axes
    greedy, stochastic = returns.containers
    np.testing.assert_allclose(greedy.lines[0].get_xydata().astype(float), [(0.1, 31.5), (0.2, 41.5), (0.9, 51.5)])
    np.testing.assert_allclose(stochastic.lines[0].get_xydata()[:, 1].astype(float), [30.5, 40.5, 50.5])  # make_run's
    np.testing.assert_allclose(greedy.lines[2][0].get_segments()[1][:, 1].astype(float), [41, 42])  # of 41 and 42: 0.5
    assert [list(container.lines[0].get_ydata()) for container in apr.containers] == [[4, 4, 4], [8, 8, 8]]
    assert (returns.get_ylabel(), apr.get_ylabel(), returns.get_xscale()) == ("return", "APR", "log")


def test_many_long_names_fit_into_the_shared_legend_and_keep_colours_apart():
    names = ["SDAR", *(f"SDAR with a rather long label {k:02}" for k in range(14))]
    colours = report.palette(names)
    assert len(set(colours.values()) | set(report.COLOURS.values())) == 14 + len(report.COLOURS)
    figure, axes = report.grid(3)
    for name in names:
        axes[0].plot([0, 1], [0, 1], label=name, color=colours[name])
    report.shared_legend(figure, axes)
    (legend,) = figure.legends
    figure.canvas.draw()
    box = legend.get_window_extent()
    assert box.x0 >= 0
    assert box.x1 <= figure.bbox.width
    assert [text.get_text() for text in legend.get_texts()] == names
    columns = {round(text.get_window_extent().x0) for text in legend.get_texts()}
    assert len(columns) > 1
    report.plt.close(figure)


def test_tables_are_there_in_three_formats(study):
    for name in (
        "table1_auc",
        "auc_by_task",
        "auc_intervals",
        "table2_return",
        "table3_dimensions",
        "time_cost",
        "aggregates",
        "runs",
    ):
        assert (study / "tables" / f"{name}.csv").stat().st_size > 0
        markdown = (study / "tables" / f"{name}.md").read_text()
        lines = [line for line in markdown.splitlines() if line.startswith("|")]
        assert len({line.count("|") for line in lines}) == 1, name
        latex = (study / "tables" / f"{name}.tex").read_text()
        body = latex.split(r"\toprule")[1].split(r"\bottomrule")[0]
        columns = len(re.search(r"\\begin{tabular}{(l?c*)}", latex)[1])
        assert {line.count("&") for line in body.splitlines() if "&" in line} == {columns - 1}, name
        assert not re.search(r"(?<!\\)[_%#]|[±∞≥₀]", body), name
    table = (study / "tables" / "table2_return.md").read_text()
    assert "| 32.00 ± 2.00 | **52.00 ± 2.00** |" in table
    assert table.count("|  | APR / AFR | 1.00 / 0.500 | 4.00 / 0.500 |") == 2  # of the task and on average
    assert table.count("|  | stochastic APR / AFR | 2.00 / 1.000 | 8.00 / 1.000 |") == 2


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="pdflatex is not installed")
def test_latex_compiles(study, tmp_path):
    inputs = "".join(f"\\input{{{path}}}" for path in sorted((study / "tables").glob("*.tex")))
    page = r"\documentclass{article}\usepackage{booktabs}\usepackage[utf8]{inputenc}\begin{document}" + inputs
    (tmp_path / "page.tex").write_text(page + r"\end{document}")
    line = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "page.tex"]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


# The page.


def test_page_is_whole_without_a_network(study):
    page = (study / "index.html").read_text()
    assert page.count("<figure") == page.count("data:image/png;base64,") >= 6
    for table in ("table1_auc", "table2_return", "table3_dimensions", "time_cost", "aggregates", "runs"):
        assert f'<table id="{table}">' in page
    assert page.count("fewer than 3 seeds") == 1  # though it holds for both aggregates
    assert not re.search(r'(src|href)="(?!data:|#|figures/|tables/|evaluations)', page)
    for target in re.findall(r'href="((?:figures|tables)/[^"]+|evaluations[^"]+)"', page):
        assert (study / target).exists(), target


@pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed")
def test_page_renders_in_a_browser(study, tmp_path):
    line = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}", "--dump-dom"]
    shot = subprocess.run([*line, (study / "index.html").as_uri()], capture_output=True, text=True, check=False)
    assert shot.returncode == 0, shot.stderr
    assert shot.stdout.count("<img") >= 6
    assert "52.00 ± 2.00" in shot.stdout


def test_same_report_from_its_csv(study, tmp_path, monkeypatch):
    monkeypatch.setattr(report.Page, "figure", lambda page, name, figure, caption: report.plt.close(figure))  # slow
    build(from_csv=(study / "evaluations.csv",), out=tmp_path / "again")
    for path in sorted((study / "tables").glob("*.csv")):
        if path.name != "runs.csv":  # commit and device are only in the runs
            assert (tmp_path / "again" / "tables" / path.name).read_text() == path.read_text(), path.name


# What must not be averaged.


def read(*paths: Path, **values) -> report.Study:
    return report.read_study(report.Args(**{"paths": paths, "random_episodes": 2, **values}))


def final_return(study: report.Study, algorithm: str = "SDAR") -> float:
    (task,) = study.tasks
    return task.groups[algorithm].final("return").mean()


def seeds(study: report.Study) -> dict[str, list[int]]:
    (task,) = study.tasks
    return {algorithm: [run.seed for run in group.runs] for algorithm, group in task.groups.items()}


BAD = {
    "unfinished": ({"returns": {0: 0, 50: 999}}, "unfinished, at step 50 of 100"),
    "short": ({"returns": {0: 0, 40: 999}, "budget": 40}, "40 steps, where the other runs have 100"),
    "not finite": ({"returns": {0: 10, 50: math.nan, 100: 999}}, "its return is not finite at step 50"),
    "infinite": ({"returns": {0: 10, 50: 20, 100: math.inf}}, "its return is not finite at step 100"),
    "no evaluation": ({"returns": {}}, "no evaluation yet"),
    "off the grid": ({"returns": {0: 0, 70: 999, 200: 999}, "budget": 200}, "not evaluated at their last step, 100"),
}


@pytest.mark.parametrize("fault", BAD)
def test_bad_run_is_named_and_left_out(fault, tmp_path):
    about, reason = BAD[fault]
    make_run(tmp_path / "runs", seed=1)
    make_run(tmp_path / "runs", seed=2)
    make_run(tmp_path / "runs", seed=3, name="the bad one", **about)
    study = read(tmp_path / "runs", out=tmp_path / "out")
    assert any(re.search(rf"the bad one: .*{reason}", note) for note in study.notes)
    assert final_return(study) == 30
    assert seeds(study) == {"SDAR": [1, 2]}


def test_unfinished_runs_alone_still_make_a_page(tmp_path):
    make_run(tmp_path / "runs", returns={0: 10, 50: 20}, name="under way")
    page = (build(tmp_path / "runs", out=tmp_path / "out") / "index.html").read_text()
    assert "under way: unfinished, at step 50 of 100" in page
    assert 'id="curves"' in page
    assert "table2_return" not in page


def test_longer_run_is_cut(tmp_path):
    make_run(tmp_path / "runs", seed=1)
    make_run(tmp_path / "runs", seed=2)
    make_run(tmp_path / "runs", seed=3, returns={0: 10, 50: 20, 100: 60, 200: 999}, budget=200, name="long")
    study = read(tmp_path / "runs", out=tmp_path / "out")
    assert "long: longer than the others, cut at step 100 of 200" in study.notes
    assert final_return(study) == 40


def test_max_steps_looks_at_the_beginning_only(tmp_path):
    make_run(tmp_path / "runs", seed=1)
    make_run(tmp_path / "runs", seed=2, returns={0: 10, 50: 40}, budget=1000, name="not finished, but far enough")
    assert final_return(read(tmp_path / "runs", out=tmp_path / "out", max_steps=50)) == 30


def test_one_seed_counts_once(tmp_path):
    make_run(tmp_path / "runs", name="first try", returns={0: 0, 100: 999})
    make_run(tmp_path / "runs", name="second try")
    study = read(tmp_path / "runs", out=tmp_path / "out")
    assert "first try: seed 1 again, second try is used" in study.notes
    assert final_return(study) == 30


def test_other_settings_are_another_algorithm(tmp_path):
    for seed in (1, 2):
        make_run(tmp_path / "runs", seed=seed, compile=seed == 1)  # which is not a setting
    make_run(tmp_path / "runs", seed=3, name="wide", returns={0: 0, 100: 999}, hidden_dim=256)
    make_run(tmp_path / "runs", seed=4, name="joint", returns={0: 0, 100: 7}, exp_name="sdar_continuous_action-joint")
    study = read(tmp_path / "runs", out=tmp_path / "out")
    assert f"{TASK}, SDAR: settings differ; without a remark it is hidden-dim 16" in study.notes
    assert final_return(study) == 30
    assert final_return(study, "SDAR (hidden-dim 256)") == 999
    assert final_return(study, "SDAR joint") == 7


def test_missing_seeds_are_named(tmp_path):
    for seed in (1, 2, 3):
        make_run(tmp_path / "runs", seed=seed)
        if seed != 2:
            make_run(tmp_path / "runs", "sac_continuous_action", seed)
    study = read(tmp_path / "runs", out=tmp_path / "out")
    assert f"{TASK}, SAC: 2 seeds, without 2" in study.notes
    assert seeds(study) == {"SAC": [1, 3], "SDAR": [1, 2, 3]}


def matrices(study: report.Study):
    return report.score_matrices(report.final_scores(study.tasks, study.zeros, study.notes), study.notes)


def test_aggregates_keep_to_what_all_have(tmp_path):
    """SAC has two seeds on one task and one on the other, TAAC no run on the other at all."""
    other = "tests.tasks:Endless-v0"
    for task, seeds in ((TASK, (1, 2)), (other, (1,))):
        for seed in seeds:
            make_run(tmp_path / "runs", "sac_continuous_action", seed, {0: 30, 100: 40}, task=task)
            make_run(tmp_path / "runs", "sdar_continuous_action", seed, {0: 30, 100: 50}, task=task)
    make_run(tmp_path / "runs", "taac_continuous_action", 1, {0: 30, 100: 60}, task=TASK)
    study = read(tmp_path / "runs", out=tmp_path / "out")
    scores, tasks = matrices(study)
    assert f"{other}: not in the aggregates over tasks, because TAAC has no run there" in study.notes
    assert (tasks, {name: matrix.shape for name, matrix in scores.items()}) == (
        [TASK],
        {"SAC": (2, 1), "TAAC": (1, 1), "SDAR": (2, 1)},
    )
    shutil.rmtree(next((tmp_path / "runs").glob("*taac*")))
    study = read(tmp_path / "runs", out=tmp_path / "out")
    scores, tasks = matrices(study)
    assert "SAC: the aggregates use 1 seed of each task, the fewest that one has" in study.notes
    assert (len(tasks), scores["SDAR"].shape) == (2, (1, 2))


def test_sac_no_better_than_random_gives_no_n_score(tmp_path):
    make_run(tmp_path / "runs", "sac_continuous_action", returns={0: 10, 100: 9})
    make_run(tmp_path / "runs", "sdar_continuous_action")
    study = read(tmp_path / "runs", out=tmp_path / "out")
    scores, _ = matrices(study)
    assert scores == {}
    assert study.notes[0].startswith(f"{TASK}: no n-scores, because")
    assert math.isnan(find(report.return_table(study.tasks, study.zeros).records, algorithm="SDAR")["n_score"])


def test_infinite_apr(tmp_path):
    """Who never acts has an APR of ∞: it has a mean and no standard error, and survives the way through the CSV."""
    for seed in (1, 2):
        make_run(tmp_path / "runs", seed=seed, apr=(math.inf, 2.0))
    study = read(as_csv(tmp_path / "runs"), out=tmp_path / "out")
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        assert ["", "APR / AFR", "∞ / 0.500"] in report.return_table(study.tasks, study.zeros).rows
        assert report.dimension_table(study.tasks, None).rows[:2] == [["a0", "∞"], ["a1", "2.00 ± 0.00"]]


# Runs from several places.


def as_csv(runs: Path, without: str = "^$") -> Path:
    """The evaluations.csv of a report on these runs, without the columns that match."""
    study = read(runs, out=runs.with_name(f"{runs.name}-report"))
    for run in study.runs:
        run.points = {name: column for name, column in run.points.items() if not re.search(without, name)}
    path = runs.with_suffix(".csv")
    report.write_evaluations(path, study.runs, study.random_returns)
    return path


def test_folders_and_csvs_make_one_report(tmp_path, monkeypatch):
    for seed, place in enumerate(("folder", "csv", "older"), start=1):
        make_run(tmp_path / place, seed=seed, returns={0: 10, 50: 20, 100: 30 * seed}, apr=(2.0,) * seed)
    older = as_csv(tmp_path / "older", without="(?<!return)_stochastic|episodes|decisions|error")
    paths = tmp_path / "folder", as_csv(tmp_path / "csv")
    monkeypatch.setattr(report, "measure_random", None)  # it is in the CSVs
    study = read(*paths, from_csv=(older,), out=tmp_path / "out")
    assert (study.notes, seeds(study), final_return(study)) == ([], {"SDAR": [1, 2, 3]}, 60)
    assert study.random_returns == {TASK: [10, 10]}
    (rates,) = (row for row in report.return_table(study.tasks, {}).rows[:3] if row[1].startswith("stochastic"))
    assert rates == ["", "stochastic APR / AFR", "4.00 / 1.000"]  # of the two that have it
    report.write_evaluations(tmp_path / "merged.csv", study.runs, study.random_returns)
    again = read(tmp_path / "merged.csv", out=tmp_path / "out")
    for before, after in zip(study.runs, again.runs, strict=True):
        assert after.points.keys() == before.points.keys()
        np.testing.assert_array_equal(list(after.points.values()), [before.points[name] for name in after.points])


def test_no_stochastic_rates_no_row(tmp_path):
    make_run(tmp_path / "runs")
    study = read(as_csv(tmp_path / "runs", without="_stochastic"), out=tmp_path / "out")
    titles = [tuple(row[:2]) for row in report.return_table(study.tasks, {}).rows]  # without SAC there are no n-scores
    of_all = [("average", "APR / AFR"), ("*paper*", "*APR / AFR*")]
    assert titles == [(TASK, "return, 1 seed, 100 steps"), ("", "APR / AFR"), *of_all]
    assert [row[1] for row in report.comparison_table(study.tasks, 10).rows] == ["greedy return"]


@pytest.mark.parametrize("further", ["folder", "csv"])
@pytest.mark.parametrize("other", ["folder", "csv"])
def test_a_run_given_twice_counts_once(further, other, tmp_path):
    """As it is where it got further."""
    make_run(tmp_path / "further", name="twice")
    make_run(tmp_path / "other", name="twice", returns={0: 10, 50: 20})
    kinds = {"further": further, "other": other}
    paths = [tmp_path / name if kind == "folder" else as_csv(tmp_path / name) for name, kind in kinds.items()]
    for given in (paths, paths[::-1]):
        study = read(*given, out=tmp_path / "out")
        assert study.notes == ["twice: given 2 times, the one at step 100 is used"]
        assert (len(study.runs), final_return(study)) == (1, 30)


def test_of_equal_copies_the_folder_is_used(tmp_path):
    make_run(tmp_path / "runs")
    (run,) = read(as_csv(tmp_path / "runs"), tmp_path / "runs", out=tmp_path / "out").runs
    assert run.about["commit"] == "0123456789abcdef"  # which no CSV has


def test_the_same_name_with_other_settings_is_another_run(tmp_path):
    for place, width in (("narrow", 16), ("wide", 256)):
        make_run(tmp_path / place, name="run", hidden_dim=width)
    study = read(tmp_path / "narrow", tmp_path / "wide", out=tmp_path / "out")
    assert seeds(study) == {"SDAR": [1], "SDAR (hidden-dim 256)": [1]}


# Files that are not what they should be.


@pytest.mark.parametrize("cut", [1, 30])
def test_cut_off_line_is_not_used(cut, tmp_path):
    """Without its newline the last number may have lost digits."""
    make_run(tmp_path / "runs", seed=1)
    broken = make_run(tmp_path / "runs", seed=2, returns={0: 10, 50: 20, 100: 999}, name="broken") / "evaluations.csv"
    broken.write_bytes(broken.read_bytes()[:-cut])
    study = read(tmp_path / "runs", out=tmp_path / "out")
    assert study.notes == [
        "broken: evaluations.csv is damaged or cut off at line 4; what comes before is used",
        "broken: unfinished, at step 50 of 100: left out of averages",
    ]
    assert final_return(study) == 30


DAMAGE = {
    "not a number": lambda line: line.replace(b"50", b"5O", 1),
    "not text": lambda line: b"\xff\0" + line,
    "a cell less": lambda line: line.rpartition(b",")[0],
    "two lines in one": lambda line: line[:10] + line,
    "an earlier step": lambda line: line.replace(b"50", b"0", 1),
    "nothing": lambda line: b"",
}


@pytest.mark.parametrize("fault", DAMAGE)
def test_damaged_line_hides_what_follows(fault, tmp_path):
    make_run(tmp_path / "runs", seed=1)
    broken = make_run(tmp_path / "runs", seed=2, returns={0: 10, 50: 20, 100: 999}, name="broken") / "evaluations.csv"
    lines = broken.read_bytes().split(b"\n")
    broken.write_bytes(b"\n".join([*lines[:2], DAMAGE[fault](lines[2]), *lines[3:]]))
    study = read(tmp_path / "runs", out=tmp_path / "out")
    assert study.notes == [
        "broken: evaluations.csv is damaged or cut off at line 3; what comes before is used",
        "broken: unfinished, at step 0 of 100: left out of averages",
    ]
    assert final_return(study) == 30


@pytest.mark.parametrize("contents", ["step,seconds,epi", "a,b\n1,2\n", "\n"])
def test_damaged_header(contents, tmp_path):
    make_run(tmp_path / "runs", seed=1)
    make_run(tmp_path / "runs", seed=2, name="broken").joinpath("evaluations.csv").write_text(contents)
    study = read(tmp_path / "runs", out=tmp_path / "out")
    assert study.notes == [
        "broken: evaluations.csv is damaged or cut off at line 1; what comes before is used",
        "broken: no evaluation yet: left out of averages",
    ]
    assert seeds(study) == {"SDAR": [1]}


@pytest.mark.parametrize(
    "contents", ["", "[]", '{"args": {}}', '{"script": "x", "args": {"env_id": "a", "seed": "b"}}']
)
def test_damaged_args_are_named(contents, tmp_path):
    make_run(tmp_path / "runs", seed=1)
    make_run(tmp_path / "runs", seed=2, name="broken").joinpath("args.json").write_text(contents)
    study = read(tmp_path / "runs", out=tmp_path / "out")
    assert any(note.startswith("broken: args.json or evaluations.csv cannot be read") for note in study.notes)
    assert seeds(study) == {"SDAR": [1]}


def test_half_made_and_foreign_folders(tmp_path):
    make_run(tmp_path / "runs" / "deep" / "er")
    make_run(tmp_path / "runs", seed=2, name=".half-made.123")
    (tmp_path / "runs" / "foreign").mkdir()
    (tmp_path / "runs" / "foreign" / "events.out.tfevents.1").touch()
    study = read(tmp_path / "runs", out=tmp_path / "out")
    (note,) = study.notes
    assert "foreign has logs but no args.json" in note
    assert seeds(study) == {"SDAR": [1]}


def test_task_that_is_not_installed(tmp_path):
    for script in ("sac_continuous_action", "sdar_continuous_action"):
        make_run(tmp_path / "runs", script, task="NotHere-v0")
    study = read(tmp_path / "runs", out=tmp_path / "out")
    (note,) = study.notes
    assert note.startswith("NotHere-v0: no normalised scores, because the random policy cannot be run: cannot make")
    assert final_return(study) == 30
    assert report.auc_scores(study.tasks, study.zeros) == {}
    assert [row[0] for row in report.dimension_table(study.tasks, None).rows[:2]] == ["a0", "a1"]


def test_random_policy_is_measured_once(tmp_path, monkeypatch):
    make_run(tmp_path / "runs")
    assert read(tmp_path / "runs", out=tmp_path / "out").random_returns == {TASK: [10, 10]}
    with monkeypatch.context() as patch:
        patch.setattr(report, "make_env", None)  # cannot be measured any more
        assert read(tmp_path / "runs", out=tmp_path / "out").random_returns == {TASK: [10, 10]}
    assert len(read(tmp_path / "runs", out=tmp_path / "out", random_episodes=3).random_returns[TASK]) == 3
    (tmp_path / "out" / "random_returns.json").write_text("{")
    assert read(tmp_path / "runs", out=tmp_path / "out").random_returns == {TASK: [10, 10]}


# Bad input.


def test_bad_input_says_what_to_do(tmp_path):
    runs = tmp_path / "runs"
    run = make_run(runs)
    (tmp_path / "empty").mkdir()
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "index.html").write_text("mine")
    whole = as_csv(runs).read_text()
    (tmp_path / "cut.csv").write_text(whole[:-20])
    (tmp_path / "twice.csv").write_text(whole + whole.partition("\n")[2])
    (tmp_path / "empty.csv").touch()
    cases = [
        ([], "name a folder with runs"),
        ([tmp_path / "nowhere"], "cannot read"),
        ([tmp_path / "empty"], "no runs in"),
        ([runs, "--out", tmp_path / "thesis"], "not an earlier report"),
        ([runs, "--out", tmp_path / "cut.csv"], "not an earlier report"),
        ([runs, "--bootstrap", "0"], "--bootstrap must be at least 1"),
        ([runs, "--max-steps", "0"], "--max-steps must be at least 1"),
        ([runs, "--dimensions-task", "Ant-v4"], f"has no run here; there are {TASK}"),
        (
            [run / "evaluations.csv"],
            "there is no column run); to read a run, name its folder",
        ),
        ([runs, tmp_path / "cut.csv"], "is not an evaluations.csv"),
        (["--from-csv", tmp_path / "twice.csv"], f"the steps of {run.name} do not increase"),
        (["--from-csv", tmp_path / "empty.csv"], "is not an evaluations.csv"),
        (["--from-csv", tmp_path / "no.csv"], "cannot read"),
    ]
    for words, message in cases:
        with pytest.raises(SystemExit) as stop:
            report.main(report.tyro.cli(report.Args, args=["--out", str(tmp_path / "out"), *map(str, words)]))
        assert str(stop.value).startswith("error: "), words
        assert message in str(stop.value)
        assert "\n" not in str(stop.value)
    assert (tmp_path / "thesis" / "index.html").read_text() == "mine"
    assert not (tmp_path / "out").exists()


def test_an_interrupted_report_can_be_made_again(tmp_path, monkeypatch):
    make_run(tmp_path / "runs")
    monkeypatch.setattr(report, "aggregate", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        build(tmp_path / "runs", out=tmp_path / "out")
    assert "not finished" in (tmp_path / "out" / "index.html").read_text()
    read(tmp_path / "runs", out=tmp_path / "out")


# The real thing.


def test_from_real_runs_to_the_page(tmp_path):
    """Tiny runs of two scripts go through the whole path as a user would take it."""
    for name in ("sdar_continuous_action", "sac_continuous_action"):
        train(load(name), tmp_path / "runs", env_id=TASK, eval_every=30, run_name=name)
    line = [sys.executable, str(ROOT / "report.py"), str(tmp_path / "runs"), "--out", str(tmp_path / "out")]
    done = subprocess.run([*line, "--bootstrap", "50"], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert "1 task, 2 algorithms, 2 of 2 runs compared" in done.stdout
    with open(tmp_path / "out" / "evaluations.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["run"] == "sdar_continuous_action"]
    logged = evaluations(tmp_path / "runs" / "sdar_continuous_action")
    assert [int(row["step"]) for row in rows] == [0, 30, 60]
    for row, expected in zip(rows, logged, strict=True):
        found = {name: float(row[name] or "nan") for name in expected}
        assert found == pytest.approx(expected, rel=1e-6, nan_ok=True)
    assert "stochastic APR / AFR" in (tmp_path / "out" / "tables" / "table2_return.md").read_text()


def test_help_explains_itself(capsys):
    with pytest.raises(SystemExit):
        report.tyro.cli(report.Args, args=["--help"])
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "earlier report there is replaced" in text
    assert "folders with run directories, at any depth, and evaluations.csv of earlier reports" in text
