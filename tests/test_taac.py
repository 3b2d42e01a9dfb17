"""TAAC's equations, sequences and rollouts against separate, slow and obvious computations."""

import itertools
import math

import gymnasium as gym
import numpy as np
import pytest
import torch

import taac_continuous_action as taac
from sdar_utils.noise import EpisodesNoise, Noise
from tests.conftest import TINY, assert_compiled_equals_eager, evaluations, train
from tests.reference import log_density, mlp, value

OBS, ACT, BATCH, LENGTH = 3, 2, 8, 3
GAMMA = 0.99


class Reach(gym.Env):
    """The action moves a point by a quarter of itself; the reward is how near it was to its goal before the move.

    An action pays only in what follows, so nothing is learnt without a bootstrap. The best return is -2.5: three full
    steps and one more to the goal. Standing still is worth -20.
    """

    def __init__(self, render_mode: str | None = None):
        self.action_space = gym.spaces.Box(-1, 1, (1,), np.float32)
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.position, self.goal = 0.0, float(self.np_random.choice([-1, 1]))
        return self.observe(), {}

    def observe(self) -> np.ndarray:
        return np.array([self.position, self.goal], np.float32)

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        reward = -abs(self.goal - self.position)
        self.position += float(action[0]) / 4
        return self.observe(), reward, False, False, {}


gym.register("TaacReach-v0", Reach, max_episode_steps=20)


def make_agent(device="cpu", **options) -> taac.Agent:
    torch.manual_seed(0)
    agent = taac.Agent(OBS, ACT, taac.Args(**{**TINY, "batch_size": BATCH, **options}), torch.device(device))
    with torch.no_grad():
        for p in agent.target_parameters:
            p.add_(0.1 * torch.randn_like(p) + 0.05)  # targets of their own
        for q in (agent.q1, agent.q2, agent.q1_target, agent.q2_target):
            q.fc3.weight.mul_(10)  # a switch that has something to decide
        agent.log_alpha_selection.fill_(-0.25)
        agent.log_alpha_action.fill_(0.5)
    return agent


def make_batch(seed=0, length=LENGTH, dtype=torch.float32, device="cpu"):
    """Sequences with every kind of end in them: terminal, time limit, none."""
    g = torch.Generator().manual_seed(seed)
    shape = (BATCH, length)
    first = torch.rand(shape, generator=g) < 0.3
    act_mask = first | (torch.rand(shape, generator=g) < 0.4)
    terminated = torch.rand(shape, generator=g) < 0.5
    terminated[:, :-1] &= first[:, 1:]
    rows = {
        "obs": torch.randn(*shape, OBS, generator=g),
        "prev_actions": (torch.rand(*shape, ACT, generator=g) * 2 - 1) * ~first[..., None],
        "actions": torch.rand(*shape, ACT, generator=g) * 2 - 1,
        "act_mask": act_mask,
        "rewards": torch.randn(shape, generator=g),
        "next_obs": torch.randn(*shape, OBS, generator=g),
        "terminated": terminated,
        "first": first,
    }
    return {name: value.to(device, dtype) for name, value in rows.items()}


# Plain numpy, one state at a time.


def gaussian(agent, *inputs):
    """Mean and standard deviation of the Gaussian under the tanh; `raw` is 0 on average in an untrained network."""
    mean, raw = np.split(mlp(agent.policy, *inputs), 2)
    low, high = math.exp(agent.args.log_std_min), math.exp(agent.args.log_std_max)
    return mean, np.clip(agent.args.initial_std * np.exp(raw), low, high)


def act_probability(repeat, act, alpha, clip=False):
    """The second entry of a softmax over both values, with the authors' clip of what acting adds."""
    logits = np.array([repeat, max(act, repeat) if clip else act]) / max(alpha, 1e-10)
    weights = np.exp(logits - logits.max())
    return weights[1] / weights.sum()


def decide_by_hand(agent, obs, prev, noise=0.0):
    """The candidate, which is tanh(mean) without noise, and β(act) under the online critics."""
    mean, std = gaussian(agent, obs, prev)
    candidate = np.tanh(mean + std * noise)
    repeat, act = (value((agent.q1, agent.q2), obs, a) for a in (prev, candidate))
    return candidate, act_probability(repeat, act, agent.alpha_selection.item(), agent.args.advantage_clip)


