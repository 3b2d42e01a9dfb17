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

import evaluate
import nrep_sac as nrep
import sac_continuous_action as sac
import sdar_continuous_action as sdar
import taac_continuous_action as taac
from evaluate import Args, Picture, Rule, Run, Watched, main, open_run
from sdar_utils.checkpoint import save_file
from sdar_utils.envs import make_env
from sdar_utils.evaluation import ACT, MODES, REPEAT, ROWS, Trajectory, acts
from sdar_utils.logs import evaluation_row
from sdar_utils.noise import EpisodesNoise
from tests.conftest import ROOT, TINY, evaluations, snapshot, train

TASK = "tests.tasks:HoldAndTrack-v0"  # 50 steps; the return depends on every action
NOISE = "tests.tasks:Shapes-v0"  # 10 steps, 4 dimensions; no observation comes twice, so an act is seen as a change
CPU = torch.device("cpu")
MORE_THAN_A_BATCH = ROWS // 2 + 1  # episodes of each mode


def make_run(script, directory: Path, env_id: str = TASK, **values) -> Path:
    """A run directory with an untrained agent, which sometimes repeats if it can."""
    if script is sdar:
        values = {"initial_act_probability": 0.5, **values}
    args, env = script.Args(env_id=env_id, **{**TINY, **values}), make_env(env_id)
    (obs_dim,), (act_dim,) = env.observation_space.shape, env.action_space.shape
    torch.manual_seed(0)
    weights = script.Agent(obs_dim, act_dim, args, CPU).state_dict()
    about = {"script": script.__name__, "args": dataclasses.asdict(args), "obs_dim": obs_dim, "act_dim": act_dim}
    save_file(directory / "agent.pt", {**about, "weights": weights})
    return directory


def results(directory: Path, selector: str = "") -> dict:
    return json.loads((directory / f"evaluation{selector}.json").read_text())


# Numbers.


def test_the_trainings_own_evaluation_is_reproduced_exactly(script, tmp_path):
    directory = train(script, tmp_path, env_id=TASK, seed=3, eval_episodes=2)
    recorded, row = results(directory), evaluations(directory)[-1]
    args = Args((directory,), episodes=2)
    played, _ = evaluate.evaluate(open_run(directory, args), args)
    summaries = evaluation_row({mode: played["learned"][mode] for mode in MODES})
    assert row == {"step": 60, "seconds": row["seconds"], **summaries}
    main(args)
    about = {"step": 60, "seconds": row["seconds"], "seed": 3, "selector": "learned"}
    assert results(directory) == {**about, "greedy": recorded["greedy"], "stochastic": recorded["stochastic"]}
    main(dataclasses.replace(args, seed=4))
    assert results(directory)["seed"] == 4
    assert results(directory)["stochastic"]["return"] != recorded["stochastic"]["return"]


def test_an_unfinished_run_is_evaluated_at_its_checkpoint(tmp_path):
    main(Args((make_run(sac, tmp_path),), episodes=1))
    finished = results(tmp_path)
    contents = torch.load(tmp_path / "agent.pt", weights_only=True)
    (tmp_path / "agent.pt").unlink()
    save_file(tmp_path / "checkpoint.pt", {**contents, "step": 37})
    main(Args((tmp_path,), episodes=1))
    assert results(tmp_path) == {**finished, "step": 37}


def test_an_agents_file_alone_plays_as_its_run_and_nothing_is_written(tmp_path, capsys):
    run = make_run(sdar, tmp_path / "run")
    alone = tmp_path / "alone" / "lander.pt"
    alone.parent.mkdir()
    shutil.copy(run / "agent.pt", alone)
    tables = {}
    for path in (run, alone):
        before = snapshot(alone.parent)
        main(Args((path,), episodes=2, selector="random"))
        tables[path] = [line.split()[2:] for line in capsys.readouterr().out.splitlines()[2:6]]
        assert snapshot(alone.parent) == before
    assert tables[run] == tables[alone]
    with pytest.raises(SystemExit, match=r"^error: .*evaluation-random.json is damaged or not one of ours"):
        main(Args((run / "evaluation-random.json",)))


