"""Evaluate trained agents: returns, APR and AFR as a table, act-or-repeat pictures, action traces and videos.

Works on the run directories of all six scripts, finished (agent.pt) or not (checkpoint.pt).

    python evaluate.py runs/my-run runs/another --raster raster.png
"""

import contextlib
import importlib
import io
import json
import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal, NoReturn

import gymnasium as gym
import numpy as np
import torch
import tyro
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from torch import Tensor
from tqdm import tqdm

ALGORITHMS = {  # all that a file may ask to import, whoever made it
    "sdar_continuous_action": "SDAR",
    "sac_continuous_action": "SAC",
    "nrep_sac": "N-Rep",
    "taac_continuous_action": "TAAC",
    "temporl_continuous_action": "TempoRL",
    "ute_continuous_action": "UTE",
}
WITH_SELECTION = ("sdar_continuous_action", "taac_continuous_action")
MODES = {"greedy": "greedy", "stochastic": "sample"}  # an evaluation's name for it: the agents' name for it
DIMENSION_NAMES = {  # of tasks whose simulator does not tell
    "MountainCarContinuous": ("force",),
    "LunarLander": ("main engine", "lateral engine"),
    "BipedalWalker": ("hip 1", "knee 1", "hip 2", "knee 2"),
    "Fetch": ("x", "y", "z", "gripper"),
}
ACT, REPEAT = "#143278", "#b9d2ee"  # as in the training's act-or-repeat pictures
DPI = 200
MAX_STEPS_DRAWN = 10_000
ROUNDING = 1e-9  # 49 · (1/49) is a little less than 1


@dataclass
class Args:
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """the run directories to evaluate"""
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
    """film the first greedy episode (.mp4; one run only)"""
    overwrite: bool = False
    """replace pictures and videos that exist already"""
    cuda: bool = False
    """run the networks on the GPU"""


@dataclass
class Run:
    directory: Path
    module: ModuleType  # the script that trained it
    agent: Any
    env: gym.Env
    step: int
    seconds: float | None  # spent on training

    @property
    def algorithm(self) -> str:
        joint = getattr(self.agent.args, "selection", None) == "joint"
        return ALGORITHMS[self.module.SCRIPT] + (" (joint)" if joint else "")


def fail(message: str) -> NoReturn:
    """Bad input ends the program with one line that says what to do."""
    raise SystemExit(f"error: {message}")


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
    if args.video is not None and len(args.runs) > 1:
        fail("--video films one run; name only one")
    if args.cuda and not torch.cuda.is_available():
        fail("there is no CUDA device; leave --cuda away")
    pictures = (".png", ".pdf", ".svg")
    outputs = {"raster": (args.raster, pictures), "actions": (args.actions, pictures), "video": (args.video, (".mp4",))}
    for option, (path, suffixes) in outputs.items():
        if path is not None:
            check_output(f"--{option} {path}", path, suffixes, args.overwrite)
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


def read_entries(path: Path) -> dict[str, Any]:
    """What an agent.pt or checkpoint.pt holds. Which script has to read it properly is one of the entries."""
    try:
        contents = torch.load(path, map_location="cpu", weights_only=True)
        script = contents["script"]
    except Exception as error:  # whatever a damaged or hostile file makes the reader raise
        fail(f"{path} is damaged or not one of ours ({type(error).__name__})")
    if script not in list(ALGORITHMS):
        fail(f"{path} was written by {script!r}; these can be evaluated: {', '.join(ALGORITHMS)}")
    return contents


