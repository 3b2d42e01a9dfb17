"""benchmark.sh: the matrix it prints, and sweeps that fail, stop and continue, with real and make-believe runs."""

import dataclasses
import itertools
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
import tyro

from sdar_utils.run import TAKEN
from tests.conftest import ROOT, SCRIPTS, TINY, load, options, snapshot, weights

TASKS = {  # steps, n of N-Rep, TAAC's family
    "MountainCarContinuous-v0": (100_000, 4, "simple control"),
    "LunarLanderContinuous-v3": (300_000, 4, "simple control"),
    "BipedalWalker-v3": (600_000, 4, "terrain"),
    "HalfCheetah-v4": (3_000_000, 2, "locomotion"),
    "Humanoid-v4": (3_000_000, 4, "locomotion"),
    "Walker2d-v4": (1_500_000, 4, "locomotion"),
    "Hopper-v4": (1_000_000, 4, "locomotion"),
    "Ant-v4": (3_000_000, 2, "locomotion"),
    "FetchReach-v4": (100_000, 2, "manipulation"),
    "Pusher-v5": (500_000, 4, "other"),
    "Reacher-v4": (100_000, 2, "other"),
}
# Learning rate, reward clip (None: raw rewards), target entropy per dimension, advantage clip, warm-up, TD length.
FAMILIES = {
    "simple control": (1e-4, 5, -1.609, False, 10_000, 4),
    "locomotion": (3e-4, None, -1.0, True, 50_000, 4),
    "terrain": (5e-4, 1, -1.609, False, 20_000, 6),
    "manipulation": (1e-3, 1, -0.916, False, 10_000, 4),
    "other": (3e-4, None, -1.0, False, 5_000, 4),
}
SMALL = {**TINY, "compile": False, "eval_every": 10_000}  # evaluated at step 0, by which a test sees that it has begun
EXTRA = shlex.join(options(**{name: value for name, value in SMALL.items() if name != "cuda"}))

# Takes a second's fraction instead of four: makes the agent.pt, or does what the file `behave` beside it says.
MAKE_BELIEVE = """#!/usr/bin/env bash
[[ $1 == -c ]] && exec cat >/dev/null
here=$(dirname "$0") script=$(basename "$1" .py)
[[ $script == report ]] && { echo "report $*"; exit; }
echo "$script $CUDA_VISIBLE_DEVICES $OMP_NUM_THREADS $*" >>"$here/started"
while [[ $1 != --run-name ]]; do shift; done
name=$2
while [[ $1 != --runs-dir ]]; do shift; done
directory=$2/$name
mkdir -p "$directory"
[[ ! -e $here/behave ]] || source "$here/behave"
touch "$directory/agent.pt"
"""


@pytest.fixture
def place(tmp_path) -> Path:
    """A directory with odd characters and all that a sweep needs, where report.py only says its arguments."""
    place = tmp_path / 'it\'s 50% $HOME & "ü"'
    place.mkdir()
    for name in ("benchmark.sh", "sdar_utils", "tests", *(f"{script}.py" for script in SCRIPTS)):
        (place / name).symlink_to(ROOT / name)
    (place / "report.py").write_text("import sys\nprint('report', *sys.argv[1:], sep='|')\n")
    (place / "python").write_text(MAKE_BELIEVE)
    (place / "python").chmod(0o755)
    return place


