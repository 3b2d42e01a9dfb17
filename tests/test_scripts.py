"""What holds for every script: it trains, explains itself, stands alone, and is not disturbed by being evaluated."""

import ast
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import tyro

from sdar_utils import ALGORITHMS
from tests.conftest import ROOT, SCRIPTS, TINY, evaluations, options, scalars, train


def test_every_script_is_an_algorithm():
    assert sorted(ALGORITHMS) == sorted(SCRIPTS)


def test_help_explains_every_option(script, capsys):
    with pytest.raises(SystemExit):
        tyro.cli(script.Args, args=["--help"])
    flat = re.sub(r"[│\s]+", " ", capsys.readouterr().out)
    for name in script.Args.__dataclass_fields__:
        option = f"--{name.replace('_', '-')}"
        found = re.search(rf"{option}(?:, --no-\S+)?(?: [A-Z{{][^ ]*)? ((?:(?! --).)*?) \(default: ", flat)
        assert found, f"{option} is not explained"
        assert len(found[1].split()) >= 3, f"{option} is barely explained: {found[1]}"


def test_cleanrl_defaults(script):
    args = script.Args()
    expected = {"env_id": "Hopper-v4", "seed": 1, "total_timesteps": 1_000_000, "buffer_size": 1_000_000, "gamma": 0.99}
    warm_up = 1000 if script.__name__.startswith(("temporl", "ute")) else 5000  # as their authors have it
    expected |= {"tau": 0.005, "batch_size": 256, "learning_starts": warm_up, "cuda": True, "track": False}
    assert {name: getattr(args, name) for name in expected} == expected
    assert args.exp_name == script.__name__


def test_a_script_stands_alone(script):
    """It imports packages and sdar_utils, no other script; and none of sdar_utils imports a script."""
    ours = {path.stem for path in ROOT.glob("*.py")}
    for path in [script.__file__, *(ROOT / "sdar_utils").glob("*.py")]:
        with open(path) as file:
            tree = ast.parse(file.read())
        for node in ast.walk(tree):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            assert not {name.split(".")[0] for name in names} & ours, path


def test_a_script_runs_elsewhere_with_its_utilities(tmp_path):
    shutil.copy(ROOT / "sdar_continuous_action.py", tmp_path / "my_idea.py")
    shutil.copytree(ROOT / "sdar_utils", tmp_path / "sdar_utils")
    words = options(**TINY, env_id="Pendulum-v1", total_timesteps=50, eval_every=0, run_name="x")
    environment = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "my_idea.py", *words], cwd=tmp_path, env=environment, check=True)
    assert '"script": "my_idea"' in (tmp_path / "runs" / "x" / "args.json").read_text()


def test_what_a_script_leaves(script, tmp_path):
    """On a task with odd shapes, and with evaluations on the way."""
    directory = train(script, tmp_path, env_id="tests.tasks:Shapes-v0", total_timesteps=300, eval_every=150)
    logged = scalars(directory)
    assert {"losses/qf_loss", "losses/actor_loss", "charts/episodic_return"} <= set(logged)
    assert [row["step"] for row in evaluations(directory)] == [0, 150, 300]
    assert len(logged["eval/apr_dim_3"]) == 3
    files = {path.name for path in directory.iterdir() if not path.name.startswith("events.")}
    assert files == {"agent.pt", "args.json", "evaluation.json", "evaluations.csv"}


def test_evaluation_does_not_change_training(script, tmp_path):
    logs, task = [], {"env_id": "tests.tasks:Rounds-v0", "total_timesteps": 150}
    for every in (0, 40):
        directory = train(script, tmp_path, **task, run_name=f"e{every}", eval_every=every)
        logged = scalars(directory)
        logs.append((logged["charts/episodic_return"], logged["losses/qf_loss"], logged["losses/actor_loss"]))
    assert logs[0] == logs[1]


def test_time_limits_are_not_terminal(script, tmp_path, monkeypatch):
    """Both tasks' episodes end; only the one that ends by itself is marked, and next_obs is the last observation."""
    for env_id, ends, length in [("tests.tasks:Endless-v0", False, 7), ("tests.tasks:Ending-v0", True, 5)]:
        rows = []
        monkeypatch.setattr(script.ReplayBuffer, "add", lambda self, rows=rows, **row: rows.append(row))
        train(script, tmp_path, env_id=env_id, run_name=env_id, total_timesteps=30)
        last = [row for row in rows if row["next_obs"][0] == length]
        assert len(last) >= 30 // length
        assert all(bool(row["terminated"]) == ends for row in last)
        assert not any(row["terminated"] for row in rows if row["next_obs"][0] < length)
        np.testing.assert_array_equal(rows[0]["obs"], np.zeros(3))