def open_run(directory: Path, args: Args) -> Run:
    if not directory.is_dir():
        fail(f"there is no run directory {directory}")
    path = next((directory / f for f in ("agent.pt", "checkpoint.pt") if (directory / f).exists()), None)
    if path is None:
        fail(f"{directory} has no agent.pt and no checkpoint.pt yet")
    if not os.access(directory, os.W_OK):
        fail(f"{directory} is not writable, but the evaluation is kept there; evaluate a copy of it")
    contents = read_entries(path)
    module = importlib.import_module(contents["script"])
    if args.selector != "learned" and module.SCRIPT not in WITH_SELECTION:
        fail(f"--selector {args.selector} replaces SDAR's or TAAC's act-or-repeat policy; {directory} has none")
    agent = module.load_agent(path, torch.device("cuda" if args.cuda else "cpu"))
    options = agent.args
    step = options.total_timesteps if path.name == "agent.pt" else contents.get("step")
    if (
        not isinstance(options.env_id, str)
        or type(step) is not int
        or type(options.seed) is not int
        or options.seed < 0
    ):
        fail(f"{path} is not the file of a run")
    env = filmed_env(module, options.env_id) if args.video else module.make_env(options.env_id)
    if (env.observation_space.shape, env.action_space.shape) != ((contents["obs_dim"],), (contents["act_dim"],)):
        fail(f"{path} was trained on another version of {options.env_id}: observations or actions differ in number")
    seconds = contents["seconds"] if "seconds" in contents else training_seconds(directory)
    return Run(directory, module, agent, env, step, seconds)


def training_seconds(directory: Path) -> float | None:
    """agent.pt does not tell how long the training took, but the files around it do."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return json.loads((directory / "evaluation.json").read_text())["seconds"]
    path = directory / "checkpoint.pt"
    return read_entries(path).get("seconds") if path.exists() else None


def filmed_env(module: ModuleType, env_id: str) -> gym.Env:
    if sys.platform == "linux" and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        os.environ.setdefault("MUJOCO_GL", "egl")  # before MuJoCo is imported
    try:
        env = module.make_env(env_id, "rgb_array")
        env.reset(seed=0)
        if np.ndim(env.render()) != 3:
            raise ValueError("render() does not return a picture")
    except (Exception, SystemExit) as error:  # each renderer has its own; without EGL even importing MuJoCo fails
        reason = " ".join(str(error).removeprefix("error: ").split())
        fail(
            f"--video cannot render {env_id}: {reason}. Without a screen, install EGL (Debian: libegl1 libgl1) and set "
            "MUJOCO_GL=egl, or OSMesa (libosmesa6) and MUJOCO_GL=osmesa"
        )
    return env


def dimension_names(env: gym.Env) -> list[str]:
    """What each action dimension moves, where the task says so; a0, a1, … otherwise."""
    (width,) = env.action_space.shape
    for task, names in DIMENSION_NAMES.items():
        if env.spec.id.startswith(task) and len(names) == width:
            return list(names)
    model = getattr(env.unwrapped, "model", None)
    if getattr(model, "nu", None) != width:
        return [f"a{i}" for i in range(width)]
    names = []
    for i in range(width):
        moves_joint = model.actuator_trntype[i] in (0, 1)  # mjTRN_JOINT, mjTRN_JOINTINPARENT
        name = model.actuator(i).name or (model.joint(model.actuator_trnid[i, 0]).name if moves_joint else "")
        names.append(name.removesuffix("_joint").replace("_", " ") or f"a{i}")
    return names


# Episodes.


def acts_by_rule(selector: str, rates: Tensor, t: int) -> Tensor:
    """Which bits act at step t ≥ 1 of an episode, whatever the state; each acts at its rate."""
    if selector == "periodic":
        return torch.floor(t * rates + ROUNDING) > torch.floor((t - 1) * rates + ROUNDING)
    return torch.rand_like(rates) < rates  # random; always and never have rates of 1 and 0


def roll_out(
    run: Run,
    mode: str,
    seed: int,
    episodes: int,
    rule: Callable[[int], Tensor] | None = None,
    film: bool = False,
    done: Callable[[], Any] = lambda: None,
) -> tuple[list[Any], float, Tensor | None]:
    """Trajectories, decisions per step, and the share of steps t ≥ 1 at which each bit of the learned selection acts.

    `rule` takes the selection's place; `film` the first episode; `done` is called after each one. The agent acts by its
    own code, and hooks on its networks see when it decides.
    """
    agent, module = run.agent, run.module
    steps, t, decided, probabilities, rates = 0, 0, set(), [], []

    def at_step() -> None:
        nonlocal steps, t
        steps, t = steps + 1, t + 1

    def at_decision(*_: Any) -> None:
        decided.add(steps)

    def at_selection(logits: Tensor) -> Tensor:
        if t == 0:  # acts anyway: there is nothing to repeat
            return logits
        if rule is not None:
            return torch.where(rule(t), math.inf, -math.inf)  # certain, also where bits are sampled
        probabilities.append((logits > 0).double() if mode == "greedy" else torch.sigmoid(logits.double()))
        return logits

    with contextlib.ExitStack() as stack:
        for network in agent.children():
            stack.enter_context(network.register_forward_pre_hook(at_decision))
        if module.SCRIPT == "sdar_continuous_action":
            stack.enter_context(agent.selection.register_forward_hook(lambda _, __, logits: at_selection(logits)))
        elif module.SCRIPT == "taac_continuous_action":  # its β is no network of its own
            learned = agent.selection_logits
            agent.selection_logits = lambda *values: at_selection(learned(*values))
            stack.callback(delattr, agent, "selection_logits")
        stack.enter_context(module.private_rng(module.derived_seed(seed, 2), agent.device))
        trajectories = []
        for i in range(episodes):
            t = -1
            episode_seed = module.derived_seed(seed, 1, i)
            try:
                played = module.play_episode(agent, run.env, episode_seed, mode, film and i == 0, at_step)
            except module.NotFinite as error:
                fail(f"{run.directory}: {error.what} is not finite")
            trajectories.append(played)
            if probabilities:
                rates.append(torch.stack(probabilities).mean(0))  # episodes count the same, as in APR
                probabilities.clear()
            done()
    return trajectories, len(decided) / steps, torch.stack(rates).mean(0) if rates else None


def evaluate(run: Run, args: Args, done: Callable[[], Any] = lambda: None) -> tuple[dict[str, dict[str, Any]], Any]:
    """The evaluations of the learned selection and of --selector, and the latter's first greedy trajectory."""
    seed = run.agent.args.seed if args.seed is None else args.seed
    about = {"step": run.step, "seconds": run.seconds, "seed": seed}
    results = {selector: {**about, "selector": selector} for selector in ("learned", args.selector)}
    for name, mode in MODES.items():
        film = args.video is not None and mode == "greedy"
        play = partial(roll_out, run, mode, seed, args.episodes, done=done)
        played, decisions, rates = play(film=film and args.selector == "learned")
        results["learned"][name] = {**run.module.summarise(played), "decisions_per_step": decisions}
        if args.selector != "learned":
            if rates is None:
                fail(f"{run.directory}: its episodes last one step, so there is nothing to select")
            rates = {"always": torch.ones_like(rates), "never": torch.zeros_like(rates)}.get(args.selector, rates)
            played, decisions, _ = play(rule=partial(acts_by_rule, args.selector, rates), film=film)
            summary = {**run.module.summarise(played), "decisions_per_step": decisions}
            results[args.selector][name] = {**summary, "act_rate": rates.reshape(-1).tolist()}
        if mode == "greedy":
            shown = played[0]
    return results, shown


