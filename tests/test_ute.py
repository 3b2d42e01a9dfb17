"""UTE's own parts against separate, slow and obvious computations; test_temporl.py has what it shares with TempoRL."""

import math

import numpy as np
import pytest
import torch

import ute_continuous_action as ute
from sdar_utils.noise import EpisodesNoise, Noise
from tests.conftest import TINY, weights
from tests.reference import mlp

OBS, ACT, BATCH, SKIP, HEADS = 3, 2, 6, 5, 4
ARMS = [-2.5, -1.5, -1.0, -0.5, 0.0, 0.5]


def make_agent(**options) -> ute.Agent:
    torch.manual_seed(0)
    args = ute.Args(**{**TINY, "batch_size": BATCH, "max_skip": SKIP, "num_heads": HEADS, **options})
    agent = ute.Agent(OBS, ACT, args, torch.device("cpu"))
    for p in agent.target_parameters:
        p.data.add_(0.1 * torch.randn_like(p) + 0.02)  # targets of their own
    return agent


def make_batch(seed=0, rows=BATCH, dtype=torch.float32, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    batch = {
        "obs": scale * torch.randn(rows, OBS, generator=g),
        "actions": torch.rand(rows, ACT, generator=g) * 2 - 1,
        "rewards": 3 * torch.randn(rows, generator=g),
        "next_obs": torch.randn(rows, OBS, generator=g),
        "terminated": (torch.arange(rows) % 2).float(),
        "lengths": torch.randint(1, SKIP + 1, (rows,), generator=g).float(),
    }
    return {name: value.to(dtype) for name, value in batch.items()}


# Plain numpy networks, written from the text: ReLU, ReLU, out.


def head_values(agent, obs, action):
    return [mlp(agent.skip, obs, action)[k * SKIP : (k + 1) * SKIP] for k in range(HEADS)]


def scores(values, factor):
    return [np.mean(column) + factor * np.std(column) for column in zip(*values, strict=True)]


def best_by_hand(values, factor):
    return 1 + int(np.argmax(scores(values, factor)))


def target_by_hand(agent, batch, i, discount=None):
    """R + γ^length·(1-d)·Q'(s', π'(s')), unless another discount is given."""
    obs = batch["next_obs"][i].numpy()
    value = mlp(agent.critic_target, obs, np.tanh(mlp(agent.actor_target, obs)))[0]
    discount = discount or np.prod([0.99] * int(batch["lengths"][i]))
    return batch["rewards"][i].item() + discount * (1 - batch["terminated"][i].item()) * value


# Decisions.


def test_uncertainty_counts_for_or_against_a_skip():
    """Skip 1 is sure, 2 a little better but disputed, 3 the most disputed and a little worse."""
    values = torch.tensor([[1.0, 0.6, -1.0], [1.0, 1.6, 2.8]])  # means 1, 1.1, 0.9; deviations 0, 0.5, 1.9
    for factor, expected in [(-2.5, 1), (-0.5, 1), (0.0, 2), (0.1, 2), (0.5, 3)]:
        assert ute.best_skip(values, torch.tensor(factor)).item() == expected


def test_best_skip_against_brute_force():
    """With one factor for all rows, or one for each."""
    values = np.random.default_rng(0).normal(size=(30, HEADS, SKIP))
    for factors in (np.full(30, -2.5), np.resize(ARMS, 30)):
        chosen = [best_by_hand(v, factor) for v, factor in zip(values, factors, strict=True)]
        assert ute.best_skip(torch.from_numpy(values), torch.from_numpy(factors)).tolist() == chosen
    assert ute.best_skip(torch.from_numpy(values), torch.tensor(0.5)).tolist() == [best_by_hand(v, 0.5) for v in values]


def test_greedy_episodes_take_the_best_factor_and_others_that_of_the_training_episode():
    """In one batch; deciding leaves the bandit as it is."""
    agent = make_agent(exploration_noise=0.3, skip_epsilon=0.0)
    agent.skip.fc1.weight.data[:, OBS:] *= 10  # so that the best skip depends on the noise
    agent.bandit.arms[:2] = torch.tensor([5, 0])
    agent.bandit.rewards[:2] = torch.tensor([2.0, 1.0])
    agent.bandit.heard.fill_(2)
    agent.bandit.arm.fill_(0)
    before = {name: value.clone() for name, value in agent.bandit.state_dict().items()}
    obs = np.random.default_rng(0).normal(size=(60, OBS)).astype(np.float32)
    noise = EpisodesNoise([None, np.random.default_rng(0)] * 30, torch.device("cpu"))
    noise.asked = range(60)
    decisions = list(zip(obs, *agent.act(obs, None, noise), [0.5, -2.5] * 30, strict=True))
    decisions += [(row, *agent.act(row, None, Noise(torch.device("cpu"))), -2.5) for row in obs]  # as in training
    different = 0
    for row, action, skip, factor in decisions:
        values = head_values(agent, row.astype(float), action.astype(float))
        assert scores(values, factor)[skip - 1] == pytest.approx(max(scores(values, factor)), abs=1e-5)
        different += best_by_hand(values, 0.5) != best_by_hand(values, -2.5)
    assert different > 20
    assert all(torch.equal(before[name], value) for name, value in agent.bandit.state_dict().items())


# The bandit.


@pytest.mark.parametrize(("window", "lengths"), [(50, [1]), (500, [20, 3, 70, 1, 8] * 8 + [600])])
def test_bandit_against_brute_force(monkeypatch, window, lengths):
    """With a reward per episode, or one per step of episodes shorter and longer than what it remembers.

    So many episodes that the window wraps and arms are forgotten, with a best arm that changes.
    """
    monkeypatch.setattr(torch, "rand", lambda *_: torch.tensor(1.0))  # never at random
    bandit, rng, played, forgotten = ute.Bandit(window), np.random.default_rng(0), [], 0

    def bound(arm):
        rewards = [reward for a, reward in played[-window:] if a == arm]
        return np.mean(rewards) + 0.5 * math.sqrt(1 / len(rewards)) if rewards else math.inf

    for episode in range(400):
        arm = bandit.arm.item()
        assert bandit.factor().item() == ARMS[arm]
        if episode < len(ARMS):
            assert arm == episode
        else:
            bounds = [bound(a) for a in range(len(ARMS))]
            assert bounds[arm] >= max(bounds) - 1e-5
            forgotten += bounds[arm] == math.inf
        mean = 2.0 * (arm == 1) if episode < 200 else 0.3 * (arm == 4)
        length = lengths[episode % len(lengths)]
        trend = np.linspace(-1, 1, length) if length > 1 else 0.0
        rewards = (mean + trend + 0.2 * rng.normal(size=length)).tolist()
        bandit.feed_back(rewards)
        played += [(arm, reward) for reward in rewards]
    assert forgotten > 0


def test_bandit_follows_a_change():
    """Arm 1 pays most, then arm 4 does: each is played most of the time and is the best before long."""
    torch.manual_seed(0)
    bandit = ute.Bandit(50)
    for best in (1, 4):
        played = []
        for _ in range(400):
            arm = bandit.arm.item()
            played.append(arm)
            bandit.feed_back([2.0 * (arm == best) + 0.2 * torch.randn(()).item()])
        assert np.mean(np.array(played[-300:]) == best) > 0.6
        assert set(played) == set(range(6))
        assert bandit.best_factor().item() == ARMS[best]


def test_bandit_explores_a_tenth_of_the_time():
    torch.manual_seed(0)
    bandit, played = ute.Bandit(500), []
    for _ in range(3000):
        played.append(bandit.arm.item())
        bandit.feed_back([100.0 * (played[-1] == 3)])  # nothing but chance, and forgetting, makes it play another
    assert played[:6] == [0, 1, 2, 3, 4, 5]
    shares = np.bincount(played[6:], minlength=6) / len(played[6:])
    np.testing.assert_allclose(shares[[0, 1, 2, 4, 5]], 0.1 / 6, atol=0.008)


def test_best_factor_needs_data():
    bandit = ute.Bandit(50)
    assert bandit.best_factor().item() == ARMS[0]  # nothing is known
    for reward in (-3.0, -1.0, -2.0):  # all negative: arms 3 to 5 have a mean of none, which must not count as 0
        bandit.feed_back([reward])
    assert bandit.arm.item() == 3
    assert bandit.best_factor().item() == ARMS[1]


def bandit_after_training(tmp_path, monkeypatch, **options):
    """After six episodes of 5 steps that pay 0, 1, 2, 3, 4.

    Also how many episodes it had heard of each time that an episode's end may have been saved.
    """
    fed_back, end_episode = [], ute.Run.end_episode

    def recorded(run, statistics):
        fed_back.append(run.agent.bandit.episodes.item())
        end_episode(run, statistics)

    monkeypatch.setattr(ute.Run, "end_episode", recorded)
    options |= {"env_id": "tests.tasks:Ending-v0", "total_timesteps": 30, "eval_every": 0}
    saved = weights(ute.train(ute.Args(**{**TINY, **options, "runs_dir": str(tmp_path)})))
    return fed_back, {name.removeprefix("bandit."): value for name, value in saved.items() if "bandit" in name}


@pytest.mark.parametrize(("learning_starts", "unheard"), [(10, 2), (11, 3), (14, 3), (15, 3)])
def test_training_feeds_back_the_reward_per_step(tmp_path, monkeypatch, learning_starts, unheard):
    """Of episodes that began after the warm-up, whenever it ended."""
    fed_back, bandit = bandit_after_training(tmp_path, monkeypatch, learning_starts=learning_starts)
    heard = 6 - unheard
    assert fed_back == [0] * unheard + list(range(1, heard + 1))
    assert len(bandit["arms"]) == 50
    assert bandit["arms"][:heard].tolist() == list(range(heard))
    assert bandit["arm"] == heard
    assert bandit["rewards"][: heard + 1].tolist() == [2] * heard + [0]


def test_as_published_it_feeds_back_every_reward(tmp_path, monkeypatch):
    fed_back, bandit = bandit_after_training(tmp_path, monkeypatch, learning_starts=12, as_published=True)
    assert fed_back == [1, 2, 3, 4, 5, 6]
    assert len(bandit["arms"]) == 500
    assert bandit["arms"][:30].tolist() == [arm for arm in range(6) for _ in range(5)]
    assert bandit["rewards"][:31].tolist() == [0, 1, 2, 3, 4] * 6 + [0]


@pytest.mark.parametrize("as_published", [False, True])
@pytest.mark.parametrize(("env_id", "length", "ends"), [("Endless-v0", 7, False), ("Ending-v0", 5, True)])
def test_a_time_limit_is_terminal_as_published_only(tmp_path, monkeypatch, env_id, length, ends, as_published):
    rows, add = [], ute.ReplayBuffer.add
    monkeypatch.setattr(ute.ReplayBuffer, "add", lambda self, **row: rows.append(row) or add(self, **row))
    options = {"env_id": f"tests.tasks:{env_id}", "total_timesteps": 30, "as_published": as_published}
    ute.train(ute.Args(**{**TINY, **options, "runs_dir": str(tmp_path)}))
    last = [row["next_obs"][0] == length for row in rows]
    assert 0 < sum(last) < len(last)
    assert [row["terminated"] for row in rows] == [at_end and (ends or as_published) for at_end in last]


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
    assert ((first.mean(0) - 0.3).abs() < 4.5 * math.sqrt(0.3 * 0.7 / 5000)).all()
    together = torch.corrcoef(torch.cat([first, second], dim=1).T) - torch.eye(2 * HEADS)
    assert together.abs().max() < 4.5 / math.sqrt(5000)  # no two heads, no two updates share a mask


def test_as_published_every_head_learns_from_every_row(monkeypatch):
    """Whatever the probability: the released code takes the batch's mean before it masks."""
    agent, batch = make_agent(as_published=True, bootstrap_probability=0.1).double(), make_batch(dtype=torch.float64)
    expected = 0.0
    for i in range(BATCH):
        values = head_values(agent, batch["obs"][i].numpy(), batch["actions"][i].numpy())
        target = target_by_hand(agent, batch, i)
        expected += np.mean([huber(head[int(batch["lengths"][i]) - 1] - target) for head in values]) / BATCH
    assert agent.skip_loss(batch)[0].item() == pytest.approx(expected, rel=1e-9)


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


def critic_loss_by_hand(agent, batch, factor, discount):
    errors, values, candidates = [], [], 0
    for i in range(len(batch["lengths"])):
        obs, action = batch["obs"][i].numpy(), batch["actions"][i].numpy()
        if batch["lengths"][i] <= best_by_hand(head_values(agent, obs, action), factor):
            candidates += 1
            if candidates <= BATCH:
                errors.append(mlp(agent.critic, obs, action)[0] - target_by_hand(agent, batch, i, discount))
                values.append(mlp(agent.critic, obs, np.tanh(mlp(agent.actor, obs)))[0])
    return np.mean(np.square(errors)), np.mean(values), candidates


@pytest.mark.parametrize("as_published", [False, True])
@pytest.mark.parametrize("arm", [0, 5])
@pytest.mark.parametrize(("rows", "cut"), [(2 * BATCH, False), (10 * BATCH, True)])
def test_critic_takes_intervals_that_the_network_would_run(arm, rows, cut, as_published):
    """The first batch_size rows whose length is at most the chosen skip, each discounted by its length.

    As published by γ, and the actor learns there too.
    """
    agent = make_agent(as_published=as_published).double()
    batch = make_batch(seed=3, rows=rows, dtype=torch.float64, scale=2.0)
    agent.skip.fc3.bias.data.view(HEADS, SKIP)[:, 1] += 0.1  # neither 1, which keeps few, nor 5, which keeps all
    agent.bandit.arm.fill_(arm)
    loss, metrics = agent.critic_loss(batch)
    discount = 0.99 if as_published else None
    expected, value, candidates = critic_loss_by_hand(agent, batch, ARMS[arm], discount)
    assert (candidates > BATCH) == cut
    assert 0 < candidates < rows
    assert loss.item() == pytest.approx(expected, rel=1e-9)
    assert metrics["losses/critic_rows"].item() == min(candidates, BATCH)
    actor_loss = agent.actor_loss(batch)[0].item()
    everywhere = -agent.critic(batch["obs"], agent.actor(batch["obs"])).mean().item()
    assert actor_loss == pytest.approx(-value if as_published else everywhere, rel=1e-9)
    assert abs(value + everywhere) > 1e-4  # which of the two is seen


@pytest.mark.parametrize("as_published", [False, True])
def test_the_actor_learns_at_single_steps_or_at_the_critics_rows(monkeypatch, as_published):
    agent, seen = make_agent(as_published=as_published), []
    monkeypatch.setattr(agent, "update_actor", lambda batch: seen.append(batch) or {})
    transitions, intervals, candidates = make_batch(0), make_batch(1, 12), make_batch(2, 18)
    agent.update(transitions, intervals, candidates)
    assert seen[0] is (candidates if as_published else transitions)


def test_without_a_row_nothing_is_learnt():
    agent, batch = make_agent(as_published=True), make_batch()
    agent.skip.fc3.bias.data.view(HEADS, SKIP)[:, 0] += 100  # one step is always best
    batch["lengths"].fill_(2)
    loss, _ = agent.critic_loss(batch)
    loss.backward()
    assert loss.item() == 0
    assert all((p.grad == 0).all() for p in agent.critic.parameters())
    assert all((g == 0).all() for g in torch.autograd.grad(agent.actor_loss(batch)[0], agent.actor.parameters()))


@pytest.mark.parametrize("scale", [1.0, 3e4])
def test_torso_gradients_are_scaled_and_all_are_clamped(scale):
    """What Adam sees, against the plain gradient; observations of 3e4 make gradients that exceed the limit."""
    agent, batch, seen = make_agent(), make_batch(scale=scale), []
    torch.manual_seed(5)
    agent.skip_loss(batch)[0].backward()
    agent.optimizers["skip"].step = seen.extend
    torch.manual_seed(5)
    agent.update_skip(batch)
    clamped = 0
    for (name, p), gradient in zip(agent.skip.named_parameters(), seen, strict=True):
        expected = p.grad if name.startswith("fc3") else p.grad / HEADS
        clamped += (expected.abs() > 10).sum().item()
        torch.testing.assert_close(gradient, expected.clamp(-10, 10), rtol=1e-4, atol=1e-7)
    assert (clamped > 0) == (scale > 1)


@pytest.mark.parametrize("as_published", [False, True])
def test_compiled_losses_equal_eager_ones(as_published):
    """Also after the bandit has moved: its arm must not be compiled in."""
    torch._dynamo.reset()
    eager, fast = (make_agent(compile=c, as_published=as_published) for c in (False, True))
    for seed in (0, 1):
        batches, metrics = [make_batch(seed + 100 * i, rows) for i, rows in enumerate((BATCH, 12, 18))], []
        for agent in (eager, fast):
            torch.manual_seed(seed)
            metrics.append(agent.update(*batches))
            agent.bandit.feed_back([0.0])
        assert metrics[1]["repetition/uncertainty_factor"].item() == ARMS[seed]
        assert metrics[0].keys() == metrics[1].keys()
        for name in metrics[0]:
            torch.testing.assert_close(metrics[0][name], metrics[1][name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bad", [{"num_heads": 0}, {"bootstrap_probability": 0.0}])
def test_bad_options_are_refused(bad):
    (name,) = bad
    with pytest.raises(SystemExit, match=f"error: --{name.replace('_', '-')} must"):
        ute.check_args(ute.Args(**bad))
