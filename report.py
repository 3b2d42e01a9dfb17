"""Every table and figure of the paper's evaluation, and some more, from your own runs.

python report.py runs --out report    # then open report/index.html
"""

import base64
import collections
import csv
import dataclasses
import html
import itertools
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import tyro
from tqdm import tqdm

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import FuncFormatter

from sdar_utils import ALGORITHMS, fail, one_line
from sdar_utils.envs import EVALUATION, derived_seed, dimension_names, make_env
from sdar_utils.options import RunArgs, require
from sdar_utils.tables import markdown


@dataclass
class Args:
    paths: tyro.conf.Positional[tuple[Path, ...]] = ()
    """folders with run directories, at any depth, and evaluations.csv of earlier reports; all go into one report"""
    from_csv: tuple[Path, ...] = ()
    """more evaluations.csv of earlier reports; the same as naming them without this option"""
    out: Path = Path("report")
    """the folder the report is written to; an earlier report there is replaced"""
    max_steps: int | None = None
    """look at the first so many steps of each run only (None: at all)"""
    dimensions_task: str | None = None
    """the task of the table by action dimension (None: Walker2d, as in the paper, else the one that has most)"""
    random_episodes: int = 30
    """episodes of the uniformly random policy that is the zero of normalised scores, measured once per task"""
    bootstrap: int = 2000
    """resamples of the bootstrap intervals"""


COLOURS = dict(
    zip(ALGORITHMS.values(), ("#555555", "#2a9d4e", "#9467bd", "#c98a1b", "#1f77b4", "#d62728"), strict=True)
)
MORE_COLOURS = (
    *("#e377c2", "#17becf", "#8c564b", "#bcbd22", "#000000", "#7f9fd6", "#f4a3a3", "#6b8e23"),
    *("#ff7f0e", "#00008b", "#98df8a", "#7b3294", "#c7a17a", "#008080", "#ff00ff", "#b0b0b0"),
)
CATEGORIES = {
    "classic": ("MountainCarContinuous", "LunarLanderContinuous", "BipedalWalker"),
    "locomotion": ("HalfCheetah", "Humanoid", "Walker2d", "Hopper", "Ant"),
    "manipulation": ("FetchReach", "Pusher", "Reacher"),
}
RANDOM = "random"  # the name of the uniformly random policy in evaluations.csv

# What the paper prints, a column for each of ALGORITHMS. Its AFR is on the scale of `afr_per_dim`.
PAPER_AUC = """
classic      | 0.60 ± 0.13  | 0.89 ± 0.01  | 0.66 ± 0.02 | 0.55 ± 0.03 | 0.92 ± 0.003 | 1.0 ± 0.0
locomotion   | 0.78 ± 0.002 | 0.71 ± 0.007 | 0.35 ± 0.02 | 0.43 ± 0.01 | 0.80 ± 0.02  | 1.0 ± 0.0
manipulation | 0.91 ± 4e-5  | 0.90 ± 8e-4  | 0.77 ± 0.02 | 0.79 ± 0.02 | 0.95 ± 0.006 | 1.0 ± 0.0
average      | 0.76 ± 0.02  | 0.83 ± 0.01  | 0.59 ± 0.05 | 0.59 ± 0.03 | 0.90 ± 0.006 | 1.0 ± 0.0
"""
PAPER_RETURN = """
LunarLanderContinuous | 275.9 ± 6.83 | 280.8 ± 1.21 | 281.5 ± 7.22 | 282.8 ± 8.74 | 261.4 ± 18.9 | 282.2 ± 5.84
Walker2d              | 5305 ± 367   | 4724 ± 163   | 2866 ± 897   | 2986 ± 836   | 5660 ± 394   | 6028 ± 406
HalfCheetah           | 13122 ± 2877 | 8378 ± 1753  | 8065 ± 1799  | 7917 ± 293   | 11148 ± 3921 | 15131 ± 1279
Humanoid              | 6184 ± 717   | 5074 ± 310   | 1022 ± 397   | 2595 ± 334   | 7308 ± 244   | 7483 ± 288
Pusher                | -22.5 ± 1.40 | -21.2 ± 1.08 | -48.2 ± 2.05 | -41.3 ± 5.56 | -30.5 ± 1.85 | -21.3 ± 1.26
average               | 0.89 ± 0.07  | 0.81 ± 0.19  | 0.59 ± 0.33  | 0.64 ± 0.27  | 0.91 ± 0.10  | 1.00 ± 0.001
"""
PAPER_REPETITION = """
LunarLanderContinuous | 1.00 / 0.09  | 4.00 / 0.08  | 1.43 / 0.18  | 1.38 / 0.36  | 3.05 / 0.11  | 11.18 / 0.10
Walker2d              | 1.00 / 0.15  | 4.00 / 0.09  | 5.74 / 0.26  | 7.81 / 0.24  | 1.30 / 0.22  | 2.96 / 0.12
HalfCheetah           | 1.00 / 0.68  | 2.00 / 0.47  | 2.10 / 0.66  | 2.69 / 0.58  | 1.02 / 0.61  | 1.22 / 0.62
Humanoid              | 1.00 / 0.28  | 4.00 / 0.09  | 5.27 / 0.15  | 5.69 / 0.18  | 1.21 / 0.25  | 1.67 / 0.19
Pusher                | 1.00 / 0.022 | 4.00 / 0.019 | 1.15 / 0.032 | 1.01 / 0.018 | 1.75 / 0.031 | 1.69 / 0.015
average               | 1.00 / 0.245 | 3.60 / 0.150 | 3.12 / 0.257 | 3.71 / 0.276 | 1.66 / 0.244 | 3.75 / 0.208
"""
PAPER_WALKER2D = """
thigh | | | | | 1.30 | 3.70
leg   | | | | | 1.30 | 2.17
foot  | | | | | 1.30 | 3.44
"""
PAPER_TIME = """
LunarLanderContinuous | 300K, 60 min  | | | | | 150K, 36 min
BipedalWalker         | 600K, 108 min | | | | | 300K, 63 min
Walker2d              | 1.5M, 282 min | | | | | 700K, 167 min
Humanoid              | 3M, 595 min   | | | | | 1.5M, 365 min
"""


def papers_rows(table: str, key: str, first: list[str], algorithms: list[str]) -> list[list[str]]:
    """The row of a table above, if it has a cell for one of these algorithms, in italics."""
    for line in table.strip().splitlines():
        name, *cells = (cell.strip() for cell in line.split("|"))
        printed = dict(zip(ALGORITHMS.values(), cells, strict=True))
        if name == key and any(printed.get(a) for a in algorithms):
            return [[f"*{text}*" if text else "" for text in (*first, *(printed.get(a, "") for a in algorithms))]]
    return []


def base_name(task: str) -> str:
    """Walker2d for Walker2d-v4: versions of a task share the paper's row."""
    return re.sub(r"-v\d+$", "", task)


# Reading runs. What a reader should know about them is added to `notes`.

NEEDED = ("step", "seconds", "return")  # columns of every evaluation; the others may be missing in older data
PLAY = {"": "greedy", "_stochastic": "stochastic"}  # by the ending of the columns of evaluations.csv
RATES = {"": "APR / AFR", "_stochastic": "stochastic APR / AFR"}
MEASURES = ("return", "length", "decisions_per_step", "apr", "afr", "afr_per_dim")
METRICS = ("seconds", *(f"{name}{ending}" for name in MEASURES for ending in RATES))
# Options that do not make two runs different experiments.
NOT_SETTINGS = {"env_id", "total_timesteps", *(option.name for option in dataclasses.fields(RunArgs))}


@dataclass
class Run:
    name: str
    task: str
    algorithm: str
    seed: int
    budget: int  # total_timesteps
    points: dict[str, np.ndarray]  # the columns of evaluations.csv, an entry per evaluation
    settings: dict[str, Any] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)
    damage: str = ""

    @property
    def dimensions(self) -> int:
        return sum(re.fullmatch(r"apr_dim_\d+", name) is not None for name in self.points)

    @property
    def last_step(self) -> int:
        return int(self.points["step"][-1]) if len(self.points["step"]) else 0

    def last(self, metric: str) -> float:
        column = self.points.get(metric, ())
        return float(column[-1]) if len(column) else math.nan

    def cut(self, steps: int) -> "Run":
        keep = self.points["step"] <= steps
        return dataclasses.replace(self, points={name: column[keep] for name, column in self.points.items()})


