"""Targets over several steps, of the scripts that have them: the rows they are made of."""

import numpy as np
import pytest

import sac_continuous_action as sac
import sdar_continuous_action as sdar
from tests.conftest import stored_rows


@pytest.fixture(params=[sdar, sac], ids=["sdar", "sac"])
def script(request):
    return request.param


@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.parametrize("n", [1, 3, 9])
def test_rows_of_n_steps_are_made_of_single_ones(script, n, ends):
    """Each step of an episode of seven leaves one row, in order; after the end nothing is left."""
    rng = np.random.default_rng(0)
    args, length = script.Args(n_step=n, gamma=0.9), 7
    states, actions, rewards = rng.normal(size=(length + 1, 3)), rng.normal(size=(length, 2)), rng.normal(size=length)
    played, rows = [], []
    for t in range(length):
        played.append({"obs": states[t], "actions": actions[t], "rewards": rewards[t], "first": t == 0})
        last = t == length - 1
        rows += script.n_step_rows(played, states[t + 1], last and ends, last, args)
    assert not played
    for t, row in enumerate(rows):
        m = min(n, length - t)
        np.testing.assert_array_equal(row["obs"], states[t])
        np.testing.assert_array_equal(row["actions"], actions[t])
        np.testing.assert_array_equal(row["next_obs"], states[t + m])
        if script is sdar:
            np.testing.assert_array_equal(row["last_actions"], actions[t + m - 1])
        assert row["rewards"] == pytest.approx(np.polynomial.polynomial.polyval(0.9, rewards[t : t + m]))
        assert row["discounts"] == pytest.approx(0.9**m)
        assert row["terminated"] == (ends and t + m == length)
        assert row["first"] == (t == 0)
    assert len(rows) == length


def test_training_fills_the_buffer_with_rows_of_n_steps(script, tmp_path):
    """The same episodes with n = 1 and n = 3, two of 50 steps and a begun one."""
    options = {"total_timesteps": 110, "learning_starts": 110}
    stored = {n: stored_rows(script, tmp_path / str(n), n_step=n, **options) for n in (1, 3)}
    assert len(stored[3]) == len(stored[1]) - 2 == 108  # the last two wait for steps that never come
    for t, row in enumerate(stored[3]):
        m = min(3, 50 - t % 50)
        np.testing.assert_array_equal(row["obs"], stored[1][t]["obs"])
        np.testing.assert_array_equal(row["next_obs"], stored[1][t + m - 1]["next_obs"])
        if script is sdar:
            np.testing.assert_array_equal(row["last_actions"], stored[1][t + m - 1]["actions"])
        assert row["rewards"] == pytest.approx(sum(0.99**i * stored[1][t + i]["rewards"] for i in range(m)))
        assert row["discounts"] == pytest.approx(0.99**m)


def test_bad_options_are_refused(script):
    with pytest.raises(SystemExit, match="--n-step must be at least 1"):
        script.check_args(script.Args(n_step=0))
    with pytest.raises(SystemExit, match="--learning-starts must be at least 3 with --n-step 4, not 2"):
        script.check_args(script.Args(n_step=4, learning_starts=2))
