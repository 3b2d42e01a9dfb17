"""evaluate.py: the numbers against the training's own and against brute force, the pictures cell by cell."""

import ctypes.util
import dataclasses
import io
import json
import math
import os
import shutil
import subprocess
import sys
from fractions import Fraction
from functools import partial
from pathlib import Path

import imageio.v3 as imageio
import numpy as np
import pytest
import torch
from conftest import ROOT, SCRIPTS, TINY, load, snapshot

import evaluate
from evaluate import Args, Picture, acts, acts_by_rule, main, open_run, roll_out

SDAR, SAC, NREP, TAAC, TEMPORL, UTE = map(load, SCRIPTS)
TASK = "tests.tasks:HoldAndTrack-v0"  # 50 steps; the return depends on every action
NOISE = "tests.tasks:Shapes-v0"  # 10 steps, 4 dimensions; no observation comes twice, so an act is seen as a change
CPU = torch.device("cpu")


def make_run(script, directory: Path, env_id: str = TASK, **values) -> Path:
    """A run directory with an untrained agent."""
    args = script.Args(env_id=env_id, **{**TINY, **values})
    env = script.make_env(env_id)
    (obs_dim,), (act_dim,) = env.observation_space.shape, env.action_space.shape
    torch.manual_seed(0)
    agent = script.Agent(obs_dim, act_dim, args, CPU)
    about = {"args": dataclasses.asdict(args), "obs_dim": obs_dim, "act_dim": act_dim, "weights": agent.state_dict()}
    script.save_file(directory / "agent.pt", about)
    return directory


def results(directory: Path, selector: str = "") -> dict:
    return json.loads((directory / f"evaluation{selector}.json").read_text())


# Numbers.


def test_the_trainings_own_evaluation_is_reproduced_exactly(script, tmp_path):
    args = script.Args(
        env_id=TASK, run_name="run", runs_dir=str(tmp_path), total_timesteps=60, eval_every=0, seed=3, **TINY
    )
    args.eval_episodes = 2
    directory = script.train(args)
    recorded = results(directory)
    main(Args((directory,), episodes=2))
    evaluation = results(directory)
    assert {evaluation[mode].pop("decisions_per_step") > 0 for mode in ("greedy", "stochastic")} == {True}
    assert evaluation.pop("selector") == "learned"
    assert evaluation.pop("seed") == 3
    assert evaluation == recorded

    (directory / "agent.pt").unlink()  # as if it were unfinished
    checkpoint = script.load_file(directory / "checkpoint.pt")
    script.save_file(directory / "checkpoint.pt", {**checkpoint, "step": 37, "seconds": 12.5})
    main(Args((directory,), episodes=2))
    unfinished = results(directory)
    assert (unfinished["step"], unfinished["seconds"]) == (37, 12.5)
    assert unfinished["greedy"]["return"] == recorded["greedy"]["return"]

    main(Args((directory,), episodes=2, seed=4))
    assert results(directory)["seed"] == 4
    assert results(directory)["greedy"]["return"] != recorded["greedy"]["return"]


def test_seconds_of_a_finished_run_come_from_its_other_files(tmp_path):
    directory = make_run(SAC, tmp_path)
    args = Args((directory,))
    assert open_run(directory, args).seconds is None
    SAC.save_file(tmp_path / "checkpoint.pt", {"seconds": 5.0})
    assert open_run(directory, args).seconds == 5.0
    (tmp_path / "evaluation.json").write_text('{"seconds": 6.0}')
    assert open_run(directory, args).seconds == 6.0


def test_decisions_per_step(script, tmp_path):
    """Against a count of the calls of the function that decides; the hooks do not know it."""
    run = open_run(make_run(script, tmp_path), Args((tmp_path,)))
    calls = 0

    def counting(decide):
        def counted(*args):
            nonlocal calls
            calls += 1
            return decide(*args)

        return counted

    if script in (TEMPORL, UTE):
        run.agent.decide = counting(run.agent.decide)
    for mode in ("greedy", "sample"):
        calls = 0
        trajectories, decisions, _ = roll_out(run, mode, seed=1, episodes=3)
        assert [len(t.actions) for t in trajectories] == [50] * 3
        if script in (TEMPORL, UTE):
            assert 0 < calls < 150
            assert decisions == calls / 150
        else:
            assert decisions == (13 / 50 if script is NREP else 1)  # --repeat 4: 12 times four steps, and two


# Selectors.