def walk(t, rewards, ends, terminated, stored, fresh, values):
    """The return of step t, forward in time. fresh[n] and values[n] belong to the state that step n leads to."""
    total, discount, n = 0.0, 1.0, t
    while True:
        total, discount = total + discount * rewards[n], discount * GAMMA
        if terminated[n]:
            return total
        if ends[n] or n + 1 == len(rewards) or stored[n + 1] == 1 or fresh[n] == 1:
            return total + discount * values[n]
        n += 1


@pytest.fixture
def no_noise(monkeypatch):
    """â is tanh(mean) everywhere, so that a slow computation can know it."""
    monkeypatch.setattr(torch, "randn_like", torch.zeros_like)


@pytest.fixture
def mode_of_switch(monkeypatch):
    monkeypatch.setattr(taac, "sample_act_mask", lambda logits: logits > 0)


# The switch.


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("alpha", [1.0, 0.01, 30.0, 1e-10, 0.0])
def test_switch_against_a_softmax(alpha, clip):
    rng = np.random.default_rng(0)
    repeat, act = 300 + 5 * rng.normal(size=(2, 200))
    act[:20] = repeat[:20]
    act[20:40] = repeat[20:40] + 1e-3 * rng.normal(size=20)
    logits = taac.selection_logits(
        torch.from_numpy(repeat), torch.from_numpy(act), torch.tensor(alpha, dtype=torch.float64), clip
    )
    expected = [act_probability(r, a, alpha, clip) for r, a in zip(repeat, act, strict=True)]
    np.testing.assert_allclose(torch.sigmoid(logits).numpy(), expected, rtol=1e-9, atol=1e-300)
    if alpha == 0:  # the better of the two, and a coin between equals
        better = (act > repeat).astype(float)
        better[act < repeat] = 0.5 if clip else 0
        better[:20] = 0.5
        np.testing.assert_array_equal(torch.sigmoid(logits).numpy(), better)
    if clip:
        assert (torch.sigmoid(logits) >= 0.5).all()


def test_switch_stays_finite_in_float32_when_its_temperature_vanishes():
    agent = make_agent()
    agent.log_alpha_selection.data.fill_(-200)
    loss, metrics = agent.policy_loss(make_batch())
    assert agent.alpha_selection == 0
    assert all(torch.isfinite(x).all() for x in (loss, *metrics.values()))
    assert metrics["repetition/selection_entropy"].item() == pytest.approx(0, abs=1e-6)


def test_selection_entropy_against_torch_distributions():
    logits = torch.cat([torch.linspace(-30, 30, 201), torch.tensor([-1e13, 1e13, -100.0, 0.0])]).double()
    expected = torch.distributions.Bernoulli(logits=logits.clamp(-700, 700)).entropy()
    torch.testing.assert_close(taac.selection_entropy(logits), expected, rtol=1e-9, atol=1e-9)
    assert round(taac.TARGET_ENTROPY_SELECTION, 4) == 0.1985
    p = torch.tensor(0.95).logit()
    assert taac.selection_entropy(p).item() == pytest.approx(taac.TARGET_ENTROPY_SELECTION, rel=1e-5)


def test_sample_act_mask_has_the_right_frequencies():
    torch.manual_seed(0)
    logits = torch.tensor([-2.0, 0.0, 3.0])
    mask = taac.sample_act_mask(logits.expand(40_000, 3))
    expected = torch.sigmoid(logits)
    error = (expected * (1 - expected) / 40_000).sqrt()
    assert ((mask.float().mean(0) - expected).abs() < 5 * error).all()


# Compare-through returns.


def every_pattern(length):
    """All decisions, stored and fresh, times all places where an episode may end, in both ways, once or not at all."""
    for bits in itertools.product((0, 1), repeat=2 * length):
        for end, terminal in [(None, False), *itertools.product(range(length), (False, True))]:
            stored, fresh = list(bits[:length]), list(bits[length:])
            ends = [n == end for n in range(length)]
            if end is not None and end + 1 < length:
                stored[end + 1] = 1  # an episode's first step acts
            yield stored, fresh, ends, [terminal and e for e in ends]


