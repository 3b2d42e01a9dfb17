"""A run from outside: its options and errors, directory and logs, and what happens to numbers that are none."""

import json
import os
import platform
import re
import resource
import subprocess

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2

import sac_continuous_action as sac
from sdar_utils import run as run_module
from sdar_utils.checkpoint import load_agent, write_atomically
from sdar_utils.envs import TRAINING, derived_seed, make_env
from sdar_utils.evaluation import MODES, Evaluator, summarise
from tests.conftest import ROOT, TINY, command, evaluations, run, scalars, snapshot, train

# Options.


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"total_timesteps": 0}, "--total-timesteps must be at least 1, not 0"),
        ({"batch_size": -3}, "--batch-size must be at least 1"),
        ({"seed": -1}, "--seed must be at least 0"),
        ({"gamma": 1.5}, r"--gamma must be in \[0, 1\], not 1.5"),
        ({"gamma": float("nan")}, "--gamma must be in"),
        ({"tau": 0.0}, "--tau must be in"),
        ({"run_name": "../elsewhere"}, "put the path into --runs-dir"),
        ({"run_name": ".."}, "no directory name"),
        ({"run_name": ""}, "no directory name"),
        ({"buffer_device": "cuda"}, "contradicts --no-cuda"),
        ({"run_name": None, "resume": True}, "--resume needs the --run-name"),
        ({"resume": True}, "nothing to resume"),
    ],
)
def test_bad_options_are_refused_before_anything_is_made(options, complaint, tmp_path):
    with pytest.raises(SystemExit, match=f"^error: .*{complaint}"):
        train(sac, tmp_path / "runs", env_id="Pendulum-v1", **options)
    assert not (tmp_path / "runs").exists()


def test_errors_are_one_line_and_an_exit_status(tmp_path):
    done = run(sac, expect=1, env_id="CartPole-v1", cuda=False, runs_dir=tmp_path / "runs")
    assert re.fullmatch(r"error: [^\n]+\n", done.stderr)
    assert not (tmp_path / "runs").exists()


def test_the_command_line_reaches_the_run(tmp_path):
    """The usual way in: the options as words, the run directory from them."""
    words = command(sac, env_id="Pendulum-v1", total_timesteps=50, gamma=0.5, runs_dir=tmp_path, run_name="x", **TINY)
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, check=True)
    assert json.loads((tmp_path / "x" / "args.json").read_text())["args"]["gamma"] == 0.5
    assert all(re.match(r"step |done", line) for line in done.stdout.splitlines())  # line-based off a terminal
    assert done.stderr == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_what_the_user_should_know_is_a_line(tmp_path, capfd):
    train(sac, tmp_path, env_id="Pendulum-v1", total_timesteps=40, cuda=True)
    warnings = capfd.readouterr().err.splitlines()
    assert [re.match("warning: .*(nothing will be learned|training on the CPU)", line)[1] for line in warnings] == [
        "nothing will be learned",
        "training on the CPU",
    ]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators need no help")
def test_freed_tensors_leave_their_memory_to_the_next_ones():
    run_module.keep_freed_memory()

    def page_faults() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(5):
            tensors = [torch.ones(2**20) for _ in range(8)]  # 4 MiB or 1024 pages each
            del tensors
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    page_faults()
    assert page_faults() < 1024


# The directory.


def test_an_existing_run_is_not_overwritten(tmp_path, capfd):
    directory = train(sac, tmp_path, env_id="Pendulum-v1", total_timesteps=5)
    before = snapshot(directory)
    with pytest.raises(SystemExit) as refusal:
        train(sac, tmp_path, env_id="Pendulum-v1")
    assert refusal.value.code == run_module.TAKEN
    assert re.search(r"^error: .* exists; continue it with --resume", capfd.readouterr().err, re.M)
    assert snapshot(directory) == before


