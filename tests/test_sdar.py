"""SDAR's equations against separate, slow and obvious computations."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import sdar_continuous_action as sdar
from sdar_utils.noise import EpisodesNoise, Noise
from tests.conftest import TINY, assert_compiled_equals_eager, stored_rows
from tests.reference import gaussian, log_density, mlp, sigmoid, value

OBS, ACT, BATCH = 3, 2, 6


def make_agent(obs_dim=OBS, act_dim=ACT, device="cpu", **options) -> sdar.Agent:
    torch.manual_seed(0)
    args = sdar.Args(**{**TINY, "batch_size": BATCH, **options})
    agent = sdar.Agent(obs_dim, act_dim, args, torch.device(device))
    obs, actions = torch.randn(99, obs_dim, device=device), torch.rand(99, act_dim, device=device) * 2 - 1
    with torch.no_grad():
        agent.q2.fc3.weight.neg_()
        agent.q2.fc3.bias += (agent.q1(obs, actions) - agent.q2(obs, actions)).median()  # either may be the smaller
    return agent


def make_batch(seed=0, obs_dim=OBS, act_dim=ACT, batch=BATCH, dtype=torch.float32, device="cpu"):
    g = torch.Generator().manual_seed(seed)
    first = torch.zeros(batch)
    first[::3] = 1
    rows = {
        "obs": torch.randn(batch, obs_dim, generator=g),
        "prev_actions": (torch.rand(batch, act_dim, generator=g) * 2 - 1) * (1 - first[:, None]),
        "actions": torch.rand(batch, act_dim, generator=g) * 2 - 1,
        "rewards": torch.randn(batch, generator=g),
        "discounts": 0.99 ** torch.randint(1, 4, (batch,), generator=g),
        "next_obs": torch.randn(batch, obs_dim, generator=g),
        "last_actions": torch.rand(batch, act_dim, generator=g) * 2 - 1,
        "terminated": (torch.arange(batch) % 2).float(),
        "first": first,
    }
    return {name: value.to(device, dtype) for name, value in rows.items()}


@pytest.fixture
def no_noise(monkeypatch):
    """â is tanh(mean) everywhere, so that a slow computation can know it."""
    monkeypatch.setattr(torch, "randn_like", torch.zeros_like)


floats = st.floats(-1, 1, width=32)
vectors = st.integers(1, 8).flatmap(
    lambda n: st.tuples(
        hnp.arrays(np.float32, n, elements=floats),
        hnp.arrays(np.float32, n, elements=floats),
        hnp.arrays(bool, n),
    )
)


@given(vectors)
def test_mix_repeats_bit_for_bit(case):
    prev, candidate, mask = (torch.from_numpy(x) for x in case)
    action = sdar.mix(mask, prev, candidate)
    bits = action.view(torch.int32)
    assert torch.equal(bits[~mask], prev.view(torch.int32)[~mask])
    assert torch.equal(bits[mask], candidate.view(torch.int32)[mask])
    assert torch.all((action - prev) * ~mask == 0)  # the statement of Appendix A


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.sampled_from(["decoupled", "joint"]))
def test_two_stage_policy_keeps_repeated_dimensions(seed, act_dim, selection):
    """Appendix A for the whole decision, with a trained-looking β and π."""
    agent = make_agent(act_dim=act_dim, selection=selection)
    torch.manual_seed(seed)
    obs, prev = torch.randn(20, OBS), torch.rand(20, act_dim) * 2 - 1
    mask = sdar.sample_act_mask(torch.randn(20, agent.bits))
    action, _ = sdar.act_given_mask(agent.policy, obs, prev, mask)
    repeats = ~mask.expand(20, act_dim)
    assert torch.equal(action[repeats], prev[repeats])
    assert (action[~repeats] != prev[~repeats]).all()


def test_action_policy_does_not_see_the_previous_action_of_acting_dimensions():
    agent = make_agent()
    obs, mask = torch.randn(1, OBS), torch.tensor([[True, False]])
    seen = []
    agent.policy.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[1].clone()))
    for prev in (torch.tensor([[0.3, 0.5]]), torch.tensor([[-0.9, 0.5]])):
        sdar.act_given_mask(agent.policy, obs, prev, mask)
    assert torch.equal(seen[0], torch.tensor([[-2.0, 0.5]]))
    assert torch.equal(seen[0], seen[1])


def test_squashed_gaussian_integrates_to_one_and_has_the_sampled_moments():
    for mean, log_std in [(0.0, 0.0), (1.5, -1.0), (-0.7, 0.4)]:
        u = torch.linspace(mean - 12 * math.exp(log_std), mean + 12 * math.exp(log_std), 200_001, dtype=torch.float64)
        m, s = torch.full_like(u, mean), torch.full_like(u, log_std)
        action, log_prob = sdar.squashed_gaussian(m, s, (u - mean) / math.exp(log_std))
        keep = action.abs() < 1
        density = log_prob.exp()[keep]
        assert torch.trapezoid(density, action[keep]).item() == pytest.approx(1, abs=1e-4)
        torch.manual_seed(0)
        sampled, _ = sdar.squashed_gaussian(m, s, torch.randn_like(m))
        mean_by_integral = torch.trapezoid(density * action[keep], action[keep]).item()
        assert mean_by_integral == pytest.approx(sampled.mean().item(), abs=0.01)


def test_squashed_gaussian_is_finite_far_out():
    action, log_prob = sdar.squashed_gaussian(torch.tensor([60.0, -60.0]), torch.zeros(2), torch.zeros(2))
    assert torch.isfinite(log_prob).all()
    # log(1 - tanh²(u)) → 2 log 2 - 2|u|
    assert log_prob[0].item() == pytest.approx(-0.5 * math.log(2 * math.pi) - 2 * math.log(2) + 120, rel=1e-5)
    assert torch.equal(action, torch.tensor([1.0, -1.0]))


def test_selection_log_prob_and_entropy_against_torch_distributions():
    torch.manual_seed(0)
    logits = torch.cat([torch.randn(50, 4) * 3, torch.tensor([[-30.0, 30.0, 0.0, 5.0]])]).double()
    bernoulli = torch.distributions.Independent(torch.distributions.Bernoulli(logits=logits), 1)
    mask = bernoulli.sample()
    torch.testing.assert_close(sdar.selection_log_prob(logits, mask.bool()), bernoulli.log_prob(mask))
    torch.testing.assert_close(sdar.selection_entropy(logits), bernoulli.entropy())


def test_sample_act_mask_has_the_right_frequencies():
    torch.manual_seed(0)
    logits = torch.tensor([[-2.0, 0.0, 3.0]])
    mask = sdar.sample_act_mask(logits, 40_000)
    assert mask.shape == (40_000, 1, 3)
    expected = torch.sigmoid(logits[0])
    error = (expected * (1 - expected) / 40_000).sqrt()
    assert ((mask[:, 0].float().mean(0) - expected).abs() < 5 * error).all()


def test_all_schemas_enumerates_every_mask_once():
    for bits in (1, 2, 5):
        schemas = {tuple(int(b) for b in row[0]) for row in sdar.all_schemas(bits)}
        assert schemas == set(itertools.product((0, 1), repeat=bits))


def brute_force_objective(logits, f):
    """Σ_b β(b)·f(b) and its gradient in the logits, f a dict from tuples of bits to a number, one state."""
    p = sigmoid(logits)
    total, gradient = 0.0, np.zeros_like(logits)
    for b, fb in f.items():
        probability = np.prod([p[i] if bit else 1 - p[i] for i, bit in enumerate(b)])
        total += probability * fb
        gradient += probability * fb * (np.array(b) - p)
    return total, gradient


@pytest.mark.parametrize("bits", [1, 2, 3, 5])
def test_exact_objective_against_enumeration(bits):
    rng = np.random.default_rng(bits)
    logits = torch.tensor(rng.normal(size=(7, bits)) * 2, requires_grad=True)
    schemas = sdar.all_schemas(bits)
    values = torch.tensor(rng.normal(size=(2**bits, 7)) * 50 + 300)
    objective = sdar.exact_selection_objective(logits, schemas, values)
    objective.sum().backward()
    for row in range(7):
        f = {tuple(int(x) for x in schemas[k, 0]): values[k, row].item() for k in range(2**bits)}
        total, gradient = brute_force_objective(logits[row].detach().numpy(), f)
        assert objective[row].item() == pytest.approx(total, rel=1e-12)
        np.testing.assert_allclose(logits.grad[row].numpy(), gradient, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("baseline", [True, False])
def test_sampled_objective_has_the_exact_gradient_on_average(baseline):
    gradients, exact = sampled_gradients(baseline, draws=40_000)
    error = gradients.std(0) / math.sqrt(len(gradients))
    assert ((gradients.mean(0) - exact).abs() < 4.5 * error).all()


def sampled_gradients(baseline, draws, samples=10):
    """One state's gradient estimates and the exact gradient, with Q values of the size that tasks have."""
    torch.manual_seed(1)
    logits = torch.tensor([[0.3, -1.2, 0.8, 0.0]], dtype=torch.float64)
    schemas = sdar.all_schemas(4)
    table = 300 + 5 * torch.randn(16, dtype=torch.float64)
    many = logits.expand(draws, -1).clone().requires_grad_()
    masks = sdar.sample_act_mask(many.detach(), samples)
    index = (masks * torch.tensor([1, 2, 4, 8])).sum(-1)
    sdar.sampled_selection_objective(many, masks, table[index], baseline).sum().backward()
    f = {tuple(int(x) for x in schemas[k, 0]): table[k].item() for k in range(16)}
    return many.grad, torch.tensor(brute_force_objective(logits[0].numpy(), f)[1])