def start(place: Path, *words: str, python: str = sys.executable, **env: str) -> subprocess.Popen:
    """In a session of its own, so that the test can press Ctrl-C as a terminal does: for all the process group."""
    return subprocess.Popen(
        [str(place / "benchmark.sh"), *words],
        cwd=place,
        env={**os.environ, "PYTHON": python, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def sweep(place: Path, *words: str, expect: int = 0, **more: str) -> subprocess.CompletedProcess:
    process = start(place, *words, **more)
    out, error = process.communicate()
    assert process.returncode == expect, out + error
    return subprocess.CompletedProcess(words, process.returncode, out, error)


def printed_commands(*words: str, place: Path = ROOT, **env: str) -> list[list[str]]:
    """The command lines of a dry run, as a shell would read them; the last one is the report's."""
    out = sweep(place, *words, "--dry-run", **env).stdout
    return [shlex.split(line) for line in out.splitlines() if not line.startswith("#")]


def option(command: list[str], name: str) -> str:
    return command[command.index(name) + 1]


def test_alone_it_explains_itself():
    out = sweep(ROOT).stdout
    source = (ROOT / "benchmark.sh").read_text()
    parsed = source[source.index("while (($#)); do") : source.index("unknown option")]
    options = set(re.findall(r"(?<=[ |])--[a-z-]+(?= \||\))", parsed)) - {"--slurm-task"}
    assert len(options) > 20
    assert {name for name in options if f"{name} " not in out and f"{name}\n" not in out} == {"--help"}


def test_the_paper_is_660_commands():
    *commands, report = printed_commands("--paper", "--runs-dir", "/some where")
    expected = Counter()
    for (task, (steps, n, _)), script, seed in itertools.product(TASKS.items(), SCRIPTS, range(1, 11)):
        expected[task, script, str(seed), str(steps), str(n) if script == "nrep_sac" else None] += 1
    printed = Counter()
    for command in commands:
        repeat = option(command, "--repeat") if "--repeat" in command else None
        script = Path(command[2]).stem
        printed[
            option(command, "--env-id"), script, option(command, "--seed"), option(command, "--total-timesteps"), repeat
        ] += 1
        name = f"{option(command, '--env-id')}__{script}__{option(command, '--seed')}"
        assert option(command, "--run-name") == name
        assert option(command, "--exp-name") == script
        assert option(command, "--runs-dir") == "/some where"
        assert command[0] == f"OMP_NUM_THREADS={os.environ['OMP_NUM_THREADS']}"
    assert printed == expected
    assert len(commands) == 660
    assert {option(command, "--seed") for command in commands[:66]} == {"1"}  # a partial sweep is a whole small study
    assert [Path(report[1]).name, *report[2:]] == ["report.py", "/some where", "--out", str(ROOT / "report")]


@pytest.mark.parametrize("words", [["--paper", "--seeds", "1", "--track"], ["--quick", "--label", "x"]])
def test_the_scripts_take_what_is_printed(words):
    for command in printed_commands(*words)[:-1]:
        module = load(Path(command[2]).stem)
        args = tyro.cli(module.Args, args=command[3:])
        module.check_args(args)
        assert args.exp_name == module.__name__ + ("-x" if "--label" in words else "")
        assert args.track == ("--track" in words)
        assert not args.cuda


def printed_args(*words: str) -> dict[tuple[str, str], object]:
    """The options that each script and task ends up with."""
    found = {}
    for command in printed_commands(*words, "--seeds", "1")[:-1]:
        module = load(Path(command[2]).stem)
        found[module.__name__, option(command, "--env-id")] = tyro.cli(module.Args, args=command[3:])
    return found


def test_settings_reach_the_scripts():
    """Every task's, as the authors of the baselines have them."""
    args = printed_args("--paper")
    for task, (_, _, family) in TASKS.items():
        sdar = args["sdar_continuous_action", task]
        persistent = family == "simple control"
        assert sdar.selection_entropy_scale == 0.5
        assert sdar.entropy_in_target != persistent
        entropies = (sdar.act_prior, sdar.action_entropy, sdar.target_action_entropy)
        alphas = (sdar.initial_alpha_selection, sdar.initial_alpha_action)
        assert entropies == ((0.2, "acting", -0.5) if persistent else (0.5, "surplus", -1))
        assert alphas == ((1, 1) if persistent else (0.01, 0.01))
        assert sdar.warmup_repeats == ("one" if persistent else "none")
        assert sdar.initial_act_probability == (0.5 if persistent else 0.9)
        assert sdar.n_step == (4 if persistent else 1)
        skips = [args[f"{algo}_continuous_action", task].max_skip for algo in ("temporl", "ute")]
        assert skips == ([10, 4] if task.startswith("LunarLander") else [20, 20])
        rate, clip, entropy, advantage_clip, warm_up, td_length = FAMILIES[family]
        taac = args["taac_continuous_action", task]
        assert (taac.learning_rate, taac.advantage_clip, taac.td_length) == (rate, advantage_clip, td_length)
        assert taac.reward_normaliser == ("off" if clip is None else "full")
        assert clip in (None, taac.reward_clip)
        assert math.log(2 * taac.action_min_prob) == pytest.approx(entropy, abs=1e-3)
        assert taac.learning_starts == warm_up
        assert (taac.initial_std, taac.log_std_max) == (1, 2)
        assert taac.log_std_min == (-10 if family in ("locomotion", "other") else -20)


def test_a_short_run_has_a_warm_up_of_a_tenth_at_most():
    args = printed_args("--algos", "taac", "--total-timesteps", "30000")
    warm_ups = {task: args["taac_continuous_action", task].learning_starts for task in TASKS}
    assert warm_ups == {task: 5000 if family == "other" else 3000 for task, (_, _, family) in TASKS.items()}


@pytest.mark.parametrize(
    ("algo", "extra", "expected"),
    [
        ("sdar", "--selection-entropy-scale 0.4", {"selection_entropy_scale": 0.4}),
        ("nrep", "--repeat 3", {"repeat": 3}),
        ("ute", "--max-skip 7", {"max_skip": 7}),
        ("taac", "--no-advantage-clip --learning-starts 77", {"advantage_clip": False, "learning_starts": 77}),
    ],
)
def test_extra_args_win_over_settings(algo, extra, expected):
    (args,) = printed_args("--algos", algo, "--tasks", "Ant-v4", "--extra-args", extra).values()
    assert {name: getattr(args, name) for name in expected} == expected


def test_other_tasks_get_the_defaults_and_the_sweep_says_so(place):
    words = ["--tasks", "Ant-v4,Pendulum-v1", "--total-timesteps", "60"]
    for (script, task), args in printed_args(*words).items():
        if task == "Pendulum-v1":
            swept = {"env_id", "seed", "total_timesteps", "exp_name", "run_name", "runs_dir", "cuda", "compile"}
            default = load(script).Args()
            names = {field.name for field in dataclasses.fields(args)} - swept
            assert {name: getattr(args, name) for name in names} == {name: getattr(default, name) for name in names}
    for dry in ([], ["--dry-run"]):
        out = sweep(place, *words, *dry, "--algos", "sac", "--seeds", "1", python=str(place / "python")).stdout
        assert out.count("not in the table of settings") == 1
        assert "Pendulum-v1 is not in the table of settings" in out


def test_the_page_has_the_settings_as_they_are():
    page = (ROOT / "docs" / "benchmark.md").read_text()
    (printed,) = re.findall(r"<!-- \./benchmark\.sh --settings -->\n\n(.*?)\n\n<!-- end -->", page, re.S)
    assert printed == sweep(ROOT, "--settings").stdout.strip()


def test_selection():
    *commands, _ = printed_commands(
        *("--algos", "ute,sdar", "--tasks", "Pendulum-v1,a/b:C-v0", "--seeds", "7,3", "--total-timesteps", "9"),
        *("--extra-args", "--wandb-entity 'two words'", "--label", "y"),
    )
    assert [option(command, "--run-name") for command in commands] == [
        f"{task}__{script}_continuous_action-y__{seed}"
        for seed in (7, 3)
        for task in ("Pendulum-v1", "a-b:C-v0")
        for script in ("ute", "sdar")
    ]
    assert all(command[-2:] == ["--wandb-entity", "two words"] for command in commands)
    assert [
        option(command, "--seed")
        for command in printed_commands("--algos", "sac", "--tasks", "Ant-v4", "--seeds", "7,")[:-1]
    ] == ["7"]


def test_gpus_in_turn():
    *commands, _ = printed_commands("--paper", "--seeds", "1", "--gpus", "0,3", "--workers", "4")
    assert [command[1] for command in commands] == ["CUDA_VISIBLE_DEVICES=0", "CUDA_VISIBLE_DEVICES=3"] * 33
    assert {command[2] for command in commands} == {"RUNS_PER_GPU=2"}
    assert all("--cuda" in command for command in commands)
    uneven, _ = printed_commands(
        "--algos", "sac", "--tasks", "Ant-v4", "--seeds", "1", "--gpus", "0,3", "--workers", "5"
    )
    assert uneven[2] == "RUNS_PER_GPU=3"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--workers 2", "what to run"),
        ("--paper --quick", "choose one"),
        ("--paper --sedes 3", "unknown option --sedes"),
        ("--paper --seeds", "--seeds needs a value"),
        ("--paper --algos sdar,ppo", "there is no 'ppo'"),
        ("--paper --algos sdar,sdar", "names sdar twice"),
        ("--paper --tasks Ant-v4,,Hopper-v4", "an entry is empty"),
        ("--tasks Pendulum-v1", "name --total-timesteps"),
        ("--paper --seeds 0", "--seeds must be how many"),
        ("--paper --seeds 1,x", "'x' is no seed"),
        ("--paper --workers 0", "--workers must be a whole number of at least 1"),
        ("--paper --total-timesteps 1e6", "--total-timesteps must be a whole number"),
        ("--paper --slurm --gpus-per-task 0", "--gpus-per-task must be a whole number of at least 1"),
        ("--paper --retries -1", "--retries must be a whole number"),
        ("--paper --label a/b", "letters, digits"),
        ("--paper --partition gpu", "--partition is for --slurm only"),
        ("--paper --slurm --gpus 0", "with --slurm, name"),
        ("--paper --extra-args '--seed 3'", "must not set --seed"),
        ("--paper --extra-args '--run_name=x'", "must not set --run_name"),
        ('--paper --extra-args "--a \'b"', "quotes"),
    ],
)
def test_bad_options_are_one_line(place, words, message):
    before = sorted(place.iterdir())
    done = sweep(place, "--dry-run", *shlex.split(words), expect=1)
    assert done.stdout == ""
    assert re.fullmatch(r"error: .*\n", done.stderr)
    assert message in done.stderr
    assert sorted(place.iterdir()) == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--algos sac,nrep --tasks Pendulum-v1,Pendulum-v77", "cannot make --env-id Pendulum-v77"),
        (
            "--algos sdar,sac --tasks Pendulum-v1 --extra-args '--selection joint'",
            "do not fit sac_continuous_action.py",
        ),
        pytest.param(
            "--algos sac --tasks Pendulum-v1 --gpus 0,1",
            "--gpus 0,1: 0 cannot be used: ",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here"),
        ),
    ],
)
def test_what_only_python_knows_is_checked_first(place, words, message):
    done = sweep(place, *shlex.split(words), "--total-timesteps", "50", expect=1)
    assert re.match(r"error: ", done.stderr.splitlines()[-1])
    assert message in done.stderr
    assert not (place / "runs").exists()


