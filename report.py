"""Every table and figure of the paper's evaluation, and some more, from your own runs.

python report.py runs --out report    # then open report/index.html
"""

import base64
import collections
import csv
import dataclasses
import hashlib
import html
import itertools
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import matplotlib
import numpy as np
import tyro
from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from tqdm import tqdm

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import FuncFormatter


@dataclass
class Args:
    runs_dirs: tyro.conf.Positional[tuple[Path, ...]] = ()
    """folders with run directories, at any depth"""
    from_csv: tuple[Path, ...] = ()
    """read these evaluations.csv of earlier reports instead of, or beside, run directories"""
    out: Path = Path("report")
    """the folder the report is written to; an earlier report there is replaced"""
    max_steps: int | None = None
    """look at the first so many steps of each run only"""
    dimensions_task: str | None = None
    """the task of the table by action dimension (default: Walker2d, as in the paper, else the one that has most)"""
    random_episodes: int = 30
    """episodes of the uniformly random policy that is the zero of normalised scores, measured once per task"""
    bootstrap: int = 2000
    """resamples of the bootstrap intervals"""
    workers: int = os.cpu_count() or 1
    """processes that read logs"""


ALGORITHMS = {  # in the paper's order
    "sac_continuous_action": "SAC",
    "nrep_sac": "N-Rep",
    "temporl_continuous_action": "TempoRL",
    "ute_continuous_action": "UTE",
    "taac_continuous_action": "TAAC",
    "sdar_continuous_action": "SDAR",
}
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
    """The row of a table above, if there is one, with cells for these algorithms, in italics."""
    for line in table.strip().splitlines():
        name, *cells = (cell.strip() for cell in line.split("|"))
        if name == key:
            printed = dict(zip(ALGORITHMS.values(), cells, strict=True))
            return [[f"*{text}*" if text else "" for text in (*first, *(printed.get(a, "") for a in algorithms))]]
    return []


def fail(message: str) -> NoReturn:
    raise SystemExit(f"error: {message}")


def base_name(task: str) -> str:
    """Walker2d for Walker2d-v4: versions of a task share the paper's row."""
    return re.sub(r"-v\d+$", "", task)


# Reading runs.

TAGS = {
    "charts/seconds": "seconds",
    **{f"eval/{name}": name for name in ("return", "return_stochastic", "length", "apr", "afr", "afr_per_dim")},
}
METRICS = tuple(TAGS.values())
NOT_SETTINGS = {  # options that do not make two runs different experiments
    *("exp_name", "env_id", "seed", "run_name", "runs_dir", "resume", "total_timesteps", "torch_deterministic", "cuda"),
    *("track", "wandb_project_name", "wandb_entity", "capture_video", "eval_every", "eval_episodes"),
    *("checkpoint_every", "compile", "buffer_device"),
}


@dataclass
class Run:
    name: str
    task: str
    algorithm: str
    seed: int
    budget: int  # total_timesteps
    points: dict[str, np.ndarray]  # "step" and a column for each metric, an entry per evaluation
    settings: dict[str, Any] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)
    damage: str = ""

    @property
    def dimensions(self) -> list[str]:
        return [name for name in self.points if name.startswith("apr_dim_")]

    @property
    def last_step(self) -> int:
        return int(self.points["step"][-1]) if len(self.points["step"]) else 0

    def cut(self, steps: int) -> "Run":
        keep = self.points["step"] <= steps
        return dataclasses.replace(self, points={name: column[keep] for name, column in self.points.items()})


def find_runs(roots: Iterable[Path]) -> tuple[list[Path], list[str]]:
    """Run directories (those with an args.json) below the roots, and notes on what looks like one but is not."""
    found, notes = set(), []
    for root in roots:
        if not root.is_dir():
            fail(f"{root} is not a directory; name the folder that holds the runs (--runs-dir of the scripts)")
        for folder, subfolders, files in os.walk(root):
            subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))  # hidden: half made
            if "args.json" in files:
                found.add(Path(folder).resolve())
                subfolders.clear()
            elif any(name.startswith("events.") for name in files):
                notes.append(f"{folder} has logs but no args.json, so it is not a run of these scripts: left out")
    return sorted(found), notes


def read_events(directory: Path) -> tuple[dict[str, list[float]], str]:
    """The evaluations in a run's event files, a column for each metric, and what is wrong with the files."""
    rows: dict[int, dict[str, float]] = collections.defaultdict(dict)
    damage = ""
    for path in sorted(directory.glob("events.*")):
        size, understood = path.stat().st_size, 0
        for record in RawEventFileLoader(str(path)).Load():
            understood += len(record) + 16  # a record's frame: its length and two checksums
            if b"eval/" not in record and b"charts/seconds" not in record:
                continue  # most are losses, and parsing is what takes time
            event = Event.FromString(record)
            for value in event.summary.value:
                name = TAGS.get(value.tag) or (value.tag[5:] if value.tag.startswith("eval/apr_dim_") else None)
                if name is not None:
                    rows[event.step][name] = value.simple_value  # of a step logged twice, the later one counts
        if understood < size:
            damage = f"{path.name} is damaged or cut off at byte {understood:,} of {size:,}"
    steps = sorted(step for step, row in rows.items() if "return" in row)
    names = [*METRICS, *sorted({n for step in steps for n in rows[step] if n not in METRICS}, key=dimension_index)]
    return {"step": steps, **{name: [rows[step].get(name, math.nan) for step in steps] for name in names}}, damage


