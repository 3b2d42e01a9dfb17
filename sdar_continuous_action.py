"""SDAR: spatially decoupled action repetition for continuous control.

At every step a selection policy β decides, for each action dimension separately, whether to repeat the previous
action or to act anew; an action policy π then fills in the dimensions that act.

Nie, Fu and Gao, "Select before Act: Spatially Decoupled Action Repetition for Continuous Control", ICLR 2025.
Equation numbers in the docstrings are the paper's. Details, metrics and results: docs/sdar.md.

    python sdar_continuous_action.py --env-id HalfCheetah-v4 --total-timesteps 50000
"""

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from sdar_utils import fail
from sdar_utils.devices import upload
from sdar_utils.envs import make_env
from sdar_utils.gradients import Adam, Metrics, Minimiser, soft_update
from sdar_utils.noise import Noise
from sdar_utils.options import RunArgs, check_run_args, parse_args, require
from sdar_utils.replay import ReplayBuffer
from sdar_utils.run import Run, prepare


@dataclass
class Args(RunArgs):
    exp_name: str = Path(__file__).stem
    """the name of this experiment"""
    env_id: str = "Hopper-v4"
    """the task: any Gymnasium id with Box actions and Box or goal (Dict) observations"""
    total_timesteps: int = 1_000_000
    """how many environment steps to train for"""
    learning_starts: int = 5000
    """how many steps of random actions come before the first update"""
    buffer_size: int = 1_000_000
    """how many transitions the replay buffer holds"""
    batch_size: int = 256
    """how many transitions an update uses"""
    hidden_dim: int = 256
    """width of the hidden layers"""
    gamma: float = 0.99
    """the discount factor"""
    tau: float = 0.005
    """how far the target networks move towards the online ones at each update"""
    policy_lr: float = 3e-4
    """learning rate of the action policy π and the selection policy β"""
    q_lr: float = 1e-3
    """learning rate of the critics"""
    alpha_lr: float = 1e-3
    """learning rate of the two temperatures"""
    policy_frequency: int = 2
    """update the policies every so many steps"""
    n_step: int = 1
    """over how many steps, as they were played, the critics' targets sum rewards before they bootstrap (Eq. 6: 1)"""
    compensate_policy_delay: bool = True
    """update π and the temperatures policy_frequency times each time, and the targets at every step; off, each is
    updated once per policy update, which is Algorithm 1 to the letter"""

    selection: Literal["decoupled", "joint"] = "decoupled"
    """decoupled: one act-or-repeat bit per action dimension; joint: one bit for all of them (an ablation)"""
    selection_objective: Literal["auto", "exact", "sampled"] = "auto"
    """how β is trained: exact sums over all act-or-repeat schemas (Eq. 8), sampled draws some (Eq. 9); auto takes
    exact up to three bits"""
    num_selection_samples: int = 10
    """K, the number of schemas drawn per state by the sampled objective"""
    selection_baseline: bool = True
    """subtract the mean value of the other K-1 schemas in the sampled objective: the same gradient in expectation,
    far less variance; off gives the plain Eq. 9"""
    selection_entropy_scale: float = 0.5
    """λ: β's target entropy is λ·|A|·log 2 (the paper uses 0.4 to 0.6, by task)"""
    warmup_repeats: Literal["none", "one", "all"] = "none"
    """which dimensions repeat with probability 1 - p in the random warm-up: none, as in SAC's; one, drawn anew for each
    episode; or all"""
    act_prior: float = 0.5
    """p: β's bonus is for being near Bernoulli(p), so that below 0.5 a dimension repeats unless acting is worth it; 0.5
    is the paper's entropy bonus"""
    action_entropy: Literal["all", "acting", "surplus"] = "surplus"
    """what π has an entropy bonus for: all dimensions, as the paper's equations are written; those that act; or, of
    those, what is above its target, and β is judged by values alone, so that acting by itself neither pays nor costs"""
    target_action_entropy: float = -1.0
    """π's target entropy in nats for each of these dimensions"""
    initial_act_probability: float = 0.9
    """β's probability of acting in each dimension before it has learned anything; by itself a network is near 0.5"""
    initial_alpha_selection: float = 0.01
    """α_β before the first update; 1 draws β to its prior before the critics know anything"""
    initial_alpha_action: float = 0.01
    """α_π before the first update; with 1, as SAC's begins, bonuses are most of what the critics learn at first"""
    entropy_in_target: bool = True
    """add both policies' entropy bonuses to the critics' target, as SAC does; Eq. 6 has none"""


