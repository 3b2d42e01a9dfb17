"""Tasks as the scripts see them: flat observations, actions in [-1, 1], episodes that a seed determines."""

import re
import subprocess
import sys

import gymnasium as gym
import mujoco
import numpy as np
import pytest

import sac_continuous_action as sac
from sdar_utils import NotFinite
from sdar_utils.envs import derived_seed, dimension_names, follow_the_body, make_env
from tests.conftest import ROOT, TINY, command, train

PAPER_TASKS = {  # id: (observation size, |A|)
    "MountainCarContinuous-v0": (2, 1),
    "LunarLanderContinuous-v3": (8, 2),
    "BipedalWalker-v3": (24, 4),
    "HalfCheetah-v4": (17, 6),
    "Humanoid-v4": (376, 17),
    "Walker2d-v4": (17, 6),
    "Hopper-v4": (11, 3),
    "Ant-v4": (27, 8),
    "FetchReach-v4": (13, 4),
    "Pusher-v5": (23, 7),
    "Reacher-v4": (11, 2),
}


@pytest.mark.parametrize("env_id", PAPER_TASKS)
def test_every_task_trains(env_id, tmp_path, monkeypatch):
    rows, add = [], sac.ReplayBuffer.add
    monkeypatch.setattr(sac.ReplayBuffer, "add", lambda self, **row: rows.append(row) or add(self, **row))
    directory = train(sac, tmp_path, env_id=env_id, total_timesteps=45)
    assert (directory / "agent.pt").exists()
    actions = np.stack([row["actions"] for row in rows])
    assert (len(rows[0]["obs"]), actions.shape[1]) == PAPER_TASKS[env_id]
    assert np.abs(actions).max() <= 1


@pytest.mark.parametrize("env_id", PAPER_TASKS)
def test_a_seed_is_all_of_an_episode(env_id):
    """In a fresh task as after other episodes: this is what resuming rests on."""
    rng = np.random.default_rng(0)
    used, fresh = make_env(env_id), make_env(env_id)
    actions = rng.uniform(-1, 1, (40, *used.action_space.shape)).astype(np.float32)
    for seed in (1, 2):
        used.reset(seed=seed)
        for action in actions[::-1]:
            if any(used.step(action)[2:4]):
                break
    np.testing.assert_array_equal(used.reset(seed=3)[0], fresh.reset(seed=3)[0])
    for action in actions:
        a, b = used.step(action), fresh.step(action)
        np.testing.assert_array_equal(a[0], b[0])
        assert a[1:4] == b[1:4]
        if a[2] or a[3]:
            break


def test_derived_seeds_differ():
    seeds = {derived_seed(*words) for words in [(1, 0, 0), (1, 0, 1), (1, 1, 0), (2, 0, 0), (0, 1, 0), (0, 0, 1)]}
    assert len(seeds) == 6
    assert derived_seed(1, 0, 1) == derived_seed(1, 0, 1)


@pytest.mark.parametrize("env_id", ["Humanoid-v4", "Pusher-v5", "tests.tasks:Endless-v0", "tests.tasks:Rounding-v0"])
def test_actions_reach_the_task_in_its_own_bounds(env_id, monkeypatch):
    """As the line through both bounds says, and never outside of them: the last rounding must not be outwards."""
    env = make_env(env_id)
    task = env.unwrapped
    received, step = [], type(task).step
    monkeypatch.setattr(type(task), "step", lambda self, action: received.append(action) or step(self, action))
    low, high = task.action_space.low.astype(float), task.action_space.high.astype(float)
    (size,) = task.action_space.shape
    rng = np.random.default_rng(0)
    env.reset(seed=0)
    for action in [np.full(size, -1), np.ones(size), np.zeros(size), rng.uniform(-1, 1, size)]:
        env.step(action.astype(np.float32))
        expected = low + (action.astype(np.float32).astype(float) + 1) / 2 * (high - low)
        np.testing.assert_allclose(received[-1], expected, rtol=1e-6, atol=1e-6)
        assert received[-1] in task.action_space


def test_a_task_may_change_what_it_is_given():
    env, action = make_env("tests.tasks:Greedy-v0"), np.full(1, 0.5, np.float32)
    env.reset(seed=0)
    env.step(action)
    assert action.tolist() == [0.5]


def test_odd_shapes_are_flattened():
    env = make_env("tests.tasks:Shapes-v0")
    assert env.observation_space.shape == (6,)
    assert env.action_space.shape == (4,)
    obs, _ = env.reset(seed=0)
    assert obs.shape == (6,)
    assert obs.dtype == np.float32
    np.testing.assert_array_equal(obs, env.unwrapped.reset(seed=0)[0].astype(np.float32).reshape(-1))
    _, reward, *_ = env.step(np.ones(4, np.float32))
    assert reward == 1 + 2 + 3 + 4


@pytest.mark.parametrize("env_id", ["FetchReach-v4", "FetchPush-v4"])
def test_goal_tasks_concatenate_goal_and_observation(env_id):
    env = make_env(env_id)
    obs, _ = env.reset(seed=1)
    plain, _ = env.unwrapped.reset(seed=1)
    assert obs.dtype == np.float32
    np.testing.assert_array_equal(obs, np.concatenate([plain["desired_goal"], plain["observation"]]).astype(np.float32))


def test_an_episode_tells_its_return_and_length():
    env = make_env("tests.tasks:Endless-v0")  # seven steps that pay 0, 1, 2, …
    for _ in range(2):
        env.reset(seed=0)
        infos = [env.step(np.zeros(2, np.float32))[-1] for _ in range(7)]
        assert not any("episode" in info for info in infos[:-1])
        assert (infos[-1]["episode"]["r"], infos[-1]["episode"]["l"]) == (21, 7)