def dimension_index(column: str) -> int:
    return int(column.rsplit("_", 1)[1])


def read_run(directory: Path, cache: Path) -> dict[str, Any]:
    """A run as plain data; its event files are read again only when they have changed."""
    path = cache / f"{hashlib.sha256(str(directory).encode()).hexdigest()[:24]}.json"
    stats = [(p.name, p.stat()) for p in sorted((directory / "args.json", *directory.glob("events.*")))]
    fingerprint = [1, *([name, stat.st_size, stat.st_mtime_ns] for name, stat in stats)]
    try:
        stored = json.loads(path.read_text())
        if stored["fingerprint"] == fingerprint:
            return stored
    except (OSError, ValueError, KeyError, TypeError):
        pass  # never read before, or by a version that kept it otherwise
    contents: dict[str, Any] = {"fingerprint": fingerprint, "directory": str(directory)}
    try:
        description = json.loads((directory / "args.json").read_text())
        options = description["args"]
        contents |= {
            "script": description["script"],
            "options": {**options, "env_id": str(options["env_id"]), "seed": int(options["seed"])},
            "about": {name: description.get(name) for name in ("commit", "device", "threads", "python", "packages")},
        }
        contents["options"]["total_timesteps"] = int(options["total_timesteps"])
        contents["points"], contents["damage"] = read_events(directory)
    except (OSError, ValueError, KeyError, TypeError) as error:
        contents["unreadable"] = f"{type(error).__name__}: {' '.join(str(error).split())}"
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(contents))
    os.replace(temporary, path)
    return contents


def label(script: str, exp_name: str) -> str:
    """SDAR for the script under its own name, "SDAR joint" for an --exp-name of sdar_continuous_action-joint."""
    short = ALGORITHMS.get(script, script)
    if exp_name == script:
        return short
    return f"{short} {exp_name[len(script) + 1 :]}" if exp_name.startswith(f"{script}-") else exp_name


def read_runs(directories: list[Path], cache: Path, workers: int) -> tuple[list[Run], list[str]]:
    cache.mkdir(parents=True, exist_ok=True)
    bar = {"total": len(directories), "desc": "reading logs", "unit": " runs", "disable": None}
    if workers > 1 and len(directories) > 1:
        with ProcessPoolExecutor(min(workers, len(directories))) as pool:
            read = list(tqdm(pool.map(read_run, directories, itertools.repeat(cache)), **bar))
    else:
        read = [read_run(directory, cache) for directory in tqdm(directories, **bar)]
    runs, notes = [], []
    for directory, contents in zip(directories, read, strict=True):
        if "unreadable" in contents:
            notes.append(f"{directory.name}: args.json or logs cannot be read ({contents['unreadable']}): left out")
            continue
        options = contents["options"]
        run = Run(
            name=directory.name,
            task=options["env_id"],
            algorithm=label(contents["script"], options.get("exp_name", contents["script"])),
            seed=options["seed"],
            budget=options["total_timesteps"],
            points={name: np.array(column) for name, column in contents["points"].items()},
            settings={name: value for name, value in options.items() if name not in NOT_SETTINGS},
            about=contents["about"],
            damage=contents["damage"],
        )
        runs.append(run)
    return runs, notes


def name_variants(runs: list[Run]) -> list[str]:
    """Runs of one task and name whose settings differ are different algorithms.

    The setting of most runs keeps the name, the others' differences join theirs.
    """
    notes = []
    for (task, algorithm), group in grouped(runs, lambda run: (run.task, run.algorithm)).items():
        names = sorted({name for run in group for name in run.settings})
        values = {name: {repr(run.settings[name]) for run in group if name in run.settings} for name in names}
        differing = [name for name in names if len(values[name]) > 1]
        variants = grouped(group, lambda run: tuple(repr(run.settings.get(name)) for name in differing))  # noqa: B023
        usual = max(variants.values(), key=lambda same: (len(same), sum(run.last_step for run in same)))
        for same in variants.values():
            told = [f"{name.replace('_', '-')} {same[0].settings.get(name)}" for name in differing]
            if same is usual and differing:
                notes.append(f"{task}, {algorithm}: settings differ; without a remark it is {', '.join(told)}")
            elif differing:
                for run in same:
                    run.algorithm += f" ({', '.join(told)})"
    return notes


def grouped(entries: Iterable[Any], key: Callable[[Any], Any]) -> dict[Any, list[Any]]:
    groups = collections.defaultdict(list)
    for entry in entries:
        groups[key(entry)].append(entry)
    return dict(groups)


# evaluations.csv: all evaluations of all runs, from which a report can be drawn again without them.

