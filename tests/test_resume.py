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

import sac_continuous_action as sac
from sdar_utils import checkpoint
from sdar_utils import run as run_module
from tests.conftest import ROOT, command, evaluations, run, scalars, snapshot, weights

# Small, but it has all that a long run has: a buffer that wraps, episodes that end between logs and evaluations.
SETTINGS = {
    "env_id": "tests.tasks:Rounds-v0",  # episodes of 30 steps
    "total_timesteps": 500,
    "learning_starts": 100,
    "hidden_dim": 16,
    "batch_size": 16,
    "buffer_size": 220,
    "eval_every": 150,
    "eval_episodes": 1,
    "checkpoint_every": 50,
    "cuda": False,
}
CLOCKS = {"charts/SPS", "charts/seconds"}


def make_args(script, directory, **more):
    return script.Args(**{**SETTINGS, **more}, runs_dir=str(directory.parent), run_name=directory.name)


@functools.cache
def whole_run(script, **more):
    """The run that was never interrupted."""
    return script.train(make_args(script, Path(tempfile.mkdtemp()) / "whole", **more))


def assert_same(whole, directory):
    a, b = weights(whole), weights(directory)
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)
    logged, again = scalars(whole), scalars(directory)
    assert logged.keys() == again.keys()
    for tag in logged:
        if tag in CLOCKS:
            assert [step for step, _ in logged[tag]] == [step for step, _ in again[tag]], tag
        else:
            assert logged[tag] == again[tag], tag
    assert [step for step, _ in logged["charts/episodic_return"]] == list(range(30, 500, 30))
    rows, again = evaluations(whole), evaluations(directory)
    assert [row["step"] for row in rows] == [0, 150, 300, 450, 500]
    assert [{**row, "seconds": 0} for row in rows] == [{**row, "seconds": 0} for row in again]


def start(directory, **more) -> subprocess.Popen:
    words = command(sac, **{**SETTINGS, **more}, runs_dir=directory, run_name="interrupted")
    return subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(condition, process):
    while not condition():
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.05)


def checkpoint_step(run_directory) -> int:
    path = run_directory / "checkpoint.pt"
    return torch.load(path, weights_only=True)["step"] if path.exists() else -1


@pytest.fixture
def rng():
    """Other moments in each run of the tests: the outcome must not depend on them."""
    seed = time.time_ns()
    print(f"random.Random({seed})")
    return random.Random(seed)


class PowerCut(BaseException):
    pass


def cut_at(monkeypatch, step, when):
    """The process is gone, without a word, at this step: before its action, after its update, or after everything.

    N-Rep does not update at every step: it is gone after the next update.
    """
    part = {"begin": "steps", "update": "record", "end": "between_steps"}[when]
    original = getattr(run_module.Run, part)

    def steps(run):
        for number in original(run):
            if number == step:
                raise PowerCut
            yield number

    def other(run, *args):
        result = original(run, *args)
        if run.step >= step:
            raise PowerCut
        return result

    monkeypatch.setattr(run_module.Run, part, steps if when == "begin" else other)


def test_interrupted_at_random_steps(script, tmp_path, monkeypatch, rng):
    directory = tmp_path / "interrupted"
    more = {"n_step": 3} if hasattr(script, "n_step_rows") else {}  # with rows that wait for the next steps
    for i, step in enumerate(sorted(rng.sample(range(101, 490), 3))):
        with monkeypatch.context() as patch:
            cut_at(patch, step, rng.choice(["begin", "update", "end"]))
            with pytest.raises(PowerCut):
                script.train(make_args(script, directory, resume=i > 0, **more))
    script.train(make_args(script, directory, resume=True, **more))
    assert_same(whole_run(script, **more), directory)


@pytest.mark.parametrize("when", ["begin", "end"])
@pytest.mark.parametrize("step", [60, 150, 250, 500])
def test_interrupted_where_things_happen(step, when, tmp_path, monkeypatch):
    """At the first checkpoint, at an evaluation and an episode's end, at a log, and at the very end."""
    directory = tmp_path / "interrupted"
    with monkeypatch.context() as patch:
        cut_at(patch, step, when)
        with pytest.raises(PowerCut):
            sac.train(make_args(sac, directory))
    sac.train(make_args(sac, directory, resume=True))
    assert_same(whole_run(sac), directory)


def test_a_compiled_run_resumes_too(tmp_path, monkeypatch, rng):
    """Compiled code rounds otherwise than eager code, so it is compared with a compiled run."""
    directory = tmp_path / "interrupted"
    with monkeypatch.context() as patch:
        cut_at(patch, rng.randrange(150, 450), "update")
        with pytest.raises(PowerCut):
            sac.train(make_args(sac, directory, compile=True))
    torch._dynamo.reset()  # as in a new process
    sac.train(make_args(sac, directory, compile=True, resume=True))
    assert_same(whole_run(sac, compile=True), directory)


