"""What every script has in common: tasks, replay buffer, metrics, logs, run directories and their errors."""

import copy
import json
import platform
import re
import resource
import subprocess
import sys
from collections import defaultdict

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2

from tests.conftest import ROOT, SCRIPTS, TINY, command, load, run, scalars, shared_code, snapshot

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


def train(script, path, **options):
    return script.train(
        script.Args(**{**TINY, "total_timesteps": 60, "runs_dir": str(path), "run_name": "run", **options})
    )


# The scripts as texts.


def test_shared_blocks_are_the_same_in_every_script():
    blocks = defaultdict(dict)
    for path in ROOT.glob("*.py"):
        text = path.read_text()
        found = re.findall(r"^# --- shared: (.+?) ---\n(.*?)^# --- end shared ---", text, re.S | re.M)
        assert len(found) == text.count("# --- shared:") == text.count("# --- end shared ---")
        for name, body in found:
            blocks[name][path.name] = body
    for name, bodies in blocks.items():
        assert len(set(bodies.values())) == 1, f"block '{name}' differs between {list(bodies)}"
    everywhere = {"options", "environment", "replay buffer", "evaluation", "checkpoint", "run"}
    for name in everywhere:
        assert {f"{script}.py" for script in SCRIPTS} <= set(blocks[name])


def test_help_explains_every_option(script):
    text = subprocess.run(
        [sys.executable, script.__file__, "--help"], capture_output=True, text=True, check=True
    ).stdout
    flat = re.sub(r"[│\s]+", " ", text)
    for name in script.Args.__dataclass_fields__:
        option = f"--{name.replace('_', '-')}"
        found = re.search(rf"{option}(?:, --no-\S+)?(?: [A-Z{{][^ ]*)? ((?:(?! --).)*?) \(default: ", flat)
        assert found, f"{option} is not explained"
        assert len(found[1].split()) >= 3, f"{option} is barely explained: {found[1]}"


def test_cleanrl_defaults(script):
    args = script.Args()
    expected = {"env_id": "Hopper-v4", "seed": 1, "total_timesteps": 1_000_000, "buffer_size": 1_000_000, "gamma": 0.99}
    expected |= {"tau": 0.005, "batch_size": 256, "learning_starts": 5000, "cuda": True, "track": False}
    assert {name: getattr(args, name) for name in expected} == expected
    assert args.exp_name == script.__name__


# Tasks.


@pytest.mark.parametrize("env_id", PAPER_TASKS)
def test_every_task_trains(script, env_id, tmp_path, monkeypatch):
    rows = []
    add = script.ReplayBuffer.add
    monkeypatch.setattr(script.ReplayBuffer, "add", lambda self, **row: rows.append(row) or add(self, **row))
    directory = train(script, tmp_path, env_id=env_id, eval_every=0)
    assert {"agent.pt", "args.json", "checkpoint.pt", "evaluation.json"} <= {p.name for p in directory.iterdir()}
    actions = np.stack([row["actions"] for row in rows])
    assert actions.shape[1] == PAPER_TASKS[env_id][1]
    assert np.abs(actions).max() <= 1
    assert len(rows[0]["obs"]) == PAPER_TASKS[env_id][0]


@pytest.mark.parametrize("env_id", PAPER_TASKS)
def test_an_episode_is_restored_exactly_in_its_middle(env_id):
    """In a fresh environment, after other episodes: all of the simulator's state is in seed and actions."""
    script, rng = load(SCRIPTS[0]), np.random.default_rng(0)
    env = script.make_env(env_id)
    (act_dim,) = env.action_space.shape

    def action():
        return rng.uniform(-1, 1, act_dim).astype(np.float32)

    episode = script.Episode(env, seed=3)
    for _ in range(2):
        for _ in range(30):
            episode.step(action())
            if episode.over:
                break
        episode.begin()
    for _ in range(10):
        episode.step(action())
    copy = script.Episode(script.make_env(env_id), seed=3)
    copy.load_state_dict(episode.state_dict())
    for _ in range(5):
        a = action()
        expected, got = episode.step(a), copy.step(a)
        np.testing.assert_array_equal(expected[0], got[0])
        assert expected[1:] == got[1:]
    assert episode.total_reward == copy.total_reward


