"""UTE: uncertainty-aware temporal extension, for continuous control with DDPG.

TempoRL whose skip network is an ensemble: how far its heads disagree about a number of steps counts for or against
that number, by a factor λ that a bandit chooses for each episode.

Lee, Park, Tang and Oh, "Learning Uncertainty-Aware Temporally-Extended Actions", AAAI 2024. Details, metrics and
results: docs/baselines.md.

    python ute_continuous_action.py --env-id LunarLanderContinuous-v3 --total-timesteps 100000
"""

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
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
    num_heads: int = 10
    """heads of the skip network, whose disagreement is the uncertainty"""
    bootstrap_probability: float = 0.5
    """probability that a head learns from a row of the batch"""
    as_published: bool = False
    """do as the authors' released code does, not as their paper says: the critic discounts every interval by γ, every
    head learns from every row, the actor learns at the critic's rows, the bandit hears of each step (in the warm-up,
    too), and a time limit is terminal"""


UNCERTAINTY_FACTORS = (-2.5, -1.5, -1.0, -0.5, 0.0, 0.5)  # λ: the bandit's arms
BANDIT_WINDOW = 50  # episodes that the bandit remembers
PUBLISHED_BANDIT_WINDOW = 500  # steps that it remembers as published
BANDIT_EPSILON = 0.1
BANDIT_BONUS = 0.5
GRADIENT_LIMIT = 10.0
CANDIDATES = 3  # rows drawn for one that the critic learns from: many do not pass its filter


def check_args(args: Args) -> None:
    check_run_args(args)
    require(args, "at least 1", lambda value: value >= 1, "max_skip", "num_heads")
    require(args, "finite and above 0", lambda value: 0 < value < math.inf, "learning_rate")
    require(args, "finite and at least 0", lambda value: 0 <= value < math.inf, "exploration_noise")
    require(args, "in [0, 1]", lambda value: 0 <= value <= 1, "skip_epsilon")
    require(args, "in (0, 1]", lambda value: 0 < value <= 1, "bootstrap_probability")


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


class SkipEnsemble(MLP):
    """Q_k(s, j | a): each head's value of running a for j = 1, …, J steps and then following π, (batch, heads, J)."""

    def __init__(self, inputs: int, heads: int, max_skip: int, hidden_dim: int):
        super().__init__(inputs, heads * max_skip, hidden_dim)  # all heads' last layers are one
        self.heads, self.max_skip = heads, max_skip

    def forward(self, obs: Tensor, actions: Tensor) -> Tensor:
        return super().forward(obs, actions).unflatten(-1, (self.heads, self.max_skip))


# Decision: how an action is chosen, for how many steps it runs, and the λ of an episode.


def best_skip(values: Tensor, uncertainty_factor: Tensor) -> Tensor:
    """argmax_j mean_k Q_k(s, j | a) + λ·std_k Q_k(s, j | a), from 1; values (…, heads, J), λ of all rows or of each."""
    return (values.mean(-2) + uncertainty_factor[..., None] * values.std(-2, correction=0)).argmax(-1) + 1


def epsilon_greedy(best: Tensor, max_skip: int, epsilon: float, noise: Noise) -> Tensor:
    """The best number of steps or, with probability ε, a uniform one of 1, …, J; greedy episodes take the best."""
    chance, share = noise.uniform(2).unbind(-1)
    takes_best = noise.greedy | (chance >= epsilon)
    return torch.where(takes_best, best, 1 + (share * max_skip).long())  # share < 1, so share·J < J, even rounded


class Bandit(nn.Module):
    """Chooses λ for each episode: sliding-window UCB on the reward per step, with some random choices.

    All state is in buffers, so that checkpoints have it. `arm` is the one of the training episode under way.
    """

    def __init__(self, window: int):
        """`window` is how many rewards it remembers."""
        super().__init__()
        self.window = window
        self.register_buffer("factors", torch.tensor(UNCERTAINTY_FACTORS))
        self.register_buffer("arms", torch.zeros(window, dtype=torch.int64))  # a ring, as are the rewards
        self.register_buffer("rewards", torch.zeros(window))
        self.register_buffer("heard", torch.zeros((), dtype=torch.int64))  # rewards, ever
        self.register_buffer("episodes", torch.zeros((), dtype=torch.int64))  # that were fed back, ever
        self.register_buffer("arm", torch.zeros((), dtype=torch.int64))

    def feed_back(self, rewards: Sequence[float]) -> None:
        """Ends the episode under way and chooses the arm of the next: each once, then ε-random or the highest bound.

        The rewards are one for the episode, its mean per step, or as published those of all steps.
        """
        rewards = torch.tensor(rewards[-self.window :], dtype=torch.float32, device=self.rewards.device)
        slots = (self.heard + torch.arange(len(rewards), device=rewards.device)) % self.window
        self.arms[slots], self.rewards[slots] = self.arm, rewards
        self.heard += len(rewards)
        self.episodes += 1
        if self.episodes < len(self.factors):
            self.arm += 1
        elif torch.rand(()) < BANDIT_EPSILON:
            self.arm.fill_(torch.randint(len(self.factors), ()))
        else:
            means, counts = self.statistics()
            self.arm.copy_((means + BANDIT_BONUS * (1 / counts).sqrt()).argmax())  # an arm that is forgotten has ∞

    def statistics(self) -> tuple[Tensor, Tensor]:
        """Mean and number of the remembered rewards of each arm; the mean of none is 0."""
        device = self.arms.device
        remembered = torch.arange(self.window, device=device) < self.heard
        played = (self.arms[:, None] == torch.arange(len(self.factors), device=device)) & remembered[:, None]
        counts = played.sum(0)
        return (played * self.rewards[:, None]).sum(0) / counts.clamp(min=1), counts

    def factor(self) -> Tensor:
        """λ of the training episode under way."""
        return self.factors.gather(0, self.arm[None])[0]  # factors[arm] does not compile

    def best_factor(self) -> Tensor:
        """λ of the arm with the highest mean; one without data cannot be it, and before any episode it is the first."""
        means, counts = self.statistics()
        return self.factors[means.where(counts > 0, -torch.inf).argmax()]


