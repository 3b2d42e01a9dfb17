"""TAAC: temporally abstract actor-critic, closed-loop repetition of the whole action.

At every step an actor π proposes a candidate action; a switch β, which is a softmax over the critics' values of both,
executes the candidate or repeats the previous action. The critics learn from compare-through multi-step returns.

Yu, Xu and Zhang, "TAAC: Temporally Abstract Actor-Critic for Continuous Control", NeurIPS 2021.
Details, metrics and results: docs/baselines.md.

    python taac_continuous_action.py --env-id LunarLanderContinuous-v3 --total-timesteps 100000
"""

import copy
import math
from collections.abc import Callable
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
    """how many sequences an update uses"""
    hidden_dim: int = 256
    """width of the hidden layers"""
    gamma: float = 0.99
    """the discount factor"""
    tau: float = 0.005
    """how far the target networks move towards the online ones at each update"""
    learning_rate: float = 3e-4
    """learning rate of everything: actor, critics and the two temperatures"""

    td_length: int = 4
    """how many consecutive observations a sequence has; the returns of its steps bootstrap at the last one at latest
    (2: one-step targets)"""
    advantage_clip: bool = False
    """let the switch see no advantage Q(s, â) - Q(s, a⁻) below 0, so that it acts with probability 0.5 at least"""
    action_min_prob: float = 0.184
    """π's target entropy is log(2p) per dimension, that of a uniform density on this share p of [-1, 1]; 0.184 gives
    SAC's -1"""
    initial_std: float = 1.0
    """about the standard deviation of π before its tanh, untrained"""
    log_std_min: float = -10.0
    """log standard deviations below are raised to it"""
    log_std_max: float = 2.0
    """log standard deviations above are lowered to it"""
    reward_normaliser: Literal["off", "full", "scale"] = "off"
    """full: learn from rewards less their running mean, in running standard deviations; scale: in running root mean
    squares, nothing subtracted"""
    reward_clip: float = 5.0
    """normalised rewards stay within ± this"""
    warmup_repeats: bool = True
    """repeat at random, half of the time, during the random warm-up, as the authors do; off, it always acts there"""


NORMALISER_SPEED = 8.0  # its newest batch weighs 8/(8 + k) after k batches, so that old rewards are forgotten
# β's target entropy: that of a 95/5 split, as in the authors' settings; 0.1985 nats.
TARGET_ENTROPY_SELECTION = -0.95 * math.log(0.95) - 0.05 * math.log(0.05)


def check_args(args: Args) -> None:
    check_run_args(args)
    require(args, "at least 2, which gives one-step targets", lambda value: value >= 2, "td_length")
    positive = ("learning_rate", "initial_std", "reward_clip")
    require(args, "finite and above 0", lambda value: 0 < value < math.inf, *positive)
    require(args, "in (0, 1]", lambda value: 0 < value <= 1, "action_min_prob")
    require(args, "finite", math.isfinite, "log_std_min", "log_std_max")
    if args.log_std_min >= args.log_std_max:
        fail(f"--log-std-min {args.log_std_min} must be below --log-std-max {args.log_std_max}")
    if args.buffer_size < args.td_length - 1:
        fail(f"--buffer-size {args.buffer_size} cannot hold the {args.td_length - 1} steps of one sequence")


# Networks.


class StateActionMLP(nn.Module):
    """(s, a) → hidden → hidden → outputs, with ReLU."""

    def __init__(self, obs_dim: int, act_dim: int, outputs: int, hidden_dim: int):
        super().__init__()
        self.fc1 = nn.Linear(obs_dim + act_dim, hidden_dim)
        self.fc2 = nn.Linear(hidden_dim, hidden_dim)
        self.fc3 = nn.Linear(hidden_dim, outputs)

    def forward(self, obs: Tensor, actions: Tensor) -> Tensor:
        x = self.fc1(torch.cat([obs, actions], dim=-1)).relu_()
        return self.fc3(self.fc2(x).relu_())


