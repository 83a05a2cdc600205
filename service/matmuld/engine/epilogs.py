"""The epilogs as a table: what each reads besides A and B, and what it writes besides D."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal, NamedTuple, get_args

Activation = Literal["none", "relu", "gelu", "gelu_erf", "silu", "leaky_relu"]
AuxKind = Literal["relu_aux", "gelu_aux", "gelu_erf_aux", "silu_aux", "leaky_relu_aux"]
"""The name says whose: a bit mask of ReLU, of the others the pre-activation."""

ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)
AUX_KINDS: tuple[AuxKind, ...] = get_args(AuxKind)
ACTIVATION_OF: dict[AuxKind, Activation] = dict(zip(AUX_KINDS, ACTIVATIONS[1:], strict=True))
AUX_OF: dict[Activation, AuxKind] = {name: kind for kind, name in ACTIVATION_OF.items()}


class Epilog(StrEnum):
    """By the names of `nvmath.linalg.advanced.MatmulEpilog`, and in their manner for the
    activations that cuBLASLt lacks; NONE is the plain product.
    """

    NONE = "NONE"
    RELU = "RELU"
    GELU = "GELU"
    BIAS = "BIAS"
    RELU_BIAS = "RELU_BIAS"
    GELU_BIAS = "GELU_BIAS"
    RELU_AUX = "RELU_AUX"
    RELU_AUX_BIAS = "RELU_AUX_BIAS"
    GELU_AUX = "GELU_AUX"
    GELU_AUX_BIAS = "GELU_AUX_BIAS"
    DRELU = "DRELU"
    DRELU_BGRAD = "DRELU_BGRAD"
    DGELU = "DGELU"
    DGELU_BGRAD = "DGELU_BGRAD"
    BGRADA = "BGRADA"
    BGRADB = "BGRADB"
    GELU_ERF = "GELU_ERF"
    GELU_ERF_BIAS = "GELU_ERF_BIAS"
    GELU_ERF_AUX = "GELU_ERF_AUX"
    GELU_ERF_AUX_BIAS = "GELU_ERF_AUX_BIAS"
    DGELU_ERF = "DGELU_ERF"
    DGELU_ERF_BGRAD = "DGELU_ERF_BGRAD"
    SILU = "SILU"
    SILU_BIAS = "SILU_BIAS"
    SILU_AUX = "SILU_AUX"
    SILU_AUX_BIAS = "SILU_AUX_BIAS"
    DSILU = "DSILU"
    DSILU_BGRAD = "DSILU_BGRAD"
    LEAKY_RELU = "LEAKY_RELU"
    LEAKY_RELU_BIAS = "LEAKY_RELU_BIAS"
    LEAKY_RELU_AUX = "LEAKY_RELU_AUX"
    LEAKY_RELU_AUX_BIAS = "LEAKY_RELU_AUX_BIAS"
    DLEAKY_RELU = "DLEAKY_RELU"
    DLEAKY_RELU_BGRAD = "DLEAKY_RELU_BGRAD"


class Row(NamedTuple):
    """One epilog.

    `gradient` is the operand that the bias gradient sums: D (over N), A (over K) or B (over K). No
    epilog has both a bias and a bias gradient: cuBLASLt keeps them in one descriptor slot, and so
    do we (`Operands.vector`).
    """

    activation: Activation = "none"
    bias: bool = False
    aux_out: AuxKind | None = None
    aux_in: AuxKind | None = None
    gradient: Literal["d", "a", "b"] | None = None

    @property
    def column_major(self) -> bool:
        """Whether D must be column-major: everything but a bare activation."""
        return self.bias or self.aux is not None or self.gradient is not None

    @property
    def aux(self) -> AuxKind | None:
        return self.aux_out or self.aux_in


TABLE: dict[Epilog, Row] = {
    Epilog.NONE: Row(),
    Epilog.RELU: Row("relu"),
    Epilog.GELU: Row("gelu"),
    Epilog.BIAS: Row(bias=True),
    Epilog.RELU_BIAS: Row("relu", bias=True),
    Epilog.GELU_BIAS: Row("gelu", bias=True),
    Epilog.RELU_AUX: Row("relu", aux_out="relu_aux"),
    Epilog.RELU_AUX_BIAS: Row("relu", bias=True, aux_out="relu_aux"),
    Epilog.GELU_AUX: Row("gelu", aux_out="gelu_aux"),
    Epilog.GELU_AUX_BIAS: Row("gelu", bias=True, aux_out="gelu_aux"),
    Epilog.DRELU: Row(aux_in="relu_aux"),
    Epilog.DRELU_BGRAD: Row(aux_in="relu_aux", gradient="d"),
    Epilog.DGELU: Row(aux_in="gelu_aux"),
    Epilog.DGELU_BGRAD: Row(aux_in="gelu_aux", gradient="d"),
    Epilog.BGRADA: Row(gradient="a"),
    Epilog.BGRADB: Row(gradient="b"),
    Epilog.GELU_ERF: Row("gelu_erf"),
    Epilog.GELU_ERF_BIAS: Row("gelu_erf", bias=True),
    Epilog.GELU_ERF_AUX: Row("gelu_erf", aux_out="gelu_erf_aux"),
    Epilog.GELU_ERF_AUX_BIAS: Row("gelu_erf", bias=True, aux_out="gelu_erf_aux"),
    Epilog.DGELU_ERF: Row(aux_in="gelu_erf_aux"),
    Epilog.DGELU_ERF_BGRAD: Row(aux_in="gelu_erf_aux", gradient="d"),
    Epilog.SILU: Row("silu"),
    Epilog.SILU_BIAS: Row("silu", bias=True),
    Epilog.SILU_AUX: Row("silu", aux_out="silu_aux"),
    Epilog.SILU_AUX_BIAS: Row("silu", bias=True, aux_out="silu_aux"),
    Epilog.DSILU: Row(aux_in="silu_aux"),
    Epilog.DSILU_BGRAD: Row(aux_in="silu_aux", gradient="d"),
    Epilog.LEAKY_RELU: Row("leaky_relu"),
    Epilog.LEAKY_RELU_BIAS: Row("leaky_relu", bias=True),
    Epilog.LEAKY_RELU_AUX: Row("leaky_relu", aux_out="leaky_relu_aux"),
    Epilog.LEAKY_RELU_AUX_BIAS: Row("leaky_relu", bias=True, aux_out="leaky_relu_aux"),
    Epilog.DLEAKY_RELU: Row(aux_in="leaky_relu_aux"),
    Epilog.DLEAKY_RELU_BGRAD: Row(aux_in="leaky_relu_aux", gradient="d"),
}

CUBLASLT = tuple(
    epilog
    for epilog, row in TABLE.items()
    if row.activation in ("none", "relu", "gelu") and row.aux in (None, "relu_aux", "gelu_aux")
)
"""The epilogs that cuBLASLt has."""

_FORWARD = {
    (row.activation, row.bias, row.aux_out is not None): epilog
    for epilog, row in TABLE.items()
    if row.aux_in is None and row.gradient is None
}
_BACKWARD = {
    (row.aux_in, row.gradient is not None): epilog
    for epilog, row in TABLE.items()
    if row.aux_in is not None
}


def forward(activation: Activation, *, bias: bool, aux: bool) -> Epilog:
    """The epilog of a layer's forward pass."""
    return _FORWARD[activation, bias, aux]


def backward(aux: AuxKind, *, gradient: bool) -> Epilog:
    """The epilog that masks a gradient by the aux of the layer below, and sums it if `gradient`."""
    return _BACKWARD[aux, gradient]


def aux_rows(kind: AuxKind, m: int) -> int:
    """Rows of an aux matrix for D of `m` rows: cuBLASLt pads a bit mask to 16 bytes, pre-
    activations to 8 elements.
    """
    if kind == "relu_aux":
        return -(-m // 128) * 16
    return -(-m // 8) * 8


def output_names(epilog: Epilog) -> tuple[str, ...]:
    """What the epilog writes besides D, by the library's names."""
    row = TABLE[epilog]
    if row.gradient == "d":
        return (epilog.value.lower(),)
    if row.gradient is not None:
        return (f"bgrad{row.gradient}",)
    return (row.aux_out,) if row.aux_out else ()
