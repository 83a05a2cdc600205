"""Stacks of layers: one request against the same products in process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from statistics import median
from typing import Any

import cupy
import numpy as np
from matmuld_client.wire import unpack

from .. import headers
from ..device import Array, check, normal
from ..lab import Lab
from ..problems import chained
from ..products import Product
from ..pytorch import EAGER
from ..section import NVMATH, REQUEST, Section, named
from ..served import request
from ..stopwatch import Budget, interleaved

SHAPES = ((16, 1024), (64, 4096), (1024, 4096))
LAYERS = 8
_PAYLOADS = f"{REQUEST}, x and y as payloads"
_REPEATS = 20

Run = Callable[[], Any]
Outputs = Callable[[], Sequence[Array]]


class _Stack:
    """Layers of one width, and their input."""

    def __init__(self, batch: int, width: int) -> None:
        self.x = normal((batch, width), 1)
        scale = (2 / width) ** 0.5
        self.weights = [normal((width, width), 10 + i, scale) for i in range(LAYERS)]
        self.biases = [normal((width,), 30 + i, 0.1) for i in range(LAYERS)]
        self.expected = chained(self.x, self.weights, self.biases)


def measure(lab: Lab, section: Section, budget: Budget) -> None:
    for shape, part in zip(SHAPES, budget.parts([1] * len(SHAPES)), strict=True):
        with ExitStack() as opened:
            stack = _Stack(*shape)
            subjects = {NVMATH: _executed(lab, opened, stack), **_requests(lab, opened, stack)}
            if pytorch := lab.with_pytorch(section):
                work = pytorch.stack(stack.x, stack.weights, stack.biases)
                subjects[EAGER] = work.run, work.outputs
            for name, (run, outputs) in subjects.items():
                run()
                lab.gpu.stream.synchronize()
                check(name, outputs(), stack.expected)
            timed = {name: _timed(lab, run) for name, (run, _) in subjects.items()}
            samples = interleaved(timed, lab.rounds, part)
        section.add(named(shape), "wall", samples)
        section.compare(named(shape), samples, NVMATH, REQUEST)
        section.compare(named(shape), samples, EAGER, REQUEST)
        lab.clear()


def _timed(lab: Lab, run: Run) -> Callable[[], float]:
    """The median of some calls, each until the answer is there."""
    return lambda: median(lab.gpu.wall_us(run) for _ in range(_REPEATS))


def _executed(lab: Lab, opened: ExitStack, stack: _Stack) -> tuple[Run, Outputs]:
    """nvmath's own `execute`, planned once, every product reading what the one before has made."""
    fed, products = stack.x, []
    for weight, bias in zip(stack.weights, stack.biases, strict=True):
        y = cupy.empty((fed.shape[0], weight.shape[0]), np.float16)
        product = Product(lab.gpu, weight, fed.T, y.T, "RELU_BIAS", vector=bias)
        opened.callback(product.close)
        products.append(product.execute)
        fed = y

    def run() -> None:
        for execute in products:
            execute()

    return run, lambda: [fed]


def _requests(lab: Lab, opened: ExitStack, stack: _Stack) -> dict[str, tuple[Run, Outputs]]:
    """One request on the unix socket: with handles only, and with payloads."""
    client = lab.service.client

    def put(arrays: Sequence[Array]) -> list[str]:
        held = [opened.enter_context(client.put(cupy.asnumpy(array))) for array in arrays]
        return [tensor.handle for tensor in held]

    weights, biases, (x,) = put(stack.weights), put(stack.biases), put([stack.x])
    host = cupy.asnumpy(stack.x)
    y = opened.enter_context(client.zeros(host.shape, np.float16))
    (wire,) = opened.enter_context(lab.service.connections(1))
    sent = {"dtype": "float16", "shape": list(host.shape), "payload": 0}
    resident = request("mlp/forward", headers.stack({"tensor": x}, weights, biases, y.handle))
    whole = request("mlp/forward", headers.stack(sent, weights, biases, None), host.tobytes())

    def received() -> list[Array]:
        payload = unpack(bytes(wire.post(whole)))[1][0]
        return [cupy.asarray(np.frombuffer(payload, np.float16).reshape(host.shape))]

    return {
        REQUEST: (lambda: wire.post(resident), lambda: [cupy.asarray(y.numpy())]),
        _PAYLOADS: (lambda: wire.post(whole), received),
    }
