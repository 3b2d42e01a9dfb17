"""Checkpoints: all that a run's future depends on, in files that are whole or absent and load without executing."""

import dataclasses
import importlib
import io
import json
import math
import os
import random
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from sdar_utils import ALGORITHMS, NotFinite, fail, one_line
from sdar_utils.options import RunArgs, check_same_options

FORMAT = 2


def write_atomically(path: Path, data: Any) -> None:
    """Either the whole file is there under its name or what was there before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    directory = os.open(path.parent, os.O_RDONLY)
    os.fsync(directory)
    os.close(directory)


def write_json(path: Path, contents: dict[str, Any]) -> None:
    """JSON has no NaN and no infinity: they become null."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(entry) for key, entry in value.items()}
        if isinstance(value, list):
            return [plain(entry) for entry in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    write_atomically(path, (json.dumps(plain(contents), indent=2) + "\n").encode())


def save_file(path: Path, contents: dict[str, Any]) -> None:
    buffer = io.BytesIO()
    torch.save({"format": FORMAT, **contents}, buffer)
    write_atomically(path, buffer.getbuffer())


def load_file(path: Path) -> dict[str, Any]:
    """A checkpoint.pt or agent.pt. Nothing in the file is executed, whoever made it."""
    try:
        with zipfile.ZipFile(path) as archive:
            damaged_record = archive.testzip()  # torch.load does not look at the checksums
        if damaged_record is not None:
            raise zipfile.BadZipFile(damaged_record)
        contents = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        fail(f"there is no {path}")
    except Exception as error:  # whatever a damaged or hostile file makes the reader raise
        fail(f"{path} is damaged or not one of ours ({type(error).__name__}); nothing was changed")
    if not isinstance(contents, dict) or contents.get("format") != FORMAT:
        fail(f"{path} is not a file of this project, or one of another version; nothing was changed")
    return contents


def agent_file(directory: Path) -> Path:
    """What to load of a run: its agent.pt or, while it is not finished, its checkpoint.pt."""
    for name in ("agent.pt", "checkpoint.pt"):
        if (directory / name).exists():
            return directory / name
    fail(f"{directory} has no agent.pt and no checkpoint.pt yet")


def load_agent(path: Path, device: torch.device) -> tuple[nn.Module, dict[str, Any]]:
    """The agent of an agent.pt or checkpoint.pt, ready to act, and what else is in the file."""
    contents = load_file(path)
    script = contents.get("script")
    if script not in [*ALGORITHMS]:  # all that a file may ask to import, whoever made it
        fail(f"{path} was written by {script!r}; these can be loaded: {', '.join(ALGORITHMS)}")
    module = importlib.import_module(script)
    try:
        args = module.Args(**contents["args"])
        agent = module.Agent(contents["obs_dim"], contents["act_dim"], args, torch.device("meta"))
        held = {name.partition(".")[0] for name in contents["weights"]}
        for name in {name for name, _ in agent.named_children()} - {*agent.acting} - held:
            delattr(agent, name)  # the file is one that `save_acting` made
        agent.load_state_dict(contents["weights"], assign=True)  # shapes are compared before anything is allocated
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        fail(f"{path} does not hold an agent of {script}.py ({type(error).__name__})")
    agent.device = device
    return agent.to(device), contents


def save_acting(path: Path, agent: nn.Module, contents: dict[str, Any]) -> None:
    """Of what an agent's file holds, what playing needs: no critics but those that act, no place of this machine."""
    learning = {name for name, _ in agent.named_children()} - {*agent.acting}
    kept = {name: contents[name] for name in ("script", "obs_dim", "act_dim", "step") if name in contents}
    kept["args"] = {**contents["args"], "runs_dir": RunArgs.runs_dir, "run_name": path.stem}
    weights = contents["weights"].items()
    kept["weights"] = {name: weight for name, weight in weights if name.partition(".")[0] not in learning}
    save_file(path, kept)


def rng_state(device: torch.device) -> dict[str, Any]:
    _, keys, *rest = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (torch.from_numpy(keys.astype(np.int64)), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def set_rng_state(state: dict[str, Any], device: torch.device) -> None:
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    keys, *rest = state["numpy"]
    np.random.set_state(("MT19937", keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)


class Checkpoint:
    """checkpoint.pt and replay/ in a run's directory, and agent.pt at its end."""

    def __init__(
        self, directory: Path, script: str, args: Any, agent: Any, buffers: dict[str, Any], device: torch.device
    ):
        self.directory, self.script, self.args, self.device = directory, script, args, device
        self.agent, self.buffers = agent, buffers
        self.path, self.step = directory / "checkpoint.pt", 0

    def agent_contents(self) -> dict[str, Any]:
        weights = {name: tensor.detach().cpu() for name, tensor in self.agent.state_dict().items()}
        for name, tensor in weights.items():
            if not torch.isfinite(tensor).all():
                raise NotFinite(f"the weight {name}")
        dimensions = {"obs_dim": self.agent.obs_dim, "act_dim": self.agent.act_dim}
        return {"script": self.script, "args": dataclasses.asdict(self.args), **dimensions, "weights": weights}

    def save(self, step: int, clock: dict[str, Any]) -> None:
        """`clock` is what the run wants to find again. The old checkpoint is valid until the new one is complete."""
        contents = self.agent_contents()
        try:
            contents |= {
                "step": step,
                "clock": clock,
                "optimizers": {name: optimizer.state_dict() for name, optimizer in self.agent.optimizers.items()},
                "buffers": {name: b.save(self.directory / "replay", name) for name, b in self.buffers.items()},
                "rng": rng_state(self.device),
            }
            save_file(self.path, contents)
        except OSError as error:
            fail(f"cannot write a checkpoint: {error.strerror} ({error.filename}); {self.what_is_kept()}")
        self.step = step
        self.drop_unused_files(contents)

    def restore(self, use: Callable[[int, dict[str, Any]], None]) -> bool:
        """Agent, buffers and generators as they were; `use` gets the step and the clock. False if there is none yet."""
        if not self.path.exists():
            return False
        contents = load_file(self.path)
        if contents.get("script") != self.script:
            fail(
                f"{self.path} was written by {contents.get('script')}.py, this is {self.script}.py; nothing was changed"
            )
        try:
            check_same_options(self.args, contents["args"], self.path)
            self.agent.load_state_dict(contents["weights"])
            for name, optimizer in self.agent.optimizers.items():
                optimizer.load_state_dict(contents["optimizers"][name])
            for name, buffer in self.buffers.items():
                buffer.load(self.directory / "replay", contents["buffers"][name])
            self.step = contents["step"]
            if not 0 < self.step < self.args.total_timesteps:
                raise ValueError(f"step {self.step}")
            use(self.step, contents["clock"])
            set_rng_state(contents["rng"], self.device)
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, IndexError, OSError) as error:
            reason = f"{type(error).__name__}: {one_line(error)}"
            fail(f"{self.path} is damaged or does not fit this run ({reason}); nothing was changed")
        self.drop_unused_files(contents)
        return True

    def drop_unused_files(self, contents: dict[str, Any]) -> None:
        needed = {file["file"] for state in contents["buffers"].values() for file in state["files"]}
        for path in (self.directory / "replay").glob("*"):
            if path.name not in needed:
                path.unlink()

    def save_agent(self) -> None:
        save_file(self.directory / "agent.pt", self.agent_contents())

    def tidy_up(self) -> None:
        """A finished run does not keep the gigabytes that only training needs."""
        shutil.rmtree(self.directory / "replay", ignore_errors=True)
        self.path.unlink(missing_ok=True)

    def what_is_kept(self) -> str:
        kept = f"the checkpoint of step {self.step:,}" if self.path.exists() else "its logs"
        return f"{self.directory} keeps {kept}"