def find_runs(roots: Iterable[Path], notes: list[str]) -> list[Path]:
    """Run directories (those with an args.json) below the roots."""
    found = set()
    for root in roots:
        for folder, subfolders, files in os.walk(root):
            subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))  # hidden: half made
            if "args.json" in files:
                found.add(Path(folder).resolve())
                subfolders.clear()
            elif any(name.startswith("events.") for name in files):
                notes.append(f"{folder} has logs but no args.json, so it is not a run of these scripts: left out")
    return sorted(found)


def read_runs(directories: list[Path], notes: list[str]) -> list[Run]:
    runs = []
    for directory in directories:
        try:
            runs.append(read_run(directory))
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = f"{type(error).__name__}: {one_line(error)}"
            notes.append(f"{directory.name}: args.json or evaluations.csv cannot be read ({reason}): left out")
    name_variants(runs, notes)
    return runs


def read_run(directory: Path) -> Run:
    about = json.loads((directory / "args.json").read_text())
    script, options = str(about["script"]), about["args"]
    points, damage = read_points(directory / "evaluations.csv")
    return Run(
        name=directory.name,
        task=str(options["env_id"]),
        algorithm=label(script, str(options.get("exp_name", script))),
        seed=int(options["seed"]),
        budget=int(options["total_timesteps"]),
        points=points,
        settings={name: value for name, value in options.items() if name not in NOT_SETTINGS},
        about=about,
        damage=damage,
    )


def read_points(path: Path) -> tuple[dict[str, np.ndarray], str]:
    """A run's evaluations, and what is wrong with the file: a killed run may leave its last line cut off."""
    text = path.read_text(errors="replace") if path.exists() else ""
    *lines, unfinished = text.split("\n")  # a whole line ends with a newline
    names = lines[0].split(",") if lines else []
    damage = "evaluations.csv is damaged or cut off at line {}"
    if not {*NEEDED} <= {*names}:
        return {name: np.array([]) for name in NEEDED}, damage.format(1) if text else ""
    rows: list[dict[str, float]] = []
    for line in lines[1:]:
        try:
            row = dict(zip(names, map(float, line.split(",")), strict=True))
        except ValueError:
            break
        if not row["step"] > (rows[-1]["step"] if rows else -1):
            break
        rows.append(row)
    damaged = unfinished or len(rows) < len(lines) - 1
    points = {name: np.array([row[name] for row in rows]) for name in names}
    return points, damage.format(len(rows) + 2) if damaged else ""


def label(script: str, exp_name: str) -> str:
    """SDAR for the script under its own name, "SDAR joint" for an --exp-name of sdar_continuous_action-joint."""
    short = ALGORITHMS.get(script, script)
    if exp_name == script:
        return short
    return f"{short} {exp_name[len(script) + 1 :]}" if exp_name.startswith(f"{script}-") else exp_name


def name_variants(runs: list[Run], notes: list[str]) -> None:
    """Runs of one task and name whose settings differ are different algorithms.

    The setting of most runs keeps the name, the others' differences join theirs.
    """
    for (task, algorithm), group in grouped(runs, lambda run: (run.task, run.algorithm)).items():
        names = sorted({name for run in group for name in run.settings})
        values = {name: {repr(run.settings[name]) for run in group if name in run.settings} for name in names}
        variants = grouped(group, partial(remark, names=[name for name in names if len(values[name]) > 1]))
        usual = max(variants, key=lambda told: (len(variants[told]), sum(run.last_step for run in variants[told])))
        for told in variants.keys() - {usual}:
            for run in variants[told]:
                run.algorithm += f" ({told})"
        if len(variants) > 1:
            notes.append(f"{task}, {algorithm}: settings differ; without a remark it is {usual}")


def remark(run: Run, names: list[str]) -> str:
    return ", ".join(f"{name.replace('_', '-')} {run.settings.get(name)}" for name in names)


def grouped(entries: Iterable[Any], key: Callable[[Any], Any]) -> dict[Any, list[Any]]:
    groups = collections.defaultdict(list)
    for entry in entries:
        groups[key(entry)].append(entry)
    return dict(groups)


def without_copies(runs: list[Run], notes: list[str]) -> list[Run]:
    """A run that was given as its folder and in CSVs of reports counts once: as it got furthest."""
    kept = []
    for same in grouped(runs, lambda run: (run.name, run.task, run.algorithm, run.seed)).values():
        furthest = max(same, key=lambda run: run.last_step)
        kept.append(furthest)
        if len(same) > 1:
            notes.append(f"{furthest.name}: given {len(same)} times, the one at step {furthest.last_step:,} is used")
    return kept


# evaluations.csv: all evaluations of all runs, from which a report can be drawn again without them.

KEYS = ("run", "task", "algorithm", "seed", "total_timesteps", "step")


