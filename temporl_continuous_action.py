"""TempoRL: learning when to act, for continuous control with DDPG.

At every decision a skip network chooses for how many steps the actor's action runs, open loop.

Biedenkapp, Rajan, Hutter and Lindauer, "TempoRL: Learning When to Act", ICML 2021. Details, metrics and results:
docs/baselines.md.

    python temporl_continuous_action.py --env-id LunarLanderContinuous-v3 --total-timesteps 100000
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
    learning_starts: int = 1000
    """how many steps of random actions come before the first update"""
    buffer_size: int = 1_000_000
    """how many transitions the replay buffer holds, and how many intervals that of the skip network"""
    batch_size: int = 256
    """how many transitions an update uses"""
    hidden_dim: int = 400
    """width of the first hidden layer; the second has three quarters of it, so that 400 gives the authors' 400 and 300,
    and 128 gives 128 and 96 with a tenth of the weights between them"""
    gamma: float = 0.99
    """the discount factor"""
    tau: float = 0.005
    """how far the target networks move towards the online ones at each update"""
    learning_rate: float = 1e-3
    """learning rate of the actor, the critic and the skip network"""
    exploration_noise: float = 0.1
    """standard deviation of the Gaussian noise on the actor's actions, which lie in [-1, 1]"""
    max_skip: int = 20
    """J, the largest number of steps that one decision may run"""
    skip_epsilon: float = 0.1
    """probability of a uniformly random number of steps instead of the best one"""


def check_args(args: Args) -> None:
    check_run_args(args)
    require(args, "at least 1", lambda value: value >= 1, "max_skip")
    require(args, "finite and above 0", lambda value: 0 < value < math.inf, "learning_rate")
    require(args, "finite and at least 0", lambda value: 0 <= value < math.inf, "exploration_noise")
    require(args, "in [0, 1]", lambda value: 0 <= value <= 1, "skip_epsilon")


# Networks.


class MLP(nn.Module):
    """inputs → hidden → ¾ hidden → outputs, with ReLU: the authors' 400 and 300."""

    def __init__(self, inputs: int, outputs: int, hidden_dim: int):
        super().__init__()
        narrower = math.ceil(0.75 * hidden_dim)
        self.fc1 = nn.Linear(inputs, hidden_dim)
        self.fc2 = nn.Linear(hidden_dim, narrower)
        self.fc3 = nn.Linear(narrower, outputs)

    def forward(self, *inputs: Tensor) -> Tensor:
        x = self.fc1(torch.cat(inputs, dim=-1)).relu_()
        return self.fc3(self.fc2(x).relu_())


class Actor(MLP):
    """π(s), deterministic, in [-1, 1]^|A|."""

    def forward(self, obs: Tensor) -> Tensor:
        return torch.tanh(super().forward(obs))


class Critic(MLP):
    """Q(s, a)."""

    def forward(self, obs: Tensor, actions: Tensor) -> Tensor:
        return super().forward(obs, actions).squeeze(-1)


class SkipNetwork(MLP):
    """Q(s, j | a): the value of running a for j = 1, …, J steps and then following π, (s, a) → (batch, J)."""


# Decision: how an action is chosen, and for how many steps it runs.


def best_skip(values: Tensor) -> Tensor:
    """argmax_j Q(s, j | a), from 1."""
    return values.argmax(-1) + 1


def epsilon_greedy(best: Tensor, max_skip: int, epsilon: float, noise: Noise) -> Tensor:
    """The best number of steps or, with probability ε, a uniform one of 1, …, J; greedy episodes take the best."""
    chance, share = noise.uniform(2).unbind(-1)
    takes_best = noise.greedy | (chance >= epsilon)
    return torch.where(takes_best, best, 1 + (share * max_skip).long())  # share < 1, so share·J < J, even rounded


# Experience: what the skip network learns from.


def intervals_ending_here(
    segment: list[tuple[np.ndarray, float]], gamma: float
) -> Iterator[tuple[np.ndarray, float, int]]:
    """The intervals of a segment of steps (s, r) that end with its last: first s, Σ_k γ^k·r_k, and length of each.

    Taken after every step, they are all intervals of the executed segment ("connectedness"): each is what a decision
    to run the same action from there, for so long, would have led to.
    """
    reward_sum = 0.0
    for length, (obs, reward) in enumerate(reversed(segment), start=1):
        reward_sum = reward + gamma * reward_sum
        yield obs, reward_sum, length


# Losses.


def bellman_target(rewards: Tensor, discounts: Tensor | float, terminated: Tensor, next_values: Tensor) -> Tensor:
    """r + γ·(1-d)·Q'(s', π'(s')), with γ^m after m steps.

    A time limit does not count as terminated, not even for intervals, where it does in the authors' code.
    """
    return rewards + discounts * (1 - terminated) * next_values


def skip_value(values: Tensor, lengths: Tensor) -> Tensor:
    """Q(s, j | a) of the length that was run."""
    return values.gather(-1, lengths.long()[:, None] - 1).squeeze(-1)