# Experience: what the skip ensemble and the critic learn from.


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
    """r + γ·(1-d)·Q'(s', π'(s')), with γ^m after m steps. A time limit does not count as terminated."""
    return rewards + discounts * (1 - terminated) * next_values


def masked_mean(values: Tensor, keep: Tensor, dim: int) -> Tensor:
    """Mean over the entries to keep, without a shape that depends on the data; 0 if there are none."""
    return (values * keep).sum(dim) / keep.sum(dim).clamp(min=1)


def first_kept(batch: dict[str, Tensor], keep: Tensor, count: int) -> tuple[dict[str, Tensor], Tensor]:
    """The first `count` rows to keep, filled up with others if there are fewer; and which of them are to keep."""
    rows = keep.byte().argsort(descending=True, stable=True)[:count]
    return {name: column[rows] for name, column in batch.items()}, keep[rows]


def ensemble_loss(values: Tensor, lengths: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    """Huber loss of each head at the length that was run, over the rows of its mask (batch, heads); mean of heads."""
    values = values.take_along_dim(lengths.long()[:, None, None] - 1, dim=-1).squeeze(-1)  # (batch, heads)
    errors = F.huber_loss(values, target[:, None].expand_as(values), reduction="none")
    return masked_mean(errors, mask, dim=0).mean()


def scale_and_clamp(gradients: Sequence[Tensor], heads: int) -> None:
    """The torso's gradients, which all heads add to, divided by the number of heads; then each kept in its limits."""
    torch._foreach_div_(gradients[:-2], heads)  # the last two, weight and bias, are the heads' own
    torch._foreach_clamp_min_(gradients, -GRADIENT_LIMIT)
    torch._foreach_clamp_max_(gradients, GRADIENT_LIMIT)


class Agent(nn.Module):
    """DDPG's actor and critic with their targets, the skip ensemble and the bandit."""

    acting = ("actor", "skip", "bandit")  # what `act` needs of it

    def __init__(self, obs_dim: int, act_dim: int, args: Args, device: torch.device):
        super().__init__()
        self.obs_dim, self.act_dim, self.args, self.device = obs_dim, act_dim, args, device
        with device:
            self.actor = Actor(obs_dim, act_dim, args.hidden_dim)
            self.critic = Critic(obs_dim + act_dim, 1, args.hidden_dim)
            self.skip = SkipEnsemble(obs_dim + act_dim, args.num_heads, args.max_skip, args.hidden_dim)
            self.bandit = Bandit(PUBLISHED_BANDIT_WINDOW if args.as_published else BANDIT_WINDOW)
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
        edit = partial(scale_and_clamp, heads=args.num_heads)
        self.update_skip = Minimiser(self.skip_loss, skip, compile=args.compile, edit=edit)

    @torch.inference_mode()
    def act(self, obs: np.ndarray, prev_actions: np.ndarray | None, noise: Noise) -> tuple[np.ndarray, np.ndarray]:
        """π(s) with exploration noise, and ε-greedily for how many steps; greedy episodes have neither noise nor ε.

        λ is that of the training episode under way, and for greedy episodes the best so far.
        """
        args, state = self.args, upload(obs, self.device)
        actions = (self.actor(state) + args.exploration_noise * noise.normal(self.act_dim)).clamp(-1, 1)
        uncertainty_factor = torch.where(noise.greedy, self.bandit.best_factor(), self.bandit.factor())
        best = best_skip(self.skip(state, actions), uncertainty_factor)
        steps = epsilon_greedy(best, args.max_skip, args.skip_epsilon, noise)
        return actions.cpu().numpy(), steps.cpu().numpy()

    def update(
        self, transitions: dict[str, Tensor], intervals: dict[str, Tensor], candidates: dict[str, Tensor]
    ) -> Metrics:
        """One update each of critic, actor, targets and skip ensemble."""
        metrics = self.update_critic(candidates)
        metrics |= self.update_actor(candidates if self.args.as_published else transitions)
        soft_update(self.target_parameters, self.online_parameters, self.args.tau)
        return metrics | self.update_skip(intervals)

    def critic_rows(self, candidates: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
        """Up to batch_size candidates no longer than what the skip ensemble would choose there, as in first_kept."""
        chosen = best_skip(self.skip(candidates["obs"], candidates["actions"]), self.bandit.factor())
        return first_kept(candidates, candidates["lengths"] <= chosen, self.args.batch_size)

    def critic_loss(self, candidates: dict[str, Tensor]) -> tuple[Tensor, Metrics]:
        """The critic from intervals that the skip ensemble would run, m steps discounted by γ^m."""
        with torch.no_grad():
            batch, keep = self.critic_rows(candidates)
            # The released code keeps γ whatever the length.
            target = self.target(batch, self.args.gamma ** (1 if self.args.as_published else batch["lengths"]))
        q = self.critic(batch["obs"], batch["actions"])
        loss = masked_mean(F.mse_loss(q, target, reduction="none"), keep, dim=0)
        metrics = {
            "losses/qf1_values": q.detach().mean(),
            "losses/qf_loss": loss.detach(),
            "losses/critic_rows": keep.sum().float(),
        }
        return loss, metrics

    def actor_loss(self, batch: dict[str, Tensor]) -> tuple[Tensor, Metrics]:
        """The deterministic policy gradient at single steps' states or, as published, at those of the critic's rows."""
        keep = torch.ones_like(batch["rewards"])
        if self.args.as_published:
            with torch.no_grad():
                batch, keep = self.critic_rows(batch)
        loss = -masked_mean(self.critic(batch["obs"], self.actor(batch["obs"])), keep, dim=0)
        return loss, {"losses/actor_loss": loss.detach()}

    def skip_loss(self, batch: dict[str, Tensor]) -> tuple[Tensor, Metrics]:
        """The heads against what was collected on the way plus the critic's value of where it led."""
        with torch.no_grad():
            target = self.target(batch, self.args.gamma ** batch["lengths"])
        values = self.skip(batch["obs"], batch["actions"])
        # The released code averages over the batch before it masks, so that every head learns from every row.
        share = 1.0 if self.args.as_published else self.args.bootstrap_probability
        mask = torch.rand_like(values[..., 0]) < share
        loss = ensemble_loss(values, batch["lengths"], target, mask)
        values, uncertainty_factor = values.detach(), self.bandit.factor()
        metrics = {
            "losses/skip_loss": loss.detach(),
            "losses/skip_values": values.mean(),
            "repetition/best_skip": best_skip(values, uncertainty_factor).float().mean(),
            "repetition/uncertainty": values.std(-2, correction=0).mean(),
            "repetition/uncertainty_factor": uncertainty_factor,
        }
        return loss, metrics

    def target(self, batch: dict[str, Tensor], discounts: Tensor | float) -> Tensor:
        next_values = self.critic_target(batch["next_obs"], self.actor_target(batch["next_obs"]))
        return bellman_target(batch["rewards"], discounts, batch["terminated"], next_values)


def train(args: Args) -> Path:
    """DDPG with uncertainty-aware skips. Returns the run directory."""
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
        (obs, _), left, rewards = env.reset(seed=run.episode_seed()), 0, []  # rewards of the episode's steps
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
            ended = terminated or (truncated and args.as_published)
            end = {"actions": action, "next_obs": next_obs, "terminated": ended}
            replay.add(obs=obs, rewards=reward, **end)
            segment.append((obs, reward))
            rewards.append(reward)
            for start_obs, reward_sum, length in intervals_ending_here(segment, args.gamma):
                skips.add(obs=start_obs, rewards=reward_sum, lengths=length, **end)
            obs = next_obs
            if step > args.learning_starts:
                transitions = replay.sample(args.batch_size)
                intervals = skips.sample(2 * args.batch_size)  # each head learns from about half
                candidates = skips.sample(CANDIDATES * args.batch_size)
                run.record(agent.update(transitions, intervals, candidates))
            if terminated or truncated:
                if args.as_published:
                    agent.bandit.feed_back(rewards)
                elif step - len(rewards) >= args.learning_starts:  # else λ had no part in it, or not from its start
                    agent.bandit.feed_back([sum(rewards) / len(rewards)])
                run.end_episode(info["episode"])
                (obs, _), left, rewards = env.reset(seed=run.episode_seed()), 0, []
    return run.directory


if __name__ == "__main__":
    train(parse_args(Args))
