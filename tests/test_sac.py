"""SAC's losses and their gradients against separate, slow and obvious computations, and what it learns."""

import math

import numpy as np
import pytest
import torch

import sac_continuous_action as sac
from sdar_utils.noise import Noise
from tests.conftest import TINY, assert_compiled_equals_eager, evaluations, train
from tests.reference import gaussian, log_density, mlp, value

OBS, ACT, BATCH = 3, 2, 6
NOISE = 0.7  # of every draw, where a slow computation must know it


def make_agent(device="cpu", **options) -> sac.Agent:
    torch.manual_seed(0)
    return sac.Agent(OBS, ACT, sac.Args(**{**TINY, "batch_size": BATCH, **options}), torch.device(device))


def make_batch(seed=0, dtype=torch.float32, device="cpu"):
    g = torch.Generator().manual_seed(seed)
    rows = {
        "obs": torch.randn(BATCH, OBS, generator=g),
        "actions": torch.rand(BATCH, ACT, generator=g) * 2 - 1,
        "rewards": torch.randn(BATCH, generator=g),
        "next_obs": torch.randn(BATCH, OBS, generator=g),
        "terminated": (torch.arange(BATCH) % 2).float(),
        "discounts": 0.99 ** (1 + torch.arange(BATCH) % 3).float(),
    }
    return {name: value.to(device, dtype) for name, value in rows.items()}


def make_exact_agent(**options) -> sac.Agent:
    """In float64, with target networks and a temperature that are not what they start as."""
    agent = make_agent(**options).double()
    with torch.no_grad():
        agent.log_alpha.fill_(-0.3)
        for p in agent.target_parameters:
            p.add_(0.1 * torch.randn_like(p) + 0.05)
    return agent


# Plain numpy networks and losses, written from the text.


def sample(actor, obs):
    """The action that NOISE gives, and the log of its density by the change of variables, naively."""
    mean, std = gaussian(actor, obs)
    action = np.tanh(mean + std * NOISE)
    return action, log_density(action, mean, std).sum()


def soft_value(agent, critics, obs, alpha):
    action, log_pi = sample(agent.actor, obs)
    return value(critics, obs, action) - alpha * log_pi


def critic_loss(agent, batch, alpha):
    rows = {name: value.numpy() for name, value in batch.items()}
    total = 0.0
    for i in range(BATCH):
        target = rows["rewards"][i]
        if not rows["terminated"][i]:
            target += rows["discounts"][i] * soft_value(
                agent, (agent.q1_target, agent.q2_target), rows["next_obs"][i], alpha
            )
        for q in (agent.q1, agent.q2):
            total += (mlp(q, rows["obs"][i], rows["actions"][i])[0] - target) ** 2 / BATCH
    return total


def actor_loss(agent, batch, alpha):
    return -np.mean([soft_value(agent, (agent.q1, agent.q2), obs, alpha) for obs in batch["obs"].numpy()])


def slope(loss, parameter, size=1e-6):
    """The derivative in each entry of the parameter, by differences."""
    values, result = parameter.data.view(-1), torch.zeros(parameter.numel(), dtype=torch.float64)
    for i in range(parameter.numel()):
        kept = values[i].item()
        values[i] = kept + size
        above = loss()
        values[i] = kept - size
        result[i] = (above - loss()) / (2 * size)
        values[i] = kept
    return result.view_as(parameter)


TEMPERATURES = [({}, math.exp(-0.3)), ({"autotune": False, "alpha": 0.4}, 0.4), ({"autotune": False, "alpha": 0.0}, 0)]


@pytest.fixture
def known_noise(monkeypatch):
    monkeypatch.setattr(torch, "randn_like", lambda x: torch.full_like(x, NOISE))


