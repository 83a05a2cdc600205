"""What operands must look like, and memory for what goes with them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matmuld_client.errors import Conflict, InvalidOperands

from ..calls import Call
from ..engine.elementwise import assign, aux_shape, swap
from ..engine.epilogs import ACTIVATIONS, AUX_KINDS, Activation, AuxKind
from ..engine.protocol import Array
from ..memory.tensors import Kind
from ..operands import AUX_DTYPES, Inputs, Operand, Output, check_bytes
from ..schemas import Into, Placement, Tensor
from .float8 import check_bias, check_factors, check_multiples


@dataclass(slots=True)
class LinearShape:
    """The sizes of a layer at work; `lead` are the dimensions of x before the last."""

    lead: tuple[int, ...]
    batch: int
    inputs: int
    outputs: int


def linear_shape(
    x: Operand, weight: Operand, bias: Operand | None, dtype: np.dtype[Any]
) -> LinearShape:
    """The sizes that x, weight and bias agree on.

    Raises:
        InvalidOperands: they do not.
    """
    outputs, inputs = weight_shape(weight)
    if not x.shape or x.shape[-1] != inputs:
        raise x.reject(
            f"expected shape […, batch, {inputs}] (weight is {weight.shape}), got {x.shape}"
        )
    check_factors(x, weight)
    check_multiples(weight, "out and in")
    if bias is not None:
        bias.expect((outputs,), f"[out], weight is {weight.shape}")
        check_bias(bias, x.dtype, dtype)
    lead = x.shape[:-1]
    check_bytes("y", (*lead, outputs), dtype)
    return LinearShape(lead, math.prod(lead), inputs, outputs)


def weight_shape(weight: Operand) -> tuple[int, int]:
    """(out, in) of a weight, neither of them 0."""
    if len(weight.shape) != 2 or 0 in weight.shape:
        raise weight.reject(f"expected shape [out, in] with out, in ≥ 1, got {weight.shape}")
    return weight.shape[0], weight.shape[1]


def activation_of(name: str, operand: str = "activation") -> Activation:
    """The activation of that name. Raises InvalidOperands."""
    for activation in ACTIVATIONS:
        if activation == name:
            return activation
    expected = one_of(ACTIVATIONS)
    raise InvalidOperands(
        f"{operand}: expected {expected}, got {name[:40]!r}",
        operand=operand,
    )


def one_of(names: Sequence[str]) -> str:
    """Names in words: a, b or c."""
    return f"{', '.join(names[:-1])} or {names[-1]}"


def take_aux(inputs: Inputs, name: str, tensor: Tensor) -> tuple[Operand, AuxKind]:
    """Auxiliary data of any kind, which its handle or its header tells."""
    said: Kind | None = tensor.kind
    if tensor.tensor is not None:
        said = inputs.store.get(inputs.tenant, tensor.tensor, name).kind
    elif tensor.step is not None and tensor.output is not None:
        said = inputs.find(name, tensor)[1].kind
    for kind in AUX_KINDS:
        if kind == said:
            return inputs.take(name, tensor, AUX_DTYPES[kind]), kind
    expected = f"{name}: expected a {one_of(AUX_KINDS)}"
    if tensor.tensor is not None:
        raise Conflict(f"{expected}, {tensor.tensor} is a {said}", operand=name)
    raise InvalidOperands(f"{expected}, got kind {said or 'none'}", operand=name)


def check_aux(aux: Operand, kind: AuxKind, d: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    """Raise InvalidOperands unless `aux` belongs to a D of that shape (out by batch for a linear
    layer).
    """
    aux.expect(aux_shape(kind, d), f"{kind} of {d[-2]} rows and {d[-1]} columns")
    if kind != "relu_aux" and aux.dtype != np.float32:
        aux.expect_dtype(dtype, "that of the gradient, or float32")
    if aux.rows not in (None, d[-2]):
        raise aux.reject(f"expected the aux of {d[-2]} rows, it has {aux.rows}")


def empty_aux(call: Call, kind: AuxKind, rows: int, columns: int, dtype: np.dtype[Any]) -> Array:
    """Memory for the aux of a D of `rows` by `columns`: column-major, padded."""
    padded, count = aux_shape(kind, (rows, columns))
    element = np.dtype(np.uint8) if kind == "relu_aux" else dtype
    return swap(call.empty((count, padded), element))


async def load_aux(call: Call, aux: Operand) -> Array:
    """An aux on the device, column-major whatever its bytes were."""
    array = await call.load(aux)
    if aux.shape[-1] and not swap(array).flags.c_contiguous:
        dense = swap(call.empty(swap(array).shape, aux.dtype))
        await call.compute(2 * array.nbytes, assign, dense, array)
        return dense
    return array


def scaling(c: Operand | None, beta: float | None) -> float:
    """beta, which goes with c and only with it. Raises InvalidOperands."""
    if (c is None) != (beta is None):
        raise InvalidOperands(
            "beta: expected with c, and only with c; "
            + ("c came without beta" if beta is None else "beta came without c"),
            operand="beta",
        )
    return 0.0 if beta is None else beta


def output(
    inputs: Inputs,
    path: str,
    placement: Placement | None,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    *,
    parameter: bool = False,
) -> Placement:
    """Where an output of that shape and dtype goes, which the header says under `path`.
    `parameter`: it is the gradient of one.

    Raises:
        InvalidOperands: it cannot go there.
        Conflict: it is to go into what is no tensor.
    """
    return declare(inputs, path, placement, Output(shape, dtype, parameter=parameter))


def aux_output(
    inputs: Inputs,
    path: str,
    placement: Placement | None,
    kind: AuxKind,
    d: tuple[int, ...],
    dtype: np.dtype[Any],
    weight: str | None = None,
) -> Placement:
    """Where the aux of a D of that shape goes; it stays in the service unless the header says so.
    `weight`: the handle of the weight of its layer.

    Raises:
        InvalidOperands: it cannot go there.
    """
    element = np.dtype(np.uint8) if kind == "relu_aux" else dtype
    looks = Output(aux_shape(kind, d), element, kind, d[-2], weight)
    return declare(inputs, path, placement, looks)


def declare(inputs: Inputs, path: str, placement: Placement | None, looks: Output) -> Placement:
    """Note an output; where it goes. Those of a program's steps go nowhere by themselves.

    Raises:
        InvalidOperands: it cannot go there.
        Conflict: it is to go into what is no tensor.
    """
    name = path.removeprefix("outputs.")
    inputs.outputs[name] = looks
    if inputs.program is None:
        return place(inputs, path, placement, looks)
    check_bytes(path, looks.shape, looks.dtype)
    return inputs.program.accumulated.get(name, "payload")


def place(inputs: Inputs, path: str, placement: Placement | None, looks: Output) -> Placement:
    """Where an output goes, which the header says under `path`. Only gradients of parameters are
    accumulated; an aux or a tape stays in the service unless the header says so.

    Raises:
        InvalidOperands: it cannot go there.
        Conflict: it is to go into what is no tensor.
    """
    shape, dtype, kind = looks.shape, looks.dtype, looks.kind
    check_bytes(path, shape, dtype)
    if placement is None:
        placement = "payload" if kind == "tensor" else "tensor"
    if kind == "tape" and placement != "tensor":
        raise InvalidOperands(f"{path}: expected tensor for a tape", operand=path)
    if isinstance(placement, Into):
        if kind != "tensor":
            raise InvalidOperands(f"{path}: expected payload or tensor, got a handle", operand=path)
        if not looks.parameter and scale_of(placement) != (1.0, 0.0):
            raise InvalidOperands(f"{path}: alpha and beta are for dweight and dbias", operand=path)
        inputs.target(path, placement, shape, dtype)
    nbytes = math.prod(shape) * dtype.itemsize
    if placement == "payload" and nbytes > inputs.payload_limit:
        raise InvalidOperands(
            f"{path}: expected a tensor for {nbytes} bytes, "
            f"a payload of this reply has at most {inputs.payload_limit}",
            operand=path,
        )
    return placement


def scale_of(placement: Placement) -> tuple[float, float]:
    """alpha and beta of what the target becomes."""
    return (placement.alpha, placement.beta) if isinstance(placement, Into) else (1.0, 0.0)