@pytest.mark.parametrize("rate", [0, 1 / 49, 1 / 3, 2 / 5, 0.5, 5 / 7, 1])
def test_periodic_acts_are_spread_evenly_at_their_rate(rate):
    exact = Fraction(rate).limit_denominator(100)
    acting = [bool(acts_by_rule("periodic", torch.tensor(rate, dtype=torch.double), t)) for t in range(1, 500)]
    assert [sum(acting[:n]) for n in range(1, 500)] == [math.floor(n * exact) for n in range(1, 500)]


def test_random_acts_come_at_their_rate():
    rates = torch.tensor([0, 0.2, 0.7, 1], dtype=torch.double)
    torch.manual_seed(0)
    drawn = torch.stack([acts_by_rule("random", rates, t) for t in range(1, 5001)]).double()
    np.testing.assert_allclose(drawn.mean(0), rates, atol=0.03)
    assert drawn[:, 0].max() == 0
    assert drawn[:, 3].min() == 1
    assert abs(np.corrcoef(drawn[:-1, 1], drawn[1:, 1])[0, 1]) < 0.05  # with no memory


def rates_of(*rates: float) -> torch.Tensor:
    return torch.tensor(rates, dtype=torch.double)


@pytest.mark.parametrize("mode", ["greedy", "sample"])
@pytest.mark.parametrize(
    ("script", "options", "rates", "periods"),
    [
        (SDAR, {}, rates_of(1 / 3, 1 / 2, 1, 0), (3, 2, 1, 100)),
        (SDAR, {"selection": "joint"}, rates_of(1 / 3), (3, 3, 3, 3)),
        (TAAC, {}, rates_of(1 / 3).squeeze(), (3, 3, 3, 3)),
    ],
    ids=["SDAR", "SDAR joint", "TAAC"],
)
def test_a_rule_takes_the_place_of_the_selection(script, options, rates, periods, mode, tmp_path):
    run = open_run(make_run(script, tmp_path, NOISE, **options), Args((tmp_path,)))
    before, _, _ = roll_out(run, mode, seed=1, episodes=1)
    trajectories, _, _ = roll_out(run, mode, seed=1, episodes=2, rule=partial(acts_by_rule, "periodic", rates))
    for trajectory in trajectories:
        for acting, period in zip(acts(trajectory.actions).T, periods, strict=True):
            np.testing.assert_array_equal(np.flatnonzero(acting), range(0, 10, period))
    after, _, _ = roll_out(run, mode, seed=1, episodes=1)
    np.testing.assert_array_equal(before[0].actions, after[0].actions)  # the agent is as it was


@pytest.mark.parametrize("script", [SDAR, TAAC], ids=["SDAR", "TAAC"])
def test_random_and_periodic_act_as_often_as_the_learned_policy(script, tmp_path):
    """The learned policy's rate is counted from its executed actions; the evaluation asks β."""
    run = open_run(make_run(script, tmp_path, NOISE), Args((tmp_path,), episodes=10))
    learned = {}
    for mode, tolerance in (("greedy", 1e-9), ("sample", 0.2)):  # 90 draws: four deviations
        trajectories, _, rates = roll_out(run, mode, seed=1, episodes=10)
        learned[mode] = np.mean([acts(t.actions)[1:].mean(axis=0) for t in trajectories], axis=0)
        np.testing.assert_allclose(np.broadcast_to(rates, 4), learned[mode], atol=tolerance)
    assert any(0 < rate < 1 for rate in learned["greedy"])
    for selector, tolerance in (("random", 0.2), ("periodic", 1 / 9)):
        main(Args((tmp_path,), episodes=10, selector=selector))
        evaluation = results(tmp_path, f"-{selector}")
        assert evaluation["selector"] == selector
        for name, mode in evaluate.MODES.items():
            np.testing.assert_allclose(np.broadcast_to(evaluation[name]["act_rate"], 4), learned[mode], atol=0.2)
            executed = 1 - np.array(evaluation[name]["repeat_rate"])
            assert executed == pytest.approx(np.mean(evaluation[name]["act_rate"]), abs=tolerance)


def test_episodes_of_any_length_count_the_same_in_the_act_rate(tmp_path):
    run = open_run(make_run(SDAR, tmp_path, "Humanoid-v4"), Args((tmp_path,)))
    trajectories, _, rates = roll_out(run, "greedy", seed=1, episodes=3)
    acting = [acts(t.actions)[1:] for t in trajectories]
    np.testing.assert_allclose(rates, np.mean([a.mean(axis=0) for a in acting], axis=0), rtol=1e-9)
    assert not np.allclose(rates, np.concatenate(acting).mean(axis=0), rtol=1e-9)


