"""Episodes in lock-step against episodes played alone; return, APR and AFR by hand; pictures."""

import numpy as np
import pytest
import torch

from sdar_utils.envs import derived_seed, make_env
from sdar_utils.evaluation import (
    ACT,
    MODES,
    REPEAT,
    ROWS,
    Evaluator,
    act_or_repeat_image,
    repetition_metrics,
    summarise,
)
from sdar_utils.noise import EpisodesNoise, Noise
from tests.conftest import TINY

CPU = torch.device("cpu")


def make_agent(script, env, **options):
    torch.manual_seed(0)
    (obs_dim,), (act_dim,) = env.observation_space.shape, env.action_space.shape
    return script.Agent(obs_dim, act_dim, script.Args(**{**TINY, "hidden_dim": 64, **options}), CPU)


def evaluator(env_id: str, seed: int = 1, **more) -> Evaluator:
    return Evaluator(lambda: make_env(env_id), seed, CPU, **more)


# In lock-step.


@pytest.mark.parametrize("env_id", ["LunarLanderContinuous-v3", "tests.tasks:HoldAndTrack-v0"])
def test_together_or_alone_an_episode_is_the_same(script, env_id):
    """To the last bit, in both modes, whichever play beside it."""
    agent = make_agent(script, make_env(env_id))
    together = evaluator(env_id).play(agent.act, 5)
    few = evaluator(env_id).play(agent.act, 2)
    rows = [(i, mode) for i in range(5) for mode in MODES]
    for row, (i, mode) in enumerate(rows):
        played = together[mode][i]
        if i < 2:
            np.testing.assert_array_equal(played.actions, few[mode][i].actions)
        idle = [(99, "greedy")] * row  # others before it, so that it is in the same row of the batch
        *_, alone = evaluator(env_id).play_together(agent.act, [*idle, (i, mode)], lambda: None)
        np.testing.assert_array_equal(played.actions, alone.actions)
        assert (played.total_reward, played.decisions) == (alone.total_reward, alone.decisions)


def test_greedy_episodes_are_those_of_a_plain_loop(script):
    """One observation at a time: the sums are the same, though a forward pass of one row may round otherwise."""
    env_id = "tests.tasks:HoldAndTrack-v0"
    agent, env = make_agent(script, make_env(env_id)), make_env(env_id)
    noise = EpisodesNoise([None], CPU)
    for i, played in enumerate(evaluator(env_id).play(agent.act, 3)["greedy"]):
        obs, _ = env.reset(seed=derived_seed(1, 1, i))
        actions, prev_actions, left, over = [], None, 0, False
        while not over:
            if left == 0:
                prev_actions, left = agent.act(obs[None], prev_actions, noise)
                left = int(np.max(left))
            obs, _, terminated, truncated, _ = env.step(prev_actions[0])
            actions.append(prev_actions[0])
            left, over = left - 1, terminated or truncated
        np.testing.assert_allclose(played.actions, actions, atol=1e-4)