def test_an_exported_agent_plays_as_its_run_and_is_smaller(script, tmp_path, capsys):
    run, exported, tables = make_run(script, tmp_path / "run"), tmp_path / "mine.pt", []
    main(Args((run,), episodes=2, export=exported))
    tables.append([line.split()[2:] for line in capsys.readouterr().out.splitlines()[2:4]])
    main(Args((exported,), episodes=2))
    tables.append([line.split()[2:] for line in capsys.readouterr().out.splitlines()[2:4]])
    assert tables[0] == tables[1]
    whole, acting = (torch.load(path, weights_only=True) for path in (run / "agent.pt", exported))
    assert acting["weights"].keys() < whole["weights"].keys()
    assert not any("target" in name for name in acting["weights"])
    assert str(tmp_path) not in str(acting)
    with pytest.raises(SystemExit, match="exists; choose another name"):
        main(Args((run,), export=exported))
    with pytest.raises(SystemExit, match="name one run, not 2"):
        main(Args((run, exported), export=tmp_path / "other.pt"))
    del acting["weights"][next(name for name in acting["weights"] if "." in name)]
    torch.save(acting, exported)
    with pytest.raises(SystemExit, match="does not hold an agent"):
        main(Args((exported,)))


@pytest.mark.parametrize(("agent", "enough"), [("lander", 150), ("half_cheetah", 2500), ("half_cheetah_sac", 2500)])
def test_a_shipped_agent_is_small_and_plays(agent, enough):
    """Whatever has become of options and layers since it was trained."""
    path = ROOT / "docs" / "agents" / f"{agent}.pt"
    args = Args((path,), episodes=3, seed=7)
    played, _ = evaluate.evaluate(open_run(path, args), args)
    assert played["learned"]["greedy"]["return"] > enough
    assert path.stat().st_size < 200_000
    assert not any("target" in name for name in torch.load(path, weights_only=True)["weights"])


def test_seconds_are_those_of_the_last_evaluation(tmp_path):
    assert evaluate.training_seconds(tmp_path) is None
    for text, seconds in [
        ("step,seconds,return\n0,0.5,1\n10,6.25,2\n", 6.25),
        ("step,seconds,return\n", None),
        ("step,return\n0,1\n", None),
        ("step,seconds,return\n0,0.5,1\n10", None),  # cut off
    ]:
        (tmp_path / "evaluations.csv").write_text(text)
        assert evaluate.training_seconds(tmp_path) == seconds


# Selectors.


def noise_of(*modes: str) -> EpisodesNoise:
    """Of episodes in these modes."""
    noise = EpisodesNoise([None if mode == "greedy" else np.random.default_rng(1) for mode in modes], CPU)
    noise.asked = range(len(modes))
    return noise


def masks(selector: str, rates: list[float], steps: int) -> np.ndarray:
    """(steps, modes, bits): what a rule selects in a greedy and a stochastic episode."""
    noise, both = noise_of(*MODES), dict.fromkeys(MODES, torch.tensor(rates, dtype=torch.double))
    rule = Rule(selector, both, seed=1)
    return torch.stack([rule(torch.zeros(2, len(rates)), noise) for _ in range(steps)]).numpy()


def test_periodic_acts_are_spread_evenly_at_their_rate():
    rates = [0, 1 / 49, 1 / 3, 2 / 5, 0.5, 5 / 7, 1]
    counts = masks("periodic", rates, 500).cumsum(axis=0)
    for i, rate in enumerate(rates):
        exact = Fraction(rate).limit_denominator(100)
        for mode in (0, 1):
            assert counts[:, mode, i].tolist() == [math.floor(n * exact) for n in range(1, 501)]


def test_random_acts_come_at_their_rate():
    rates = [0, 0.2, 0.7, 1]
    drawn = masks("random", rates, 5000).astype(float)
    np.testing.assert_allclose(drawn.mean(axis=0), [rates, rates], atol=0.03)
    assert drawn[..., 0].max() == 0
    assert drawn[..., 3].min() == 1
    one, next_one, other = drawn[:-1, 0, 1], drawn[1:, 0, 1], drawn[:-1, 1, 1]
    assert np.abs(np.corrcoef([one, next_one, other]) - np.eye(3)).max() < 0.05  # neither of time nor of each other


def play(run: Run, select, episodes: int) -> dict[str, list[Trajectory]]:
    return run.evaluator.play(partial(run.agent.act, select=select), episodes)


