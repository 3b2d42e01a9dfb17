"""A run: its process, its directory and lock, and the clock that ties logs, evaluations and checkpoints to steps."""

import ctypes
import dataclasses
import fcntl
import os
import platform
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor

from sdar_utils import NotFinite, fail, say
from sdar_utils.checkpoint import Checkpoint, write_json
from sdar_utils.devices import choose_device
from sdar_utils.envs import TRAINING, derived_seed, make_env, make_filmed_env
from sdar_utils.evaluation import Evaluator
from sdar_utils.logs import Logs, Losses, truncate
from sdar_utils.options import check_same_options, stored_options
from sdar_utils.replay import ReplayBuffer

LOG_EVERY = 250  # steps between two looks at the losses, each of which waits for the device
TAKEN = 75  # exit status: the run exists already, or another process is writing it (EX_TEMPFAIL)


# The process.


def prepare(args: Any) -> torch.device:
    """Seeds everything and says where to train."""
    random.seed(args.seed)
    np.random.seed(args.seed % 2**32)
    torch.manual_seed(args.seed)
    torch.backends.cudnn.deterministic = args.torch_deterministic
    keep_freed_memory()
    if args.learning_starts >= args.total_timesteps:
        say("warning: --learning-starts is not below --total-timesteps, so nothing will be learned")
    return choose_device(args.cuda)


def keep_freed_memory() -> None:
    """Lets glibc reuse the memory of freed tensors; it would return it to the kernel and fault it in at each update."""
    if platform.libc_ver()[0] == "glibc":
        libc, trim_threshold, mmap_threshold = ctypes.CDLL(None), -1, -3  # from malloc.h
        libc.mallopt(mmap_threshold, 2**25)  # its own limit; what is larger, as a replay buffer, is mapped as ever
        libc.mallopt(trim_threshold, 2**30)


# The directory.


