"""What a run says: TensorBoard, Weights & Biases, the progress bar, and evaluations.csv."""

import csv
import dataclasses
import math
import os
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams
from tqdm import tqdm

from sdar_utils import NotFinite, fail, one_line, say
from sdar_utils.evaluation import Trajectory, act_or_repeat_image, summarise
from sdar_utils.film import write_video

CHARTS = {  # the Custom Scalars page of TensorBoard; tags are regular expressions
    "return": ["eval/return$", "eval/return_stochastic$", "charts/episodic_return$"],
    "action persistence rate (APR)": ["eval/apr$", r"eval/apr_dim_\d+$"],
    "action fluctuation rate (AFR)": ["eval/afr$", "eval/afr_per_dim$"],
    "act probability": ["repetition/act_probability_.*"],
}


def evaluation_row(results: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Both modes' summaries as the columns of evaluations.csv; those of the stochastic one end in _stochastic."""
    row = {}
    for mode, summary in results.items():
        ending = "" if mode == "greedy" else f"_{mode}"
        for name, value in summary.items():
            if name == "episodes" and ending:
                continue  # as many as greedy ones
            if isinstance(value, list):
                row |= {f"{name}_{i}{ending}": entry for i, entry in enumerate(value)}
            else:
                row[f"{name}{ending}"] = value
    return row


class Losses:
    """An update's metrics, kept on the device without waiting for them until they are wanted."""

    def __init__(self, device: torch.device):
        self.device = device
        self.pending: dict[str, list[tuple[int, Tensor]]] = {}  # (step, value) of each tag

    def record(self, metrics: dict[str, Tensor], step: int) -> None:
        for tag, value in metrics.items():
            self.pending.setdefault(tag, []).append((step, value))

    def fetch(self) -> dict[str, np.ndarray]:
        """(updates, values) for each tag, in one transfer; raises if one is not finite."""
        if not self.pending:
            return {}
        columns = [torch.stack([value.reshape(-1) for _, value in values]) for values in self.pending.values()]
        host = torch.cat([column.reshape(-1) for column in columns]).cpu().split([c.numel() for c in columns])
        losses = {tag: h.reshape(c.shape).numpy() for tag, h, c in zip(self.pending, host, columns, strict=True)}
        bad = [
            (self.pending[tag][row][0], order, tag)
            for order, (tag, values) in enumerate(losses.items())
            for row in np.flatnonzero(~np.isfinite(values).all(axis=1))[:1]
        ]
        if bad:
            step, _, tag = min(bad)
            raise NotFinite(tag, step)
        return losses

    def take_means(self) -> dict[str, float]:
        """The mean of each tag, a tag_i for each entry of a vector; what was recorded is forgotten."""
        means = {}
        for tag, values in self.fetch().items():
            is_vector = self.pending[tag][0][1].dim() > 0
            means |= {f"{tag}_{i}" if is_vector else tag: mean for i, mean in enumerate(values.mean(axis=0))}
        self.pending.clear()
        return means

    def load(self, pending: dict[str, list[tuple[int, Tensor]]]) -> None:
        self.pending = {tag: [(s, value.to(self.device)) for s, value in values] for tag, values in pending.items()}


class Logs:
    """The files of a run that grow, and its progress bar."""

    def __init__(self, args: Any, script: Path, directory: Path, step: int, restored: bool):
        self.args, self.directory = args, directory
        if args.track:
            self.start_tracking(script.resolve())
        # A TensorBoard that is open already forgets what it has seen beyond the checkpoint.
        self.writer = SummaryWriter(directory, purge_step=step + 1 if restored else None)
        if not restored:
            options = {name: str(value) for name, value in dataclasses.asdict(args).items()}
            table = "\n".join(f"|{name}|{value}|" for name, value in options.items())
            self.writer.add_text("hyperparameters", f"|param|value|\n|-|-|\n{table}")
            for summary in hparams(options, {"eval/return": 0, "eval/apr": 0, "eval/afr": 0}):
                self.writer.file_writer.add_summary(summary)
            self.writer.add_custom_scalars({"overview": {title: ["Multiline", tags] for title, tags in CHARTS.items()}})
        self.bar = tqdm(total=args.total_timesteps, initial=step, unit=" steps", disable=None, dynamic_ncols=True)
        self.last_return = self.last_eval = math.nan
        self.counted_from = step, time.monotonic()  # what steps/s are counted from

    def start_tracking(self, script: Path) -> None:
        import wandb

        args = self.args
        try:
            run = wandb.init(
                project=args.wandb_project_name,
                entity=args.wandb_entity,
                group=f"{args.env_id}__{args.exp_name}",
                name=args.run_name,
                id=re.sub(r"[^\w.-]", "-", args.run_name),
                resume="allow",
                config=dataclasses.asdict(args),
                dir=self.directory,
                sync_tensorboard=True,
                save_code=True,
            )
        except wandb.errors.Error as error:
            fail(f"--track: {one_line(error)} (wandb login sets it up, WANDB_MODE=offline does without a server)")
        code = (str(script), str(Path(__file__).resolve().parent))  # the script and this package
        run.log_code(str(script.parent), include_fn=lambda path: path.endswith(".py") and path.startswith(code))

    def log(self, scalars: dict[str, float], step: int) -> None:
        for tag, value in scalars.items():
            self.writer.add_scalar(tag, value, step)

    def log_losses(self, means: dict[str, float], step: int) -> None:
        last_step, last_time = self.counted_from
        self.counted_from = step, time.monotonic()
        speed = (step - last_step) / max(self.counted_from[1] - last_time, 1e-9)
        self.log({**means, "charts/SPS": int(speed)}, step)

    def pause(self, seconds: float) -> None:
        """So much time does not count for steps/s."""
        step, began = self.counted_from
        self.counted_from = step, began + seconds

    def log_episode(self, statistics: dict[str, Any], step: int) -> None:
        """`statistics` are those of gymnasium's RecordEpisodeStatistics."""
        self.last_return = statistics["r"]
        self.log({"charts/episodic_return": statistics["r"], "charts/episodic_length": statistics["l"]}, step)
        self.bar.set_postfix_str(f"return {self.last_return:.1f}, eval {self.last_eval:.1f}", refresh=False)

    def log_evaluation(self, played: dict[str, list[Trajectory]], step: int, seconds: float, fps: float) -> dict:
        """Everywhere; returns both modes' summaries."""
        results = {mode: summarise(trajectories) for mode, trajectories in played.items()}
        row, greedy, shown = evaluation_row(results), results["greedy"], played["greedy"][0]
        self.last_eval = greedy["return"]
        self.log({f"eval/{name}": value for name, value in row.items() if name != "episodes"}, step)
        self.log({"charts/seconds": seconds}, step)
        self.writer.add_image("eval/act_or_repeat", act_or_repeat_image(shown.actions), step, dataformats="HWC")
        if shown.frames:
            self.log_video(shown.frames, step, fps)
        append_row(self.directory / "evaluations.csv", {"step": step, "seconds": f"{seconds:.3f}", **row})
        say(
            f"step {step:,} of {self.args.total_timesteps:,}: return {greedy['return']:.1f} ± "
            f"{greedy['return_standard_error']:.1f} (stochastic {results['stochastic']['return']:.1f}), "
            f"APR {greedy['apr']:.2f}, AFR {greedy['afr']:.3f}, {seconds:.0f} s"
        )
        return results

    def log_video(self, frames: list[np.ndarray], step: int, fps: float) -> None:
        path = self.directory / "videos" / f"step-{step:09d}.mp4"
        write_video(frames, path, fps)
        if self.args.track:
            import wandb

            wandb.log({"eval/video": wandb.Video(str(path), format="mp4"), "global_step": step})

    def sizes(self) -> dict[str, int]:
        """How far each file goes now."""
        self.writer.flush()
        return {path.name: path.stat().st_size for path in growing_files(self.directory)}

    def close(self, failed: bool) -> None:
        self.bar.close()
        self.writer.close()
        if self.args.track:
            import wandb

            wandb.finish(exit_code=int(failed))


def append_row(path: Path, row: dict[str, Any]) -> None:
    is_new = not path.exists() or path.stat().st_size == 0
    with open(path, "a", newline="") as file:
        writer = csv.DictWriter(file, list(row), lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerow(row)
        file.flush()
        os.fsync(file.fileno())


def growing_files(directory: Path) -> list[Path]:
    return [*directory.glob("events.*"), *directory.glob("evaluations.csv")]


def truncate(directory: Path, sizes: dict[str, int]) -> None:
    """Takes back what was logged after these sizes: it is about to happen again."""
    for path in growing_files(directory):
        if path.name in sizes:
            os.truncate(path, min(sizes[path.name], path.stat().st_size))
        else:
            path.unlink()
