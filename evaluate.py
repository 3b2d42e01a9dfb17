"""Evaluate trained agents: returns, APR and AFR as a table, act-or-repeat pictures, action traces and videos.

Works on the run directories of all six scripts, finished (agent.pt) or not (checkpoint.pt), and on an agent.pt alone.

    python evaluate.py runs/my-run runs/another --raster raster.png
"""

import collections
import contextlib
import csv
import importlib
import io
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
import tyro
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from torch import Tensor
from tqdm import tqdm

from sdar_utils import ALGORITHMS, NotFinite, fail
from sdar_utils.checkpoint import agent_file, load_agent, save_acting, write_atomically, write_json
from sdar_utils.devices import cuda_trouble
from sdar_utils.envs import RULE, derived_seed, dimension_names, make_env, make_filmed_env
from sdar_utils.evaluation import ACT, MODES, REPEAT, Evaluator, Trajectory, acts, summarise
from sdar_utils.film import annotate, side_by_side, write_video
from sdar_utils.noise import EpisodesNoise, Noise
from sdar_utils.tables import markdown

CERTAIN = {"always": 1.0, "never": 0.0}  # selectors and their act rates
ACT_COLOUR, REPEAT_COLOUR = (tuple(np.array(rgb) / 255) for rgb in (ACT, REPEAT))
DPI = 200
MAX_STEPS_DRAWN = 10_000
ROUNDING = 1e-9  # 49 · (1/49) is a little less than 1


@dataclass
class Args:
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """the run directories to evaluate, which keep the evaluation, or agents' files (.pt)"""
    episodes: int = 10
    """so many greedy episodes and so many stochastic ones"""
    seed: int | None = None
    """seed of the episodes; by default each run's own, which gives the episodes of its training's evaluations"""
    selector: Literal["learned", "always", "never", "random", "periodic"] = "learned"
    """what chooses between act and repeat (SDAR, TAAC): the learned policy, or a rule that does not look at the state;
    random and periodic act as often as the learned policy does, in each dimension"""
    raster: Path | None = None
    """draw act or repeat over time for each dimension of the first greedy episode (.png, .pdf or .svg)"""
    actions: Path | None = None
    """draw the actions of the first greedy episode with the acts marked (.png, .pdf or .svg)"""
    steps: tuple[int, int] = (0, 200)
    """the pictures show the episode from the first of these steps until before the second"""
    video: Path | None = None
    """film the first greedy episode with its return so far and, below it, act or repeat (.mp4 or .gif); several runs
    play side by side"""
    export: Path | None = None
    """keep of one run only the networks that act, in a small file that plays anywhere (.pt)"""
    overwrite: bool = False
    """replace pictures, videos and exported agents that exist already"""
    cuda: bool = False
    """run the networks on the GPU"""


@dataclass
class Run:
    path: Path  # its directory, or an agent's file
    algorithm: str
    agent: Any
    contents: dict[str, Any]  # of its file
    select: Callable[[Tensor, Noise], Tensor] | None  # how its act-or-repeat policy draws, if it has one
    evaluator: Evaluator
    dimensions: list[str]  # what each action dimension moves
    step: int
    seconds: float | None  # spent on training


# Inputs: everything is checked before the first episode.


def check_args(args: Args) -> None:
    if not args.runs:
        fail("name at least one run directory")
    if args.episodes < 1:
        fail(f"--episodes must be at least 1, not {args.episodes}")
    if args.seed is not None and args.seed < 0:
        fail(f"--seed must not be negative, but it is {args.seed}")
    if not 0 <= args.steps[0] < args.steps[1]:
        fail(f"--steps {args.steps[0]} {args.steps[1]} is no window; name a first step and a larger one to stop at")
    if args.steps[1] - args.steps[0] > MAX_STEPS_DRAWN:
        fail(
            f"--steps {args.steps[0]} {args.steps[1]} is too wide for a picture; draw {MAX_STEPS_DRAWN:,} steps at most"
        )
    places = [run.resolve() for run in args.runs]
    for run, place in zip(args.runs, places, strict=True):
        if places.count(place) > 1:
            fail(f"{run} is named twice")
    if args.cuda and (trouble := cuda_trouble()) is not None:
        fail(f"{trouble}; leave --cuda away")
    pictures = (".png", ".pdf", ".svg")
    films = (".mp4", ".gif")
    outputs = {"raster": (args.raster, pictures), "actions": (args.actions, pictures), "video": (args.video, films)}
    outputs["export"] = (args.export, (".pt",))
    for option, (path, suffixes) in outputs.items():
        if path is not None:
            check_output(f"--{option} {path}", path, suffixes, args.overwrite)
    if args.export is not None and len(args.runs) > 1:
        fail(f"--export {args.export} keeps one agent; name one run, not {len(args.runs)}")
    if args.raster is not None and args.actions is not None and args.raster.resolve() == args.actions.resolve():
        fail(f"--raster and --actions both name {args.raster}")