def test_killed_at_random_moments(tmp_path, rng):
    """SIGKILL twice: at any time after the start, and again at any time after it has got further."""
    directory = tmp_path / "interrupted"
    process = start(tmp_path)
    wait_for((directory / "args.json").exists, process)
    time.sleep(rng.uniform(0, 2))
    process.kill()
    process.wait()
    reached = checkpoint_step(directory)
    process = start(tmp_path, resume=True)
    wait_for(lambda: checkpoint_step(directory) > reached or process.poll() == 0, process)
    time.sleep(rng.uniform(0, 0.5))
    process.kill()
    process.wait()
    run(sac, **SETTINGS, runs_dir=tmp_path, run_name="interrupted", resume=True)
    assert_same(whole_run(sac), directory)


@pytest.mark.parametrize("unlucky", ["replay-", "checkpoint.pt", "agent.pt"])
def test_killed_while_a_file_is_written(unlucky, tmp_path, monkeypatch):
    """The power goes before the rename, for files of the third checkpoint or the last: what was there must do."""
    replace, directory = os.replace, tmp_path / "run"

    def fail_late(source, target):
        if Path(target).name.startswith(unlucky) and checkpoint_step(directory) >= 120:
            raise PowerCut
        replace(source, target)

    monkeypatch.setattr(os, "replace", fail_late)
    with pytest.raises(PowerCut):
        sac.train(make_args(sac, directory))
    monkeypatch.undo()
    assert checkpoint_step(directory) == (480 if unlucky == "agent.pt" else 120)
    sac.train(make_args(sac, directory, resume=True))
    assert_same(whole_run(sac), directory)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signals_end_the_episode_and_say_how_to_continue(tmp_path, number, status):
    process = start(tmp_path)
    wait_for(lambda: checkpoint_step(tmp_path / "interrupted") > 0, process)
    reached = checkpoint_step(tmp_path / "interrupted")
    process.send_signal(number)
    out, error = process.communicate()
    assert process.returncode == status, error
    stopped = re.search(r"stopped at step (\d+); to continue: python (.+)", out)
    assert int(stopped[1]) == checkpoint_step(tmp_path / "interrupted") >= reached
    assert int(stopped[1]) % 30 == 0
    subprocess.run([sys.executable, *shlex.split(stopped[2])], cwd=ROOT, check=True, capture_output=True)
    assert_same(whole_run(sac), tmp_path / "interrupted")


@pytest.mark.parametrize("when", ["update", "evaluation"])
def test_a_signal_waits_for_the_end_of_the_episode(when, tmp_path, monkeypatch, capsys):
    """And of the evaluation that is under way; it says so once."""
    if when == "update":
        update = sac.Agent.update
        monkeypatch.setattr(sac.Agent, "update", lambda *a: (a[2] == 152 and send(), update(*a))[1])
    else:
        play = run_module.Evaluator.play
        steps = iter([0, 150])
        monkeypatch.setattr(run_module.Evaluator, "play", lambda *a: (next(steps, 0) == 150 and send(), play(*a))[1])

    def send():
        os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit) as stop:
        sac.train(make_args(sac, tmp_path / "run"))
    assert stop.value.code == 143
    assert checkpoint_step(tmp_path / "run") == 180
    assert capsys.readouterr().out.count("stopping when this episode ends") == 1
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    monkeypatch.undo()
    sac.train(make_args(sac, tmp_path / "run", resume=True))
    assert_same(whole_run(sac), tmp_path / "run")


def test_a_second_signal_ends_the_run_at_once(tmp_path):
    process = start(tmp_path, env_id="tests.tasks:Slow-v0", total_timesteps=10**6, eval_every=0)
    wait_for(lambda: any((tmp_path / "interrupted").glob("events.*")), process)
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    for line in process.stdout:  # an episode of 1,000 seconds
        if line.startswith("stopping when this episode ends"):
            process.send_signal(signal.SIGTERM)
            break
    assert process.wait(timeout=60) == -signal.SIGTERM


def test_a_signal_in_the_last_episode_lets_the_run_finish(tmp_path, monkeypatch):
    update = sac.Agent.update

    def update_and_signal(self, batch, step):
        if step == 485:
            os.kill(os.getpid(), signal.SIGTERM)
        return update(self, batch, step)

    monkeypatch.setattr(sac.Agent, "update", update_and_signal)
    assert_same(whole_run(sac), sac.train(make_args(sac, tmp_path / "run")))


def test_checkpoints_come_as_often_as_asked_for(tmp_path, monkeypatch):
    saved, save = [], checkpoint.Checkpoint.save
    monkeypatch.setattr(
        checkpoint.Checkpoint, "save", lambda self, step, clock: saved.append(step) or save(self, step, clock)
    )
    sac.train(make_args(sac, tmp_path / "often", checkpoint_every=100))
    assert saved == [120, 240, 360, 480]  # each at least 100 steps after the last, at an episode's end
    saved.clear()
    sac.train(make_args(sac, tmp_path / "never", checkpoint_every=0))
    assert saved == []


# What cannot be resumed.


