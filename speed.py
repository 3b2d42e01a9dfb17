"""How fast the scripts train and evaluate, how their cost grows, and what the estimators of β's gradient give for it.

What is compared takes turns: whatever else the machine does disturbs all of it alike. Tables give medians over the
turns. A training step is one of a script's own `train`, in a process of its own.

    python speed.py steps --env-ids HalfCheetah-v4 LunarLanderContinuous-v3
    python speed.py growth
    python speed.py evaluation --env-ids HalfCheetah-v4 LunarLanderContinuous-v3
    python speed.py estimators runs/<run name>
    python speed.py doctor
"""

import collections
import contextlib
import dataclasses
import importlib
import importlib.util
import itertools
import json
import multiprocessing
import os
import platform
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import gymnasium as gym
import numpy as np
import torch
import tyro
from torch import Tensor
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from sdar_utils import ALGORITHMS, fail
from sdar_utils.checkpoint import agent_file, load_agent
from sdar_utils.devices import cuda_trouble, driver_cuda, upload
from sdar_utils.envs import EVALUATION, derived_seed, make_env
from sdar_utils.evaluation import Evaluator, Trajectory
from sdar_utils.gradients import check_compiler
from sdar_utils.noise import Noise
from sdar_utils.options import RunArgs
from sdar_utils.run import keep_freed_memory
from sdar_utils.tables import markdown

SCRIPTS = {name: script for script, name in ALGORITHMS.items()}
LIBRARIES = {"SB3 SAC": "stable_baselines3", "SBX SAC": "sbx"}  # measured when they are installed
LEARNING_STARTS = 10
COUNTED = 12  # updates whose matrix products are counted: whole cycles of policy updates, before the first turn
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
CPU = torch.device("cpu")


@dataclass
class Common:
    threads: int = 1
    """threads, and processor cores, that each contender may use"""
    clock: Literal["wall", "cpu"] = "wall"
    """cpu counts a contender's own processor time, for a machine that is busy with other things as well"""
    output: Path | None = None
    """where to write results: this path with .json, and .png for the plots (default: the subcommand's name)"""


@dataclass
class Race(Common):
    turns: int = 7
    """how many turns each contender has; the tables give their medians"""
    steps: int = 50
    """steps of a turn"""
    rows: int = 10_000
    """rows in the replay buffer from the start on"""
    cuda: bool = False
    """train on the GPU, and wait for it before each look at the clock"""


@dataclass
class Steps(Race):
    """Steps per second of every script, and of stable-baselines3 and sbx-rl when they are installed."""

    env_ids: tuple[str, ...] = ("HalfCheetah-v4",)
    """the tasks"""
    algorithms: tuple[str, ...] = (*SCRIPTS, *LIBRARIES)
    """what to measure"""
    hidden_dims: tuple[int, ...] = (256,)
    """widths of the hidden layers; the batch is as large"""
    num_selection_samples: tuple[int, ...] = (10, 4)
    """SDAR's K: a row of the table for each (one row where its objective is exact)"""
    compile: bool = False
    """measure the scripts with --compile as well"""


@dataclass
class Growth(Race):
    """Steps per second of SDAR against K, the number of action dimensions and the width of the networks."""


@dataclass
class Doctor(Race):
    """What this machine is and whether a GPU works, with a minute of training, as a text to paste into an issue."""

    turns: int = 3
    """how many turns each contender has; the table gives their medians"""
    steps: int = 100
    """steps of a turn"""
    cuda: bool = True
    """look at the GPU too, and train there if it works"""
    hidden_dim: int = 256
    """width of the hidden layers; the batch is as large"""


