"""A run that is stopped or killed, however often, ends as one that never was; what cannot be resumed is left alone."""

import functools
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch

from tests.conftest import ROOT, SCRIPTS, command, load, run, scalars, shared_code, snapshot, weights

# Small, but it has all that a long run has: a buffer that wraps, checkpoints within episodes, evaluations.
SETTINGS = {
    "env_id": "Pendulum-v1",
    "total_timesteps": 500,
    "learning_starts": 100,
    "hidden_dim": 16,
    "batch_size": 16,
    "buffer_size": 220,
    "eval_every": 150,
    "eval_episodes": 1,
    "checkpoint_every": 60,
    "cuda": False,
}
CLOCKS = {"charts/SPS", "charts/seconds"}


def make_args(script, directory, **more):
    return script.Args(**SETTINGS, runs_dir=str(directory.parent), run_name=directory.name, **more)


@functools.cache
def whole_run(script):
    """The run that was never interrupted."""
    return script.train(make_args(script, Path(tempfile.mkdtemp()) / "whole"))


def assert_same_as_whole(script, directory):
    a, b = weights(whole_run(script)), weights(directory)
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)
    logged, again = scalars(whole_run(script)), scalars(directory)
    assert logged.keys() == again.keys()
    for tag in logged:
        if tag in CLOCKS:
            assert [step for step, _ in logged[tag]] == [step for step, _ in again[tag]], tag
        else:
            assert logged[tag] == again[tag], tag
    assert [step for step, _ in logged["charts/episodic_return"]] == [200, 400]


def start(script, directory, **more) -> subprocess.Popen:
    words = command(script, **SETTINGS, runs_dir=directory, run_name="interrupted", **more)
    return subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(condition, process):
    while not condition():
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.1)


def checkpoint_step(run_directory) -> int:
    path = run_directory / "checkpoint.pt"
    return torch.load(path, weights_only=True)["step"] if path.exists() else -1


class PowerCut(BaseException):
    pass


def test_interrupted_at_random_steps(script, tmp_path, monkeypatch):
    """Twice the run is gone between two steps, without a word, and goes on from its last checkpoint."""
    rng = random.Random(time.time_ns())  # other steps in each run of the tests; the outcome must not depend on them
    directory = tmp_path / "interrupted"
    between_steps = script.Run.between_steps
    for i, cut in enumerate(sorted(rng.sample(range(500), 2))):

        def fail_at_cut(run, cut=cut):
            if run.step == cut:
                raise PowerCut
            between_steps(run)

        monkeypatch.setattr(script.Run, "between_steps", fail_at_cut)
        with pytest.raises(PowerCut):
            script.train(make_args(script, directory, resume=i > 0))
    monkeypatch.undo()
    script.train(make_args(script, directory, resume=True))
    assert_same_as_whole(script, directory)


@shared_code
def test_killed_at_random_moments(script, tmp_path):
    """SIGKILL twice: at any time after the start, and again at any time after it has got further."""
    rng = random.Random(time.time_ns())  # another moment in each run of the tests; the outcome must not depend on it
    directory = tmp_path / "interrupted"
    process = start(script, tmp_path)
    wait_for((directory / "args.json").exists, process)
    time.sleep(rng.uniform(0, 4))
    process.kill()
    process.wait()
    reached = checkpoint_step(directory)
    process = start(script, tmp_path, resume=True)
    wait_for(lambda: checkpoint_step(directory) > reached or process.poll() == 0, process)
    time.sleep(rng.uniform(0, 1))
    process.kill()
    process.wait()
    run(script, **SETTINGS, runs_dir=tmp_path, run_name="interrupted", resume=True)
    assert_same_as_whole(script, directory)


@shared_code
def test_killed_while_a_checkpoint_is_written(script, tmp_path, monkeypatch):
    """The power goes before the rename, for each file of the third checkpoint: the second one must do."""
    replace = os.replace
    for unlucky in ("replay-", "checkpoint.pt"):
        directory = tmp_path / f"cut {unlucky}"

        def fail_late(source, target, directory=directory, unlucky=unlucky):
            if Path(target).name.startswith(unlucky) and checkpoint_step(directory) == 120:
                raise KeyboardInterrupt
            replace(source, target)

        monkeypatch.setattr(os, "replace", fail_late)
        with pytest.raises(KeyboardInterrupt):
            script.train(make_args(script, directory))
        monkeypatch.undo()
        assert checkpoint_step(directory) == 120
        script.train(make_args(script, directory, resume=True))
        assert_same_as_whole(script, directory)