def test_no_packages_no_sweep(place):
    (place / "bare").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -S "$@"\n')
    (place / "bare").chmod(0o755)
    done = sweep(place, "--quick", python=str(place / "bare"), expect=1)
    assert re.fullmatch(r"error: .*No module named.*PYTHON=.*\n", done.stderr)
    done = sweep(place, "--quick", python="/no/such/python", expect=1)
    assert re.fullmatch(r"error: there is no Python at '/no/such/python'.*\n", done.stderr)


@pytest.mark.parametrize(
    ("words", "compiled"),
    [
        ("--paper", True),
        ("--paper --slurm", True),
        ("--paper --extra-args --no-compile", False),
        ("--paper --gpus 0", False),
        ("--paper --slurm --gpus-per-task 1", False),
        ("--quick", False),
    ],
)
def test_runs_on_cpus_are_compiled_where_there_is_a_compiler(words, compiled):
    words = [*words.split(), "--algos", "sac", "--tasks", "Ant-v4", "--seeds", "1"]
    found = sweep(ROOT, *words, "--dry-run", CXX="true").stdout
    assert (" --compile" in found) == compiled
    assert ("# C++ compiler found: new runs are compiled" in found) == compiled
    missing = sweep(ROOT, *words, "--dry-run", CXX="/no/such/compiler").stdout
    assert " --compile" not in missing
    assert ("# no C++ compiler found: new runs are not compiled" in missing) == compiled