@pytest.mark.parametrize(
    ("script", "options", "rates", "periods"),
    [
        (sdar, {}, ([1 / 3, 1 / 2, 1, 0], [1, 0, 1 / 2, 1 / 3]), ((3, 2, 1, 100), (1, 100, 2, 3))),
        (sdar, {"selection": "joint"}, ([1 / 3], [1 / 2]), ((3,) * 4, (2,) * 4)),
        (taac, {}, ([1 / 3], [1 / 2]), ((3,) * 4, (2,) * 4)),
    ],
    ids=["SDAR", "SDAR joint", "TAAC"],
)
def test_a_rule_takes_the_place_of_the_selection(script, options, rates, periods, tmp_path):
    """Each mode has its rates, and each episode starts anew, also in the second batch."""
    run = open_run(make_run(script, tmp_path, NOISE, **options), Args((tmp_path,)))
    of_modes = {mode: torch.tensor(of, dtype=torch.double) for mode, of in zip(MODES, rates, strict=True)}
    played = play(run, Rule("periodic", of_modes, seed=1), MORE_THAN_A_BATCH)
    for trajectories, of_dimensions in zip(played.values(), periods, strict=True):
        for trajectory in trajectories:
            for acting, period in zip(acts(trajectory.actions).T, of_dimensions, strict=True):
                np.testing.assert_array_equal(np.flatnonzero(acting), range(0, 10, period))