KEYS = ("run", "task", "algorithm", "seed", "total_timesteps", "step")


def write_evaluations(path: Path, runs: list[Run], random_returns: dict[str, list[float]]) -> None:
    dimensions = max(len(run.dimensions) for run in runs)
    columns = [*METRICS, *(f"apr_dim_{i}" for i in range(dimensions))]
    with open(path, "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*KEYS, *columns])
        for run in runs:
            for i, step in enumerate(run.points["step"]):
                values = [run.points[c][i] if c in run.points else math.nan for c in columns]
                numbers = ["" if math.isnan(value) else f"{value:.7g}" for value in values]
                writer.writerow([run.name, run.task, run.algorithm, run.seed, run.budget, int(step), *numbers])
        for task, returns in random_returns.items():
            for i, value in enumerate(returns):
                row = [RANDOM, task, RANDOM, i, 0, 0, *("" for _ in columns)]
                row[len(KEYS) + METRICS.index("return")] = f"{value:.7g}"
                writer.writerow(row)


def read_evaluations(path: Path) -> tuple[list[Run], dict[str, list[float]]]:
    try:
        with open(path, newline="") as file:
            rows = list(csv.DictReader(file))
        runs, random_returns = [], collections.defaultdict(list)
        for (name, task, algorithm, seed, budget), group in grouped(
            rows, lambda r: tuple(r[k] for k in KEYS[:5])
        ).items():
            if algorithm == RANDOM:
                random_returns[task] += [float(row["return"]) for row in group]
                continue
            columns = [c for c in group[0] if c not in KEYS and (c in METRICS or any(row[c] for row in group))]
            points = {c: np.array([float(row[c] or "nan") for row in group]) for c in columns}
            points = {"step": np.array([int(row["step"]) for row in group]), **points}
            runs.append(Run(name, task, algorithm, int(seed), int(budget), points))
    except OSError as error:
        fail(f"cannot read {path}: {error.strerror}")
    except (KeyError, ValueError, TypeError) as error:
        fail(f"{path} is not an evaluations.csv of a report ({type(error).__name__}: {error})")
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
        return np.array([run.points[metric][-1] for run in self.runs])

    def auc(self) -> np.ndarray:
        return np.array([area_under_curve(run.points["step"], run.points["return"]) for run in self.runs])


@dataclass
class Task:
    name: str
    steps: int  # the budget at which its runs are compared
    groups: dict[str, Group]  # by algorithm
    others: list[Run]  # drawn, but never averaged


def choose(runs: list[Run], max_steps: int | None) -> tuple[list[Task], list[str]]:
    """The runs that can be compared, by task, and a note on each that cannot.

    A task's runs are compared at its most common budget; a longer run is cut there, a shorter, unfinished or
    damaged one is left out of every average.
    """
    tasks, notes = [], []
    for name, members in sorted(grouped(runs, lambda run: run.task).items(), key=lambda item: task_order(item[0])):
        budgets = {id(run): min(run.budget, max_steps or run.budget) for run in members}
        complete = [run for run in members if run.last_step >= budgets[id(run)]]
        counts = collections.Counter(budgets[id(run)] for run in complete or members)
        steps = max(counts, key=lambda budget: (counts[budget], budget))
        kept, others = [], []
        for run in members:
            reason = reason_to_leave_out(run, budgets[id(run)], steps)
            if run.damage:
                notes.append(f"{run.name}: {run.damage}; what comes before is used")
            if reason:
                notes.append(f"{run.name}: {reason}: left out of averages")
                others.append(run.cut(steps))
                continue
            if budgets[id(run)] > steps:
                notes.append(f"{run.name}: longer than the others, cut at step {steps:,} of {run.budget:,}")
            kept.append(run.cut(steps))
        groups = {}
        for algorithm, group in sorted(grouped(kept, lambda run: run.algorithm).items(), key=lambda i: rank(i[0])):
            by_seed = grouped(sorted(group, key=lambda run: run.name), lambda run: run.seed)
            for seed, same in sorted(by_seed.items()):
                notes += [f"{run.name}: seed {seed} again, {same[-1].name} is used" for run in same[:-1]]
            groups[algorithm] = Group([same[-1] for _, same in sorted(by_seed.items())])
            if len(groups[algorithm].steps) < max(len(run.points["step"]) for run in groups[algorithm].runs):
                notes.append(f"{name}, {algorithm}: evaluated at different steps; the curve shows those in common")
        seeds = {algorithm: {run.seed for run in group.runs} for algorithm, group in groups.items()}
        everyone = set().union(*seeds.values()) if seeds else set()
        for algorithm, own in seeds.items():
            if own != everyone:
                missing = ", ".join(map(str, sorted(everyone - own)))
                notes.append(f"{name}, {algorithm}: {plural(len(own), 'seed')}, without {missing}")
        tasks.append(Task(name, steps, groups, others))
    return tasks, notes


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
    return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.nan


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


def measure_random(task: str, episodes: int, cache: Path) -> list[float]:
    """Returns of the uniformly random policy on a task, measured once."""
    path = cache / f"random-{hashlib.sha256(task.encode()).hexdigest()[:24]}.json"
    try:
        stored = json.loads(path.read_text())
        if stored["task"] == task and len(stored["returns"]) == episodes:
            return stored["returns"]
    except (OSError, ValueError, KeyError, TypeError):
        pass
    from sdar_continuous_action import derived_seed, make_env

    env = make_env(task)
    generator = np.random.default_rng(0)
    returns = []
    for i in tqdm(range(episodes), desc=f"random policy on {task}", unit=" episodes", leave=False, disable=None):
        env.reset(seed=derived_seed(0, 1, i))
        total, over = 0.0, False
        while not over:
            action = generator.uniform(-1, 1, env.action_space.shape).astype(np.float32)
            _, reward, terminated, truncated, _ = env.step(action)
            total, over = total + float(reward), terminated or truncated
        returns.append(total)
    env.close()
    path.write_text(json.dumps({"task": task, "returns": returns}))
    return returns


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

    def markdown(self) -> str:
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        body = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        return f"### {self.title}\n\n{self.caption}\n\n{body}\n"

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
        (folder / f"{self.name}.md").write_text(self.markdown())
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


def all_algorithms(tasks: list[Task]) -> list[str]:
    return sorted({algorithm for task in tasks for algorithm in task.groups}, key=rank)


def auc_scores(task: Task, zero: float) -> dict[str, np.ndarray]:
    """n-scores of the AUC of each run, 1 being the mean of the task's best algorithm; none if nothing beats random."""
    areas = {algorithm: group.auc() for algorithm, group in task.groups.items()}
    best = max((area.mean() for area in areas.values()), default=-math.inf)
    return {algorithm: n_score(area, zero, best) for algorithm, area in areas.items()} if best > zero else {}


def auc_tables(tasks: list[Task], zeros: dict[str, float]) -> list[Table]:
    """Table 1, and the same by task."""
    scores = {task.name: auc_scores(task, zeros[task.name]) for task in tasks if task.name in zeros}
    scores = {task: by_algorithm for task, by_algorithm in scores.items() if by_algorithm}
    algorithms = sorted({algorithm for by_algorithm in scores.values() for algorithm in by_algorithm}, key=rank)
    if not scores:
        return []

    by_task = Table(
        "auc_by_task",
        "Normalised AUC by task",
        "Area under the learning curve, 0 = uniformly random policy, 1 = the best algorithm here; mean ± standard "
        "error over seeds.",
        ["task", *algorithms],
    )
    for task, by_algorithm in scores.items():
        by_task.add_row([task], {a: with_error(values, 2) for a, values in by_algorithm.items()}, means(by_algorithm))
        for algorithm, values in by_algorithm.items():
            by_task.record(
                task=task,
                algorithm=algorithm,
                seeds=len(values),
                normalised_auc=values.mean(),
                standard_error=standard_error(values),
                random_return=zeros[task],
            )

    by_category = Table(
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
        values = {a: np.array([scores[t][a].mean() for t in here if a in scores[t]]) for a in algorithms}
        values = {algorithm: of_tasks for algorithm, of_tasks in values.items() if len(of_tasks)}
        cells = {a: with_error(of_tasks, 2) + share(len(of_tasks), len(here)) for a, of_tasks in values.items()}
        by_category.add_row([f"{name} ({plural(len(here), 'task')})"], cells, means(values))
        by_category.rows += papers_rows(PAPER_AUC, name, [f"{name}, paper"], algorithms)
        for algorithm, of_tasks in values.items():
            parts[algorithm].append((of_tasks.mean(), standard_error(of_tasks)))
            record_score(by_category, name, algorithm, *parts[algorithm][-1], len(of_tasks))
    averages = {}
    for algorithm, (centres, errors) in {a: np.transpose(p) for a, p in parts.items()}.items():
        averages[algorithm] = centres.mean(), math.sqrt((errors**2).sum()) / len(errors)
        record_score(
            by_category, "average", algorithm, *averages[algorithm], sum(algorithm in s for s in scores.values())
        )
    cells = {
        a: plus_minus(*average, 2) + share(len(parts[a]), len(categories), "categories")
        for a, average in averages.items()
    }
    by_category.add_row(["average"], cells, {algorithm: centre for algorithm, (centre, _) in averages.items()})
    by_category.rows += papers_rows(PAPER_AUC, "average", ["average, paper"], algorithms)
    return [by_category, by_task]


def record_score(table: Table, name: str, algorithm: str, mean: float, error: float, tasks: int) -> None:
    table.record(category=name, algorithm=algorithm, normalised_auc=mean, standard_error=error, tasks=tasks)


def category(task: str) -> str:
    return next((name for name, members in CATEGORIES.items() if base_name(task) in members), "other")


def means(values: dict[str, np.ndarray]) -> dict[str, float]:
    return {name: float(column.mean()) for name, column in values.items()}


def share(count: int, total: int, of: str = "tasks") -> str:
    return "" if count == total else f" ({count} of {total} {of})"


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def return_table(tasks: list[Task], zeros: dict[str, float]) -> Table:
    """Table 2."""
    algorithms = all_algorithms(tasks)
    table = Table(
        "table2_return",
        "Table 2: return, APR and AFR",
        "Greedy return at the last evaluation, mean ± standard error over seeds; action persistence rate / action "
        "fluctuation rate. AFR is the mean absolute change per dimension, the scale of the paper's numbers (the CSV "
        "has the Euclidean norm too, as afr). n-score: 0 = uniformly random policy, 1 = SAC; mean ± standard error "
        "over tasks. In italics: the paper, at its own budgets.",
        ["task", "", *algorithms],
    )
    scores: dict[str, list[float]] = collections.defaultdict(list)
    rates: dict[str, list[tuple[float, float]]] = collections.defaultdict(list)
    for task in tasks:
        returns = {algorithm: group.final("return") for algorithm, group in task.groups.items()}
        for algorithm, group in task.groups.items():
            final = returns[algorithm]
            others = {metric: mean_of(group.final(metric)) for metric in METRICS if metric != "return"}
            rates[algorithm].append((others["apr"], others["afr_per_dim"]))
            score = returns_n_score(task, zeros, final.mean())
            scores[algorithm] += [score] if math.isfinite(score) else []
            table.record(
                task=task.name,
                algorithm=algorithm,
                seeds=len(final),
                steps=task.steps,
                **{"return": final.mean()},
                standard_error=standard_error(final),
                n_score=score,
                **others,
            )
        counts = sorted({len(final) for final in returns.values()})
        seeds = plural(counts[0], "seed") if len(counts) == 1 else f"{counts[0]} to {counts[-1]} seeds"
        first = [task.name, f"return, {seeds}, {thousands(task.steps)} steps"]
        table.add_row(first, {a: with_error(final) for a, final in returns.items()}, means(returns))
        repetitions = {a: rates_of(*rates[a][-1]) for a in task.groups}
        table.add_row(["", "APR / AFR"], repetitions)
        table.rows += papers_rows(PAPER_RETURN, base_name(task.name), ["paper", "return"], algorithms)
        table.rows += papers_rows(PAPER_REPETITION, base_name(task.name), ["paper", "APR / AFR"], algorithms)
    scored = max(map(len, scores.values()), default=0)
    cells = {a: with_error(values, 2) + share(len(values), scored) for a, values in scores.items() if values}
    table.add_row(["average", "n-score"], cells, {a: float(np.mean(scores[a])) for a in cells})
    average = {a: rates_of(*np.mean(rates[a], axis=0)) for a in rates}
    table.add_row(["", "APR / AFR"], {a: cell + share(len(rates[a]), len(tasks)) for a, cell in average.items()})
    table.rows += papers_rows(PAPER_RETURN, "average", ["paper", "n-score"], algorithms)
    table.rows += papers_rows(PAPER_REPETITION, "average", ["paper", "APR / AFR"], algorithms)
    return table


def returns_n_score(task: Task, zeros: dict[str, float], value: Any) -> Any:
    """0 = random, 1 = SAC's mean final return; NaN where SAC is not there or no better than random."""
    if "SAC" not in task.groups or task.name not in zeros:
        return value * math.nan
    one = task.groups["SAC"].final("return").mean()
    return n_score(value, zeros[task.name], one) if one > zeros[task.name] else value * math.nan


def names_of_dimensions(task: str, count: int) -> list[str]:
    from evaluate import dimension_names
    from sdar_continuous_action import make_env

    try:
        return dimension_names(make_env(task))
    except SystemExit:  # the task is not installed here, but the numbers are there
        return [f"a{i}" for i in range(count)]


def dimension_table(tasks: list[Task], wanted: str | None) -> Table | None:
    """Table 3."""
    width = {task.name: min(len(group.runs[0].dimensions) for group in task.groups.values()) for task in tasks}
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
        table.add_row(
            [name if name == f"a{i}" else f"{name} (a{i})"],
            {algorithm: with_error(values, 2) for algorithm, values in rates.items()},
        )
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
    algorithms = all_algorithms(tasks)
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
            table.record(
                task=task.name,
                algorithm=algorithm,
                seeds=len(group.runs),
                target_return=target,
                steps=reached[0] if reached else math.nan,
                seconds=reached[1] if reached else math.nan,
                steps_per_second=task.steps / total if total else math.nan,
            )
        table.add_row([f"{task.name} ({number(target)})"], cells)
        table.rows += papers_rows(PAPER_TIME, base_name(task.name), ["paper"], algorithms)
    return table


def run_table(runs: list[Run]) -> Table:
    columns = ["task", "algorithm", "seed", "steps", "return", "time", "commit", "device", "run"]
    table = Table("runs", "Runs", "Every run that was read, and its last evaluation.", columns)
    for run in sorted(runs, key=lambda run: (task_order(run.task), rank(run.algorithm), run.seed, run.name)):
        last = {metric: float(run.points[metric][-1]) if len(run.points["step"]) else math.nan for metric in METRICS}
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


@dataclass
class Aggregates:
    algorithms: list[str]
    tasks: list[str]
    iqm: dict[str, tuple[Any, Any, Any]]
    improvement: dict[str, tuple[Any, Any, Any]]  # P(SDAR > the algorithm)
    profiles: dict[str, tuple[Any, Any, Any]]
    thresholds: np.ndarray


def score_matrices(tasks: list[Task], zeros: dict[str, float]) -> tuple[dict[str, np.ndarray], list[str], list[str]]:
    """n-scores (runs, tasks) for each algorithm on the tasks that all have, those tasks, and notes on the rest."""
    notes = []
    usable = []
    for task in tasks:
        if not task.groups:
            continue
        if math.isnan(returns_n_score(task, zeros, 1.0)):
            notes.append(f"{task.name}: no n-scores, because SAC or the random policy is missing or SAC is not better")
        else:
            usable.append(task)
    main = [name for name in all_algorithms(usable) if name in COLOURS]
    shared = [task for task in usable if all(name in task.groups for name in main)]
    for task in usable:
        if task not in shared:
            missing = ", ".join(name for name in main if name not in task.groups)
            notes.append(f"{task.name}: not in the aggregates over tasks, because {missing} has no run there")
    matrices = {}
    for algorithm in all_algorithms(shared):
        groups = [task.groups.get(algorithm) for task in shared]
        if None in groups:
            notes.append(f"{algorithm}: not in the aggregates over tasks, because it has no run on some of them")
            continue
        counts = [len(group.runs) for group in groups]
        if min(counts) < max(counts):
            notes.append(f"{algorithm}: the aggregates use {min(counts)} seeds of each task, the fewest that one has")
        columns = [
            returns_n_score(task, zeros, group.final("return"))[: min(counts)]
            for task, group in zip(shared, groups, strict=True)
        ]
        matrices[algorithm] = np.stack(columns, axis=1)
    return matrices, [task.name for task in shared], notes


def aggregate(tasks: list[Task], zeros: dict[str, float], resamples: int) -> tuple[Aggregates | None, list[str]]:
    from rliable.metrics import aggregate_iqm

    scores, names, notes = score_matrices(tasks, zeros)
    if not scores:
        return None, notes
    few = [algorithm for algorithm, matrix in scores.items() if len(matrix) < 3]
    if few:
        notes.append(f"{', '.join(few)}: fewer than 3 seeds, so the bootstrap intervals say little")
    everything = np.concatenate([matrix.ravel() for matrix in scores.values()])
    thresholds = np.linspace(min(0.0, everything.min()), max(1.2, everything.max()), 101)
    pairs = {a: [scores["SDAR"], matrix] for a, matrix in scores.items() if a != "SDAR"} if "SDAR" in scores else {}
    return (
        Aggregates(
            list(scores),
            names,
            intervals(scores, aggregate_iqm, resamples),
            intervals(pairs, probability_of_improvement, resamples),
            intervals(scores, lambda matrix: (matrix[..., None] > thresholds).mean(axis=(0, 1)), resamples),
            thresholds,
        ),
        notes,
    )


def aggregate_table(result: Aggregates) -> Table:
    table = Table(
        "aggregates",
        "Interquartile mean and probability of improvement",
        f"Over {', '.join(result.tasks)}: interquartile mean of the n-scores of final returns (0 = random, 1 = SAC), "
        "and the probability that a run of SDAR beats one of the algorithm on the same task; 95 % stratified-bootstrap "
        "intervals.",
        ["algorithm", "IQM of n-scores", "P(SDAR is better)"],
    )
    for algorithm in result.algorithms:
        cells = []
        for measure, values in (("iqm_n_score", result.iqm), ("probability_sdar_is_better", result.improvement)):
            if algorithm not in values:
                cells.append("")
                continue
            estimate, low, high = (float(part[0]) for part in values[algorithm])
            cells.append(f"{estimate:.2f} [{low:.2f}, {high:.2f}]")
            interval = {"estimate": estimate, "low_95": low, "high_95": high}
            table.record(algorithm=algorithm, measure=measure, **interval, tasks=len(result.tasks))
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
    ordered = sorted(handles, key=rank)
    for columns in range(min(6, len(ordered)), 0, -1):
        legend = figure.legend([handles[t] for t in ordered], ordered, loc="outside upper center", ncols=columns)
        if columns == 1 or legend.get_window_extent().width <= figure.bbox.width:
            break
        legend.remove()


def draw_curves(axis: Any, task: Task, colours: dict[str, str], count_seeds: bool) -> None:
    for algorithm, group in task.groups.items():
        returns, steps, colour = group.matrix("return"), group.steps, colours[algorithm]
        mean = returns.mean(axis=0)
        name = f"{algorithm} ({len(returns)} seed{'s' if len(returns) > 1 else ''})" if count_seeds else algorithm
        axis.plot(steps, mean, color=colour, lw=1.8 if algorithm == "SDAR" else 1.3, label=name, zorder=3)
        if len(returns) > 1:
            error = returns.std(axis=0, ddof=1) / math.sqrt(len(returns))
            axis.fill_between(steps, mean - error, mean + error, color=colour, alpha=0.18, lw=0)
    for run in task.others:  # visible, never averaged
        axis.plot(run.points["step"], run.points["return"], color=colours[run.algorithm], lw=0.7, ls=":", zorder=2)
    axis.set_title(task.name)
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: thousands(value)))