@pytest.mark.parametrize("works", [True, False])
def test_the_compiler_is_the_one_that_torch_takes(tmp_path, monkeypatch, works):
    monkeypatch.delenv("CXX", raising=False)
    name = "clang++" if sys.platform == "darwin" else "g++"
    (tmp_path / name).symlink_to(shutil.which("true" if works else "false"))
    words = ["--algos", "sac", "--tasks", "Ant-v4", "--seeds", "1"]
    run, _ = printed_commands(*words, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert ("--compile" in run) == works


def test_begun_runs_are_continued_with_the_options_they_have(place):
    """A compiler may come and go, which is no reason to refuse the runs that exist; another budget is one."""
    words = ["--algos", "sac", "--tasks", "Pendulum-v1", "--total-timesteps", "60"]
    module, runs = load("sac_continuous_action"), {}
    for seed, compiled in {1: True, 2: False}.items():
        runs[seed] = place / "runs" / f"Pendulum-v1__sac_continuous_action__{seed}"
        settings = {"env_id": "Pendulum-v1", "seed": seed, "total_timesteps": 60, "cuda": False, "compile": compiled}
        args = module.Args(**settings, runs_dir=str(runs[seed].parent), run_name=runs[seed].name)
        runs[seed].mkdir(parents=True)
        (runs[seed] / "args.json").write_text(json.dumps({"args": dataclasses.asdict(args)}))
    *commands, _ = printed_commands(*words, "--seeds", "3", place=place, CXX="true")
    assert [[word for word in command if word.endswith(("resume", "compile"))] for command in commands] == [
        ["--resume"],
        ["--resume"],
        ["--compile"],
    ]
    for run in runs.values():
        (run / "agent.pt").touch()
    assert "2 runs, 2 of them finished" in sweep(place, *words, "--seeds", "2", CXX="true").stdout
    before = snapshot(place / "runs")
    for more, message in {
        "--extra-args=--no-compile": "was started with --compile True, not False",
        "--total-timesteps=70": "was started with --total-timesteps 60, not 70",
    }.items():
        done = sweep(place, *words, "--seeds", "2", more, expect=1)
        assert re.fullmatch(rf"error: .*__1 {message}.*\n", done.stderr)
    assert snapshot(place / "runs") == before


def wait_for(condition, process):
    while not condition():
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)