class Critic(StateActionMLP):
    """Q(s, a)."""

    def forward(self, obs: Tensor, actions: Tensor) -> Tensor:
        return super().forward(obs, actions).squeeze(-1)


class ActionPolicy(StateActionMLP):
    """π(â | s, a⁻): mean and log standard deviation of a tanh-squashed Gaussian."""

    def __init__(self, obs_dim: int, act_dim: int, args: Args):
        super().__init__(obs_dim, act_dim, 2 * act_dim, args.hidden_dim)
        self.initial_log_std = math.log(args.initial_std)
        self.log_std_min, self.log_std_max = args.log_std_min, args.log_std_max

    def forward(self, obs: Tensor, prev_actions: Tensor) -> tuple[Tensor, Tensor]:
        mean, raw_log_std = super().forward(obs, prev_actions).chunk(2, dim=-1)
        return mean, (raw_log_std + self.initial_log_std).clamp(self.log_std_min, self.log_std_max)


class RewardNormaliser(nn.Module):
    """r ← clip((r - m)/√(m₂ - m²), ±c), with running means m of r and m₂ of r²; to scale only, m is 0.

    It normalises a batch by statistics that the batch itself is part of. All state is in buffers, so that checkpoints
    have it.
    """

    def __init__(self, subtract_mean: bool, clip: float):
        super().__init__()
        self.subtract_mean, self.clip = subtract_mean, clip
        for name in ("mean", "square", "batches"):
            self.register_buffer(name, torch.zeros(()))

    @torch.no_grad()
    def forward(self, rewards: Tensor) -> Tensor:
        rate = NORMALISER_SPEED / (NORMALISER_SPEED + self.batches)
        self.mean += rate * (rewards.mean() - self.mean)
        self.square += rate * (rewards.square().mean() - self.square)
        self.batches += 1
        mean = self.mean if self.subtract_mean else torch.zeros_like(self.mean)
        std = ((self.square - mean.square()).clamp(min=0) + 1e-10).sqrt()
        return ((rewards - mean) / std).clamp(-self.clip, self.clip)


# Decision: how an action is chosen.


def squashed_gaussian(mean: Tensor, log_std: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """tanh(mean + std·noise) and the log-density of each dimension."""
    pre_tanh = mean + log_std.exp() * noise
    log_prob = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)
    log_prob = log_prob - 2 * (math.log(2) - pre_tanh - F.softplus(-2 * pre_tanh))  # log(1 - tanh²), stable
    return torch.tanh(pre_tanh), log_prob


def propose(policy: ActionPolicy, obs: Tensor, prev_actions: Tensor) -> tuple[Tensor, Tensor]:
    """The candidate â ~ π(· | s, a⁻), reparameterised, and log π(â | s, a⁻)."""
    mean, log_std = policy(obs, prev_actions)
    candidate, log_prob = squashed_gaussian(mean, log_std, torch.randn_like(mean))
    return candidate, log_prob.sum(-1)


def choice_values(
    q1: Critic, q2: Critic, obs: Tensor, prev_actions: Tensor, candidate: Tensor
) -> tuple[Tensor, Tensor]:
    """Q(s, a⁻) and Q(s, â), each the smaller of the two critics'."""
    repeat_values = torch.minimum(q1(obs, prev_actions), q2(obs, prev_actions))
    act_values = torch.minimum(q1(obs, candidate), q2(obs, candidate))
    return repeat_values, act_values


def selection_logits(repeat_values: Tensor, act_values: Tensor, alpha_selection: Tensor, clip: bool) -> Tensor:
    """Logits of β(act | s, a⁻, â): a softmax over {Q(s, a⁻), Q(s, â)}/α_β is a sigmoid of their difference."""
    advantage = act_values - repeat_values
    return (advantage.clamp(min=0) if clip else advantage) / alpha_selection.clamp(min=1e-10)


def sample_act_mask(selection_logits: Tensor) -> Tensor:
    """b ~ β: True acts, False repeats."""
    return torch.rand_like(selection_logits) < torch.sigmoid(selection_logits)