@shared_code
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signals_checkpoint_and_say_how_to_continue(script, tmp_path, number, status):
    process = start(script, tmp_path)
    wait_for(lambda: checkpoint_step(tmp_path / "interrupted") > 0, process)
    reached = checkpoint_step(tmp_path / "interrupted")
    process.send_signal(number)
    out, error = process.communicate()
    assert process.returncode == status, error
    assert checkpoint_step(tmp_path / "interrupted") >= reached
    stopped = re.search(r"stopped at step ([\d,]+); to continue: python (.+)", out)
    assert int(stopped[1].replace(",", "")) == checkpoint_step(tmp_path / "interrupted")
    subprocess.run([sys.executable, *shlex.split(stopped[2])], cwd=ROOT, check=True, capture_output=True)
    assert_same_as_whole(script, tmp_path / "interrupted")


def test_a_signal_during_an_evaluation_repeats_it_later(script, tmp_path, monkeypatch):
    play = script.play_episode
    calls = iter(range(100))

    def interrupted(*args, **kwargs):
        if next(calls) == 3:  # the stochastic episode of the second evaluation
            os.kill(os.getpid(), signal.SIGTERM)
        return play(*args, **kwargs)

    monkeypatch.setattr(script, "play_episode", interrupted)
    with pytest.raises(SystemExit) as stop:
        script.train(make_args(script, tmp_path / "run"))
    assert stop.value.code == 143
    assert checkpoint_step(tmp_path / "run") == 150
    monkeypatch.undo()
    script.train(make_args(script, tmp_path / "run", resume=True))
    assert_same_as_whole(script, tmp_path / "run")


@functools.cache
def make_stopped_run(script):
    directory = Path(tempfile.mkdtemp()) / "run"
    update = script.Agent.update

    def update_and_stop(self, batch, step):
        if step == 130:
            os.kill(os.getpid(), signal.SIGTERM)
        return update(self, batch, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script.Agent, "update", update_and_stop)
        with pytest.raises(SystemExit):
            script.train(make_args(script, directory))
    assert checkpoint_step(directory) == 130
    return directory


@pytest.fixture
def stopped_run(script, tmp_path):
    """A run directory with a checkpoint at step 130, in the middle of an episode."""
    return Path(shutil.copytree(make_stopped_run(script), tmp_path / "run"))


@shared_code
def test_changed_options_are_refused(script, stopped_run):
    before = snapshot(stopped_run)
    for change in ({"gamma": 0.9}, {"total_timesteps": 1000}, {"seed": 2}, {"env_id": "Hopper-v4"}):
        (name,) = change
        done = run(script, 1, runs_dir=stopped_run.parent, run_name="run", resume=True, **change)
        assert re.fullmatch(rf"error: .*--{name.replace('_', '-')} .*\n", done.stderr)
        assert snapshot(stopped_run) == before


@shared_code
def test_a_run_is_resumed_to_its_end_without_repeating_its_options(script, stopped_run):
    assert any((stopped_run / "replay").iterdir())
    run(script, runs_dir=stopped_run.parent, run_name="run", resume=True)
    assert_same_as_whole(script, stopped_run)
    assert not (stopped_run / "replay").exists()  # gigabytes that only training needs
    before = snapshot(stopped_run)
    (stopped_run / "replay").mkdir()  # as if it had been killed just before it tidied up
    assert "finished already" in run(script, runs_dir=stopped_run.parent, run_name="run", resume=True).stdout
    assert snapshot(stopped_run) == before
    assert not (stopped_run / "replay").exists()


