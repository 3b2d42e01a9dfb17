"""Common ground of the tests: the scripts as modules, small runs, and one thread per process unless told otherwise."""

import csv
import importlib
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes that tests start, too
# What torch compiles it keeps, and does not tell apart by the instructions that this variable allows.
os.environ.setdefault(
    "TORCHINDUCTOR_CACHE_DIR",
    f"{tempfile.gettempdir()}/sdar-tests-{os.getuid()}-{os.environ.get('ATEN_CPU_CAPABILITY', 'native')}",
)

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
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


def train(script: ModuleType, path: Path, **values) -> Path:
    """A tiny run in this process."""
    defaults = {**TINY, "total_timesteps": 60, "eval_every": 0, "runs_dir": str(path), "run_name": "run"}
    return script.train(script.Args(**{**defaults, **values}))


def stored_rows(script: ModuleType, directory: Path, **options) -> list[dict]:
    """What training on episodes of 50 steps puts into the replay buffer."""
    rows, add = [], script.ReplayBuffer.add
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script.ReplayBuffer, "add", lambda self, **row: rows.append(row) or add(self, **row))
        train(script, directory, env_id="tests.tasks:HoldAndTrack-v0", **options)
    return rows


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
    """Every scalar of a run's event files, nothing hidden: a point that was logged twice is there twice.

    By step, because files that one process makes within a second are read by their names, the tenth before the ninth.
    """
    events = EventAccumulator(str(directory), size_guidance={"scalars": 0}, purge_orphaned_data=False).Reload()
    tags = events.Tags()["scalars"]
    return {tag: sorted([(e.step, e.value) for e in events.Scalars(tag)], key=lambda point: point[0]) for tag in tags}


def evaluations(directory: Path) -> list[dict[str, float]]:
    """The rows of a run's evaluations.csv."""
    with open(directory / "evaluations.csv", newline="") as file:
        return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return torch.load(directory / "agent.pt", weights_only=True)["weights"]


def snapshot(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


def assert_compiled_equals_eager(make_agent, make_batch) -> None:
    """The same metrics over a few updates, in which an error would add up, up to rounding."""
    torch._dynamo.reset()
    agents = make_agent(compile=False), make_agent(compile=True)
    for step in (1, 2, 3, 4):
        metrics = []
        for agent in agents:
            torch.manual_seed(step)
            metrics.append(agent.update(make_batch(seed=step), step))
        assert metrics[0].keys() == metrics[1].keys()
        for name in metrics[0]:
            torch.testing.assert_close(metrics[0][name], metrics[1][name], rtol=1e-4, atol=1e-5)
