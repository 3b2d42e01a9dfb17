"""SAC: soft actor-critic with twin critics and a tuned temperature, as in CleanRL.

Haarnoja, Zhou, Abbeel and Levine, "Soft Actor-Critic: Off-Policy Maximum Entropy Deep Reinforcement Learning with a
Stochastic Actor", ICML 2018; the temperature is from Haarnoja et al., "Soft Actor-Critic Algorithms and Applications",
2018. Details, metrics and results: docs/baselines.md.

    python sac_continuous_action.py --env-id LunarLanderContinuous-v3 --total-timesteps 100000
"""

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

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
    """learning rate of the actor"""
    q_lr: float = 1e-3
    """learning rate of the critics and of the temperature"""
    policy_frequency: int = 2
    """update the actor every so many steps, then so many times"""
    target_network_frequency: int = 1
    """move the target networks every so many steps"""
    n_step: int = 1
    """over how many steps, as they were played, the critics' targets sum rewards before they bootstrap; the entropy
    bonus is that of the state they bootstrap from"""
    entropy_in_target: bool = True
    """add the entropy bonus to the critics' target; off, the actor alone has it, as in SDAR's Eq. 6"""
    alpha: float = 0.2
    """the temperature when it is not tuned"""
    autotune: bool = True
    """tune the temperature, from 1 on, so that the actor's entropy stays at -|A|"""


def check_args(args: Args) -> None:
    check_run_args(args)
    require(args, "at least 1", lambda value: value >= 1, "policy_frequency", "target_network_frequency", "n_step")
    first_row = f"at least {args.n_step - 1} with --n-step {args.n_step}"
    require(args, first_row, lambda value: value >= args.n_step - 1, "learning_starts")
    require(args, "finite and at least 0", lambda value: 0 <= value < math.inf, "policy_lr", "q_lr", "alpha")


# Networks.


class Critic(nn.Module):
    """Q(s, a)."""

    def __init__(self, obs_dim: int, act_dim: int, hidden_dim: int):
        super().__init__()
        self.fc1 = nn.Linear(obs_dim + act_dim, hidden_dim)
        self.fc2 = nn.Linear(hidden_dim, hidden_dim)
        self.fc3 = nn.Linear(hidden_dim, 1)

    def forward(self, obs: Tensor, actions: Tensor) -> Tensor:
        x = self.fc1(torch.cat([obs, actions], dim=-1)).relu_()
        return self.fc3(self.fc2(x).relu_()).squeeze(-1)


LOG_STD_MIN, LOG_STD_MAX = -5.0, 2.0


class Actor(nn.Module):
    """π(a | s): mean and log standard deviation of a tanh-squashed Gaussian."""

    def __init__(self, obs_dim: int, act_dim: int, hidden_dim: int):
        super().__init__()
        self.fc1 = nn.Linear(obs_dim, hidden_dim)
        self.fc2 = nn.Linear(hidden_dim, hidden_dim)
        self.fc3 = nn.Linear(hidden_dim, 2 * act_dim)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        mean, raw_log_std = self.fc3(self.fc2(self.fc1(obs).relu_()).relu_()).chunk(2, dim=-1)
        return mean, LOG_STD_MIN + 0.5 * (LOG_STD_MAX - LOG_STD_MIN) * (torch.tanh(raw_log_std) + 1)


# Decision: how an action is chosen.


def squashed_gaussian(mean: Tensor, log_std: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """tanh(mean + std·noise) and the log-density of each dimension."""
    pre_tanh = mean + log_std.exp() * noise
    log_prob = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)
    log_prob = log_prob - 2 * (math.log(2) - pre_tanh - F.softplus(-2 * pre_tanh))  # log(1 - tanh²), stable
    return torch.tanh(pre_tanh), log_prob


def sample_actions(actor: Actor, obs: Tensor) -> tuple[Tensor, Tensor]:
    """a ~ π(· | s), reparameterised, and log π(a | s)."""
    mean, log_std = actor(obs)
    actions, log_prob = squashed_gaussian(mean, log_std, torch.randn_like(mean))
    return actions, log_prob.sum(-1)


# Losses.


def soft_value(values: Tensor, log_prob: Tensor, alpha: Tensor) -> Tensor:
    """Q(s, a) - α·log π(a | s) with a ~ π: what the target bootstraps from and what the actor maximises."""
    return values - alpha * log_prob


def bellman_target(rewards: Tensor, discounts: Tensor, terminated: Tensor, next_values: Tensor) -> Tensor:
    """The critics' target. A time limit does not count as terminated: the target bootstraps through it."""
    return rewards + discounts * (1 - terminated) * next_values


def temperature_loss(log_alpha: Tensor, entropy: Tensor, target_entropy: float) -> Tensor:
    """-α·(log π + H), as CleanRL has it (SDAR's Eq. 10 has log α for α): α grows while the entropy is below H."""
    return log_alpha.exp() * (entropy - target_entropy)