def check_output(option: str, path: Path, suffixes: tuple[str, ...], overwrite: bool) -> None:
    if path.suffix.lower() not in suffixes:
        fail(f"{option} must end in {' or '.join(suffixes)}")
    if not path.parent.is_dir():
        fail(f"{option}: there is no directory {path.parent}")
    if path.is_dir():
        fail(f"{option} is a directory")
    if path.exists() and not overwrite:
        fail(f"{option} exists; choose another name, or replace it with --overwrite")
    if not os.access(path.parent, os.W_OK):
        fail(f"{option}: {path.parent} is not writable")


def open_run(path: Path, args: Args) -> Run:
    if not path.exists():
        fail(f"there is no run directory or agent {path}")
    file = agent_file(path) if path.is_dir() else path
    if path.is_dir() and not os.access(path, os.W_OK):
        fail(f"{path} is not writable, but the evaluation is kept there; evaluate its {file.name} instead")
    device = torch.device("cuda" if args.cuda else "cpu")
    agent, contents = load_agent(file, device)
    script, options = contents["script"], agent.args
    select = getattr(importlib.import_module(script), "draw_act_mask", None)
    if args.selector != "learned" and select is None:
        fail(f"--selector {args.selector} replaces SDAR's or TAAC's act-or-repeat policy; {path} has none")
    step = contents.get("step", options.total_timesteps)  # a checkpoint's own
    if [type(value) for value in (options.env_id, options.seed, step)] != [str, int, int] or options.seed < 0:
        fail(f"{file} is not the file of a run")
    env = make_filmed_env(options.env_id, "--video") if args.video else make_env(options.env_id)
    if (env.observation_space.shape, env.action_space.shape) != ((agent.obs_dim,), (agent.act_dim,)):
        fail(f"{file} was trained on another version of {options.env_id}: observations or actions differ in number")
    seed = options.seed if args.seed is None else args.seed
    evaluator = Evaluator(partial(make_env, options.env_id), seed, device, film=env if args.video else None)
    algorithm = ALGORITHMS[script] + " (joint)" * (getattr(options, "selection", None) == "joint")
    return Run(path, algorithm, agent, contents, select, evaluator, dimension_names(env), step, training_seconds(path))


def training_seconds(directory: Path) -> float | None:
    """Until the last evaluation; None if there is none."""
    with contextlib.suppress(OSError, csv.Error, ValueError, KeyError, TypeError):
        *_, last = csv.DictReader((directory / "evaluations.csv").read_text().splitlines())
        return float(last["seconds"])
    return None


# Selection: what an agent asks, as `select`, which bits act at each step t ≥ 1.


class Watched:
    """The learned selection, and how likely each bit was to act at every step of every episode."""

    def __init__(self, select: Callable[[Tensor, Noise], Tensor]):
        self.select = select
        self.chances: dict[tuple[EpisodesNoise, int], list[Tensor]] = collections.defaultdict(list)  # (batch, its row)

    def __call__(self, logits: Tensor, noise: EpisodesNoise) -> Tensor:
        chances = torch.where(noise.greedy[:, None], (logits > 0).double(), torch.sigmoid(logits.double()))
        for row in noise.asked:
            self.chances[noise, row].append(chances[row])
        return self.select(logits, noise)

    def rates(self) -> dict[str, Tensor]:
        """The share of steps at which each bit acts, for each mode; episodes count the same, as in APR."""
        means = collections.defaultdict(list)
        for (noise, row), chances in self.chances.items():
            means["greedy" if noise.greedy[row] else "stochastic"].append(torch.stack(chances).mean(0))
        return {mode: torch.stack(of_episodes).mean(0) for mode, of_episodes in means.items()}


class Rule:
    """Lets each bit act at its rate, whatever the state: evenly spread if periodic, at random otherwise."""

    def __init__(self, selector: str, rates: dict[str, Tensor], seed: int):
        self.selector, self.rates = selector, rates
        self.generator = torch.Generator().manual_seed(derived_seed(seed, RULE))
        self.noise, self.t = None, 0

    def __call__(self, logits: Tensor, noise: EpisodesNoise) -> Tensor:
        if noise is not self.noise:  # the next episodes have begun
            self.noise, self.t = noise, 0
        self.t += 1
        rates = torch.where(noise.greedy[:, None], self.rates["greedy"], self.rates["stochastic"])
        if self.selector == "periodic":
            return torch.floor(self.t * rates + ROUNDING) > torch.floor((self.t - 1) * rates + ROUNDING)
        return torch.rand(rates.shape, generator=self.generator, dtype=rates.dtype).to(rates.device) < rates