def test_baseline_lowers_the_variance():
    with_baseline, _ = sampled_gradients(True, draws=4000)
    plain, _ = sampled_gradients(False, draws=4000)
    assert with_baseline.var(0).sum() * 100 < plain.var(0).sum()


def test_baseline_is_the_mean_of_the_others():
    values = torch.tensor([[1.0], [2.0], [6.0]])
    masks = torch.tensor([[[True]], [[False]], [[True]]])
    logits = torch.tensor([[0.4]], requires_grad=True)
    sdar.sampled_selection_objective(logits, masks, values, True).sum().backward()
    p = sigmoid(0.4)
    advantages = [1 - 4, 2 - 3.5, 6 - 1.5]
    expected = np.mean([a * (bit - p) for a, bit in zip(advantages, [1, 0, 1], strict=True)])
    assert logits.grad.item() == pytest.approx(expected, rel=1e-5)


def prior_by_hand(b, act_prior):
    return np.prod([act_prior if bit else 1 - act_prior for bit in b])


def log_pi_by_hand(densities, b, args):
    """What of log π counts: of all dimensions or of those that act, with `surplus` above their target entropy."""
    counted = densities if args.action_entropy == "all" else densities[np.array(b, bool)]
    return counted.sum() + (args.target_action_entropy * len(counted) if args.action_entropy == "surplus" else 0)