# Tables, pictures, videos.


def show(value: float, digits: int) -> str:
    return {"nan": "-", "inf": "∞"}.get(str(value), f"{value:,.{digits}f}")


def table(rows: list[dict[str, str]]) -> str:
    """Rows of the same columns as aligned Markdown; what starts like a number ends at the right."""
    lines = [[] for _ in range(len(rows) + 2)]
    for title in rows[0]:
        column = [title, "", *(row[title] for row in rows)]
        width = max(map(len, column))
        numbers = column[2][0] in "-∞0123456789"
        column[1] = "-" * (width - numbers) + ":" * numbers
        for line, cell in zip(lines, column, strict=True):
            line.append(cell.rjust(width) if numbers else cell.ljust(width))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


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
                    "run": run.directory.resolve().name,
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
                names = dimension_names(run.env)
                values = [f"{name} {show(apr, 2)}" for name, apr in zip(names, summary["apr_dim"], strict=True)]
                per_dimension.append(f"- {', '.join([row['run'], *which.values()])}: {', '.join(values)}")
    return "\n".join([table(rows), "", "APR per dimension:", "", *per_dimension])


def acts(actions: np.ndarray) -> np.ndarray:
    """(T, |A|): where an executed action differs from the last one. An episode's first step acts."""
    return np.vstack([np.ones_like(actions[:1], bool), np.diff(actions, axis=0) != 0])


