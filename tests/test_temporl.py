"""TempoRL, and what UTE has in common with it, against separate, slow and obvious computations."""

import gymnasium as gym
import numpy as np
import pytest
import torch
import torch.nn as nn
from hypothesis import given, settings
from hypothesis import strategies as st

import temporl_continuous_action as temporl
import ute_continuous_action as ute
from sdar_utils.noise import EpisodesNoise, Noise
from tests.conftest import TINY, scalars
from tests.reference import mlp

OBS, ACT, BATCH, SKIP = 3, 2, 6, 5
CPU = torch.device("cpu")

both = pytest.mark.parametrize("module", [temporl, ute], ids=["temporl", "ute"])


class Flips(gym.Env):
    """The action must follow a target that flips every fourth step; target and steps until then are seen.

    A decision is harmless as long as it does not run past a flip, after which every step costs 1.
    """

    def __init__(self):
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


gym.register("Flips-v0", Flips, max_episode_steps=40)


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


def make_batches(module, seed=0, **how):
    """What the agent's update takes: transitions and intervals, and UTE's candidates."""
    return [make_batch(seed + 100 * i, **how) for i in range(2 if module is temporl else 3)]


def random_obs(rows):
    return 3 * np.random.default_rng(0).normal(size=(rows, OBS)).astype(np.float32)


def noise_for(greedy):
    """As in an evaluation: of each row, whether it is greedy; the others have streams of their own."""
    noise = EpisodesNoise([None if g else np.random.default_rng(i) for i, g in enumerate(greedy)], CPU)
    noise.asked = range(len(greedy))
    return noise


# Plain numpy networks, written from the text: ReLU, ReLU, out.


def target_by_hand(agent, batch, i, length):
    """R + γ^length·(1-d)·Q'(s', π'(s'))."""
    obs = batch["next_obs"][i].numpy()
    value = mlp(agent.critic_target, obs, np.tanh(mlp(agent.actor_target, obs)))[0]
    alive = 1 - batch["terminated"][i].item()
    return batch["rewards"][i].item() + np.prod([0.99] * length) * alive * value


# What is stored.


@both
@settings(max_examples=50, deadline=None)
@given(rewards=st.lists(st.floats(-10, 10), min_size=1, max_size=12), gamma=st.floats(0, 1))
def test_intervals_of_a_segment_against_enumeration(module, rewards, gamma):
    """After every step of a segment has been taken, each pair i < j is there once, with its sum and length."""
    segment, stored = [], {}
    for end, reward in enumerate(rewards, start=1):
        segment.append((np.array([end - 1]), reward))
        for obs, reward_sum, length in module.intervals_ending_here(segment, gamma):
            pair = (int(obs[0]), end)
            assert pair not in stored
            stored[pair] = (reward_sum, length)
    n = len(rewards)
    assert set(stored) == {(i, j) for i in range(n) for j in range(i + 1, n + 1)}
    for (i, j), (reward_sum, length) in stored.items():
        assert length == j - i
        assert reward_sum == pytest.approx(sum(gamma**k * rewards[i + k] for k in range(j - i)), abs=1e-9)


@pytest.fixture
def train(tmp_path, monkeypatch):
    """A short training without evaluations. Returns its buffers and the rows that each was given."""

    def train(module, **options):
        buffers = []

        class Recorded(module.ReplayBuffer):
            def __init__(self, *inputs):
                super().__init__(*inputs)
                self.given = []
                buffers.append(self)

            def add(self, **row):
                super().add(**row)
                self.given.append(row)

        monkeypatch.setattr(module, "ReplayBuffer", Recorded)
        monkeypatch.setattr(module.Run, "evaluate", lambda self: None)
        module.train(module.Args(**{**TINY, "runs_dir": str(tmp_path), **options}))
        return buffers

    return train


