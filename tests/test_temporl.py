"""TempoRL's parts, and those that UTE has in common with it, against separate, slow and obvious computations."""

import gymnasium as gym
import numpy as np
import pytest
import torch
import torch.nn as nn
from hypothesis import given, settings
from hypothesis import strategies as st

import temporl_continuous_action as temporl
import ute_continuous_action as ute
from tests.conftest import TINY, scalars

OBS, ACT, BATCH, SKIP = 3, 2, 6, 5


class Flips(gym.Env):
    """The action must follow a target that flips every fourth step; target and steps until then are seen.

    A decision is harmless as long as it does not run past a flip, after which every step costs 1.
    """

    def __init__(self, render_mode: str | None = None):
        self.action_space = gym.spaces.Box(-1, 1, (1,), np.float32)
        self.observation_space = gym.spaces.Box(-1, 1, (5,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.t, self.sign = int(self.np_random.integers(4)), 1.0
        return self.observe(), {}

    def observe(self) -> np.ndarray:
        return np.array([self.sign, *np.eye(4)[self.t % 4]], np.float32)

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        reward = -abs(0.5 * self.sign - float(action[0]))
        self.t += 1
        if self.t % 4 == 0:
            self.sign = -self.sign
        return self.observe(), reward, False, False, {}


if "Flips-v0" not in gym.registry:
    gym.register("Flips-v0", Flips, max_episode_steps=40)


both = pytest.mark.parametrize("module", [temporl, ute], ids=["temporl", "ute"])


def make_agent(module=temporl, device="cpu", **options) -> nn.Module:
    torch.manual_seed(0)
    args = module.Args(**{**TINY, "batch_size": BATCH, "max_skip": SKIP, **options})
    agent = module.Agent(OBS, ACT, args, torch.device(device))
    if device == "cpu":
        for p in agent.target_parameters:
            p.data.add_(0.1 * torch.randn_like(p) + 0.02)  # targets of their own
    return agent


def make_batch(seed=0, dtype=torch.float32, device="cpu"):
    g = torch.Generator().manual_seed(seed)
    rows = {
        "obs": torch.randn(BATCH, OBS, generator=g),
        "actions": torch.rand(BATCH, ACT, generator=g) * 2 - 1,
        "rewards": torch.randn(BATCH, generator=g),
        "next_obs": torch.randn(BATCH, OBS, generator=g),
        "terminated": (torch.arange(BATCH) % 2).float(),
        "lengths": (torch.arange(BATCH) % SKIP + 1).float(),
    }
    return {name: value.to(device, dtype) for name, value in rows.items()}


def make_batches(seed=0, **how):
    return {"replay": make_batch(seed, **how), "skips": make_batch(seed + 100, **how)}


# Plain numpy networks, written from the text: ReLU, ReLU, out.


def mlp(net, *inputs):
    weights = {name: value.detach().double().numpy() for name, value in net.state_dict().items()}
    x = np.concatenate(inputs)
    for layer in ("fc1", "fc2"):
        x = np.maximum(weights[f"{layer}.weight"] @ x + weights[f"{layer}.bias"], 0)
    return weights["fc3.weight"] @ x + weights["fc3.bias"]


def target_by_hand(agent, batch, i, length):
    """R + γ^length·(1-d)·Q'(s', π'(s'))."""
    obs = batch["next_obs"][i].numpy()
    value = mlp(agent.critic_target, obs, np.tanh(mlp(agent.actor_target, obs)))[0]
    alive = 1 - batch["terminated"][i].item()
    return batch["rewards"][i].item() + np.prod([0.99] * length) * alive * value


# What is stored.


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-10, 10), min_size=1, max_size=12), st.floats(0, 1))
def test_intervals_of_a_segment_against_enumeration(rewards, gamma):
    """After every step of a segment has been taken, each pair i < j is there once, with its sum and length."""
    segment, stored = [], {}
    for end, reward in enumerate(rewards, start=1):
        segment.append((torch.tensor([float(end - 1)]), reward))
        for obs, reward_sum, length in temporl.intervals_ending_here(segment, gamma):
            pair = (int(obs[0]), end)
            assert pair not in stored
            stored[pair] = (reward_sum, length)
    n = len(rewards)
    assert set(stored) == {(i, j) for i in range(n) for j in range(i + 1, n + 1)}
    for (i, j), (reward_sum, length) in stored.items():
        assert length == j - i
        assert reward_sum == pytest.approx(sum(gamma**k * rewards[i + k] for k in range(j - i)), abs=1e-9)


