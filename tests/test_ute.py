"""UTE's parts against separate, slow and obvious computations; test_temporl.py has what both scripts do."""

import collections
import math

import numpy as np
import pytest
import torch

import ute_continuous_action as ute
from tests.conftest import TINY, scalars, weights

OBS, ACT, BATCH, SKIP, HEADS = 3, 2, 6, 5, 4
ARMS = [-2.5, -1.5, -1.0, -0.5, 0.0, 0.5]


def make_agent(device="cpu", **options) -> ute.Agent:
    torch.manual_seed(0)
    args = ute.Args(**{**TINY, "batch_size": BATCH, "max_skip": SKIP, "num_heads": HEADS, **options})
    agent = ute.Agent(OBS, ACT, args, torch.device(device))
    if device == "cpu":
        for p in agent.target_parameters:
            p.data.add_(0.1 * torch.randn_like(p) + 0.02)  # targets of their own
    return agent


def make_batch(seed=0, rows=BATCH, dtype=torch.float32, device="cpu", scale=1.0):
    g = torch.Generator().manual_seed(seed)
    batch = {
        "obs": scale * torch.randn(rows, OBS, generator=g),
        "actions": torch.rand(rows, ACT, generator=g) * 2 - 1,
        "rewards": 3 * torch.randn(rows, generator=g),
        "next_obs": torch.randn(rows, OBS, generator=g),
        "terminated": (torch.arange(rows) % 2).float(),
        "lengths": torch.randint(1, SKIP + 1, (rows,), generator=g).float(),
    }
    return {name: value.to(device, dtype) for name, value in batch.items()}


def make_batches(seed=0, **how):
    sizes = {"replay": BATCH, "skips": 2 * BATCH, "candidates": 3 * BATCH}
    return {name: make_batch(seed + 100 * i, rows, **how) for i, (name, rows) in enumerate(sizes.items())}


# Plain numpy networks, written from the text: ReLU, ReLU, out.


def mlp(net, *inputs):
    parameters = {name: value.detach().double().numpy() for name, value in net.state_dict().items()}
    x = np.concatenate(inputs)
    for layer in ("fc1", "fc2"):
        x = np.maximum(parameters[f"{layer}.weight"] @ x + parameters[f"{layer}.bias"], 0)
    return parameters["fc3.weight"] @ x + parameters["fc3.bias"]


def head_values(agent, obs, action):
    return [mlp(agent.skip, obs, action)[k * SKIP : (k + 1) * SKIP] for k in range(HEADS)]


def best_by_hand(values, factor):
    scores = [np.mean(column) + factor * np.std(column) for column in zip(*values, strict=True)]
    return 1 + int(np.argmax(scores))


def target_by_hand(agent, batch, i):
    """R + γ^length·(1-d)·Q'(s', π'(s'))."""
    obs = batch["next_obs"][i].numpy()
    value = mlp(agent.critic_target, obs, np.tanh(mlp(agent.actor_target, obs)))[0]
    alive = 1 - batch["terminated"][i].item()
    return batch["rewards"][i].item() + np.prod([0.99] * int(batch["lengths"][i])) * alive * value


# Decisions.


def test_uncertainty_counts_for_or_against_a_skip():
    """Skip 1 is sure, 2 a little better but disputed, 3 the most disputed and a little worse."""
    values = torch.tensor([[1.0, 0.6, -1.0], [1.0, 1.6, 2.8]])  # means 1, 1.1, 0.9; deviations 0, 0.5, 1.9
    for factor, expected in [(-2.5, 1), (-0.5, 1), (0.0, 2), (0.1, 2), (0.5, 3)]:
        assert ute.best_skip(values, torch.tensor(factor)).item() == expected


@pytest.mark.parametrize("factor", [-2.5, 0.0, 0.5])
def test_best_skip_against_brute_force(factor):
    values = np.random.default_rng(0).normal(size=(30, HEADS, SKIP))
    chosen = ute.best_skip(torch.from_numpy(values), torch.tensor(factor))
    assert chosen.tolist() == [best_by_hand(v, factor) for v in values]


def test_greedy_takes_the_best_factor_and_sampling_that_of_the_episode():
    agent = make_agent(exploration_noise=0.0, skip_epsilon=0.0)
    agent.bandit.arms[:2] = torch.tensor([5, 0])
    agent.bandit.rewards[:2] = torch.tensor([2.0, 1.0])
    agent.bandit.episodes.fill_(2)
    agent.bandit.arm.fill_(0)
    different = 0
    for seed in range(60):
        obs = 3 * np.random.default_rng(seed).normal(size=OBS).astype(np.float32)
        action = np.tanh(mlp(agent.actor, obs.astype(float)))
        values = head_values(agent, obs.astype(float), action)
        for mode, factor in [("greedy", 0.5), ("sample", -2.5)]:
            executed, memory = agent.act(obs, None, mode)
            np.testing.assert_allclose(executed, action, atol=1e-5)
            assert memory["left"] + 1 == best_by_hand(values, factor)
        different += best_by_hand(values, 0.5) != best_by_hand(values, -2.5)
    assert different > 5


