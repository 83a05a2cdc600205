"""The same steps in PyTorch, if it is installed: eager, and by torch.compile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import cupy

from .device import Array, Gpu
from .problems import Layer
from .work import Work, Works

EAGER, COMPILED = "PyTorch eager", "torch.compile"
MISSING = "PyTorch is not installed: it is not compared with"


class PyTorch:
    """PyTorch on the stream that all subjects are measured on; operands are shared, not copied."""

    def __init__(self, gpu: Gpu) -> None:
        import torch

        self._torch: Any = torch
        self._stream = torch.cuda.ExternalStream(gpu.stream.ptr)

    def forward(self, layer: Layer, notes: list[str]) -> Works:
        """A layer with bias and ReLU, eager and compiled."""
        torch = self._torch

        def step(x: Any, weight: Any, bias: Any) -> tuple[Any, ...]:
            return (torch.relu(torch.nn.functional.linear(x, weight, bias)),)

        return self._both(step, (layer.x, layer.weight, layer.bias), notes)

    def backward(self, layer: Layer, notes: list[str]) -> Works:
        """dx masked, dweight and dbias, by the operators that autograd uses."""
        torch = self._torch

        def step(dz: Any, weight: Any, x: Any) -> tuple[Any, ...]:
            dx = torch.ops.aten.threshold_backward(dz @ weight, x, 0)
            return dx, dz.T @ x, dz.sum(0)

        return self._both(step, (layer.dz, layer.weight, layer.x), notes)

    def stack(self, x: Array, weights: Sequence[Array], biases: Sequence[Array]) -> Work:
        """Layers with bias and ReLU, eager."""
        torch = self._torch

        def step(x: Any, *parameters: Any) -> tuple[Any, ...]:
            half = len(parameters) // 2
            for weight, bias in zip(parameters[:half], parameters[half:], strict=True):
                x = torch.relu(torch.nn.functional.linear(x, weight, bias))
            return (x,)

        return self._work(step, (x, *weights, *biases))

    def _both(
        self, step: Callable[..., tuple[Any, ...]], operands: Sequence[Array], notes: list[str]
    ) -> Works:
        """Eager and compiled; if it cannot be compiled, `notes` say so.

        What was compiled for other shapes is forgotten: PyTorch compiles one function for a few
        shapes only.
        """
        self._torch.compiler.reset()
        works = {EAGER: self._work(step, operands)}
        compiled = self._work(self._torch.compile(step, dynamic=False), operands)
        try:
            compiled.run()
        except RuntimeError as error:
            notes.append(f"{COMPILED}: {str(error).splitlines()[0]}")
        else:
            works[COMPILED] = compiled
        return works

    def _work(self, step: Callable[..., tuple[Any, ...]], operands: Sequence[Array]) -> Work:
        torch, stream = self._torch, self._stream
        tensors = [torch.from_dlpack(operand) for operand in operands]
        made: list[Any] = []

        def run() -> None:
            with torch.cuda.stream(stream), torch.no_grad():
                made[:] = step(*tensors)

        def outputs() -> list[Array]:
            stream.synchronize()
            return [cupy.from_dlpack(tensor) for tensor in made]

        return Work(run, outputs)

    def trim(self) -> None:
        """Forget what was compiled, and give memory back."""
        self._torch.compiler.reset()
        self._torch.cuda.empty_cache()


def open_pytorch(gpu: Gpu) -> PyTorch | None:
    """None without PyTorch."""
    return None if find_spec("torch") is None else PyTorch(gpu)