@pytest.mark.parametrize("script", [sdar, taac], ids=["SDAR", "TAAC"])
def test_learned_rates_are_means_over_episodes_of_their_own_steps(script, tmp_path):
    """Against the logits of whole batches, cut to the episodes' lengths afterwards."""
    run = open_run(make_run(script, tmp_path, "Hopper-v4"), Args((tmp_path,)))
    logits = {}  # of each batch, by its noise

    def learned(step_logits, noise):
        logits.setdefault(noise, []).append(step_logits)
        return run.select(step_logits, noise)

    watched = Watched(learned)
    played = play(run, watched, MORE_THAN_A_BATCH)
    plain = run.evaluator.play(run.agent.act, MORE_THAN_A_BATCH)
    rates, batches = watched.rates(), [torch.stack(batch) for batch in logits.values()]
    for column, (mode, trajectories) in enumerate(played.items()):
        means, lengths = [], []
        for i, trajectory in enumerate(trajectories):
            np.testing.assert_array_equal(trajectory.actions, plain[mode][i].actions)  # watching changes nothing
            batch, place = divmod(i, ROWS // 2)
            own = batches[batch][: len(trajectory.actions) - 1, 2 * place + column]
            means.append(((own > 0).double() if mode == "greedy" else own.double().sigmoid()).mean(0))
            lengths.append(len(own))
        assert len(set(lengths)) > 1
        torch.testing.assert_close(rates[mode], torch.stack(means).mean(0), rtol=1e-9, atol=0)


@pytest.mark.parametrize("script", [sdar, taac], ids=["SDAR", "TAAC"])
def test_random_and_periodic_act_as_often_as_the_learned_policy(script, tmp_path):
    """The learned policy's rate is counted from its executed actions; the evaluation asks β."""
    run = open_run(make_run(script, tmp_path, NOISE), Args((tmp_path,)))
    learned = {}
    for mode, trajectories in run.evaluator.play(run.agent.act, 10).items():
        learned[mode] = np.mean([acts(t.actions)[1:].mean(axis=0) for t in trajectories], axis=0)
    assert any(0 < rate < 1 for rate in learned["greedy"])
    for selector, tolerance in (("random", 0.2), ("periodic", 1 / 9)):  # 90 draws: four deviations
        main(Args((tmp_path,), episodes=10, selector=selector))
        evaluation = results(tmp_path, f"-{selector}")
        assert evaluation["selector"] == selector
        for mode, exactness in (("greedy", 1e-9), ("stochastic", 0.2)):
            rates = np.broadcast_to(evaluation[mode]["act_rate"], 4)
            np.testing.assert_allclose(rates, learned[mode], atol=exactness)
            assert 1 - evaluation[mode]["repeat_rate"] == pytest.approx(rates.mean(), abs=tolerance)
        main(Args((tmp_path,), episodes=10, selector=selector))
        assert results(tmp_path, f"-{selector}") == evaluation


@pytest.mark.parametrize("script", [sdar, taac], ids=["SDAR", "TAAC"])
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
        np.testing.assert_array_equal(colours, np.where(expected.acts[..., None], ACT, REPEAT))


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
    directory = make_run(nrep, tmp_path)
    args = Args((directory,), steps=(10, 90))
    run = open_run(directory, args)
    _, shown = evaluate.evaluate(run, dataclasses.replace(args, episodes=2))
    (alone,) = run.evaluator.play_together(run.agent.act, [(0, "greedy")], lambda: None)
    picture = evaluate.picture(run, shown, args)
    np.testing.assert_array_equal(picture.actions, alone.actions[10:])
    np.testing.assert_array_equal(picture.acts, acts(alone.actions)[10:])
    assert not picture.acts[0].any()  # --repeat 4: step 10 repeats step 8
    assert "steps 10 to 49 of 50" in picture.title
    with pytest.raises(SystemExit, match="has only 50 steps"):
        evaluate.picture(run, shown, Args((directory,), steps=(50, 60)))


def test_several_runs_in_one_table_and_one_picture(tmp_path, capsys):
    a, b = make_run(sdar, tmp_path / "a", selection="joint"), make_run(nrep, tmp_path / "b", NOISE)
    raster, traces = tmp_path / "raster.png", tmp_path / "traces.svg"
    main(Args((a, b), episodes=1, raster=raster, actions=traces))
    table = capsys.readouterr().out
    assert [line.split()[1] for line in table.splitlines()[2:6]] == ["a", "a", "b", "b"]
    assert "SDAR (joint)" in table
    assert "N-Rep" in table
    assert "- b, greedy: a0 4.50, a1 4.50, a2 4.50, a3 4.50" in table  # --repeat 4: 2 changes in 9 pairs
    assert imageio.imread(raster).std() > 0
    assert traces.read_text().startswith("<?xml")
    before = snapshot(tmp_path)
    with pytest.raises(SystemExit, match="exists; choose another name, or replace it with --overwrite"):
        main(Args((a, b), episodes=2, raster=raster))
    assert snapshot(tmp_path) == before
    main(Args((a,), episodes=1, raster=raster, overwrite=True))
    assert raster.read_bytes() != before["raster.png"]


AGENTS = sorted((ROOT / "docs" / "agents").glob("*.pt"))


@pytest.mark.parametrize("agent", AGENTS, ids=lambda path: path.stem)
def test_the_agents_that_come_with_it_play_as_promised(agent, capsys):
    """They are small, name no place of the machine they were trained on, and can do their task: land, run."""
    assert agent.stat().st_size < 1e6
    assert torch.load(agent, weights_only=True)["args"]["runs_dir"] == "runs"
    main(Args((agent,), episodes=5))
    greedy = capsys.readouterr().out.splitlines()[2]
    returns = float(greedy.split("|")[6].split("±")[0].replace(",", ""))
    assert returns > {"lander": 200, "half_cheetah": 3000, "half_cheetah_sac": 3000}[agent.stem]


# Videos.


def run_without_a_screen(*words: str, **environment: str) -> subprocess.CompletedProcess:
    inherited = {k: v for k, v in os.environ.items() if k not in ("DISPLAY", "WAYLAND_DISPLAY", "MUJOCO_GL")}
    command, env = [sys.executable, *words], {**inherited, **environment}
    return subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT, check=False)


def test_video_shows_the_first_greedy_episode(tmp_path):
    make_run(sac, tmp_path, "LunarLanderContinuous-v3")
    video = tmp_path / "film.mp4"
    main(Args((tmp_path,), episodes=1, video=video))
    frames = imageio.imread(video)
    assert len(frames) == results(tmp_path)["greedy"]["length"]
    assert frames.std() > 0
    assert {path.name for path in tmp_path.iterdir()} == {"agent.pt", "evaluation.json", "film.mp4"}