@both
@pytest.mark.parametrize(("env_id", "ends", "episode"), [("Endless-v0", False, 7), ("Ending-v0", True, 5)])
def test_training_stores_every_interval_of_every_decision(module, env_id, ends, episode, train, monkeypatch):
    """Decisions of 3, 1, 4 steps and so on, cut at the episodes' ends; the task pays 0, 1, 2, … and shows its time."""
    skips, decisions = [3, 1, 4, 2, 2], iter(range(1000))

    def act(self, obs, prev_actions, noise):
        k = next(decisions)
        return np.full(2, k / 100, np.float32), np.array(skips[k % len(skips)])

    monkeypatch.setattr(module.Agent, "act", act)
    task = {"env_id": f"tests.tasks:{env_id}", "total_timesteps": 38, "learning_starts": 0}
    replay, intervals = train(module, **task, max_skip=4, gamma=0.5)

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
    names = ("obs", "next_obs", "actions", "rewards", "lengths", "terminated")
    got = [tuple(float(np.ravel(row[name])[0]) for name in names) for row in intervals.given]
    assert len(got) == len(expected)
    np.testing.assert_allclose(sorted(got), sorted(expected), rtol=1e-6)
    single = [(int(row["obs"][0]), int(row["next_obs"][0]), row["rewards"]) for row in replay.given]
    assert single == [(n % episode, n % episode + 1, n % episode) for n in range(38)]


@both
def test_buffers_hold_all_that_a_short_run_makes(module, train, monkeypatch):
    """Decisions of J steps make the most intervals, and those fill their buffer; --buffer-size may allow less."""
    monkeypatch.setattr(module.Agent, "act", lambda self, *_: (np.zeros(2, np.float32), np.array(7)))
    task = {"env_id": "tests.tasks:Endless-v0", "total_timesteps": 28, "learning_starts": 0, "max_skip": 7}
    replay, intervals = train(module, **task, run_name="all")
    assert (replay.capacity, replay.added) == (28, 28)
    assert (intervals.capacity, intervals.added) == (112, 112)
    assert [buffer.capacity for buffer in train(module, **task, buffer_size=20, run_name="less")] == [20, 20]


@both
def test_warm_up_is_uniform(module, train):
    """In the action and in the number of steps, but for what an episode's end cuts off."""
    task = {"env_id": "Pendulum-v1", "total_timesteps": 4000, "learning_starts": 4000}
    replay, _ = train(module, **task, max_skip=SKIP)
    actions = np.array([row["actions"][0] for row in replay.given])
    starts = np.flatnonzero(np.diff(actions, prepend=np.nan) != 0)
    assert np.isin(np.arange(0, 4000, 200), starts).all()  # nothing runs on into the next episode
    lengths = np.bincount(np.diff(starts, append=4000), minlength=SKIP + 1) / len(starts)
    np.testing.assert_allclose(lengths, [0] + [1 / SKIP] * SKIP, atol=0.05)
    quantiles = np.quantile(actions[starts], [0.01, 0.25, 0.5, 0.75, 0.99])
    np.testing.assert_allclose(quantiles, [-0.98, -0.5, 0, 0.5, 0.98], atol=0.08)


# Decisions.


def test_greedy_takes_the_best_skip_of_the_noiseless_action():
    agent, obs = make_agent(skip_epsilon=1.0), random_obs(20)
    actions, steps = agent.act(obs, None, noise_for([True] * 20))
    for row, action, skip in zip(obs.astype(float), actions, steps, strict=True):
        by_hand = np.tanh(mlp(agent.actor, row))
        np.testing.assert_allclose(action, by_hand, atol=1e-5)
        values = mlp(agent.skip, row, by_hand)
        assert values[skip - 1] == pytest.approx(values.max(), abs=1e-5)
    assert len(set(steps)) > 1


