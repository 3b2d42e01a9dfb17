"""Options: those that every run has, how they are read and checked, and what a resumed run remembers."""

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

from sdar_utils import fail

NOT_EXPERIMENT = ("resume", "runs_dir")  # options that may differ between a run's start and its resumption


@dataclass
class RunArgs:
    """What every run can be told; a script adds what its algorithm learns by."""

    exp_name: str = "unnamed"
    """the name of this experiment"""
    seed: int = 1
    """seed of the experiment: networks, exploration, task and evaluation"""
    torch_deterministic: bool = True
    """if toggled, `torch.backends.cudnn.deterministic=True`"""
    cuda: bool = True
    """train on the GPU; without one that works the run falls back to the CPU and says why, but stops if
    CUDA_VISIBLE_DEVICES names one"""
    track: bool = False
    """sync the run to Weights & Biases"""
    wandb_project_name: str = "sdar"
    """the W&B project's name"""
    wandb_entity: str | None = None
    """the W&B entity (team)"""
    capture_video: bool = False
    """record one greedy episode of every evaluation into the run directory's `videos` folder"""
    runs_dir: str = "runs"
    """where run directories are made"""
    run_name: str | None = None
    """the run directory's name; by default {env_id}__{exp_name}__{seed}__{unix time}"""
    resume: bool = False
    """continue the run of this name exactly where its last checkpoint is; its other options are remembered"""
    eval_every: int = 10_000
    """evaluate every so many steps (0: only at the end)"""
    eval_episodes: int = 10
    """episodes of an evaluation: so many greedy ones and so many stochastic ones"""
    checkpoint_every: int = 10_000
    """write a checkpoint every so many steps, when the episode under way ends (0: only when stopped)"""
    compile: bool = False
    """compile the losses with torch.compile (on a GPU with CUDA graphs)"""
    buffer_device: Literal["auto", "cpu", "cuda"] = "auto"
    """where the replay buffer lives; auto: on the GPU when it takes at most half of this run's share of the memory"""


def require(args: Any, what: str, holds: Callable[[Any], bool], *names: str) -> None:
    """Fails unless each of these options is what it must be."""
    for name in names:
        if not holds(getattr(args, name)):
            fail(f"--{name.replace('_', '-')} must be {what}, not {getattr(args, name)}")


def check_run_args(args: Any) -> None:
    """What all scripts' options have in common."""
    at_least_1 = ("total_timesteps", "buffer_size", "batch_size", "hidden_dim", "eval_episodes")
    require(args, "at least 1", lambda value: value >= 1, *at_least_1)
    require(args, "at least 0", lambda value: value >= 0, "seed", "learning_starts", "eval_every", "checkpoint_every")
    require(args, "in [0, 1]", lambda value: 0 <= value <= 1, "gamma")
    require(args, "in (0, 1]", lambda value: 0 < value <= 1, "tau")
    if args.buffer_device == "cuda" and not args.cuda:
        fail("--buffer-device cuda contradicts --no-cuda; drop one of the two")
    if args.run_name is not None and (not args.run_name.strip(".") or "/" in args.run_name or "\0" in args.run_name):
        fail(f"--run-name {args.run_name!r} is no directory name; put the path into --runs-dir")
    if args.resume and args.run_name is None:
        fail("--resume needs the --run-name of the run to continue")


def parse_args(args_class: type) -> Any:
    """The command line as an `args_class`; with --resume, what it does not name comes from the run's args.json."""
    args = tyro.cli(args_class)
    check_run_args(args)
    if args.resume:
        stored = dataclasses.replace(args, **stored_options(args))
        args = tyro.cli(args_class, default=dataclasses.replace(stored, resume=True, runs_dir=args.runs_dir))
    return args


def stored_options(args: Any) -> dict[str, Any]:
    """The options that the run to resume was started with."""
    path = Path(args.runs_dir) / args.run_name / "args.json"
    try:
        options = json.loads(path.read_text())["args"]
        assert set(options) == {field.name for field in dataclasses.fields(args)}
    except FileNotFoundError:
        fail(f"nothing to resume: there is no {path}; start the run without --resume")
    except (ValueError, TypeError, KeyError, AssertionError):
        fail(f"{path} is damaged or not from this version of the script; nothing was changed")
    return options


def check_same_options(args: Any, stored: dict[str, Any], where: Path) -> None:
    for name, value in dataclasses.asdict(args).items():
        if name not in NOT_EXPERIMENT and stored.get(name) != value:
            fail(
                f"{where} was started with --{name.replace('_', '-')} {stored.get(name)}, not {value}; a run is "
                "resumed with the options it has, or start another under a new --run-name"
            )