ACT_PLACEHOLDER = -2.0  # ξ: stands in π's input for the previous action of a dimension that acts, outside of [-1, 1]
MAX_EXACT_BITS = 12
SCHEMAS_AT_ONCE = 64  # the exact objective evaluates this many schemas in one pass, which bounds its memory


def check_args(args: Args) -> None:
    check_run_args(args)
    require(args, "at least 1", lambda value: value >= 1, "policy_frequency", "n_step")
    first_row = f"at least {args.n_step - 1} with --n-step {args.n_step}"
    require(args, first_row, lambda value: value >= args.n_step - 1, "learning_starts")
    if args.num_selection_samples < 1 + args.selection_baseline:
        fail(
            f"--num-selection-samples {args.num_selection_samples} is too few: 1 at least, 2 with the leave-one-out "
            "baseline (--no-selection-baseline turns it off)"
        )
    require(args, "in (0, 1)", lambda value: 0 < value < 1, "act_prior", "initial_act_probability")
    require(args, "above 0", lambda value: value > 0, "initial_alpha_selection", "initial_alpha_action")


# Networks.


class StateActionMLP(nn.Module):
    """(s, a) → hidden → hidden → outputs, with ReLU."""

    def __init__(self, obs_dim: int, act_dim: int, outputs: int, hidden_dim: int):
        super().__init__()
        self.obs_dim = obs_dim
        self.fc1 = nn.Linear(obs_dim + act_dim, hidden_dim)
        self.fc2 = nn.Linear(hidden_dim, hidden_dim)
        self.fc3 = nn.Linear(hidden_dim, outputs)

    def forward(self, obs: Tensor, actions: Tensor) -> Tensor:
        if actions.dim() == obs.dim():
            x = self.fc1(torch.cat([obs, actions], dim=-1))
        else:  # many actions per state, (K, batch, |A|): they share the state's half of the layer
            obs_weight, act_weight = self.fc1.weight.tensor_split([self.obs_dim], dim=1)
            x = F.linear(actions, act_weight).add_(F.linear(obs, obs_weight, self.fc1.bias))
        return self.fc3(self.fc2(x.relu_()).relu_())


class Critic(StateActionMLP):
    """Q(s, a)."""

    def forward(self, obs: Tensor, actions: Tensor) -> Tensor:
        return super().forward(obs, actions).squeeze(-1)


class SelectionPolicy(StateActionMLP):
    """β(b | s, a⁻): a logit of acting for each bit, (s, a⁻) → selection_logits."""


LOG_STD_MIN, LOG_STD_MAX = -5.0, 2.0


class ActionPolicy(StateActionMLP):
    """π(â | s, a_mix), Eq. 3: mean and log standard deviation of a tanh-squashed Gaussian."""

    def forward(self, obs: Tensor, mixed: Tensor) -> tuple[Tensor, Tensor]:
        mean, raw_log_std = super().forward(obs, mixed).chunk(2, dim=-1)
        return mean, LOG_STD_MIN + 0.5 * (LOG_STD_MAX - LOG_STD_MIN) * (torch.tanh(raw_log_std) + 1)


# Decision: how an action is chosen.


def mix(act_mask: Tensor, prev_actions: Tensor, new: Tensor | float) -> Tensor:
    """Mix(b, a⁻, x) of Eqs. 2 and 4: x where b acts, a⁻ bit for bit where b repeats."""
    return torch.where(act_mask, new, prev_actions)


def sample_act_mask(selection_logits: Tensor, *samples: int) -> Tensor:
    """Stage 1: b ~ β, of shape (*samples, batch, bits)."""
    probability = torch.sigmoid(selection_logits)
    return torch.rand_like(probability.expand(*samples, *probability.shape)) < probability


