"""An independent reference: unfused products in float64, and cuBLASLt's aux layouts written out."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

F64 = np.ndarray[Any, np.dtype[np.float64]]
Host = np.ndarray[Any, Any]

DTYPES: dict[str, np.dtype[Any]] = {
    "float64": np.dtype(np.float64),
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}

FLOAT8: dict[str, np.dtype[Any]] = {
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
}

TOLERANCE = {
    # Half an ulp of the result, and the sum of K terms in the accumulator, relative to |A|·|B|.
    "float64": 1e-13,
    "float32": 3e-6,
    "float16": 2e-3,
    "bfloat16": 1.6e-2,
    # Of 8-bit products by their results. Hopper's tensor cores align the products of a step to the
    # largest and cut off what is below about 13 bits: 2.4e-4 was seen (H200, K = 128).
    "float8 float32": 2.0**-10,
    "float8 float16": 2e-3,
    "float8 bfloat16": 1.6e-2,
}


def random(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Host:
    """Normal numbers, rounded to `dtype`."""
    return rng.standard_normal(shape).astype(DTYPES[dtype])


def f64(array: Host) -> F64:
    return np.asarray(array).astype(np.float64)


def gelu(z: F64) -> F64:
    return np.asarray(0.5 * z * (1 + np.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))))


def gelu_prime(z: F64) -> F64:
    """The derivative by the complex step Im f(z + ih) / h, which has no cancellation."""
    step = 1e-30
    w = z + 1j * step
    value = 0.5 * w * (1 + np.tanh(math.sqrt(2 / math.pi) * (w + 0.044715 * w**3)))
    return np.asarray(value.imag / step)


def relu(z: F64) -> F64:
    return np.where(z > 0, z, 0.0)


def normal_cdf(z: F64) -> F64:
    return np.asarray(np.vectorize(lambda v: math.erfc(-v / math.sqrt(2)) / 2, [float])(z))


def normal_pdf(z: F64) -> F64:
    return np.asarray(np.exp(-z * z / 2) / math.sqrt(2 * math.pi))


def logistic(z: F64) -> F64:
    return np.asarray(0.5 + 0.5 * np.tanh(z / 2))


FUNCTIONS: dict[str, Callable[[F64], F64]] = {
    "none": lambda z: z,
    "relu": relu,
    "gelu": gelu,
    "gelu_erf": lambda z: z * normal_cdf(z),
    "silu": lambda z: z * logistic(z),
    "leaky_relu": lambda z: np.where(z > 0, z, 0.01 * z),
}
DERIVATIVES: dict[str, Callable[[F64], F64]] = {
    "none": np.ones_like,
    "relu": lambda z: (z > 0).astype(np.float64),
    "gelu": gelu_prime,
    "gelu_erf": lambda z: normal_cdf(z) + z * normal_pdf(z),
    "silu": lambda z: logistic(z) + z * logistic(z) * logistic(-z),
    "leaky_relu": lambda z: np.where(z > 0, 1.0, 0.01),
}
ACTIVATIONS = tuple(FUNCTIONS)[1:]


def activate(name: str, z: F64) -> F64:
    return FUNCTIONS[name](z)


def activation_prime(name: str, z: F64) -> F64:
    return DERIVATIVES[name](z)


def padded_rows(kind: str, m: int) -> int:
    """Rows of an aux matrix: bits padded to 128, elements to 8."""
    return math.ceil(m / 128) * 16 if kind == "relu_aux" else math.ceil(m / 8) * 8


def unpack_mask(aux: Host, m: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Bits (…, m, N) of a relu_aux (…, R, N), one at a time: bit i % 8 of byte i // 8."""
    rows = np.arange(m)
    picked = np.take(np.asarray(aux), rows // 8, axis=-2)
    return np.asarray((picked >> (rows % 8).astype(np.uint8)[:, None]) & 1 == 1)


def pack_mask(mask: np.ndarray[Any, np.dtype[np.bool_]]) -> Host:
    """A relu_aux (…, R, N), column-major, of a mask (…, m, N)."""
    *lead, m, n = mask.shape
    padded = padded_rows("relu_aux", m)
    aux = np.zeros((*lead, n, padded), np.uint8)
    for i in range(m):
        aux[..., :, i // 8] |= mask[..., i, :].astype(np.uint8) << (i % 8)
    return aux.swapaxes(-1, -2)


def pre_activation_aux(z: Host) -> Host:
    """A gelu_aux or the like (…, R, N), column-major, of pre-activations (…, m, N)."""
    *lead, m, n = z.shape
    aux = np.zeros((*lead, n, padded_rows("gelu_aux", m)), z.dtype)
    aux[..., :m] = z.swapaxes(-1, -2)
    return aux.swapaxes(-1, -2)


def assert_close(
    got: Host, expected: F64, scale: F64 | float, dtype: str, *, approximate: bool = False
) -> None:
    """|got - expected| ≤ tolerance · (scale + |expected|), element by element.

    `scale` bounds the terms summed. `approximate`: GELU was involved, whose tanh is approximate in
    cuBLASLt (5e-6 in float32 on an H200, its derivative 7e-6).
    """
    assert got.shape == expected.shape, (got.shape, expected.shape)
    error = np.abs(f64(got) - expected)
    tolerance = TOLERANCE[dtype]
    if approximate and dtype != "float64":
        tolerance = max(tolerance, 1.5e-5)
    bound = tolerance * (np.abs(expected) + np.asarray(scale)) + 1e-30
    worst = np.max(error / bound, initial=0.0)
    assert worst <= 1.0, f"error is {worst:.3g} of what {dtype} allows"
