"""The replay buffer: a ring of rows that saves only what is new."""

import contextlib
import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sdar_utils import fail, say
from sdar_utils.checkpoint import write_atomically
from sdar_utils.devices import largest_share, pinned

ROWS_IN_A_FILE = 16_384
MOST_STAGED = 1024


class ReplayBuffer:
    """A ring of float32 rows with a transition's fields side by side, so that a batch is one gather.

    What is added waits on the host until it is wanted, and then goes to the ring as one block, one copy to a GPU.
    """

    def __init__(self, capacity: int, fields: dict[str, tuple[int, ...]], device: torch.device, store: str = "auto"):
        """`fields` maps a field's name to the shape of one entry: (n,), or () for a scalar.

        Batches go to `device`. The rows stay there too or on the cpu, as `store` says; "auto" lets them when they fit.
        """
        self.capacity, self.fields, self.device = capacity, fields, device
        self.widths = [math.prod(shape) for shape in fields.values()]
        self.rows = self.allocate(store)
        self.staged: list[np.ndarray] = []
        self.added = 0  # rows ever added, those that are staged included; row i lives in slot i % capacity
        self.files: list[dict[str, Any]] = []  # those that hold the saved rows, oldest first

    def allocate(self, store: str) -> Tensor:
        shape = self.capacity, sum(self.widths)
        size = math.prod(shape) * 4
        message = f"a replay buffer of {self.capacity:,} rows takes {size / 2**30:,.1f} GiB, too much"
        if self.device.type == "cuda" and store == "auto":
            if size <= largest_share(self.device):
                with contextlib.suppress(torch.OutOfMemoryError):  # another program was quicker
                    return torch.empty(shape, device=self.device)
            say(f"{message} for this run's share of the GPU: it stays in the host's memory")
            store = "cpu"
        try:
            return torch.empty(shape, device="cpu" if store == "cpu" else self.device)
        except RuntimeError:
            fail(f"{message} here; lower --buffer-size" + " or take --buffer-device cpu" * (store == "cuda"))

    def __len__(self) -> int:
        return min(self.added, self.capacity)

    def add(self, **row: Any) -> None:
        self.staged.append(
            np.concatenate([np.ravel(row[field]).astype(np.float32, copy=False) for field in self.fields])
        )
        self.added += 1
        if len(self.staged) == min(MOST_STAGED, self.capacity):
            self.flush()

    def flush(self) -> None:
        """Moves the staged rows to the ring."""
        block, start = self.staged, (self.added - len(self.staged)) % self.capacity
        self.staged = []
        for part, slot in ((block[: self.capacity - start], start), (block[self.capacity - start :], 0)):  # to its end
            if part:
                self.rows[slot : slot + len(part)].copy_(pinned(np.stack(part), self.rows.device), non_blocking=True)

    def sample(self, batch_size: int) -> dict[str, Tensor]:
        return self.gather(torch.randint(len(self), (batch_size,), device=self.rows.device))

    def gather(self, slots: Tensor) -> dict[str, Tensor]:
        """The rows in these slots, each field of shape (*slots.shape, *its own)."""
        self.flush()
        rows = self.rows.index_select(0, slots.reshape(-1))
        if self.rows.device.type != self.device.type:
            rows = rows.pin_memory().to(self.device, non_blocking=True)
        columns = zip(self.fields.items(), rows.unflatten(0, slots.shape).split(self.widths, dim=-1), strict=True)
        return {name: column if shape else column.squeeze(-1) for (name, shape), column in columns}

    def save(self, directory: Path, name: str) -> dict[str, Any]:
        """Writes the rows added since the last save; files that are there already stay as they are."""
        self.flush()
        oldest = max(0, self.added - self.capacity)
        start = max(oldest, self.files[-1]["stop"]) if self.files else oldest
        while start < self.added:
            stop = min(start + ROWS_IN_A_FILE, self.added)
            rows = self.rows[self.slots(start, stop)].cpu().numpy()
            file = f"{name}-{start:010d}-{stop:010d}.bin"
            write_atomically(directory / file, rows.data)
            self.files.append({"file": file, "start": start, "stop": stop, "crc32": zlib.crc32(rows.data)})
            start = stop
        self.files = [file for file in self.files if file["stop"] > oldest]
        return {"added": self.added, "files": self.files}

    def load(self, directory: Path, state: dict[str, Any]) -> None:
        covered = max(0, state["added"] - self.capacity)
        for file in state["files"]:
            start, stop = file["start"], file["stop"]
            rows = np.fromfile(directory / Path(file["file"]).name, np.float32)
            if start > covered or zlib.crc32(rows.data) != file["crc32"]:
                raise ValueError(f"{file['file']} is damaged or out of order")
            self.rows[self.slots(start, stop)] = torch.from_numpy(rows.reshape(stop - start, -1)).to(self.rows.device)
            covered = stop
        if covered != state["added"]:
            raise ValueError("replay rows are missing")
        self.added, self.files, self.staged = state["added"], list(state["files"]), []

    def slots(self, start: int, stop: int) -> Tensor:
        return torch.arange(start, stop, device=self.rows.device) % self.capacity