@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_compare_through_returns_against_a_forward_walk(length):
    stored, fresh, ends, terminated = (
        torch.tensor(column) for column in zip(*every_pattern(length), strict=True)
    )  # (patterns, length)
    assert len(stored) == 4**length * (2 * length + 1)
    g = torch.Generator().manual_seed(length)
    rewards, values = torch.randn(2, *stored.shape, generator=g, dtype=torch.float64)
    returns = taac.compare_through_returns(
        rewards, terminated.double(), stored.bool(), fresh.bool(), 10 * values, GAMMA
    ).numpy()
    rows = zip(*(x.tolist() for x in (rewards, ends, terminated, stored, fresh, 10 * values)), strict=True)
    expected = [[walk(t, *row) for t in range(length)] for row in rows]
    np.testing.assert_allclose(returns, expected, rtol=1e-12)


def test_nothing_beyond_an_episodes_end_reaches_its_returns():
    """Whatever follows a time limit or a terminal in the sequence, what precedes it is valued the same."""
    for terminal in (0.0, 1.0):
        returns = []
        for noise in (0.0, 1e6):
            rewards = torch.tensor([[1.0, 2.0, 3.0 + noise, 4.0 - noise]])
            values = torch.tensor([[10.0, 20.0, 30.0 + noise, 40.0 + noise]])
            mask = torch.tensor([[True, False, True, False]])  # a new episode at step 2
            fresh = torch.zeros(1, 4, dtype=torch.bool)
            terminated = torch.tensor([[0.0, terminal, 0.0, 0.0]])
            returns.append(taac.compare_through_returns(rewards, terminated, mask, fresh, values, 0.5)[0, :2].tolist())
        assert returns[0] == returns[1] == ([2.0, 2.0] if terminal else [1 + 0.5 * 12, 12.0])


# Sequences.


@pytest.mark.parametrize("length", [1, 3, 5])
@pytest.mark.parametrize("count", [1, 2, 4, 5, 9, 10, 11, 17, 30, 43])
def test_sequences_are_consecutive_and_never_cross_the_write_position(count, length):
    buffer = taac.ReplayBuffer(10, {"x": (2,), "y": ()}, torch.device("cpu"))
    for i in range(count):
        buffer.add(x=np.array([i, -i]), y=i)
    torch.manual_seed(0)
    batch = taac.sample_sequences(buffer, length, 2000)
    assert batch["x"].shape == (2000, length, 2)
    assert torch.equal(batch["x"], torch.stack([batch["y"], -batch["y"]], dim=-1))
    oldest = max(0, count - 10)
    if count >= length:
        expected = {tuple(range(s, s + length)) for s in range(oldest, count - length + 1)}
    else:  # the very first step stands in for those before it
        expected = {(*[0] * (length - count), *range(count))}
    drawn, counts = np.unique(batch["y"].int().numpy(), axis=0, return_counts=True)
    assert set(map(tuple, drawn.tolist())) == expected
    assert set(drawn.ravel().tolist()) == set(range(oldest, count))  # every step is trained on
    share = 1 / len(expected)
    assert (np.abs(counts / 2000 - share) < 5 * math.sqrt(share / 2000)).all()


def test_a_sequence_longer_than_the_buffer_so_far_teaches_nothing_wrong():
    """Before td_length - 1 steps, an episode's first step is there twice; its returns are the same each time."""
    rewards, values = torch.tensor([[3.0, 3.0, 5.0]]), torch.tensor([[10.0, 10.0, 20.0]])
    mask, fresh = torch.tensor([[True, True, False]]), torch.zeros(1, 3, dtype=torch.bool)
    returns = taac.compare_through_returns(rewards, torch.zeros(1, 3), mask, fresh, values, 0.5)
    assert returns.tolist() == [[3 + 0.5 * 10, 3 + 0.5 * (5 + 0.5 * 20), 5 + 0.5 * 20]]


@pytest.fixture
def rows(monkeypatch):
    """Every row that a run adds to its buffer."""
    rows, add = [], taac.ReplayBuffer.add
    monkeypatch.setattr(taac.ReplayBuffer, "add", lambda self, **row: rows.append(row) or add(self, **row))
    return rows


