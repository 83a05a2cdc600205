"""8-bit operands: which products there are, and their scales."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from matmuld_client.errors import InvalidOperands
from matmuld_client.wire import DTYPES

from ..calls import Call
from ..engine.float8 import E5M2, MULTIPLE, is_float8
from ..engine.protocol import Array
from ..operands import Inputs, Operand
from ..schemas import Tensor

_FLOAT32 = np.finfo(np.float32)


class OperandScale(NamedTuple):
    """What an operand is multiplied by: a number, which alpha takes, and a tensor, if there is."""

    number: float = 1.0
    tensor: Operand | None = None

    async def load(self, call: Call) -> Array | None:
        """The tensor on the device."""
        return None if self.tensor is None else await call.load(self.tensor)


def take_scale(
    inputs: Inputs, path: str, operand: Operand, given: float | Tensor | None
) -> OperandScale:
    """The scale of an operand: the one that is given, or the one that its tensor has.

    Raises:
        InvalidOperands: there is none, or it is none; or the operand takes none.
    """
    if not is_float8(operand.dtype):
        if given is not None:
            raise InvalidOperands(
                f"{path}: expected no scale, {operand.name} is {operand.dtype.name}", operand=path
            )
        return OperandScale()
    if given is None:
        own = inputs.take_own_scale(operand)
        if own is None and not inputs.sourceless:
            raise InvalidOperands(
                f"{path}: expected a scale for {operand.name} of {operand.dtype.name}, got none",
                operand=path,
            )
        return OperandScale(tensor=own)
    if isinstance(given, Tensor):
        tensor = inputs.take(path, given, ("float32",))
        if tensor.shape not in ((), (1,)):
            raise tensor.reject(f"expected shape () or (1,), got {tensor.shape}")
        return OperandScale(tensor=tensor)
    if not float(_FLOAT32.smallest_subnormal) <= given <= float(_FLOAT32.max):
        raise InvalidOperands(f"{path}: expected a finite float32 > 0, got {given}", operand=path)
    return OperandScale(float(np.float32(given)))


def check_factors(first: Operand, second: Operand) -> None:
    """Raise InvalidOperands unless there are products of these dtypes: of equal ones, and of 8-bit
    ones but e5m2 by e5m2.
    """
    if not (is_float8(first.dtype) and is_float8(second.dtype)):
        second.expect_dtype(first.dtype, f"that of {first.name}")
    elif first.dtype == second.dtype == E5M2:
        raise second.reject(
            f"expected float8_e4m3fn with {first.name} of float8_e5m2, got float8_e5m2, "
            "which no GPU multiplies by itself"
        )


def check_multiples(operand: Operand, names: str) -> None:
    """Raise InvalidOperands if a matrix of 8-bit floats has sizes that GPUs do not multiply."""
    if is_float8(operand.dtype) and any(extent % MULTIPLE for extent in operand.shape[-2:]):
        raise operand.reject(
            f"expected {names} in multiples of {MULTIPLE} for {operand.dtype.name}, "
            f"got {operand.shape}"
        )


def check_bias(bias: Operand, factors: np.dtype[Any], result: np.dtype[Any]) -> None:
    """Raise InvalidOperands unless the bias has the dtype of the result; with 8-bit factors it is
    float16 with a float16 result, else bfloat16.
    """
    if not is_float8(factors):
        bias.expect_dtype(result, "that of the result")
    elif result != np.float16:
        bias.expect_dtype(DTYPES["bfloat16"], f"with {factors.name} and a {result.name} result")
    else:
        bias.expect_dtype(result, f"with {factors.name} and a {result.name} result")