def write_evaluations(path: Path, runs: list[Run], random_returns: dict[str, list[float]]) -> None:
    widest_first = sorted(runs, key=lambda run: -len(run.points))  # with more dimensions, they are still in order
    columns = dict.fromkeys((*KEYS, *(name for run in widest_first for name in run.points)))
    unfinished = path.with_name(f".{path.name}")  # what it replaces may be the only file that has these runs
    with open(unfinished, "w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        for run in runs:
            for i, step in enumerate(run.points["step"]):
                keys = run.name, run.task, run.algorithm, run.seed, run.budget, int(step)
                numbers = {name: f"{column[i]:.7g}" for name, column in run.points.items() if not math.isnan(column[i])}
                writer.writerow({**numbers, **dict(zip(KEYS, keys, strict=True))})
        for task, returns in random_returns.items():
            for i, value in enumerate(returns):
                keys = RANDOM, task, RANDOM, i, 0, 0
                writer.writerow({**dict(zip(KEYS, keys, strict=True)), "return": f"{value:.7g}"})
    os.replace(unfinished, path)


def read_evaluations(path: Path) -> tuple[list[Run], dict[str, list[float]]]:
    """The runs of an earlier report and its returns of the random policy."""
    runs, random_returns = [], collections.defaultdict(list)
    try:
        with open(path, newline="") as file:
            names, *lines = csv.reader(file)
        missing = [name for name in (*KEYS, *NEEDED) if name not in names]
        if missing:
            raise ValueError(f"there is no column {missing[0]}")
        rows = [dict(zip(names, line, strict=True)) for line in lines]
        for (name, task, algorithm, seed, budget), group in grouped(rows, itemgetter(*KEYS[:-1])).items():
            if algorithm == RANDOM:
                random_returns[task] += [float(row["return"]) for row in group]
                continue
            filled = [n for n in names if n in NEEDED or (n not in KEYS and any(row[n] for row in group))]
            points = {n: np.array([float(row[n] or "nan") for row in group]) for n in filled}
            if not (np.diff(points["step"]) > 0).all():
                raise ValueError(f"the steps of {name} do not increase")
            runs.append(Run(name, task, algorithm, int(seed), int(budget), points))
    except OSError as error:
        fail(f"cannot read {path}: {error.strerror}")
    except (csv.Error, ValueError) as error:
        fail(f"{path} is not an evaluations.csv of a report ({one_line(error)}); to read a run, name its folder")
    return runs, dict(random_returns)


# Which runs are averaged.


@dataclass
class Group:
    """Runs of one algorithm on one task, one per seed, all evaluated up to the same step."""

    runs: list[Run]

    @property
    def steps(self) -> np.ndarray:
        """The steps at which all of them were evaluated."""
        common = set.intersection(*(set(run.points["step"].tolist()) for run in self.runs))
        return np.array(sorted(common))

    def matrix(self, metric: str) -> np.ndarray:
        """(runs, steps)"""
        steps = self.steps
        return np.array([run.points[metric][np.isin(run.points["step"], steps)] for run in self.runs])

    def final(self, metric: str) -> np.ndarray:
        return np.array([run.last(metric) for run in self.runs])

    def auc(self, metric: str = "return") -> np.ndarray:
        return np.array([area_under_curve(run.points["step"], run.points[metric]) for run in self.runs])


@dataclass
class Task:
    name: str
    steps: int  # the budget at which its runs are compared
    groups: dict[str, Group]  # by algorithm
    others: list[Run]  # drawn, but never averaged


def choose(runs: list[Run], max_steps: int | None, notes: list[str]) -> list[Task]:
    """The runs that can be compared, by task."""
    tasks = []
    for name, members in sorted(grouped(runs, lambda run: run.task).items(), key=lambda item: task_order(item[0])):
        steps, kept, others = cut_to_one_budget(members, max_steps, notes)
        tasks.append(Task(name, steps, one_run_per_seed(name, kept, notes), others))
    return tasks


def cut_to_one_budget(runs: list[Run], max_steps: int | None, notes: list[str]) -> tuple[int, list[Run], list[Run]]:
    """The most common budget of a task's runs, the runs that are compared there, and the others.

    A longer run is cut there, a shorter, unfinished or damaged one is left out of every average.
    """
    budgets = [min(run.budget, max_steps or run.budget) for run in runs]
    complete = [budget for run, budget in zip(runs, budgets, strict=True) if run.last_step >= budget]
    counts = collections.Counter(complete or budgets)
    steps = max(counts, key=lambda budget: (counts[budget], budget))
    kept, others = [], []
    for run, budget in zip(runs, budgets, strict=True):
        if run.damage:
            notes.append(f"{run.name}: {run.damage}; what comes before is used")
        reason = reason_to_leave_out(run, budget, steps)
        if reason:
            notes.append(f"{run.name}: {reason}: left out of averages")
        elif budget > steps:
            notes.append(f"{run.name}: longer than the others, cut at step {steps:,} of {run.budget:,}")
        (others if reason else kept).append(run.cut(steps))
    return steps, kept, others


def one_run_per_seed(task: str, runs: list[Run], notes: list[str]) -> dict[str, Group]:
    """A group for each algorithm."""
    groups = {}
    for algorithm, group in sorted(grouped(runs, lambda run: run.algorithm).items(), key=lambda item: rank(item[0])):
        by_seed = grouped(sorted(group, key=lambda run: (run.seed, run.name)), lambda run: run.seed)
        for seed, same in by_seed.items():
            notes += [f"{run.name}: seed {seed} again, {same[-1].name} is used" for run in same[:-1]]
        groups[algorithm] = Group([same[-1] for same in by_seed.values()])
        if len(groups[algorithm].steps) < max(len(run.points["step"]) for run in groups[algorithm].runs):
            notes.append(f"{task}, {algorithm}: evaluated at different steps; the curve shows those in common")
    seeds = {algorithm: {run.seed for run in group.runs} for algorithm, group in groups.items()}
    for algorithm, own in seeds.items():
        missing = ", ".join(map(str, sorted(set().union(*seeds.values()) - own)))
        if missing:
            notes.append(f"{task}, {algorithm}: {plural(len(own), 'seed')}, without {missing}")
    return groups


def reason_to_leave_out(run: Run, budget: int, steps: int) -> str:
    returns = run.points["return"][run.points["step"] <= steps]
    if not len(returns):
        return "no evaluation yet"
    if not np.isfinite(returns).all():
        step = int(run.points["step"][np.flatnonzero(~np.isfinite(returns))[0]])
        return f"its return is not finite at step {step:,}"
    if run.last_step < budget:
        return f"unfinished, at step {run.last_step:,} of {budget:,}"
    if budget < steps:
        return f"{budget:,} steps, where the other runs have {steps:,}"
    if steps not in run.points["step"]:
        return f"longer than the others and not evaluated at their last step, {steps:,}"
    return ""


def task_order(task: str) -> tuple[int, str]:
    known = [name for names in CATEGORIES.values() for name in names]
    base = base_name(task)
    return (known.index(base) if base in known else len(known), task)


def rank(algorithm: str) -> tuple[int, str]:
    known = list(ALGORITHMS.values())
    return (known.index(algorithm) if algorithm in known else len(known), algorithm)


# Statistics.


def area_under_curve(steps: np.ndarray, returns: np.ndarray) -> float:
    """The learning curve's area over environment steps, divided by their number: its mean height."""
    if len(steps) < 2:
        return float(returns[-1])
    return float(np.trapezoid(returns, steps) / (steps[-1] - steps[0]))


def n_score(value: Any, zero: float, one: float) -> Any:
    """(Z - Z₀)/(Z₁ - Z₀)"""
    return (value - zero) / (one - zero)


def standard_error(values: Iterable[float]) -> float:
    values = np.asarray(list(values), float)
    if len(values) < 2 or not np.isfinite(values).all():
        return math.nan
    return float(values.std(ddof=1) / math.sqrt(len(values)))


def reach(group: Group, target: float) -> tuple[int, float] | None:
    """The first evaluation, as step and mean seconds, at which the mean return is at least `target`."""
    above = np.flatnonzero(group.matrix("return").mean(axis=0) >= target)
    if not len(above):
        return None
    return int(group.steps[above[0]]), float(group.matrix("seconds")[:, above[0]].mean())


def probability_of_improvement(x: np.ndarray, y: np.ndarray) -> float:
    """P(X > Y), ties counting half, averaged over tasks; x and y are (runs, tasks). rliable's measure, vectorised."""
    difference = x[:, None] - y[None]
    return float(((difference > 0) + 0.5 * (difference == 0)).mean(axis=(0, 1)).mean())


def intervals(scores: dict[str, Any], function: Callable[..., Any], resamples: int) -> dict[str, tuple[Any, Any, Any]]:
    """For each name the estimate and the bounds of its 95 % stratified-bootstrap interval, by rliable."""
    from rliable.library import get_interval_estimates

    np.random.seed(0)  # rliable draws from the global generator
    points, bounds = get_interval_estimates(scores, lambda *a: np.atleast_1d(function(*a)), reps=resamples)
    return {name: (points[name], *bounds[name]) for name in scores}


def bounds_of(values: dict[str, tuple[Any, Any, Any]]) -> dict[str, tuple[float, float, float]]:
    """Of intervals of a single number."""
    return {name: tuple(float(part[0]) for part in parts) for name, parts in values.items()}


def measure_random(task: str, episodes: int, cache: Path) -> list[float]:
    """Returns of the uniformly random policy on a task, measured once."""
    try:
        known = json.loads(cache.read_text())
    except (OSError, ValueError):
        known = {}  # never measured, or interrupted while writing
    if len(known.get(task, ())) != episodes:
        env, generator, known[task] = make_env(task), np.random.default_rng(0), []
        for i in tqdm(range(episodes), desc=f"random policy on {task}", unit=" episodes", leave=False, disable=None):
            _, info = env.reset(seed=derived_seed(0, EVALUATION, i))
            while "episode" not in info:
                *_, info = env.step(generator.uniform(-1, 1, env.action_space.shape).astype(np.float32))
            known[task].append(float(info["episode"]["r"]))
        env.close()
        cache.write_text(json.dumps(known))
    return known[task]


# Tables.


@dataclass
class Table:
    """Cells are Markdown: **best**, *the paper's*. `records` are the same numbers one by one, for the CSV."""

    name: str
    title: str
    caption: str
    columns: list[str]
    rows: list[list[str]] = field(default_factory=list)
    records: list[dict[str, Any]] = field(default_factory=list)

    def add_row(self, first: list[str], cells: dict[str, str], values: dict[str, float] | None = None) -> None:
        """A row with a cell for each algorithm that has one; the one of the highest value is the best."""
        best = max(values, key=values.get) if values else None
        shown = {name: f"**{cell}**" if name == best else cell for name, cell in cells.items()}
        self.rows.append([*first, *(shown.get(name, "") for name in self.columns[len(first) :])])

    def record(self, **numbers: Any) -> None:
        self.records.append(numbers)

    def html(self) -> str:
        def cells(row: list[str], tag: str) -> str:
            return "".join(f"<{tag}>{emphasis(html.escape(cell), '<b>{}</b>', '<i>{}</i>')}</{tag}>" for cell in row)

        body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in self.rows)
        head = f"<thead><tr>{cells(self.columns, 'th')}</tr></thead>"
        return f'<div class="scroll"><table id="{self.name}">{head}<tbody>{body}</tbody></table></div>'

    def latex(self) -> str:
        def line(row: list[str]) -> str:
            return " & ".join(emphasis(latex_escape(cell), r"\textbf{{{}}}", r"\emph{{{}}}") for cell in row) + r" \\"

        body = "\n".join(map(line, self.rows))
        return (
            "\\begin{table}\n\\centering\n"
            f"\\caption{{{latex_escape(self.caption)}}}\n\\label{{tab:{self.name}}}\n"
            f"\\begin{{tabular}}{{l{'c' * (len(self.columns) - 1)}}}\n\\toprule\n{line(self.columns)}\n\\midrule\n"
            f"{body}\n\\bottomrule\n\\end{{tabular}}\n\\end{{table}}\n"
        )

    def write(self, folder: Path) -> None:
        text = f"### {self.title}\n\n{self.caption}\n\n{markdown(self.columns, self.rows)}\n"
        (folder / f"{self.name}.md").write_text(text)
        (folder / f"{self.name}.tex").write_text(self.latex())
        with open(folder / f"{self.name}.csv", "w", newline="") as file:
            fields = list(dict.fromkeys(name for record in self.records for name in record))
            writer = csv.DictWriter(file, fields, lineterminator="\n")
            writer.writeheader()
            writer.writerows(self.records)