@pytest.mark.parametrize("script", [SDAR, TAAC], ids=["SDAR", "TAAC"])
def test_always_and_never(script, tmp_path, capsys):
    make_run(script, tmp_path, NOISE)
    main(Args((tmp_path,), episodes=2))
    learned = (tmp_path / "evaluation.json").read_bytes()
    capsys.readouterr()
    for selector, apr, shown in (("always", 1, "1.00"), ("never", None, "∞")):
        main(Args((tmp_path,), episodes=2, selector=selector))
        evaluation = results(tmp_path, f"-{selector}")
        rows = [[cell.strip() for cell in line.split("|")] for line in capsys.readouterr().out.splitlines()]
        rows = [dict(zip(rows[0], row, strict=True)) for row in rows[2:6]]
        assert [(row["selector"], row["mode"]) for row in rows] == [
            ("learned", "greedy"),
            (selector, "greedy"),
            ("learned", "stochastic"),
            (selector, "stochastic"),
        ]
        for row in rows:
            if row["selector"] == selector:
                assert evaluation[row["mode"]]["apr"] == apr
                assert row["APR"] == shown
            else:
                assert row["return"].startswith(f"{json.loads(learned)[row['mode']]['return']:.1f} ± ")
    assert (tmp_path / "evaluation.json").read_bytes() == learned


# Pictures.


def hand_made(rng: np.random.Generator, start: int, steps: int, width: int) -> Picture:
    acting = rng.random((steps, width)) < 0.4
    names = [f"joint {i}" for i in range(width)]
    return Picture("title", names, start, rng.uniform(-1, 1, (steps, width)), acting)


def test_acts_are_changes_of_the_executed_action():
    actions = np.array([[0.5, 0], [0.5, 0], [0.5, 1e-7], [-0.5, 1e-7], [0.5, 0]], np.float32)
    expected = [[True, True], [False, False], [False, True], [True, False], [True, True]]
    np.testing.assert_array_equal(acts(actions), expected)