def draw_act_mask(selection_logits: Tensor, noise: Noise) -> Tensor:
    """b as it is played: b ~ β, or of a greedy episode b = 1 where β(act) > 0.5. Of shape (…, 1), one bit for all."""
    return noise.uniform(selection_logits.shape[-1]) < torch.sigmoid(selection_logits)


def selection_entropy(selection_logits: Tensor) -> Tensor:
    """Entropy of β in closed form; it is even in the logit, and |logit| keeps it exact where β is certain."""
    size = selection_logits.abs()
    return F.softplus(-size) + size * torch.sigmoid(-size)


# Losses.


def state_value(act_probability: Tensor, repeat_values: Tensor, act_values: Tensor) -> Tensor:
    """V(s, a⁻) = β(repeat)·Q(s, a⁻) + β(act)·Q(s, â), without an entropy bonus."""
    return (1 - act_probability) * repeat_values + act_probability * act_values


def bellman_target(rewards: Tensor, terminated: Tensor, ahead: Tensor, gamma: float) -> Tensor:
    """The reward and what lies ahead. A time limit does not count as terminated: the target bootstraps through it."""
    return rewards + gamma * (1 - terminated) * ahead


def compare_through_returns(
    rewards: Tensor, terminated: Tensor, act_mask: Tensor, next_act_mask: Tensor, next_values: Tensor, gamma: float
) -> Tensor:
    """The compare-through operator: the return of each step of the sequences, all (batch, length).

    Step n's stored decision is act_mask[:, n]; next_act_mask[:, n] is a fresh draw of the one after it and
    next_values[:, n] is V(s_{n+1}, a_n). A return goes on along the stored steps while both decisions repeat, since the
    current policy would then do the same, and takes V where either acts and at the sequence's end.
    """
    returns = [bellman_target(rewards[:, -1], terminated[:, -1], next_values[:, -1], gamma)]  # from last to first
    for n in reversed(range(rewards.shape[1] - 1)):
        acts = act_mask[:, n + 1] | next_act_mask[:, n]
        ahead = torch.where(acts, next_values[:, n], returns[-1])
        returns.append(bellman_target(rewards[:, n], terminated[:, n], ahead, gamma))
    return torch.stack(returns[::-1], dim=1)


def actor_objective(act_probability: Tensor, act_values: Tensor, log_prob: Tensor, alpha_action: Tensor) -> Tensor:
    """What π maximises: β(act)·Q(s, â) - α_π·log π(â | s, a⁻), with β as a weight that has no gradient."""
    return act_probability * act_values - alpha_action * log_prob


def temperature_loss(log_alpha: Tensor, entropy: Tensor, target_entropy: float) -> Tensor:
    """α grows while the entropy is below its target and shrinks while it is above."""
    return log_alpha * (entropy - target_entropy)


def masked_mean(values: Tensor, keep: Tensor) -> Tensor:
    """Mean over the entries to keep, without a shape that depends on the data; 0 if there are none."""
    return (values * keep).sum() / keep.sum().clamp(min=1)