@dataclass
class Evaluation(Common):
    """Time of an evaluation, of which training has one every 10,000 steps: 10 greedy and 10 stochastic episodes, played
    one by one, and together as the scripts do. Their length depends on the agent, so it is given per step, too."""

    runs: tyro.conf.Positional[tuple[Path, ...]] = ()
    """run directories, finished or not, whose agents play; without any, untrained agents do"""
    env_ids: tuple[str, ...] = ("HalfCheetah-v4",)
    """the tasks of untrained agents"""
    algorithms: tuple[str, ...] = tuple(SCRIPTS)
    """the scripts of untrained agents"""
    hidden_dims: tuple[int, ...] = (256,)
    """widths of untrained agents' hidden layers"""
    turns: int = 5
    """how many evaluations each agent plays in either way; the tables give their medians"""


@dataclass
class Estimators(Common):
    """Error of β's gradient against the time of its update, on states that trained agents visit."""

    runs: tyro.conf.Positional[tuple[Path, ...]] = ()
    """run directories of sdar_continuous_action.py, finished or not"""
    draws: int = 200
    """gradients drawn from each estimator"""


# A task whose own cost is nothing, with as many action dimensions as one likes.


class Idle(gym.Env):
    def __init__(self, act_dim: int, render_mode: str | None = None):
        self.observation_space = gym.spaces.Box(-1, 1, (17,), np.float32)
        self.action_space = gym.spaces.Box(-1, 1, (act_dim,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        return self.np_random.uniform(-1, 1, 17).astype(np.float32), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        return self.np_random.uniform(-1, 1, 17).astype(np.float32), float(action.mean()), False, False, {}


def idle_task(act_dim: int) -> str:
    return f"speed:Idle{act_dim}-v0"


for n in range(1, 33):
    gym.register(idle_task(n).removeprefix("speed:"), Idle, kwargs={"act_dim": n})


# The contenders' side: training in a process of its own, a turn at a time.


@dataclass(frozen=True)
class Contender:
    name: str
    env_id: str
    module: str
    options: tuple[tuple[str, Any], ...]  # of the script's Args


@dataclass
class Turn:
    total: float  # seconds of a step
    update: float
    floor: float  # seconds that torch takes for an update's matrix products alone; nan if unknown
    memory: int  # the process's peak, or what it had of the GPU, in bytes
    graph_skips: int  # losses that did not become CUDA graphs


class MatrixProducts(TorchDispatchMode):
    """Counts matrix products by their shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: collections.Counter = collections.Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if function in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default):
            self.shapes[args[0].shape, args[1].shape] += 1
        elif function in (torch.ops.aten.addmm.default, torch.ops.aten.baddbmm.default):
            self.shapes[args[1].shape, args[2].shape] += 1
        return function(*args, **(kwargs or {}))


class Finished(Exception):
    pass


class Meter:
    """Watches a training loop from inside, and stops it between two turns."""

    def __init__(self, pipe: Connection, settings: Race):
        self.pipe, self.turn, self.settings = pipe, settings.steps, settings
        self.steps, self.updating = -LEARNING_STARTS - COUNTED, 0.0
        self.counted_updates, self.products = 0, MatrixProducts()
        self.began = self.clock()

    def clock(self) -> float:
        if self.settings.cuda:
            torch.cuda.synchronize()
        return CLOCKS[self.settings.clock]()

    def timed(self, function: Callable, count_products: bool = False) -> Callable:
        """The function, which is a part of the update."""

        def call(*args: Any, **kwargs: Any) -> Any:
            counting = count_products and self.counted_updates < COUNTED
            self.counted_updates += counting
            began = self.clock()
            with self.products if counting else contextlib.nullcontext():
                result = function(*args, **kwargs)
            self.updating += self.clock() - began
            return result

        return call

    def step(self) -> None:
        self.steps += 1
        if self.steps > 0 and self.steps % self.turn == 0:
            seconds = self.clock() - self.began
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if platform.system() == "Darwin" else 1024)
            memory = torch.cuda.max_memory_allocated() if self.settings.cuda else memory
            skips = counters["inductor"]["cudagraph_skips"]
            try:
                self.pipe.send(Turn(seconds / self.turn, self.updating / self.turn, self.floor(), memory, skips))
                self.pipe.recv()
            except (EOFError, OSError):  # the other side has all it wants
                raise Finished from None
            self.began, self.updating = self.clock(), 0.0

    def floor(self) -> float:
        if not self.counted_updates:
            return float("nan")
        seconds, device = 0.0, "cuda" if self.settings.cuda else "cpu"
        for (left, right), count in self.products.shapes.items():
            a, b, trials = torch.rand(left, device=device), torch.rand(right, device=device), []
            for _ in range(4):
                began = self.clock()
                torch.matmul(a, b)
                trials.append(self.clock() - began)
            seconds += count / self.counted_updates * statistics.median(trials)
        return seconds


def train_script(meter: Meter, contender: Contender, settings: Race) -> None:
    module, options = importlib.import_module(contender.module), dict(contender.options)

    class FullBuffer(module.ReplayBuffer):
        def __init__(self, *args: Any):
            super().__init__(*args)
            self.rows.fill_(1)  # a length of zero would be no row of TempoRL
            self.added = self.capacity

        gather = meter.timed(module.ReplayBuffer.gather)

    class MeteredRun(module.Run):
        def steps(self) -> Iterator[int]:
            for step in super().steps():
                yield step
                meter.step()

    module.ReplayBuffer, module.Run = FullBuffer, MeteredRun
    module.Agent.update = meter.timed(module.Agent.update, count_products=not options.get("compile"))
    with tempfile.TemporaryDirectory() as directory:
        endless = {"total_timesteps": 10**9, "learning_starts": LEARNING_STARTS, "eval_every": 0, "checkpoint_every": 0}
        kept = {"buffer_size": settings.rows, "runs_dir": directory, "cuda": settings.cuda, "env_id": contender.env_id}
        module.train(module.Args(**endless, **kept, **options))


def train_library(meter: Meter, contender: Contender, settings: Race) -> None:
    from stable_baselines3.common.callbacks import BaseCallback

    class MeteredSteps(BaseCallback):
        def _on_step(self) -> bool:
            meter.step()
            return True

    options = dict(contender.options)
    hidden = options["hidden_dim"]
    model = importlib.import_module(contender.module).SAC(
        "MlpPolicy",
        make_env(contender.env_id),
        buffer_size=settings.rows,
        learning_starts=LEARNING_STARTS,
        batch_size=options["batch_size"],
        policy_kwargs={"net_arch": [hidden, hidden]},
        device="cuda" if settings.cuda else "cpu",
    )
    model.train = meter.timed(model.train)
    model.learn(10**9, callback=MeteredSteps())


def work(pipe: Connection, contender: Contender, settings: Race) -> None:
    """The process of one contender."""
    if hasattr(os, "sched_setaffinity"):  # JAX has no other limit that holds
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: settings.threads])
    torch.set_num_threads(settings.threads)
    train = train_library if contender.module in LIBRARIES.values() else train_script
    try:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            train(Meter(pipe, settings), contender, settings)
    except Finished:
        pass
    except (Exception, SystemExit) as error:
        with contextlib.suppress(OSError):  # nobody may be listening any more
            pipe.send(f"{type(error).__name__}: {error}")


# The parent's side.


def measure(contenders: list[Contender], settings: Race) -> dict[Contender, list[Turn]]:
    """Lets the contenders take turns."""
    spawn = multiprocessing.get_context("spawn")
    os.environ |= {"OMP_NUM_THREADS": str(settings.threads), "JAX_PLATFORMS": "cuda" if settings.cuda else "cpu"}
    pipes, processes = [], []

    def receive(contender: Contender, pipe: Connection) -> Turn:
        try:
            turn = pipe.recv()
        except EOFError:
            turn = "its process died"
        if not isinstance(turn, Turn):
            fail(f"{contender.name} on {contender.env_id}: {turn.removeprefix('SystemExit: error: ')}")
        return turn

    try:
        for contender in contenders:
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=work, args=(theirs, contender, settings), daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
            receive(contender, ours)  # its first turn is a warm-up: compilation, caches
        turns: dict[Contender, list[Turn]] = {contender: [] for contender in contenders}
        for _ in range(settings.turns):
            for contender, pipe in zip(contenders, pipes, strict=True):
                pipe.send("next")
                turns[contender].append(receive(contender, pipe))
        return turns
    finally:
        for pipe in pipes:
            pipe.close()
        for process in processes:
            process.join()


def per_second(turns: list[Turn], part: Callable[[Turn], float]) -> float:
    return 1 / statistics.median(part(turn) for turn in turns)


def summary(turns: list[Turn]) -> dict[str, float]:
    return {
        "steps_per_second": per_second(turns, lambda turn: turn.total),
        "rollouts_per_second": per_second(turns, lambda turn: turn.total - turn.update),
        "updates_per_second": per_second(turns, lambda turn: turn.update),
        "efficiency": statistics.median(turn.floor / turn.update for turn in turns),
        "memory_gb": max(turn.memory for turn in turns) / 1e9,
    }


def table(rows: list[dict[str, Any]]) -> str:
    def cell(value: Any) -> str:
        if isinstance(value, float):
            return "" if value != value else f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"
        return str(value)

    return markdown(list(rows[0]), [[cell(value) for value in row.values()] for row in rows])


def machine(threads: int) -> str:
    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), model)
    return f"{model}, {threads} thread{'s' * (threads > 1)}, torch {torch.__version__}"


def finish(settings: Common, sections: dict[str, list[dict[str, Any]]], repeats: str) -> None:
    gpu = f"{torch.cuda.get_device_name()}, " if isinstance(settings, Race) and settings.cuda else ""
    about = f"{gpu}{machine(settings.threads)}, {settings.clock} time, medians of {repeats}"
    for title, rows in sections.items():
        print(f"\n{title} ({about})\n\n{table(rows)}")
    contents = {"machine": about, "settings": dataclasses.asdict(settings), "results": sections}
    text = json.dumps(contents, indent=2, default=str).replace("NaN", "null")
    settings.output.with_suffix(".json").write_text(text + "\n")
    print(f"\nwrote {settings.output.with_suffix('.json')}")


def axes(number: int, **share: bool) -> Any:
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    _, panels = plt.subplots(1, number, figsize=(4.6 * number, 3.6), layout="constrained", squeeze=False, **share)
    for panel in panels[0]:
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(alpha=0.3)
    return panels[0]


def save_plot(panel: Any, settings: Common) -> None:
    panel.figure.savefig(settings.output.with_suffix(".png"), dpi=110)
    print(f"wrote {settings.output.with_suffix('.png')}")


# The subcommands.


def check_choices(settings: Steps | Evaluation, algorithms: Sequence[str]) -> None:
    """Before the first is measured."""
    unknown = {*settings.algorithms} - {*algorithms}
    if unknown:
        fail(f"--algorithms has no {min(unknown)}; there are {', '.join(algorithms)}")
    for env_id in settings.env_ids:
        make_env(env_id)


def untrained_agent(algorithm: str, env_id: str, hidden_dim: int) -> Any:
    module, env = importlib.import_module(SCRIPTS[algorithm]), make_env(env_id)
    (obs_dim,), (act_dim,) = env.observation_space.shape, env.action_space.shape
    return module.Agent(obs_dim, act_dim, module.Args(env_id=env_id, hidden_dim=hidden_dim), CPU)


def trained_agent(directory: Path) -> tuple[str, Any]:
    """The name of a run's algorithm, and its agent."""
    agent, contents = load_agent(agent_file(directory), CPU)
    return ALGORITHMS[contents["script"]], agent


def scripts_contenders(settings: Steps, env_id: str, hidden: int) -> Iterator[Contender]:
    sizes = {"hidden_dim": hidden, "batch_size": hidden}
    for algorithm in settings.algorithms:
        if algorithm in LIBRARIES:
            if importlib.util.find_spec(LIBRARIES[algorithm]):
                yield Contender(algorithm, env_id, LIBRARIES[algorithm], tuple(sizes.items()))
            continue
        variants = [(algorithm, {})]
        if algorithm == "SDAR":
            if untrained_agent("SDAR", env_id, hidden).exact:
                variants = [("SDAR exact", {})]
            else:
                variants = [(f"SDAR K = {k}", {"num_selection_samples": k}) for k in settings.num_selection_samples]
        for (name, options), compiled in itertools.product(variants, (False, True)[: 1 + settings.compile]):
            name = f"{name}, compiled" if compiled else name
            options = {**sizes, **options, "compile": compiled}
            yield Contender(name, env_id, SCRIPTS[algorithm], tuple(options.items()))


def check_gpu(settings: Race) -> None:
    if settings.cuda and (trouble := cuda_trouble()) is not None:
        fail(f"--cuda: {trouble}")
    if settings.cuda and settings.clock == "cpu":
        fail("--clock cpu does not see what a GPU does; leave it away")


def steps(settings: Steps) -> None:
    check_choices(settings, [*SCRIPTS, *LIBRARIES])
    check_gpu(settings)
    sections = {}
    for env_id, hidden in itertools.product(settings.env_ids, settings.hidden_dims):
        turns = measure(list(scripts_contenders(settings, env_id, hidden)), settings)
        rows = [{"algorithm": contender.name, **summary(t)} for contender, t in turns.items()]
        sections[f"{env_id}, nets {hidden}, batch {hidden}"] = rows
    finish(settings, sections, f"{settings.turns} turns")


GROWTH = {
    "K": (2, 5, 10, 20),
    "|A|": (1, 2, 3, 4, 6, 8, 12, 17),
    "hidden_dim": (64, 128, 256, 512),
}
COLOURS = {"SDAR sampled": "C0", "SDAR exact": "C1", "SAC": "C2"}


def growth(settings: Growth) -> None:
    """Around |A| = 6, K = 10, nets and batch 256, on a task that costs nothing."""
    check_gpu(settings)
    panels, sections = axes(3), {}
    for panel, (axis, values) in zip(panels, GROWTH.items(), strict=True):
        contenders = {}
        for value in values:
            options = {"hidden_dim": 256, "batch_size": 256, "num_selection_samples": 10}
            act_dim = value if axis == "|A|" else 6
            options |= {"num_selection_samples": value} if axis == "K" else {}
            options |= {"hidden_dim": value} if axis == "hidden_dim" else {}
            kinds = ("sampled", "exact") if axis == "|A|" and value <= 6 else ("sampled",)
            for kind in kinds:
                chosen = {**options, "selection_objective": kind}
                name = f"SDAR {kind}"
                contenders[value, name] = Contender(name, idle_task(act_dim), SCRIPTS["SDAR"], tuple(chosen.items()))
            if axis != "K":
                sizes = {name: options[name] for name in ("hidden_dim", "batch_size")}
                contenders[value, "SAC"] = Contender("SAC", idle_task(act_dim), SCRIPTS["SAC"], tuple(sizes.items()))
        turns = measure(list(contenders.values()), settings)
        speeds = {where: summary(turns[contender])["steps_per_second"] for where, contender in contenders.items()}
        names = list(dict.fromkeys(name for _, name in speeds))
        sections[f"Steps/s against {axis}"] = [
            {axis: value, **{name: speeds.get((value, name), float("nan")) for name in names}} for value in values
        ]
        for name in names:
            line = {value: speed for (value, other), speed in speeds.items() if other == name}
            panel.plot(line.keys(), line.values(), "o-", color=COLOURS[name], label=name, markersize=4)
        panel.set(xlabel=axis, ylabel="steps/s", ylim=(0, None))
        panel.legend(frameon=False)
    save_plot(panels[0], settings)
    finish(settings, sections, f"{settings.turns} turns")


EPISODES, SEED = RunArgs.eval_episodes, RunArgs.seed


class Medians(Noise):
    """For a greedy episode that is played alone."""

    def __init__(self, device: torch.device):
        super().__init__(device)
        self.greedy = torch.tensor(True, device=device)

    def uniform(self, size: int) -> Tensor:
        return torch.full((size,), 0.5)

    def normal(self, size: int) -> Tensor:
        return torch.zeros(size)


def play_one_by_one(agent: Any, evaluator: Evaluator) -> list[Trajectory]:
    """The evaluator's episodes (the stochastic ones with other noise), each with forward passes of its own."""
    trajectories, env = [], evaluator.envs[0]
    for noise, index in itertools.product((Medians(CPU), Noise(CPU)), range(EPISODES)):
        trajectory = Trajectory("greedy" if noise.greedy else "stochastic")
        trajectories.append(trajectory)
        (obs, _), action, left, over = env.reset(seed=derived_seed(SEED, EVALUATION, index)), None, 0, False
        actions = []
        while not over:
            if left == 0:
                action, left = agent.act(obs, action, noise)
            obs, reward, terminated, truncated, _ = env.step(action)
            actions.append(action)
            trajectory.total_reward += reward
            left, over = left - 1, terminated or truncated
        trajectory.actions, trajectory.length = np.stack(actions), len(actions)
    return trajectories


def play_together(agent: Any, evaluator: Evaluator) -> list[Trajectory]:
    return list(itertools.chain(*evaluator.play(agent.act, EPISODES).values()))


def evaluation(settings: Evaluation) -> None:
    check_choices(settings, list(SCRIPTS))
    torch.set_num_threads(settings.threads)
    torch.manual_seed(SEED)
    agents = []
    for directory in settings.runs:
        algorithm, agent = trained_agent(directory)
        agents.append((f"{algorithm} ({directory})", agent))
    if not agents:
        choices = itertools.product(settings.env_ids, settings.hidden_dims, settings.algorithms)
        agents = [(name, untrained_agent(name, env_id, hidden)) for env_id, hidden, name in choices]
    contenders = [(name, agent, Evaluator(partial(make_env, agent.args.env_id), SEED, CPU)) for name, agent in agents]
    for _, agent, evaluator in contenders:
        play_together(agent, evaluator)  # a warm-up, which makes the tasks
    clock, times = CLOCKS[settings.clock], collections.defaultdict(list)  # seconds, and milliseconds per step
    ways = (play_one_by_one, play_together)
    for _, (_, agent, evaluator), play in itertools.product(range(settings.turns), contenders, ways):
        began = clock()
        trajectories = play(agent, evaluator)
        seconds, steps = clock() - began, sum(trajectory.length for trajectory in trajectories)
        times[evaluator, play].append((seconds, 1000 * seconds / steps))
    sections = collections.defaultdict(list)
    for name, agent, evaluator in contenders:
        medians = [map(statistics.median, zip(*times[evaluator, play], strict=True)) for play in ways]
        (alone, alone_per_step), (together, together_per_step) = medians
        row = {
            "algorithm": name,
            "seconds_one_by_one": alone,
            "seconds_together": together,
            "ms_per_step_one_by_one": alone_per_step,
            "ms_per_step_together": together_per_step,
            "times_as_fast": alone_per_step / together_per_step,
        }
        task = f"{agent.args.env_id}, nets {agent.args.hidden_dim}"
        sections[f"{task}: an evaluation, every {RunArgs.eval_every:,} training steps"].append(row)
    finish(settings, sections, f"{settings.turns} turns")


def visited_states(agent: Any, rows: int) -> dict[str, Tensor]:
    """States and previous actions from the agent's own stochastic episodes."""
    env, noise = make_env(agent.args.env_id), Noise(CPU)
    pairs, seed = [], 0
    while len(pairs) < rows:
        seed += 1
        (obs, _), action, over = env.reset(seed=seed), None, False
        while not over and len(pairs) < rows:
            if action is not None:
                pairs.append((torch.from_numpy(obs), torch.from_numpy(action)))
            action, _ = agent.act(obs, action, noise)
            obs, _, terminated, truncated, _ = env.step(action)
            over = terminated or truncated
    obs, prev_actions = map(torch.stack, zip(*pairs, strict=True))
    return {"obs": obs, "prev_actions": prev_actions, "first": torch.zeros(rows)}


def estimators(settings: Estimators) -> None:
    """The error is the root of the mean squared distance to the true gradient, over the true gradient's norm.

    The true one is the mean of many exact ones: even these have an error, since â is drawn.
    """
    if not settings.runs:
        fail("estimators needs run directories of sdar_continuous_action.py")
    torch.set_num_threads(settings.threads)
    sdar = importlib.import_module(SCRIPTS["SDAR"])
    keep_freed_memory()
    clock, panels, sections = CLOCKS[settings.clock], axes(len(settings.runs), sharey=True), {}
    for panel, directory in zip(panels, settings.runs, strict=True):
        algorithm, agent = trained_agent(directory)
        if algorithm != "SDAR":
            fail(f"{directory} is a run of {algorithm}, which has no such gradient; name runs of SDAR")
        if agent.bits > sdar.MAX_EXACT_BITS:
            fail(f"{directory}: the exact gradient needs 2^{agent.bits} schemas; take a task of fewer dimensions")
        agent.schemas, args = sdar.all_schemas(agent.bits), agent.args
        torch.manual_seed(1)
        states = visited_states(agent, 20 * args.batch_size)

        def gradient(samples: int | None, baseline: bool, agent=agent, states=states, args=args) -> Tensor:
            agent.exact = samples is None
            agent.args = dataclasses.replace(args, num_selection_samples=samples, selection_baseline=baseline)
            loss, _ = agent.selection_loss(states)
            return torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, list(agent.selection.parameters()))])

        order = torch.randperm(len(states["obs"]))[: args.batch_size]
        states |= {name: values[order] for name, values in states.items()}
        kinds = {
            **{("plain", k): (k, False) for k in (2, 4, 10, 20)},
            **{("leave-one-out", k): (k, True) for k in (2, 4, 10, 20)},
            ("exact", 2**agent.bits): (None, False),
        }
        truth = torch.stack([gradient(None, False) for _ in range(settings.draws)]).mean(0)
        squares, times = collections.defaultdict(list), collections.defaultdict(list)
        for _, (kind, options) in itertools.product(range(settings.draws), kinds.items()):
            began = clock()
            drawn = gradient(*options)
            times[kind].append(1000 * (clock() - began))
            squares[kind].append((drawn - truth).square().sum().item() / truth.square().sum().item())
        rows = [
            {
                "estimator": name,
                "schemas": schemas,
                "error": statistics.mean(squares[name, schemas]) ** 0.5,
                "milliseconds": statistics.median(times[name, schemas]),
            }
            for name, schemas in kinds
        ]
        sections[f"{args.env_id}, |A| = {agent.act_dim}, nets {args.hidden_dim}, batch {args.batch_size}"] = rows
        for name in ("plain", "leave-one-out", "exact"):
            of = [row for row in rows if row["estimator"] == name]
            panel.semilogy([r["milliseconds"] for r in of], [r["error"] for r in of], "o-", label=name, markersize=4)
            for row in of:
                text, at = f"{row['schemas']}", (row["milliseconds"], row["error"])
                panel.annotate(text, at, xytext=(4, 4), textcoords="offset points", fontsize=8)
        panel.set(xlabel="time of β's loss and gradient (ms)", xlim=(0, None), title=args.env_id)
    panels[0].set_ylabel("error / norm of the true gradient")
    panels[0].legend(frameon=False)
    save_plot(panels[0], settings)
    finish(settings, sections, f"{settings.draws} draws")