def emphasis(text: str, bold: str, italic: str) -> str:
    text = re.sub(r"\*\*(.+?)\*\*", lambda found: bold.format(found[1]), text)
    return re.sub(r"\*(.+?)\*", lambda found: italic.format(found[1]), text)


def latex_escape(text: str) -> str:
    text = text.replace("\\", r"\textbackslash ")
    text = re.sub(r"([&%$#_{}])", r"\\\1", text)
    symbols = {"±": r"$\pm$", "∞": r"$\infty$", "≥": r"$\geq$", "₀": "$_0$", "₁": "$_1$", "·": r"$\cdot$"}
    text = "".join(symbols.get(character, character) for character in text)
    return re.sub(r"(?<![\w.])-(?=\d)", "$-$", text)


def number(value: float, decimals: int | None = None) -> str:
    """A plain decimal, by default of four digits, but no more than two decimals."""
    if math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    return f"{value:.{usual_decimals(value) if decimals is None else decimals}f}"


def usual_decimals(value: float) -> int:
    return min(max(3 - math.floor(math.log10(abs(value) or 1)), 0), 2)


def plus_minus(mean: float, error: float, decimals: int | None = None) -> str:
    if decimals is None and math.isfinite(mean):
        decimals = usual_decimals(mean)
    return number(mean, decimals) + ("" if math.isnan(error) else f" ± {number(error, decimals)}")


def with_error(values: Iterable[float], decimals: int | None = None) -> str:
    values = np.asarray(list(values), float)
    return plus_minus(float(values.mean()), standard_error(values), decimals)


def interval(estimate: float, low: float, high: float, decimals: int) -> str:
    return f"{number(estimate, decimals)} [{number(low, decimals)}, {number(high, decimals)}]"


def thousands(steps: float) -> str:
    """300K for 300 000."""
    for size, suffix in ((1e6, "M"), (1e3, "K")):
        if steps >= size:
            return f"{steps / size:.4g}{suffix}"
    return f"{steps:.4g}"


def duration(seconds: float) -> str:
    if math.isnan(seconds):
        return "–"
    return f"{seconds:.0f} s" if seconds < 60 else f"{seconds / 60:.{1 if seconds < 600 else 0}f} min"


def rates_of(apr: float, afr: float) -> str:
    return f"{number(apr, 2)} / {number(afr, 3)}"


def mean_of(values: np.ndarray) -> float:
    """The mean of what is a number: an episode of one step has no repetition rate."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else math.nan


def ordered(groups: Iterable[Iterable[str]]) -> list[str]:
    """Every algorithm that is in one of the groups."""
    return sorted({algorithm for group in groups for algorithm in group}, key=rank)


def auc_scores(tasks: list[Task], zeros: dict[str, float]) -> dict[str, dict[str, np.ndarray]]:
    """By task and algorithm, n-scores of the AUC of each run, 1 being the mean of the task's best algorithm.

    Tasks on which nothing beats the random policy have none.
    """
    scores = {}
    for task in tasks:
        areas = {algorithm: group.auc() for algorithm, group in task.groups.items()}
        zero, best = zeros.get(task.name, math.inf), max(means(areas).values())
        if best > zero:
            scores[task.name] = {algorithm: n_score(area, zero, best) for algorithm, area in areas.items()}
    return scores


def category_table(scores: dict[str, dict[str, np.ndarray]]) -> Table:
    """Table 1."""
    algorithms = ordered(scores.values())
    table = Table(
        "table1_auc",
        "Table 1: normalised AUC",
        "Area under the learning curve by category, 0 = uniformly random policy, 1 = the best algorithm of each task; "
        "mean ± standard error over the category's tasks (none with one task). The average is over categories, its "
        "error theirs combined. In italics: the paper, whose categories have 3, 5 and 3 tasks.",
        ["category", *algorithms],
    )
    parts: dict[str, list[tuple[float, float]]] = collections.defaultdict(list)  # mean and error in each category
    categories = grouped(scores, category)
    for name, here in categories.items():
        values = {a: np.array([scores[task][a].mean() for task in here if a in scores[task]]) for a in algorithms}
        values = {a: of_tasks for a, of_tasks in values.items() if len(of_tasks)}
        cells = {a: with_error(of_tasks, 2) + share(len(of_tasks), len(here)) for a, of_tasks in values.items()}
        table.add_row([f"{name} ({plural(len(here), 'task')})"], cells, means(values))
        table.rows += papers_rows(PAPER_AUC, name, [f"{name}, paper"], algorithms)
        for a, of_tasks in values.items():
            mean, error = of_tasks.mean(), standard_error(of_tasks)
            parts[a].append((mean, error))
            table.record(category=name, algorithm=a, normalised_auc=mean, standard_error=error, tasks=len(of_tasks))
    cells, averages = {}, {}
    for a in algorithms:
        centres, errors = np.transpose(parts[a])
        mean, error = centres.mean(), math.sqrt((errors**2).sum()) / len(errors)
        averages[a], cells[a] = mean, plus_minus(mean, error, 2) + share(len(parts[a]), len(categories), "categories")
        tasks = sum(a in by_algorithm for by_algorithm in scores.values())
        table.record(category="average", algorithm=a, normalised_auc=mean, standard_error=error, tasks=tasks)
    table.add_row(["average"], cells, averages)
    table.rows += papers_rows(PAPER_AUC, "average", ["average, paper"], algorithms)
    return table


def auc_table(scores: dict[str, dict[str, np.ndarray]], zeros: dict[str, float]) -> Table:
    """The same by task."""
    table = Table(
        "auc_by_task",
        "Normalised AUC by task",
        "Area under the learning curve, 0 = uniformly random policy, 1 = the best algorithm here; mean ± standard "
        "error over seeds.",
        ["task", *ordered(scores.values())],
    )
    for task, by_algorithm in scores.items():
        table.add_row([task], {a: with_error(values, 2) for a, values in by_algorithm.items()}, means(by_algorithm))
        for algorithm, values in by_algorithm.items():
            numbers = {"normalised_auc": values.mean(), "standard_error": standard_error(values)}
            table.record(task=task, algorithm=algorithm, seeds=len(values), **numbers, random_return=zeros[task])
    return table


def comparison_table(tasks: list[Task], resamples: int) -> Table:
    """The same in units of return, for both ways of playing, each compared with SDAR's."""
    table = Table(
        "auc_intervals",
        "Mean return over training, by task",
        "Area under the learning curve, divided by the steps, of greedy and of stochastic play (which is what training "
        "plays), and the probability that it is higher in a run of SDAR than in one of the algorithm; 95 % bootstrap "
        "intervals over seeds.",
        ["task", "", *ordered(task.groups for task in tasks)],
    )
    for task in tasks:
        for ending, play in PLAY.items():
            metric = f"return{ending}"
            areas = {
                algorithm: group.auc(metric)[:, None]
                for algorithm, group in task.groups.items()
                if all(metric in run.points for run in group.runs)
            }
            if not areas:
                continue
            better = {a: [areas["SDAR"], area] for a, area in areas.items() if a != "SDAR"} if "SDAR" in areas else {}
            height = bounds_of(intervals(areas, np.mean, resamples))
            improvement = bounds_of(intervals(better, probability_of_improvement, resamples))
            cells = {a: interval(*values, usual_decimals(values[0])) for a, values in height.items()}
            table.add_row([task.name, f"{play} return"], cells, {a: values[0] for a, values in height.items()})
            if improvement:
                table.add_row(["", "P(SDAR is better)"], {a: interval(*v, 2) for a, v in improvement.items()})
            for measure, values in (("mean_return", height), ("probability_sdar_is_better", improvement)):
                for algorithm, (estimate, low, high) in values.items():
                    numbers = {"estimate": estimate, "low_95": low, "high_95": high}
                    what = {"task": task.name, "play": play, "algorithm": algorithm, "measure": measure}
                    table.record(**what, **numbers, seeds=len(areas[algorithm]))
    return table