@pytest.mark.parametrize(
    ("env_id", "complaint"),
    [
        ("CartPole-v1", "need a continuous"),
        ("tests.tasks:Unbounded-v0", "unbounded actions"),
        ("tests.tasks:Texts-v0", "has the observation space Text"),
        ("HalfCheetah-v99", "cannot make --env-id HalfCheetah-v99"),
        ("no_such_module:Task-v0", "cannot make"),
    ],
)
def test_unusable_tasks_are_refused_before_anything_is_made(env_id, complaint, tmp_path):
    with pytest.raises(SystemExit, match=f"^error: .*{complaint}"):
        train(sac, tmp_path / "runs", env_id=env_id)
    assert not (tmp_path / "runs").exists()


def test_numbers_that_are_none_stop_at_the_task():
    env = make_env("tests.tasks:BadReward-v0")  # at step 30
    env.reset(seed=0)
    with pytest.raises(NotFinite, match="an action"):
        env.step(np.array([0, np.inf], np.float32))
    for _ in range(29):
        env.step(np.zeros(2, np.float32))
    with pytest.raises(NotFinite, match="reward"):
        env.step(np.zeros(2, np.float32))


OWN_TASK = """
import gymnasium, numpy as np

class Flat(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (2,))
    action_space = gymnasium.spaces.Box(-1, 1, (1,))

    def reset(self, seed=None, options=None):
        return np.zeros(2, np.float32), {}

    def step(self, action):
        return np.zeros(2, np.float32), 1.0, False, False, {}

gymnasium.register("Flat-v0", Flat, max_episode_steps=20)
gymnasium.register("Forever-v0", Flat)
"""


@pytest.mark.parametrize(("env_id", "warning"), [("Flat-v0", ""), ("Forever-v0", "warning: .* has no time limit.*\n")])
def test_a_task_of_ones_own(env_id, warning, tmp_path, monkeypatch):
    """A class that takes no argument and has nothing but spaces, reset and step; in a module where the user is."""
    (tmp_path / "my_module.py").write_text(OWN_TASK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    words = {**TINY, "env_id": f"my_module:{env_id}", "total_timesteps": 45, "runs_dir": "runs", "run_name": "x"}
    if env_id == "Forever-v0":  # its evaluation would last for ever, too
        words |= {"run_name": "x", "total_timesteps": 10**6}
        process = subprocess.Popen(command(sac, **words, eval_every=0), cwd=tmp_path, stderr=subprocess.PIPE, text=True)
        line = process.stderr.readline()
        process.kill()
        assert re.fullmatch(warning, line)
        return
    done = subprocess.run(command(sac, **words), cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "runs" / "x" / "agent.pt").exists()


def test_user_sees_no_warnings_of_the_libraries(tmp_path):
    """Tasks out of date, a greeting, spaces whose precision is lowered."""
    code = "from sdar_utils.envs import make_env\nfor task in ('Humanoid', 'FetchReach'): make_env(task + '-v4')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stderr == done.stdout == ""


@pytest.mark.parametrize(
    ("env_id", "names"),
    [
        ("LunarLanderContinuous-v3", ["main engine", "lateral engine"]),
        ("HalfCheetah-v4", ["bthigh", "bshin", "bfoot", "fthigh", "fshin", "ffoot"]),  # named actuators
        ("Walker2d-v5", ["thigh", "leg", "foot", "thigh left", "leg left", "foot left"]),  # named joints
        ("Pendulum-v1", ["a0"]),
    ],
)
def test_dimensions_are_named_where_the_task_names_them(env_id, names):
    assert dimension_names(make_env(env_id)) == names


def test_spaces_are_left_alone_where_they_fit():
    """No wrapper where none is needed: evaluation steps twenty tasks at a time."""
    env = make_env("LunarLanderContinuous-v3")
    names = []
    while isinstance(env, gym.Wrapper):
        names.append(type(env).__name__)
        env = env.env
    assert names[:2] == ["RecordEpisodeStatistics", "OnlyFinite"]
    assert not {"RescaleAction", "TransformAction", "FlattenObservation", "DtypeObservation"} & set(names)


@pytest.mark.parametrize("env_id", ["HalfCheetah-v4", "Hopper-v4", "Humanoid-v4", "Ant-v4", "Walker2d-v4"])
def test_the_camera_goes_where_the_body_goes(env_id):
    env = make_env(env_id, "rgb_array")
    follow_the_body(env)
    env.reset(seed=0)
    model, data = env.unwrapped.model, env.unwrapped.data
    chosen = env.unwrapped.mujoco_renderer.camera_id
    assert chosen >= 0  # -1 is gymnasium's own, which stays where it is
    camera = data.cam_xpos[chosen]  # a view
    before = camera.copy()
    data.qpos[0] += 5
    mujoco.mj_forward(model, data)
    np.testing.assert_allclose(camera - before, [5, 0, 0], atol=1e-9)


@pytest.mark.parametrize("env_id", ["Reacher-v4", "Pendulum-v1"])
def test_a_task_without_such_a_camera_keeps_its_view(env_id):
    env = make_env(env_id, "rgb_array")
    renderer = getattr(env.unwrapped, "mujoco_renderer", None)
    before = renderer and renderer.camera_id
    follow_the_body(env)
    assert before == (renderer and renderer.camera_id)
