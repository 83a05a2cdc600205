"""Tensors of a header made operands: checked by themselves and against what they name."""

from __future__ import annotations

import math
from base64 import b64decode
from binascii import Error as Base64Error
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from matmuld_client.errors import Conflict, InvalidOperands, Malformed
from matmuld_client.wire import (
    DIMENSIONS_LIMIT,
    DTYPE_NAMES,
    DTYPES,
    PAYLOAD_LIMIT,
    is_row_major,
    row_major,
)

from .engine.elementwise import swap
from .engine.epilogs import AUX_KINDS
from .engine.float8 import FLOAT8
from .engine.protocol import Array, Engine
from .memory.tensors import Kind, Resident, TensorStore
from .schemas import Into, StepOutput, Tensor

FLOATS = ("float64", "float32", "float16", "bfloat16")
FACTORS = (*FLOATS, *FLOAT8)
"""What is multiplied."""
BLACKWELL = (
    *("float8_e8m0fnu", "float6_e2m3fn", "float6_e3m2fn", "float4_e2m1fn", "float4_e2m1fn_x2"),
    *("mxfp8", "mxfp6", "mxfp4", "nvfp4"),
)
"""Types scaled by blocks, which only GPUs of compute capability 10 and more multiply."""
SOURCES = ("payload", "data", "tensor", "step")
AUX_DTYPES = {kind: ("uint8",) if kind == "relu_aux" else FLOATS for kind in AUX_KINDS}
BYTES_LIMIT = 1 << 48
"""What an address can reach. Extents of 0 count as 1, so that no size can overflow."""


@dataclass(slots=True)
class Operand:
    """A tensor of a header, checked by itself: what it looks like, and where its elements will be.

    It holds no elements, so that it serves for every request with the same header.

    Attributes:
        name: what the header calls it, such as ``layers[1].weight``.
        strides: in elements; None if row-major.
        index: its place among the operands of the request.
        payload: source: the index of a payload.
        data: source: the bytes, which came inside a JSON header.
        handle: source: what the service holds; without any source it is only described.
        offset: of a view of what is held, in elements; None: all of it.
        step: source: the earlier step of a program and what it calls the output.
        rows, weight: of aux data that is held, what its resident says.
        is_scale: it is what the tensor of that handle was quantized with.
        consumed: a tape that is freed once it has been used.
    """

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    kind: str
    strides: tuple[int, ...] | None = None
    index: int = -1
    payload: int | None = None
    data: memoryview | None = None
    handle: str | None = None
    offset: int | None = None
    step: tuple[int, str] | None = None
    rows: int | None = None
    weight: str | None = None
    is_scale: bool = False
    consumed: bool = False

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def extent(self) -> int:
        """Elements from the first to the last, both included."""
        return self.size if self.strides is None else _span(self.shape, self.strides)

    def held(self, resident: Resident) -> Any:
        """What `resident`, that of the handle, holds of it now."""
        if not self.is_scale:
            return resident.value
        assert resident.quantization is not None
        return resident.quantization.scale

    def arrange(self, engine: Engine, flat: Array) -> Array:
        """The operand in its elements, which lie in `flat` as they came."""
        if self.strides is None:
            return flat.reshape(self.shape)
        return engine.view(flat, self.shape, self.strides)

    def view(self, engine: Engine, held: Array) -> Array:
        """The operand in what is held under its handle."""
        if self.offset is None:
            return held
        base = held if held.flags.c_contiguous else swap(held)
        strides = self.strides or row_major(self.shape)
        return engine.view(base, self.shape, strides, self.offset)

    def check(self, data: memoryview) -> None:
        """Raise InvalidOperands unless `data` has as many bytes as the operand must have."""
        itemsize, needed = self.dtype.itemsize, self.extent * self.dtype.itemsize
        if self.strides is None:
            if len(data) != needed:
                raise self.reject(
                    f"expected {needed} bytes for shape {list(self.shape)} of {self.dtype.name}, "
                    f"got {len(data)}"
                )
        elif len(data) < needed or len(data) % itemsize:
            raise self.reject(
                f"expected {needed} bytes or more, in whole elements, "
                f"for shape {list(self.shape)} with strides {list(self.strides)}, "
                f"got {len(data)}"
            )

    def expect(self, shape: tuple[int, ...], meaning: str) -> None:
        """Raise InvalidOperands unless the shape is `shape`."""
        if self.shape != shape:
            raise InvalidOperands(
                f"{self.name}: expected shape {shape} ({meaning}), got {self.shape}",
                operand=self.name,
            )

    def expect_dtype(self, dtype: np.dtype[Any], why: str) -> None:
        """Raise InvalidOperands unless the dtype is `dtype`."""
        if self.dtype != dtype:
            raise InvalidOperands(
                f"{self.name}: expected dtype {dtype.name} ({why}), got {self.dtype.name}",
                operand=self.name,
            )

    def reject(self, problem: str) -> InvalidOperands:
        """An error about this operand."""
        return InvalidOperands(f"{self.name}: {problem}", operand=self.name)