def curve_figures(tasks: list[Task], colours: dict[str, str]) -> dict[str, Any]:
    figures = {}
    figure, axes = grid(len(tasks))
    for task, axis in zip(tasks, axes, strict=True):
        draw_curves(axis, task, colours, count_seeds=False)
        seeds = sorted({len(group.runs) for group in task.groups.values()})
        if seeds:
            axis.set_title(f"{task.name} (n = {'–'.join(map(str, seeds[:: max(1, len(seeds) - 1)]))})")
    figure.supxlabel("environment steps", fontsize=9)
    figure.supylabel("greedy return", fontsize=9)
    shared_legend(figure, axes)
    figures["curves"] = figure
    for task in tasks:
        figure, axis = plt.subplots(figsize=(5, 3.4))
        draw_curves(axis, task, colours, count_seeds=True)
        axis.set(xlabel="environment steps", ylabel="greedy return")
        if task.groups:
            axis.legend(fontsize=8)
        figures[f"curve-{file_name(task.name)}"] = figure
    return figures


def file_name(task: str) -> str:
    return re.sub(r"[^\w.-]", "-", task)


def smoothness_figure(tasks: list[Task], colours: dict[str, str]) -> Any:
    """Return against AFR: up and to the left is better."""
    figure, axes = grid(len(tasks))
    for task, axis in zip(tasks, axes, strict=True):
        for algorithm, group in task.groups.items():
            changes, returns = group.final("afr_per_dim"), group.final("return")
            axis.scatter(changes, returns, s=8, color=colours[algorithm], alpha=0.35, lw=0)
            axis.errorbar(
                mean_of(changes),
                returns.mean(),
                xerr=np.nan_to_num(standard_error(changes)),
                yerr=np.nan_to_num(standard_error(returns)),
                fmt="o",
                ms=5,
                lw=1,
                color=colours[algorithm],
                label=algorithm,
            )
        axis.set_title(task.name)
        axis.locator_params(axis="x", nbins=4)
    figure.supxlabel("AFR, mean absolute change per dimension", fontsize=9)
    figure.supylabel("greedy return", fontsize=9)
    shared_legend(figure, axes)
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