@functools.cache
def make_stopped_run():
    directory = Path(tempfile.mkdtemp()) / "run"
    with pytest.MonkeyPatch.context() as patch:
        cut_at(patch, 200, "begin")
        with pytest.raises(PowerCut):
            sac.train(make_args(sac, directory))
    assert checkpoint_step(directory) == 180
    return directory


@pytest.fixture
def stopped_run(tmp_path):
    """A run directory with a checkpoint at step 180."""
    return Path(shutil.copytree(make_stopped_run(), tmp_path / "run"))


def test_changed_options_are_refused(stopped_run):
    before = snapshot(stopped_run)
    for change in ({"gamma": 0.9}, {"total_timesteps": 1000}, {"seed": 2}, {"env_id": "Hopper-v4"}):
        (name,) = change
        with pytest.raises(SystemExit, match=rf"^error: .* was started with --{name.replace('_', '-')} "):
            sac.train(make_args(sac, stopped_run, resume=True, **change))
        assert snapshot(stopped_run) == before


def test_a_run_is_resumed_to_its_end_without_repeating_its_options(stopped_run):
    assert any((stopped_run / "replay").iterdir())
    run(sac, runs_dir=stopped_run.parent, run_name="run", resume=True)
    assert_same(whole_run(sac), stopped_run)
    assert not (stopped_run / "replay").exists()  # gigabytes that only training needs
    assert not (stopped_run / "checkpoint.pt").exists()
    before = snapshot(stopped_run)
    (stopped_run / "replay").mkdir()  # as if it had been killed just before it tidied up
    (stopped_run / "checkpoint.pt").touch()
    sac.train(make_args(sac, stopped_run, resume=True))
    assert snapshot(stopped_run) == before
    assert not (stopped_run / "replay").exists()
    done = run(sac, 1, runs_dir=stopped_run.parent, run_name="run", resume=True, gamma=0.5)
    assert re.fullmatch(r"error: .* was started with --gamma 0.99, not 0.5; .*\n", done.stderr)


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
    elif how == "missing":
        path.unlink()


@pytest.mark.parametrize("how", ["truncated", "empty", "bits", "missing"])
@pytest.mark.parametrize("what", ["checkpoint.pt", "replay/*", "args.json"])
def test_damaged_files_are_refused(stopped_run, what, how):
    if (what, how) in {("checkpoint.pt", "missing"), ("args.json", "bits")}:
        return  # a run without a checkpoint starts over, and JSON with another letter is another option
    damage(sorted(stopped_run.glob(what))[0], how)
    before = snapshot(stopped_run)
    with pytest.raises(SystemExit, match=r"^error: .*(damaged|nothing to resume)[^\n]*$"):
        sac.train(make_args(sac, stopped_run, resume=True))
    assert snapshot(stopped_run) == before


def test_one_flipped_bit_in_a_weight_is_noticed(stopped_run):
    path = stopped_run / "checkpoint.pt"
    data = bytearray(path.read_bytes())
    weight = max(torch.load(path, weights_only=True)["weights"].values(), key=torch.numel)
    data[data.find(weight.numpy().tobytes())] ^= 1
    path.write_bytes(data)
    with pytest.raises(SystemExit, match="damaged"):
        sac.train(make_args(sac, stopped_run, resume=True))


def test_foreign_and_crafted_checkpoints_are_refused(stopped_run):
    path = stopped_run / "checkpoint.pt"
    good = torch.load(path, weights_only=True)
    crafted = {
        "written by another": {**good, "script": "another"},
        "not a file of this project": {"format": 0},
        "started with --gamma 0.5": {**good, "args": {**good["args"], "gamma": 0.5}},
        "does not fit": {**good, "weights": {}},
        "damaged": {k: v for k, v in good.items() if k != "rng"},
        "damaged or": {**good, "optimizers": {}},
        "damaged .*": {**good, "step": None},
        "damaged or .*": {**good, "clock": {**good["clock"], "episodes": "many"}},
    }
    for complaint, contents in crafted.items():
        torch.save(contents, path)
        before = snapshot(stopped_run)
        with pytest.raises(SystemExit, match=f"^error: .*{complaint}"):
            sac.train(make_args(sac, stopped_run, resume=True))
        assert snapshot(stopped_run) == before


def test_two_processes_cannot_write_one_run(stopped_run, capsys):
    lock = run_module.lock_directory(stopped_run)
    before = snapshot(stopped_run)
    with pytest.raises(SystemExit) as refusal:
        sac.train(make_args(sac, stopped_run, resume=True))
    assert refusal.value.code == run_module.TAKEN
    assert re.fullmatch(r"error: .* is being written by another process\n", capsys.readouterr().err)
    assert snapshot(stopped_run) == before
    os.close(lock)
    sac.train(make_args(sac, stopped_run, resume=True))


def test_a_full_disk_keeps_the_last_checkpoint(stopped_run, monkeypatch):
    def no_space(path, data):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(checkpoint, "write_atomically", no_space)
    with pytest.raises(SystemExit, match=r"No space left on device .* keeps the checkpoint of step 180"):
        sac.train(make_args(sac, stopped_run, resume=True))
    assert checkpoint_step(stopped_run) == 180