class Agent(nn.Module):
    """π, twin critics with their targets, and the two temperatures. The switch β has no parameters of its own."""

    acting = ("policy", "q1", "q2")  # what `act` needs of it
    bits = 1  # of β, for all dimensions together

    def __init__(self, obs_dim: int, act_dim: int, args: Args, device: torch.device):
        super().__init__()
        self.obs_dim, self.act_dim, self.args, self.device = obs_dim, act_dim, args, device
        self.target_entropy_action = act_dim * math.log(2 * args.action_min_prob)

        with device:
            self.policy = ActionPolicy(obs_dim, act_dim, args)
            self.q1 = Critic(obs_dim, act_dim, 1, args.hidden_dim)
            self.q2 = Critic(obs_dim, act_dim, 1, args.hidden_dim)
            self.log_alpha_selection = nn.Parameter(torch.zeros(()))
            self.log_alpha_action = nn.Parameter(torch.zeros(()))
            if args.reward_normaliser != "off":
                self.normalise_rewards = RewardNormaliser(args.reward_normaliser == "full", args.reward_clip)
        self.q1_target = copy.deepcopy(self.q1).requires_grad_(False)
        self.q2_target = copy.deepcopy(self.q2).requires_grad_(False)
        self.critic_parameters = [*self.q1.parameters(), *self.q2.parameters()]
        self.target_parameters = [*self.q1_target.parameters(), *self.q2_target.parameters()]

        critics = Adam(self.critic_parameters, args.learning_rate)
        policy = Adam(self.policy.parameters(), args.learning_rate)
        alphas = Adam([self.log_alpha_selection, self.log_alpha_action], args.learning_rate)
        self.optimizers = {"critics": critics, "policy": policy, "alphas": alphas}
        self.update_critics = Minimiser(self.critic_loss, critics, compile=args.compile)
        self.update_policy = Minimiser(self.policy_loss, policy, alphas, compile=args.compile)

    @torch.inference_mode()
    def act(
        self,
        obs: np.ndarray,
        prev_actions: np.ndarray | None,
        noise: Noise,
        select: Callable[[Tensor, Noise], Tensor] = draw_act_mask,
    ) -> tuple[np.ndarray, int]:
        """â ~ π, then b ~ β, for one step. Another rule may take β's place as `select`."""
        first = prev_actions is None
        previous = np.zeros((*obs.shape[:-1], self.act_dim), np.float32) if first else prev_actions
        state, previous = upload(obs, self.device), upload(previous, self.device)
        mean, log_std = self.policy(state, previous)
        candidate, _ = squashed_gaussian(mean, log_std, noise.normal(self.act_dim))
        if first:  # nothing to repeat: it acts, while the authors' first step may repeat a zero action
            return candidate.cpu().numpy(), 1
        logits = self.selection_logits(*choice_values(self.q1, self.q2, state, previous, candidate))
        act_mask = select(logits[..., None], noise)
        return torch.where(act_mask, candidate, previous).cpu().numpy(), 1

    def random_action(self, prev_action: np.ndarray | None, noise: Noise) -> np.ndarray:
        """For the warm-up: uniform or, if there is a previous action, as often that one."""
        candidate, coin = noise.uniform(self.act_dim) * 2 - 1, noise.uniform(self.bits)
        return candidate.cpu().numpy() if prev_action is None or coin < 0.5 else prev_action

    def update(self, batch: dict[str, Tensor], step: int) -> Metrics:
        """One update of everything."""
        if self.args.reward_normaliser != "off":
            batch = batch | {"rewards": self.normalise_rewards(batch["rewards"])}
        metrics = self.update_critics(batch) | self.update_policy(batch)
        soft_update(self.target_parameters, self.critic_parameters, self.args.tau)
        return metrics

    def critic_loss(self, batch: dict[str, Tensor]) -> tuple[Tensor, Metrics]:
        """Both critics against the compare-through returns of every step."""
        with torch.no_grad():
            next_obs, actions = batch["next_obs"], batch["actions"]
            candidate, _ = propose(self.policy, next_obs, actions)
            logits = self.selection_logits(*choice_values(self.q1, self.q2, next_obs, actions, candidate))
            next_values = choice_values(self.q1_target, self.q2_target, next_obs, actions, candidate)
            target = compare_through_returns(
                batch["rewards"],
                batch["terminated"],
                batch["act_mask"].bool(),
                sample_act_mask(logits),
                state_value(torch.sigmoid(logits), *next_values),
                self.args.gamma,
            )
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
        """π's loss plus that of both temperatures."""
        obs, prev_actions, first = batch["obs"], batch["prev_actions"], batch["first"].bool()
        candidate, log_prob = propose(self.policy, obs, prev_actions)
        repeat_values, act_values = choice_values(self.q1, self.q2, obs, prev_actions, candidate)
        with torch.no_grad():
            logits = self.selection_logits(repeat_values, act_values)
            act_probability = torch.sigmoid(logits).masked_fill(first, 1)  # where a⁻ does not exist, π acts
            entropy_selection = masked_mean(selection_entropy(logits), ~first)
        policy_loss = -actor_objective(act_probability, act_values, log_prob, self.alpha_action).mean()
        entropy_action = -log_prob.detach().mean()
        alpha_loss = temperature_loss(self.log_alpha_selection, entropy_selection, TARGET_ENTROPY_SELECTION)
        alpha_loss = alpha_loss + temperature_loss(self.log_alpha_action, entropy_action, self.target_entropy_action)
        metrics = {
            "losses/actor_loss": policy_loss.detach(),
            "losses/alpha_loss": alpha_loss.detach(),
            "losses/action_entropy": entropy_action,
            "alpha/selection": self.alpha_selection,
            "alpha/action": self.alpha_action,
            "repetition/selection_entropy": entropy_selection,
            "repetition/act_probability": masked_mean(act_probability, ~first)[None],
        }
        return policy_loss + alpha_loss, metrics  # they share no parameter: one backward pass serves both

    def selection_logits(self, repeat_values: Tensor, act_values: Tensor) -> Tensor:
        return selection_logits(repeat_values, act_values, self.alpha_selection, self.args.advantage_clip)

    @property
    def alpha_selection(self) -> Tensor:
        return self.log_alpha_selection.detach().exp()

    @property
    def alpha_action(self) -> Tensor:
        return self.log_alpha_action.detach().exp()


