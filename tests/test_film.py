"""Films: what is drawn below a frame, films side by side, and the files."""

import imageio.v3 as imageio
import numpy as np
import pytest

from sdar_utils import film
from sdar_utils.evaluation import ACT, REPEAT, Trajectory
from sdar_utils.film import GAP, HEAD, NAMES, ROW, STEPS, annotate, side_by_side, write_video

LENGTH, HEIGHT, WIDTH = 150, 90, 200


@pytest.fixture
def episode() -> Trajectory:
    """Grey frames; dimension 0 acts always, 1 at every third step, 2 never after its first."""
    t = np.arange(LENGTH)
    actions = np.stack([t, t // 3, np.zeros(LENGTH)], axis=1).astype(np.float32)
    frames = [np.full((HEIGHT, WIDTH, 3), i, np.uint8) for i in range(LENGTH)]
    return Trajectory("greedy", actions, LENGTH, frames=frames, rewards=[1.5] * LENGTH)


def cells(frame: np.ndarray, height: int, row: int) -> list[tuple[int, ...]]:
    """The colours of a row of the strip, from its first step on, until nothing is drawn."""
    step, y = (frame.shape[1] - NAMES - 8) / STEPS, height + HEAD + row * (ROW + GAP) + ROW // 2
    colours = [tuple(frame[y, int(NAMES + (column + 0.4) * step)].tolist()) for column in range(STEPS)]
    return colours[: colours.index((255, 255, 255))] if (255, 255, 255) in colours else colours


def test_the_strip_shows_the_latest_steps(episode):
    film_ = annotate(episode, ["hip", "knee", "ankle"], "SDAR")
    assert len(film_) == LENGTH
    shown = round(HEIGHT * film.MIN_WIDTH / WIDTH)
    for t in (0, 5, STEPS - 1, STEPS, LENGTH - 1):
        frame = film_[t]
        assert frame.shape[1] == film.MIN_WIDTH
        assert frame.shape[0] % 2 == frame.shape[1] % 2 == 0
        assert (frame[:shown] == t).all()
        steps = range(max(0, t + 1 - STEPS), t + 1)
        acting = [lambda s: True, lambda s: s % 3 == 0, lambda s: s == 0]
        for row, acts in enumerate(acting):
            assert cells(frame, shown, row) == [ACT if acts(s) else REPEAT for s in steps]


def test_the_caption_tells_the_return_so_far(episode, monkeypatch):
    written, draw = [], film.ImageDraw.ImageDraw.text
    monkeypatch.setattr(
        film.ImageDraw.ImageDraw,
        "text",
        lambda self, at, text, *rest: written.append(text) or draw(self, at, text, *rest),
    )
    annotate(episode, ["hip", "knee", "ankle"], "SDAR")
    assert written[:4] == ["SDAR: step 1, return 1.5", "hip", "knee", "ankle"]
    assert written[-4] == "SDAR: step 150, return 225.0"


def test_side_by_side_the_shorter_film_stays_at_its_end():
    films = [
        [np.full((10, 4, 3), 10 + i, np.uint8) for i in range(5)],
        [np.full((6, 2, 3), 50 + i, np.uint8) for i in range(2)],
    ]
    frames = side_by_side(films)
    assert [frame.shape for frame in frames] == [(10, 6, 3)] * 5
    assert [frame[0, 0, 0] for frame in frames] == [10, 11, 12, 13, 14]
    assert [frame[0, 5, 0] for frame in frames] == [50, 51, 51, 51, 51]
    assert all((frame[6:, 4:] == 255).all() for frame in frames)
    np.testing.assert_array_equal(side_by_side(films[:1]), films[0])


@pytest.mark.parametrize("suffix", [".mp4", ".gif"])
def test_videos_are_whole_or_absent(suffix, tmp_path):
    frames = [np.full((33, 47, 3), 4 * i, np.uint8) for i in range(50)]  # of an odd size
    path = tmp_path / "videos" / f"film{suffix}"
    write_video(frames, path, 30)
    shown = imageio.imread(path)
    assert len(shown) == (25 if suffix == ".gif" else 50)  # a GIF has at most 25 frames a second
    assert abs(int(shown[len(shown) * 4 // 5].mean()) - 160) < 10
    with pytest.raises(Exception):  # noqa: B017, PT011 (whatever imageio makes of it)
        write_video([*frames, "no picture"], path.with_name(f"other{suffix}"), 30)
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_a_gif_takes_as_long_as_the_episode(tmp_path):
    write_video([np.full((8, 8, 3), i, np.uint8) for i in range(100)], tmp_path / "film.gif", 50)
    assert imageio.immeta(tmp_path / "film.gif")["duration"] * 50 == 2000  # milliseconds of each of 50 frames
