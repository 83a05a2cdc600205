"""float8 against bfloat16 in the service, whose requests back to back keep the GPU at work."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
from matmuld_client import RemoteTensor
from matmuld_client.wire import DTYPES, unpack

from ....failure import Failure
from ...load import Wire
from .. import headers
from ..device import normal_tile
from ..lab import Lab
from ..section import BFLOAT16, FLOAT8, Section, named
from ..served import Service, back_to_back, request
from ..stopwatch import Budget, interleaved

SHAPE = (8192, 8192, 8192)
_CONNECTIONS, _COUNT = 2, 20
_ROWS = 64
"""Rows of y that are checked."""
_MOST_ERROR = {BFLOAT16: 1e-2, FLOAT8: 8e-2}
"""In norm. float8_e4m3fn has 4 significant bits: an operand is off by about 2.6 %, y by 3.7 %."""

Host = np.ndarray[Any, Any]


def measure(lab: Lab, section: Section, budget: Budget) -> None:
    service, dtypes = lab.service, (BFLOAT16, FLOAT8)
    known = service.client.info()["dtypes"]
    if FLOAT8 not in known:
        section.notes.append(f"not available: the service has no {FLOAT8}, only {', '.join(known)}")
        return
    operands = _Operands()
    with ExitStack() as stack:
        wires = stack.enter_context(service.connections(_CONNECTIONS))
        subjects = {
            dtype: _subject(service, stack, wires, operands, dtype, section) for dtype in dtypes
        }
        samples = interleaved(subjects, lab.rounds, budget)
    section.add(named(SHAPE), "wall", samples)
    section.compare(named(SHAPE), samples, BFLOAT16, FLOAT8)


class _Operands:
    """x, weight and bias in bfloat16, on the host; the float32 answer to the first rows."""

    def __init__(self) -> None:
        batch, inputs, outputs = SHAPE
        self.x = _random((batch, inputs), 1)
        self.weight = _random((outputs, inputs), 2, inputs**-0.5)
        self.bias = _random((outputs,), 3)
        y = _float(self.x[:_ROWS]) @ _float(self.weight).T + _float(self.bias)
        self.expected = np.maximum(y, 0)


def _random(shape: tuple[int, ...], seed: int, scale: float = 1.0) -> Host:
    return np.resize(normal_tile(seed, scale).astype(DTYPES[BFLOAT16]), shape)


def _float(array: Host) -> Host:
    return array.astype(np.float32)


def _subject(
    service: Service,
    stack: ExitStack,
    wires: list[Wire],
    operands: _Operands,
    dtype: str,
    section: Section,
) -> Callable[[], float]:
    """Requests over all connections, once their answer was found right."""
    client, options = service.client, {"result_type": BFLOAT16}
    bias = stack.enter_context(client.put(operands.bias))
    x, weight = (
        _uploaded(wires[0], array, None if dtype == BFLOAT16 else dtype)
        for array in (operands.x, operands.weight)
    )
    for handle in (x, weight):
        stack.callback(client.tensor(handle).free)
    targets = [
        stack.enter_context(client.zeros(SHAPE[::2], DTYPES[BFLOAT16])) for _ in range(len(wires))
    ]
    requests = [
        request(
            "linear/forward",
            {**headers.forward(x, weight, bias.handle, y=y.handle), "options": options},
        )
        for y in targets
    ]
    back_to_back(wires, requests, 1)
    for target in targets:
        section.notes.append(f"{dtype}: off by {_checked(dtype, target, operands):.2e} in norm")
    return lambda: back_to_back(wires, requests, _COUNT).us


def _uploaded(wire: Wire, array: Host, quantize: str | None) -> str:
    """The handle of a tensor, quantized by the service if it is to be."""
    header: dict[str, Any] = {
        "value": {"dtype": BFLOAT16, "shape": list(array.shape), "payload": 0}
    }
    if quantize is not None:
        header["quantize"] = quantize
    answer, _ = unpack(bytes(wire.post(request("tensors", header, array.tobytes()))))
    handle: str = answer["tensor"]
    return handle


def _checked(dtype: str, y: RemoteTensor, operands: _Operands) -> float:
    """The error of y's first rows. Raises Failure if it is too large."""
    difference = y[:_ROWS].numpy().astype(np.float32) - operands.expected
    error = float(np.linalg.norm(difference) / np.linalg.norm(operands.expected))
    if not error <= _MOST_ERROR[dtype]:
        raise Failure(f"{dtype}: wrong answer, off by {error:.2e} in norm")
    return error