@pytest.mark.parametrize(("env_id", "length", "ends"), [("Endless-v0", 7, False), ("Ending-v0", 5, True)])
def test_stored_rows_tell_the_rollout(env_id, length, ends, rows, tmp_path, monkeypatch):
    """Each row joins the one before it, and b says whether the action is another one."""
    sizes, update = [], taac.Agent.update
    monkeypatch.setattr(
        taac.Agent,
        "update",
        lambda self, batch, step: sizes.append(batch["rewards"].shape) or update(self, batch, step),
    )
    train(taac, tmp_path, env_id=f"tests.tasks:{env_id}", total_timesteps=300, learning_starts=100, td_length=5)
    assert sizes == [(TINY["batch_size"], 4)] * 200
    for i, row in enumerate(rows):
        assert row["first"] == (i % length == 0)
        assert row["rewards"] == i % length
        assert row["terminated"] == (ends and i % length == length - 1)
        if row["first"]:
            assert not row["prev_actions"].any()
            assert row["act_mask"]
        else:
            np.testing.assert_array_equal(row["prev_actions"], rows[i - 1]["actions"])
            np.testing.assert_array_equal(row["obs"], rows[i - 1]["next_obs"])
            assert row["act_mask"] == (row["actions"] != row["prev_actions"]).all()
            assert row["act_mask"] or (row["actions"] == row["prev_actions"]).all()
    for part in (rows[:100], rows[100:]):
        assert 0.2 < np.mean([row["act_mask"] for row in part if not row["first"]]) < 0.8


def test_the_first_action_counts_as_acting_even_if_it_is_zero(rows, tmp_path, monkeypatch):
    """Where it did not, a return would run from one episode into the next."""
    monkeypatch.setattr(taac.Agent, "random_action", lambda self, prev_action, noise: np.zeros(2, np.float32))
    train(taac, tmp_path, env_id="tests.tasks:Endless-v0", total_timesteps=30)
    assert [bool(row["act_mask"]) for row in rows] == [i % 7 == 0 for i in range(30)]


def test_a_warm_up_without_repeats(rows, tmp_path):
    train(taac, tmp_path, env_id="tests.tasks:Endless-v0", total_timesteps=30, warmup_repeats=False)
    assert all(row["act_mask"] for row in rows)


# Losses, networks included.


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("length", [1, LENGTH])
def test_critic_loss_against_brute_force(no_noise, mode_of_switch, length, clip):
    agent, batch = make_agent(advantage_clip=clip).double(), make_batch(length=length, dtype=torch.float64)
    rows = {name: value.numpy() for name, value in batch.items()}
    fresh, values = np.zeros((BATCH, length)), np.zeros((BATCH, length))
    for i, n in np.ndindex(BATCH, length):
        obs, prev = rows["next_obs"][i, n], rows["actions"][i, n]
        candidate, p = decide_by_hand(agent, obs, prev)
        fresh[i, n] = p > 0.5
        repeat, act = (value((agent.q1_target, agent.q2_target), obs, a) for a in (prev, candidate))
        values[i, n] = (1 - p) * repeat + p * act
    expected = 0.0
    for i, n in np.ndindex(BATCH, length):
        ends = [*(rows["first"][i, 1:] == 1), False]
        target = walk(n, rows["rewards"][i], ends, rows["terminated"][i], rows["act_mask"][i], fresh[i], values[i])
        for q in (agent.q1, agent.q2):
            expected += (mlp(q, rows["obs"][i, n], rows["actions"][i, n])[0] - target) ** 2 / (BATCH * length)
    assert 0 < fresh.mean() < 1
    assert agent.critic_loss(batch)[0].item() == pytest.approx(expected, rel=1e-9)


def actor_terms(agent, batch, weights=None):
    """α_π·log π - β(act)·Q(s, â) of each row, β's entropy and log π; `weights` in place of β(act) keep it fixed."""
    terms, log_pis, probabilities = [], [], []
    for i, n in np.ndindex(BATCH, LENGTH):
        obs, prev = batch["obs"][i, n].numpy(), batch["prev_actions"][i, n].numpy()
        candidate, p = decide_by_hand(agent, obs, prev)
        mean, std = gaussian(agent, obs, prev)
        log_pi = log_density(candidate, mean, std).sum()
        weight = 1.0 if batch["first"][i, n] else p
        probabilities.append(weight)
        weight = weight if weights is None else weights[len(terms)]
        terms.append(math.exp(0.5) * log_pi - weight * value((agent.q1, agent.q2), obs, candidate))
        log_pis.append(log_pi)
    return np.array(terms), np.array(log_pis), np.array(probabilities)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"advantage_clip": True},
        {"action_min_prob": 0.1, "initial_std": 0.2, "log_std_min": -1.65, "log_std_max": -1.55},
    ],
)
def test_policy_loss_against_brute_force(no_noise, options):
    agent, batch = make_agent(**options).double(), make_batch(dtype=torch.float64)
    loss, metrics = agent.policy_loss(batch)
    terms, log_pis, probabilities = actor_terms(agent, batch)
    assert metrics["losses/actor_loss"].item() == pytest.approx(terms.mean(), rel=1e-9)
    p = probabilities[~batch["first"].bool().flatten().numpy()]
    entropy = -(p * np.log(p) + (1 - p) * np.log(1 - p)).mean()
    assert metrics["repetition/act_probability"].tolist() == pytest.approx([p.mean()])
    assert metrics["repetition/selection_entropy"].item() == pytest.approx(entropy)
    gradients = torch.autograd.grad(loss, [agent.log_alpha_selection, agent.log_alpha_action])
    assert gradients[0].item() == pytest.approx(entropy - (-0.95 * math.log(0.95) - 0.05 * math.log(0.05)), rel=1e-9)
    share = options.get("action_min_prob", 0.184)
    assert gradients[1].item() == pytest.approx(-log_pis.mean() - ACT * math.log(2 * share), rel=1e-9)