@pytest.mark.parametrize("selection", ["decoupled", "joint"])
@pytest.mark.parametrize("action_entropy", ["all", "acting", "surplus"])
@pytest.mark.parametrize("act_prior", [0.5, 0.2])
def test_exact_selection_loss_against_brute_force(no_noise, action_entropy, act_prior, selection):
    """The whole of Eq. 8, networks included, in float64, row by row and schema by schema; `surplus`: values alone."""
    agent = make_agent(action_entropy=action_entropy, act_prior=act_prior, selection=selection).double()
    with torch.no_grad():
        agent.log_alpha_selection.fill_(-0.3)
        agent.log_alpha_action.fill_(0.4)
    batch = make_batch(dtype=torch.float64)
    loss, _ = agent.selection_loss(batch)
    rows = []
    for i in range(BATCH):
        obs, prev = batch["obs"][i].numpy(), batch["prev_actions"][i].numpy()
        if batch["first"][i]:
            continue
        p = sigmoid(mlp(agent.selection, obs, prev))
        total = 0.0
        for bits in itertools.product((0, 1), repeat=agent.bits):
            probability = np.prod([p[j] if bit else 1 - p[j] for j, bit in enumerate(bits)])
            b = np.resize(bits, ACT)
            mean, std = gaussian(agent.policy, obs, np.where(b, -2.0, prev))
            candidate = np.tanh(mean)
            densities = log_density(candidate, mean, std)
            log_pi = 0 if action_entropy == "surplus" else log_pi_by_hand(densities, b, agent.args)
            q = value((agent.q1, agent.q2), obs, np.where(b, candidate, prev))
            bonus = -math.log(probability) + math.log(prior_by_hand(bits, act_prior)) + agent.bits * math.log(2)
            total += probability * (q - math.exp(0.4) * log_pi + math.exp(-0.3) * bonus)
        rows.append(total)
    assert loss.item() == pytest.approx(-np.mean(rows), rel=1e-6)


def test_sampled_selection_loss_estimates_the_exact_one(no_noise):
    exact, sampled = make_agent(), make_agent(selection_objective="sampled", num_selection_samples=10)
    batch = {name: value.repeat(2000, *[1] * (value.dim() - 1)) for name, value in make_batch().items()}
    gradients = []
    for agent in (exact, sampled):
        loss, _ = agent.selection_loss(batch)
        gradients.append(torch.autograd.grad(loss, agent.selection.fc3.weight)[0])
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0.05, atol=2e-3)


