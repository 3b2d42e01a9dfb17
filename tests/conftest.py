"""Common ground of the tests: the scripts as modules, small runs, and one thread per process."""

import importlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

os.environ["OMP_NUM_THREADS"] = "1"  # for the processes that tests start, too

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
torch.set_num_threads(1)
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a background job would ignore

SCRIPTS = [
    "sdar_continuous_action",
    "sac_continuous_action",
    "nrep_sac",
    "taac_continuous_action",
    "temporl_continuous_action",
    "ute_continuous_action",
]
TINY = {"hidden_dim": 16, "batch_size": 16, "eval_episodes": 1, "learning_starts": 40, "cuda": False}


def load(script: str) -> ModuleType:
    return importlib.import_module(script)


@pytest.fixture(params=SCRIPTS)
def script(request) -> ModuleType:
    return load(request.param)


# For tests of code that is byte for byte the same in every script: one of them speaks for all.
shared_code = pytest.mark.parametrize("script", SCRIPTS[:1], indirect=True, ids=["any script"])


def options(**values) -> list[str]:
    """Keyword arguments as the command line's options."""
    words = []
    for name, value in values.items():
        flag = name.replace("_", "-")
        words += [f"--{flag}" if value else f"--no-{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    return words


def command(script: ModuleType, **values) -> list[str]:
    return [sys.executable, script.__file__, *options(**values)]


def run(script: ModuleType, expect: int = 0, **values) -> subprocess.CompletedProcess:
    done = subprocess.run(command(script, **values), capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == expect, done.stdout + done.stderr
    return done


def scalars(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """Every scalar of a run's event files, nothing hidden: a point that was logged twice is there twice."""
    events = EventAccumulator(str(directory), size_guidance={"scalars": 0}, purge_orphaned_data=False).Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return torch.load(directory / "agent.pt", weights_only=True)["weights"]


def snapshot(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}