def category(task: str) -> str:
    return next((name for name, members in CATEGORIES.items() if base_name(task) in members), "other")


def means(values: dict[str, np.ndarray]) -> dict[str, float]:
    return {name: float(column.mean()) for name, column in values.items()}


def share(count: int, total: int, of: str = "tasks") -> str:
    return "" if count == total else f" ({count} of {total} {of})"


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def repetition(task: Task, ending: str) -> dict[str, tuple[float, float]]:
    """APR and AFR of each algorithm that has them, from the columns with this ending."""
    columns = f"apr{ending}", f"afr_per_dim{ending}"
    rates = {a: tuple(mean_of(group.final(column)) for column in columns) for a, group in task.groups.items()}
    return {algorithm: both for algorithm, both in rates.items() if not math.isnan(both[0])}


def return_table(tasks: list[Task], zeros: dict[str, float]) -> Table:
    """Table 2."""
    algorithms = ordered(task.groups for task in tasks)
    table = Table(
        "table2_return",
        "Table 2: return, APR and AFR",
        "Greedy return at the last evaluation, mean ± standard error over seeds; action persistence rate / action "
        "fluctuation rate, of greedy play and, where it is known, of stochastic play (the paper does not say which its "
        "numbers are of). AFR is the mean absolute change per dimension, the scale of the paper's numbers (the CSV "
        "has the Euclidean norm too, as afr). n-score: 0 = uniformly random policy, 1 = SAC; mean ± standard error "
        "over tasks. In italics: the paper, at its own budgets.",
        ["task", "", *algorithms],
    )
    scores: dict[str, list[float]] = collections.defaultdict(list)
    for task in tasks:
        returns = {algorithm: group.final("return") for algorithm, group in task.groups.items()}
        for algorithm, final in returns.items():
            score = returns_n_score(task, zeros, final.mean())
            scores[algorithm] += [score] if math.isfinite(score) else []
            what = {"task": task.name, "algorithm": algorithm, "seeds": len(final), "steps": task.steps}
            numbers = {metric: mean_of(task.groups[algorithm].final(metric)) for metric in METRICS}
            table.record(**what, standard_error=standard_error(final), n_score=score, **numbers)
        counts = sorted({len(final) for final in returns.values()})
        seeds = plural(counts[0], "seed") if len(counts) == 1 else f"{counts[0]} to {counts[-1]} seeds"
        first = [task.name, f"return, {seeds}, {thousands(task.steps)} steps"]
        table.add_row(first, {a: with_error(final) for a, final in returns.items()}, means(returns))
        for ending, title in RATES.items():
            rates = repetition(task, ending)
            if rates:
                table.add_row(["", title], {a: rates_of(*both) for a, both in rates.items()})
        table.rows += papers_rows(PAPER_RETURN, base_name(task.name), ["paper", "return"], algorithms)
        table.rows += papers_rows(PAPER_REPETITION, base_name(task.name), ["paper", RATES[""]], algorithms)
    scores = {algorithm: values for algorithm, values in scores.items() if values}
    first = "average"
    if scores:
        scored = max(map(len, scores.values()))
        cells = {a: with_error(values, 2) + share(len(values), scored) for a, values in scores.items()}
        table.add_row([first, "n-score"], cells, {a: float(np.mean(values)) for a, values in scores.items()})
        first = ""
    for ending, title in RATES.items():
        by_task = [repetition(task, ending) for task in tasks]
        rates = {a: [rates[a] for rates in by_task if a in rates] for a in ordered(by_task)}
        if rates:
            cells = {a: rates_of(*np.mean(r, axis=0)) + share(len(r), len(tasks)) for a, r in rates.items()}
            table.add_row([first, title], cells)
            first = ""
    if scores:
        table.rows += papers_rows(PAPER_RETURN, "average", ["paper", "n-score"], algorithms)
    table.rows += papers_rows(PAPER_REPETITION, "average", ["paper", RATES[""]], algorithms)
    return table


def returns_n_score(task: Task, zeros: dict[str, float], value: Any) -> Any:
    """0 = random, 1 = SAC's mean final return; NaN where SAC is not there or no better than random."""
    if "SAC" not in task.groups or task.name not in zeros:
        return value * math.nan
    one = task.groups["SAC"].final("return").mean()
    return n_score(value, zeros[task.name], one) if one > zeros[task.name] else value * math.nan


def names_of_dimensions(task: str, count: int) -> list[str]:
    try:
        return dimension_names(make_env(task))
    except SystemExit:  # the task is not installed here, but the numbers are there
        return [f"a{i}" for i in range(count)]


def dimension_table(tasks: list[Task], wanted: str | None) -> Table | None:
    """Table 3."""
    width = {task.name: min(group.runs[0].dimensions for group in task.groups.values()) for task in tasks}
    walkers = [name for name in width if base_name(name) == "Walker2d"]
    wanted = wanted or (walkers[0] if walkers else max(width, key=width.get))
    task = next((task for task in tasks if task.name == wanted and width[wanted] > 0), None)
    if task is None:
        return None
    is_walker = base_name(wanted) == "Walker2d"
    table = Table(
        "table3_dimensions",
        f"Table 3: APR by action dimension, {wanted}",
        "Action persistence rate of each action dimension at the last evaluation, mean ± standard error over seeds."
        + (" In italics: the paper, where left and right joints share a row." if is_walker else ""),
        ["dimension", *task.groups],
    )
    for i, name in enumerate(names_of_dimensions(wanted, width[wanted])):
        rates = {algorithm: group.final(f"apr_dim_{i}") for algorithm, group in task.groups.items()}
        title = name if name == f"a{i}" else f"{name} (a{i})"
        table.add_row([title], {algorithm: with_error(values, 2) for algorithm, values in rates.items()})
        for algorithm, values in rates.items():
            numbers = {"apr": float(values.mean()), "standard_error": standard_error(values), "seeds": len(values)}
            table.record(task=wanted, dimension=i, name=name, algorithm=algorithm, **numbers)
    table.add_row(["return"], {a: with_error(group.final("return")) for a, group in task.groups.items()})
    table.add_row(["AFR"], {a: number(mean_of(group.final("afr_per_dim")), 3) for a, group in task.groups.items()})
    for joint in ("thigh", "leg", "foot") if is_walker else ():
        table.rows += papers_rows(PAPER_WALKER2D, joint, [f"{joint}, paper"], list(task.groups))
    return table


def time_table(tasks: list[Task]) -> Table | None:
    """The paper's Table 6: what it takes to reach SAC's final return."""
    tasks = [task for task in tasks if "SAC" in task.groups]
    if not tasks:
        return None
    algorithms = ordered(task.groups for task in tasks)
    table = Table(
        "time_cost",
        "Time cost: steps and wall-clock to SAC's final return",
        "The first evaluation at which the mean over seeds is at least SAC's final return (in parentheses), and the "
        "mean time spent until then, evaluations included; for SAC, its whole training. Wall-clock compares only "
        "between runs of one machine under one load. In italics: the paper, on an RTX 3090.",
        ["task", *algorithms],
    )
    for task in tasks:
        target = float(task.groups["SAC"].final("return").mean())
        cells = {}
        for algorithm, group in task.groups.items():
            total = float(group.final("seconds").mean())
            reached = (task.steps, total) if algorithm == "SAC" else reach(group, target)
            cells[algorithm] = f"{thousands(reached[0])}, {duration(reached[1])}" if reached else "not reached"
            steps, seconds = reached or (math.nan, math.nan)
            what = {"task": task.name, "algorithm": algorithm, "seeds": len(group.runs), "target_return": target}
            speed = task.steps / total if total else math.nan
            table.record(**what, steps=steps, seconds=seconds, steps_per_second=speed)
        table.add_row([f"{task.name} ({number(target)})"], cells)
        table.rows += papers_rows(PAPER_TIME, base_name(task.name), ["paper"], algorithms)
    return table