def test_stopped_it_continues(place):
    """Ctrl-C and the same command again: the agent is that of a run that was never interrupted. Then the report."""
    (place / "report.py").unlink()
    (place / "report.py").symlink_to(ROOT / "report.py")
    words = ["--algos", "nrep", "--tasks", "Pendulum-v1", "--seeds", "3,", "--total-timesteps", "1000"]
    words += ["--report-dir", "my report", "--extra-args", EXTRA]
    run = place / "runs" / "Pendulum-v1__nrep_sac__3"

    process = start(place, *words)
    wait_for((run / "evaluations.csv").exists, process)
    os.killpg(process.pid, signal.SIGINT)
    out, error = process.communicate()
    assert process.returncode == 130, out + error
    assert "stopping: 1 runs finish their episodes" in out
    assert shlex.split(error.split("to continue:")[1]) == [str(place / "benchmark.sh"), *words]
    assert (run / "checkpoint.pt").exists()
    assert not (run / "agent.pt").exists()

    sweep(place, *words)
    first, second = commands_in_log(run)
    assert [word for word in second if word != "--resume"] == first
    module = load("nrep_sac")
    settings = {**SMALL, "env_id": "Pendulum-v1", "total_timesteps": 1000, "seed": 3}
    module.train(module.Args(**settings, runs_dir=str(place), run_name="whole"))
    whole, swept = weights(place / "whole"), weights(run)
    assert all(torch.equal(whole[name], swept[name]) for name in whole)
    assert (place / "my report" / "index.html").exists()


def commands_in_log(run: Path) -> list[list[str]]:
    log = run.parent / ".logs" / f"{run.name}.log"
    return [shlex.split(line[2:]) for line in log.read_text().splitlines() if line.startswith("$ ")]


def make_believe(place: Path, *words: str, behave: str = "", **more) -> subprocess.CompletedProcess:
    (place / "behave").write_text(behave)
    return sweep(place, *words, python=str(place / "python"), **more)


def started(place: Path) -> list[list[str]]:
    return [line.split(" ") for line in (place / "started").read_text().splitlines()]