def critic_target_by_hand(agent, batch, i, alpha_selection=0.0, alpha_action=0.0, act_prior=0.5):
    """Eq. 6 with β replaced by its mode."""
    obs, prev = batch["next_obs"][i].numpy(), batch["last_actions"][i].numpy()
    p = sigmoid(mlp(agent.selection, obs, prev))
    b = p > 0.5
    mean, std = gaussian(agent.policy, obs, np.where(b, -2.0, prev))
    candidate = np.tanh(mean)
    q = value((agent.q1_target, agent.q2_target), obs, np.where(b, candidate, prev))
    log_beta = np.log(np.where(b, p, 1 - p)).sum() - math.log(prior_by_hand(b, act_prior)) - ACT * math.log(2)
    if agent.args.action_entropy == "surplus":
        log_beta += agent.args.selection_entropy_scale * ACT * math.log(2)
    log_pi = log_pi_by_hand(log_density(candidate, mean, std), b, agent.args)
    bonus = -alpha_action * log_pi - alpha_selection * log_beta
    return batch["rewards"][i].item() + batch["discounts"][i].item() * (1 - batch["terminated"][i].item()) * (q + bonus)


@pytest.mark.parametrize("action_entropy", ["all", "acting", "surplus"])
@pytest.mark.parametrize(("entropy", "act_prior"), [(False, 0.5), (False, 0.2), (True, 0.5), (True, 0.2)])
def test_critic_loss_against_brute_force(no_noise, monkeypatch, entropy, act_prior, action_entropy):
    monkeypatch.setattr(sdar, "sample_act_mask", lambda logits, *samples: logits > 0)
    agent = make_agent(entropy_in_target=entropy, act_prior=act_prior, action_entropy=action_entropy).double()
    with torch.no_grad():
        agent.log_alpha_selection.fill_(-0.3)
        agent.log_alpha_action.fill_(0.4)
        for p in agent.target_parameters:
            p.add_(0.1 * torch.randn_like(p) + 0.05)  # targets of their own
    batch = make_batch(dtype=torch.float64)
    loss, _ = agent.critic_loss(batch)
    alphas = {"alpha_selection": math.exp(-0.3), "alpha_action": math.exp(0.4)} if entropy else {}
    expected = 0.0
    for i in range(BATCH):
        target = critic_target_by_hand(agent, batch, i, **alphas, act_prior=act_prior)
        for q in (agent.q1, agent.q2):
            expected += (mlp(q, batch["obs"][i].numpy(), batch["actions"][i].numpy())[0] - target) ** 2 / BATCH
    assert loss.item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("action_entropy", "target"), [("all", -1), ("acting", -1), ("acting", -0.3), ("surplus", -0.3)]
)
@pytest.mark.parametrize("act_prior", [0.5, 0.2])
def test_policy_loss_against_brute_force(no_noise, monkeypatch, action_entropy, target, act_prior):
    """Eqs. 7 and 10; with `acting` and `surplus` only what acts has an entropy, and each such dimension a target."""
    monkeypatch.setattr(sdar, "sample_act_mask", lambda logits, *samples: logits > 0)
    agent = make_agent(action_entropy=action_entropy, target_action_entropy=target, act_prior=act_prior).double()
    batch = make_batch(dtype=torch.float64)
    with torch.no_grad():
        agent.log_alpha_action.fill_(0.4)
        logits = agent.selection(batch["obs"], batch["prev_actions"])
        agent.selection.fc3.bias -= logits[~batch["first"].bool()].quantile(0.5, dim=0)  # some act, some repeat
    loss, metrics = agent.policy_loss(batch)
    scale, terms, surplus_action, bonuses, acting, repeating = agent.args.selection_entropy_scale, [], [], [], [], []
    for i in range(BATCH):
        obs, prev = batch["obs"][i].numpy(), batch["prev_actions"][i].numpy()
        p = sigmoid(mlp(agent.selection, obs, prev))
        b = np.ones(ACT, bool) if batch["first"][i] else p > 0.5
        mean, std = gaussian(agent.policy, obs, np.where(b, -2.0, prev))
        densities = log_density(np.tanh(mean), mean, std)
        acting += list(-densities[b])
        repeating += list(-densities[~b])
        counted = densities if action_entropy == "all" else densities[b]
        q = value((agent.q1, agent.q2), obs, np.where(b, np.tanh(mean), prev))
        terms.append(math.exp(0.4) * log_pi_by_hand(densities, b, agent.args) - q)
        surplus_action.append(-counted.sum() - target * len(counted))
        if not batch["first"][i]:
            kl = p * np.log(p / act_prior) + (1 - p) * np.log((1 - p) / (1 - act_prior))
            bonuses.append(-kl.sum() + (1 - scale) * ACT * math.log(2))
    assert min(len(acting), len(repeating)) > 1
    assert metrics["losses/actor_loss"].item() == pytest.approx(np.mean(terms), rel=1e-6)
    assert metrics["losses/acting_entropy"].item() == pytest.approx(np.mean(acting), rel=1e-6)
    assert metrics["losses/repeating_entropy"].item() == pytest.approx(np.mean(repeating), rel=1e-6)
    gradients = torch.autograd.grad(loss, [agent.log_alpha_selection, agent.log_alpha_action])
    assert gradients[0].item() == pytest.approx(np.mean(bonuses), rel=1e-6)
    assert gradients[1].item() == pytest.approx(np.mean(surplus_action), rel=1e-6)