def test_policy_gradient_takes_the_switch_for_a_constant(no_noise):
    """Against finite differences of the brute-force loss in which β keeps its value."""
    agent, batch = make_agent().double(), make_batch(dtype=torch.float64)
    bias = agent.policy.fc3.bias
    (gradient,) = torch.autograd.grad(agent.policy_loss(batch)[0], bias)
    weights = actor_terms(agent, batch)[2]
    for j in range(2 * ACT):
        losses = []
        for shift in (1e-6, -2e-6):
            bias.data[j] += shift
            losses.append(actor_terms(agent, batch, weights)[0].mean())
        bias.data[j] += 1e-6
        assert gradient[j].item() == pytest.approx((losses[0] - losses[1]) / 2e-6, rel=1e-5)


def test_each_update_moves_its_own_parameters_only():
    agent, batch = make_agent(), make_batch()
    critics, policy = ("q1.", "q2."), ("policy.", "log_alpha")
    for update, moved in [(agent.update_critics, critics), (agent.update_policy, policy)]:
        before = {name: p.clone() for name, p in agent.named_parameters()}
        update(batch)
        for name, p in agent.named_parameters():
            assert torch.equal(p, before[name]) != name.startswith(moved), name


def test_first_rows_have_no_part_in_the_switch():
    """The value of what stands for a⁻ in a first row changes nothing that is learnt."""
    agent, batch = make_agent().double(), make_batch(dtype=torch.float64)
    results = []
    values = taac.choice_values
    for surprise in (0.0, 50.0):

        def surprising(*args, surprise=surprise):
            repeat, act = values(*args)
            return repeat + surprise * batch["first"], act

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(taac, "choice_values", surprising)
            torch.manual_seed(0)
            loss, _ = agent.policy_loss(batch)
        results.append([loss, *torch.autograd.grad(loss, [*agent.policy.parameters(), agent.log_alpha_selection])])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


# π's spread, and what the authors set by family of tasks.


def test_target_entropies():
    """That of a uniform density on a share of [-1, 1], per dimension; 0.184 gives SAC's -1."""
    for share, expected in [(0.184, -1.0), (0.1, -1.609), (0.2, -0.916)]:
        width = 2 * share
        density = 1 / width
        by_hand = -width * density * math.log(density)
        assert by_hand == pytest.approx(expected, abs=1e-3)
        assert make_agent(action_min_prob=share).target_entropy_action == pytest.approx(ACT * by_hand, rel=1e-12)


@pytest.mark.parametrize("initial_std", [1.0, 0.2])
def test_standard_deviations_before_training_and_their_bounds(initial_std):
    agent, (obs, prev) = make_agent(initial_std=initial_std), some_states(500)
    _, log_std = agent.policy(torch.from_numpy(obs), torch.from_numpy(prev))
    assert log_std.mean().exp().item() == pytest.approx(initial_std, rel=0.2)
    for shift, expected in [(-50.0, -10.0), (50.0, 2.0)]:
        agent.policy.fc3.bias.data[ACT:] = shift
        _, log_std = agent.policy(torch.from_numpy(obs), torch.from_numpy(prev))
        assert (log_std == expected).all()


def running_mean(values):
    """The authors' average over k + 1 batches, as one weighted sum: the newest has 8/(8 + k), the others the rest."""
    weights = np.ones(len(values))
    for k in range(len(values)):
        weights[:k] *= 1 - 8 / (8 + k)
        weights[k] = 8 / (8 + k)
    assert weights.sum() == pytest.approx(1)
    return (weights * values).sum()