def run_table(runs: list[Run]) -> Table:
    columns = ["task", "algorithm", "seed", "steps", "return", "time", "commit", "device", "run"]
    table = Table("runs", "Runs", "Every run that was read, and its last evaluation.", columns)
    for run in sorted(runs, key=lambda run: (task_order(run.task), rank(run.algorithm), run.seed, run.name)):
        last = {metric: run.last(metric) for metric in METRICS}
        about = {name: run.about.get(name) for name in ("commit", "device", "threads", "python")}
        packages = " ".join(f"{name} {version}" for name, version in (run.about.get("packages") or {}).items())
        what = {"run": run.name, "task": run.task, "algorithm": run.algorithm, "seed": run.seed, "budget": run.budget}
        table.record(**what, step=run.last_step, **last, **about, packages=packages)
        progress = f"{thousands(run.last_step)} of {thousands(run.budget)}"
        commit = re.sub(r"^(\w{8})\w*", r"\1", about["commit"] or "")
        cells = [run.task, run.algorithm, str(run.seed), progress, number(last["return"]), duration(last["seconds"])]
        table.rows.append([*cells, commit, about["device"] or "", run.name])
    return table


# Aggregates over tasks, with rliable.

SCORES = {"normalised_auc": "normalised AUC", "n_score": "n-scores"}


@dataclass
class Aggregates:
    tasks: list[str]
    iqm: dict[str, tuple[Any, Any, Any]]
    improvement: dict[str, tuple[Any, Any, Any]]  # P(SDAR > the algorithm)
    profiles: dict[str, tuple[Any, Any, Any]]
    thresholds: np.ndarray


def final_scores(tasks: list[Task], zeros: dict[str, float], notes: list[str]) -> dict[str, dict[str, np.ndarray]]:
    """By task and algorithm, n-scores of the final return of each run."""
    scores = {}
    for task in tasks:
        if math.isnan(returns_n_score(task, zeros, 1.0)):
            notes.append(f"{task.name}: no n-scores, because SAC or the random policy is missing or SAC is not better")
        else:
            finals = {algorithm: group.final("return") for algorithm, group in task.groups.items()}
            scores[task.name] = {a: returns_n_score(task, zeros, final) for a, final in finals.items()}
    return scores


def score_matrices(
    scores: dict[str, dict[str, np.ndarray]], notes: list[str]
) -> tuple[dict[str, np.ndarray], list[str]]:
    """Scores (runs, tasks) for each algorithm on the tasks that all have, and those tasks."""
    main = [name for name in ordered(scores.values()) if name in COLOURS]
    shared = []
    for task, by_algorithm in scores.items():
        missing = ", ".join(name for name in main if name not in by_algorithm)
        if missing:
            notes.append(f"{task}: not in the aggregates over tasks, because {missing} has no run there")
        else:
            shared.append(task)
    matrices = {}
    for algorithm in ordered(scores[task] for task in shared):
        if not all(algorithm in scores[task] for task in shared):
            notes.append(f"{algorithm}: not in the aggregates over tasks, because it has no run on some of them")
            continue
        columns = [scores[task][algorithm] for task in shared]
        fewest = min(map(len, columns))
        if fewest < max(map(len, columns)):
            notes.append(
                f"{algorithm}: the aggregates use {plural(fewest, 'seed')} of each task, the fewest that one has"
            )
        matrices[algorithm] = np.stack([column[:fewest] for column in columns], axis=1)
    return matrices, shared


def aggregate(scores: dict[str, dict[str, np.ndarray]], resamples: int, notes: list[str]) -> Aggregates | None:
    from rliable.metrics import aggregate_iqm

    matrices, names = score_matrices(scores, notes)
    if not matrices:
        return None
    few = [algorithm for algorithm, matrix in matrices.items() if len(matrix) < 3]
    if few:
        notes.append(f"{', '.join(few)}: fewer than 3 seeds, so the bootstrap intervals say little")
    everything = np.concatenate([matrix.ravel() for matrix in matrices.values()])
    thresholds = np.linspace(min(0.0, everything.min()), max(1.2, everything.max()), 101)
    sdar = matrices.get("SDAR")
    pairs = {a: [sdar, matrix] for a, matrix in matrices.items() if a != "SDAR"} if sdar is not None else {}
    return Aggregates(
        names,
        intervals(matrices, aggregate_iqm, resamples),
        intervals(pairs, probability_of_improvement, resamples),
        intervals(matrices, lambda matrix: (matrix[..., None] > thresholds).mean(axis=(0, 1)), resamples),
        thresholds,
    )


def aggregate_table(results: dict[str, Aggregates]) -> Table:
    """`results` by what is aggregated, of SCORES."""
    by_tasks = grouped(results, lambda name: ", ".join(results[name].tasks))
    over = (f"{' and '.join(SCORES[name] for name in names)} over {tasks}" for tasks, names in by_tasks.items())
    table = Table(
        "aggregates",
        "Interquartile mean and probability of improvement",
        f"Of {'; '.join(over)}: interquartile mean (IQM) over all runs, and the probability that a run of SDAR has "
        "more than one of the algorithm on the same task; 95 % stratified-bootstrap intervals. 0 = uniformly random "
        "policy; 1 = the task's best algorithm for the AUC, SAC for n-scores, which are of final returns.",
        ["algorithm", *(column for name in results for column in (f"IQM of {SCORES[name]}", "P(SDAR is better)"))],
    )
    for algorithm in ordered(result.iqm for result in results.values()):
        cells = []
        for name, result in results.items():
            measures = {"iqm": result.iqm, "probability_sdar_is_better": result.improvement}
            for measure, values in ((measure, bounds_of(values)) for measure, values in measures.items()):
                if algorithm not in values:  # SDAR is not compared with itself
                    cells.append("")
                    continue
                estimate, low, high = values[algorithm]
                cells.append(interval(estimate, low, high, 2))
                numbers = {"estimate": estimate, "low_95": low, "high_95": high}
                what = {"algorithm": algorithm, "score": name, "measure": measure}
                table.record(**what, **numbers, tasks=len(result.tasks))
        table.rows.append([algorithm, *cells])
    return table


# Figures.

PLOT_STYLE = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "pdf.fonttype": 42,  # text stays text in a paper's PDF
    "savefig.dpi": 160,
    "figure.constrained_layout.use": True,
}


def palette(algorithms: list[str]) -> dict[str, str]:
    extra = itertools.cycle(MORE_COLOURS)
    return {algorithm: COLOURS.get(algorithm) or next(extra) for algorithm in algorithms}


def grid(count: int, width: float = 3.1, height: float = 2.4) -> tuple[Any, list[Any]]:
    columns = min(4, count) if count != 5 else 3
    rows = math.ceil(count / columns)
    figure, axes = plt.subplots(rows, columns, figsize=(max(width * columns, 4), height * rows + 0.4), squeeze=False)
    for axis in axes.flat[count:]:
        axis.set_visible(False)
    return figure, list(axes.flat[:count])


def shared_legend(figure: Any, axes: list[Any]) -> None:
    """One legend above all axes, in as many columns as its width allows."""
    handles = {text: handle for axis in axes for handle, text in zip(*axis.get_legend_handles_labels(), strict=True)}
    names = ordered([handles])
    for columns in range(min(8, len(names)), 0, -1):
        legend = figure.legend([handles[n] for n in names], names, loc="outside upper center", ncols=columns)
        if columns == 1 or legend.get_window_extent().width <= figure.bbox.width:
            break
        legend.remove()


def draw_curves(axis: Any, task: Task, colours: dict[str, str], count_seeds: bool) -> None:
    for algorithm, group in task.groups.items():
        returns, steps, colour = group.matrix("return"), group.steps, colours[algorithm]
        mean = returns.mean(axis=0)
        name = f"{algorithm} ({plural(len(returns), 'seed')})" if count_seeds else algorithm
        axis.plot(steps, mean, color=colour, lw=1.8 if algorithm == "SDAR" else 1.3, label=name, zorder=3)
        if len(returns) > 1:
            error = returns.std(axis=0, ddof=1) / math.sqrt(len(returns))
            axis.fill_between(steps, mean - error, mean + error, color=colour, alpha=0.18, lw=0)
    for run in task.others:  # visible, never averaged
        axis.plot(run.points["step"], run.points["return"], color=colours[run.algorithm], lw=0.7, ls=":", zorder=2)
    axis.set_title(task.name)
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: thousands(value)))