def sample_sequences(buffer: ReplayBuffer, length: int, batch_size: int) -> dict[str, Tensor]:
    """Steps in the order in which they were taken, (batch, length), never across the ring's write position.

    A sequence may run on into the next episode, as the authors' do, so that all steps are trained on equally often (but
    for the few at the ring's ends). No return gets across: an episode's first step acts, and there returns bootstrap.
    """
    oldest = buffer.added - len(buffer)
    earliest_end = min(oldest + length - 1, buffer.added - 1)
    ends = torch.randint(earliest_end, buffer.added, (batch_size, 1), device=buffer.rows.device)
    steps = ends + torch.arange(1 - length, 1, device=ends.device)
    steps = steps.clamp(min=0)  # with too few steps yet, the very first one fills up: it acts, so no harm is done
    return buffer.gather(steps % buffer.capacity)


def train(args: Args) -> Path:
    """The paper's algorithm. Returns the run directory."""
    check_args(args)
    device = prepare(args)
    env, noise = make_env(args.env_id), Noise(device)
    (obs_dim,), (act_dim,) = env.observation_space.shape, env.action_space.shape
    agent = Agent(obs_dim, act_dim, args, device)
    fields = {
        "obs": (obs_dim,),
        "prev_actions": (act_dim,),
        "actions": (act_dim,),
        "act_mask": (),  # b
        "rewards": (),
        "next_obs": (obs_dim,),
        "terminated": (),
        "first": (),  # a⁻ does not exist, prev_actions is zero
    }
    buffer = ReplayBuffer(min(args.buffer_size, args.total_timesteps), fields, device, args.buffer_device)

    with Run(__file__, args, agent, {"replay": buffer}, device) as run:
        (obs, _), prev_action = env.reset(seed=run.episode_seed()), None
        for step in run.steps():
            if step <= args.learning_starts:
                action = agent.random_action(prev_action if args.warmup_repeats else None, noise)
            else:
                action, _ = agent.act(obs, prev_action, noise)
            next_obs, reward, terminated, truncated, info = env.step(action)
            first = prev_action is None
            buffer.add(
                obs=obs,
                prev_actions=np.zeros_like(action) if first else prev_action,
                actions=action,
                act_mask=first or not np.array_equal(action, prev_action),  # a candidate that equals a⁻ repeats it
                rewards=reward,
                next_obs=next_obs,
                terminated=terminated,
                first=first,
            )
            obs, prev_action = next_obs, action
            if step > args.learning_starts:
                run.record(agent.update(sample_sequences(buffer, args.td_length - 1, args.batch_size), step))
            if terminated or truncated:
                run.end_episode(info["episode"])
                (obs, _), prev_action = env.reset(seed=run.episode_seed()), None
    return run.directory


if __name__ == "__main__":
    train(parse_args(Args))