@both
@pytest.mark.parametrize(("env_id", "ends", "episode"), [("Endless-v0", False, 7), ("Ending-v0", True, 5)])
def test_training_stores_every_interval_of_every_decision(module, env_id, ends, episode, tmp_path, monkeypatch):
    """Decisions of 3, 1, 4 steps and so on, cut at the episodes' ends; the task pays 0, 1, 2, … and shows its time."""
    skips = [3, 1, 4, 2, 2]
    decisions = iter(range(1000))

    def decide(self, state, mode):
        k = next(decisions)
        return torch.full((2,), k / 100), skips[k % len(skips)]

    stored = {}
    monkeypatch.setattr(module.Agent, "decide", decide)
    monkeypatch.setattr(
        module.ReplayBuffer, "add", lambda self, **row: stored.setdefault(tuple(self.fields), []).append(row)
    )
    options = {**TINY, "env_id": f"tests.tasks:{env_id}", "total_timesteps": 38, "learning_starts": 38, "max_skip": 4}
    monkeypatch.setattr(module.Run, "evaluate", lambda self: None)
    module.train(module.Args(**options, gamma=0.5, runs_dir=str(tmp_path), run_name="run"))

    expected, step, k = [], 0, 0
    while step < 38:
        t = 0
        while t < episode and step < 38:  # one decision
            run = min(skips[k % len(skips)], episode - t, 38 - step)
            for j in range(t + 1, t + run + 1):
                for i in range(t, j):
                    total = sum(0.5 ** (n - i) * n for n in range(i, j))
                    expected.append((i, j, np.float32(k / 100), total, j - i, float(ends and j == episode)))
            t, step, k = t + run, step + run, k + 1
    names = ("obs", "actions", "rewards", "next_obs", "terminated")
    rows = stored[(*names, "lengths")]
    columns = ("actions", "rewards", "lengths", "terminated")
    got = [
        (*(int(row[name][0]) for name in ("obs", "next_obs")), *(float(np.ravel(row[name])[0]) for name in columns))
        for row in rows
    ]
    assert len(got) == len(expected)
    np.testing.assert_allclose(sorted(got), sorted(expected), rtol=1e-6)
    single = [(int(row["obs"][0]), int(row["next_obs"][0]), row["rewards"]) for row in stored[names]]
    assert single == [(n % episode, n % episode + 1, n % episode) for n in range(38)]


def test_buffers_hold_all_that_a_short_run_makes():
    """The most intervals come from segments of J steps, J(J+1)/2 each."""
    for total, limit, rows, intervals in [(40, 1000, 40, 4 * 55), (40, 100, 40, 100), (500, 100, 100, 100)]:
        args = temporl.Args(total_timesteps=total, buffer_size=limit, max_skip=10)
        buffers = temporl.make_buffers(OBS, ACT, args, torch.device("cpu"))
        assert (buffers["replay"].capacity, buffers["skips"].capacity) == (rows, intervals)


# Decisions.


@both
@pytest.mark.parametrize("mode", ["random", "sample", "greedy"])
def test_an_action_runs_for_the_chosen_number_of_steps(module, mode, monkeypatch):
    """Whatever is observed meanwhile; then, and only then, there is a new decision."""
    agent, made = make_agent(module), []
    decide = module.Agent.decide

    def recorded(self, state, mode):
        made.append(decide(self, state, mode))
        return made[-1]

    monkeypatch.setattr(module.Agent, "decide", recorded)
    monkeypatch.setattr(module, "best_skip", lambda *_: torch.tensor(1 + len(made) % SKIP))
    memory, actions = None, []
    for t in range(60):
        obs = np.random.default_rng(t).normal(size=OBS).astype(np.float32)
        action, memory = agent.act(obs, memory, mode)
        assert action.dtype == np.float32
        actions.append(action)
        assert len(actions) + memory["left"] == sum(skip for _, skip in made)
    assert len({skip for _, skip in made}) > 2
    expected = [action.numpy() for action, skip in made for _ in range(skip)]
    np.testing.assert_array_equal(actions, expected[:60])