# The bandit.


class SlowBandit:
    """The same rule over a list of (arm, reward), without the random choices."""

    def __init__(self):
        self.window, self.arm, self.pulls = collections.deque(maxlen=500), 0, 1

    def feed_back(self, reward):
        self.window.append((self.arm, reward))
        if self.pulls < len(ARMS):
            self.arm = self.pulls
        else:
            self.arm = int(np.argmax([self.bound(arm) for arm in range(len(ARMS))]))
        self.pulls += 1

    def bound(self, arm):
        rewards = [reward for a, reward in self.window if a == arm]
        return np.mean(rewards) + 0.5 * math.sqrt(1 / len(rewards)) if rewards else math.inf


def test_bandit_against_brute_force(monkeypatch):
    """1500 episodes, so that the window wraps and arms are forgotten, with a best arm that changes."""
    monkeypatch.setattr(torch, "rand", lambda *_: torch.tensor(1.0))  # never at random
    bandit, slow, rng, forgotten = ute.Bandit(), SlowBandit(), np.random.default_rng(0), 0
    for episode in range(1500):
        assert bandit.arm.item() == slow.arm, episode
        assert bandit.factor().item() == ARMS[slow.arm]
        forgotten += episode >= len(ARMS) and slow.bound(slow.arm) == math.inf
        reward = 2 * (slow.arm == 1) if episode < 700 else 0.3 * (slow.arm == 4)
        reward = float(np.float32(reward + 0.2 * rng.normal()))
        bandit.feed_back(reward)
        slow.feed_back(reward)
    assert forgotten > 0


def test_bandit_follows_a_change():
    """Arm 1 pays most, then arm 4 does: each is played most of the time and is the best before long."""
    torch.manual_seed(0)
    bandit = ute.Bandit()
    for best in (1, 4):
        played = []
        for _ in range(900):
            arm = bandit.arm.item()
            played.append(arm)
            bandit.feed_back(1.0 * (arm == best) + 0.2 * torch.randn(()).item())
        assert np.mean(np.array(played[-300:]) == best) > 0.75
        assert set(played) == set(range(6))
        assert bandit.best_factor().item() == ARMS[best]


def test_bandit_explores_a_tenth_of_the_time():
    torch.manual_seed(0)
    bandit = ute.Bandit()
    played = []
    for _ in range(3000):
        played.append(bandit.arm.item())
        bandit.feed_back(100.0 * (played[-1] == 3))  # nothing but chance, and forgetting, makes it play another
    assert played[:6] == [0, 1, 2, 3, 4, 5]
    shares = np.bincount(played[6:], minlength=6) / len(played[6:])
    np.testing.assert_allclose(shares[[0, 1, 2, 4, 5]], 0.1 / 6, atol=0.008)


def test_best_factor_needs_data():
    bandit = ute.Bandit()
    assert bandit.best_factor().item() == ARMS[0]  # nothing is known
    for reward in (-3.0, -1.0, -2.0):  # all negative: arms 3 to 5 have a mean of none, which must not count as 0
        bandit.feed_back(reward)
    assert bandit.arm.item() == 3
    assert bandit.best_factor().item() == ARMS[1]


def test_evaluation_leaves_the_bandit_alone():
    agent = make_agent()
    agent.bandit.feed_back(1.0)
    before = {name: value.clone() for name, value in agent.bandit.state_dict().items()}
    env = ute.make_env("tests.tasks:Endless-v0")
    for mode in ("greedy", "sample"):
        ute.play_episode(agent, env, 0, mode)
    assert all(torch.equal(before[name], value) for name, value in agent.bandit.state_dict().items())


def test_training_feeds_back_the_reward_per_step(tmp_path):
    """Episodes of 5 steps that pay 0, 1, 2, 3, 4; the first two are over within the warm-up."""
    options = {"env_id": "tests.tasks:Ending-v0", "total_timesteps": 30, "learning_starts": 12, "eval_every": 0}
    saved = weights(ute.train(ute.Args(**{**TINY, **options, "runs_dir": str(tmp_path), "run_name": "run"})))
    assert saved["bandit.episodes"] == 4
    assert saved["bandit.arms"][:4].tolist() == [0, 1, 2, 3]
    assert saved["bandit.arm"] == 4
    assert saved["bandit.rewards"][:5].tolist() == [2, 2, 2, 2, 0]


# Losses.