def test_all_runs_once_and_no_more_at_a_time_than_workers(place):
    words = ["--paper", "--tasks", "Ant-v4", "--seeds", "2", "--gpus", "0,1,5", "--workers", "6"]
    # The first six wait for each other, and then for a seventh, which must not come.
    behave = """mkdir "$here/now.$$"
    until [[ -e $here/full ]]; do now=("$here"/now.*); ((${#now[@]} < 6)) || touch "$here/full"; sleep 0.02; done
    sleep 0.1; now=("$here"/now.*); echo ${#now[@]} >>"$here/counts"; rmdir "$here/now.$$\""""
    done = make_believe(place, *words, behave=behave)
    assert max(int(line) for line in (place / "counts").read_text().split()) == 6
    assert len(list((place / "runs").glob("*/agent.pt"))) == 12
    assert Counter(script for script, *_ in started(place)) == dict.fromkeys(SCRIPTS, 2)
    assert Counter(gpu for _, gpu, *_ in started(place)[:6]) == dict.fromkeys("015", 2)
    assert {threads for _, _, threads, *_ in started(place)} == {os.environ["OMP_NUM_THREADS"]}
    assert "12 of 12 done, 0 running, 0 failed" in done.stdout
    done = make_believe(place, *words)
    assert len(started(place)) == 12
    assert "12 runs, 12 of them finished already" in done.stdout
    dry = sweep(place, *words, "--dry-run").stdout.splitlines()
    assert sum(line.startswith("# finished: ") for line in dry) == 12
    assert len(dry) == 14  # and the report's


def test_a_failing_run_is_tried_again_and_does_not_stop_the_others(place):
    behave = """tries=$(ls "$directory"; touch "$directory/$$")
    [[ $name != A* || -n $tries ]] || exit 9
    [[ $name != B* ]] || { echo "error: it's broken"; exit 1; }"""
    words = ["--quick", "--algos", "sac", "--tasks", "A,B,C", "--seeds", "1", "--workers", "1"]
    done = make_believe(place, *words, behave=behave, expect=1)
    resumed = [(option(words, "--env-id"), "--resume" in words) for words in started(place)]
    assert resumed == [("A", False), ("A", True), ("B", False), ("B", True), ("C", False)]
    log = place / "quick" / "runs" / ".logs" / "B__sac_continuous_action__1.log"
    assert done.stderr.startswith(f"failed: {log.stem}; the end of {log}:\n")
    assert done.stderr.endswith("    error: it's broken\n")
    *_, last_status, report = done.stdout.splitlines()
    assert last_status.startswith("2 of 3 done, 0 running, 1 failed")
    assert report.startswith("report ")


def test_retries_zero(place):
    done = make_believe(place, "--quick", "--algos", "sac", "--tasks", "A", "--retries", "0", behave="exit 9", expect=1)
    assert len(started(place)) == 2
    assert done.stderr.count("failed: A__sac_continuous_action__") == 2
    assert "report" not in done.stdout.splitlines()[-1]  # nothing to report


def test_a_run_that_another_process_has_is_busy(place):
    words = ["--quick", "--algos", "sac", "--tasks", "A,B", "--seeds", "1"]
    done = make_believe(place, *words, behave=f"[[ $name == B* ]] || exit {TAKEN}", expect=1)
    assert done.stderr == f"busy: another process is writing {place}/quick/runs/A__sac_continuous_action__1\n"
    assert "1 of 2 done, 0 running, 0 failed, 1 busy elsewhere" in done.stdout
    assert len(started(place)) == 2  # nothing was tried again


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_each_run_gets_one_signal_for_each_of_the_users(place, number):
    """A run takes the second one as the order to end at once, so the first must not come twice."""
    if signal.getsignal(number) == signal.SIG_IGN:
        pytest.skip("bash cannot trap a signal that it was born ignoring, as under nohup")
    behave = """trap 'echo INT >>"$here/signals"' INT; trap 'echo HUP >>"$here/signals"' HUP
    trap 'echo TERM >>"$here/signals"; ((++n < 2)) || exit 143' TERM
    echo ready >>"$here/ready"; while :; do sleep 0.05; done"""
    (place / "behave").write_text(behave)
    process = start(place, "--quick", "--algos", "sac", "--workers", "2", python=str(place / "python"))

    def words_in(name: str) -> list[str]:
        return (place / name).read_text().split() if (place / name).exists() else []

    wait_for(lambda: len(words_in("ready")) == 2, process)
    os.killpg(process.pid, number)
    wait_for(lambda: len(words_in("signals")) >= 2, process)
    time.sleep(0.7)  # the sweep looks around every half second: a chance to send it again
    assert words_in("signals") == ["TERM"] * 2
    os.killpg(process.pid, number)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 128 + number
    assert words_in("signals") == ["TERM"] * 4
    assert len(started(place)) == 2
    assert "report" not in out