def squashed_gaussian(mean: Tensor, log_std: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """tanh(mean + std·noise) and the log-density of each dimension."""
    pre_tanh = mean + log_std.exp() * noise
    log_prob = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)
    log_prob = log_prob - 2 * (math.log(2) - pre_tanh - F.softplus(-2 * pre_tanh))  # log(1 - tanh²), stable
    return torch.tanh(pre_tanh), log_prob


def act_given_mask(
    policy: ActionPolicy, obs: Tensor, prev_actions: Tensor, act_mask: Tensor, noise: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Stage 2, Eqs. 2-4: the action a and log π of each dimension of the candidate â. Noise not given is drawn."""
    mean, log_std = policy(obs, mix(act_mask, prev_actions, ACT_PLACEHOLDER))
    candidate, log_prob = squashed_gaussian(mean, log_std, torch.randn_like(mean) if noise is None else noise)
    return mix(act_mask, prev_actions, candidate), log_prob


def draw_act_mask(selection_logits: Tensor, noise: Noise) -> Tensor:
    """Stage 1 as it is played: b ~ β, or of a greedy episode b_i = 1 where β_i > 0.5."""
    return noise.uniform(selection_logits.shape[-1]) < torch.sigmoid(selection_logits)


def selection_log_prob(selection_logits: Tensor, act_mask: Tensor) -> Tensor:
    """log β(b | s, a⁻), summed over the bits."""
    return (act_mask * selection_logits - F.softplus(selection_logits)).sum(-1)  # log σ(x) = x - softplus(x)


def selection_entropy(selection_logits: Tensor) -> Tensor:
    """Entropy of β in closed form: a product of Bernoullis."""
    return (F.softplus(selection_logits) - selection_logits * torch.sigmoid(selection_logits)).sum(-1)


def prior_log_odds(act_mask: Tensor, act_prior: float) -> Tensor:
    """log of how much likelier b is under Bernoulli(p) than under fair coins; its mean under β if given β(act) as b."""
    odds, repeat = math.log(act_prior / (1 - act_prior)), math.log(2 * (1 - act_prior))
    return (act_mask * odds + repeat).sum(-1)


def selection_bonus(selection_logits: Tensor, act_prior: float) -> Tensor:
    """n·log 2 - KL(β ‖ Bernoulli(p)) of n bits: takes the place of β's entropy in Eqs. 8-10, and is it with p = ½."""
    return selection_entropy(selection_logits) + prior_log_odds(torch.sigmoid(selection_logits), act_prior)


def all_schemas(bits: int, device: torch.device | None = None) -> Tensor:
    """𝓑 = {0, 1}^bits as act masks, (2^bits, 1, bits)."""
    index = torch.arange(2**bits, device=device)
    return (index[:, None] >> torch.arange(bits, device=device) & 1).bool()[:, None]


# Losses.


def bellman_target(rewards: Tensor, discounts: Tensor, terminated: Tensor, next_values: Tensor) -> Tensor:
    """𝒯Q of Eq. 6, or of n steps. A time limit does not count as terminated: the target bootstraps through it."""
    return rewards + discounts * (1 - terminated) * next_values


def action_objective(values: Tensor, log_prob: Tensor, alpha_action: Tensor) -> Tensor:
    """Eq. 7 as far as π has a part in it, and f(b) of the selection objectives: Q(s, a) - α_π·log π(â | s, a⁻, b)."""
    return values - alpha_action * log_prob


def exact_selection_objective(selection_logits: Tensor, schemas: Tensor, values: Tensor) -> Tensor:
    """Eq. 8 less its entropy term: Σ_b β(b)·f(b) over all schemas, given f as `values` (2^bits, batch)."""
    return (selection_log_prob(selection_logits, schemas).exp() * values).sum(0)


def sampled_selection_objective(selection_logits: Tensor, act_masks: Tensor, values: Tensor, baseline: bool) -> Tensor:
    """Eq. 9 less its entropy term: f(b)·β(b)/β_old(b) averaged over K draws b ~ β_old, given f as `values` (K, batch).

    β_old is β before this update, so the ratio is 1 and only its gradient matters. The baseline takes from each f
    the mean of the other K-1 draws of the same state, which are independent of b: the expectation stays.
    """
    log_prob = selection_log_prob(selection_logits, act_masks)
    ratio = (log_prob - log_prob.detach()).exp()
    if baseline:
        samples = values.shape[0]
        values = (values - values.mean(0)) * (samples / (samples - 1))  # equals f - mean of the others
    return (values * ratio).mean(0)


def temperature_loss(log_alpha: Tensor, entropy: Tensor, target_entropy: Tensor | float) -> Tensor:
    """Eq. 10: α grows while the entropy is below its target and shrinks while it is above."""
    return log_alpha * (entropy - target_entropy)


def masked_mean(values: Tensor, keep: Tensor) -> Tensor:
    """Mean over the entries to keep, without a shape that depends on the data; 0 if there are none."""
    return (values * keep).sum() / keep.sum().clamp(min=1)


class Agent(nn.Module):
    """β, π, twin critics with their targets, and the two temperatures."""

    acting = ("selection", "policy")  # what `act` needs of it

    def __init__(self, obs_dim: int, act_dim: int, args: Args, device: torch.device):
        super().__init__()
        self.obs_dim, self.act_dim, self.args, self.device = obs_dim, act_dim, args, device
        self.bits = 1 if args.selection == "joint" else act_dim
        self.exact = args.selection_objective == "exact" or (args.selection_objective == "auto" and self.bits <= 3)
        if self.exact and self.bits > MAX_EXACT_BITS:
            fail(
                f"--selection-objective exact would evaluate 2^{self.bits} = {2**self.bits:,} schemas for each of the "
                f"{args.batch_size} states of a batch; it is limited to {MAX_EXACT_BITS} action dimensions, use sampled"
            )
        self.schemas = all_schemas(self.bits, device) if self.exact else None
        self.target_bonus_selection = args.selection_entropy_scale * self.bits * math.log(2)

        with device:
            self.selection = SelectionPolicy(obs_dim, act_dim, self.bits, args.hidden_dim)
            self.policy = ActionPolicy(obs_dim, act_dim, 2 * act_dim, args.hidden_dim)
            self.q1 = Critic(obs_dim, act_dim, 1, args.hidden_dim)
            self.q2 = Critic(obs_dim, act_dim, 1, args.hidden_dim)
            self.log_alpha_selection = nn.Parameter(torch.full((), math.log(args.initial_alpha_selection)))
            self.log_alpha_action = nn.Parameter(torch.full((), math.log(args.initial_alpha_action)))
        with torch.no_grad():
            self.selection.fc3.bias += math.log(args.initial_act_probability / (1 - args.initial_act_probability))
        self.q1_target = copy.deepcopy(self.q1).requires_grad_(False)
        self.q2_target = copy.deepcopy(self.q2).requires_grad_(False)
        self.critic_parameters = [*self.q1.parameters(), *self.q2.parameters()]
        self.target_parameters = [*self.q1_target.parameters(), *self.q2_target.parameters()]

        critics = Adam(self.critic_parameters, args.q_lr)
        policy = Adam(self.policy.parameters(), args.policy_lr)
        selection = Adam(self.selection.parameters(), args.policy_lr)
        alphas = Adam([self.log_alpha_selection, self.log_alpha_action], args.alpha_lr)
        self.optimizers = {"critics": critics, "policy": policy, "selection": selection, "alphas": alphas}
        self.update_critics = Minimiser(self.critic_loss, critics, compile=args.compile)
        self.update_policy = Minimiser(self.policy_loss, policy, alphas, compile=args.compile)
        self.update_selection = Minimiser(self.selection_loss, selection, compile=args.compile)

    @torch.inference_mode()
    def act(
        self,
        obs: np.ndarray,
        prev_actions: np.ndarray | None,
        noise: Noise,
        select: Callable[[Tensor, Noise], Tensor] = draw_act_mask,
    ) -> tuple[np.ndarray, int]:
        """Lines 3-8 of Algorithm 1, for one step. Another rule may take β's place as `select`."""
        state, previous, act_mask = self.first_stage(obs, prev_actions, noise, select)
        actions, _ = act_given_mask(self.policy, state, previous, act_mask, noise.normal(self.act_dim))
        return actions.cpu().numpy(), 1

    @torch.inference_mode()
    def random_action(self, prev_action: np.ndarray | None, may_repeat: Tensor, noise: Noise) -> np.ndarray:
        """For the warm-up: uniform, but dimensions that may repeat do so with probability 1 - p."""
        action = noise.uniform(self.act_dim) * 2 - 1
        if prev_action is not None and self.args.warmup_repeats != "none":
            act_mask = ~may_repeat | (noise.uniform(self.bits) < self.args.act_prior)
            action = mix(act_mask, upload(prev_action, self.device), action)
        return action.cpu().numpy()

    def may_repeat(self, noise: Noise) -> Tensor:
        """The dimensions that may repeat in an episode of the warm-up."""
        if self.args.warmup_repeats == "one":
            drawn = (noise.uniform(1) * self.act_dim).long()
            return torch.arange(self.act_dim, device=self.device) == drawn
        return torch.full((self.act_dim,), self.args.warmup_repeats == "all", device=self.device)

    def first_stage(
        self, obs: np.ndarray, prev_actions: np.ndarray | None, noise: Noise, select: Callable
    ) -> tuple[Tensor, Tensor, Tensor]:
        """s, a⁻ and b. Where a⁻ does not exist, it is zero and every dimension acts."""
        state = upload(obs, self.device)
        if prev_actions is None:
            act_mask = torch.ones(self.bits, dtype=torch.bool, device=self.device)
            return state, state.new_zeros(*obs.shape[:-1], self.act_dim), act_mask
        previous = upload(prev_actions, self.device)
        return state, previous, select(self.selection(state, previous), noise)

    def update(self, batch: dict[str, Tensor], step: int) -> Metrics:
        """Lines 12-20 of Algorithm 1."""
        args = self.args
        metrics = self.update_critics(batch)
        policies_due = step % args.policy_frequency == 0
        if policies_due:
            for _ in range(args.policy_frequency if args.compensate_policy_delay else 1):
                policy_metrics = self.update_policy(batch)
            metrics = metrics | policy_metrics | self.update_selection(batch)
        if policies_due or args.compensate_policy_delay:
            soft_update(self.target_parameters, self.critic_parameters, args.tau)
        return metrics

    def critic_loss(self, batch: dict[str, Tensor]) -> tuple[Tensor, Metrics]:
        """Eq. 6: both critics against the clipped double-Q target under β and π."""
        with torch.no_grad():
            next_obs, last_actions = batch["next_obs"], batch["last_actions"]
            selection_logits = self.selection(next_obs, last_actions)
            act_mask = sample_act_mask(selection_logits)
            next_actions, log_prob = act_given_mask(self.policy, next_obs, last_actions, act_mask)
            next_values = torch.minimum(self.q1_target(next_obs, next_actions), self.q2_target(next_obs, next_actions))
            if self.args.entropy_in_target:
                next_values = action_objective(next_values, self.joint_log_prob(log_prob, act_mask), self.alpha_action)
                log_beta = selection_log_prob(selection_logits, act_mask)
                log_beta = log_beta - prior_log_odds(act_mask, self.args.act_prior)
                if self.args.action_entropy == "surplus":
                    log_beta = log_beta + self.target_bonus_selection
                next_values = next_values - self.alpha_selection * log_beta
            target = bellman_target(batch["rewards"], batch["discounts"], batch["terminated"], next_values)
        q1, q2 = self.q1(batch["obs"], batch["actions"]), self.q2(batch["obs"], batch["actions"])
        q1_loss, q2_loss = F.mse_loss(q1, target), F.mse_loss(q2, target)
        metrics = {
            "losses/qf1_values": q1.detach().mean(),
            "losses/qf2_values": q2.detach().mean(),
            "losses/qf1_loss": q1_loss.detach(),
            "losses/qf2_loss": q2_loss.detach(),
            "losses/qf_loss": (q1_loss + q2_loss).detach() / 2,
        }
        return q1_loss + q2_loss, metrics

    def policy_loss(self, batch: dict[str, Tensor]) -> tuple[Tensor, Metrics]:
        """Eq. 7 for π, with b ~ β and no gradient through b, plus Eq. 10 for both temperatures."""
        with torch.no_grad():
            selection_logits = self.selection(batch["obs"], batch["prev_actions"])
            first = batch["first"].bool()
            act_mask = sample_act_mask(selection_logits) | first[:, None]  # where a⁻ does not exist, all act
            bonus_selection = masked_mean(selection_bonus(selection_logits, self.args.act_prior), ~first)
        actions, log_probs = act_given_mask(self.policy, batch["obs"], batch["prev_actions"], act_mask)
        log_prob = self.joint_log_prob(log_probs, act_mask)
        policy_loss = -action_objective(self.clipped_value(batch["obs"], actions), log_prob, self.alpha_action).mean()
        entropies, acts = -log_probs.detach(), act_mask.expand_as(log_probs)
        counted = self.counted(acts)
        entropy_action = (entropies * counted).sum(-1).mean()
        target_action = self.args.target_action_entropy * counted.sum(-1).mean()
        alpha_loss = temperature_loss(self.log_alpha_selection, bonus_selection, self.target_bonus_selection)
        alpha_loss = alpha_loss + temperature_loss(self.log_alpha_action, entropy_action, target_action)
        metrics = {
            "losses/actor_loss": policy_loss.detach(),
            "losses/alpha_loss": alpha_loss.detach(),
            "losses/action_entropy": entropy_action,
            "losses/acting_entropy": masked_mean(entropies, acts),
            "losses/repeating_entropy": masked_mean(entropies, ~acts),
            "alpha/selection": self.alpha_selection,
            "alpha/action": self.alpha_action,
        }
        return policy_loss + alpha_loss, metrics  # they share no parameter: one backward pass serves both

    def selection_loss(self, batch: dict[str, Tensor]) -> tuple[Tensor, Metrics]:
        """Eq. 8 or Eq. 9 for β over the rows that have a previous action."""
        obs, prev_actions = batch["obs"], batch["prev_actions"]
        selection_logits = self.selection(obs, prev_actions)
        with torch.no_grad():
            if self.exact:
                act_masks = self.schemas
            else:
                act_masks = sample_act_mask(selection_logits, self.args.num_selection_samples)
            chunks = act_masks.split(SCHEMAS_AT_ONCE)
            values = torch.cat([self.schema_values(obs, prev_actions, chunk) for chunk in chunks])  # (K, batch)
        if self.exact:
            objective = exact_selection_objective(selection_logits, act_masks, values)
        else:
            objective = sampled_selection_objective(selection_logits, act_masks, values, self.args.selection_baseline)
        bonus = selection_bonus(selection_logits, self.args.act_prior)
        has_previous = 1 - batch["first"]
        loss = -masked_mean(objective + self.alpha_selection * bonus, has_previous)
        logits = selection_logits.detach()
        act_probability = torch.sigmoid(logits)
        undecided = ((act_probability > 0.25) & (act_probability < 0.75)).float().mean(-1)
        metrics = {
            "losses/selection_loss": loss.detach(),
            "repetition/selection_bonus": masked_mean(bonus.detach(), has_previous),
            "repetition/selection_entropy": masked_mean(selection_entropy(logits), has_previous),
            "repetition/undecided": masked_mean(undecided, has_previous),
            "repetition/act_probability": has_previous @ act_probability / has_previous.sum().clamp(min=1),
        }
        return loss, metrics

    def schema_values(self, obs: Tensor, prev_actions: Tensor, act_masks: Tensor) -> Tensor:
        """f(b) = min(Q1, Q2)(s, a_b) - α_π·log π(â_b | s, a_mix,b) for many schemas of each state, (K, batch).

        A surplus of entropy is none on average, so it is left out.
        """
        act_masks = act_masks.expand(-1, obs.shape[0], -1)
        actions, log_prob = act_given_mask(self.policy, obs, prev_actions, act_masks)
        values = self.clipped_value(obs, actions)
        if self.args.action_entropy == "surplus":
            return values
        return action_objective(values, self.joint_log_prob(log_prob, act_masks), self.alpha_action)

    def clipped_value(self, obs: Tensor, actions: Tensor) -> Tensor:
        return torch.minimum(self.q1(obs, actions), self.q2(obs, actions))

    def joint_log_prob(self, log_prob: Tensor, act_mask: Tensor) -> Tensor:
        """log π(â | s, a⁻, b) over the dimensions that count; as a surplus, plus the target entropy of each of them."""
        if self.args.action_entropy == "surplus":
            log_prob = log_prob + self.args.target_action_entropy
        return (log_prob * self.counted(act_mask)).sum(-1)

    def counted(self, act_mask: Tensor) -> Tensor:
        """Which dimensions' entropy counts: all, as the equations are written, or those that act."""
        return (torch.ones_like(act_mask) if self.args.action_entropy == "all" else act_mask).float()

    @property
    def alpha_selection(self) -> Tensor:
        return self.log_alpha_selection.detach().exp()

    @property
    def alpha_action(self) -> Tensor:
        return self.log_alpha_action.detach().exp()


def n_step_rows(played: list[dict], next_obs: np.ndarray, terminated: bool, ended: bool, args: Args) -> Iterator[dict]:
    """Takes off the steps played what is complete: the oldest step if there are n, all of them if the episode ended.

    A row has Σ γ^i·r_i over the m ≤ n steps from its own on, γ^m, and the state and last action to go on from.
    """
    while played and (ended or len(played) == args.n_step):
        ahead = {"next_obs": next_obs, "last_actions": played[-1]["actions"], "terminated": terminated}
        ahead["rewards"] = sum(args.gamma**i * step["rewards"] for i, step in enumerate(played))
        ahead["discounts"] = args.gamma ** len(played)
        yield played.pop(0) | ahead


def train(args: Args) -> Path:
    """Algorithm 1. Returns the run directory."""
    check_args(args)
    device = prepare(args)
    env, noise = make_env(args.env_id), Noise(device)
    (obs_dim,), (act_dim,) = env.observation_space.shape, env.action_space.shape
    agent = Agent(obs_dim, act_dim, args, device)
    fields = {
        "obs": (obs_dim,),
        "prev_actions": (act_dim,),
        "actions": (act_dim,),
        "rewards": (),  # of the steps up to next_obs, discounted
        "discounts": (),  # γ to the power of their number
        "next_obs": (obs_dim,),
        "last_actions": (act_dim,),  # what was played before next_obs: with one step, actions
        "terminated": (),
        "first": (),  # a⁻ does not exist, prev_actions is zero
    }
    buffer = ReplayBuffer(min(args.buffer_size, args.total_timesteps), fields, device, args.buffer_device)

    with Run(__file__, args, agent, {"replay": buffer}, device) as run:
        (obs, _), prev_action, played = env.reset(seed=run.episode_seed()), None, []
        for step in run.steps():
            if step <= args.learning_starts:
                if prev_action is None:
                    may_repeat = agent.may_repeat(noise)
                action = agent.random_action(prev_action, may_repeat, noise)
            else:
                action, _ = agent.act(obs, prev_action, noise)
            next_obs, reward, terminated, truncated, info = env.step(action)
            first = prev_action is None
            previous = np.zeros_like(action) if first else prev_action
            played.append({"obs": obs, "prev_actions": previous, "actions": action, "rewards": reward, "first": first})
            for row in n_step_rows(played, next_obs, terminated, terminated or truncated, args):
                buffer.add(**row)
            obs, prev_action = next_obs, action
            if step > args.learning_starts:
                run.record(agent.update(buffer.sample(args.batch_size), step))
            if terminated or truncated:
                run.end_episode(info["episode"])
                (obs, _), prev_action = env.reset(seed=run.episode_seed()), None
    return run.directory


if __name__ == "__main__":
    train(parse_args(Args))
