"""What a product should give: unfused, in float64, and how far off a right result may be.

Nothing here comes from the service: it is what the service is checked against.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
F64 = NDArray[np.float64]
Activation = Literal["none", "relu", "gelu", "gelu_erf", "silu", "leaky_relu"]


class Precision(NamedTuple):
    """Unit roundoffs of a dtype's accumulator and result, and the spacing of its subnormals."""

    accumulator: float
    result: float
    subnormal: float


PRECISIONS = {
    # Summed in float64. The reference rounds as often, hence twice float64's roundoff.
    "float64": Precision(2**-52, 2**-53, 2**-1074),
    # Summed in float32. TF32, at 2**-11, would not pass.
    "float32": Precision(2**-24, 2**-24, 2**-149),
    # Products of two 11-bit significands are exact in float32; the sum is rounded once.
    "float16": Precision(2**-24, 2**-11, 2**-24),
    # The same with 8-bit significands.
    "bfloat16": Precision(2**-24, 2**-8, 2**-133),
}
SUM = 2.0
"""Times √K·u·Σ|terms|, which bounds the error of a sum of K terms whose roundings are independent
(Higham & Mary 2019); the worst case has K for √K."""
LARGEST_SLOPE = 1.13
"""That of GELU: by how much an activation can magnify the error of its argument."""
LARGEST_CURVATURE = 0.8
"""That of GELU, at 0: by how much an activation's slope can magnify it."""
EVALUATION = {"float64": 16.0, "float32": 128.0, "float16": 128.0, "bfloat16": 128.0}
"""Roundoffs of the accumulator, relative to 1 + |z|, for tanh or erfc and what is around it, where
terms may cancel. The tanh that cuBLASLt fuses is an approximation: GELU is off by up to 5.1e-6 and
its slope by 7e-6 on an H200. float64 is not left to it."""


@dataclass(frozen=True)
class Expected:
    """A result in float64, and how far off each of its elements may be."""

    value: F64
    tolerance: F64

    def reshape(self, *shape: int) -> Expected:
        return Expected(self.value.reshape(shape), self.tolerance.reshape(shape))

    @property
    def T(self) -> Expected:
        return Expected(self.value.T, self.tolerance.T)


Outcomes = dict[str, tuple[Array, Expected]]
"""Outputs by their names, each with what it should be."""


class Comparison(NamedTuple):
    """How far a result is off, as a part of what is allowed, and that in words."""

    ratio: float
    detail: str


def compare(actual: Array, expected: Expected, dtype: str) -> Comparison:
    """The element that is off by most; what is not as it should be at all is off by infinity."""
    shape = expected.value.shape
    if actual.shape != shape or actual.dtype.name not in (dtype, "uint8"):
        detail = f"expected {dtype}{list(shape)}, got {actual.dtype}{list(actual.shape)}"
        return Comparison(math.inf, detail)
    error = np.abs(actual.astype(np.float64) - expected.value)
    error[~np.isfinite(error)] = math.inf
    ratios = error / expected.tolerance
    worst = np.unravel_index(np.argmax(ratios), shape)
    detail = f"off by {error[worst]:.3g}, {expected.tolerance[worst]:.3g} allowed"
    return Comparison(float(ratios[worst]), detail)


class Oracle:
    """Expected results of one dtype; not rounded to it but by `rounded`."""

    def __init__(self, dtype: str) -> None:
        self._precision = PRECISIONS[dtype]
        self._evaluation = EVALUATION[dtype]
        self._staging = self._precision.result if dtype in ("float16", "bfloat16") else 0.0
        """cuBLASLt rounds a 16-bit product before its epilog adds to it or multiplies it."""

    def product(self, a: Expected, b: Array) -> Expected:
        magnitude = f64(b)
        value = a.value @ magnitude
        np.abs(magnitude, out=magnitude)
        error = a.tolerance + self._sum_error(np.abs(a.value), a.value.shape[-1])
        return Expected(value, error @ magnitude)

    def scaled(self, z: Expected, factor: float) -> Expected:
        value = factor * z.value
        rounding = self._precision.accumulator * np.abs(value)
        return Expected(value, abs(factor) * z.tolerance + rounding)

    def plus(self, z: Expected, term: F64) -> Expected:
        value = z.value + term
        rounding = self._precision.accumulator * (np.abs(term) + np.abs(value))
        return Expected(value, z.tolerance + rounding + self._staging * np.abs(z.value))

    def rounded(self, z: Expected) -> Expected:
        """Once, to the dtype of the result; what is rounded is off already."""
        largest = np.abs(z.value) + z.tolerance
        rounding = self._precision.result * largest + self._precision.subnormal
        return Expected(z.value, z.tolerance + rounding)

    def activated(self, activation: Activation, z: Expected) -> Expected:
        """The activation of z, which may have been rounded for the sake of an aux."""
        if activation == "none":
            return z
        if activation == "relu":
            return Expected(np.maximum(z.value, 0.0), z.tolerance)
        z = self.rounded(z)
        error = LARGEST_SLOPE * z.tolerance + self._evaluation_error(z.value)
        return Expected(FUNCTIONS[activation](z.value), error)

    def times_slope(self, activation: Activation, gradient: Expected, aux: Array) -> Expected:
        """A gradient times an activation's slope at `aux`, or that of ReLU where `aux` is true."""
        if activation == "none":
            return gradient
        aux = f64(aux)
        slope = aux if activation == "relu" else SLOPES[activation](aux)
        tolerance = gradient.tolerance * np.abs(slope)
        if activation != "relu":
            staging = self._staging * np.abs(slope) + self._evaluation_error(aux)
            tolerance = tolerance + staging * np.abs(gradient.value)
        return Expected(gradient.value * slope, tolerance)

    def times_slope_at(self, activation: Activation, gradient: Expected, z: Expected) -> Expected:
        """A gradient times an activation's slope at a pre-activation that is uncertain itself."""
        if activation == "none":
            return gradient
        z = self.rounded(z)
        at = z.value > 0 if activation == "relu" else z.value
        known = self.times_slope(activation, gradient, at)
        if activation in ("relu", "leaky_relu"):
            doubt = np.where(np.abs(z.value) <= z.tolerance, 1.0, 0.0)
        else:
            doubt = LARGEST_CURVATURE * z.tolerance
        largest = np.abs(gradient.value) + gradient.tolerance
        return Expected(known.value, known.tolerance + doubt * largest)

    def summed(self, terms: Expected, axis: int) -> Expected:
        """Sums along `axis`. The errors of few terms add up; those of many, being independent, grow
        as the root of their squares, of which four times are allowed."""
        together = terms.tolerance.sum(axis)
        independent = 4.0 * np.sqrt(np.square(terms.tolerance).sum(axis))
        error = self._sum_error(np.abs(terms.value).sum(axis), terms.value.shape[axis])
        return Expected(terms.value.sum(axis), np.minimum(together, independent) + error)

    def _sum_error(self, magnitude: F64, count: int) -> F64:
        return np.asarray(SUM * math.sqrt(count) * self._precision.accumulator * magnitude)

    def _evaluation_error(self, z: F64) -> F64:
        relative = self._evaluation * self._precision.accumulator
        return np.asarray(relative * (1.0 + np.abs(z)))