@pytest.mark.parametrize(("mode", "clip"), [("full", 5.0), ("full", 0.7), ("scale", 5.0), ("scale", 0.7)])
def test_reward_normaliser_by_hand(mode, clip):
    rng, normaliser = np.random.default_rng(0), taac.RewardNormaliser(mode == "full", clip).double()
    batches = [rng.normal(3 - k, 2 + 0.2 * k, (BATCH, LENGTH)) for k in range(12)]
    clipped = 0
    for k, rewards in enumerate(batches):
        seen = batches[: k + 1]
        mean = running_mean([batch.mean() for batch in seen]) if mode == "full" else 0.0
        square = running_mean([(batch**2).mean() for batch in seen])
        expected = (rewards - mean) / math.sqrt(square - mean**2)
        clipped += (abs(expected) > clip).sum()
        normalised = normaliser(torch.from_numpy(rewards)).numpy()
        np.testing.assert_allclose(normalised, np.clip(expected, -clip, clip), rtol=1e-6)
    assert (clipped > 0) == (clip < 1)


def test_a_constant_reward_normalises_to_something_finite():
    for mode, expected in [(True, 0.0), (False, 1.0)]:
        normaliser = taac.RewardNormaliser(mode, 5.0)
        for _ in range(3):
            assert normaliser(torch.full((4, 3), 2.5)).sub(expected).abs().max() < 1e-3


@pytest.mark.parametrize("mode", ["off", "full", "scale"])
def test_critics_learn_from_normalised_rewards(mode, monkeypatch):
    """Of every update, and the normaliser's state is part of the agent's."""
    agent, seen = make_agent(reward_normaliser=mode, reward_clip=0.5), []
    alike = taac.RewardNormaliser(mode == "full", 0.5)
    monkeypatch.setattr(agent, "update_critics", lambda batch: seen.append(batch["rewards"]) or {})
    for seed in (1, 2):
        batch = make_batch(seed)
        agent.update(batch, seed)
        torch.testing.assert_close(seen[-1], batch["rewards"] if mode == "off" else alike(batch["rewards"]))
    state = {name.split(".")[-1]: value for name, value in agent.state_dict().items() if "normalise" in name}
    assert state == ({} if mode == "off" else alike.state_dict())


# Updates.


def test_everything_moves_once_at_every_step():
    agent = make_agent(tau=0.25)
    for step in range(1, 4):
        before = [p.clone() for p in agent.target_parameters]
        agent.update(make_batch(seed=step), step)
        for old, new, online in zip(before, agent.target_parameters, agent.critic_parameters, strict=True):
            torch.testing.assert_close(new, 0.75 * old + 0.25 * online)
    counts = {name: optimizer.steps.item() for name, optimizer in agent.optimizers.items()}
    assert counts == {"critics": 3, "policy": 3, "alphas": 3}


@pytest.mark.parametrize("options", [{}, {"advantage_clip": True}, {"reward_normaliser": "full"}])
def test_update_runs_on_the_meta_device(options):
    """No tensor is made elsewhere, nothing waits for a value, no shape depends on data."""
    metrics = make_agent(device="meta", **options).update(make_batch(device="meta"), step=1)
    assert all(value.device.type == "meta" for value in metrics.values())


def test_compiled_losses_equal_eager_ones():
    assert_compiled_equals_eager(lambda compile: make_agent(compile=compile), make_batch)


# Decisions.


def some_states(count):
    rng = np.random.default_rng(0)
    return rng.normal(size=(count, OBS)).astype(np.float32), rng.uniform(-1, 1, (count, ACT)).astype(np.float32)


