"""The replay buffer against plain lists, in memory and on disk."""

import numpy as np
import pytest
import torch

from sdar_utils import replay
from sdar_utils.replay import ReplayBuffer

CPU = torch.device("cpu")


def make_buffer(capacity: int) -> ReplayBuffer:
    return ReplayBuffer(capacity, {"x": (2,), "y": (), "z": (1,)}, CPU)


def contents(buffer: ReplayBuffer) -> list[tuple[float, ...]]:
    batch = buffer.gather(torch.arange(len(buffer)))
    return sorted(
        (*x.tolist(), y.item(), *z.tolist()) for x, y, z in zip(batch["x"], batch["y"], batch["z"], strict=True)
    )


@pytest.mark.parametrize("count", [3, 10, 11, 27])
def test_it_holds_the_last_rows(count):
    buffer = make_buffer(10)
    for i in range(count):
        buffer.add(x=np.array([i, -i]), y=i / 2, z=np.array([i * i]))
    assert contents(buffer) == [(i, -i, i / 2, i * i) for i in range(max(0, count - 10), count)]
    batch = buffer.sample(1000)
    assert batch["x"].shape == (1000, 2)
    assert batch["y"].shape == (1000,)
    assert batch["z"].shape == (1000, 1)
    assert set(batch["x"][:, 0].tolist()) == set(range(max(0, count - 10), count))  # all of them, evenly enough
    assert torch.equal(batch["y"] * 2, batch["x"][:, 0])


def test_what_was_added_goes_to_the_ring_as_one_block(monkeypatch):
    """When it is wanted; in two where the ring begins anew, and early if it is much."""
    blocks, pinned = [], replay.pinned
    monkeypatch.setattr(replay, "pinned", lambda array, device: blocks.append(len(array)) or pinned(array, device))
    monkeypatch.setattr(replay, "MOST_STAGED", 8)
    buffer, added = make_buffer(10), 0
    for count, expected in [(6, [6]), (7, [4, 3]), (0, []), (1, [1]), (20, [6, 2, 8, 4])]:
        for _ in range(count):
            added += 1
            buffer.add(x=np.array([added, 0]), y=0, z=np.array([1]))
        assert len(buffer) == min(added, 10)
        assert [x for x, *_ in contents(buffer)] == list(range(max(0, added - 10) + 1, added + 1))
        assert blocks == expected
        blocks.clear()


def test_slots_of_any_shape_are_gathered():
    buffer = make_buffer(10)
    for i in range(10):
        buffer.add(x=np.array([i, -i]), y=i, z=np.array([0]))
    batch = buffer.gather(torch.tensor([[1, 2, 3], [7, 8, 9]]))
    assert batch["x"].shape == (2, 3, 2)
    assert batch["y"].tolist() == [[1, 2, 3], [7, 8, 9]]


@pytest.mark.parametrize("rows_in_a_file", [4, 1000])
def test_on_disk_it_grows_by_what_is_new(tmp_path, monkeypatch, rows_in_a_file):
    monkeypatch.setattr(replay, "ROWS_IN_A_FILE", rows_in_a_file)
    buffer, seen = make_buffer(10), {}
    for i in range(47):
        buffer.add(x=np.array([i, 0]), y=0, z=np.array([1]))
        if i % 6 == 5 or i == 46:
            state = buffer.save(tmp_path, "replay")
            files = {p.name: (p.stat().st_mtime_ns, p.stat().st_ino) for p in tmp_path.iterdir()}
            assert all(files[name] == stamp for name, stamp in seen.items())  # nothing was written again
            rows_written = sum((tmp_path / name).stat().st_size for name in files.keys() - seen.keys()) // 16
            assert rows_written <= 6
            seen = files
            needed = {file["file"] for file in state["files"]}
            assert sum((tmp_path / name).stat().st_size for name in needed) // 16 <= 10 + 6
            for name in list(seen.keys() - needed):
                (tmp_path / name).unlink()
                del seen[name]
            copy = make_buffer(10)
            copy.load(tmp_path, state)
            assert contents(copy) == contents(buffer)
            assert copy.added == buffer.added


def test_damaged_files_are_noticed(tmp_path):
    buffer = make_buffer(10)
    for i in range(8):
        buffer.add(x=np.array([i, 0]), y=0, z=np.array([1]))
    state = buffer.save(tmp_path, "replay")
    path = tmp_path / state["files"][0]["file"]
    good = path.read_bytes()
    for bad in (good[:-16], good[:5] + b"\1" + good[6:], b""):
        path.write_bytes(bad)
        with pytest.raises(ValueError, match="damaged"):
            make_buffer(10).load(tmp_path, state)
    path.write_bytes(good)
    with pytest.raises(ValueError, match="missing"):
        make_buffer(10).load(tmp_path, {**state, "files": []})


def test_more_than_memory_is_refused():
    with pytest.raises(SystemExit, match=r"replay buffer of 10,000,000,000,000 rows takes .* lower --buffer-size"):
        make_buffer(10**13)