@pytest.mark.parametrize("steps", [30, 1000])
def test_every_cell_of_the_raster_is_right(steps):
    rng = np.random.default_rng(0)
    pictures = [hand_made(rng, 40, steps, 3), hand_made(rng, 40, steps // 2, 2)]
    figure = evaluate.raster_figure(pictures)
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=evaluate.DPI)
    pixels = imageio.imread(data.getvalue())[..., :3]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["act", "repeat"]
    for panel, expected in zip(figure.axes, pictures, strict=True):
        assert [label.get_text() for label in panel.get_yticklabels()] == expected.names
        assert panel.yaxis_inverted()  # the first dimension on top
        corners = [
            (expected.start + t + 0.5, i + 0.5) for t in range(len(expected.acts)) for i in range(len(expected.names))
        ]
        x, y = (panel.transData.transform(corners) * evaluate.DPI / figure.dpi).astype(int).T
        colours = pixels[len(pixels) - 1 - y, x].reshape(*expected.acts.shape, 3)
        np.testing.assert_array_equal(colours, np.where(expected.acts[..., None], (20, 50, 120), (185, 210, 238)))


def test_action_traces_mark_the_acts():
    rng = np.random.default_rng(0)
    pictures = [hand_made(rng, 5, 20, 2), hand_made(rng, 5, 10, 1)]
    panels = iter(evaluate.actions_figure(pictures).axes)
    for expected in pictures:
        for values, acting, name in zip(expected.actions.T, expected.acts.T, expected.names, strict=True):
            panel = next(panels)
            assert panel.get_ylabel() == name
            np.testing.assert_array_equal(panel.patches[0].get_data().values, values)
            np.testing.assert_array_equal(panel.patches[0].get_data().edges, range(5, 6 + len(values)))
            np.testing.assert_array_equal(panel.lines[0].get_xdata(), 5 + np.flatnonzero(acting))
            np.testing.assert_array_equal(panel.lines[0].get_ydata(), values[acting])
    assert next(panels, None) is None


def test_pictures_show_the_window_of_the_first_greedy_episode(tmp_path):
    directory = make_run(NREP, tmp_path)
    args = Args((directory,), steps=(10, 90))
    run = open_run(directory, args)
    _, shown = evaluate.evaluate(run, dataclasses.replace(args, episodes=2))
    played = NREP.play_episode(run.agent, run.env, NREP.derived_seed(1, 1, 0), "greedy").actions
    picture = evaluate.picture(run, shown, args)
    np.testing.assert_array_equal(picture.actions, played[10:])
    np.testing.assert_array_equal(picture.acts, acts(played)[10:])
    assert not picture.acts[0].any()  # --repeat 4: step 10 repeats step 8
    assert "steps 10 to 49 of 50" in picture.title
    with pytest.raises(SystemExit, match="has only 50 steps"):
        evaluate.picture(run, shown, Args((directory,), steps=(50, 60)))


def test_several_runs_in_one_table_and_one_picture(tmp_path, capsys):
    a, b = make_run(SDAR, tmp_path / "a", selection="joint"), make_run(NREP, tmp_path / "b")
    raster, traces = tmp_path / "raster.png", tmp_path / "traces.svg"
    main(Args((a, b), episodes=1, raster=raster, actions=traces))
    table = capsys.readouterr().out
    assert [line.split()[1] for line in table.splitlines()[2:6]] == ["a", "a", "b", "b"]
    assert "SDAR (joint)" in table
    assert "N-Rep" in table
    assert "- b, greedy: a0 4.08, a1 4.08" in table  # 12 changes in 49 pairs
    assert imageio.imread(raster).std() > 0
    assert traces.read_text().startswith("<?xml")
    before = snapshot(tmp_path)
    with pytest.raises(SystemExit, match="exists; choose another name, or replace it with --overwrite"):
        main(Args((a, b), episodes=2, raster=raster))
    assert snapshot(tmp_path) == before
    main(Args((a,), episodes=1, raster=raster, overwrite=True))
    assert raster.read_bytes() != before["raster.png"]


@pytest.mark.parametrize(
    ("env_id", "names"),
    [
        ("LunarLanderContinuous-v3", ["main engine", "lateral engine"]),
        ("BipedalWalker-v3", ["hip 1", "knee 1", "hip 2", "knee 2"]),
        ("HalfCheetah-v4", ["bthigh", "bshin", "bfoot", "fthigh", "fshin", "ffoot"]),  # named actuators
        ("Walker2d-v5", ["thigh", "leg", "foot", "thigh left", "leg left", "foot left"]),  # named joints
        ("Pendulum-v1", ["a0"]),
        (TASK, ["a0", "a1"]),
    ],
)
def test_dimensions_are_named_where_the_task_names_them(env_id, names):
    assert evaluate.dimension_names(SDAR.make_env(env_id)) == names


# Videos.


def evaluate_in_a_process(*words: str, **environment: str) -> subprocess.CompletedProcess:
    inherited = {k: v for k, v in os.environ.items() if k not in ("DISPLAY", "WAYLAND_DISPLAY", "MUJOCO_GL")}
    command = [sys.executable, str(ROOT / "evaluate.py"), *words]
    env = {**inherited, **environment}
    return subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT, check=False)


def test_video_shows_the_first_greedy_episode(tmp_path):
    make_run(SAC, tmp_path, "LunarLanderContinuous-v3")
    video = tmp_path / "film.mp4"
    main(Args((tmp_path,), episodes=1, video=video))
    frames = imageio.imread(video)
    assert len(frames) == results(tmp_path)["greedy"]["length"]
    assert frames.std() > 0
    assert {path.name for path in tmp_path.iterdir()} == {"agent.pt", "evaluation.json", "film.mp4"}


@pytest.mark.skipif(not ctypes.util.find_library("EGL"), reason="libEGL is not installed (Debian: libegl1 libgl1)")
def test_video_of_a_mujoco_task_without_a_screen(tmp_path):
    make_run(SAC, tmp_path, "InvertedPendulum-v4")
    done = evaluate_in_a_process(str(tmp_path), "--episodes", "1", "--video", str(tmp_path / "film.mp4"))
    assert done.returncode == 0, done.stderr
    assert "| InvertedPendulum-v4 | SAC" in done.stdout
    assert imageio.imread(tmp_path / "film.mp4").std() > 0


@pytest.mark.skipif(bool(ctypes.util.find_library("OSMesa")), reason="OSMesa is installed, so it would render")
def test_a_missing_graphics_library_gives_an_instruction(tmp_path):
    make_run(SAC, tmp_path, "InvertedPendulum-v4")
    before = snapshot(tmp_path)
    done = evaluate_in_a_process(str(tmp_path), "--video", str(tmp_path / "film.mp4"), MUJOCO_GL="osmesa")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: --video cannot render InvertedPendulum-v4: ")
    assert "install EGL" in line
    assert snapshot(tmp_path) == before