def profile_figure(result: Aggregates, colours: dict[str, str]) -> Any:
    figure, axis = plt.subplots(figsize=(5, 3.2))
    for algorithm, (share, low, high) in result.profiles.items():
        axis.step(result.thresholds, share, where="post", color=colours[algorithm], label=algorithm, lw=1.5)
        axis.fill_between(result.thresholds, low, high, step="post", color=colours[algorithm], alpha=0.12, lw=0)
    axis.set(xlabel="n-score τ (0 = random, 1 = SAC)", ylabel="share of runs above τ", ylim=(-0.02, 1.02))
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
GENERATOR = (
    '<meta name="generator" content="report.py of SDAR">'  # how a later report knows that it may replace this one
)


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
        links = " ".join(f'<a href="figures/{name}.{suffix}">{suffix.upper()}</a>' for suffix in ("png", "pdf"))
        self.add(
            f'<figure id="{html.escape(name)}"><img width="{width}" alt="{html.escape(caption or name)}" '
            f'src="data:image/png;base64,{picture}">'
            f'<figcaption class="caption">{html.escape(caption)} {links}</figcaption></figure>'
        )

    def table(self, table: Table | None) -> None:
        if table is None:
            return
        table.write(self.out / "tables")
        suffixes = ("md", "csv", "tex")
        links = " ".join(f'<a href="tables/{table.name}.{suffix}">{suffix.upper()}</a>' for suffix in suffixes)
        caption = f'<p class="caption">{html.escape(table.caption)} {links}</p>'
        self.add(f"<h3>{html.escape(table.title)}</h3>{caption}{table.html()}")

    def write(self, heading: str) -> None:
        links = "".join(f'<a href="#{name}">{html.escape(title)}</a>' for name, title, _ in self.sections)
        body = "".join(
            f'<h2 id="{name}">{html.escape(title)}</h2>{"".join(parts)}' for name, title, parts in self.sections
        )
        command = html.escape(" ".join(["python", "report.py", *sys.argv[1:]]))
        text = (
            f'<!doctype html><html lang="en"><head><meta charset="utf-8">{GENERATOR}'
            f'<meta name="viewport" content="width=device-width"><title>SDAR report</title><style>{STYLE}</style>'
            f"</head><body><h1>SDAR report</h1><p>{html.escape(heading)}</p><nav>{links}</nav>{body}"
            f"<footer><p>Made by <code>{command}</code></p></footer></body></html>\n"
        )
        (self.out / "index.html").write_text(text)