def latency(function: Callable[[], Any], cuda: bool, calls: int = 300) -> str:
    """Of a call, in a row of many; the second row counts."""
    for _ in range(2):
        began = time.perf_counter()
        for _ in range(calls):
            function()
        if cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began
    return f"{1e6 * seconds / calls:.1f} µs"


def can_compile(device: torch.device) -> str:
    try:
        check_compiler(device.type)
    except SystemExit as error:
        return str(error).removeprefix("error: ")
    return "has what it needs"


def findings(device: torch.device, trouble: str | None) -> Iterator[tuple[str, str]]:
    """What is to be said about this machine, a line each."""
    yield "system", f"{platform.platform()}, Python {platform.python_version()}"
    yield "processor", f"{machine(torch.get_num_threads())}, {os.cpu_count()} cores"
    offered = ".".join(map(str, driver_cuda() or ["none"]))
    yield "CUDA", f"torch's {torch.version.cuda or 'none'}, the driver's {offered}"
    yield "GPU", trouble or "allocates and computes"
    cuda = device.type == "cuda"
    if cuda:
        about = torch.cuda.get_device_properties(device)
        architecture = f"sm_{about.major}{about.minor}"
        known = "" if architecture in torch.cuda.get_arch_list() else "not "
        yield "", f"{about.name}, {about.total_memory / 2**30:.1f} GiB, {architecture} ({known}among torch's)"
    yield "--compile", can_compile(device)
    small, row = torch.ones(8, device=device), np.ones(64, np.float32)
    yield "a small operation", latency(lambda: small.add_(1), cuda) + (", launched" if cuda else "")
    if cuda:
        yield "64 numbers to the GPU", latency(lambda: upload(row, device), cuda)
        yield "8 numbers back", latency(lambda: small.cpu(), cuda)