def test_several_runs_are_filmed_side_by_side(tmp_path):
    runs = tmp_path / "a", tmp_path / "b"
    for seed, run in enumerate(runs):
        make_run(sac, run, "LunarLanderContinuous-v3", seed=seed)
    main(Args(runs, episodes=1, video=tmp_path / "film.gif"))
    frames = imageio.imread(tmp_path / "film.gif")
    longest = max(results(run)["greedy"]["length"] for run in runs)
    assert len(frames) == -(-longest // 2)  # of 50 a second, every second one
    assert frames.shape[2] == 2 * 600
    left, right = frames[:, :, :600], frames[:, :, 600:]
    assert left.std() > 0
    assert right.std() > 0


@pytest.mark.skipif(not ctypes.util.find_library("EGL"), reason="libEGL is not installed (Debian: libegl1 libgl1)")
def test_video_of_a_mujoco_task_without_a_screen(tmp_path):
    make_run(sac, tmp_path, "InvertedPendulum-v4")
    done = run_without_a_screen("evaluate.py", str(tmp_path), "--episodes", "1", "--video", str(tmp_path / "film.mp4"))
    assert done.returncode == 0, done.stderr
    assert "| InvertedPendulum-v4 | SAC" in done.stdout
    assert imageio.imread(tmp_path / "film.mp4").std() > 0


@pytest.mark.skipif(bool(ctypes.util.find_library("OSMesa")), reason="OSMesa is installed, so it would render")
def test_a_missing_graphics_library_gives_an_instruction():
    code = "from sdar_utils.envs import make_filmed_env; make_filmed_env('InvertedPendulum-v4', '--video')"
    done = run_without_a_screen("-c", code, MUJOCO_GL="osmesa")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: --video cannot render InvertedPendulum-v4: ")
    assert "install EGL" in line


# Errors.


def test_bad_input_is_refused_before_anything_is_written(tmp_path):
    good, other = make_run(sdar, tmp_path / "good"), make_run(sac, tmp_path / "other")
    (tmp_path / "empty").mkdir()
    (tmp_path / "folder.png").mkdir()
    shutil.copytree(good, tmp_path / "damaged")
    (tmp_path / "damaged" / "agent.pt").write_bytes((good / "agent.pt").read_bytes()[:-100])
    flipped = bytearray((good / "agent.pt").read_bytes())
    flipped[len(flipped) // 2] ^= 1
    (tmp_path / "flipped").mkdir()
    (tmp_path / "flipped" / "agent.pt").write_bytes(flipped)
    contents = torch.load(other / "agent.pt", weights_only=True)
    save_file(tmp_path / "task" / "agent.pt", {**contents, "args": {**contents["args"], "env_id": "Pendulum-v1"}})
    save_file(tmp_path / "seed" / "agent.pt", {**contents, "args": {**contents["args"], "seed": "one"}})
    before = snapshot(tmp_path)
    for message, runs, values in [
        ("name at least one run directory", [], {}),
        ("there is no run directory or agent .*absent", ["good", "absent"], {}),
        ("has no agent.pt and no checkpoint.pt", ["good", "empty"], {}),
        ("agent.pt is damaged", ["good", "damaged"], {}),
        ("agent.pt is damaged", ["good", "flipped"], {}),
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
        ("--video .* must end in .mp4 or .gif", ["good"], {"video": "film.avi"}),
        ("--video cannot render tests.tasks:HoldAndTrack-v0: .*EGL", ["good"], {"video": "film.mp4"}),
    ]:
        paths = {k: tmp_path / v if k in ("raster", "actions", "video") else v for k, v in values.items()}
        with pytest.raises(SystemExit, match=f"^error: .*{message}"):
            main(Args(tuple(tmp_path / run for run in runs), **paths))
        assert snapshot(tmp_path) == before, message


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_a_device_is_refused(tmp_path):
    with pytest.raises(SystemExit, match=r"^error: .*CUDA.*; leave --cuda away$"):
        main(Args((make_run(sac, tmp_path),), cuda=True))


def test_an_action_that_is_not_finite_stops_with_one_line(tmp_path):
    directory = make_run(sac, tmp_path)
    contents = torch.load(directory / "agent.pt", weights_only=True)
    contents["weights"]["actor.fc1.bias"][:] = math.nan
    torch.save(contents, directory / "agent.pt")
    with pytest.raises(SystemExit, match=r"^error: .*an action is not finite"):
        main(Args((directory,), episodes=1))
    assert not (directory / "evaluation.json").exists()