def count_of_seeds(groups: Iterable[Group]) -> str:
    seeds = sorted({len(group.runs) for group in groups})
    return f"n = {'–'.join(map(str, seeds[:: max(1, len(seeds) - 1)]))}"


def overview_figure(tasks: list[Task], colours: dict[str, str]) -> Any:
    figure, axes = grid(len(tasks))
    for task, axis in zip(tasks, axes, strict=True):
        draw_curves(axis, task, colours, count_seeds=False)
        if task.groups:
            axis.set_title(f"{task.name} ({count_of_seeds(task.groups.values())})")
    figure.supxlabel("environment steps", fontsize=9)
    figure.supylabel("greedy return", fontsize=9)
    shared_legend(figure, axes)
    return figure


def curve_figure(task: Task, colours: dict[str, str]) -> Any:
    figure, axis = plt.subplots(figsize=(5, 3.4))
    draw_curves(axis, task, colours, count_seeds=True)
    axis.set(xlabel="environment steps", ylabel="greedy return")
    if task.groups:
        axis.legend(fontsize=8)
    return figure


def smoothness_figure(tasks: list[Task], colours: dict[str, str]) -> Any:
    """Return against AFR: up and to the left is better."""
    figure, axes = grid(len(tasks))
    for task, axis in zip(tasks, axes, strict=True):
        for algorithm, group in task.groups.items():
            changes, returns = group.final("afr_per_dim"), group.final("return")
            axis.scatter(changes, returns, s=8, color=colours[algorithm], alpha=0.35, lw=0)
            bars = {"xerr": np.nan_to_num(standard_error(changes)), "yerr": np.nan_to_num(standard_error(returns))}
            style = {"fmt": "o", "ms": 5, "lw": 1, "color": colours[algorithm], "label": algorithm}
            axis.errorbar(mean_of(changes), returns.mean(), **bars, **style)
        axis.set_title(task.name)
        axis.locator_params(axis="x", nbins=4)
    figure.supxlabel("AFR, mean absolute change per dimension", fontsize=9)
    figure.supylabel("greedy return", fontsize=9)
    shared_legend(figure, axes)
    return figure


def sweeps(algorithms: Iterable[str]) -> dict[str, dict[float, str]]:
    """Variants whose names differ in the number they end with, three at least: SDAR p0.1, SDAR p0.2, SDAR p0.5."""
    found = collections.defaultdict(dict)
    for algorithm in algorithms:
        if match := re.fullmatch(r"(.* \D*?)(\d*\.?\d+)", algorithm):
            found[match[1].rstrip()][float(match[2])] = algorithm
    return {name: dict(sorted(members.items())) for name, members in found.items() if len(members) > 2}


def sweep_figure(tasks: list[Task], members: dict[float, str], title: str) -> Any:
    """Final return, APR and AFR against the number, a column for each task."""
    measures = {"return": "return", "apr": "APR", "afr_per_dim": "AFR per dimension"}
    tasks = [task for task in tasks if sum(algorithm in task.groups for algorithm in members.values()) > 1]
    size = (max(3.3 * len(tasks), 4), 2.0 * len(measures) + 0.6)
    figure, axes = plt.subplots(len(measures), len(tasks), figsize=size, squeeze=False, sharex="col")
    for column, task in zip(axes.T, tasks, strict=True):
        groups = {value: task.groups[algorithm] for value, algorithm in members.items() if algorithm in task.groups}
        column[0].set_title(f"{task.name} ({count_of_seeds(groups.values())})")
        for axis, metric in zip(column, measures, strict=True):
            for ending, play in PLAY.items():
                finals = [group.final(metric + ending) for group in groups.values()]
                colour = COLOURS["SDAR"] if play == "greedy" else "tab:gray"
                for value, final in zip(groups, finals, strict=True):
                    axis.scatter([value] * len(final), final, s=8, color=colour, alpha=0.35, lw=0)
                errors = np.nan_to_num([standard_error(final) for final in finals])
                style = {"fmt": "o-", "ms": 4, "lw": 1.4, "color": colour, "label": play}
                axis.errorbar(list(groups), [mean_of(final) for final in finals], yerr=errors, **style)
            if min(members) > 0 and max(members) >= 8 * min(members):
                axis.set_xscale("log")
            axis.set_xticks(list(members), [f"{value:g}" for value in members])
            axis.minorticks_off()
    for axis, name in zip(axes[:, 0], measures.values(), strict=True):
        axis.set_ylabel(name)
    figure.supxlabel(title, fontsize=9)
    shared_legend(figure, list(axes.flat))
    return figure


def interval_figure(values: dict[str, tuple[Any, Any, Any]], colours: dict[str, str], title: str, middle: float) -> Any:
    figure, axis = plt.subplots(figsize=(5, 0.32 * len(values) + 1))
    for i, (algorithm, (estimate, low, high)) in enumerate(reversed(values.items())):
        axis.barh(i, high[0] - low[0], left=low[0], height=0.55, color=colours[algorithm], alpha=0.35)
        axis.plot([estimate[0]] * 2, [i - 0.28, i + 0.28], color=colours[algorithm], lw=2.5)
    axis.axvline(middle, color="black", lw=0.8, ls="--")
    axis.set_yticks(range(len(values)), reversed(values))
    axis.grid(axis="y", visible=False)
    axis.set_xlabel(title)
    return figure


def profile_figure(result: Aggregates, colours: dict[str, str], score: str) -> Any:
    figure, axis = plt.subplots(figsize=(5, 3.2))
    for algorithm, (share, low, high) in result.profiles.items():
        axis.step(result.thresholds, share, where="post", color=colours[algorithm], label=algorithm, lw=1.5)
        axis.fill_between(result.thresholds, low, high, step="post", color=colours[algorithm], alpha=0.12, lw=0)
    axis.set(xlabel=f"{score} τ", ylabel="share of runs above τ", ylim=(-0.02, 1.02))
    axis.legend(fontsize=8)
    return figure