class Output(NamedTuple):
    """What an output looks like before it is there.

    Attributes:
        rows, weight: of aux data, as its resident would say.
        parameter: it is the gradient of a parameter, which may be accumulated.
        tape: of a tape, what its operation must know of it.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    kind: Kind = "tensor"
    rows: int | None = None
    weight: str | None = None
    parameter: bool = False
    tape: Any = None


class Program:
    """What the steps of a program know of each other while they are checked, one after the other.

    Attributes:
        names: the places of the steps by name, of those to come too.
        outputs: those of the steps that have been checked.
        accumulated: outputs of the step being checked that are added to tensors.
    """

    def __init__(self, names: dict[str, int]) -> None:
        self.names = names
        self.outputs: list[dict[str, Output]] = []
        self.accumulated: dict[str, Into] = {}

    def find(self, path: str, step: str, output: str) -> tuple[int, Output]:
        """The place of an earlier step, and its output. Raises InvalidOperands."""
        index = self.names.get(step)
        if index is None:
            raise InvalidOperands(
                f"{path}: expected the name of a step, got {step[:40]!r}", operand=path
            )
        if index >= len(self.outputs):
            raise InvalidOperands(
                f"{path}: expected an earlier step, got {step[:40]!r}, which is steps[{index}]",
                operand=path,
            )
        found = self.outputs[index].get(output)
        if found is None:
            names = ", ".join(list(self.outputs[index])[:8])
            raise InvalidOperands(
                f"{path}: expected an output of step {step[:40]!r} ({names}), got {output[:40]!r}",
                operand=path,
            )
        return index, found


class Sources(NamedTuple):
    """The operands of a header. `payloads`: how many it names, if they are the first so many;
    `targets`: the tensors that outputs go into.
    """

    operands: tuple[Operand, ...]
    payloads: int | None
    targets: tuple[Into, ...]

    @property
    def consumed(self) -> list[Operand]:
        """The tapes that are used up."""
        return [operand for operand in self.operands if operand.consumed]

    def check(self, payloads: Sequence[memoryview]) -> None:
        """Raise Malformed or InvalidOperands unless `payloads` are those that the header names."""
        if len(payloads) != self.payloads:
            raise self._mismatch(len(payloads))
        for operand in self.operands:
            if operand.payload is not None:
                operand.check(payloads[operand.payload])

    def _mismatch(self, count: int) -> Malformed:
        named = {operand.payload for operand in self.operands}
        for operand in self.operands:
            if operand.payload is not None and not 0 <= operand.payload < count:
                return Malformed(
                    f"{operand.name}: expected a payload index below {count}, "
                    f"got {operand.payload}",
                    operand=operand.name,
                )
        unnamed = min(set(range(count)) - named)
        return Malformed(f"payload {unnamed}: expected a tensor that names it, there is none")


class Inputs:
    """The tensors of one header."""

    def __init__(
        self,
        store: TensorStore,
        tenant: str,
        payload_limit: int = PAYLOAD_LIMIT,
        *,
        sourceless: bool = False,
        deterministic: bool = False,
    ) -> None:
        """`payload_limit`: bytes of a tensor in the reply; `sourceless`: nothing is sent;
        `deterministic`: the same bits every time, whether a header asks for it or not.

        Of a program, `program` is set while its steps are checked. `outputs` are those of the
        header by name, once it has been checked.
        """
        self.store = store
        self.tenant = tenant
        self.payload_limit = payload_limit
        self.deterministic = deterministic
        self.sourceless = sourceless
        self.program: Program | None = None
        self.outputs: dict[str, Output] = {}
        self.operands: list[Operand] = []
        self._targets: dict[str, Into] = {}

    def take(self, name: str, tensor: Tensor, dtypes: Sequence[str] = FLOATS) -> Operand:
        """Check `tensor` by itself; `dtypes` are those that its place allows.

        Raises:
            Malformed: it has not one source.
            InvalidOperands: its dtype, shape or strides are wrong.
            UnknownHandle, Gone: its handle names nothing.
        """
        handle, step = tensor.tensor, tensor.step
        sent = (tensor.payload is not None) + (tensor.data is not None)
        known = (handle is not None) + (step is not None)
        if sent + known != (0 if self.sourceless and not known else 1):
            raise self._wrong_sources(name, tensor)
        if (step is None) != (tensor.output is None):
            raise Malformed(f"{name}: expected both step and output, or neither", operand=name)
        if step is not None:
            operand = self._produced(name, tensor, dtypes)
        elif handle is not None:
            operand = self._held(name, tensor, handle, dtypes)
        else:
            operand = self._sent(name, tensor, dtypes)
        return self.add(operand)

    def add(self, operand: Operand) -> Operand:
        """Make `operand` one of the header's."""
        operand.index = len(self.operands)
        self.operands.append(operand)
        return operand

    def take_own_scale(self, operand: Operand) -> Operand | None:
        """What the tensor that `operand` names was quantized with, if it was."""
        handle = operand.handle
        if handle is None or self.store.get(self.tenant, handle, operand.name).quantization is None:
            return None
        return self.add(
            Operand(operand.name, DTYPES["float32"], (1,), "tensor", handle=handle, is_scale=True)
        )

    def target(self, path: str, into: Into, shape: Sequence[int], dtype: np.dtype[Any]) -> None:
        """Check that an output of `shape` and `dtype`, the header's `path`, can go into a tensor.

        Raises:
            InvalidOperands: the tensor does not look like the output, or takes another one.
            Conflict: it is none to write to.
        """
        resident = self.store.get(self.tenant, into.tensor, path)
        if resident.kind != "tensor":
            raise Conflict(
                f"{path}: expected a tensor to write to, {into.tensor} is a {resident.kind}",
                operand=path,
            )
        expected, held = (tuple(shape), dtype), (resident.value.shape, resident.value.dtype)
        if expected != held:
            raise InvalidOperands(
                f"{path}: expected a tensor {_looks(*expected)}, {into.tensor} is {_looks(*held)}",
                operand=path,
            )
        if into.tensor in self._targets:
            raise InvalidOperands(
                f"{path}: expected a tensor of its own, {into.tensor} takes another output",
                operand=path,
            )
        self._targets[into.tensor] = into

    def finish(self) -> Sources:
        """All that were taken."""
        named = {operand.payload for operand in self.operands if operand.payload is not None}
        count = len(named) if named == set(range(len(named))) else None
        return Sources(tuple(self.operands), count, tuple(self._targets.values()))

    def find(self, name: str, source: Tensor | StepOutput) -> tuple[int, Output]:
        """The earlier step of a program that `source` names, and its output.

        Raises:
            Malformed: this is no program.
            InvalidOperands: there is no such step or output.
        """
        assert source.step is not None
        assert source.output is not None
        if self.program is None:
            raise Malformed(
                f"{name}: expected another source, a step is for /v1/run only", operand=name
            )
        return self.program.find(name, source.step, source.output)

    def _wrong_sources(self, name: str, tensor: Tensor) -> Malformed:
        expected = "no payload or data" if self.sourceless else "exactly one source"
        given = [source for source in SOURCES if getattr(tensor, source) is not None]
        return Malformed(
            f"{name}: expected {expected}, got {' and '.join(given) or 'none'}", operand=name
        )

    def _sent(self, name: str, tensor: Tensor, dtypes: Sequence[str]) -> Operand:
        if tensor.offset:
            raise InvalidOperands(
                f"{name}: expected an offset with a handle only, got {tensor.offset}", operand=name
            )
        dtype, shape = described(name, tensor.dtype, tensor.shape, dtypes)
        strides = _checked_strides(name, shape, tensor.strides)
        operand = Operand(name, dtype, shape, tensor.kind or "tensor", strides)
        operand.payload = tensor.payload
        if tensor.data is not None:
            operand.data = _decoded(name, tensor.data)
            operand.check(operand.data)
        return operand

    def _held(self, name: str, tensor: Tensor, handle: str, dtypes: Sequence[str]) -> Operand:
        resident = self.store.get(self.tenant, handle, name)
        if resident.kind == "tape":
            raise Conflict(f"{name}: expected a tensor, {handle} is a tape", operand=name)
        value, kind = resident.value, resident.kind
        looks = Output(value.shape, value.dtype, kind, resident.rows, resident.weight)
        operand = _known(name, tensor, looks, dtypes)
        operand.handle = handle
        return operand

    def _produced(self, name: str, tensor: Tensor, dtypes: Sequence[str]) -> Operand:
        index, looks = self.find(name, tensor)
        if looks.kind == "tape":
            raise Conflict(f"{name}: expected a tensor, got a tape", operand=name)
        operand = _known(name, tensor, looks, dtypes)
        operand.step = index, str(tensor.output)
        return operand


