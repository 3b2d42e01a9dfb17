"""speed.py: its counts against closed forms, its estimators against what they estimate, and its refusals."""

import json
import sys

import numpy as np
import pytest
import torch

import sac_continuous_action as sac
import sdar_continuous_action as sdar
import speed
from sdar_utils.evaluation import Evaluator
from tests.conftest import train

WIDTH, BATCH, OBS, ACT = 8, 5, 3, 2


def run_speed(monkeypatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["speed.py", *words])
    speed.main()


def test_matrix_products_of_a_network_with_its_backward_pass():
    net = sdar.Critic(OBS, ACT, 1, WIDTH)
    with speed.MatrixProducts() as products:
        net(torch.randn(BATCH, OBS), torch.randn(BATCH, ACT)).sum().backward()
    operations = sum(n * a[0] * a[1] * b[1] for (a, b), n in products.shapes.items())
    first, second, third = (OBS + ACT) * WIDTH, WIDTH * WIDTH, WIDTH
    assert operations == BATCH * (2 * first + 3 * second + 3 * third)  # the first layer's input needs no gradient


def test_table_is_markdown():
    lines = speed.table([{"|A|": 2, "SAC": 1234.5}, {"|A|": 17, "SAC": float("nan")}]).split("\n")
    assert lines == [r"| \|A\| | SAC |", "| --- | --- |", "| 2 | 1,234 |", "| 17 |  |"]


def test_steps_measures_a_script(monkeypatch, tmp_path, capsys):
    words = "steps --env-ids speed:Idle4-v0 --algorithms SDAR --hidden-dims 16 --turns 2 --steps 10 --rows 100"
    run_speed(monkeypatch, *words.split(), "--num-selection-samples", "4", "--output", str(tmp_path / "out"))
    ((row,),) = json.loads((tmp_path / "out.json").read_text())["results"].values()
    parts = 1 / row["rollouts_per_second"] + 1 / row["updates_per_second"]
    assert 1 / row["steps_per_second"] == pytest.approx(parts, rel=0.5)
    assert 0 < row["efficiency"] < 1
    assert "| SDAR K = 4 |" in capsys.readouterr().out


def test_either_way_the_greedy_episodes_are_the_same(script):
    """But for the rounding, which this task does not amplify; the stochastic ones have other noise."""
    env_id = "tests.tasks:Shapes-v0"
    torch.manual_seed(0)
    agent = speed.untrained_agent(speed.ALGORITHMS[script.__name__], env_id, WIDTH)
    evaluator = Evaluator(lambda: speed.make_env(env_id), speed.SEED, speed.CPU)
    together, one_by_one = speed.play_together(agent, evaluator), speed.play_one_by_one(agent, evaluator)
    assert [t.mode for t in one_by_one] == [t.mode for t in together]
    for ours, theirs in zip(one_by_one, together, strict=True):
        assert len(ours.actions) == len(theirs.actions) == 10
        if ours.mode == "greedy":
            np.testing.assert_allclose(ours.actions, theirs.actions, atol=1e-5)
            assert ours.total_reward == pytest.approx(theirs.total_reward, abs=1e-3)


@pytest.mark.parametrize("trained", [False, True])
def test_evaluation_measures_both_ways(trained, monkeypatch, tmp_path, capsys):
    env_id = "tests.tasks:Ending-v0"
    if trained:
        run = str(train(sac, tmp_path, env_id=env_id))
        words, name = [run], f"SAC ({run})"
    else:
        words, name = ["--env-ids", env_id, "--algorithms", "SAC", "--hidden-dims", "16"], "SAC"
    run_speed(monkeypatch, "evaluation", *words, "--turns", "3", "--clock", "cpu", "--output", str(tmp_path / "out"))
    ((row,),) = json.loads((tmp_path / "out.json").read_text())["results"].values()
    assert row["algorithm"] == name
    for way in ("one_by_one", "together"):  # 20 episodes of 5 steps
        assert row[f"ms_per_step_{way}"] == pytest.approx(10 * row[f"seconds_{way}"])
    assert row["times_as_fast"] == pytest.approx(row["seconds_one_by_one"] / row["seconds_together"])
    assert row["times_as_fast"] > 1
    assert f"{env_id}, nets 16: an evaluation, every 10,000 training steps" in capsys.readouterr().out