def start_slurm_task(place: Path, behave: str, **env: str) -> subprocess.Popen:
    """The second of two tasks, whose run is called b."""
    (place / "behave").write_text(behave)
    (place / "runs" / ".logs").mkdir(parents=True, exist_ok=True)
    command = [str(place / "python"), "sac.py", "--run-name", "b", "--runs-dir", str(place / "runs")]
    (place / "tasks").write_text(f"a false\n{shlex.join(['b', *command])}\n")
    job = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "1", "SLURM_JOB_ID": "7"}
    return start(place, "--slurm-task", str(place / "tasks"), "--runs-dir", str(place / "runs"), **job, **env)


@pytest.mark.parametrize(("code", "tries", "message"), [(9, 2, "b failed; see"), (TAKEN, 1, "another process")])
def test_a_slurm_task_that_fails(place, code, tries, message):
    _, error = start_slurm_task(place, f"exit {code}").communicate()
    assert re.fullmatch(rf"error: {message}.*\n", error)
    assert ["--resume" in words for words in started(place)] == [False, True][:tries]


# A make-believe run that trains until it is signalled; Python, because a shell cannot trap what it was born ignoring.
STEADY = """
import os, signal, sys, time
from pathlib import Path

def stop(number, _):
    if os.environ["SAVES"]:
        Path(sys.argv[1]).write_text(f"after signal {number}")
    sys.exit(128 + number)

signal.signal(signal.SIGINT, stop)
signal.signal(signal.SIGTERM, stop)
Path(__file__).with_name("ready").touch()
while True:
    time.sleep(0.05)
"""


@pytest.mark.parametrize(
    ("number", "state", "saves", "requeued", "status"),
    [
        (signal.SIGUSR1, "RUNNING", True, True, 143),  # the time limit is near
        (signal.SIGUSR1, "RUNNING", False, False, 1),  # … and would be again and again
        (signal.SIGTERM, "RUNNING", False, True, 143),  # preempted with a grace time
        (signal.SIGTERM, "COMPLETING", True, False, 143),  # requeued by Slurm, or cancelled by its user
    ],
)
def test_a_slurm_task_goes_back_to_the_queue_when_it_should(place, number, state, saves, requeued, status):
    tools = place / "bin"
    tools.mkdir()
    (tools / "squeue").write_text("#!/bin/sh\necho $STATE\n")  # the cluster's answer
    (tools / "scontrol").write_text(f'#!/bin/sh\necho "$@" >{shlex.quote(str(place / "requeued"))}\n')
    for tool in tools.iterdir():
        tool.chmod(0o755)
    checkpoint = place / "runs" / "b" / "checkpoint.pt"
    checkpoint.parent.mkdir(parents=True)
    checkpoint.write_text("from an earlier task")
    (place / "steady.py").write_text(STEADY)
    behave = f'exec {shlex.quote(sys.executable)} "$here/steady.py" "$directory/checkpoint.pt"'
    path = f"{tools}:{os.environ['PATH']}"
    process = start_slurm_task(place, behave, PATH=path, STATE=state, SAVES="yes" if saves else "")
    wait_for((place / "ready").exists, process)
    process.send_signal(number)
    out, error = process.communicate()
    assert process.returncode == status, out + error
    assert (place / "requeued").exists() == requeued
    if requeued:
        assert (place / "requeued").read_text() == "requeue 7_1\n"
    assert ("wrote no checkpoint" in error) == (status == 1)
    # Not SIGTERM, which Slurm itself may have sent to the run already.
    assert checkpoint.read_text() == (f"after signal {signal.SIGINT}" if saves else "from an earlier task")