def _known(name: str, tensor: Tensor, looks: Output, dtypes: Sequence[str]) -> Operand:
    """What is known to look so, or the view of it that `tensor` describes."""
    dtype_name = DTYPE_NAMES[looks.dtype]
    if dtype_name not in dtypes:
        raise InvalidOperands(
            f"{name}: expected dtype {' or '.join(dtypes)}, the tensor has {dtype_name}",
            operand=name,
        )
    _expect_same(name, "dtype", tensor.dtype, dtype_name)
    _expect_same(name, "kind", tensor.kind, looks.kind)
    operand = Operand(name, looks.dtype, looks.shape, looks.kind)
    operand.rows, operand.weight = looks.rows, looks.weight
    if tensor.strides is None and not tensor.offset:
        _expect_same(name, "shape", tensor.shape, list(looks.shape))
    else:
        _take_view(operand, tensor, operand.size)
    return operand


def described(
    name: str, dtype: str | None, shape: Sequence[int] | None, dtypes: Sequence[str]
) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """A dtype and shape, checked by themselves."""
    if dtype is None or shape is None:
        missing = "dtype" if dtype is None else "shape"
        raise Malformed(f"{name}: expected a {missing}, it is missing", operand=name)
    if dtype not in dtypes:
        expected = f"{name}: expected dtype {' or '.join(dtypes)}, got {dtype[:40]!r}"
        if dtype.lower() in BLACKWELL:
            expected += ", which needs a GPU of compute capability 10 (Blackwell)"
        raise InvalidOperands(expected, operand=name)
    if len(shape) > DIMENSIONS_LIMIT:
        raise Malformed(
            f"{name}: expected at most {DIMENSIONS_LIMIT} dimensions, got {len(shape)}",
            operand=name,
        )
    if any(extent < 0 for extent in shape):
        raise InvalidOperands(f"{name}: expected extents ≥ 0, got {list(shape)}", operand=name)
    element = DTYPES[dtype]
    check_bytes(name, shape, element)
    return element, tuple(shape)


