"""The words of the operations: operands, placements, options, results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, TypedDict

import numpy as np

from ._payloads import Array
from .tensors import RemoteTensor
from .views import TensorView


@dataclass(frozen=True, eq=False)
class StepResult:
    """A result that a step of a `Program` will have: an operand of its later steps, and what
    `Program.run` can return.

    Attributes:
        step: the name of the step.
        output: what the step calls it.
        shape: its dimensions, where they are known before the service is asked.
        dtype: likewise.
    """

    program: object = field(repr=False)
    step: str
    output: str
    shape: tuple[int, ...] | None = None
    dtype: np.dtype[Any] | None = None


Operand: TypeAlias = Array | RemoteTensor | TensorView | StepResult
"""A NumPy array, which is sent, or what the service holds already; in a program also the result of
an earlier step.
"""

Float8: TypeAlias = Literal["float8_e4m3fn", "float8_e5m2"]
Scale: TypeAlias = float | Operand
"""Of an 8-bit operand: a number, or a float32 tensor of shape () or (1,)."""
LinearScales: TypeAlias = Mapping[Literal["x", "weight"], Scale]
InputScales: TypeAlias = Mapping[Literal["x"], Scale]
WeightScales: TypeAlias = Mapping[Literal["weight"], Scale]
MatmulScales: TypeAlias = Mapping[Literal["a", "b"], Scale]

Activation: TypeAlias = Literal["none", "relu", "gelu", "gelu_erf", "silu", "leaky_relu"]
"""`gelu` is the tanh form, `gelu_erf` the exact one; the slope of `leaky_relu` below 0 is 0.01."""
AuxKind: TypeAlias = Literal[
    "relu_aux", "gelu_aux", "gelu_erf_aux", "silu_aux", "leaky_relu_aux"
]  # fmt: skip
Gradient: TypeAlias = Literal["dx", "dweight", "dbias"]
Priority: TypeAlias = Literal["interactive", "batch"]
"""What waits as `batch` lets `interactive` work go first, for about a second."""
Place: TypeAlias = Literal["array", "tensor"]
"""Of a result: returned as a NumPy array, or left in the service as a new RemoteTensor."""

PlainEpilog: TypeAlias = Literal[
    "RELU", "GELU", "BIAS", "RELU_BIAS", "GELU_BIAS", "DRELU", "DGELU"
]  # fmt: skip
AuxEpilog: TypeAlias = Literal[
    "RELU_AUX",
    "RELU_AUX_BIAS",
    "GELU_AUX",
    "GELU_AUX_BIAS",
    "DRELU_BGRAD",
    "DGELU_BGRAD",
    "BGRADA",
    "BGRADB",
]
ComputeType: TypeAlias = Literal[
    "COMPUTE_16F",
    "COMPUTE_16F_PEDANTIC",
    "COMPUTE_32F",
    "COMPUTE_32F_PEDANTIC",
    "COMPUTE_32F_FAST_16F",
    "COMPUTE_32F_FAST_16BF",
    "COMPUTE_32F_FAST_TF32",
    "COMPUTE_64F",
    "COMPUTE_64F_PEDANTIC",
]


class Options(TypedDict, total=False):
    """How a product is computed; each is the planner's default if left out.

    Keys:
        compute_type: of cuBLASLt; "COMPUTE_32F_FAST_TF32" uses TF32 for float32 operands.
        result_type: "float32" for float16 and bfloat16 operands: the dtype of result and bias.
            "bfloat16" (default), "float16" or "float32" for 8-bit ones, whose bias is float16 with
            a float16 result, else bfloat16.
        fast_accumulation: trade accuracy for speed with 8-bit operands, where the device can.
        sm_count_target: multiprocessors to plan for.
        reduction_scheme_mask: of cuBLASLt; 0 gives reproducible sums.
        numerical_impl_mask: of cuBLASLt.
        deterministic: the same bits every time.
    """

    compute_type: ComputeType
    result_type: str
    fast_accumulation: bool
    sm_count_target: int
    reduction_scheme_mask: int
    numerical_impl_mask: int
    deterministic: bool


@dataclass(frozen=True)
class Accumulate:
    """Placement of a gradient: the tensor becomes ``alpha * gradient + beta * tensor``.

    On a gradient's tensor the defaults accumulate. On a weight, ``alpha=-lr`` is a step of SGD.

    Attributes:
        tensor: of the gradient's shape and dtype.
        alpha: factor of the gradient.
        beta: factor of what the tensor held.
    """

    tensor: RemoteTensor
    alpha: float = 1.0
    beta: float = 1.0


Placement: TypeAlias = Place | RemoteTensor | Accumulate
"""Where a result goes: see `Place`; into a tensor, whose contents it replaces; or accumulated."""


@dataclass(frozen=True)
class Layer:
    """A layer of `Client.mlp`: ``activation(x @ weight.T + bias)``.

    Attributes:
        weight: (out, in).
        bias: (out,).
        activation: "none", "relu", "gelu" (its tanh form), "gelu_erf", "silu" or "leaky_relu".
        scales: of an 8-bit weight that was not quantized by the service.
    """

    weight: Operand
    bias: Operand | None = None
    activation: Activation = "none"
    scales: WeightScales | None = None


@dataclass(frozen=True)
class LinearGradients:
    """Gradients of a linear layer; None if it was not asked for.

    Attributes:
        dx: by the input, (..., batch, in).
        dweight: by the weight, (out, in).
        dbias: by the bias, (out,).
        input_dbias: by the bias of the layer that produced the input, (in,).
    """

    dx: Array | RemoteTensor | None = None
    dweight: Array | RemoteTensor | None = None
    dbias: Array | RemoteTensor | None = None
    input_dbias: Array | RemoteTensor | None = None


@dataclass(frozen=True)
class MLPGradients:
    """Gradients of a stack of layers.

    Attributes:
        dx: by the input, (..., batch, in); None if it was not asked for.
        layers: dweight and dbias of each layer, the first layer first.
    """

    dx: Array | RemoteTensor | None
    layers: tuple[LinearGradients, ...]


@dataclass(frozen=True)
class StepGradients:
    """The gradients that a step of a program will have, as in `LinearGradients`."""

    dx: StepResult | None = None
    dweight: StepResult | None = None
    dbias: StepResult | None = None
    input_dbias: StepResult | None = None


@dataclass(frozen=True)
class StepMLPGradients:
    """The gradients that a step of a program will have, as in `MLPGradients`."""

    dx: StepResult | None
    layers: tuple[StepGradients, ...]


def wanted(
    wants: Iterable[Gradient] | None, weight: Operand | None, x: Operand | None
) -> list[Gradient]:
    """The gradients of a backward pass: those asked for, or all that its operands allow."""
    if wants is not None:
        return list(wants)
    possible: dict[Gradient, bool] = {
        "dx": weight is not None,
        "dweight": x is not None,
        "dbias": True,
    }
    return [name for name, given in possible.items() if given]
