"""The activations and their derivatives, in the type of their argument. Infinities may give NaN, as
``-∞ · 0`` does.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from .epilogs import Activation
from .protocol import Array

Function = Callable[[Array], Array]

NEGATIVE_SLOPE = 0.01
"""Of leaky ReLU, as is PyTorch's default."""
_GELU_SCALE = math.sqrt(2.0 / math.pi)
_GELU_CUBIC = 0.044715


def relu(z: Array) -> Array:
    """max(z, 0); NaN passes."""
    return np.maximum(z, z.dtype.type(0))


def gelu(z: Array) -> Array:
    """GELU in the tanh form, ``z/2 · (1 + tanh(√(2/π) · (z + 0.044715 z³)))`` (Hendrycks & Gimpel
    2016).
    """
    return 0.5 * z * (1.0 + np.tanh(_GELU_SCALE * (z + _GELU_CUBIC * z * z * z)))


def gelu_derivative(z: Array) -> Array:
    t = np.tanh(_GELU_SCALE * (z + _GELU_CUBIC * z * z * z))
    inner = _GELU_SCALE * (1.0 + 3.0 * _GELU_CUBIC * z * z)
    return 0.5 * (1.0 + t) + 0.5 * z * (1.0 - t * t) * inner


def gelu_erf(z: Array) -> Array:
    """GELU as it is defined, ``z · Φ(z)`` with ``Φ(z) = erfc(-z/√2) / 2``."""
    return 0.5 * z * erfc(-math.sqrt(0.5) * z)


def gelu_erf_derivative(z: Array) -> Array:
    density = np.exp(-0.5 * z * z) * (1.0 / math.sqrt(2.0 * math.pi))
    return 0.5 * erfc(-math.sqrt(0.5) * z) + z * density


def silu(z: Array) -> Array:
    """z times the logistic function of z (Elfwing, Uchibe & Doya 2018)."""
    return z / (1.0 + np.exp(-z))


def silu_derivative(z: Array) -> Array:
    sigmoid = 1.0 / (1.0 + np.exp(-z))
    return sigmoid * (1.0 + z * (1.0 - sigmoid))


def leaky_relu(z: Array) -> Array:
    """z where it is above 0, else 0.01 z."""
    return np.where(z > 0, z, z.dtype.type(NEGATIVE_SLOPE) * z)


def leaky_relu_derivative(z: Array) -> Array:
    """0.01 at 0, as in PyTorch."""
    return np.where(z > 0, z.dtype.type(1), z.dtype.type(NEGATIVE_SLOPE))


FUNCTIONS: dict[Activation, Function] = {
    "relu": relu,
    "gelu": gelu,
    "gelu_erf": gelu_erf,
    "silu": silu,
    "leaky_relu": leaky_relu,
}
DERIVATIVES: dict[Activation, Function] = {
    "gelu": gelu_derivative,
    "gelu_erf": gelu_erf_derivative,
    "silu": silu_derivative,
    "leaky_relu": leaky_relu_derivative,
}
"""Of those that are taken from the pre-activation."""


_NEAR, _FAR = 0.46875, 4.0
_A = (1.85777706184603153e-1, 3.16112374387056560, 1.13864154151050156e2,
      3.77485237685302021e2, 3.20937758913846947e3)  # fmt: skip
_B = (1.0, 2.36012909523441209e1, 2.44024637934444173e2, 1.28261652607737228e3,
      2.84423683343917062e3)  # fmt: skip
_C = (2.15311535474403846e-8, 5.64188496988670089e-1, 8.88314979438837594,
      6.61191906371416295e1, 2.98635138197400131e2, 8.81952221241769090e2,
      1.71204761263407058e3, 2.05107837782607147e3, 1.23033935479799725e3)  # fmt: skip
_D = (1.0, 1.57449261107098347e1, 1.17693950891312499e2, 5.37181101862009858e2,
      1.62138957456669019e3, 3.29079923573345963e3, 4.36261909014324716e3,
      3.43936767414372164e3, 1.23033935480374942e3)  # fmt: skip
_P = (1.63153871373020978e-2, 3.05326634961232344e-1, 3.60344899949804439e-1,
      1.25781726111229246e-1, 1.60837851487422766e-2, 6.58749161529837803e-4)  # fmt: skip
_Q = (1.0, 2.56852019228982242, 1.87295284992346725, 5.27905102951428412e-1,
      6.05183413124413191e-2, 2.33520497626869185e-3)  # fmt: skip


def erfc(x: Array) -> Array:
    """1 - erf(x) by the rational approximations of W. J. Cody, "Rational Chebyshev approximations
    for the error function", Math. Comp. 23 (1969), in the form of his CALERF.
    """
    y = np.abs(x)
    result = np.empty_like(x)
    near, far = y <= _NEAR, y > _FAR
    middle = ~(near | far)
    result[near] = 1 - _erf_near(x[near])
    result[middle] = _erfc_middle(y[middle])
    result[far] = _erfc_far(y[far])
    outside = ~near & (x < 0)
    result[outside] = 2 - result[outside]
    return result


def _erf_near(x: Array) -> Array:
    square = x * x
    return x * _ratio(_A, _B, square)


def _erfc_middle(y: Array) -> Array:
    return _ratio(_C, _D, y) * _exp_of_minus_square(y)


def _erfc_far(y: Array) -> Array:
    y = np.minimum(y, 30)
    square = 1 / (y * y)
    tail = (1.0 / math.sqrt(math.pi) - square * _ratio(_P, _Q, square)) / y
    return tail * _exp_of_minus_square(y)


def _ratio(above: tuple[float, ...], below: tuple[float, ...], x: Array) -> Array:
    """The quotient of two polynomials, their highest coefficients first."""
    numerator = np.full_like(x, above[0])
    for coefficient in above[1:]:
        numerator *= x
        numerator += coefficient
    denominator = np.full_like(x, below[0])
    for coefficient in below[1:]:
        denominator *= x
        denominator += coefficient
    numerator /= denominator
    return numerator


def _exp_of_minus_square(y: Array) -> Array:
    """exp(-y²); y² is split, as rounding it whole would cost y² roundings of the result."""
    coarse = np.trunc(y * 16) / 16
    return np.exp(-coarse * coarse) * np.exp(-(y - coarse) * (y + coarse))