class Agent(nn.Module):
    """DDPG's actor and critic with their targets, and the skip network."""

    acting = ("actor", "skip")  # what `act` needs of it

    def __init__(self, obs_dim: int, act_dim: int, args: Args, device: torch.device):
        super().__init__()
        self.obs_dim, self.act_dim, self.args, self.device = obs_dim, act_dim, args, device
        with device:
            self.actor = Actor(obs_dim, act_dim, args.hidden_dim)
            self.critic = Critic(obs_dim + act_dim, 1, args.hidden_dim)
            self.skip = SkipNetwork(obs_dim + act_dim, args.max_skip, args.hidden_dim)
        self.actor_target = copy.deepcopy(self.actor).requires_grad_(False)
        self.critic_target = copy.deepcopy(self.critic).requires_grad_(False)
        self.online_parameters = [*self.actor.parameters(), *self.critic.parameters()]
        self.target_parameters = [*self.actor_target.parameters(), *self.critic_target.parameters()]

        actor = Adam(self.actor.parameters(), args.learning_rate)
        critic = Adam(self.critic.parameters(), args.learning_rate)
        skip = Adam(self.skip.parameters(), args.learning_rate)
        self.optimizers = {"actor": actor, "critic": critic, "skip": skip}
        self.update_actor = Minimiser(self.actor_loss, actor, compile=args.compile)
        self.update_critic = Minimiser(self.critic_loss, critic, compile=args.compile)
        self.update_skip = Minimiser(self.skip_loss, skip, compile=args.compile)

    @torch.inference_mode()
    def act(self, obs: np.ndarray, prev_actions: np.ndarray | None, noise: Noise) -> tuple[np.ndarray, np.ndarray]:
        """π(s) with exploration noise, and ε-greedily for how many steps; greedy episodes have neither noise nor ε."""
        args, state = self.args, upload(obs, self.device)
        actions = (self.actor(state) + args.exploration_noise * noise.normal(self.act_dim)).clamp(-1, 1)
        best = best_skip(self.skip(state, actions))
        steps = epsilon_greedy(best, args.max_skip, args.skip_epsilon, noise)
        return actions.cpu().numpy(), steps.cpu().numpy()

    def update(self, transitions: dict[str, Tensor], intervals: dict[str, Tensor]) -> Metrics:
        """One update each of critic, actor, targets and skip network."""
        metrics = self.update_critic(transitions) | self.update_actor(transitions)
        soft_update(self.target_parameters, self.online_parameters, self.args.tau)
        return metrics | self.update_skip(intervals)

    def critic_loss(self, batch: dict[str, Tensor]) -> tuple[Tensor, Metrics]:
        """DDPG's critic, from single steps."""
        with torch.no_grad():
            target = self.target(batch, self.args.gamma)
        q = self.critic(batch["obs"], batch["actions"])
        loss = F.mse_loss(q, target)
        return loss, {"losses/qf1_values": q.detach().mean(), "losses/qf_loss": loss.detach()}

    def actor_loss(self, batch: dict[str, Tensor]) -> tuple[Tensor, Metrics]:
        """The deterministic policy gradient."""
        loss = -self.critic(batch["obs"], self.actor(batch["obs"])).mean()
        return loss, {"losses/actor_loss": loss.detach()}

    def skip_loss(self, batch: dict[str, Tensor]) -> tuple[Tensor, Metrics]:
        """The skip network against what was collected on the way plus the critic's value of where it led."""
        with torch.no_grad():
            target = self.target(batch, self.args.gamma ** batch["lengths"])
        values = self.skip(batch["obs"], batch["actions"])
        loss = F.mse_loss(skip_value(values, batch["lengths"]), target)
        metrics = {
            "losses/skip_loss": loss.detach(),
            "losses/skip_values": values.detach().mean(),
            "repetition/best_skip": best_skip(values.detach()).float().mean(),
        }
        return loss, metrics

    def target(self, batch: dict[str, Tensor], discounts: Tensor | float) -> Tensor:
        next_values = self.critic_target(batch["next_obs"], self.actor_target(batch["next_obs"]))
        return bellman_target(batch["rewards"], discounts, batch["terminated"], next_values)


def train(args: Args) -> Path:
    """DDPG with skips. Returns the run directory."""
    check_args(args)
    device = prepare(args)
    env, noise = make_env(args.env_id), Noise(device)
    (obs_dim,), (act_dim,) = env.observation_space.shape, env.action_space.shape
    agent = Agent(obs_dim, act_dim, args, device)
    fields = {"obs": (obs_dim,), "actions": (act_dim,), "rewards": (), "next_obs": (obs_dim,), "terminated": ()}
    replay = ReplayBuffer(min(args.buffer_size, args.total_timesteps), fields, device, args.buffer_device)
    most_intervals = args.total_timesteps * (args.max_skip + 1) // 2  # a segment of J steps has J·(J+1)/2
    skips = ReplayBuffer(min(args.buffer_size, most_intervals), fields | {"lengths": ()}, device, args.buffer_device)

    with Run(__file__, args, agent, {"replay": replay, "skips": skips}, device) as run:
        (obs, _), left = env.reset(seed=run.episode_seed()), 0
        for step in run.steps():
            if left == 0:  # the last action has run its steps
                if step <= args.learning_starts:
                    action = (torch.rand(act_dim) * 2 - 1).numpy()
                    left = int(torch.randint(1, args.max_skip + 1, ()))
                else:
                    action, left = agent.act(obs, None, noise)
                segment = []  # the steps of this decision so far
            next_obs, reward, terminated, truncated, info = env.step(action)
            left -= 1
            end = {"actions": action, "next_obs": next_obs, "terminated": terminated}
            replay.add(obs=obs, rewards=reward, **end)
            segment.append((obs, reward))
            for start_obs, reward_sum, length in intervals_ending_here(segment, args.gamma):
                skips.add(obs=start_obs, rewards=reward_sum, lengths=length, **end)
            obs = next_obs
            if step > args.learning_starts:
                run.record(agent.update(replay.sample(args.batch_size), skips.sample(args.batch_size)))
            if terminated or truncated:
                run.end_episode(info["episode"])
                (obs, _), left = env.reset(seed=run.episode_seed()), 0
    return run.directory


if __name__ == "__main__":
    train(parse_args(Args))
