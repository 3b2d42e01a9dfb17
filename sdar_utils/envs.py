"""The task: flat float32 observations, actions in [-1, 1]^|A|, and a seed for each episode."""

import contextlib
import io
import math
import os
import sys
import warnings
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces, wrappers

from sdar_utils import NotFinite, fail, one_line

TRAINING, EVALUATION, NOISE, RULE = range(4)  # what a derived seed is for


def derived_seed(*words: int) -> int:
    """An independent 32-bit seed for each combination of words (experiment seed, purpose, index)."""
    return int(np.random.SeedSequence(words).generate_state(1)[0])


def make_env(env_id: str, render_mode: str | None = None) -> gym.Env:
    """The task, by gymnasium's own wrappers. `info["episode"]` of an episode's last step has its return and length."""
    warnings.filterwarnings("ignore", message=".*is out of date.*", category=DeprecationWarning)
    warnings.filterwarnings("ignore", message=".*precision lowered by casting to float32")
    if ":" not in env_id and env_id not in gym.registry:
        with contextlib.suppress(ImportError), contextlib.redirect_stderr(io.StringIO()):  # it greets on stderr
            import gymnasium_robotics

            gym.register_envs(gymnasium_robotics)
    try:  # a task of one's own need not know render_mode
        env = gym.make(env_id) if render_mode is None else gym.make(env_id, render_mode=render_mode)
    except Exception as error:  # a task's constructor may raise anything
        fail(
            f"cannot make --env-id {env_id}: {one_line(error)} (gymnasium.pprint_registry() lists the tasks installed)"
        )
    if env_id.startswith("BipedalWalker"):
        env = FreshWorld(env)
    env = rescale_actions(env, env_id)
    env = flatten_observations(env, env_id)
    return wrappers.RecordEpisodeStatistics(OnlyFinite(env))


def rescale_actions(env: gym.Env, env_id: str) -> gym.Env:
    space = env.action_space
    if not isinstance(space, spaces.Box) or not np.issubdtype(space.dtype, np.floating):
        fail(f"{env_id} has the action space {space}; these algorithms need a continuous (Box) one")
    if not space.is_bounded():
        fail(f"{env_id} has unbounded actions; wrap it with bounds, so that they can be rescaled to [-1, 1]")
    if not ((space.low == -1).all() and (space.high == 1).all()):
        # Rescaling rounds, and a task may insist on its bounds.
        env = wrappers.TransformAction(env, lambda action: np.clip(action, space.low, space.high), space)
        env = wrappers.RescaleAction(env, space.dtype.type(-1), space.dtype.type(1))
    if len(space.shape) != 1:
        flat = spaces.Box(-1, 1, (math.prod(space.shape),))
        env = wrappers.TransformAction(env, lambda action: action.reshape(space.shape), flat)
    return env


def flatten_observations(env: gym.Env, env_id: str) -> gym.Env:
    space, goal = env.observation_space, ["observation", "desired_goal"]
    if isinstance(space, spaces.Dict) and {*goal} <= {*space}:
        env = wrappers.FilterObservation(env, goal)
    elif not isinstance(space, spaces.Box):
        fail(f"{env_id} has the observation space {space}; Box, or Dict with {' and '.join(goal)}, is supported")
    if env.observation_space.shape is None or len(env.observation_space.shape) != 1:
        env = wrappers.FlattenObservation(env)
    return env if env.observation_space.dtype == np.float32 else wrappers.DtypeObservation(env, np.float32)


class FreshWorld(gym.Wrapper):
    """A new Box2D world for each episode: BipedalWalker's keeps traces of earlier ones, so that a seed would not do."""

    def reset(self, **kwargs: Any) -> tuple[np.ndarray, dict]:
        task = self.unwrapped
        task._destroy()
        task.world = type(task.world)()
        return self.env.reset(**kwargs)


class OnlyFinite(gym.Wrapper):
    """Stops where a number is none, before it gets into a replay buffer."""

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        if not np.isfinite(action).all():
            raise NotFinite("an action")
        obs, reward, *rest = self.env.step(action.copy())  # a task may change what it is given
        if not (np.isfinite(obs).all() and math.isfinite(reward)):
            raise NotFinite("the task's observation or reward")
        return obs, float(reward), *rest


def follow_the_body(env: gym.Env) -> None:
    """MuJoCo's walkers have a camera that moves with them; gymnasium 1.4 leaves it aside and films an empty floor."""
    renderer, model = (getattr(env.unwrapped, name, None) for name in ("mujoco_renderer", "model"))
    cameras = [] if renderer is None else [model.camera(i).name for i in range(model.ncam)]
    if "track" in cameras:
        renderer.camera_id = cameras.index("track")


def make_filmed_env(env_id: str, option: str) -> gym.Env:
    """The task with pictures; fails if there are none. `option` is what asks for them."""
    if sys.platform == "linux" and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        os.environ.setdefault("MUJOCO_GL", "egl")  # counts until MuJoCo is imported
    try:
        env = make_env(env_id, "rgb_array")
        follow_the_body(env)
        env.reset(seed=0)
        if np.ndim(env.render()) != 3:
            raise ValueError("render() does not return a picture")
    except (Exception, SystemExit) as error:  # each renderer has its own; without EGL even importing MuJoCo fails
        fail(
            f"{option} cannot render {env_id}: {one_line(error)}. Without a screen, install EGL (Debian: libegl1 "
            "libgl1) and set MUJOCO_GL=egl, or OSMesa (libosmesa6) and MUJOCO_GL=osmesa"
        )
    return env


DIMENSION_NAMES = {  # of tasks whose simulator does not tell
    "MountainCarContinuous": ("force",),
    "LunarLander": ("main engine", "lateral engine"),
    "BipedalWalker": ("hip 1", "knee 1", "hip 2", "knee 2"),
    "Fetch": ("x", "y", "z", "gripper"),
}


def dimension_names(env: gym.Env) -> list[str]:
    """What each action dimension moves, where the task says so; a0, a1, … otherwise."""
    (width,) = env.action_space.shape
    for task, names in DIMENSION_NAMES.items():
        if env.spec.id.startswith(task) and len(names) == width:
            return list(names)
    model = getattr(env.unwrapped, "model", None)
    if getattr(model, "nu", None) != width:
        return [f"a{i}" for i in range(width)]
    names = []
    for i in range(width):
        moves_joint = model.actuator_trntype[i] in (0, 1)  # mjTRN_JOINT, mjTRN_JOINTINPARENT
        name = model.actuator(i).name or (model.joint(model.actuator_trnid[i, 0]).name if moves_joint else "")
        names.append(name.removesuffix("_joint").replace("_", " ") or f"a{i}")
    return names
