"""The first request of a service: with no plan known, and restarted with its plans stored."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter_ns, sleep
from typing import Any, NamedTuple

import cupy
import numpy as np

from .. import headers
from ..device import Array, check
from ..lab import Lab
from ..problems import Layer
from ..section import COLD, STEADY, WARM, Section, named
from ..served import Service, request, serving
from ..stopwatch import LEAST_ROUNDS, Budget, Samples

SHAPE = (64, 4096, 4096)
_ROUNDS = 5
"""Restarts, at most."""
_REQUESTS = 200
_READY = b"GET /health/ready HTTP/1.1\r\nHost: localhost\r\n\r\n"


def measure(lab: Lab, section: Section, budget: Budget) -> None:
    layer = Layer(SHAPE)
    expected = layer.forward()
    samples: Samples = {name: [] for name in (COLD, WARM, STEADY)}
    for number in range(min(lab.rounds, _ROUNDS)):
        if number >= LEAST_ROUNDS and budget.is_over:
            break
        with TemporaryDirectory(prefix="matmuld-") as folder:
            flags = "--plan-store", str(Path(folder) / "plans")
            samples[COLD].append(_started(lab, layer, expected, *flags).first_us)
            last = _started(lab, layer, expected, *flags, "--warm", str(_warm_file(Path(folder))))
            samples[WARM].append(last.first_us)
            samples[STEADY].append(last.steady_us)
    section.notes.append(f"the pool after the last start: {last.pool}")
    section.add(named(SHAPE), "wall", samples)
    section.compare(named(SHAPE), samples, WARM, STEADY)
    section.compare(named(SHAPE), samples, COLD, STEADY)


class _Start(NamedTuple):
    first_us: float
    steady_us: float
    pool: dict[str, Any]


def _warm_file(folder: Path) -> Path:
    """The request that will come, for ``serve --warm``."""
    batch, inputs, outputs = SHAPE
    shapes = {"x": [batch, inputs], "weight": [outputs, inputs], "bias": [outputs]}
    header: dict[str, Any] = {
        name: {"dtype": "float16", "shape": shape} for name, shape in shapes.items()
    }
    header["activation"] = "relu"
    path = folder / "warm.json"
    path.write_text(json.dumps({"requests": [{"operation": "linear/forward", "header": header}]}))
    return path


def _started(lab: Lab, layer: Layer, expected: list[Array], *flags: str) -> _Start:
    """A service of its own, its first request and the median of many later ones."""
    with serving(lab.device, *flags) as service, ExitStack() as stack:
        client = service.client
        x, weight, bias = (
            stack.enter_context(client.put(cupy.asnumpy(array)))
            for array in (layer.x, layer.weight, layer.bias)
        )
        y = stack.enter_context(client.zeros((layer.shape[0], layer.shape[2]), np.float16))
        header = headers.forward(x.handle, weight.handle, bias.handle, y=y.handle)
        first, steady = _latencies(service, header)
        check("first requests", [cupy.asarray(y.numpy())], expected)
        while client.info()["autotune"]["pending"]:
            sleep(0.05)
        return _Start(first, steady, client.plans()["stats"])


def _latencies(service: Service, header: dict[str, Any]) -> tuple[float, float]:
    sent = request("linear/forward", header)
    with service.connections(1) as (wire,):

        def once() -> float:
            began = perf_counter_ns()
            wire.post(sent)
            return (perf_counter_ns() - began) / 1e3

        wire.post([_READY])  # as whoever waits for a service does; the connection is there then
        first = once()
        return first, median(once() for _ in range(_REQUESTS))