def test_actions_reach_the_task_in_its_own_bounds():
    script = load(SCRIPTS[0])
    env = script.make_env("tests.tasks:Endless-v0")  # bounds [0, 1] × [-2, 6]
    env.reset(seed=0)
    for action, expected in [((-1, -1), (0, -2)), ((1, 1), (1, 6)), ((0, 0.5), (0.5, 4)), ((0.2, -0.5), (0.6, 0))]:
        obs = env.step(np.array(action, np.float32))[0]
        assert obs.dtype == np.float32
        np.testing.assert_allclose(obs[1:], expected, rtol=1e-6, atol=1e-7)


def test_odd_shapes_are_flattened(script, tmp_path):
    env = script.make_env("tests.tasks:Shapes-v0")
    assert env.observation_space.shape == (6,)
    assert env.action_space == gym.spaces.Box(-1, 1, (4,), np.float32)
    _, reward, *_ = env.step(np.ones(4, np.float32)) if env.reset(seed=0) else None
    assert reward == 1 + 2 + 3 + 4
    train(script, tmp_path, env_id="tests.tasks:Shapes-v0")


@pytest.mark.parametrize("env_id", ["FetchReach-v4", "FetchPush-v4"])
def test_goal_tasks_concatenate_observation_and_desired_goal(env_id):
    script = load(SCRIPTS[0])
    env = script.make_env(env_id)
    obs, _ = env.reset(seed=1)
    plain, _ = env.unwrapped.reset(seed=1)
    np.testing.assert_array_equal(obs, np.concatenate([plain["observation"], plain["desired_goal"]]).astype(np.float32))


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators need no help")
@shared_code
def test_freed_tensors_leave_their_memory_to_the_next_ones(script, tmp_path):
    train(script, tmp_path, env_id="tests.tasks:Endless-v0")

    def page_faults() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(5):
            tensors = [torch.ones(2**20) for _ in range(8)]  # 4 MiB or 1024 pages each
            del tensors
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    page_faults()
    assert page_faults() < 1024


@shared_code
@pytest.mark.parametrize(
    ("env_id", "complaint"),
    [
        ("CartPole-v1", "need a continuous"),
        ("tests.tasks:Discrete-v0", "need a continuous"),
        ("tests.tasks:Unbounded-v0", "unbounded actions"),
        ("NoSuchTask-v0", "cannot make --env-id NoSuchTask-v0"),
        ("HalfCheetah-v99", "cannot make --env-id HalfCheetah-v99"),
        ("no_such_module:Task-v0", "cannot make"),
    ],
)
def test_unusable_tasks_are_refused_before_anything_is_made(script, env_id, complaint, tmp_path):
    with pytest.raises(SystemExit, match=complaint):
        train(script, tmp_path / "runs", env_id=env_id)
    assert not (tmp_path / "runs").exists()


@shared_code
@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"total_timesteps": 0}, "--total-timesteps must be at least 1"),
        ({"batch_size": -3}, "--batch-size must be at least 1"),
        ({"seed": -1}, "--seed must not be negative"),
        ({"gamma": 1.5}, "--gamma must lie"),
        ({"tau": 0.0}, "--tau must lie"),
        ({"run_name": "../elsewhere"}, "put the path into --runs-dir"),
        ({"run_name": ".."}, "no directory name"),
        ({"run_name": ""}, "no directory name"),
        ({"buffer_device": "cuda"}, "contradicts --no-cuda"),
        ({"run_name": None, "resume": True}, "--resume needs the --run-name"),
        ({"resume": True}, "nothing to resume"),
    ],
)
def test_bad_options_are_refused_before_anything_is_made(script, options, complaint, tmp_path):
    with pytest.raises(SystemExit, match=complaint):
        train(script, tmp_path / "runs", env_id="Pendulum-v1", **options)
    assert not (tmp_path / "runs").exists()