def check_bytes(name: str, shape: Sequence[int], dtype: np.dtype[Any]) -> None:
    """Raise InvalidOperands if the shape is one that no memory holds."""
    if math.prod(extent or 1 for extent in shape) * dtype.itemsize > BYTES_LIMIT:
        raise InvalidOperands(
            f"{name}: expected at most 2^48 bytes, shape {list(shape)} of {dtype.name} has more",
            operand=name,
        )


def _looks(shape: Sequence[int], dtype: np.dtype[Any]) -> str:
    return f"{list(shape)} of {DTYPE_NAMES[dtype]}"


def _expect_same(name: str, what: str, said: object, held: object) -> None:
    if said is not None and said != held:
        raise InvalidOperands(
            f"{name}: expected {what} {held}, which the tensor has, got {said}", operand=name
        )


def _checked_strides(
    name: str, shape: tuple[int, ...], strides: Sequence[int] | None
) -> tuple[int, ...] | None:
    """Strides that are none of row-major, negative or overlapping; None for row-major."""
    if strides is None:
        return None
    if len(strides) != len(shape):
        raise InvalidOperands(
            f"{name}: expected {len(shape)} strides for shape {list(shape)}, got {list(strides)}",
            operand=name,
        )
    if any(stride < 0 for stride in strides):
        raise InvalidOperands(f"{name}: expected strides ≥ 0, got {list(strides)}", operand=name)
    if is_row_major(shape, strides):
        return None
    reach = 0
    for stride, extent in sorted(zip(strides, shape, strict=True)):
        if extent > 1:
            if stride <= reach:
                raise InvalidOperands(
                    f"{name}: expected elements that do not overlap, "
                    f"got strides {list(strides)} for shape {list(shape)}",
                    operand=name,
                )
            reach += stride * (extent - 1)
    return tuple(strides)


def _span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to the last, both included."""
    if 0 in shape:
        return 0
    return 1 + sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))


def _decoded(name: str, data: str) -> memoryview:
    try:
        return memoryview(b64decode(data, validate=True))
    except (Base64Error, ValueError) as error:
        raise Malformed(f"{name}: expected base64 in data: {error}", operand=name) from None


def _take_view(operand: Operand, tensor: Tensor, size: int) -> None:
    """Make `operand`, all of a tensor of `size` elements so far, the view that is described."""
    name = operand.name
    shape = operand.shape if tensor.shape is None else tuple(tensor.shape)
    described(name, DTYPE_NAMES[operand.dtype], shape, (DTYPE_NAMES[operand.dtype],))
    strides = _checked_strides(name, shape, tensor.strides) or row_major(shape)
    end = tensor.offset + _span(shape, strides)
    if tensor.offset < 0 or end > size:
        raise operand.reject(
            f"expected a view within the tensor's {size} elements, got "
            f"elements {tensor.offset} to {end - 1} by shape {list(shape)}, "
            f"strides {list(strides)} and offset {tensor.offset}"
        )
    operand.shape, operand.strides, operand.kind = shape, strides, "tensor"
    operand.offset, operand.rows, operand.weight = tensor.offset, None, None
