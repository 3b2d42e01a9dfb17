"""speed.py: its counts against closed forms, its estimators against what they estimate, and its refusals."""

import json
import sys

import pytest
import torch

import sdar_continuous_action as sdar
import speed
from tests.conftest import TINY

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


def test_the_plain_estimators_error_falls_with_the_root_of_its_samples(monkeypatch, tmp_path):
    options = {**TINY, "total_timesteps": 50, "env_id": "tests.tasks:Endless-v0", "eval_every": 0}
    run = sdar.train(sdar.Args(**options, runs_dir=str(tmp_path)))
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


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("steps --algorithms PPO", "--algorithms has no PPO"),
        ("steps --env-ids NoSuchTask-v0 --algorithms SAC", "cannot make --env-id NoSuchTask-v0"),
        ("steps --turns 0", "--turns must be at least 1"),
        ("estimators", "estimators needs run directories"),
        ("estimators nowhere", "there is no nowhere"),
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
