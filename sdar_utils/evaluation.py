"""Playing episodes side by side, and what is measured on them: return, APR, AFR, and the act-or-repeat picture."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import gymnasium as gym
import numpy as np
import torch

from sdar_utils.envs import EVALUATION, NOISE, derived_seed
from sdar_utils.noise import EpisodesNoise, Noise

MODES = ("greedy", "stochastic")
ROWS = 32  # of the batch in which episodes are played


class Act(Protocol):
    """How an agent acts: `Agent.act` of every script.

    `obs` and `prev_actions` have a row for each episode, or are those of one episode; `prev_actions` is None at an
    episode's start. Returned are the actions and for how many steps they run: of all rows alike, or of each.
    """

    def __call__(
        self, obs: np.ndarray, prev_actions: np.ndarray | None, noise: Noise
    ) -> tuple[np.ndarray, int | np.ndarray]: ...


@dataclass
class Trajectory:
    """One episode as it was played."""

    mode: str
    actions: np.ndarray | None = None  # (T, |A|), as executed, in [-1, 1]
    length: int = 0
    total_reward: float = 0.0
    rewards: list[float] = field(default_factory=list)
    decisions: int = 0  # steps at which the agent was asked
    frames: list[np.ndarray] = field(default_factory=list)


class Evaluator:
    """Plays greedy and stochastic episodes on the same starts, in lock-step: all step together with one forward pass.

    The pass always has ROWS rows and an episode is always in the same one. So what it computes, to the last bit, does
    not depend on how many play with it.
    """

    def __init__(self, make_env: Callable[[], gym.Env], seed: int, device: torch.device, film: gym.Env | None = None):
        """With `film`, a task that gives pictures, the first greedy episode is filmed."""
        self.make_env, self.seed, self.device, self.film = make_env, seed, device, film
        self.envs: list[gym.Env] = [] if film is None else [film]
        self.fps = 30 if film is None else film.metadata.get("render_fps", 30)

    def play(self, act: Act, episodes: int, done: Callable[[], Any] = lambda: None) -> dict[str, list[Trajectory]]:
        """So many episodes of each mode. `done` is called after each."""
        played: dict[str, list[Trajectory]] = {mode: [] for mode in MODES}
        together = ROWS // len(MODES)
        for first in range(0, episodes, together):
            indices = range(first, min(first + together, episodes))
            for trajectory in self.play_together(act, [(i, mode) for i in indices for mode in MODES], done):
                played[trajectory.mode].append(trajectory)
        return played

    def play_together(self, act: Act, episodes: list[tuple[int, str]], done: Callable[[], Any]) -> list[Trajectory]:
        """The episodes of these indices and modes, at most ROWS, each in the row of its place in the list."""
        self.envs += [self.make_env() for _ in range(len(episodes) - len(self.envs))]
        obs = np.zeros((ROWS, *self.envs[0].observation_space.shape), np.float32)
        actions = np.zeros((ROWS, *self.envs[0].action_space.shape), np.float32)
        left = np.zeros(ROWS, int)  # steps that the actions still run
        trajectories, generators, history = [], [None] * ROWS, []
        for row, (index, mode) in enumerate(episodes):
            obs[row], _ = self.envs[row].reset(seed=derived_seed(self.seed, EVALUATION, index))
            trajectories.append(Trajectory(mode))
            if mode == "stochastic":
                generators[row] = np.random.default_rng(derived_seed(self.seed, NOISE, index))
        noise, playing = EpisodesNoise(generators, self.device), list(range(len(episodes)))
        while playing:
            noise.asked = asked = [row for row in playing if left[row] == 0]
            if asked:
                new_actions, steps = act(obs, actions if history else None, noise)
                actions[asked], left[asked] = new_actions[asked], np.broadcast_to(steps, ROWS)[asked]
            left -= 1
            history.append(actions.copy())
            for row in asked:
                trajectories[row].decisions += 1
            for row in tuple(playing):
                env, trajectory = self.envs[row], trajectories[row]
                if env is self.film and episodes[row][0] == 0:
                    trajectory.frames.append(env.render())
                obs[row], reward, terminated, truncated, _ = env.step(actions[row])
                trajectory.total_reward += reward
                trajectory.rewards.append(reward)
                trajectory.length += 1
                if terminated or truncated:
                    playing.remove(row)
                    done()
        executed = np.stack(history, axis=1)  # (ROWS, steps, |A|)
        for row, trajectory in enumerate(trajectories):
            trajectory.actions = executed[row, : trajectory.length]
        return trajectories


def summarise(trajectories: list[Trajectory]) -> dict[str, Any]:
    returns = np.array([t.total_reward for t in trajectories])
    lengths = [t.length for t in trajectories]
    spread = returns.std(ddof=1) / math.sqrt(len(returns)) if len(returns) > 1 else 0.0
    return {
        "episodes": len(returns),
        "return": float(returns.mean()),
        "return_standard_error": float(spread),
        "length": float(np.mean(lengths)),
        "decisions_per_step": sum(t.decisions for t in trajectories) / sum(lengths),
        **repetition_metrics([t.actions for t in trajectories]),
    }


def repetition_metrics(trajectories: list[np.ndarray]) -> dict[str, Any]:
    """The paper's APR and AFR from executed actions (T, |A|), averaged over trajectories.

    p is the share of steps t ≥ 1 (and dimensions) with a_t == a_{t-1}, exactly, and APR = 1/(1 - p); AFR is the mean
    Euclidean norm of a_t - a_{t-1}, and afr_per_dim the mean absolute change of a dimension, which is the scale of the
    paper's tables. Trajectories of one step have no such pair and are left out.
    """
    changes = [np.diff(actions, axis=0) for actions in trajectories if len(actions) > 1]
    if not changes:
        width = trajectories[0].shape[1]
        missing = dict.fromkeys(("repeat_rate", "apr", "afr", "afr_per_dim"), math.nan)
        return {**missing, "apr_dim": [math.nan] * width}
    repeats = np.mean([(change == 0).mean(axis=0) for change in changes], axis=0)  # p of each dimension
    with np.errstate(divide="ignore"):  # never acting has APR ∞
        apr, apr_dim = 1 / (1 - repeats.mean()), 1 / (1 - repeats)
    return {
        "repeat_rate": float(repeats.mean()),
        "apr": float(apr),
        "afr": float(np.mean([np.linalg.norm(change, axis=1).mean() for change in changes])),
        "afr_per_dim": float(np.mean([np.abs(change).mean() for change in changes])),
        "apr_dim": [float(value) for value in apr_dim],
    }


def acts(actions: np.ndarray) -> np.ndarray:
    """(T, |A|): where an executed action differs from the last one. An episode's first step acts."""
    return np.vstack([np.ones_like(actions[:1], bool), np.diff(actions, axis=0) != 0])


ACT, REPEAT = (20, 50, 120), (185, 210, 238)  # dark and light blue


def act_or_repeat_image(actions: np.ndarray) -> np.ndarray:
    """Time × dimension as in the paper's Fig. 4: dark where a dimension acts, light where it repeats; (H, W, 3)."""
    width, height, gap = max(1, 1000 // len(actions)), 16, 2
    cells = np.where(acts(actions).T[..., None], ACT, REPEAT).astype(np.uint8)  # (|A|, T, 3)
    picture = cells.repeat(height + gap, axis=0).repeat(width, axis=1)
    picture[np.arange(len(picture)) % (height + gap) >= height] = 255
    return picture[:-gap]