def test_sampling_explores_actions_and_skips():
    """Noise of the given size; the best skip for the noisy action but for ε of the decisions."""
    agent, obs = make_agent(exploration_noise=0.3, skip_epsilon=0.25), np.ones((4000, OBS), np.float32)
    agent.skip.fc1.weight.data[:, OBS:] *= 10  # so that the best skip depends on the noise
    actions, steps = agent.act(obs, None, noise_for([False] * 4000))
    mean = np.tanh(mlp(agent.actor, obs[0].astype(float)))
    assert (np.abs(mean) < 0.4).all()  # so that clipping is rare
    np.testing.assert_allclose(actions.std(0), 0.3, atol=0.02)
    np.testing.assert_allclose(actions.mean(0), mean, atol=0.03)
    best = [1 + np.argmax(mlp(agent.skip, obs[0].astype(float), action)) for action in actions.astype(float)]
    assert np.bincount(best).max() < 3600
    assert np.mean(steps != best) == pytest.approx(0.25 * (1 - 1 / SKIP), abs=0.03)


@both
def test_random_skips_are_uniform_and_never_of_greedy_episodes(module):
    agent, obs = make_agent(module, skip_epsilon=1.0), np.ones((4000, OBS), np.float32)
    agent.skip.fc3.bias.data.view(-1, SKIP)[:, -1] += 100  # J is the best
    greedy = np.arange(4000) % 4 == 0
    actions, steps = agent.act(obs, None, noise_for(greedy))
    assert (actions.dtype, steps.dtype) == (np.float32, np.int64)
    assert len(np.unique(actions[greedy], axis=0)) == 1
    assert set(steps[greedy]) == {SKIP}
    np.testing.assert_allclose(np.bincount(steps[~greedy], minlength=SKIP + 1), [0] + [600] * SKIP, atol=100)


@both
def test_rows_are_decided_independently(module):
    """Each as in a batch of its own."""
    agent, obs, greedy = make_agent(module, skip_epsilon=0.5), random_obs(12), [True, False, False] * 4
    actions, steps = agent.act(obs, None, noise_for(greedy))
    generators = noise_for(greedy).generators
    for i in range(12):
        alone = EpisodesNoise([generators[i]], CPU)
        alone.asked = [0]
        (action,), (skip,) = agent.act(obs[i : i + 1], None, alone)
        np.testing.assert_allclose(action, actions[i], atol=1e-5)
        assert skip == steps[i]


@both
def test_training_decides_for_one_row(module):
    """With actions that are noisy, but clipped, and all numbers of steps."""
    agent, obs = make_agent(module, exploration_noise=2.0, skip_epsilon=1.0), np.ones(OBS, np.float32)
    torch.manual_seed(1)
    actions, steps = zip(*(agent.act(obs, None, Noise(CPU)) for _ in range(300)), strict=True)
    assert {action.shape for action in actions} == {(ACT,)}
    assert np.abs(actions).max() == 1
    assert {skip.shape for skip in steps} == {()}
    assert set(map(int, steps)) == set(range(1, SKIP + 1))


@both
def test_the_largest_random_number_gives_the_most_steps(module):
    """Not one more, however the product is rounded."""

    class Largest(Noise):
        def uniform(self, size):
            return torch.tensor([0.0, np.nextafter(np.float32(1), np.float32(0))])

    for max_skip in range(1, 1000):
        assert module.epsilon_greedy(torch.tensor(1), max_skip, 0.1, Largest(CPU)) == max_skip


# Losses.


def test_critic_loss_against_brute_force():
    agent, batch = make_agent().double(), make_batch(dtype=torch.float64)
    loss, _ = agent.critic_loss(batch)
    errors = [
        mlp(agent.critic, batch["obs"][i].numpy(), batch["actions"][i].numpy())[0] - target_by_hand(agent, batch, i, 1)
        for i in range(BATCH)
    ]
    assert loss.item() == pytest.approx(np.mean(np.square(errors)), rel=1e-9)


@both
def test_actor_loss_against_brute_force(module):
    agent, batch = make_agent(module).double(), make_batch(dtype=torch.float64)
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