def evaluate(
    run: Run, args: Args, done: Callable[[], Any] = lambda: None
) -> tuple[dict[str, dict[str, Any]], Trajectory]:
    """The evaluations of the learned selection and of --selector, and the latter's first greedy episode."""

    def play(**selection: Any) -> dict[str, list[Trajectory]]:
        try:
            return run.evaluator.play(partial(run.agent.act, **selection), args.episodes, done)
        except NotFinite as error:
            fail(f"{run.path}: {error.what} is not finite")

    seed, rates = run.evaluator.seed, {}
    if args.selector == "learned":
        played = {"learned": play()}
    else:
        watched = Watched(run.select)
        played = {"learned": play(select=watched)}
        rates = watched.rates()
        if len(rates) < len(MODES):
            fail(f"{run.path}: its episodes last one step, so there is nothing to select")
        if args.selector in CERTAIN:
            rates = {mode: torch.full_like(rate, CERTAIN[args.selector]) for mode, rate in rates.items()}
        played[args.selector] = play(select=Rule(args.selector, rates, seed))

    evaluations = {}
    for selector, trajectories in played.items():
        summaries = {mode: summarise(of_mode) for mode, of_mode in trajectories.items()}
        about = {"step": run.step, "seconds": run.seconds, "seed": seed, "selector": selector}
        evaluations[selector] = {**about, **summaries}
    for mode, rate in rates.items():
        evaluations[args.selector][mode]["act_rate"] = rate.tolist()
    return evaluations, played[args.selector]["greedy"][0]


# Tables, pictures, videos.


def show(value: float, digits: int) -> str:
    return {"nan": "-", "inf": "∞"}.get(str(value), f"{value:,.{digits}f}")


def report(results: list[tuple[Run, dict[str, dict[str, Any]]]]) -> str:
    """One table of all runs, and below it what would make it too wide."""
    rows, per_dimension = [], []
    for run, evaluations in results:
        for mode in MODES:
            for selector, evaluation in evaluations.items():
                summary = evaluation[mode]
                error = f" ± {show(summary['return_standard_error'], 1)}" if summary["episodes"] > 1 else ""
                which = {"selector": selector, "mode": mode} if len(evaluations) > 1 else {"mode": mode}
                row = {
                    "run": run.path.resolve().name,
                    "task": run.agent.args.env_id,
                    "algorithm": run.algorithm,
                    **which,
                    "step": f"{run.step:,}",
                    "return": show(summary["return"], 1) + error,
                    "APR": show(summary["apr"], 2),
                    "AFR": show(summary["afr"], 3),
                    "AFR per dim": show(summary["afr_per_dim"], 3),
                    "length": show(summary["length"], 1),
                    "decisions/step": show(summary["decisions_per_step"], 3),
                }
                rows.append(row)
                aprs = zip(run.dimensions, summary["apr_dim"], strict=True)
                values = [f"{name} {show(apr, 2)}" for name, apr in aprs]
                per_dimension.append(f"- {', '.join([row['run'], *which.values()])}: {', '.join(values)}")
    table = markdown(list(rows[0]), [list(row.values()) for row in rows], align=True)
    return "\n".join([table, "", "APR per dimension:", "", *per_dimension])


@dataclass
class Picture:
    """What the pictures show of one run."""

    title: str
    names: list[str]  # of the action dimensions
    start: int
    actions: np.ndarray  # (steps, |A|) from `start` on
    acts: np.ndarray  # the same shape


def picture(run: Run, trajectory: Trajectory, args: Args) -> Picture:
    (start, stop), length = args.steps, len(trajectory.actions)
    if start >= length:
        fail(f"--steps {start} {stop}: the episode of {run.path} has only {length} steps")
    stop = min(stop, length)
    rule = "" if args.selector == "learned" else f", {args.selector} selector"
    part = f"all its {length} steps" if stop - start == length else f"steps {start} to {stop - 1} of {length}"
    title = (
        f"{run.algorithm}{rule}, {run.agent.args.env_id}: greedy episode, return {trajectory.total_reward:,.1f}, {part}"
    )
    actions, acting = trajectory.actions[start:stop], acts(trajectory.actions)[start:stop]
    return Picture(title, run.dimensions, start, actions, acting)


