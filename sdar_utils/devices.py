"""Where to train: on a GPU that works, or on the CPU with one line that says why; and how arrays get there."""

import ctypes
import os

import numpy as np
import torch
from torch import Tensor

from sdar_utils import fail, one_line, say


def choose_device(cuda: bool) -> torch.device:
    """The CPU if CUDA is not wanted, or with a warning if it does not work.

    A process that was given a GPU, as sweeps and schedulers do by CUDA_VISIBLE_DEVICES, stops instead: nobody reads its
    warning, and it would train for weeks.
    """
    trouble = cuda_trouble() if cuda else None
    if cuda and trouble is None:
        return torch.device("cuda")
    given = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if cuda and given not in ("", "-1", "NoDevFiles"):
        fail(f"CUDA_VISIBLE_DEVICES is {given}, but {trouble}; --no-cuda trains on the CPU")
    if cuda:
        say(f"warning: {trouble}; training on the CPU (--no-cuda does so without this warning)")
    return torch.device("cpu")


def cuda_trouble(device: str = "cuda") -> str | None:
    """Why this GPU cannot be used; None if it can. That torch sees one is not enough: it must allocate and compute."""
    try:
        if (torch.ones(1, device=device) + 1).item() == 2:
            return None
        error = RuntimeError("1 + 1 is not 2 on it")
    except Exception as raised:  # torch has many kinds, and no driver is no RuntimeError
        error = raised
    built, offered = torch.version.cuda, driver_cuda()
    if built is None:
        return f"this torch ({torch.__version__}) is built without CUDA"
    if offered is None:
        return f"torch {torch.__version__} is built for CUDA {built}, and there is no NVIDIA driver here"
    if offered[0] < int(built.split(".")[0]):
        return (
            f"torch {torch.__version__} is built for CUDA {built}, and the driver offers {offered[0]}.{offered[1]} at "
            "most; update the driver, or install a torch that is built for its CUDA (pytorch.org, Get Started)"
        )
    return f"no GPU works (torch's CUDA {built}, the driver's {offered[0]}.{offered[1]}): {one_line(error)}"


def driver_cuda() -> tuple[int, int] | None:
    """The newest CUDA that the driver offers; torch does not tell when that is too old for it."""
    version = ctypes.c_int()
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return None
    return version.value // 1000, version.value % 1000 // 10


def largest_share(device: torch.device) -> float:
    """Bytes that one thing of a run may take of a GPU: half of what the run has, which RUNS_PER_GPU runs share alike.

    What is free now does not tell: other runs may be about to start.
    """
    free, total = torch.cuda.mem_get_info(device)
    return min(free, total / int(os.environ.get("RUNS_PER_GPU", "1"))) / 2


def pinned(array: np.ndarray, device: torch.device) -> Tensor:
    """The array in memory from which a copy to a GPU is one that nothing waits for; torch minds when to reuse it."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory() if device.type == "cuda" else tensor


def upload(array: np.ndarray, device: torch.device) -> Tensor:
    """The array on the device."""
    return pinned(array, device).to(device, non_blocking=True)