def test_a_directory_is_made_whole_or_not_at_all(tmp_path, monkeypatch):
    def no_space(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(SystemExit, match=r"cannot make the run directory .*: No space left on device"):
        run_module.create_directory(tmp_path / "run", {})
    assert not list(tmp_path.iterdir())


def test_the_default_name(tmp_path):
    directory = train(sac, tmp_path, env_id="tests.tasks:Endless-v0", run_name=None, seed=7)
    assert re.fullmatch(r"tests\.tasks:Endless-v0__sac_continuous_action__7__\d+", directory.name)
    assert {path.name for path in directory.iterdir() if not path.name.startswith("events.")} == {
        "agent.pt",
        "args.json",
        "evaluation.json",
        "evaluations.csv",
    }


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def no_space(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"


# Logs.


def test_logs(tmp_path):
    options = {"env_id": "LunarLanderContinuous-v3", "total_timesteps": 600, "eval_every": 300, "eval_episodes": 2}
    directory = train(sac, tmp_path, **options)
    logged, rows = scalars(directory), evaluations(directory)
    tags = "charts/episodic_return charts/episodic_length charts/SPS losses/qf_loss losses/actor_loss eval/return "
    tags += "eval/return_stochastic eval/apr eval/afr eval/afr_per_dim eval/apr_dim_0 eval/apr_dim_1 "
    tags += "eval/apr_stochastic eval/afr_stochastic charts/seconds"
    assert set(tags.split()) <= set(logged)
    assert [row["step"] for row in rows] == [0, 300, 600]
    for name in ("return", "return_stochastic", "length", "apr_dim_1", "afr_stochastic", "decisions_per_step"):
        assert logged[f"eval/{name}"] == [(row["step"], pytest.approx(row[name], rel=1e-5)) for row in rows]
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


def test_evaluations_are_both_modes_of_the_agent(tmp_path):
    """Row, file and agent agree: agent.pt plays the run's last evaluation again."""
    directory = train(sac, tmp_path, env_id="LunarLanderContinuous-v3", total_timesteps=300, eval_episodes=3, seed=4)
    (row,) = evaluations(directory)
    final = json.loads((directory / "evaluation.json").read_text())
    agent, contents = load_agent(directory / "agent.pt", torch.device("cpu"))
    assert (contents["obs_dim"], contents["act_dim"]) == (8, 2)
    played = Evaluator(lambda: make_env(agent.args.env_id), 4, torch.device("cpu")).play(agent.act, 3)
    for mode, ending in zip(MODES, ("", "_stochastic"), strict=True):
        summary = summarise(played[mode])
        assert summary == final[mode]
        for name, value in summary.items():
            if name == "apr_dim":
                assert value == [row[f"apr_dim_{i}{ending}"] for i in range(2)]
            elif name != "episodes":
                assert value == row[name + ending]
    assert row["episodes"] == 3
    returns = [t.total_reward for t in played["stochastic"]]
    assert row["return_standard_error_stochastic"] == pytest.approx(np.std(returns, ddof=1) / 3**0.5)


def test_each_episode_starts_from_a_seed_of_its_own(tmp_path, monkeypatch):
    rows, add = [], sac.ReplayBuffer.add
    monkeypatch.setattr(sac.ReplayBuffer, "add", lambda self, **row: rows.append(row) or add(self, **row))
    train(sac, tmp_path, env_id="Pendulum-v1", total_timesteps=450, learning_starts=450, seed=6)
    for i, row in enumerate(rows[::200]):
        np.testing.assert_array_equal(row["obs"], make_env("Pendulum-v1").reset(seed=derived_seed(6, TRAINING, i))[0])
    assert len({row["obs"].tobytes() for row in rows[::200]}) == 3


def test_logged_losses_are_means_over_the_steps_between(tmp_path, monkeypatch):
    values = iter(range(10_000))
    monkeypatch.setattr(sac.Agent, "update", lambda self, *_: {"losses/x": torch.tensor(float(next(values)))})
    directory = train(sac, tmp_path, env_id="Pendulum-v1", total_timesteps=500, learning_starts=0)
    assert scalars(directory)["losses/x"] == [(250, np.mean(range(250))), (500, np.mean(range(250, 500)))]


def test_weights_and_biases_offline(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    run(sac, env_id="Pendulum-v1", total_timesteps=60, runs_dir=tmp_path, run_name="a run", track=True, **TINY)
    (record,) = (tmp_path / "a run" / "wandb").glob("offline-run-*/*.wandb")
    data = record.read_bytes()
    for expected in (b"eval/return", b"Pendulum-v1", b"sac_continuous_action.py", b"sdar_utils/replay.py"):
        assert expected in data
    for other in (b"nrep_sac.py", b"tests/conftest.py"):
        assert other not in data


def test_videos(tmp_path):
    directory = train(sac, tmp_path, env_id="Pendulum-v1", capture_video=True)
    assert [path.name for path in (directory / "videos").iterdir()] == ["step-000000060.mp4"]


def test_what_cannot_be_rendered_is_refused_first(tmp_path):
    with pytest.raises(SystemExit, match=r"--capture-video cannot render .*EGL"):
        train(sac, tmp_path / "runs", env_id="tests.tasks:Endless-v0", capture_video=True)
    assert not (tmp_path / "runs").exists()


# Files from others.


def test_files_from_strangers_cannot_run_code(tmp_path, monkeypatch):
    class Evil:
        def __reduce__(self):
            return open, (str(tmp_path / "executed"), "w")

    torch.save({"format": 2, "script": "sac_continuous_action", "args": Evil()}, tmp_path / "agent.pt")
    with pytest.raises(SystemExit, match="damaged or not one of ours"):
        load_agent(tmp_path / "agent.pt", torch.device("cpu"))
    (tmp_path / "evil_script.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')")
    monkeypatch.syspath_prepend(tmp_path)
    for script in ("evil_script", ["evil_script"], None):
        torch.save({"format": 2, "script": script}, tmp_path / "agent.pt")
        with pytest.raises(SystemExit, match="these can be loaded: sac_continuous_action"):
            load_agent(tmp_path / "agent.pt", torch.device("cpu"))
    assert not (tmp_path / "executed").exists()


def test_crafted_agent_files_give_an_error(tmp_path):
    directory = train(sac, tmp_path, env_id="Pendulum-v1", total_timesteps=5)
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
        with pytest.raises(SystemExit, match=r"^error: .*crafted\.pt"):
            load_agent(path, torch.device("cpu"))
    for data in (b"", b"text", (directory / "agent.pt").read_bytes()[:-100]):
        path.write_bytes(data)
        with pytest.raises(SystemExit, match="damaged"):
            load_agent(path, torch.device("cpu"))
    with pytest.raises(SystemExit, match="there is no"):
        load_agent(tmp_path / "absent.pt", torch.device("cpu"))


# Numbers that are none.


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path, monkeypatch):
    update = sac.Agent.update

    def update_with_accident(self, batch, step):
        metrics = update(self, batch, step)
        return {**metrics, "losses/qf_loss": torch.tensor(float("nan"))} if step == 273 else metrics

    monkeypatch.setattr(sac.Agent, "update", update_with_accident)
    options = {"env_id": "Pendulum-v1", "total_timesteps": 600, "checkpoint_every": 100}
    with pytest.raises(SystemExit, match=r"losses/qf_loss is not finite at step 273; .* checkpoint of step 200"):
        train(sac, tmp_path, **options)
    assert torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)["step"] == 200
    monkeypatch.undo()
    train(sac, tmp_path, **options, resume=True)


@pytest.mark.parametrize(("learning_starts", "at"), [(40, 50), (60, 60)], ids=["in training", "in an evaluation"])
def test_an_action_that_is_not_finite_stops_the_run(tmp_path, monkeypatch, learning_starts, at):
    act, calls = sac.Agent.act, []

    def act_with_accident(self, obs, *args):
        action, steps = act(self, obs, *args)
        calls.append(1)
        return action * (np.nan if len(calls) == 10 or obs.ndim == 2 else 1), steps

    monkeypatch.setattr(sac.Agent, "act", act_with_accident)
    with pytest.raises(SystemExit, match=f"an action is not finite at step {at}; .* keeps its logs"):
        train(sac, tmp_path, env_id="Pendulum-v1", learning_starts=learning_starts)


def test_a_reward_that_is_not_finite_stops_the_run(tmp_path):
    with pytest.raises(SystemExit, match="observation or reward is not finite at step 30"):
        train(sac, tmp_path, env_id="tests.tasks:BadReward-v0")


def test_weights_that_are_not_finite_are_not_saved(tmp_path, monkeypatch):
    update = sac.Agent.update

    def update_with_accident(self, batch, step):
        metrics = update(self, batch, step)
        if step == 200:
            next(self.parameters()).data.fill_(float("inf"))
        return metrics

    monkeypatch.setattr(sac.Agent, "update", update_with_accident)
    with pytest.raises(SystemExit, match=r"the weight .* is not finite at step 200"):
        train(sac, tmp_path, env_id="Pendulum-v1", total_timesteps=400, checkpoint_every=100)
    assert not (tmp_path / "run" / "checkpoint.pt").exists()