@pytest.mark.parametrize("act_prior", [0.5, 0.2, 0.05, 0.7])
def test_selection_bonus_against_torch_distributions(act_prior):
    """The value and its gradient, certain bits included."""
    torch.manual_seed(0)
    logits = torch.cat([torch.randn(50, 4) * 3, torch.tensor([[-30.0, 30.0, 0.0, 5.0]])]).double().requires_grad_()
    bonus = sdar.selection_bonus(logits, act_prior)
    prior = torch.distributions.Bernoulli(torch.tensor(act_prior, dtype=torch.float64))
    divergence = torch.distributions.kl_divergence(torch.distributions.Bernoulli(logits=logits), prior).sum(-1)
    expected = 4 * math.log(2) - divergence
    torch.testing.assert_close(bonus, expected)
    gradients = [torch.autograd.grad(x.sum(), logits, retain_graph=True)[0] for x in (bonus, expected)]
    torch.testing.assert_close(*gradients)


def test_a_prior_of_a_half_is_the_paper_to_the_last_bit(monkeypatch):
    results = []
    for objective in ("exact", "sampled"):
        for bonus in (sdar.selection_bonus, lambda logits, act_prior: sdar.selection_entropy(logits)):
            with monkeypatch.context() as patch:
                patch.setattr(sdar, "selection_bonus", bonus)
                agent = make_agent(selection_objective=objective, act_prior=0.5).double()
                batch = make_batch(dtype=torch.float64)
                torch.manual_seed(1)
                losses = agent.selection_loss(batch)[0], agent.policy_loss(batch)[0]
                of = agent.selection.parameters(), [agent.log_alpha_selection]
                gradients = [g for loss, p in zip(losses, of, strict=True) for g in torch.autograd.grad(loss, [*p])]
                results.append([*losses, *gradients])
    for paper, ours in (results[:2], results[2:]):
        assert all(torch.equal(a, b) for a, b in zip(paper, ours, strict=True))
        assert all(x.dtype == torch.float64 for x in ours)


@pytest.mark.parametrize("selection", ["decoupled", "joint"])
@pytest.mark.parametrize("objective", ["exact", "sampled"])
@pytest.mark.parametrize("action_entropy", ["all", "acting", "surplus"])
def test_where_values_do_not_care_beta_ends_at_its_prior(no_noise, action_entropy, objective, selection):
    """With `acting`, the entropy H that acting has shifts the odds by exp(α_π·H/α_β), H over what a bit acts for."""
    options = {"policy_lr": 0.02, "selection_objective": objective, "num_selection_samples": 30}
    agent = make_agent(act_prior=0.2, action_entropy=action_entropy, selection=selection, **options)
    alpha_selection, alpha_action, batch = 0.5, 0.8, make_batch(batch=64)
    with torch.no_grad():
        for net in (agent.q1, agent.q2, agent.policy):
            net.fc3.weight.zero_()  # of no state, and of no action
        agent.policy.fc3.bias.zero_()
        agent.log_alpha_selection.fill_(math.log(alpha_selection))
        agent.log_alpha_action.fill_(math.log(alpha_action))
    for _ in range(400):
        metrics = agent.update_selection(batch)
    entropy = math.log(math.exp(-1.5) * math.sqrt(2 * math.pi))  # of each dimension, at the mean
    odds = 0.2 / 0.8
    if action_entropy == "acting":
        odds *= math.exp(alpha_action * entropy * (ACT if selection == "joint" else 1) / alpha_selection)
    expected = odds / (1 + odds)
    assert metrics["repetition/act_probability"].tolist() == pytest.approx([expected] * agent.bits, abs=0.02)


@pytest.mark.parametrize("selection", ["decoupled", "joint"])
@pytest.mark.parametrize("probability", [0.5, 0.9])
def test_beta_begins_where_it_is_told_to(probability, selection):
    start = {"initial_act_probability": probability, "initial_alpha_selection": 0.1, "initial_alpha_action": 0.2}
    agent = make_agent(**start, selection=selection, hidden_dim=64)
    with torch.no_grad():
        act = torch.sigmoid(agent.selection(torch.randn(500, OBS), torch.rand(500, ACT) * 2 - 1))
    assert act.mean(0).tolist() == pytest.approx([probability] * agent.bits, abs=0.06)  # a random network's scatter
    assert agent.alpha_selection.item() == pytest.approx(0.1)
    assert agent.alpha_action.item() == pytest.approx(0.2)