# Errors.


def test_bad_input_is_refused_before_anything_is_written(tmp_path):
    good, other = make_run(SDAR, tmp_path / "good"), make_run(SAC, tmp_path / "other")
    (tmp_path / "empty").mkdir()
    (tmp_path / "folder.png").mkdir()
    shutil.copytree(good, tmp_path / "damaged")
    (tmp_path / "damaged" / "agent.pt").write_bytes((good / "agent.pt").read_bytes()[:-100])
    flipped = bytearray((good / "agent.pt").read_bytes())
    flipped[len(flipped) // 2] ^= 1
    (tmp_path / "flipped").mkdir()
    (tmp_path / "flipped" / "agent.pt").write_bytes(flipped)
    shutil.copytree(good, tmp_path / "renamed")
    (tmp_path / "renamed" / "agent.pt").rename(tmp_path / "renamed" / "checkpoint.pt")
    contents = torch.load(other / "agent.pt", weights_only=True)
    SAC.save_file(tmp_path / "task" / "agent.pt", {**contents, "args": {**contents["args"], "env_id": "Pendulum-v1"}})
    SAC.save_file(tmp_path / "seed" / "agent.pt", {**contents, "args": {**contents["args"], "seed": "one"}})
    before = snapshot(tmp_path)
    for message, runs, values in [
        ("name at least one run directory", [], {}),
        ("there is no run directory .*absent", ["good", "absent"], {}),
        ("has no agent.pt and no checkpoint.pt", ["good", "empty"], {}),
        ("agent.pt is damaged", ["good", "damaged"], {}),
        ("agent.pt is damaged", ["good", "flipped"], {}),
        ("checkpoint.pt is not the file of a run", ["good", "renamed"], {}),
        ("agent.pt is not the file of a run", ["good", "seed"], {}),
        ("trained on another version of Pendulum-v1", ["good", "task"], {}),
        ("is named twice", ["good", "other", "other/../good"], {}),
        ("--episodes must be at least 1, not 0", ["good"], {"episodes": 0}),
        ("--seed must not be negative", ["good"], {"seed": -1}),
        ("--steps 5 5 is no window", ["good"], {"steps": (5, 5)}),
        ("--steps 0 10001 is too wide", ["good"], {"steps": (0, 10_001)}),
        ("--selector random .*other has none", ["good", "other"], {"selector": "random"}),
        ("--raster .* must end in .png", ["good"], {"raster": "picture.jpeg"}),
        ("--actions .*there is no directory", ["good"], {"actions": "absent/picture.png"}),
        ("--raster .* is a directory", ["good"], {"raster": "folder.png"}),
        ("--raster and --actions both name", ["good"], {"raster": "a.png", "actions": "good/../a.png"}),
        ("--video .* must end in .mp4", ["good"], {"video": "film.gif"}),
        ("--video films one run", ["good", "other"], {"video": "film.mp4"}),
        ("--video cannot render tests.tasks:HoldAndTrack-v0: .*EGL", ["good"], {"video": "film.mp4"}),
    ]:
        paths = {k: tmp_path / v if k in ("raster", "actions", "video") else v for k, v in values.items()}
        with pytest.raises(SystemExit, match=f"^error: .*{message}"):
            main(Args(tuple(tmp_path / run for run in runs), **paths))
        assert snapshot(tmp_path) == before, message


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_a_device_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="there is no CUDA device"):
        main(Args((make_run(SAC, tmp_path),), cuda=True))


@pytest.mark.parametrize("script", ["evil_script", ["evil_script"], None])
def test_a_file_cannot_name_a_module_to_import(script, tmp_path, monkeypatch):
    (tmp_path / "evil_script.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')")
    monkeypatch.syspath_prepend(tmp_path)
    torch.save({"format": 1, "script": script}, tmp_path / "agent.pt")
    with pytest.raises(SystemExit, match="these can be evaluated: sdar_continuous_action"):
        main(Args((tmp_path,)))
    assert not (tmp_path / "executed").exists()


def test_an_action_that_is_not_finite_stops_with_one_line(tmp_path):
    directory = make_run(SAC, tmp_path)
    contents = torch.load(directory / "agent.pt", weights_only=True)
    contents["weights"]["actor.fc1.bias"][:] = math.nan
    torch.save(contents, directory / "agent.pt")
    with pytest.raises(SystemExit, match=r"^error: .*an evaluation's action is not finite"):
        main(Args((directory,), episodes=1))
    assert not (directory / "evaluation.json").exists()