@dataclass
class Picture:
    """What the pictures show of one run."""

    title: str
    names: list[str]  # of the action dimensions
    start: int
    actions: np.ndarray  # (steps, |A|) from `start` on
    acts: np.ndarray  # the same shape


def picture(run: Run, trajectory: Any, args: Args) -> Picture:
    (start, stop), length = args.steps, len(trajectory.actions)
    if start >= length:
        fail(f"--steps {start} {stop}: the episode of {run.directory} has only {length} steps")
    stop = min(stop, length)
    rule = "" if args.selector == "learned" else f", {args.selector} selector"
    part = f"all its {length} steps" if stop - start == length else f"steps {start} to {stop - 1} of {length}"
    title = (
        f"{run.algorithm}{rule}, {run.agent.args.env_id}: greedy episode, return {trajectory.total_reward:,.1f}, {part}"
    )
    actions, acting = trajectory.actions[start:stop], acts(trajectory.actions)[start:stop]
    return Picture(title, dimension_names(run.env), start, actions, acting)


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
        panel.pcolormesh(*edges, p.acts.T, cmap=ListedColormap([REPEAT, ACT]), vmin=0, vmax=1, rasterized=True)
        panel.hlines(edges[1][1:-1], edges[0][0], edges[0][-1], color="white", linewidth=2)
        panel.invert_yaxis()  # the first dimension on top
        panel.grid(False)  # whatever the user's matplotlibrc says
        panel.set_title(p.title, fontsize=10, loc="left")
        panel.set_yticks(np.arange(len(p.names)) + 0.5, p.names)
        panel.tick_params(axis="y", length=0)
        panel.spines[:].set_visible(False)
    handles = [Patch(color=ACT, label="act"), Patch(color=REPEAT, label="repeat")]
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
            panel.stairs(values, edges, baseline=None, color=REPEAT, linewidth=1.5)
            panel.plot(edges[:-1][acting], values[acting], ".", color=ACT, markersize=4, clip_on=False)
            panel.set(ylim=(-1.1, 1.1), yticks=(-1, 0, 1))
            panel.set_ylabel(name, fontsize=8)
            panel.spines[["top", "right"]].set_visible(False)
    return figure


def write_figure(figure: Figure, path: Path, run: Run) -> None:
    data = io.BytesIO()
    figure.savefig(data, format=path.suffix[1:].lower(), dpi=DPI)
    run.module.write_atomically(path, data.getbuffer())


def write_video(frames: list[np.ndarray], path: Path, fps: float) -> None:
    import imageio.v2 as imageio

    unfinished = path.with_name(f".{path.name}.{os.getpid()}.mp4")
    try:
        with imageio.get_writer(unfinished, fps=fps, macro_block_size=2) as video:  # H.264 wants even sizes
            for frame in frames:
                video.append_data(frame)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def main(args: Args) -> None:
    check_args(args)
    runs = [open_run(directory, args) for directory in args.runs]
    results, shown = [], []
    rollouts = len(runs) * len(MODES) * len({"learned", args.selector})
    with tqdm(total=rollouts * args.episodes, unit=" episodes", disable=None, dynamic_ncols=True) as bar:
        for run in runs:
            evaluations, trajectory = evaluate(run, args, bar.update)
            name = "evaluation.json" if args.selector == "learned" else f"evaluation-{args.selector}.json"
            run.module.write_atomically(run.directory / name, run.module.to_json(evaluations[args.selector]))
            results.append((run, evaluations))
            shown.append((run, trajectory))
    print(report(results))
    if args.video is not None:
        write_video(trajectory.frames, args.video, run.env.metadata.get("render_fps", 30))
    if args.raster is not None or args.actions is not None:
        pictures = [picture(run, trajectory, args) for run, trajectory in shown]
    if args.raster is not None:
        write_figure(raster_figure(pictures), args.raster, run)
    if args.actions is not None:
        write_figure(actions_figure(pictures), args.actions, run)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
