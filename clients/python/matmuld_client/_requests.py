"""Requests and answers of operations, as headers and payloads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

import numpy as np

from ._channel import Answer, Channel
from ._payloads import AUX_DTYPES, Array, byte_view, describe, to_array
from .operations import (
    Accumulate,
    Layer,
    LinearGradients,
    Operand,
    Placement,
    Priority,
    Scale,
    StepResult,
)
from .tensors import RemoteTensor, Tape
from .views import TensorView


class Request:
    """A header, put together field by field, and the payloads that it names.

    Attributes:
        sent: arrays that are payloads already, which are sent once; whether as an aux.
        program: the one whose results are operands.
    """

    def __init__(self, **fields: object) -> None:
        self.header: dict[str, Any] = {
            name: value for name, value in fields.items() if value is not None
        }
        self.payloads: list[memoryview] = []
        self.sent: dict[tuple[int, bool], tuple[Array, dict[str, Any]]] = {}
        self.program: object = None

    def operands(self, **operands: Operand | None) -> None:
        for name, operand in operands.items():
            if operand is not None:
                self.header[name] = self._tensor(name, operand)

    def scales(self, scales: Mapping[Any, Scale] | None) -> None:
        if scales:
            self.header["scales"] = self._scales("scales", scales)

    def layers(self, layers: Iterable[Layer]) -> None:
        self.header["layers"] = [self._layer(i, layer) for i, layer in enumerate(layers)]

    def outputs(self, **placements: Placement | None) -> None:
        if outputs := placed(placements):
            self.header["outputs"] = outputs

    def send(
        self,
        channel: Channel,
        operation: str,
        timeout: float | None,
        deadline: float | None,
        priority: Priority | None,
    ) -> Results:
        target, fields = f"/v1/{operation}", ""
        if deadline is not None:
            fields = f"X-Deadline-Ms: {_milliseconds(deadline)}\r\n"
        if priority is not None:
            fields += f"X-Priority: {_word(priority)}\r\n"
        answer = channel.post(target, self.header, self.payloads, fields=fields, timeout=timeout)
        return Results(channel, answer)

    def _layer(self, index: int, layer: Layer) -> dict[str, Any]:
        if not isinstance(layer, Layer):
            raise TypeError(f"layers[{index}]: expected a Layer, got {type(layer).__name__}")
        described: dict[str, Any] = {"activation": layer.activation}
        described["weight"] = self._tensor(f"layers[{index}].weight", layer.weight)
        if layer.bias is not None:
            described["bias"] = self._tensor(f"layers[{index}].bias", layer.bias)
        if layer.scales:
            described["scales"] = self._scales(f"layers[{index}].scales", layer.scales)
        return described

    def _scales(self, path: str, scales: Mapping[Any, Scale]) -> dict[str, object]:
        return {
            name: self._tensor(f"{path}.{name}", scale)
            if isinstance(scale, RemoteTensor | TensorView | StepResult | np.ndarray)
            else float(scale)
            for name, scale in scales.items()
        }

    def _tensor(self, name: str, operand: Operand) -> dict[str, Any]:
        if isinstance(operand, RemoteTensor):
            return {"tensor": operand.handle}
        if isinstance(operand, StepResult):
            return self.reference(name, operand)
        if isinstance(operand, TensorView):
            source = {"tensor": operand.tensor.handle, "offset": operand.offset}
            return {**source, **_template_of(operand)}
        array = np.asarray(operand)
        key = id(array), name.endswith("aux")
        if key not in self.sent:
            tensor, block = _described(name, array)
            tensor["payload"] = len(self.payloads)
            self.payloads.append(byte_view(block))
            self.sent[key] = array, tensor
        return self.sent[key][1]

    def reference(self, name: str, result: StepResult) -> dict[str, Any]:
        """What names a result of an earlier step."""
        if result.program is not self.program:
            raise TypeError(f"{name}: expected a result of a step of this program, got another's")
        return {"step": result.step, "output": result.output}


class Results:
    """What an operation gave."""

    def __init__(self, channel: Channel, answer: Answer) -> None:
        self._channel = channel
        self.header, self._payloads = answer

    def tensor(self, name: str, placement: Placement | None = None) -> Array | RemoteTensor:
        """A result by its name."""
        return self.read(self.header[name], placement)

    def gradients(
        self, tensors: Mapping[str, Any], placements: Mapping[str, Placement]
    ) -> LinearGradients:
        return LinearGradients(
            **{name: self.read(tensor, placements.get(name)) for name, tensor in tensors.items()}
        )

    def layers(self, placements: Sequence[Mapping[str, Placement]]) -> tuple[LinearGradients, ...]:
        tensors = self.header["layers"]
        return tuple(map(self.gradients, tensors, placements or [{}] * len(tensors)))

    def tape(self, name: str = "tape") -> Tape:
        return Tape(self._channel, self.header[name]["tensor"], owned=True)

    def read(
        self, tensor: Mapping[str, Any], placement: Placement | None = None
    ) -> Array | RemoteTensor:
        """A tensor of the header; the caller's own object if it was placed into one."""
        if isinstance(placement, Accumulate):
            return placement.tensor
        if isinstance(placement, RemoteTensor):
            return placement
        if "tensor" in tensor:
            return RemoteTensor(self._channel, tensor)
        return to_array(tensor, self._payloads)