@both
@pytest.mark.parametrize("name", ["actor", "critic", "skip"])
def test_each_loss_moves_its_own_network(module, name):
    agent, batch = make_agent(module), make_batch()
    batch["lengths"].fill_(1)  # so that UTE's critic takes all rows
    before = {name: tensor.clone() for name, tensor in agent.state_dict().items()}
    getattr(agent, f"update_{name}")(batch)
    moved = {name for name, tensor in agent.state_dict().items() if not torch.equal(tensor, before[name])}
    assert moved == {f"{name}.fc{i}.{part}" for i in (1, 2, 3) for part in ("weight", "bias")}


@both
def test_an_update_moves_each_network_once_and_the_targets_by_tau(module):
    agent = make_agent(module, tau=0.25)
    before = [p.clone() for p in agent.target_parameters]
    agent.update(*make_batches(module))
    counts = {name: optimizer.steps.item() for name, optimizer in agent.optimizers.items()}
    assert counts == {"actor": 1, "critic": 1, "skip": 1}
    online = [*agent.actor.parameters(), *agent.critic.parameters()]
    targets = [*agent.actor_target.parameters(), *agent.critic_target.parameters()]
    for old, new, now in zip(before, targets, online, strict=True):
        torch.testing.assert_close(new, 0.75 * old + 0.25 * now)


@both
def test_layers_have_the_authors_widths(module):
    agent = module.Agent(OBS, ACT, module.Args(), torch.device("meta"))
    heads = 1 if module is temporl else 10
    for net, inputs, outputs in [
        (agent.actor, OBS, ACT),
        (agent.critic, OBS + ACT, 1),
        (agent.skip, OBS + ACT, heads * 20),
    ]:
        shapes = [tuple(getattr(net, layer).weight.shape) for layer in ("fc1", "fc2", "fc3")]
        assert shapes == [(400, inputs), (300, 400), (outputs, 300)]


@both
def test_update_runs_on_the_meta_device(module):
    """No tensor is made elsewhere, nothing waits for a value, no shape depends on data."""
    agent = make_agent(module, device="meta")
    metrics = agent.update(*make_batches(module, device="meta"))
    assert all(value.device.type == "meta" for value in metrics.values())


def test_compiled_losses_equal_eager_ones():
    torch._dynamo.reset()
    eager, fast = (make_agent(compile=c) for c in (False, True))
    for seed in (1, 2):
        metrics = [agent.update(*make_batches(temporl, seed)) for agent in (eager, fast)]
        assert metrics[0].keys() == metrics[1].keys()
        for name in metrics[0]:
            torch.testing.assert_close(metrics[0][name], metrics[1][name], rtol=1e-4, atol=1e-5)


@both
@pytest.mark.parametrize(
    "bad",
    [
        {"max_skip": 0},
        {"learning_rate": 0.0},
        {"learning_rate": float("nan")},
        {"exploration_noise": -0.1},
        {"skip_epsilon": 1.5},
        {"gamma": 2.0},
    ],
)
def test_bad_options_are_refused(module, bad):
    (name,) = bad
    with pytest.raises(SystemExit, match=f"error: --{name.replace('_', '-')} must"):
        module.check_args(module.Args(**bad))


# Learning.


@both
def test_learns_how_long_an_action_is_right(module, tmp_path):
    """A decision that runs past a flip costs 1 a step: 0 is perfect, the right action for 8 steps each time has -20."""
    task = {"env_id": "Flips-v0", "total_timesteps": 1000, "learning_starts": 300, "gamma": 0.9, "max_skip": 8}
    small = {**TINY, "hidden_dim": 64, "batch_size": 64, "eval_episodes": 5, "eval_every": 0, "tau": 0.02}
    args = module.Args(**{**small, **task, "learning_rate": 2e-3, "runs_dir": str(tmp_path)})
    assert scalars(module.train(args))["eval/return"][-1][1] > -2