def test_the_plain_estimators_error_falls_with_the_root_of_its_samples(monkeypatch, tmp_path):
    run = train(sdar, tmp_path, env_id="tests.tasks:Endless-v0")
    contents = torch.load(run / "agent.pt", weights_only=True)
    for critic in ("q1", "q2"):
        contents["weights"][f"{critic}.fc3.bias"] += 100  # a constant, which is all noise to the plain estimator
    torch.save(contents, run / "agent.pt")
    run_speed(monkeypatch, "estimators", str(run), "--output", str(tmp_path / "out"))
    (rows,) = json.loads((tmp_path / "out.json").read_text())["results"].values()
    errors = {(row["estimator"], row["schemas"]): row["error"] for row in rows}
    assert errors["plain", 2] / errors["plain", 20] == pytest.approx(10**0.5, rel=0.2)
    assert errors["leave-one-out", 20] < errors["leave-one-out", 2] < errors["plain", 20] / 10
    assert (tmp_path / "out.png").stat().st_size > 0


def test_estimators_are_those_of_sdar(monkeypatch, tmp_path):
    run = train(sac, tmp_path, env_id="tests.tasks:Ending-v0", total_timesteps=5)
    with pytest.raises(SystemExit, match="is a run of SAC"):
        run_speed(monkeypatch, "estimators", str(run), "--output", str(tmp_path / "out"))


@pytest.mark.parametrize("can_compile", ["has what it needs", "no compiler here"])
def test_doctor_says_what_it_can(can_compile, monkeypatch, tmp_path, capsys):
    """Also without a GPU or a compiler; `measure` has its own test."""
    raced = []

    def measure(contenders, settings):
        raced.extend(contender.name for contender in contenders)
        return {contender: [speed.Turn(0.01, 0.005, 0.001, 10**9, 0)] for contender in contenders}

    monkeypatch.setattr(speed, "measure", measure)
    monkeypatch.setattr(speed, "can_compile", lambda device: can_compile)
    monkeypatch.chdir(tmp_path)
    run_speed(monkeypatch, "doctor", "--no-cuda")
    fence, *lines, end = capsys.readouterr().out.splitlines()
    assert fence == end == "```"
    said = {line[:22].strip(): line[23:] for line in lines}
    assert said["GPU"] == "not asked for"
    assert said["--compile"] == can_compile
    assert said["SAC"] == "100 steps/s, 1.00 GB"
    assert raced == [name for name in said if name.startswith(("SAC", "SDAR"))]
    assert ("SDAR, compiled" in raced) == (can_compile == "has what it needs")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        pytest.param(
            "steps --cuda", "--cuda: ", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
        ),
        ("doctor --steps 0", "--steps must be at least 1"),
        ("steps --algorithms PPO", "--algorithms has no PPO"),
        ("steps --env-ids NoSuchTask-v0 --algorithms SAC", "cannot make --env-id NoSuchTask-v0"),
        ("steps --turns 0", "--turns must be at least 1"),
        ("evaluation --algorithms SB3", "--algorithms has no SB3"),
        ("evaluation nowhere", "nowhere has no agent.pt"),
        ("estimators", "estimators needs run directories"),
        ("estimators nowhere", "nowhere has no agent.pt"),
        ("growth --output taken", "taken.json exists"),
    ],
)
def test_refusals(monkeypatch, tmp_path, words, complaint):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken.json").write_text("kept")
    with pytest.raises(SystemExit, match=f"error: .*{complaint}"):
        run_speed(monkeypatch, *words.split())
    assert (tmp_path / "taken.json").read_text() == "kept"
    assert len(list(tmp_path.iterdir())) == 1
