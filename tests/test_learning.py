"""Learning claims, tested by learning: a small task, small nets, a threshold that a broken gradient misses."""

import pytest

import sdar_continuous_action as sdar
from tests.conftest import TINY, scalars

SMALL = {**TINY, "hidden_dim": 64, "batch_size": 64, "eval_episodes": 5, "eval_every": 0}


def final_return(script, path, **options) -> float:
    args = script.Args(**{**SMALL, "runs_dir": str(path), "run_name": "run", **options})
    return scalars(script.train(args))["eval/return"][-1][1]


@pytest.mark.parametrize("objective", ["exact", "sampled"])
def test_sdar_learns_what_to_repeat(objective, tmp_path):
    """Acting in dimension 0 only is worth about 0, a coin toss for each dimension about -50, a random agent -70."""
    task = {"env_id": "tests.tasks:HoldAndTrack-v0", "total_timesteps": 2500, "learning_starts": 300}
    options = {"policy_lr": 1e-3, "q_lr": 2e-3, "gamma": 0.9, "tau": 0.02}
    result = final_return(sdar, tmp_path, selection_objective=objective, **task, **options)
    assert result > -12