def test_undecided_is_the_share_of_bits_between_a_quarter_and_three():
    agent, batch = make_agent(initial_act_probability=0.5), make_batch(batch=300)
    agent.selection.fc3.weight.data.mul_(20)
    _, metrics = agent.selection_loss(batch)
    shares = []
    for i in range(300):
        if not batch["first"][i]:
            p = sigmoid(mlp(agent.selection, batch["obs"][i].numpy(), batch["prev_actions"][i].numpy()))
            shares.append(((p > 0.25) & (p < 0.75)).mean())
    assert 0.1 < np.mean(shares) < 0.9
    assert metrics["repetition/undecided"].item() == pytest.approx(np.mean(shares), abs=1e-6)


@pytest.mark.parametrize(("bias", "grows"), [(0.0, False), (8.0, True)])
def test_selection_temperature_moves_the_right_way(bias, grows):
    """β uniform has more entropy than its target, so α_β must fall; β nearly certain has less, so it must rise."""
    agent = make_agent()
    with torch.no_grad():
        agent.selection.fc3.weight.zero_()
        agent.selection.fc3.bias.fill_(bias)
    before = agent.log_alpha_selection.item()
    agent.update(make_batch(), step=2)
    assert agent.log_alpha_selection.item() != before
    assert (agent.log_alpha_selection.item() > before) == grows


@pytest.mark.parametrize(("log_std", "grows"), [(10.0, False), (-10.0, True)])
def test_action_temperature_moves_the_right_way(log_std, grows):
    agent = make_agent()
    with torch.no_grad():
        agent.policy.fc3.weight.zero_()
        agent.policy.fc3.bias[:ACT] = 0
        agent.policy.fc3.bias[ACT:] = log_std / 10 if log_std > 0 else log_std
    if not grows:  # std e^0.3 or so: about the widest that tanh leaves; its entropy is above -|A|
        agent.policy.fc3.bias.data[ACT:] = 0.55
    before = agent.log_alpha_action.item()
    agent.update(make_batch(), step=2)
    assert agent.log_alpha_action.item() != before
    assert (agent.log_alpha_action.item() > before) == grows


def test_rows_without_a_previous_action_do_not_teach_selection():
    """Whatever stands in prev_actions of a first row, nothing that learns from it changes."""
    losses = []
    for filler in (0.0, 0.9):
        agent, batch = make_agent(), make_batch()
        batch["prev_actions"][batch["first"].bool()] = filler
        torch.manual_seed(3)
        agent.log_alpha_selection.data.fill_(0.7)
        loss, _ = agent.policy_loss(batch)
        selection, _ = agent.selection_loss(batch)
        losses.append((loss.item(), selection.item()))
    assert losses[0] == losses[1]


def test_first_rows_act_in_every_dimension():
    agent, batch = make_agent(), make_batch()
    agent.selection.fc3.bias.data.fill_(-30)  # β repeats everything that it may
    seen = []
    agent.policy.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[1].clone()))
    agent.policy_loss(batch)
    first = batch["first"].bool()
    assert (seen[0][first] == -2).all()
    assert torch.equal(seen[0][~first], batch["prev_actions"][~first])


def test_each_update_moves_its_own_parameters():
    agent, batch = make_agent(), make_batch()
    parts = {
        agent.update_critics: {"q1", "q2"},
        agent.update_policy: {"policy", "log_alpha_selection", "log_alpha_action"},
        agent.update_selection: {"selection"},
    }
    for update, expected in parts.items():
        before = {name: value.clone() for name, value in agent.state_dict().items()}
        update(batch)
        moved = {
            name.split(".")[0] for name, value in agent.state_dict().items() if not torch.equal(value, before[name])
        }
        assert moved == expected


@pytest.mark.parametrize("compensate", [True, False])
def test_policy_delay(compensate):
    """β, π and the temperatures move every second step; targets at every step, or to the letter with the policies."""
    agent = make_agent(compensate_policy_delay=compensate)
    target = agent.q1_target.fc1.weight
    moved = []
    for step in range(1, 5):
        before = target.clone()
        agent.update(make_batch(), step)
        moved.append(not torch.equal(before, target))
    twice = 2 if compensate else 1
    counts = {name: optimizer.steps.item() for name, optimizer in agent.optimizers.items()}
    assert counts == {"critics": 4, "policy": 2 * twice, "alphas": 2 * twice, "selection": 2}
    assert moved == ([True] * 4 if compensate else [False, True, False, True])


