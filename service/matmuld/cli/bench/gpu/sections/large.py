"""The large shape: all ways side by side, and the service against the same in process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import cupy
import numpy as np
from matmuld_client import RemoteTensor

from .. import headers
from ..device import Array, check
from ..inprocess import Operation
from ..lab import Lab
from ..problems import Layer
from ..section import IN_PROCESS, MATMULD, NVMATH, SERVICE, Section
from ..served import Request, back_to_back, request
from ..stopwatch import Budget, interleaved
from ..work import Works
from ..works import (
    Builder,
    executed_backward,
    executed_forward,
    forward_works,
    layer_backward_works,
)

SHAPE = (65536, 16384, 8192)
_FORWARD, _BACKWARD = "forward", "backward"
_TWO = f"{SERVICE}, two connections"
_COUNT = 4
"""Requests, or launches, back to back."""
_OUTPUTS = {_FORWARD: ("y",), _BACKWARD: ("dx", "dweight", "dbias")}
_TIMEOUT = 300.0


def measure(lab: Lab, section: Section, budget: Budget) -> None:
    layer = Layer(SHAPE)
    parts = budget.parts((0.25, 0.35, 0.15, 0.25))
    expected = {_FORWARD: layer.forward(), _BACKWARD: layer.backward()}
    operations = _operations(lab, layer)
    with ExitStack() as stack:
        builder = Builder(lab.gpu, stack, section.notes)
        works = _forward(lab, section, builder, layer)
        _compare(lab, section, _FORWARD, works, operations, expected, parts[0])
    with ExitStack() as stack:
        builder = Builder(lab.gpu, stack, section.notes)
        works = _backward(lab, section, builder, layer)
        _compare(lab, section, _BACKWARD, works, operations, expected, parts[1])
    resident = _Resident(lab, layer)
    for case, part in zip((_FORWARD, _BACKWARD), parts[2:], strict=True):
        _back_to_back(lab, section, case, operations[case], resident, expected[case], part)


def _operations(lab: Lab, layer: Layer) -> dict[str, Operation]:
    hold = lab.matmuld.hold
    x, weight, bias, dz = map(hold, (layer.x, layer.weight, layer.bias, layer.dz))
    mask = hold(layer.mask, "relu_aux")
    forward = headers.forward(x, weight, bias, aux=True)
    backward = headers.layer_backward(dz, weight, x, mask)
    return {
        _FORWARD: lab.matmuld.operation("linear/forward", _kept(forward, _FORWARD)),
        _BACKWARD: lab.matmuld.operation("linear/backward", _kept(backward, _BACKWARD)),
    }


def _kept(header: dict[str, Any], case: str) -> dict[str, Any]:
    """Outputs that stay on the device, for they are more than a payload can hold."""
    return {**header, "outputs": dict.fromkeys(_OUTPUTS[case], "tensor")}


def _forward(lab: Lab, section: Section, builder: Builder, layer: Layer) -> Works:
    works = forward_works(builder, _FORWARD, layer, aux=True)
    builder.add(works, _FORWARD, NVMATH, lambda: executed_forward(builder, layer))
    if pytorch := lab.with_pytorch(section):
        works |= pytorch.forward(layer, section.notes)
    return works


def _backward(lab: Lab, section: Section, builder: Builder, layer: Layer) -> Works:
    works = layer_backward_works(builder, _BACKWARD, layer)
    builder.add(works, _BACKWARD, NVMATH, lambda: executed_backward(builder, layer))
    if pytorch := lab.with_pytorch(section):
        works |= pytorch.backward(layer, section.notes)
    return works


def _compare(
    lab: Lab,
    section: Section,
    case: str,
    works: Works,
    operations: dict[str, Operation],
    expected: dict[str, list[Array]],
    budget: Budget,
) -> None:
    works[MATMULD] = operations[case].work(*_OUTPUTS[case])
    works = lab.right(section, case, works, expected[case])
    samples = lab.gpu_samples(works, budget)
    section.add(case, "gpu", samples)
    section.compare_with_best(case, samples, MATMULD)


class _Resident:
    """The operands in the service; they are freed when this is collected."""

    def __init__(self, lab: Lab, layer: Layer) -> None:
        self._client = client = lab.service.client
        self.x, self.weight, self.bias, self.dz = (
            client.put(cupy.asnumpy(array), timeout=_TIMEOUT)
            for array in (layer.x, layer.weight, layer.bias, layer.dz)
        )
        self.mask = self._uploaded(layer)

    def _uploaded(self, layer: Layer) -> RemoteTensor:
        """The mask; only a forward pass makes one to put it into."""
        batch, inputs, _ = layer.shape
        x, weight = self._client.zeros((batch, 8), np.float16), np.zeros((inputs, 8), np.float16)
        y, mask = self._client.linear(x, weight, activation="relu", save_aux=True, out="tensor")
        y.free()
        mask.replace(cupy.asnumpy(layer.mask), timeout=_TIMEOUT)
        return mask

    def targets(self, case: str) -> list[RemoteTensor]:
        """Tensors for the outputs."""
        batch, inputs, outputs = SHAPE
        shapes = {"y": (batch, outputs), "dx": (batch, inputs), "dweight": (outputs, inputs)}
        found = (shapes.get(name, (outputs,)) for name in _OUTPUTS[case])
        return [self._client.zeros(shape, np.float16) for shape in found]

    def request(self, case: str, targets: Sequence[RemoteTensor]) -> Request:
        x, weight, bias, dz = (t.handle for t in (self.x, self.weight, self.bias, self.dz))
        into = [target.handle for target in targets]
        if case == _FORWARD:
            header = headers.forward(x, weight, bias, y=into[0], aux=True)
            return request("linear/forward", header)
        header = headers.layer_backward(dz, weight, x, self.mask.handle, outputs=into)
        return request("linear/backward", header)

    def free(self, handles: Sequence[str]) -> None:
        for handle in handles:
            self._client.tensor(handle).free()


def _back_to_back(
    lab: Lab,
    section: Section,
    case: str,
    operation: Operation,
    resident: _Resident,
    expected: Sequence[Array],
    budget: Budget,
) -> None:
    targets = [resident.targets(case) for _ in range(2)]
    requests = [resident.request(case, into) for into in targets]
    with lab.service.connections(2) as wires:

        def served(count: int) -> Callable[[], float]:
            def sample() -> float:
                done = back_to_back(wires[:count], requests[:count], _COUNT)
                resident.free(done.handles("aux"))
                return done.us

            return sample

        served(2)()
        for into in targets:
            check(f"{case}, {SERVICE}", [_fetched(tensor) for tensor in into], expected)
        subjects = {
            IN_PROCESS: lambda: lab.gpu.wall_us(operation.run, _COUNT),
            SERVICE: served(1),
            _TWO: served(2),
        }
        samples = interleaved(subjects, lab.rounds, budget)
    section.add(case, "wall", samples)
    section.compare(case, samples, IN_PROCESS, SERVICE)
    section.compare(case, samples, IN_PROCESS, _TWO)


def _fetched(tensor: RemoteTensor) -> Array:
    return cupy.asarray(tensor.numpy(timeout=_TIMEOUT))