def test_more_episodes_than_rows_and_of_any_length(monkeypatch):
    """A made-up agent, so that everything is known: it asks for 1, 2, 3, … steps in turn."""
    calls = []

    def act(obs, prev_actions, noise):
        assert obs.shape == (ROWS, 3)
        calls.append((prev_actions is None, list(noise.asked)))
        steps = np.arange(ROWS) % 3 + 1
        return np.full((ROWS, 2), len(calls) / 1000, np.float32), steps

    count = ROWS // 2 + 3
    done = []
    played = evaluator("tests.tasks:Endless-v0").play(act, count, lambda: done.append(1))  # seven steps, 0 + 1 + … + 6
    assert [len(played[mode]) for mode in MODES] == [count, count]
    assert len(done) == 2 * count
    assert [first for first, _ in calls].count(True) == 2  # two blocks
    assert calls[0][1] == list(range(ROWS))
    assert calls[1][1] == [row for row in range(ROWS) if row % 3 == 0]  # whose one step is over
    for k, trajectory in enumerate(t for pair in zip(*(played[mode] for mode in MODES), strict=True) for t in pair):
        steps = k % ROWS % 3 + 1
        assert trajectory.total_reward == 21
        assert trajectory.actions.shape == (7, 2)
        assert trajectory.decisions == -(-7 // steps)
        changes = np.flatnonzero(np.diff(trajectory.actions[:, 0])) + 1
        assert changes.tolist() == list(range(steps, 7, steps))
    assert summarise(played["greedy"])["decisions_per_step"] == pytest.approx(
        sum(t.decisions for t in played["greedy"]) / (7 * count)
    )


def test_modes_share_their_starts_and_stochastic_episodes_differ():
    seen = []

    def act(obs, prev_actions, noise):
        if prev_actions is None:
            seen.append(obs.copy())
        return noise.normal(1).numpy().clip(-1, 1), 1

    played = evaluator("Pendulum-v1").play(act, 3)
    for i in range(3):
        np.testing.assert_array_equal(seen[0][2 * i], seen[0][2 * i + 1])
        assert (played["greedy"][i].actions == 0).all()
        assert played["stochastic"][i].actions.std() > 0.5
    assert not np.array_equal(played["stochastic"][0].actions, played["stochastic"][1].actions)
    again = evaluator("Pendulum-v1").play(act, 3)
    other = evaluator("Pendulum-v1", seed=2).play(act, 3)
    np.testing.assert_array_equal(played["stochastic"][2].actions, again["stochastic"][2].actions)
    assert not np.array_equal(played["stochastic"][2].actions, other["stochastic"][2].actions)


# Noise.


def test_training_draws_from_torchs_generator():
    torch.manual_seed(3)
    drawn = Noise(CPU).uniform(4), Noise(CPU).normal(2)
    torch.manual_seed(3)
    assert torch.equal(drawn[0], torch.rand(4))
    assert torch.equal(drawn[1], torch.randn(2))


def test_a_stream_moves_only_when_its_episode_is_asked():
    stream = np.random.default_rng
    noise = EpisodesNoise([stream(1), None, stream(2)], CPU)
    assert noise.greedy.tolist() == [False, True, False]
    state = torch.get_rng_state()
    noise.asked = [0, 1]
    first = noise.uniform(3)
    noise.asked = [0, 1, 2]
    second = noise.normal(3)
    expected = stream(1)
    np.testing.assert_array_equal(first[0], expected.random(3, np.float32))
    np.testing.assert_array_equal(second[0], expected.standard_normal(3, np.float32))
    np.testing.assert_array_equal(second[2], stream(2).standard_normal(3, np.float32))
    assert first[1].tolist() == [0.5] * 3
    assert second[1].tolist() == [0] * 3
    assert torch.equal(torch.get_rng_state(), state)  # training's


# Metrics.


def test_repetition_metrics_by_hand():
    a = np.array([[0.0, 0.0], [0.3, 0.0], [0.3, 0.4], [0.3, 0.4]])  # changes (.3, 0), (0, .4), (0, 0)
    b = np.array([[1.0, 1.0], [0.4, 0.2]])  # changes (-.6, -.8)
    metrics = repetition_metrics([a, b])
    p_a, p_b = 4 / 6, 0.0
    assert metrics["apr"] == pytest.approx(1 / (1 - (p_a + p_b) / 2))
    assert metrics["apr_dim"] == pytest.approx([1 / (1 - (2 / 3) / 2)] * 2)
    assert metrics["afr"] == pytest.approx(((0.3 + 0.4 + 0) / 3 + 1.0) / 2)
    assert metrics["afr_per_dim"] == pytest.approx(((0.3 + 0.4) / 6 + 0.7) / 2)


def test_repetition_metrics_at_the_limits():
    still, single = np.ones((5, 2)), np.ones((1, 2))
    assert repetition_metrics([still])["apr"] == np.inf
    assert repetition_metrics([still])["afr"] == 0
    assert np.isnan(repetition_metrics([single])["apr"])
    assert repetition_metrics([single, still])["repeat_rate"] == 1
    rounding = np.array([[0.1], [np.nextafter(0.1, 1)]])
    assert repetition_metrics([rounding])["apr"] == 1  # equality is exact


# Pictures.


def test_act_or_repeat_picture():
    actions = np.array([[0.0, 0.0], [0.5, 0.0], [0.5, 0.0], [0.5, 0.2]])
    picture = act_or_repeat_image(actions)
    acts = np.array([[1, 1, 0, 0], [1, 0, 0, 1]], bool)  # dimension × time
    width = picture.shape[1] // 4
    assert picture.shape == (2 * 16 + 2, 1000, 3)
    assert (picture[16:18] == 255).all()
    for dimension in range(2):
        for t in range(4):
            cell = picture[dimension * 18 : dimension * 18 + 16, t * width : (t + 1) * width]
            assert (cell == (ACT if acts[dimension, t] else REPEAT)).all()
    assert act_or_repeat_image(np.zeros((2500, 1))).shape == (16, 2500, 3)


def test_the_first_greedy_episode_is_filmed():
    film = make_env("Pendulum-v1", "rgb_array")
    players = evaluator("Pendulum-v1", film=film)
    assert players.fps == film.metadata["render_fps"]
    played = players.play(lambda obs, prev_actions, noise: (np.zeros((ROWS, 1), np.float32), 1), ROWS // 2 + 1)
    filmed = [(mode, i) for mode in MODES for i, t in enumerate(played[mode]) if t.frames]
    assert filmed == [("greedy", 0)]
    assert len(played["greedy"][0].frames) == 200