def test_greedy_takes_the_best_skip_of_the_noiseless_action():
    agent = make_agent()
    chosen = set()
    for seed in range(20):
        obs = 3 * np.random.default_rng(seed).normal(size=OBS).astype(np.float32)
        action, memory = agent.act(obs, None, "greedy")
        by_hand = np.tanh(mlp(agent.actor, obs.astype(float)))
        np.testing.assert_allclose(action, by_hand, atol=1e-5)
        assert memory["left"] == np.argmax(mlp(agent.skip, obs.astype(float), by_hand))  # one step of it is taken
        chosen.add(memory["left"])
    assert len(chosen) > 1


def test_sampling_explores_actions_and_skips():
    """Noise of the given size; the best skip for the noisy action but for ε of the decisions."""
    agent, obs = make_agent(exploration_noise=0.3, skip_epsilon=0.25), np.ones(OBS, np.float32)
    torch.manual_seed(1)
    decisions = [agent.act(obs, None, "sample") for _ in range(4000)]
    actions = np.array([action for action, _ in decisions])
    mean = np.tanh(mlp(agent.actor, obs.astype(float)))
    assert (np.abs(mean) < 0.4).all()  # so that clipping is rare
    np.testing.assert_allclose(actions.std(0), 0.3, atol=0.02)
    np.testing.assert_allclose(actions.mean(0), mean, atol=0.03)
    best = [np.argmax(mlp(agent.skip, obs.astype(float), action)) for action in actions.astype(float)]
    other = np.mean([memory["left"] != b for (_, memory), b in zip(decisions, best, strict=True)])
    assert other == pytest.approx(0.25 * (1 - 1 / SKIP), abs=0.03)


@both
def test_noisy_actions_are_clipped(module):
    agent, obs = make_agent(module, exploration_noise=5.0), np.ones(OBS, np.float32)
    actions = np.array([agent.act(obs, None, "sample")[0] for _ in range(200)])
    assert np.abs(actions).max() == 1


@both
def test_warm_up_is_uniform(module):
    agent, obs = make_agent(module), np.ones(OBS, np.float32)
    torch.manual_seed(1)
    decisions = [agent.act(obs, None, "random") for _ in range(5000)]
    lengths = np.bincount([memory["left"] + 1 for _, memory in decisions], minlength=SKIP + 1)
    np.testing.assert_allclose(lengths, [0] + [1000] * SKIP, atol=150)
    actions = np.array([action for action, _ in decisions])
    np.testing.assert_allclose(
        np.quantile(actions, [0.01, 0.25, 0.5, 0.75, 0.99]), [-0.98, -0.5, 0, 0.5, 0.98], atol=0.04
    )


# Losses.


def test_critic_loss_against_brute_force():
    agent, batch = make_agent().double(), make_batch(dtype=torch.float64)
    loss, _ = agent.critic_loss(batch)
    errors = [
        mlp(agent.critic, batch["obs"][i].numpy(), batch["actions"][i].numpy())[0] - target_by_hand(agent, batch, i, 1)
        for i in range(BATCH)
    ]
    assert loss.item() == pytest.approx(np.mean(np.square(errors)), rel=1e-9)


def test_actor_loss_against_brute_force():
    agent, batch = make_agent().double(), make_batch(dtype=torch.float64)
    agent.frozen_critics = (agent.critic,)
    loss, _ = agent.actor_loss(batch)
    values = [mlp(agent.critic, s, np.tanh(mlp(agent.actor, s)))[0] for s in batch["obs"].numpy()]
    assert loss.item() == pytest.approx(-np.mean(values), rel=1e-9)


def test_skip_loss_and_its_gradient_against_brute_force():
    """The output of the length that was run meets R + γ^length·(1-d)·Q'; the others feel nothing."""
    agent, batch = make_agent().double(), make_batch(dtype=torch.float64)
    loss, metrics = agent.skip_loss(batch)
    loss.backward()
    errors, gradient, best = [], np.zeros(SKIP), []
    for i in range(BATCH):
        values = mlp(agent.skip, batch["obs"][i].numpy(), batch["actions"][i].numpy())
        length = int(batch["lengths"][i])
        errors.append(values[length - 1] - target_by_hand(agent, batch, i, length))
        gradient[length - 1] += 2 * errors[-1] / BATCH
        best.append(1 + np.argmax(values))
    assert loss.item() == pytest.approx(np.mean(np.square(errors)), rel=1e-9)
    np.testing.assert_allclose(agent.skip.fc3.bias.grad.numpy(), gradient, rtol=1e-9)
    assert metrics["repetition/best_skip"].item() == pytest.approx(np.mean(best))