def stacked_panels(heights: list[float], pictures: list[Picture]) -> tuple[Figure, list[Axes]]:
    """Panels with a common time axis, wide enough that every step has two pixels at least."""
    start, steps = pictures[0].start, max(len(p.actions) for p in pictures)
    figure = Figure((max(9, 2 + 2 * steps / DPI), sum(heights) + 0.6), layout="constrained")
    panels = list(figure.subplots(len(heights), squeeze=False, sharex=True, height_ratios=heights)[:, 0])
    panels[-1].set(xlim=(start, start + steps), xlabel="step")
    return figure, panels


def raster_figure(pictures: list[Picture]) -> Figure:
    """Act or repeat over time, a panel for each run and in it a row for each dimension, as in the paper's Fig. 4."""
    figure, panels = stacked_panels([0.25 * len(p.names) + 0.4 for p in pictures], pictures)
    for panel, p in zip(panels, pictures, strict=True):
        edges = p.start + np.arange(len(p.acts) + 1), np.arange(len(p.names) + 1)
        panel.pcolormesh(
            *edges, p.acts.T, cmap=ListedColormap([REPEAT_COLOUR, ACT_COLOUR]), vmin=0, vmax=1, rasterized=True
        )
        panel.hlines(edges[1][1:-1], edges[0][0], edges[0][-1], color="white", linewidth=2)
        panel.invert_yaxis()  # the first dimension on top
        panel.grid(False)  # whatever the user's matplotlibrc says
        panel.set_title(p.title, fontsize=10, loc="left")
        panel.set_yticks(np.arange(len(p.names)) + 0.5, p.names)
        panel.tick_params(axis="y", length=0)
        panel.spines[:].set_visible(False)
    handles = [Patch(color=ACT_COLOUR, label="act"), Patch(color=REPEAT_COLOUR, label="repeat")]
    figure.legend(handles=handles, loc="outside upper right", ncols=2, frameon=False)
    return figure


def actions_figure(pictures: list[Picture]) -> Figure:
    """The actions over time, a panel for each dimension of each run; dots are acts."""
    figure, panels = stacked_panels([1.1] * sum(len(p.names) for p in pictures), pictures)
    panels[-1].set_xlabel("step (a dot is an act)")
    for p in pictures:
        edges = p.start + np.arange(len(p.actions) + 1)
        own, panels = panels[: len(p.names)], panels[len(p.names) :]
        own[0].set_title(p.title, fontsize=10, loc="left")
        for panel, name, values, acting in zip(own, p.names, p.actions.T, p.acts.T, strict=True):
            panel.stairs(values, edges, baseline=None, color=REPEAT_COLOUR, linewidth=1.5)
            panel.plot(edges[:-1][acting], values[acting], ".", color=ACT_COLOUR, markersize=4, clip_on=False)
            panel.set(ylim=(-1.1, 1.1), yticks=(-1, 0, 1))
            panel.set_ylabel(name, fontsize=8)
            panel.spines[["top", "right"]].set_visible(False)
    return figure


def write_figure(figure: Figure, path: Path) -> None:
    data = io.BytesIO()
    figure.savefig(data, format=path.suffix[1:].lower(), dpi=DPI)
    write_atomically(path, data.getbuffer())


def main(args: Args) -> None:
    check_args(args)
    runs = [open_run(directory, args) for directory in args.runs]
    results, shown = [], []
    rollouts = len(runs) * len(MODES) * len({"learned", args.selector})
    with tqdm(total=rollouts * args.episodes, unit=" episodes", disable=None, dynamic_ncols=True) as bar:
        for run in runs:
            evaluations, trajectory = evaluate(run, args, bar.update)
            name = "evaluation.json" if args.selector == "learned" else f"evaluation-{args.selector}.json"
            if run.path.is_dir():
                write_json(run.path / name, evaluations[args.selector])
            results.append((run, evaluations))
            shown.append((run, trajectory))
    print(report(results))
    if args.export is not None:
        save_acting(args.export, runs[0].agent, runs[0].contents)
    if args.video is not None:
        films = [annotate(trajectory, run.dimensions, run.algorithm) for run, trajectory in shown]
        write_video(side_by_side(films), args.video, runs[0].evaluator.fps)
    if args.raster is not None or args.actions is not None:
        pictures = [picture(run, trajectory, args) for run, trajectory in shown]
    if args.raster is not None:
        write_figure(raster_figure(pictures), args.raster)
    if args.actions is not None:
        write_figure(actions_figure(pictures), args.actions)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