# The page.

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 1180px; margin: 0 auto; padding: 1em 1.5em 4em; }
h1 { margin-bottom: 0 } h2 { margin-top: 2.2em; border-bottom: 1px solid #ddd; padding-bottom: .2em }
h3 { margin-top: 1.8em }
nav a { margin-right: 1.1em } a { color: #14509c } .scroll { overflow-x: auto }
table { border-collapse: collapse; font-size: 13.5px; font-variant-numeric: tabular-nums; margin: .6em 0 }
th, td { padding: .28em .7em; text-align: left; white-space: nowrap; border-bottom: 1px solid #e6e6e6 }
th { border-bottom: 2px solid #888 } td i { color: #666 } img { max-width: 100%; height: auto }
.single { display: grid; grid-template-columns: repeat(auto-fill, minmax(330px, 1fr)); gap: 1em }
.notes { background: #fff8e6; border: 1px solid #ecd9a0; padding: 0 1em; max-height: 22em; overflow-y: auto }
.caption, footer { color: #555; font-size: 13.5px; max-width: 75em } figure { margin: 1em 0 }
"""
# How a later report knows that it may replace this one.
GENERATOR = '<meta name="generator" content="report.py of SDAR">'


class Page:
    """Collects what is written to the folder, as files and as sections of index.html."""

    def __init__(self, out: Path):
        self.out, self.sections = out, []
        for folder in ("figures", "tables"):
            shutil.rmtree(out / folder, ignore_errors=True)
            (out / folder).mkdir(parents=True)

    def section(self, name: str, title: str) -> None:
        self.sections.append((name, title, []))

    def add(self, text: str) -> None:
        self.sections[-1][2].append(text)

    def figure(self, name: str, figure: Any, caption: str) -> None:
        for suffix in ("png", "pdf"):
            figure.savefig(self.out / "figures" / f"{name}.{suffix}")
        plt.close(figure)
        width = round(figure.get_figwidth() * 96)  # CSS pixels: the picture has more, for sharp screens
        picture = base64.b64encode((self.out / "figures" / f"{name}.png").read_bytes()).decode()
        self.add(
            f'<figure id="{html.escape(name)}"><img width="{width}" alt="{html.escape(caption or name)}" '
            f'src="data:image/png;base64,{picture}"><figcaption class="caption">{html.escape(caption)} '
            f"{links(f'figures/{name}', 'png', 'pdf')}</figcaption></figure>"
        )

    def table(self, table: Table | None) -> None:
        if table is None:
            return
        table.write(self.out / "tables")
        caption = f"{html.escape(table.caption)} {links(f'tables/{table.name}', 'md', 'csv', 'tex')}"
        self.add(f'<h3>{html.escape(table.title)}</h3><p class="caption">{caption}</p>{table.html()}')

    def write(self, heading: str) -> None:
        contents = "".join(f'<a href="#{name}">{html.escape(title)}</a>' for name, title, _ in self.sections)
        body = "".join(
            f'<h2 id="{name}">{html.escape(title)}</h2>{"".join(parts)}' for name, title, parts in self.sections
        )
        command = html.escape(" ".join(["python", "report.py", *sys.argv[1:]]))
        text = (
            f'<!doctype html><html lang="en"><head><meta charset="utf-8">{GENERATOR}'
            f'<meta name="viewport" content="width=device-width"><title>SDAR report</title><style>{STYLE}</style>'
            f"</head><body><h1>SDAR report</h1><p>{html.escape(heading)}</p><nav>{contents}</nav>{body}"
            f"<footer><p>Made by <code>{command}</code></p></footer></body></html>\n"
        )
        (self.out / "index.html").write_text(text)


def links(path: str, *suffixes: str) -> str:
    return " ".join(f'<a href="{path}.{suffix}">{suffix.upper()}</a>' for suffix in suffixes)


def claim(out: Path) -> None:
    """The folder may be new, empty or an earlier report's; anything else is somebody's work."""
    index = out / "index.html"
    try:
        if out.exists() and any(out.iterdir()) and GENERATOR not in index.read_text(errors="replace"):
            raise FileExistsError
        out.mkdir(parents=True, exist_ok=True)
        if not index.exists():  # a report that is interrupted can be made again
            index.write_text(f"<!doctype html>{GENERATOR}<p>This report is not finished.\n")
    except (FileNotFoundError, FileExistsError, NotADirectoryError):
        fail(f"--out {out} exists and is not an earlier report; name a new folder")
    except OSError as error:
        fail(f"cannot write to --out {out}: {error.strerror}")


@dataclass
class Study:
    """What a report is about."""

    runs: list[Run]
    tasks: list[Task]
    random_returns: dict[str, list[float]]
    notes: list[str]

    @property
    def zeros(self) -> dict[str, float]:
        """Z₀ of each task."""
        return {task: float(np.mean(returns)) for task, returns in self.random_returns.items()}


def read_study(args: Args) -> Study:
    require(args, "at least 1", lambda value: value is None or value >= 1, "max_steps", "random_episodes", "bootstrap")
    folders = [path for path in args.paths if path.is_dir()]
    tables = [*(path for path in args.paths if not path.is_dir()), *args.from_csv]
    if not folders and not tables:
        fail("name a folder with runs (python report.py runs --out report) or an evaluations.csv of an earlier report")
    notes: list[str] = []
    runs, random_returns = read_runs(find_runs(folders, notes), notes), {}
    for path in tables:
        stored, returns = read_evaluations(path)
        runs += stored
        random_returns |= returns
    if not runs:
        reason = "; ".join(notes) or "a run directory has an args.json"
        fail(f"no runs in {', '.join(map(str, folders + tables))}: {reason}")
    runs = without_copies(runs, notes)
    known = sorted({run.task for run in runs})
    if args.dimensions_task is not None and args.dimensions_task not in known:
        fail(f"--dimensions-task {args.dimensions_task} has no run here; there are {', '.join(known)}")
    claim(args.out)
    tasks = choose(runs, args.max_steps, notes)
    for task in (task.name for task in tasks if task.name not in random_returns):
        try:
            random_returns[task] = measure_random(task, args.random_episodes, args.out / "random_returns.json")
        except SystemExit as error:
            reason = one_line(error)
            notes.append(f"{task}: no normalised scores, because the random policy cannot be run: {reason}")
    return Study(runs, tasks, random_returns, notes)


@plt.rc_context(PLOT_STYLE)
def main(args: Args) -> None:
    study = read_study(args)
    runs, tasks, zeros = study.runs, study.tasks, study.zeros
    colours = palette(ordered([run.algorithm] for run in runs))
    compared = [task for task in tasks if task.groups]
    auc = auc_scores(compared, zeros)
    scores = {"normalised_auc": auc, "n_score": final_scores(compared, zeros, study.notes)}
    results = {name: aggregate(by_task, args.bootstrap, study.notes) for name, by_task in scores.items()}
    results = {name: result for name, result in results.items() if result is not None}
    notes = list(dict.fromkeys(study.notes))  # both may leave out the same

    page = Page(args.out)
    page.section("notes", "What to know first")
    items = "".join(f"<li>{html.escape(note)}</li>" for note in notes)
    page.add(f'<div class="notes"><ul>{items}</ul></div>' if items else "<p>Nothing was left out.</p>")
    page.section("curves", "Learning curves")
    caption = "Greedy return: mean over seeds (n of them), band ± one standard error."
    dotted = " Dotted: single runs that are left out of the means." if any(task.others for task in tasks) else ""
    page.figure("curves", overview_figure(tasks, colours), caption + dotted)
    page.add('<div class="single">')
    for task in tasks:
        page.figure("curve-" + re.sub(r"[^\w.-]", "-", task.name), curve_figure(task, colours), "")
    page.add("</div>")
    if compared:
        page.section("efficiency", "Sample efficiency")
        if auc:
            page.table(category_table(auc))
            page.table(auc_table(auc, zeros))
        page.table(comparison_table(compared, args.bootstrap))
        page.table(time_table(compared))
        page.section("returns", "Return and repetition")
        page.table(return_table(compared, zeros))
        page.table(dimension_table(compared, args.dimensions_task))
        caption = "Return against AFR (the further left the smoother): dots are runs, circles means ± standard error."
        page.figure("smoothness", smoothness_figure(compared, colours), caption)
    if compared and (found := sweeps(ordered(task.groups for task in compared))):
        page.section("sweeps", "Against a setting")
        for title, members in found.items():
            figure = sweep_figure(compared, members, title)
            caption = f"{title}: final return, APR and AFR; dots are runs, circles means ± standard error."
            page.figure("sweep-" + re.sub(r"[^\w.-]", "-", title), figure, caption)
    if results:
        page.section("aggregates", "Over all tasks")
        page.table(aggregate_table(results))
        for name, result in results.items():
            figure = interval_figure(result.iqm, colours, f"IQM of {SCORES[name]}", 1.0)
            page.figure(f"iqm-{name}", figure, "Interquartile mean, 95 % intervals.")
            if result.improvement:
                figure = interval_figure(result.improvement, colours, f"P(SDAR is better) by {SCORES[name]}", 0.5)
                page.figure(f"improvement-{name}", figure, "Probability that SDAR beats the algorithm, 95 % intervals.")
            figure = profile_figure(result, colours, SCORES[name])
            page.figure(f"profiles-{name}", figure, "Performance profiles with 95 % bands.")
    page.section("runs", "Runs")
    page.table(run_table(runs))
    if zeros:
        listed = (f"{task} {with_error(returns)} ({len(returns)})" for task, returns in study.random_returns.items())
        text = f"Return of the uniformly random policy ± standard error (episodes): {', '.join(listed)}."
        page.add(f'<p class="caption">{html.escape(text)}</p>')
    write_evaluations(args.out / "evaluations.csv", runs, study.random_returns)
    page.add('<p class="caption">All evaluations of all runs: <a href="evaluations.csv">evaluations.csv</a></p>')
    averaged = sum(len(group.runs) for task in compared for group in task.groups.values())
    counts = plural(len(tasks), "task"), plural(len(ordered(task.groups for task in compared)), "algorithm")
    heading = f"{', '.join(counts)}, {averaged} of {plural(len(runs), 'run')} compared."
    page.write(heading)
    for note in notes:
        print(f"note: {note}")
    print(f"{heading} Open {args.out / 'index.html'}")


if __name__ == "__main__":
    main(tyro.cli(Args))