def damage(path, how):
    data = path.read_bytes()
    if how == "truncated":
        path.write_bytes(data[: len(data) // 2])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "bits":
        flipped = bytearray(data)
        for position in range(len(data) // 2, len(data), 997):  # some of them hit what matters
            flipped[position] ^= 4
        path.write_bytes(flipped)
    elif how == "text":
        path.write_text("weights")
    elif how == "missing":
        path.unlink()


@shared_code
@pytest.mark.parametrize("how", ["truncated", "empty", "bits", "text", "missing"])
@pytest.mark.parametrize("what", ["checkpoint.pt", "replay/*", "args.json"])
def test_damaged_files_are_refused(script, stopped_run, what, how):
    if (what, how) in {("checkpoint.pt", "missing"), ("args.json", "bits")}:
        pytest.skip("a run without a checkpoint starts over, and JSON with another letter is another option")
    damage(sorted(stopped_run.glob(what))[0], how)
    before = snapshot(stopped_run)
    args = make_args(script, stopped_run, resume=True)
    with pytest.raises(SystemExit, match=r"^error: .*(damaged|nothing to resume)[^\n]*$"):
        script.train(args)
    assert snapshot(stopped_run) == before


@shared_code
def test_one_flipped_bit_in_a_weight_is_noticed(script, stopped_run):
    path = stopped_run / "checkpoint.pt"
    data = bytearray(path.read_bytes())
    weight = max(torch.load(path, weights_only=True)["weights"].values(), key=torch.numel)
    data[data.find(weight.numpy().tobytes())] ^= 1
    path.write_bytes(data)
    with pytest.raises(SystemExit, match="damaged"):
        script.train(make_args(script, stopped_run, resume=True))


@shared_code
def test_a_write_that_fails_leaves_the_old_file(script, tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def no_space(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match="No space left"):
        script.write_atomically(path, b"new")
    assert path.read_bytes() == b"old"


@shared_code
def test_foreign_and_crafted_checkpoints_are_refused(script, stopped_run):
    path = stopped_run / "checkpoint.pt"
    good = torch.load(path, weights_only=True)
    args = make_args(script, stopped_run, resume=True)
    other_options = {**good["args"], "gamma": 0.5}
    crafted = {
        "written by another": {**good, "script": "another"},
        "not a file of this project": {"format": 0},
        "started with --gamma 0.5": {**good, "args": other_options},
        "does not fit": {**good, "weights": {}},
        "damaged": {k: v for k, v in good.items() if k != "rng"},
        "damaged or": {**good, "optimizers": {}},
        "damaged .*": {**good, "step": None},
    }
    for complaint, contents in crafted.items():
        torch.save(contents, path)
        before = snapshot(stopped_run)
        with pytest.raises(SystemExit, match=complaint):
            script.train(args)
        assert snapshot(stopped_run) == before


@shared_code
def test_two_processes_cannot_write_one_run(script, tmp_path):
    process = start(script, tmp_path)
    wait_for(lambda: any((tmp_path / "interrupted").glob("events.*")), process)  # it has the lock by then
    args = make_args(script, tmp_path / "interrupted", resume=True)
    with pytest.raises(SystemExit, match="being written by another process"):
        script.train(args)
    process.kill()
    process.wait()


def test_a_task_that_does_not_replay_is_named(tmp_path):
    script = load(SCRIPTS[0])
    values = {**SETTINGS, "env_id": "tests.tasks:Restless-v0", "total_timesteps": 400, "runs_dir": tmp_path}
    process = subprocess.Popen(command(script, **values, run_name="r"), cwd=ROOT, stdout=subprocess.PIPE)
    wait_for(lambda: checkpoint_step(tmp_path / "r") > 0, process)
    process.kill()
    process.wait()
    done = run(script, runs_dir=tmp_path, run_name="r", resume=True)
    assert re.fullmatch(r"warning: the task did not replay [^\n]+\n", done.stderr)


@shared_code
def test_a_full_disk_keeps_the_last_checkpoint(script, stopped_run, monkeypatch):
    def no_space(path, data):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(script, "write_atomically", no_space)
    args = make_args(script, stopped_run, resume=True)
    with pytest.raises(SystemExit, match=r"No space left on device .* keeps the checkpoint of step 130"):
        script.train(args)
    assert checkpoint_step(stopped_run) == 130