def test_heads_have_masks_of_their_own(monkeypatch):
    agent, masks = make_agent(bootstrap_probability=0.3), []
    loss = ute.ensemble_loss

    def recorded(values, lengths, target, mask):
        masks.append(mask)
        return loss(values, lengths, target, mask)

    monkeypatch.setattr(ute, "ensemble_loss", recorded)
    for _ in range(2):
        agent.skip_loss(make_batch(rows=5000))
    first, second = (mask.double() for mask in masks)
    assert first.shape == (5000, HEADS)
    error = math.sqrt(0.3 * 0.7 / 5000)
    assert ((first.mean(0) - 0.3).abs() < 4.5 * error).all()
    assert ((first.mean(1).mean() - 0.3).abs() < 4.5 * error).all()
    together = torch.corrcoef(torch.cat([first, second], dim=1).T) - torch.eye(2 * HEADS)
    assert together.abs().max() < 4.5 / math.sqrt(5000)  # no two heads, no two updates share a mask


def huber(error):
    return 0.5 * error**2 if abs(error) < 1 else abs(error) - 0.5


def test_skip_loss_and_its_gradient_against_brute_force(monkeypatch):
    """Each head, over its own rows, at the length that was run; a head without rows counts as 0."""
    agent, batch = make_agent().double(), make_batch(dtype=torch.float64)
    mask = np.random.default_rng(1).random((BATCH, HEADS)) < 0.5
    mask[:, 2] = False
    monkeypatch.setattr(torch, "rand_like", lambda x: torch.where(torch.from_numpy(mask), 0.0, 1.0))
    loss, metrics = agent.skip_loss(batch)
    loss.backward()
    total, gradient, chosen, sizes = 0.0, np.zeros((HEADS, SKIP)), [], set()
    for i in range(BATCH):
        values = head_values(agent, batch["obs"][i].numpy(), batch["actions"][i].numpy())
        chosen.append(best_by_hand(values, ARMS[0]))
        for k in range(HEADS):
            if mask[i, k]:
                j = int(batch["lengths"][i]) - 1
                error = values[k][j] - target_by_hand(agent, batch, i)
                sizes.add(abs(error) < 1)
                total += huber(error) / mask[:, k].sum() / HEADS
                gradient[k, j] += np.clip(error, -1, 1) / mask[:, k].sum() / HEADS
    assert sizes == {True, False}
    assert loss.item() == pytest.approx(total, rel=1e-9)
    np.testing.assert_allclose(agent.skip.fc3.bias.grad.numpy(), gradient.ravel(), rtol=1e-9)
    assert metrics["repetition/best_skip"].item() == pytest.approx(np.mean(chosen))


def critic_loss_by_hand(agent, batch, factor):
    errors, candidates = [], 0
    for i in range(len(batch["lengths"])):
        obs, action = batch["obs"][i].numpy(), batch["actions"][i].numpy()
        if batch["lengths"][i] <= best_by_hand(head_values(agent, obs, action), factor):
            candidates += 1
            if candidates <= BATCH:
                errors.append(mlp(agent.critic, obs, action)[0] - target_by_hand(agent, batch, i))
    return np.mean(np.square(errors)), candidates


@pytest.mark.parametrize("arm", [0, 5])
@pytest.mark.parametrize(("rows", "cut"), [(2 * BATCH, False), (10 * BATCH, True)])
def test_critic_takes_intervals_that_the_network_would_run(arm, rows, cut):
    """The first batch_size rows whose length is at most the chosen skip, each discounted by its length."""
    agent, batch = make_agent().double(), make_batch(seed=3, rows=rows, dtype=torch.float64, scale=2.0)
    agent.skip.fc3.bias.data.view(HEADS, SKIP)[:, 1] += 0.1  # neither 1, which keeps few, nor 5, which keeps all
    agent.bandit.arm.fill_(arm)
    loss, metrics = agent.critic_loss(batch)
    expected, candidates = critic_loss_by_hand(agent, batch, ARMS[arm])
    assert (candidates > BATCH) == cut
    assert 0 < candidates < rows
    assert loss.item() == pytest.approx(expected, rel=1e-9)
    assert metrics["losses/critic_rows"].item() == min(candidates, BATCH)


def test_critic_without_a_row_learns_nothing():
    agent, batch = make_agent(), make_batch()
    agent.skip.fc3.bias.data.view(HEADS, SKIP)[:, 0] += 100  # one step is always best
    batch["lengths"].fill_(2)
    loss, _ = agent.critic_loss(batch)
    loss.backward()
    assert loss.item() == 0
    assert all((p.grad == 0).all() for p in agent.critic.parameters())