def test_target_networks_move_by_tau():
    agent = make_agent(tau=0.25)
    before = [p.clone() for p in agent.target_parameters]
    agent.update(make_batch(), step=1)
    for old, new, online in zip(before, agent.target_parameters, agent.critic_parameters, strict=True):
        torch.testing.assert_close(new, 0.75 * old + 0.25 * online)


VARIANTS = {
    "exact": {},
    "sampled": {"selection_objective": "sampled"},
    "plain": {"selection_objective": "sampled", "selection_baseline": False},
    "joint": {"selection": "joint"},
    "surplus": {"action_entropy": "surplus", "entropy_in_target": True},
    "prior": {"act_prior": 0.2, "entropy_in_target": True},
    "joint acting": {"selection": "joint", "action_entropy": "acting", "act_prior": 0.3},
    "letter": {"compensate_policy_delay": False},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_update_runs_on_the_meta_device(variant):
    """No tensor is made elsewhere, nothing waits for a value, no shape depends on data."""
    agent = make_agent(device="meta", **VARIANTS[variant])
    batch = make_batch(device="meta")
    for step in (1, 2, 3, 4):
        metrics = agent.update(batch, step)
    assert all(value.device.type == "meta" for value in metrics.values())


@pytest.mark.parametrize("variant", ["exact", "sampled", "joint acting"])
def test_compiled_losses_equal_eager_ones(variant):
    assert_compiled_equals_eager(lambda compile: make_agent(compile=compile, **VARIANTS[variant]), make_batch)


def test_many_samples_per_state_share_the_first_layer_without_changing_the_result():
    net = sdar.Critic(OBS, ACT, 1, 16)
    obs, actions = torch.randn(5, OBS), torch.randn(7, 5, ACT)
    expected = torch.stack([net(obs, a) for a in actions])
    torch.testing.assert_close(net(obs, actions), expected)


def test_exact_objective_in_chunks_equals_one_pass(no_noise, monkeypatch):
    agent, batch = make_agent(act_dim=4, selection_objective="exact"), make_batch(act_dim=4)
    whole = agent.selection_loss(batch)[0]
    monkeypatch.setattr(sdar, "SCHEMAS_AT_ONCE", 3)
    torch.testing.assert_close(agent.selection_loss(batch)[0], whole)


def test_exact_refuses_too_many_dimensions():
    make_agent(act_dim=12, selection_objective="exact", device="meta")
    with pytest.raises(SystemExit, match=r"2\^17 = 131,072 schemas"):
        make_agent(act_dim=17, selection_objective="exact")
    assert not make_agent(act_dim=17).exact
    assert make_agent(act_dim=3).exact
    assert not make_agent(act_dim=4).exact
    assert make_agent(act_dim=17, selection="joint").exact


NOISE = Noise(torch.device("cpu"))
GREEDY = EpisodesNoise([None], torch.device("cpu"))


@pytest.mark.parametrize("mode", ["stochastic", "greedy"])
def test_rollout_acts_first_and_then_repeats_where_the_bits_say(mode, monkeypatch):
    agent, masks = make_agent(act_dim=5), []

    def recorded(logits, noise):
        masks.append(torch.rand_like(logits) < 0.5)
        return masks[-1]

    monkeypatch.setattr(sdar, "draw_act_mask", recorded)
    previous = None
    for t in range(50):
        obs = np.random.default_rng(t).normal(size=OBS).astype(np.float32)
        if mode == "stochastic":
            action, steps = agent.act(obs, previous, NOISE, recorded)
            assert steps == 1
        else:
            batch = None if previous is None else previous[None]
            ((action,), _) = agent.act(obs[None], batch, GREEDY, recorded)
        assert (np.abs(action) <= 1).all()
        if t == 0:
            assert not masks
            assert (action != 0).all()
        else:
            np.testing.assert_array_equal(action != previous, masks[-1].numpy().reshape(-1))
        previous = action


@pytest.mark.parametrize("selection", ["decoupled", "joint"])
def test_the_warm_up_is_uniform_and_repeats_where_it_may(selection):
    agent = make_agent(act_dim=5, act_prior=0.2, warmup_repeats="one", selection=selection)
    held, may_repeat = np.full(5, 0.5, np.float32), torch.tensor([True, False, True, False, False])
    drawn = np.stack([agent.random_action(None, may_repeat, NOISE) for _ in range(3000)])
    assert (np.abs(drawn.mean(0)) < 5 * math.sqrt(1 / 3 / 3000)).all()
    assert (np.abs(drawn.var(0) - 1 / 3) < 0.03).all()  # a uniform one's on [-1, 1]
    repeated = np.stack([agent.random_action(held, may_repeat, NOISE) == 0.5 for _ in range(3000)])
    assert (np.abs(repeated.mean(0) - 0.8 * may_repeat.numpy()) < 5 * math.sqrt(0.8 * 0.2 / 3000)).all()
    assert (repeated[:, 0] == repeated[:, 2]).all() == (selection == "joint")


def test_an_episode_of_the_warm_up_lets_none_one_or_all_repeat():
    for repeats, count in (("none", 0), ("all", 5)):
        assert make_agent(act_dim=5, warmup_repeats=repeats).may_repeat(NOISE).sum() == count
    agent = make_agent(act_dim=5, warmup_repeats="one")
    drawn = torch.stack([agent.may_repeat(NOISE) for _ in range(2000)])
    assert (drawn.sum(1) == 1).all()
    assert ((drawn.float().mean(0) - 0.2).abs() < 5 * math.sqrt(0.2 * 0.8 / 2000)).all()


@pytest.mark.parametrize("repeats", ["none", "one", "all"])
def test_which_dimensions_the_warm_up_repeats(repeats, tmp_path):
    """Within an episode the same ones; no number is drawn twice by chance."""
    rows = stored_rows(sdar, tmp_path, total_timesteps=405, learning_starts=400, warmup_repeats=repeats, act_prior=0.3)
    firsts = [i for i, row in enumerate(rows[:400]) if row["first"]]
    assert firsts == list(range(0, 400, 50))
    held = {
        tuple(np.any([row["actions"] == row["prev_actions"] for row in rows[i + 1 : i + 50]], axis=0)) for i in firsts
    }
    one = {(True, False), (False, True)}
    assert held == {"none": {(False, False)}, "one": one, "all": {(True, True)}}[repeats]


def test_stochastic_bits_have_their_probability_and_greedy_ones_the_likelier_value():
    logits = torch.tensor([-2.0, -0.01, 0.01, 3.0])
    torch.manual_seed(0)
    drawn = torch.stack([sdar.draw_act_mask(logits, NOISE) for _ in range(20_000)]).float().mean(0)
    expected = torch.sigmoid(logits)
    assert ((drawn - expected).abs() < 5 * (expected * (1 - expected) / 20_000).sqrt()).all()
    assert sdar.draw_act_mask(logits[None], GREEDY).tolist() == [[False, False, True, True]]


def test_greedy_is_the_mean_and_sampling_is_not():
    agent, obs, previous = make_agent(), np.ones((1, OBS), np.float32), np.array([[0.1, -0.2]], np.float32)
    state, prev = torch.from_numpy(obs), torch.from_numpy(previous)
    with torch.no_grad():
        mask = agent.selection(state, prev) > 0
        mean, _ = agent.policy(state, torch.where(mask, -2.0, prev))
        expected = torch.where(mask, torch.tanh(mean), prev)
    np.testing.assert_array_equal(agent.act(obs, previous, GREEDY)[0], expected.numpy())
    assert len({agent.act(obs[0], previous[0], NOISE)[0].tobytes() for _ in range(20)}) > 1


def test_joint_selection_decides_for_all_dimensions_together():
    agent = make_agent(act_dim=5, selection="joint")
    assert agent.target_bonus_selection == pytest.approx(0.5 * math.log(2))
    previous, changes = None, []
    for t in range(100):
        action, _ = agent.act(np.full(OBS, t / 50, np.float32), previous, NOISE)
        if previous is not None:
            changes.append((action != previous).mean())
        previous = action
    assert set(changes) == {0.0, 1.0}


def test_bad_options_are_refused():
    with pytest.raises(SystemExit, match="num-selection-samples"):
        sdar.check_args(sdar.Args(num_selection_samples=1))
    sdar.check_args(sdar.Args(num_selection_samples=1, selection_baseline=False))
    for name, probability in itertools.product(("act_prior", "initial_act_probability"), (0.0, 1.0)):
        with pytest.raises(SystemExit, match=rf"--{name.replace('_', '-')} must be in \(0, 1\)"):
            sdar.check_args(sdar.Args(**{name: probability}))
    for name in ("initial_alpha_selection", "initial_alpha_action"):
        with pytest.raises(SystemExit, match=f"--{name.replace('_', '-')} must be above 0"):
            sdar.check_args(sdar.Args(**{name: 0.0}))
    with pytest.raises(SystemExit, match="policy-frequency"):
        sdar.check_args(dataclasses.replace(sdar.Args(), policy_frequency=0))