@shared_code
def test_compile_without_a_compiler_is_refused_before_anything_is_made(script, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    done = run(script, expect=1, env_id="Pendulum-v1", runs_dir=tmp_path / "runs", cuda=False, compile=True)
    assert re.fullmatch(r"error: --compile needs a C\+\+ compiler [^\n]+ or drop --compile\n", done.stderr)
    assert not (tmp_path / "runs").exists()


@shared_code
def test_a_compiled_run_can_be_looked_at_without_a_compiler(script, monkeypatch):
    monkeypatch.setattr(script, "check_compiler", lambda: pytest.fail("nothing needs one"))
    script.Agent(3, 2, script.Args(compile=True), torch.device("meta"))  # as load_agent does


@shared_code
def test_errors_are_one_line_and_an_exit_status(script):
    done = run(script, expect=1, env_id="CartPole-v1", cuda=False)
    assert re.fullmatch(r"error: [^\n]+\n", done.stderr)


@shared_code
def test_user_sees_no_warnings_of_the_libraries(script, tmp_path):
    for env_id in ("Hopper-v4", "FetchReach-v4"):
        done = run(script, env_id=env_id, total_timesteps=50, runs_dir=tmp_path, eval_every=0, **TINY)
        assert done.stderr == ""


@shared_code
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu_says_so_in_one_line(script, tmp_path):
    done = run(
        script, env_id="Pendulum-v1", total_timesteps=50, runs_dir=tmp_path, eval_every=0, **{**TINY, "cuda": True}
    )
    assert re.fullmatch(r"warning: no CUDA device found[^\n]+\n", done.stderr)


@shared_code
def test_a_run_that_cannot_learn_says_so(script, tmp_path, capfd):
    train(script, tmp_path, env_id="Pendulum-v1", total_timesteps=40, eval_every=0)
    assert "nothing will be learned" in capfd.readouterr().err


# Replay buffer.


def make_buffer(script, capacity):
    return script.ReplayBuffer(capacity, {"x": (2,), "y": (), "z": (1,)}, torch.device("cpu"))


def contents(buffer):
    batch = buffer.gather(torch.arange(len(buffer)), torch.device("cpu"))
    return sorted(
        (*x.tolist(), y.item(), *z.tolist()) for x, y, z in zip(batch["x"], batch["y"], batch["z"], strict=True)
    )


@shared_code
@pytest.mark.parametrize("count", [3, 10, 11, 27])
def test_buffer_holds_the_last_rows(script, count):
    buffer = make_buffer(script, 10)
    for i in range(count):
        buffer.add(x=np.array([i, -i]), y=i / 2, z=np.array([i * i]))
    assert contents(buffer) == [(i, -i, i / 2, i * i) for i in range(max(0, count - 10), count)]
    batch = buffer.sample(1000, torch.device("cpu"))
    assert batch["x"].shape == (1000, 2)
    assert batch["y"].shape == (1000,)
    assert batch["z"].shape == (1000, 1)
    assert set(batch["x"][:, 0].tolist()) == set(range(max(0, count - 10), count))  # all of them, evenly enough
    assert torch.equal(batch["y"] * 2, batch["x"][:, 0])


@shared_code
@pytest.mark.parametrize("segment_rows", [4, 1000])
def test_buffer_on_disk_grows_by_what_is_new(script, tmp_path, monkeypatch, segment_rows):
    monkeypatch.setattr(script, "SEGMENT_ROWS", segment_rows)
    buffer, seen = make_buffer(script, 10), {}
    for i in range(47):
        buffer.add(x=np.array([i, 0]), y=0, z=np.array([1]))
        if i % 6 == 5 or i == 46:
            state = buffer.save(tmp_path, "replay")
            files = {p.name: (p.stat().st_mtime_ns, p.stat().st_ino) for p in tmp_path.iterdir()}
            assert all(files[name] == stamp for name, stamp in seen.items())  # nothing was written again
            rows_written = sum((tmp_path / name).stat().st_size for name in files.keys() - seen.keys()) // 16
            assert rows_written <= 6
            seen = files
            needed = {segment["file"] for segment in state["segments"]}
            assert sum((tmp_path / name).stat().st_size for name in needed) // 16 <= 10 + 6
            for name in list(seen.keys() - needed):
                (tmp_path / name).unlink()
                del seen[name]
            copy = make_buffer(script, 10)
            copy.load(tmp_path, state)
            assert contents(copy) == contents(buffer)
            assert copy.added == buffer.added


@shared_code
def test_a_buffer_beyond_memory_is_refused(script, tmp_path):
    with pytest.raises(SystemExit, match=r"replay buffer of 10,000,000,000,000 rows takes .* lower --buffer-size"):
        train(script, tmp_path / "runs", env_id="Pendulum-v1", buffer_size=10**13, total_timesteps=10**13)
    assert not (tmp_path / "runs").exists()


@shared_code
def test_damaged_replay_files_are_noticed(script, tmp_path):
    buffer = make_buffer(script, 10)
    for i in range(8):
        buffer.add(x=np.array([i, 0]), y=0, z=np.array([1]))
    state = buffer.save(tmp_path, "replay")
    path = tmp_path / state["segments"][0]["file"]
    good = path.read_bytes()
    for bad in (good[:-16], good[:5] + b"\1" + good[6:], b""):
        path.write_bytes(bad)
        with pytest.raises(ValueError, match="damaged"):
            make_buffer(script, 10).load(tmp_path, state)
    path.write_bytes(good)
    with pytest.raises(ValueError, match="missing"):
        make_buffer(script, 10).load(tmp_path, {**state, "segments": []})


def test_time_limits_are_not_terminal(script, tmp_path, monkeypatch):
    """Both tasks' episodes end; only the one that ends by itself is marked, and next_obs is the last observation."""
    for env_id, ends, length in [("tests.tasks:Endless-v0", False, 7), ("tests.tasks:Ending-v0", True, 5)]:
        rows = []
        monkeypatch.setattr(script.ReplayBuffer, "add", lambda self, rows=rows, **row: rows.append(row))
        train(script, tmp_path, env_id=env_id, run_name=env_id, total_timesteps=30, eval_every=0)
        last = [row for row in rows if row["next_obs"][0] == length]
        assert len(last) >= 30 // length
        assert all(bool(row["terminated"]) == ends for row in last)
        assert not any(row["terminated"] for row in rows if row["next_obs"][0] < length)


# Metrics.


@shared_code
def test_adam_is_torchs_and_continues_from_its_state(script):
    torch.manual_seed(0)
    shapes, rate = [(7, 3), (7,), ()], 0.05
    ours, theirs = ([torch.nn.Parameter(torch.ones(shape)) for shape in shapes] for _ in range(2))
    adam, reference = script.Adam(ours, rate), torch.optim.Adam(theirs, lr=rate)
    for step in range(20):
        if step == 10:  # as after a restart
            state = copy.deepcopy(adam.state_dict())
            adam = script.Adam(ours, rate)
            adam.load_state_dict(state)
        gradients = [torch.randn(shape) * 10.0**-step for shape in shapes]
        adam.step(gradients)
        for parameter, gradient in zip(theirs, gradients, strict=True):
            parameter.grad = gradient
        reference.step()
        for our, their in zip(ours, theirs, strict=True):
            torch.testing.assert_close(our, their, rtol=1e-6, atol=1e-7)


@shared_code
def test_a_minimiser_moves_its_parameters_only(script):
    """By Adam's first step, which is the learning rate against the gradient's sign; nothing is left in .grad."""
    x, y, z = (torch.nn.Parameter(torch.tensor([2.0, -3.0])) for _ in range(3))

    def loss(scale):
        value = (x * x + scale * y * y + z).sum()
        return value, {"value": value.detach()}

    step = script.minimiser(loss, script.Adam([x], 0.1), script.Adam([y], 0.2), compile=False)
    assert step(5.0)["value"].item() == 13 + 5 * 13 - 1
    torch.testing.assert_close(x.data, torch.tensor([1.9, -2.9]))
    torch.testing.assert_close(y.data, torch.tensor([1.8, -2.8]))
    assert z.tolist() == [2.0, -3.0]
    assert x.grad is y.grad is z.grad is None


@shared_code
def test_repetition_metrics_by_hand(script):
    a = np.array([[0.0, 0.0], [0.3, 0.0], [0.3, 0.4], [0.3, 0.4]])  # changes (.3, 0), (0, .4), (0, 0)
    b = np.array([[1.0, 1.0], [0.4, 0.2]])  # changes (-.6, -.8)
    metrics = script.repetition_metrics([a, b])
    p_a, p_b = 4 / 6, 0.0
    assert metrics["apr"] == pytest.approx(1 / (1 - (p_a + p_b) / 2))
    assert metrics["apr_dim"] == pytest.approx([1 / (1 - (2 / 3) / 2)] * 2)
    assert metrics["afr"] == pytest.approx(((0.3 + 0.4 + 0) / 3 + 1.0) / 2)
    assert metrics["afr_per_dim"] == pytest.approx(((0.3 + 0.4) / 6 + 0.7) / 2)


@shared_code
def test_repetition_metrics_at_the_limits(script):
    still, single = np.ones((5, 2)), np.ones((1, 2))
    assert script.repetition_metrics([still])["apr"] == np.inf
    assert script.repetition_metrics([still])["afr"] == 0
    assert np.isnan(script.repetition_metrics([single])["apr"])
    assert script.repetition_metrics([single, still])["repeat_rate"] == 1
    rounding = np.array([[0.1], [np.nextafter(0.1, 1)]])
    assert script.repetition_metrics([rounding])["apr"] == 1  # equality is exact


@shared_code
def test_act_or_repeat_picture(script):
    actions = np.array([[0.0, 0.0], [0.5, 0.0], [0.5, 0.0], [0.5, 0.2]])
    picture = script.act_or_repeat_image(actions)
    acts = np.array([[1, 1, 0, 0], [1, 0, 0, 1]], bool)  # dimension × time
    height, width = 18, picture.shape[1] // 4
    for dimension in range(2):
        for t in range(4):
            cell = picture[dimension * height : dimension * height + 16, t * width : (t + 1) * width]
            assert (cell == cell[0, 0]).all()
            assert (cell.mean() < 100) == acts[dimension, t]


def test_evaluation_does_not_change_training(script, tmp_path):
    returns = []
    for every in (0, 100):
        directory = train(
            script, tmp_path, env_id="Pendulum-v1", total_timesteps=420, run_name=f"e{every}", eval_every=every
        )
        returns.append((scalars(directory)["charts/episodic_return"], scalars(directory)["losses/qf_loss"]))
    assert returns[0] == returns[1]


# Logs.


def test_logs(script, tmp_path):
    directory = train(
        script, tmp_path, env_id="LunarLanderContinuous-v3", total_timesteps=600, eval_every=300, eval_episodes=2
    )
    logged = scalars(directory)
    tags = "charts/episodic_return charts/episodic_length charts/SPS losses/qf_loss losses/actor_loss eval/return "
    tags += "eval/return_stochastic eval/apr eval/afr eval/afr_per_dim eval/apr_dim_0 eval/apr_dim_1"
    assert set(tags.split()) <= set(logged)
    assert [step for step, _ in logged["eval/return"]] == [0, 300, 600]
    assert [step for step, _ in logged["losses/qf_loss"]] == [250, 500, 600]
    events = EventAccumulator(str(directory), size_guidance={"images": 0}).Reload()
    assert len(events.Images("eval/act_or_repeat")) == 3
    assert "hyperparameters/text_summary" in events.Tags()["tensors"]
    (layout,) = events.Tensors("custom_scalars__config__")
    parsed = layout_pb2.Layout.FromString(layout.tensor_proto.string_val[0])
    patterns = [p for c in parsed.category for chart in c.chart for p in chart.multiline.tag]
    assert all(any(re.search(p, tag) for tag in [*logged, "repetition/act_probability_0"]) for p in patterns)
    about = json.loads((directory / "args.json").read_text())
    assert about["args"]["env_id"] == "LunarLanderContinuous-v3"
    assert about["packages"]["torch"] == torch.__version__
    assert about["device"].startswith("cpu")
    final = json.loads((directory / "evaluation.json").read_text())
    assert final["step"] == 600
    assert final["greedy"]["return"] == pytest.approx(logged["eval/return"][-1][1], rel=1e-5)
    assert final["stochastic"]["episodes"] == 2


@shared_code
def test_logged_losses_are_means_over_the_steps_between(script, tmp_path, monkeypatch):
    values = iter(range(10_000))
    monkeypatch.setattr(script.Agent, "update", lambda self, *_: {"losses/x": torch.tensor(float(next(values)))})
    directory = train(script, tmp_path, env_id="Pendulum-v1", total_timesteps=500, learning_starts=0, eval_every=0)
    assert scalars(directory)["losses/x"] == [(250, np.mean(range(250))), (500, np.mean(range(250, 500)))]


@shared_code
def test_weights_and_biases_offline(script, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    run(
        script,
        env_id="Pendulum-v1",
        total_timesteps=60,
        runs_dir=tmp_path,
        run_name="a run",
        track=True,
        eval_every=0,
        **TINY,
    )
    (record,) = (tmp_path / "a run" / "wandb").glob("offline-run-*/*.wandb")
    data = record.read_bytes()
    for expected in (b"eval/return", b"Pendulum-v1", script.__name__.encode()):
        assert expected in data


@shared_code
def test_video(script, tmp_path):
    import imageio.v3 as imageio

    directory = train(script, tmp_path, env_id="Pendulum-v1", capture_video=True, eval_every=0)
    (video,) = (directory / "videos").iterdir()
    frames = imageio.imread(video)
    assert len(frames) == 200  # one episode
    assert frames.std() > 0


@shared_code
def test_video_that_cannot_be_rendered_is_refused_first(script, tmp_path):
    with pytest.raises(SystemExit, match=r"cannot render .*EGL"):
        train(script, tmp_path / "runs", env_id="tests.tasks:Endless-v0", capture_video=True)
    assert not (tmp_path / "runs").exists()


# Run directories.


@shared_code
def test_an_existing_run_is_not_overwritten(script, tmp_path):
    directory = train(script, tmp_path, env_id="Pendulum-v1", total_timesteps=5, eval_every=0)
    before = snapshot(directory)
    with pytest.raises(SystemExit, match="exists; continue it with --resume"):
        train(script, tmp_path, env_id="Pendulum-v1")
    assert snapshot(directory) == before


@shared_code
def test_default_run_name(script, tmp_path):
    directory = train(script, tmp_path, env_id="tests.tasks:Endless-v0", run_name=None, seed=7, eval_every=0)
    assert re.fullmatch(rf"tests\.tasks:Endless-v0__{script.__name__}__7__\d+", directory.name)


def test_agent_file_plays_as_the_trained_agent_did(script, tmp_path):
    directory = train(
        script, tmp_path, env_id="LunarLanderContinuous-v3", total_timesteps=300, eval_episodes=2, eval_every=0
    )
    recorded = json.loads((directory / "evaluation.json").read_text())["greedy"]
    for file in ("agent.pt", "checkpoint.pt"):
        agent = script.load_agent(directory / file, torch.device("cpu"))
        env = script.make_env(agent.args.env_id)
        played = [script.play_episode(agent, env, script.derived_seed(1, 1, i), "greedy") for i in range(2)]
        assert np.mean([t.total_reward for t in played]) == pytest.approx(recorded["return"], rel=1e-9)


@shared_code
def test_files_from_strangers_cannot_run_code(script, tmp_path):
    class Evil:
        def __reduce__(self):
            return open, (str(tmp_path / "executed"), "w")

    torch.save({"format": 1, "script": script.__name__, "args": Evil()}, tmp_path / "agent.pt")
    with pytest.raises(SystemExit, match="damaged or not one of ours"):
        script.load_agent(tmp_path / "agent.pt", torch.device("cpu"))
    assert not (tmp_path / "executed").exists()


@shared_code
def test_crafted_agent_files_give_an_error(script, tmp_path):
    directory = train(script, tmp_path, env_id="Pendulum-v1", total_timesteps=5, eval_every=0)
    good = torch.load(directory / "agent.pt", weights_only=True)
    path = tmp_path / "crafted.pt"
    crafted = [
        {**good, "obs_dim": 4},
        {**good, "obs_dim": "many"},
        {**good, "act_dim": -1},
        {**good, "args": {**good["args"], "hidden_dim": 10**7}},  # must not be allocated
        {**good, "args": {**good["args"], "surprise": 1}},
        {**good, "weights": {}},
        {**good, "weights": {name: "text" for name in good["weights"]}},  # noqa: C420
        {**good, "script": "another"},
        {**good, "format": 99},
        {"format": good["format"], "script": good["script"]},
        [1, 2, 3],
    ]
    for contents in crafted:
        torch.save(contents, path)
        with pytest.raises(SystemExit, match=r"crafted\.pt"):
            script.load_agent(path, torch.device("cpu"))
    for data in (b"", b"text", (directory / "agent.pt").read_bytes()[:-100]):
        path.write_bytes(data)
        with pytest.raises(SystemExit, match="damaged"):
            script.load_agent(path, torch.device("cpu"))
    with pytest.raises(SystemExit, match="there is no"):
        script.load_agent(tmp_path / "absent.pt", torch.device("cpu"))


# Numbers that are none.


def test_a_loss_that_is_not_finite_stops_the_run(script, tmp_path, monkeypatch):
    update = script.Agent.update

    def update_with_accident(self, batch, step):
        metrics = update(self, batch, step)
        return {**metrics, "losses/qf_loss": torch.tensor(float("nan"))} if step == 173 else metrics

    monkeypatch.setattr(script.Agent, "update", update_with_accident)
    with pytest.raises(SystemExit, match=r"losses/qf_loss is not finite at step 173; .* checkpoint of step 100"):
        train(script, tmp_path, env_id="Pendulum-v1", total_timesteps=400, checkpoint_every=100)
    kept = script.load_file(tmp_path / "run" / "checkpoint.pt")
    assert kept["step"] == 100
    monkeypatch.undo()
    train(script, tmp_path, env_id="Pendulum-v1", total_timesteps=400, checkpoint_every=100, resume=True)


@shared_code
def test_an_action_that_is_not_finite_stops_the_run(script, tmp_path, monkeypatch):
    act, calls = script.Agent.act, iter(range(1000))

    def act_with_accident(self, obs, memory, mode):
        action, memory = act(self, obs, memory, mode)
        return (action * np.nan if mode == "random" and next(calls) == 29 else action), memory

    monkeypatch.setattr(script.Agent, "act", act_with_accident)
    with pytest.raises(SystemExit, match="the action is not finite at step 30"):
        train(script, tmp_path, env_id="Pendulum-v1", eval_every=100)


@shared_code
def test_an_evaluation_action_that_is_not_finite_stops_the_run(script, tmp_path, monkeypatch):
    act = script.Agent.act

    def act_with_accident(self, obs, memory, mode):
        action, memory = act(self, obs, memory, mode)
        return (action * np.nan if mode == "greedy" else action), memory

    monkeypatch.setattr(script.Agent, "act", act_with_accident)
    with pytest.raises(SystemExit, match="an evaluation's action is not finite at step 60"):
        train(script, tmp_path, env_id="Pendulum-v1", eval_every=0)


@shared_code
def test_a_reward_that_is_not_finite_stops_the_run(script, tmp_path):
    with pytest.raises(SystemExit, match="observation or reward is not finite at step 30"):
        train(script, tmp_path, env_id="tests.tasks:BadReward-v0", eval_every=0)


@shared_code
def test_weights_that_are_not_finite_are_not_saved(script, tmp_path, monkeypatch):
    update = script.Agent.update

    def update_with_accident(self, batch, step):
        metrics = update(self, batch, step)
        if step == 60:
            next(self.parameters()).data.fill_(float("inf"))
        return metrics

    monkeypatch.setattr(script.Agent, "update", update_with_accident)
    with pytest.raises(SystemExit, match=r"the weight .* is not finite at step 60"):
        train(script, tmp_path, env_id="Pendulum-v1", total_timesteps=100, checkpoint_every=60, eval_every=0)
    assert not (tmp_path / "run" / "checkpoint.pt").exists()


@shared_code
def test_command_line_reaches_the_run(script, tmp_path):
    """The usual way in: the options as words, the run directory from them."""
    words = command(
        script, env_id="Pendulum-v1", total_timesteps=50, gamma=0.5, runs_dir=tmp_path, run_name="x", **TINY
    )
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, check=True)
    assert json.loads((tmp_path / "x" / "args.json").read_text())["args"]["gamma"] == 0.5
    assert all(re.match(r"step |done", line) for line in done.stdout.splitlines())  # line-based off a terminal
    assert done.stderr == ""
