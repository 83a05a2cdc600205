"""The planner's options of a request, checked against the operands' dtype."""

from __future__ import annotations

from typing import Any

import numpy as np
from matmuld_client.errors import InvalidOperands
from matmuld_client.wire import DTYPE_NAMES, DTYPES

from .. import schemas
from ..engine.signature import Options
from ..operands import Inputs

COMPUTE_TYPES: dict[str, tuple[str, ...]] = {
    "float64": ("COMPUTE_64F", "COMPUTE_64F_PEDANTIC"),
    "float32": (
        "COMPUTE_32F",
        "COMPUTE_32F_PEDANTIC",
        "COMPUTE_32F_FAST_16F",
        "COMPUTE_32F_FAST_16BF",
        "COMPUTE_32F_FAST_TF32",
    ),
    "float16": ("COMPUTE_32F", "COMPUTE_32F_PEDANTIC", "COMPUTE_16F", "COMPUTE_16F_PEDANTIC"),
    "bfloat16": ("COMPUTE_32F", "COMPUTE_32F_PEDANTIC"),
    "float8_e4m3fn": ("COMPUTE_32F",),
    "float8_e5m2": ("COMPUTE_32F",),
}
"""Compute types by the operands' dtype, the default first (cuBLAS documentation, cublasLtMatmul
type tables).
"""
RESULT_TYPES: dict[str, tuple[str, ...]] = {
    "float16": ("float16", "float32"),
    "bfloat16": ("bfloat16", "float32"),
    "float8_e4m3fn": ("bfloat16", "float16", "float32"),
    "float8_e5m2": ("bfloat16", "float16", "float32"),
}
"""Result types where not only the operands' own is possible, the default first."""


def planner_options(
    inputs: Inputs, given: schemas.Options, dtype: np.dtype[Any]
) -> tuple[Options, np.dtype[Any]]:
    """The planner's options and the result's dtype for operands of `dtype`.

    Raises:
        InvalidOperands: the compute or result type does not go with the dtype.
    """
    name = DTYPE_NAMES[dtype]
    compute_types = COMPUTE_TYPES[name]
    compute_type = given.compute_type or compute_types[0]
    if compute_type not in compute_types:
        raise InvalidOperands(
            f"options.compute_type: expected {' or '.join(compute_types)} for {name} operands, "
            f"got {compute_type[:40]!r}",
            operand="options.compute_type",
        )
    allowed = RESULT_TYPES.get(name, (name,))
    result = given.result_type or allowed[0]
    if result not in allowed or (result != name and compute_type.startswith("COMPUTE_16F")):
        raise InvalidOperands(
            f"options.result_type: expected {' or '.join(allowed)} for {name} operands "
            f"and {compute_type}, got {result[:40]!r}",
            operand="options.result_type",
        )
    chosen = Options(
        compute_type,
        given.fast_accumulation,
        given.sm_count_target,
        given.reduction_scheme_mask,
        given.numerical_impl_mask,
        given.deterministic or inputs.deterministic,
    )
    return chosen, DTYPES[result]