def exact(values: Array) -> Expected:
    """Numbers as they were given."""
    return Expected(f64(values), np.zeros(values.shape))


def positive(z: Expected) -> Expected:
    """Where a pre-activation is above zero; where that is uncertain, anything goes."""
    uncertain = np.abs(z.value) <= z.tolerance
    return Expected(f64(z.value > 0), np.where(uncertain, np.inf, 0.5))


def f64(array: Array) -> F64:
    return np.asarray(array).astype(np.float64)


def gelu(z: F64) -> F64:
    """``z · sigmoid(2u)``, which is the tanh form ``z/2 · (1 + tanh u)``."""
    return z * _sigmoid(2.0 * _inner(z))


def gelu_slope(z: F64) -> F64:
    """By the product rule on ``z · sigmoid(2u)``."""
    sigma = _sigmoid(2.0 * _inner(z))
    inner_slope = math.sqrt(2.0 / math.pi) * (1.0 + 3.0 * 0.044715 * np.square(z))
    return np.asarray(sigma + z * sigma * (1.0 - sigma) * 2.0 * inner_slope)


def gelu_erf(z: F64) -> F64:
    return z * _normal(z)


def gelu_erf_slope(z: F64) -> F64:
    return np.asarray(_normal(z) + z * np.exp(-0.5 * np.square(z)) / math.sqrt(2.0 * math.pi))


def silu(z: F64) -> F64:
    return z * _sigmoid(z)


def silu_slope(z: F64) -> F64:
    """By the product rule on ``z · sigmoid(z)``."""
    sigma = _sigmoid(z)
    return sigma + z * sigma * _sigmoid(-z)


def leaky_relu(z: F64) -> F64:
    return np.maximum(z, 0.01 * z)


def leaky_relu_slope(z: F64) -> F64:
    return np.where(z > 0.0, 1.0, 0.01)


FUNCTIONS = {
    "gelu": gelu,
    "gelu_erf": gelu_erf,
    "silu": silu,
    "leaky_relu": leaky_relu,
}
SLOPES = {
    "gelu": gelu_slope,
    "gelu_erf": gelu_erf_slope,
    "silu": silu_slope,
    "leaky_relu": leaky_relu_slope,
}


def _normal(z: F64) -> F64:
    """The distribution function of the standard normal."""
    scaled = np.ravel(z) * -math.sqrt(0.5)
    values = np.fromiter(map(math.erfc, scaled), np.float64, scaled.size)
    return np.asarray(0.5 * values.reshape(z.shape))


def _inner(z: F64) -> F64:
    return np.asarray(math.sqrt(2.0 / math.pi) * (z + 0.044715 * z**3))


def _sigmoid(x: F64) -> F64:
    return np.asarray(1.0 / (1.0 + np.exp(-np.clip(x, -700.0, 700.0))))


def padded_rows(kind: str, m: int) -> int:
    """Rows of cuBLASLt's aux matrices: 16 bytes of bits, or 8 elements, at a time."""
    return math.ceil(m / 128) * 16 if kind == "relu_aux" else math.ceil(m / 8) * 8


def pack(mask: Array) -> Array:
    """A column-major relu_aux (…, R, N) of a mask (…, M, N); the bits beyond M are 1."""
    *batch, m, n = mask.shape
    rows = padded_rows("relu_aux", m)
    bits = np.ones((*batch, n, rows * 8), np.uint8)
    bits[..., :m] = mask.swapaxes(-1, -2)
    weights = 1 << np.arange(8, dtype=np.uint8)
    packed = bits.reshape(*batch, n, rows, 8) @ weights
    return np.asarray(packed.swapaxes(-1, -2))


def unpack(aux: Array, m: int) -> Array:
    """The mask (…, M, N) of a relu_aux."""
    rows = np.arange(m)
    shifts = (rows % 8).astype(np.uint8).reshape(m, 1)
    return np.asarray(aux[..., rows // 8, :] >> shifts & 1)