@pytest.mark.parametrize("scale", [1.0, 3e4])
def test_torso_gradients_are_scaled_and_all_are_clamped(scale):
    """What Adam sees, against the plain gradient; observations of 3e4 make gradients that exceed the limit."""
    agent, batches, seen = make_agent(), make_batches(scale=scale), {}
    names = [name for name, _ in agent.skip.named_parameters()]
    agent.optimizers["skip"].step = lambda gradients: seen.update(zip(names, gradients, strict=True))
    plain = make_agent()
    plain.update(batches, 1)  # brings the targets where they are when the heads learn
    plain.skip.load_state_dict(make_agent().skip.state_dict())
    torch.manual_seed(5)
    plain.zero_grad()
    plain.skip_loss(batches["skips"])[0].backward()

    fresh_gradients = agent.skip_gradients

    def seeded(batch):
        torch.manual_seed(5)
        return fresh_gradients(batch)

    agent.skip_gradients = seeded
    agent.update(batches, 1)
    clamped = 0
    for name, p in plain.skip.named_parameters():
        expected = p.grad / HEADS if name.startswith(("fc1", "fc2")) else p.grad
        clamped += (expected.abs() > 10).sum().item()
        torch.testing.assert_close(seen[name], expected.clamp(-10, 10), rtol=1e-4, atol=1e-7)
    assert (clamped > 0) == (scale > 1)


def test_losses_keep_to_their_networks():
    agent, batch = make_agent(), make_batch()
    batch["lengths"].fill_(1)
    for name, net in [("critic_loss", agent.critic), ("actor_loss", agent.actor), ("skip_loss", agent.skip)]:
        agent.zero_grad()
        getattr(agent, name)(batch)[0].backward()
        touched = {n for n, p in agent.named_parameters() if p.grad is not None}
        assert touched == {n for n, p in agent.named_parameters() if any(p is q for q in net.parameters())}


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


def test_layers_have_the_authors_widths():
    agent = ute.Agent(OBS, ACT, ute.Args(), torch.device("meta"))
    shapes = [tuple(getattr(agent.skip, layer).weight.shape) for layer in ("fc1", "fc2", "fc3")]
    assert shapes == [(400, OBS + ACT), (300, 400), (10 * 20, 300)]


def test_update_runs_on_the_meta_device():
    """No tensor is made elsewhere, nothing waits for a value, no shape depends on data."""
    agent = make_agent(device="meta")
    for step in (1, 2):
        metrics = agent.update(make_batches(device="meta"), step)
    assert all(value.device.type == "meta" for value in metrics.values())


def test_compiled_losses_equal_eager_ones():
    """Also after the bandit has moved: its arm must not be compiled in."""
    torch._dynamo.reset()
    eager, fast = (make_agent(compile=c) for c in (False, True))
    for step in (1, 2, 3):
        metrics = []
        for agent in (eager, fast):
            torch.manual_seed(step)
            metrics.append(agent.update(make_batches(seed=step), step))
            agent.bandit.feed_back(0.0)
        assert metrics[1]["repetition/uncertainty_factor"].item() == ARMS[step - 1]
        assert metrics[0].keys() == metrics[1].keys()
        for name in metrics[0]:
            torch.testing.assert_close(metrics[0][name], metrics[1][name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"max_skip": 0}, "--max-skip must be at least 1"),
        ({"num_heads": 0}, "--num-heads must be at least 1"),
        ({"learning_rate": 0.0}, "--learning-rate must be positive"),
        ({"exploration_noise": -0.1}, "--exploration-noise must not be negative"),
        ({"skip_epsilon": 1.5}, "--skip-epsilon must lie"),
        ({"bootstrap_probability": 0.0}, "--bootstrap-probability must lie"),
        ({"gamma": 2.0}, "--gamma must lie"),
    ],
)
def test_bad_options_are_refused(options, complaint):
    with pytest.raises(SystemExit, match=complaint):
        ute.check_args(ute.Args(**options))


# Learning.

SMALL = {**TINY, "hidden_dim": 64, "batch_size": 64, "eval_episodes": 5, "eval_every": 0, "tau": 0.02}


def final_return(path, **options) -> float:
    args = ute.Args(**{**SMALL, "runs_dir": str(path), "run_name": "run", **options})
    return scalars(ute.train(args))["eval/return"][-1][1]


def test_learns_to_swing_up_a_pendulum(tmp_path):
    """Solved is about -150; a random agent, or one that only hangs, has -1200 and less."""
    task = {"env_id": "Pendulum-v1", "total_timesteps": 2500, "learning_starts": 500, "gamma": 0.95}
    result = final_return(tmp_path, **task, learning_rate=2e-3, max_skip=5, seed=2)
    assert result > -500


def test_learns_how_long_an_action_is_right(tmp_path):
    """A decision that runs past a flip costs 1 a step: 0 is perfect, the right action for 8 steps each time has -20."""
    env_id = "tests.test_temporl:Flips-v0"
    task = {"env_id": env_id, "total_timesteps": 2000, "learning_starts": 500, "gamma": 0.9}
    result = final_return(tmp_path, **task, learning_rate=2e-3, max_skip=8)
    assert result > -2