def test_decisions_by_hand():
    """A stochastic episode draws noise for the candidate, then for the bit; a greedy one takes the likelier bit."""
    agent, (obs, prev) = make_agent(), some_states(40)
    stochastic = np.arange(40) % 2 == 1
    streams = [np.random.default_rng(row) if stochastic[row] else None for row in range(40)]
    noise = EpisodesNoise(streams, agent.device)
    noise.asked = range(40)
    actions, steps = agent.act(obs, prev, noise)
    assert steps == 1
    acts = np.zeros(40, bool)
    for row in range(40):
        stream = np.random.default_rng(row)
        draws = stream.standard_normal(ACT, np.float32), stream.random(1, np.float32)
        normal, uniform = draws if stochastic[row] else (0.0, 0.5)
        candidate, p = decide_by_hand(agent, obs[row], prev[row], normal)
        acts[row] = uniform < p
        np.testing.assert_allclose(actions[row], candidate if acts[row] else prev[row], rtol=1e-4, atol=1e-6)
        torch.manual_seed(row)  # one alone, as in training
        candidate, p = decide_by_hand(agent, obs[row], prev[row], torch.randn(ACT).numpy())
        expected = candidate if torch.rand(1).item() < p else prev[row]
        torch.manual_seed(row)
        alone, _ = agent.act(obs[row], prev[row], Noise(agent.device))
        np.testing.assert_allclose(alone, expected, rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(actions[~acts], prev[~acts])  # bit for bit
    assert 0.1 < acts[stochastic].mean() < 0.9
    assert 0.1 < acts[~stochastic].mean() < 0.9


def test_an_episode_begins_with_the_candidate():
    agent, (obs, _) = make_agent(), some_states(20)
    actions, _ = agent.act(obs, None, EpisodesNoise([None] * 20, agent.device))
    decided = [decide_by_hand(agent, state, np.zeros(ACT)) for state in obs]
    np.testing.assert_allclose(actions, [candidate for candidate, _ in decided], rtol=1e-4, atol=1e-6)
    assert min(p for _, p in decided) < 0.5  # some would rather have repeated


def test_another_rule_may_take_the_switchs_place():
    """It is asked from the second step on, and sees β's logit of each row."""
    agent, (obs, prev) = make_agent(), some_states(6)
    mask, asked = torch.tensor([[True], [False]]).repeat(3, 1), []
    noise = EpisodesNoise([None] * 6, agent.device)
    for prev_actions in (None, prev):
        actions, _ = agent.act(obs, prev_actions, noise, select=lambda *given: asked.append(given) or mask)
    ((logits, given_noise),) = asked
    assert given_noise is noise
    assert logits.shape == (6, agent.bits)
    expected = [decide_by_hand(agent, *row)[1] for row in zip(obs, prev, strict=True)]
    np.testing.assert_allclose(torch.sigmoid(logits[:, 0]), expected, rtol=1e-3)
    np.testing.assert_array_equal(actions != prev, mask.expand(6, ACT))


def test_warm_up_flips_a_fair_coin_and_draws_uniformly():
    agent, noise, prev = make_agent(), Noise(torch.device("cpu")), np.full(ACT, 0.25, np.float32)
    torch.manual_seed(0)
    actions = np.stack([agent.random_action(prev, noise) for _ in range(4000)])
    assert actions.dtype == np.float32
    repeats = (actions == 0.25).all(1)
    assert abs(repeats.mean() - 0.5) < 5 * 0.5 / math.sqrt(4000)
    shares = np.histogram(actions[~repeats], 4, (-1, 1))[0] / actions[~repeats].size
    np.testing.assert_allclose(shares, 0.25, atol=0.04)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"td_length": 1}, "--td-length must be at least 2"),
        ({"buffer_size": 2}, "--buffer-size 2 cannot hold the 3"),
        ({"learning_rate": 0.0}, "--learning-rate must be finite and above 0"),
        ({"initial_std": -1.0}, "--initial-std must be finite and above 0"),
        ({"reward_clip": 0.0}, "--reward-clip must be finite and above 0"),
        ({"action_min_prob": 0.0}, r"--action-min-prob must be in \(0, 1\]"),
        ({"log_std_min": -math.inf}, "--log-std-min must be finite"),
        ({"log_std_min": 2.0}, "--log-std-min 2.0 must be below --log-std-max 2.0"),
    ],
)
def test_bad_options_are_refused(options, complaint):
    with pytest.raises(SystemExit, match=complaint):
        taac.check_args(taac.Args(**options))
    taac.check_args(taac.Args(td_length=2, buffer_size=1))


# Learning.


def test_taac_learns(tmp_path):
    """Five seeds ended between -2.7 and -3.0; no bootstrap, targets that stay and a wrong sign all end below -14."""
    small = {"hidden_dim": 64, "batch_size": 32, "eval_episodes": 10, "learning_starts": 200, "total_timesteps": 2200}
    rates = {"learning_rate": 2e-3, "tau": 0.02, "gamma": 0.9}
    directory = train(taac, tmp_path, env_id="TaacReach-v0", **small, **rates)
    assert evaluations(directory)[-1]["return"] > -3.7
