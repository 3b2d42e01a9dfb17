"""N-Rep's decisions as rows of the replay buffer and as executed actions; beyond them it is SAC, bit for bit."""

import itertools
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
import torch

import nrep_sac as nrep
import sac_continuous_action as sac
from sdar_utils.envs import make_env
from sdar_utils.evaluation import Evaluator, summarise
from tests.conftest import TINY, scalars, train, weights

OBS, ACT, BATCH = 3, 2, 6
GAMMA = 0.9
CLOCKS = {"charts/SPS", "charts/seconds"}


class Restless(gym.Env):
    """Random observations of the size that networks like, so that no two decisions are the same."""

    def __init__(self, render_mode=None):
        self.action_space = gym.spaces.Box(-1, 1, (ACT,), np.float32)
        self.observation_space = gym.spaces.Box(-1, 1, (OBS,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.np_random.uniform(-1, 1, OBS).astype(np.float32), {}

    def step(self, action):
        return self.np_random.uniform(-1, 1, OBS).astype(np.float32), 0.0, False, False, {}


for length in (10, 101):
    gym.register(f"Restless{length}-v0", Restless, max_episode_steps=length)


def make_agent(script=nrep, device="cpu", **options):
    torch.manual_seed(0)
    return script.Agent(OBS, ACT, script.Args(**{**TINY, "batch_size": BATCH, **options}), torch.device(device))


def make_batch(seed=0, device="cpu", repeat=4):
    g = torch.Generator().manual_seed(seed)
    rows = {
        "obs": torch.randn(BATCH, OBS, generator=g),
        "actions": torch.rand(BATCH, ACT, generator=g) * 2 - 1,
        "rewards": torch.randn(BATCH, generator=g),
        "discounts": GAMMA ** torch.randint(1, repeat + 1, (BATCH,), generator=g),
        "next_obs": torch.randn(BATCH, OBS, generator=g),
        "terminated": (torch.arange(BATCH) % 2).float(),
    }
    return {name: value.to(device) for name, value in rows.items()}


@pytest.fixture
def rows(monkeypatch):
    """Every row that a run adds to its buffer."""
    rows, add = [], nrep.ReplayBuffer.add
    monkeypatch.setattr(nrep.ReplayBuffer, "add", lambda self, **row: rows.append(row) or add(self, **row))
    return rows


@pytest.fixture
def episodes(monkeypatch):
    """The actions that a run's training executes, a list for each episode."""
    episodes = []

    class Recorded(gym.Wrapper):
        def reset(self, **kwargs):
            episodes.append([])
            return super().reset(**kwargs)

        def step(self, action):
            episodes[-1].append(action.copy())
            return super().step(action)

    monkeypatch.setattr(nrep, "make_env", lambda env_id: Recorded(make_env(env_id)))
    return episodes


@pytest.fixture
def updates(monkeypatch):
    """What a run's updates are counted by."""
    updates, update = [], nrep.Agent.update
    monkeypatch.setattr(
        nrep.Agent, "update", lambda self, batch, step: updates.append(step) or update(self, batch, step)
    )
    return updates


# Rows.


@pytest.mark.parametrize("repeat", [1, 3, 7, 20])
@pytest.mark.parametrize(("env_id", "length", "ends"), [("Endless-v0", 7, False), ("Ending-v0", 5, True)])
def test_a_row_for_each_decision(tmp_path, rows, repeat, env_id, length, ends):
    """The task pays 0, 1, 2, … and shows the step and the action that it received, from [0, 1] × [-2, 6]."""
    options = {"repeat": repeat, "gamma": GAMMA, "total_timesteps": 4 * length, "learning_starts": 10}
    train(nrep, tmp_path, env_id=f"tests.tasks:{env_id}", **options)
    starts = list(range(0, length, repeat))
    assert len(rows) == 4 * len(starts)
    previous = None
    for row, start in zip(rows, itertools.cycle(starts), strict=False):
        stop = min(start + repeat, length)
        received = np.array([0.5, 2.0]) + np.array([0.5, 4.0]) * row["actions"]
        np.testing.assert_allclose(row["next_obs"], [stop, *received], rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(row["obs"], np.zeros(3) if start == 0 else previous["next_obs"])
        reward, discount = 0.0, 1.0
        for t in range(start, stop):
            reward += discount * t
            discount *= GAMMA
        assert row["rewards"] == pytest.approx(reward, rel=1e-12)
        assert row["discounts"] == pytest.approx(discount, rel=1e-12)
        assert row["terminated"] == (ends and stop == length)
        previous = row


# Executed actions.


@pytest.mark.parametrize("learning_starts", [0, 6, 40])
def test_actions_hold_for_a_decision_and_no_longer(tmp_path, episodes, learning_starts):
    """In warm-up, after it, and for the decision that it ends in; an episode's start is a decision."""
    train(nrep, tmp_path, env_id="Restless10-v0", total_timesteps=40, learning_starts=learning_starts)
    assert [len(actions) for actions in episodes] == [10, 10, 10, 10, 0]
    for actions in episodes:
        for t, (before, action) in enumerate(itertools.pairwise(actions), 1):
            assert np.array_equal(before, action) == (t % 4 != 0)
    assert len({tuple(actions[0]) for actions in episodes[:4]}) == 4


@pytest.mark.parametrize("repeat", [1, 4])
def test_evaluation_holds_for_a_decision_and_no_longer(repeat):
    """An episode of 101 steps has 100 pairs of neighbours, of which 100/n are two decisions."""
    evaluator = Evaluator(partial(make_env, "Restless101-v0"), 0, torch.device("cpu"))
    for played in evaluator.play(make_agent(repeat=repeat).act, 1).values():
        summary = summarise(played)
        assert summary["apr"] == pytest.approx(repeat)
        assert summary["decisions_per_step"] == pytest.approx((100 / repeat + 1) / 101)


# Updates.


@pytest.mark.parametrize("learning_starts", [0, 4, 15])
def test_one_update_per_decision(tmp_path, rows, updates, learning_starts):
    """Counted by decisions, so that the actor's turn comes at every second one."""
    train(nrep, tmp_path, env_id="Restless10-v0", repeat=4, total_timesteps=25, learning_starts=learning_starts)
    ends = [4, 8, 10, 14, 18, 20, 24]  # episodes have 10 steps
    assert len(rows) == len(ends)
    assert updates == [decision for decision, end in enumerate(ends, 1) if end > learning_starts]


@pytest.mark.parametrize("repeat", [1, 4])
@pytest.mark.parametrize("learning_starts", [0, 7])
def test_one_update_per_step_if_asked_once_there_is_a_row(tmp_path, updates, repeat, learning_starts):
    options = {"repeat": repeat, "learning_starts": learning_starts, "update_per_step": True}
    train(nrep, tmp_path, env_id="Restless10-v0", total_timesteps=20, **options)
    assert updates == list(range(max(repeat, learning_starts + 1), 21))


def test_repeating_once_is_sac(tmp_path):
    """The same weights to the last bit and the same logs after a short training, so all of SAC's tests hold here."""
    results = []
    for script, options in [(sac, {}), (nrep, {"repeat": 1})]:
        directory = train(script, tmp_path / script.__name__, env_id="Pendulum-v1", total_timesteps=300, **options)
        logged = {tag: values for tag, values in scalars(directory).items() if tag not in CLOCKS}
        results.append((weights(directory), logged))
    (weights_sac, logged_sac), (weights_nrep, logged_nrep) = results
    assert weights_sac.keys() == weights_nrep.keys()
    assert all(torch.equal(weights_sac[name], weights_nrep[name]) for name in weights_sac)
    assert len(logged_sac["losses/qf_loss"]) > 0
    assert logged_sac == logged_nrep


def test_critic_loss_discounts_each_row_by_its_length(monkeypatch):
    """Row by row, the loss of a SAC whose γ is that row's discount."""
    monkeypatch.setattr(torch, "randn_like", torch.zeros_like)
    agent, batch = make_agent(), make_batch()
    assert batch["discounts"].unique().numel() > 2
    agent.q1_target.fc3.bias.data.fill_(5.0)
    agent.q2_target.fc3.bias.data.fill_(6.0)
    losses = []
    for i in range(BATCH):
        same = make_agent(sac, gamma=batch["discounts"][i].item())
        same.load_state_dict(agent.state_dict())
        losses.append(same.critic_loss({name: value[i : i + 1] for name, value in batch.items()})[0])
    torch.testing.assert_close(agent.critic_loss(batch)[0], torch.stack(losses).mean())


def test_update_runs_on_the_meta_device():
    """No tensor is made elsewhere, nothing waits for a value, no shape depends on data."""
    agent = make_agent(device="meta")
    for step in (1, 2):
        metrics = agent.update(make_batch(device="meta"), step)
    assert all(value.device.type == "meta" for value in metrics.values())


@pytest.mark.parametrize("bad", [{"repeat": 0}, {"policy_frequency": 0}, {"alpha": -1.0}])
def test_bad_options_are_refused(bad):
    (name,) = bad
    nrep.check_args(nrep.Args(repeat=1))
    with pytest.raises(SystemExit, match=f"error: --{name.replace('_', '-')} must"):
        nrep.check_args(nrep.Args(**bad))