def claim(out: Path) -> None:
    """The folder may be new, empty or an earlier report's; anything else is somebody's work."""
    index = out / "index.html"
    try:
        if out.exists() and any(path.name != "cache" for path in out.iterdir()) and GENERATOR not in index.read_text():
            raise FileExistsError
        (out / "cache").mkdir(parents=True, exist_ok=True)
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
    if not args.runs_dirs and not args.from_csv:
        fail("name the folder with the runs (python report.py runs --out report), or --from-csv FILE")
    for name in ("max_steps", "random_episodes", "bootstrap", "workers"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            fail(f"--{name.replace('_', '-')} must be at least 1, not {getattr(args, name)}")
    runs, random_returns = [], {}
    for path in args.from_csv:
        stored, returns = read_evaluations(path)
        runs += stored
        random_returns |= returns
    directories, notes = find_runs(args.runs_dirs)
    if not directories and not runs:
        fail(f"no runs under {', '.join(map(str, args.runs_dirs))}: a run directory has an args.json")
    claim(args.out)
    cache = args.out / "cache"
    fresh, more = read_runs(directories, cache, args.workers)
    runs, notes = runs + fresh, notes + more + name_variants(fresh)
    if not runs:
        fail(f"none of the runs can be read: {'; '.join(notes)}")
    known = {run.task for run in runs}
    if args.dimensions_task is not None and args.dimensions_task not in known:
        fail(f"--dimensions-task {args.dimensions_task} has no run here; there are {', '.join(sorted(known))}")
    tasks, more = choose(runs, args.max_steps)
    notes += more
    for task in tasks:
        if task.name not in random_returns:
            try:
                random_returns[task.name] = measure_random(task.name, args.random_episodes, cache)
            except SystemExit as error:
                reason = str(error).removeprefix("error: ")
                notes.append(f"{task.name}: no normalised scores, because the random policy cannot be run: {reason}")
    return Study(runs, tasks, random_returns, notes)


@plt.rc_context(PLOT_STYLE)
def main(args: Args) -> None:
    study = read_study(args)
    runs, tasks, zeros = study.runs, study.tasks, study.zeros
    result, more = aggregate(tasks, zeros, args.bootstrap)
    notes = study.notes + more
    colours = palette(sorted({run.algorithm for run in runs}, key=rank))
    compared = [task for task in tasks if task.groups]

    page = Page(args.out)
    page.section("notes", "What to know first")
    items = "".join(f"<li>{html.escape(note)}</li>" for note in notes)
    page.add(f'<div class="notes"><ul>{items}</ul></div>' if notes else "<p>Nothing was left out.</p>")
    page.section("curves", "Learning curves")
    grid_figure, *single_figures = curve_figures(tasks, colours).items()
    caption = "Greedy return: mean over seeds (n of them), band ± one standard error."
    dotted = " Dotted: single runs that are left out of the means." if any(task.others for task in tasks) else ""
    page.figure(*grid_figure, caption + dotted)
    page.add('<div class="single">')
    for name, figure in single_figures:
        page.figure(name, figure, "")
    page.add("</div>")
    if compared:
        page.section("efficiency", "Sample efficiency")
        for table in auc_tables(compared, zeros):
            page.table(table)
        page.table(time_table(compared))
        page.section("returns", "Return and repetition")
        page.table(return_table(compared, zeros))
        page.table(dimension_table(compared, args.dimensions_task))
        caption = (
            "Return against AFR (the smoother the further left): dots are runs, circles means ± one standard error."
        )
        page.figure("smoothness", smoothness_figure(compared, colours), caption)
    if result is not None:
        page.section("aggregates", "Over all tasks")
        page.table(aggregate_table(result))
        figure = interval_figure(result.iqm, colours, "IQM of n-scores", 1.0)
        page.figure("iqm", figure, "Interquartile mean, 95 % intervals.")
        if result.improvement:
            figure = interval_figure(result.improvement, colours, "P(SDAR is better)", 0.5)
            page.figure("improvement", figure, "Probability that SDAR beats the algorithm, 95 % intervals.")
        page.figure("profiles", profile_figure(result, colours), "Performance profiles with 95 % bands.")
    page.section("runs", "Runs")
    page.table(run_table(runs))
    if zeros:
        listed = (f"{task} {with_error(returns)} ({len(returns)})" for task, returns in study.random_returns.items())
        text = f"Return of the uniformly random policy ± standard error (episodes): {', '.join(listed)}."
        page.add(f'<p class="caption">{html.escape(text)}</p>')
    write_evaluations(args.out / "evaluations.csv", runs, study.random_returns)
    page.add('<p class="caption">All evaluations of all runs: <a href="evaluations.csv">evaluations.csv</a></p>')
    averaged = sum(len(group.runs) for task in compared for group in task.groups.values())
    counts = plural(len(tasks), "task"), plural(len(all_algorithms(compared)), "algorithm")
    heading = f"{', '.join(counts)}, {averaged} of {plural(len(runs), 'run')} compared."
    page.write(heading)
    for note in notes:
        print(f"note: {note}")
    print(f"{heading} Open {args.out / 'index.html'}")


if __name__ == "__main__":
    main(tyro.cli(Args))