def describe_run(args: Any, script: Path, device: torch.device) -> dict[str, Any]:
    """The contents of args.json."""
    git = ["git", "-C", str(script.parent), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        commit = ""
    packages = ("torch", "gymnasium", "gymnasium-robotics", "mujoco", "box2d", "numpy", "tensorboard", "tyro")
    return {
        "args": dataclasses.asdict(args),
        "script": script.stem,
        "commit": commit or None,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu ({platform.machine()})",
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "packages": {package: version(package) for package in packages},
    }


def create_directory(directory: Path, about: dict[str, Any]) -> None:
    """Makes it with its args.json, whole or not at all."""
    if directory.exists():
        taken(f"{directory} exists; continue it with --resume, or choose another --run-name")
    half_made = directory.with_name(f".{directory.name}.{os.getpid()}")
    try:
        write_json(half_made / "args.json", about)
        os.rename(half_made, directory)
    except OSError as error:
        shutil.rmtree(half_made, ignore_errors=True)
        if directory.exists():
            taken(f"{directory} was made by another process meanwhile")
        fail(f"cannot make the run directory {directory}: {error.strerror}")


def lock_directory(directory: Path) -> int:
    """Two processes must not write one run. The kernel lifts the lock when the process ends, however it ends."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        taken(f"{directory} is being written by another process")
    return handle


def taken(message: str) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(TAKEN)


# The clock.


class Run:
    """Counts a training's steps. Between two it logs, evaluates and minds signals; between two episodes it saves."""

    def __init__(self, script: str, args: Any, agent: Any, buffers: dict[str, ReplayBuffer], device: torch.device):
        """`buffers` are what besides the agent has to be saved, by the names of their files."""
        self.script, self.args, self.agent = Path(script).resolve(), args, agent
        self.step = self.episodes = 0
        self.seconds = 0.0  # spent by earlier processes of this run
        self.signal, self.announced = None, False
        self.losses = Losses(device)
        film = make_filmed_env(args.env_id, "--capture-video") if args.capture_video else None
        self.evaluator = Evaluator(partial(make_env, args.env_id), args.seed, device, film)
        if args.run_name is None:
            args.run_name = f"{args.env_id}__{args.exp_name}__{args.seed}__{int(time.time())}".replace("/", "-")
        self.directory = Path(args.runs_dir) / args.run_name
        if args.resume:
            check_same_options(args, stored_options(args), self.directory)
        else:
            create_directory(self.directory, describe_run(args, self.script, device))
        self.lock = lock_directory(self.directory)
        self.checkpoint = Checkpoint(self.directory, self.script.stem, args, agent, buffers, device)
        try:
            self.finished = (self.directory / "agent.pt").exists()
            self.restored = args.resume and not self.finished and self.restore()
        except BaseException:
            os.close(self.lock)
            raise

    def __enter__(self) -> "Run":
        if not self.finished:
            if gym.spec(self.args.env_id.split(":")[-1]).max_episode_steps is None:
                say(f"warning: {self.args.env_id} has no time limit: a run is continued from an episode's end only")
            self.logs = Logs(self.args, self.script, self.directory, self.step, self.restored)
        self.started = time.monotonic()
        self.handlers = {number: signal.signal(number, self.on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        if not self.finished:
            self.logs.close(failed=error is not None)
        os.close(self.lock)
        if isinstance(error, NotFinite):
            self.fail_not_finite(error)

    def steps(self) -> Iterator[int]:
        """Yields the number of each step to take."""
        if self.finished:
            self.checkpoint.tidy_up()
            say(f"{self.directory} is finished already")
            return
        self.between_steps()
        while self.step < self.args.total_timesteps:
            self.step += 1
            yield self.step
            self.logs.bar.update()
            self.between_steps()
        self.checkpoint.save_agent()
        self.checkpoint.tidy_up()
        self.logs.bar.close()
        say(f"done: {self.directory} has agent.pt, evaluations.csv and the TensorBoard logs")

    def between_steps(self) -> None:
        at_end = self.step == self.args.total_timesteps

        def due(every: int) -> bool:
            return at_end or (every > 0 and self.step % every == 0)

        if due(LOG_EVERY) and self.step > 0:
            self.logs.log_losses(self.losses.take_means(), self.step)
        if due(self.args.eval_every):
            self.evaluate()
        if self.signal is not None and not self.announced and not at_end:
            say("stopping when this episode ends; a second signal ends the run at once")
            self.announced = True

    def record(self, metrics: dict[str, Tensor]) -> None:
        """Keeps an update's losses, without waiting for them, until the next log."""
        self.losses.record(metrics, self.step)

    def episode_seed(self) -> int:
        """Each episode starts from a seed of its own, so that a run can be continued between any two."""
        return derived_seed(self.args.seed, TRAINING, self.episodes)

    def end_episode(self, statistics: dict[str, Any]) -> None:
        """Takes `info["episode"]`. Saves if it is time to, and stops if a signal asked for it."""
        self.episodes += 1
        self.logs.log_episode(statistics, self.step)
        every = self.args.checkpoint_every
        if self.step == self.args.total_timesteps:
            return
        if self.signal is not None or 0 < every <= self.step - self.checkpoint.step:
            self.save()
        if self.signal is not None:
            words = ["python", self.script.name, "--runs-dir", self.args.runs_dir, "--run-name", self.args.run_name]
            self.logs.bar.close()
            say(f"stopped at step {self.step:,}; to continue: {shlex.join([*words, '--resume'])}")
            raise SystemExit(128 + self.signal)

    def evaluate(self) -> None:
        began = time.monotonic()
        played = self.evaluator.play(self.agent.act, self.args.eval_episodes)
        seconds = self.elapsed()
        results = self.logs.log_evaluation(played, self.step, seconds, self.evaluator.fps)
        if self.step == self.args.total_timesteps:
            write_json(self.directory / "evaluation.json", {"step": self.step, "seconds": seconds, **results})
        self.logs.pause(time.monotonic() - began)

    def elapsed(self) -> float:
        return self.seconds + time.monotonic() - self.started

    def on_signal(self, number: int, frame: Any) -> None:
        self.signal = number
        signal.signal(number, self.handlers[number])  # a second one ends the process at once

    def save(self) -> None:
        """Before what else is due at this step, so that a resumed run begins with that."""
        self.losses.fetch()  # nothing is saved that is not finite
        clock = {"episodes": self.episodes, "losses": self.losses.pending, "logs": self.logs.sizes()}
        self.checkpoint.save(self.step, {**clock, "seconds": self.elapsed()})

    def restore(self) -> bool:
        log_sizes: dict[str, int] = {}

        def use(step: int, clock: dict[str, Any]) -> None:
            self.step, self.episodes, self.seconds = step, int(clock["episodes"]), float(clock["seconds"])
            self.losses.load(clock["losses"])
            log_sizes.update(clock["logs"])

        restored = self.checkpoint.restore(use)
        truncate(self.directory, log_sizes)
        at = f"resuming {self.directory} at step {self.step:,}"
        say(at if restored else f"{self.directory} has no checkpoint yet: starting from the beginning")
        return restored

    def fail_not_finite(self, error: NotFinite) -> NoReturn:
        try:  # a loss that went before is the better name for the trouble
            self.losses.fetch()
        except NotFinite as earlier:
            error = earlier
        step = self.step if error.step is None else error.step
        fail(f"{error.what} is not finite at step {step:,}; {self.checkpoint.what_is_kept()}")