def _milliseconds(deadline: float) -> int:
    """Raises ValueError unless these are seconds that a header can say."""
    milliseconds = round(deadline * 1e3) if 0 < deadline < 1e6 else 0
    if milliseconds < 1:
        raise ValueError(f"deadline: expected seconds from 0.001 to 999999, got {deadline}")
    return milliseconds


def _word(priority: Priority) -> str:
    """Raises ValueError unless it is one of the two."""
    if priority not in get_args(Priority):
        expected = " or ".join(map(repr, get_args(Priority)))
        raise ValueError(f"priority: expected {expected}, got {priority!r}")
    return priority


def placed(placements: Mapping[str, Placement | None]) -> dict[str, object]:
    """Placements as the header says them."""
    return {
        name: _placement(name, where) for name, where in placements.items() if where is not None
    }


def template(value: object, name: str = "operand") -> object:
    """A header to come with its tensors described but not named, for planning ahead."""
    if isinstance(value, np.ndarray):
        return _described(name, value)[0]
    if isinstance(value, RemoteTensor):
        return {"kind": value.kind, **_template_of(value[()])}
    if isinstance(value, TensorView):
        return _template_of(value)
    if isinstance(value, Layer):
        return template({key: field for key, field in vars(value).items() if field is not None})
    if isinstance(value, Mapping):
        return {key: template(field, key) for key, field in value.items()}
    return [template(item) for item in value] if isinstance(value, list | tuple) else value


def _template_of(view: TensorView) -> dict[str, Any]:
    return {"dtype": view.tensor.dtype.name, "shape": view.shape, "strides": view.strides}


def _described(name: str, array: Array) -> tuple[dict[str, Any], Array]:
    if not name.endswith("aux"):
        return describe(array, name)
    tensor, block = describe(array, name, AUX_DTYPES)
    tensor["kind"] = _aux_kind(name, block)
    return tensor, block


def _aux_kind(name: str, aux: Array) -> str:
    if name in ("relu_aux", "gelu_aux"):
        return name
    if aux.dtype == np.uint8:
        return "relu_aux"
    raise TypeError(
        f"{name}: expected a RemoteTensor, as an array of {aux.dtype} does not say of which "
        "activation it is; put(array, kind=...) does"
    )


def _placement(name: str, placement: Placement) -> object:
    if isinstance(placement, str):
        return "payload" if placement == "array" else placement
    target = placement.tensor if isinstance(placement, Accumulate) else placement
    if not isinstance(target, RemoteTensor):
        raise TypeError(
            f"{name}: expected 'array', 'tensor' or a RemoteTensor for the result, "
            f"got {type(target).__name__}"
        )
    if isinstance(placement, Accumulate):
        return {"tensor": target.handle, "alpha": placement.alpha, "beta": placement.beta}
    return {"tensor": target.handle}