class Agent(nn.Module):
    """The actor, twin critics with their targets, and the temperature."""

    acting = ("actor",)  # what `act` needs of it

    def __init__(self, obs_dim: int, act_dim: int, args: Args, device: torch.device):
        super().__init__()
        self.obs_dim, self.act_dim, self.args, self.device = obs_dim, act_dim, args, device
        with device:
            self.actor = Actor(obs_dim, act_dim, args.hidden_dim)
            self.q1 = Critic(obs_dim, act_dim, args.hidden_dim)
            self.q2 = Critic(obs_dim, act_dim, args.hidden_dim)
            self.log_alpha = nn.Parameter(torch.zeros(()))
        self.q1_target = copy.deepcopy(self.q1).requires_grad_(False)
        self.q2_target = copy.deepcopy(self.q2).requires_grad_(False)
        self.critic_parameters = [*self.q1.parameters(), *self.q2.parameters()]
        self.target_parameters = [*self.q1_target.parameters(), *self.q2_target.parameters()]

        critics, actor = Adam(self.critic_parameters, args.q_lr), Adam(self.actor.parameters(), args.policy_lr)
        self.optimizers = {"critics": critics, "actor": actor}
        if args.autotune:
            self.optimizers["alpha"] = Adam([self.log_alpha], args.q_lr)
        _, *policy = self.optimizers.values()
        self.update_critics = Minimiser(self.critic_loss, critics, compile=args.compile)
        self.update_policy = Minimiser(self.policy_loss, *policy, compile=args.compile)

    @torch.inference_mode()
    def act(self, obs: np.ndarray, prev_actions: np.ndarray | None, noise: Noise) -> tuple[np.ndarray, int]:
        """a ~ π(· | s), for one step; SAC does not look at the previous action."""
        mean, log_std = self.actor(upload(obs, self.device))
        actions, _ = squashed_gaussian(mean, log_std, noise.normal(self.act_dim))
        return actions.cpu().numpy(), 1

    def update(self, batch: dict[str, Tensor], step: int) -> Metrics:
        """One critic update and, every policy_frequency steps, as many of the actor and the temperature."""
        args = self.args
        metrics = self.update_critics(batch)
        if step % args.policy_frequency == 0:
            for _ in range(args.policy_frequency):
                policy_metrics = self.update_policy(batch)
            metrics = metrics | policy_metrics
        if step % args.target_network_frequency == 0:
            soft_update(self.target_parameters, self.critic_parameters, args.tau)
        return metrics

    def critic_loss(self, batch: dict[str, Tensor]) -> tuple[Tensor, Metrics]:
        """Both critics against the clipped double-Q target under π, entropy bonus included."""
        with torch.no_grad():
            next_obs = batch["next_obs"]
            next_actions, log_prob = sample_actions(self.actor, next_obs)
            next_values = torch.minimum(self.q1_target(next_obs, next_actions), self.q2_target(next_obs, next_actions))
            if self.args.entropy_in_target:
                next_values = soft_value(next_values, log_prob, self.alpha)
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
        """The actor's loss and the temperature's, for which CleanRL samples π a second time: here one sample does."""
        obs = batch["obs"]
        actions, log_prob = sample_actions(self.actor, obs)
        values = torch.minimum(self.q1(obs, actions), self.q2(obs, actions))
        actor_loss = -soft_value(values, log_prob, self.alpha).mean()
        entropy = -log_prob.detach().mean()
        metrics = {
            "losses/actor_loss": actor_loss.detach(),
            "losses/action_entropy": entropy,
            "alpha/action": self.alpha,
        }
        loss = actor_loss
        if self.args.autotune:
            alpha_loss = temperature_loss(self.log_alpha, entropy, self.target_entropy)
            loss = loss + alpha_loss  # they share no parameter: one backward pass serves both
            metrics["losses/alpha_loss"] = alpha_loss.detach()
        return loss, metrics

    @property
    def target_entropy(self) -> float:
        return -float(self.act_dim)

    @property
    def alpha(self) -> Tensor:
        return self.log_alpha.detach().exp() if self.args.autotune else torch.full_like(self.log_alpha, self.args.alpha)


def n_step_rows(played: list[dict], next_obs: np.ndarray, terminated: bool, ended: bool, args: Args) -> Iterator[dict]:
    """Takes off the steps played what is complete: the oldest step if there are n, all of them if the episode ended.

    A row has Σ γ^i·r_i over the m ≤ n steps from its own on, γ^m, and the state to go on from.
    """
    while played and (ended or len(played) == args.n_step):
        ahead = {"next_obs": next_obs, "terminated": terminated, "discounts": args.gamma ** len(played)}
        ahead["rewards"] = sum(args.gamma**i * step["rewards"] for i, step in enumerate(played))
        yield played.pop(0) | ahead


def train(args: Args) -> Path:
    """Soft actor-critic. Returns the run directory."""
    check_args(args)
    device = prepare(args)
    env, noise = make_env(args.env_id), Noise(device)
    (obs_dim,), (act_dim,) = env.observation_space.shape, env.action_space.shape
    agent = Agent(obs_dim, act_dim, args, device)
    fields = {
        "obs": (obs_dim,),
        "actions": (act_dim,),
        "rewards": (),  # of the steps up to next_obs, discounted
        "discounts": (),  # γ to the power of their number
        "next_obs": (obs_dim,),
        "terminated": (),
    }
    buffer = ReplayBuffer(min(args.buffer_size, args.total_timesteps), fields, device, args.buffer_device)

    with Run(__file__, args, agent, {"replay": buffer}, device) as run:
        (obs, _), played = env.reset(seed=run.episode_seed()), []
        for step in run.steps():
            if step <= args.learning_starts:
                action = (torch.rand(act_dim) * 2 - 1).numpy()
            else:
                action, _ = agent.act(obs, None, noise)
            next_obs, reward, terminated, truncated, info = env.step(action)
            played.append({"obs": obs, "actions": action, "rewards": reward})
            for row in n_step_rows(played, next_obs, terminated, terminated or truncated, args):
                buffer.add(**row)
            obs = next_obs
            if step > args.learning_starts:
                run.record(agent.update(buffer.sample(args.batch_size), step))
            if terminated or truncated:
                run.end_episode(info["episode"])
                obs, _ = env.reset(seed=run.episode_seed())
    return run.directory


if __name__ == "__main__":
    train(parse_args(Args))