def test_losses_keep_to_their_networks():
    agent, batch = make_agent(), make_batch()
    for name, net in [("critic_loss", agent.critic), ("actor_loss", agent.actor), ("skip_loss", agent.skip)]:
        agent.zero_grad()
        getattr(agent, name)(batch)[0].backward()
        touched = {n for n, p in agent.named_parameters() if p.grad is not None}
        assert touched == {n for n, p in agent.named_parameters() if any(p is q for q in net.parameters())}
        assert all(p.grad.abs().sum() > 0 for p in net.parameters())


def test_an_update_moves_each_network_once_and_the_targets_by_tau():
    agent = make_agent(tau=0.25)
    before = [p.clone() for p in agent.target_parameters]
    agent.update(make_batches(), step=1)
    counts = {name: optimizer.steps.item() for name, optimizer in agent.optimizers.items()}
    assert counts == {"actor": 1, "critic": 1, "skip": 1}
    online = [*agent.actor.parameters(), *agent.critic.parameters()]
    targets = [*agent.actor_target.parameters(), *agent.critic_target.parameters()]
    for old, new, now in zip(before, targets, online, strict=True):
        torch.testing.assert_close(new, 0.75 * old + 0.25 * now)
    (view,) = agent.frozen_critics
    assert all(torch.equal(a, b) for a, b in zip(view.parameters(), agent.critic.parameters(), strict=True))


def test_layers_have_the_authors_widths():
    agent = temporl.Agent(OBS, ACT, temporl.Args(), torch.device("meta"))
    for net, inputs, outputs in [(agent.actor, OBS, ACT), (agent.critic, OBS + ACT, 1), (agent.skip, OBS + ACT, 20)]:
        shapes = [tuple(getattr(net, layer).weight.shape) for layer in ("fc1", "fc2", "fc3")]
        assert shapes == [(400, inputs), (300, 400), (outputs, 300)]


def test_update_runs_on_the_meta_device():
    """No tensor is made elsewhere, nothing waits for a value, no shape depends on data."""
    agent = make_agent(device="meta")
    for step in (1, 2):
        metrics = agent.update(make_batches(device="meta"), step)
    assert all(value.device.type == "meta" for value in metrics.values())


def test_compiled_losses_equal_eager_ones():
    torch._dynamo.reset()
    eager, fast = (make_agent(compile=c) for c in (False, True))
    for step in (1, 2, 3):
        metrics = []
        for agent in (eager, fast):
            torch.manual_seed(step)
            metrics.append(agent.update(make_batches(seed=step), step))
        assert metrics[0].keys() == metrics[1].keys()
        for name in metrics[0]:
            torch.testing.assert_close(metrics[0][name], metrics[1][name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"max_skip": 0}, "--max-skip must be at least 1"),
        ({"learning_rate": 0.0}, "--learning-rate must be positive"),
        ({"exploration_noise": -0.1}, "--exploration-noise must not be negative"),
        ({"skip_epsilon": 1.5}, "--skip-epsilon must lie"),
        ({"gamma": 2.0}, "--gamma must lie"),
    ],
)
def test_bad_options_are_refused(options, complaint):
    with pytest.raises(SystemExit, match=complaint):
        temporl.check_args(temporl.Args(**options))


# Learning.

SMALL = {**TINY, "hidden_dim": 64, "batch_size": 64, "eval_episodes": 5, "eval_every": 0, "tau": 0.02}


def final_return(path, **options):
    logged = scalars(temporl.train(temporl.Args(**{**SMALL, "runs_dir": str(path), "run_name": "run", **options})))
    return logged["eval/return"][-1][1]


def test_learns_to_swing_up_a_pendulum(tmp_path):
    """Solved is about -150; a random agent, or one that only hangs, has -1200 and less."""
    task = {"env_id": "Pendulum-v1", "total_timesteps": 2500, "learning_starts": 500, "gamma": 0.95}
    result = final_return(tmp_path, **task, learning_rate=2e-3, max_skip=5, seed=2)
    assert result > -500


def test_learns_how_long_an_action_is_right(tmp_path):
    """A decision that runs past a flip costs 1 a step: 0 is perfect, the right action for 8 steps each time has -20."""
    task = {"env_id": "Flips-v0", "total_timesteps": 2000, "learning_starts": 500, "gamma": 0.9}
    result = final_return(tmp_path, **task, learning_rate=2e-3, max_skip=8)
    assert result > -2