@pytest.mark.parametrize(("options", "alpha"), [*TEMPERATURES, ({"entropy_in_target": False}, 0)])
def test_critic_loss_against_brute_force(known_noise, options, alpha):
    agent, batch = make_exact_agent(**options), make_batch(dtype=torch.float64)
    loss, metrics = agent.critic_loss(batch)
    expected = critic_loss(agent, batch, alpha)
    assert loss.item() == pytest.approx(expected, rel=1e-9)
    assert metrics["losses/qf_loss"].item() == pytest.approx(expected / 2, rel=1e-9)
    loss.backward()
    for parameter in (agent.q1.fc1.bias, agent.q2.fc3.weight):
        differences = slope(lambda: critic_loss(agent, batch, alpha), parameter)
        torch.testing.assert_close(parameter.grad, differences, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize(("options", "alpha"), TEMPERATURES)
def test_actor_loss_against_brute_force(known_noise, options, alpha):
    """Its gradient too, through the critics and the density, in every layer."""
    agent, batch = make_exact_agent(**options), make_batch(dtype=torch.float64)
    loss, metrics = agent.policy_loss(batch)
    assert metrics["losses/actor_loss"].item() == pytest.approx(actor_loss(agent, batch, alpha), rel=1e-9)
    assert metrics["alpha/action"].item() == pytest.approx(alpha, rel=1e-6)
    loss.backward()
    for parameter in (agent.actor.fc1.bias, agent.actor.fc2.weight, agent.actor.fc3.weight, agent.actor.fc3.bias):
        differences = slope(lambda: actor_loss(agent, batch, alpha), parameter)
        torch.testing.assert_close(parameter.grad, differences, rtol=1e-5, atol=1e-8)


def test_temperature_loss_against_brute_force(known_noise):
    agent, batch = make_exact_agent(), make_batch(dtype=torch.float64)
    loss, metrics = agent.policy_loss(batch)
    log_pi = np.array([sample(agent.actor, obs)[1] for obs in batch["obs"].numpy()])
    expected = np.mean(-math.exp(-0.3) * (log_pi + -ACT))  # e^log α is its own derivative
    assert metrics["losses/alpha_loss"].item() == pytest.approx(expected, rel=1e-9)
    loss.backward()
    assert agent.log_alpha.grad.item() == pytest.approx(expected, rel=1e-9)


def test_a_fixed_temperature_stays():
    agent = make_agent(autotune=False)
    metrics = agent.update(make_batch(), step=2)
    assert agent.alpha.item() == pytest.approx(0.2)
    assert agent.log_alpha == 0
    assert "losses/alpha_loss" not in metrics


def test_each_update_moves_its_own_parameters_only():
    agent, batch = make_agent(), make_batch()
    critics, policy = ("q1.", "q2."), ("actor.", "log_alpha")
    for update, moved in [(agent.update_critics, critics), (agent.update_policy, policy)]:
        before = {name: p.clone() for name, p in agent.named_parameters()}
        update(batch)
        for name, p in agent.named_parameters():
            assert torch.equal(p, before[name]) != name.startswith(moved), name


def updates(agent):
    return {name: optimizer.steps.item() for name, optimizer in agent.optimizers.items()}


def test_update_frequencies():
    """Every third step the actor and α move three times; every second the targets, by τ."""
    agent = make_agent(policy_frequency=3, target_network_frequency=2, tau=0.25)
    for step in range(1, 7):
        counted, before = updates(agent), [p.clone() for p in agent.target_parameters]
        agent.update(make_batch(), step)
        policy_updates = 3 if step in (3, 6) else 0
        added = {name: count - counted[name] for name, count in updates(agent).items()}
        assert added == {"critics": 1, "actor": policy_updates, "alpha": policy_updates}
        tau = 0.25 if step in (2, 4, 6) else 0
        for old, new, online in zip(before, agent.target_parameters, agent.critic_parameters, strict=True):
            torch.testing.assert_close(new, (1 - tau) * old + tau * online)


def test_policy_updates_draw_fresh_noise_and_use_the_new_temperature(monkeypatch):
    seen, policy_loss = [], sac.Agent.policy_loss

    def recorded(agent, batch):
        loss, metrics = policy_loss(agent, batch)
        seen.append((metrics["losses/action_entropy"].item(), metrics["alpha/action"].item(), agent.alpha.item()))
        return loss, metrics

    monkeypatch.setattr(sac.Agent, "policy_loss", recorded)
    agent = make_agent()
    agent.optimizers["actor"].learning_rate = 0.0  # then another entropy is other noise
    agent.update(make_batch(), step=2)
    (entropy, alpha, current), (entropy_again, alpha_again, current_again) = seen
    assert entropy != entropy_again
    assert alpha != alpha_again
    assert (alpha, alpha_again) == (current, current_again)


class KnownNoise(Noise):
    def normal(self, size):
        return torch.full((size,), NOISE)


def test_an_action_is_a_sample_of_the_actor():
    agent, obs = make_agent(), np.array([[0.5, -1.0, 2.0], [0.1, 0.2, -0.3]], np.float32)
    expected = np.stack([sample(agent.actor, state)[0] for state in obs])
    for one_or_all in (0, slice(None)):
        actions, steps = agent.act(obs[one_or_all], None, KnownNoise(agent.device))
        assert steps == 1
        assert actions.dtype == np.float32
        np.testing.assert_allclose(actions, expected[one_or_all], rtol=1e-4, atol=1e-6)


def test_warm_up_is_uniform(tmp_path, monkeypatch):
    actions, add = [], sac.ReplayBuffer.add
    monkeypatch.setattr(sac.ReplayBuffer, "add", lambda self, **row: actions.append(row["actions"]) or add(self, **row))
    train(sac, tmp_path, env_id="tests.tasks:Endless-v0", total_timesteps=1000, learning_starts=1000)
    share = np.stack([np.histogram(dimension, 4, (-1, 1))[0] for dimension in np.transpose(actions)]) / 1000
    assert (np.abs(share - 1 / 4) < 5 * math.sqrt(1 / 4 * 3 / 4 / 1000)).all()


@pytest.mark.parametrize("options", [{}, {"autotune": False}])
def test_update_runs_on_the_meta_device(options):
    """No tensor is made elsewhere, nothing waits for a value, no shape depends on data."""
    agent = make_agent(device="meta", **options)
    for step in (1, 2):
        metrics = agent.update(make_batch(device="meta"), step)
    assert all(value.device.type == "meta" for value in metrics.values())


def test_compiled_losses_equal_eager_ones():
    assert_compiled_equals_eager(lambda compile: make_agent(compile=compile), make_batch)


@pytest.mark.parametrize(
    "bad",
    [
        {"policy_frequency": 0},
        {"target_network_frequency": 0},
        {"alpha": -0.1},
        {"alpha": math.nan},
        {"q_lr": -1e-3},
        {"policy_lr": math.inf},
    ],
)
def test_bad_options_are_refused(bad):
    (name,) = bad
    sac.check_args(sac.Args(alpha=0.0))
    with pytest.raises(SystemExit, match=f"error: --{name.replace('_', '-')} must"):
        sac.check_args(sac.Args(**bad))


def test_sac_learns_to_swing_up(tmp_path):
    """Pendulum-v1 returns about -1300 untrained and -150 when solved; five seeds ended between -230 and -100."""
    options = {"policy_lr": 2e-3, "q_lr": 4e-3, "gamma": 0.95, "tau": 0.02, "hidden_dim": 64, "batch_size": 64}
    budget = {"total_timesteps": 2500, "learning_starts": 300, "eval_episodes": 5}
    directory = train(sac, tmp_path, env_id="Pendulum-v1", **options, **budget)
    assert evaluations(directory)[-1]["return"] > -400
