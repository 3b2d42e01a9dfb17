"""Which device is taken and what is said about it, with a torch and a driver that are made up."""

import ctypes
import re

import numpy as np
import pytest
import torch

from sdar_utils import gradients
from sdar_utils.devices import choose_device, cuda_trouble, largest_share, upload
from sdar_utils.replay import ReplayBuffer

CUDA = torch.device("cuda")
GIB = 2**30


class Driver:
    """libcuda, as far as it is asked."""

    def __init__(self, version: int):
        self.version = version

    def cuDriverGetVersion(self, pointer) -> None:
        ctypes.cast(pointer, ctypes.POINTER(ctypes.c_int))[0] = self.version


@pytest.fixture
def world(monkeypatch):
    """Sets torch's CUDA, the driver's (None: there is none) and what happens when a tensor is made on a GPU."""
    ones = torch.ones

    def make(built: str | None, driver: int | None, error: Exception | None, visible: str | None = None) -> None:
        def library(name):
            if driver is None:
                raise OSError(f"{name}: cannot open shared object file")
            return Driver(driver)

        def allocate(*size, device="cpu"):
            if error is not None and str(device).startswith("cuda"):
                raise error
            return ones(*size)

        monkeypatch.setattr(torch.version, "cuda", built)
        monkeypatch.setattr(ctypes, "CDLL", library)
        monkeypatch.setattr(torch, "ones", allocate)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    return make


OLD = RuntimeError("The NVIDIA driver on your system is too old (found version 12020).\nPlease update")
BUSY = RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable")
TROUBLES = [
    (None, None, AssertionError("Torch not compiled with CUDA enabled"), r"this torch \(.*\) is built without CUDA"),
    ("13.0", None, RuntimeError("Found no NVIDIA driver"), "built for CUDA 13.0, and there is no NVIDIA driver here"),
    ("13.0", 12020, OLD, "built for CUDA 13.0, and the driver offers 12.2 at most; update the driver, or install"),
    ("12.8", 12020, BUSY, r"no GPU works \(torch's CUDA 12.8, the driver's 12.2\): CUDA error: all CUDA-capable"),
]


@pytest.mark.parametrize(("built", "driver", "error", "message"), TROUBLES)
def test_trouble_is_named_and_the_cpu_taken(world, capfd, built, driver, error, message):
    world(built, driver, error)
    assert choose_device(True) == torch.device("cpu")
    (line,) = capfd.readouterr().err.splitlines()
    assert re.fullmatch(
        rf"warning: .*{message}.*; training on the CPU \(--no-cuda does so without this warning\)", line
    )


@pytest.mark.parametrize("visible", ["0", "1,2", "GPU-8932f937"])
def test_who_was_given_a_gpu_does_not_fall_back(world, visible):
    world("13.0", 12020, OLD, visible)
    with pytest.raises(
        SystemExit, match=rf"^error: CUDA_VISIBLE_DEVICES is {visible}, but torch .* driver offers 12.2"
    ):
        choose_device(True)
    assert choose_device(False) == torch.device("cpu")


@pytest.mark.parametrize("visible", ["", "-1", "NoDevFiles"])  # the last is what Slurm says
def test_who_was_given_none_falls_back(world, visible):
    world("13.0", 13000, BUSY, visible)
    assert choose_device(True) == torch.device("cpu")


def test_a_gpu_that_works_is_taken_in_silence(world, capfd):
    world("13.0", 13000, None)
    assert choose_device(True) == CUDA
    assert choose_device(False) == torch.device("cpu")
    assert capfd.readouterr() == ("", "")


def test_a_gpu_that_computes_wrongly_is_not(world, monkeypatch):
    world("13.0", 13000, None)
    monkeypatch.setattr(torch, "ones", lambda *_, **__: torch.full((1,), 3.0))
    assert "1 + 1 is not 2" in cuda_trouble()


def test_upload_gives_the_array():
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert upload(array, torch.device("cpu")).tolist() == array.tolist()


# The replay buffer's place.


@pytest.fixture
def gpu(monkeypatch):
    """A GPU of 16 GiB, so many of them free, on which tensors can be made, or not for all that."""
    empty = torch.empty

    def make(free: int, fails: bool = False) -> list[str]:
        made = []

        def allocate(shape, device):
            made.append(torch.device(device).type)
            if made[-1] == "cuda" and fails:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return empty(shape, device="meta")

        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free * GIB, 16 * GIB))
        monkeypatch.setattr(torch, "empty", allocate)
        return made

    return make


@pytest.mark.parametrize(
    ("free", "runs", "expected"), [(16, None, 8), (4, None, 2), (16, "4", 2), (16, "2", 4), (1, "4", 0.5)]
)
def test_a_run_may_take_half_of_its_share(gpu, monkeypatch, free, runs, expected):
    gpu(free)
    monkeypatch.delenv("RUNS_PER_GPU", raising=False)
    if runs is not None:
        monkeypatch.setenv("RUNS_PER_GPU", runs)
    assert largest_share(CUDA) == expected * GIB


@pytest.mark.parametrize(
    ("store", "free", "fails", "made", "said"),
    [
        ("auto", 16, False, ["cuda"], ""),
        ("auto", 5, False, ["cpu"], "a replay buffer of 1,000,000 rows takes 3.7 GiB, too much for this run's share"),
        ("auto", 16, True, ["cuda", "cpu"], "too much for this run's share of the GPU: it stays in the host's memory"),
        ("cpu", 16, False, ["cpu"], ""),
        ("cuda", 1, False, ["cuda"], ""),
    ],
)
def test_the_buffer_takes_the_hosts_memory_where_the_gpus_is_short(gpu, capfd, store, free, fails, made, said):
    allocations = gpu(free, fails)
    ReplayBuffer(1_000_000, {"x": (1000,)}, CUDA, store)
    assert allocations == made
    out = capfd.readouterr().out
    assert said in out
    assert out.count("\n") == bool(said)


def test_who_insists_on_the_gpu_is_told(gpu):
    gpu(16, fails=True)
    with pytest.raises(SystemExit, match="too much here; lower --buffer-size or take --buffer-device cpu"):
        ReplayBuffer(1_000_000, {"x": (1000,)}, CUDA, "cuda")


# What --compile needs on a GPU.


@pytest.mark.parametrize(
    ("triton", "compilers", "header", "message"),
    [
        (False, ["gcc"], True, "needs the package triton"),
        (True, [], True, "needs a C compiler and found none; install one"),
        (True, ["clang"], False, "needs .*Python.h; install Python's headers"),
        (True, ["clang"], True, None),
    ],
)
def test_compiling_on_a_gpu_is_refused_before_anything_is_made(
    monkeypatch, tmp_path, triton, compilers, header, message
):
    monkeypatch.setattr(gradients.importlib.util, "find_spec", lambda name: "found" if triton else None)
    monkeypatch.setattr(gradients.shutil, "which", lambda name: name if name in compilers else None)
    monkeypatch.setattr(gradients.sysconfig, "get_paths", lambda scheme: {"include": str(tmp_path)})
    monkeypatch.delenv("CC", raising=False)
    if header:
        (tmp_path / "Python.h").touch()
    if message is None:
        gradients.check_compiler("cuda")
        monkeypatch.setenv("CC", "no-such-compiler")
        message = "needs a C compiler"
    with pytest.raises(SystemExit, match=rf"^error: --compile on a GPU {message}.*, or drop --compile$"):
        gradients.check_compiler("cuda")