def doctor(settings: Doctor) -> None:
    trouble = cuda_trouble() if settings.cuda else "not asked for"
    device = torch.device("cpu" if trouble else "cuda")
    settings = dataclasses.replace(settings, cuda=trouble is None)
    check_gpu(settings)
    print("```")
    for name, finding in findings(device, trouble):
        print(f"{name:<22} {finding}", flush=True)
    compiles = can_compile(device) == "has what it needs"
    sizes = {"hidden_dim": settings.hidden_dim, "batch_size": settings.hidden_dim}
    contenders = []
    for algorithm, compiled in itertools.product(("SAC", "SDAR"), (False, True)[: 1 + compiles]):
        name = f"{algorithm}, compiled" if compiled else algorithm
        contenders.append(Contender(name, idle_task(6), SCRIPTS[algorithm], (*sizes.items(), ("compile", compiled))))
    for contender, turns in measure(contenders, settings).items():
        numbers = summary(turns)
        finding = f"{numbers['steps_per_second']:.0f} steps/s, {numbers['memory_gb']:.2f} GB"
        if settings.cuda and "compiled" in contender.name:
            finding += f", {max(turn.graph_skips for turn in turns)} losses are no CUDA graph"
        print(f"{contender.name:<22} {finding}")
    print("```")


Command = Steps | Growth | Evaluation | Estimators | Doctor


def main() -> None:
    settings = tyro.cli(Command)
    commands = {Steps: steps, Growth: growth, Evaluation: evaluation, Estimators: estimators, Doctor: doctor}
    command = commands[type(settings)]
    for name, value in vars(settings).items():
        if name in ("threads", "turns", "steps", "rows", "draws", "hidden_dim") and value < 1:
            fail(f"--{name} must be at least 1, not {value}")
    settings.output = settings.output or Path(command.__name__)
    if isinstance(settings, Doctor):
        return command(settings)  # it writes nothing
    for path in (settings.output.with_suffix(ending) for ending in (".json", ".png")):
        if path.exists():
            fail(f"{path} exists; name another --output")
    command(settings)


if __name__ == "__main__":
    main()
