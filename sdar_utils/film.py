"""Films: an episode's frames with the return so far and, a row per actuator, where it acted and where it repeated."""

import math
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from sdar_utils.evaluation import ACT, REPEAT, Trajectory, acts

STEPS = 120  # so many of the latest ones are shown
ROW, GAP, HEAD, NAMES = 14, 2, 24, 96  # heights of a row, between two, and of the line above them; width of the names
MIN_WIDTH = 480
MAX_GIF_FPS = 25


def annotate(trajectory: Trajectory, names: Sequence[str], title: str) -> list[np.ndarray]:
    """The frames of a filmed episode, each with what has been done until then below it: dark acts, light repeats."""
    acting = acts(trajectory.actions)  # (T, |A|)
    height, width, _ = trajectory.frames[0].shape
    width, height = max(width, MIN_WIDTH), round(height * max(width, MIN_WIDTH) / width)
    width, height = width + width % 2, height + height % 2  # H.264 wants even sizes
    strip = HEAD + len(names) * (ROW + GAP) + GAP
    strip += strip % 2
    cell = (width - NAMES - 8) / STEPS
    head, small = ImageFont.load_default(13), ImageFont.load_default(11)
    film, total = [], 0.0
    for t, frame in enumerate(trajectory.frames):
        total += trajectory.rewards[t]
        picture = Image.new("RGB", (width, height + strip), "white")
        picture.paste(Image.fromarray(frame).resize((width, height)))
        draw = ImageDraw.Draw(picture)
        draw.line((0, height, width, height), "lightgrey")
        draw.text((6, height + 4), f"{title}: step {t + 1}, return {total:,.1f}", "black", head)
        first = max(0, t + 1 - STEPS)
        for row, name in enumerate(names):
            top = height + HEAD + row * (ROW + GAP)
            draw.text((6, top), name, "black", small)
            for column, is_act in enumerate(acting[first : t + 1, row]):
                left = NAMES + column * cell
                draw.rectangle((left, top, left + cell - 1, top + ROW - 1), ACT if is_act else REPEAT)
        film.append(np.asarray(picture))
    return film


def side_by_side(films: Sequence[list[np.ndarray]]) -> list[np.ndarray]:
    """One film of several; one that is over stays at its last frame."""
    tallest = max(len(film[0]) for film in films)
    frames = []
    for t in range(max(map(len, films))):
        shown = [film[min(t, len(film) - 1)] for film in films]
        padded = [np.pad(f, ((0, tallest - len(f)), (0, 0), (0, 0)), constant_values=255) for f in shown]
        frames.append(np.concatenate(padded, axis=1))
    return frames


def write_video(frames: Sequence[np.ndarray], path: Path, fps: float) -> None:
    """An .mp4, or a .gif with as many of the frames as it takes to be no heavier than it need be."""
    import imageio.v2 as imageio

    settings = {"fps": fps, "macro_block_size": 2}
    if path.suffix.lower() == ".gif":
        every = math.ceil(fps / MAX_GIF_FPS)
        frames, settings = frames[::every], {"duration": 1000 * every / fps, "loop": 0}
    path.parent.mkdir(exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}{path.suffix}")
    try:
        with imageio.get_writer(unfinished, **settings) as video:
            for frame in frames:
                video.append_data(frame)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
