"""From a loss function to the step that minimises it, compiled or not."""

import importlib.util
import os
import shutil
import sysconfig
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sdar_utils import fail, say

Metrics = dict[str, Tensor]


class Adam:
    """Adam's fused kernel alone: for small networks torch.optim.Adam takes longer around it than in it."""

    def __init__(self, parameters: Iterable[Tensor], learning_rate: float):
        self.parameters, self.learning_rate = list(parameters), learning_rate
        self.means = [torch.zeros_like(p) for p in self.parameters]
        self.squares = [torch.zeros_like(p) for p in self.parameters]
        self.steps = torch.zeros((), device=self.parameters[0].device)  # there, so that CUDA graphs can capture a step

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor]) -> None:
        self.steps += 1
        torch._fused_adam_(
            self.parameters,
            gradients,
            self.means,
            self.squares,
            [],
            [self.steps] * len(self.parameters),
            lr=self.learning_rate,
            beta1=0.9,
            beta2=0.999,
            weight_decay=0.0,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
        )

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "means": self.means, "squares": self.squares}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        theirs = [state["steps"], *state["means"], *state["squares"]]
        for ours, their in zip([self.steps, *self.means, *self.squares], theirs, strict=True):
            ours.copy_(their)


class Minimiser:
    """Called with the inputs of a loss function, it moves the optimizers' parameters one step and gives the metrics.

    The loss function returns the loss and a dict of metrics. `edit`, if there is one, changes the gradients in place.
    """

    def __init__(
        self,
        loss_function: Callable[..., tuple[Tensor, Metrics]],
        *optimizers: Adam,
        compile: bool = False,
        edit: Callable[[Sequence[Tensor]], None] | None = None,
    ):
        self.loss_function, self.optimizers, self.edit = loss_function, optimizers, edit
        self.parameters = [p for optimizer in optimizers for p in optimizer.parameters]
        self.gradients = self.compile if compile else self.differentiate
        self.cuda_graphs = compile and self.parameters[0].device.type == "cuda"
        if compile and self.parameters[0].device.type in ("cpu", "cuda"):
            check_compiler(self.parameters[0].device.type)

    def __call__(self, *inputs: Any) -> Metrics:
        if self.cuda_graphs:
            torch.compiler.cudagraph_mark_step_begin()
        gradients, metrics = self.gradients(*inputs)
        if self.cuda_graphs:  # the graph's next replay overwrites them
            metrics = {tag: value.clone() for tag, value in metrics.items()}
        if self.edit is not None:
            self.edit(gradients)
        rest = iter(gradients)
        for optimizer in self.optimizers:
            optimizer.step([next(rest) for _ in optimizer.parameters])
        return metrics

    def differentiate(self, *inputs: Any) -> tuple[Sequence[Tensor], Metrics]:
        loss, metrics = self.loss_function(*inputs)
        return torch.autograd.grad(loss, self.parameters), metrics

    def compile(self, *inputs: Any) -> tuple[Sequence[Tensor], Metrics]:
        """`differentiate` as one graph, with nothing to keep in between. The first call makes it, later ones use it."""
        if self.cuda_graphs:
            settings: dict[str, Any] = {"mode": "reduce-overhead"}
        else:  # the eager generator is the faster one, and draws what the run would draw without --compile
            settings = {"options": {"fallback_random": True, "cpp_wrapper": True}}
        torch._dynamo.config.trace_autograd_ops = True
        began = time.monotonic()
        self.gradients = torch.compile(self.differentiate, fullgraph=True, **settings)
        outputs = self.gradients(*inputs)
        say(f"compiled {self.loss_function.__name__} in {time.monotonic() - began:.0f} s")
        return outputs


def check_compiler(device_type: str) -> None:
    """Before anything is made: torch itself would only say so at the first update."""
    if device_type == "cuda":
        check_triton()
        return
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        fail("--compile needs a C++ compiler and found none; install one (Debian: g++), set CXX, or drop --compile")


def check_triton() -> None:
    """Triton compiles a C file with Python's headers before its first kernel; it looks for both as here."""
    if importlib.util.find_spec("triton") is None:
        fail("--compile on a GPU needs the package triton and found none; install it, or drop --compile")
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or shutil.which(compiler) is None:
        fail(
            "--compile on a GPU needs a C compiler and found none; install one (Debian: gcc), set CC, or drop --compile"
        )
    header = Path(sysconfig.get_paths(scheme="posix_prefix")["include"]) / "Python.h"
    if not header.exists():
        fail(f"--compile on a GPU needs {header}; install Python's headers (Debian: python3-dev), or drop --compile")


@torch.no_grad()
def soft_update(targets: list[Tensor], online: list[Tensor], tau: float) -> None:
    """targets ← targets + τ·(online - targets)"""
    torch._foreach_lerp_(targets, online, tau)
