"""benchmark.sh --slurm on a real Slurm, which tests/start_slurm.sh starts; REQUIRE_SLURM=1 fails without one."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

from tests.conftest import load, weights
from tests.test_benchmark import EXTRA, SMALL, commands_in_log, place, started, sweep  # noqa: F401 (place is a fixture)


def slurm_answers() -> bool:
    """Ours, that is: nobody wants these jobs on the department's cluster."""
    if shutil.which("sbatch") is None:
        return False
    config = subprocess.run(
        ["timeout", "10", "scontrol", "show", "config"], capture_output=True, text=True, check=False
    )
    return "sdar-test" in config.stdout


pytestmark = pytest.mark.skipif(
    os.environ.get("REQUIRE_SLURM") != "1" and not slurm_answers(),
    reason="no Slurm for tests answers here; tests/start_slurm.sh starts one",
)


def queue(job: str) -> dict[str, str]:
    """The state of each task of a job array that is not over yet."""
    words = ["squeue", "--noheader", "--array", f"--job={job}", "--format=%K %T"]
    out = subprocess.run(words, capture_output=True, text=True, check=False).stdout
    return dict(line.split() for line in out.splitlines())


def process_of(run: str) -> int | None:
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            words = (directory / "cmdline").read_bytes().decode().split("\0")
        except OSError:  # it has just ended
            continue
        if "python" in words[0] and run in words:
            return int(directory.name)
    return None


def has_pending_signal(pid: int, number: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    pending = int(status.split("ShdPnd:")[1].split()[0], 16)
    return bool(pending >> (number - 1) & 1)


def wait_for(condition, job: str):
    while not condition():
        assert queue(job), "the job array is over"
        time.sleep(0.1)


def submit(place, *words, **more) -> str:  # noqa: F811
    out = sweep(place, *words, "--slurm", **more).stdout
    assert "\nsubmitted " in f"\n{out}", out  # notes may come before it
    return out.split("job array ")[1].split()[0]


def test_requeued_and_timed_out_tasks_resume_exactly(place):  # noqa: F811
    words = ["--algos", "sac", "--tasks", "Pendulum-v1", "--seeds", "2", "--total-timesteps", "1000"]
    words += ["--extra-args", EXTRA, "--time", "01:00:00"]
    job = submit(place, *words)
    try:
        runs = {seed: place / "runs" / f"Pendulum-v1__sac_continuous_action__{seed}" for seed in (1, 2)}
        pids = {}
        for seed, run in runs.items():  # hold each run mid-way, until Slurm has done its part
            wait_for((run / "evaluations.csv").exists, job)
            pids[seed] = process_of(run.name)
            os.kill(pids[seed], signal.SIGSTOP)
            assert not (run / "checkpoint.pt").exists()
            assert not (run / "agent.pt").exists()
        again = sweep(place, *words, "--slurm")
        assert "nothing to submit: 0 of 2 runs are finished, the others queued or running" in again.stdout

        subprocess.run(["scontrol", "requeue", f"{job}_0"], check=True)  # which sends SIGCONT before its SIGTERM
        wait_for((runs[1] / "checkpoint.pt").exists, job)
        set_time_limit(f"{job}_1", "00:05:00")  # so that its end is announced when Slurm looks next: every 30 s
        wait_for(lambda: has_pending_signal(pids[2], signal.SIGINT), job)  # the announcement, handed on
        set_time_limit(f"{job}_1", "01:00:00")
        os.kill(pids[2], signal.SIGCONT)
        wait_for((runs[2] / "checkpoint.pt").exists, job)
        while queue(job):
            time.sleep(0.2)
    finally:
        subprocess.run(["scancel", job], check=False)
    for seed, run in runs.items():
        first, second = commands_in_log(run)
        assert second == [*first, "--resume"]
        module = load("sac_continuous_action")
        settings = {**SMALL, "env_id": "Pendulum-v1", "total_timesteps": 1000, "seed": seed}
        module.train(module.Args(**settings, runs_dir=str(place), run_name=f"whole {seed}"))
        whole, swept = weights(place / f"whole {seed}"), weights(run)
        assert all(torch.equal(whole[name], swept[name]) for name in whole)
    done = sweep(place, *words, "--slurm")
    assert "2 of 2 runs are finished" in done.stdout
    assert f"report|{place / 'runs'}|--out|{place / 'report'}" in done.stdout


def set_time_limit(task: str, limit: str):
    subprocess.run(["scontrol", "update", f"JobId={task}", f"TimeLimit={limit}"], check=True)


def test_a_gpu_for_each_task(place):  # noqa: F811
    """The GPUs are made up, and so are the runs; asking for them and being given one each is real."""
    (place / "behave").write_text('until (($(wc -l <"$here/started") == 2)); do sleep 0.1; done')  # side by side
    words = ["--paper", "--tasks", "Ant-v4", "--algos", "sac,ute", "--seeds", "1"]
    words += ["--gpus-per-task", "1", "--mem", "100M", "--max-running", "2"]
    job = submit(place, *words, python=str(place / "python"))
    while queue(job):
        time.sleep(0.2)
    assert sorted(gpu for _, gpu, *_ in started(place)) == ["0", "1"]
    assert len(list((place / "runs").glob("*/agent.pt"))) == 2


def test_sbatch_has_the_last_word(place):  # noqa: F811
    words = ["--quick", "--slurm", "--partition", "no-such-partition"]
    done = sweep(place, *words, python=str(place / "python"), expect=1)
    assert "invalid partition" in done.stderr
    assert done.stderr.endswith("error: sbatch refused; nothing was submitted\n")
