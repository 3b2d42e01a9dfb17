"""Small tasks for the tests, reached as `--env-id tests.tasks:NAME`."""

import time
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np


class Scripted(gym.Env):
    """Rewards 0, 1, 2, … whatever is done; the observation says the step and the action as the task received it."""

    def __init__(self, ends_at: int | None = None, bad_reward_at: int | None = None, render_mode: str | None = None):
        self.ends_at, self.bad_reward_at, self.render_mode = ends_at, bad_reward_at, render_mode
        self.action_space = gym.spaces.Box(np.array([0, -2], np.float32), np.array([1, 6], np.float32))
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (3,), np.float64)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(3), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        assert action in self.action_space
        self.t += 1
        reward = np.nan if self.t == self.bad_reward_at else self.t - 1
        return np.array([self.t, *action], np.float64), float(reward), self.t == self.ends_at, False, {}


class HoldAndTrack(gym.Env):
    """Dimension 0 must follow a target that jumps at every step, dimension 1 pays for every change.

    The best agent acts in dimension 0 always and in dimension 1 never; an agent that gets the selection wrong, or the
    same for both dimensions, is far from it.
    """

    def __init__(self, render_mode: str | None = None):
        self.action_space = gym.spaces.Box(-1, 1, (2,), np.float32)
        self.observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.held = None
        return self.observe(), {}

    def observe(self) -> np.ndarray:
        self.target = float(self.np_random.choice([-0.5, 0.5]))
        return np.array([self.target, 0 if self.held is None else self.held], np.float32)

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        changed = self.held is not None and action[1] != self.held
        reward = -abs(self.target - float(action[0])) - float(changed)
        self.held = float(action[1])
        return self.observe(), reward, False, False, {}


class Shapes(gym.Env):
    """Odd but legal spaces: image-like float64 observations and a matrix of float64 actions."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}

    def __init__(self, action_space: gym.Space | None = None, render_mode: str | None = None):
        self.observation_space = gym.spaces.Box(0, 1, (2, 3), np.float64)
        bounds = np.arange(1, 5, dtype=np.float64).reshape(2, 2)
        self.action_space = action_space or gym.spaces.Box(-bounds, bounds, dtype=np.float64)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        return self.np_random.random((2, 3)), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        assert action in self.action_space
        return self.np_random.random((2, 3)), float(action.sum()), False, False, {}


class Greedy(Shapes):
    """Changes the action that it is given."""

    def __init__(self):
        super().__init__(gym.spaces.Box(-1, 1, (1,)))

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        action += 1
        return self.np_random.random((2, 3)), 0.0, False, False, {}


class Slow(HoldAndTrack):
    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        time.sleep(1)
        return super().step(action)


class Texts(Shapes):
    """Observations that no network reads."""

    def __init__(self):
        super().__init__(gym.spaces.Box(-1, 1, (1,)))
        self.observation_space = gym.spaces.Text(5)


# Bounds that a rescaled ±1 misses by a rounding error, outwards.
ROUNDING = gym.spaces.Box(np.array([-0.1, -0.3, 0.1], np.float32), np.array([3, 1.1, 1], np.float32))

for name, entry, limit, kwargs in [
    ("Endless-v0", Scripted, 7, {}),
    ("Ending-v0", Scripted, 100, {"ends_at": 5}),
    ("BadReward-v0", Scripted, 100, {"bad_reward_at": 30}),
    ("HoldAndTrack-v0", HoldAndTrack, 50, {}),
    ("Rounds-v0", HoldAndTrack, 30, {}),
    ("Slow-v0", Slow, 1000, {}),
    ("Greedy-v0", Greedy, 10, {}),
    ("Shapes-v0", Shapes, 10, {}),
    ("Unbounded-v0", Shapes, 10, {"action_space": gym.spaces.Box(-np.inf, np.inf, (2,))}),
    ("Texts-v0", Texts, 10, {}),
    ("Rounding-v0", Shapes, 10, {"action_space": ROUNDING}),
]:
    gym.register(name, entry, max_episode_steps=limit, kwargs=kwargs)
