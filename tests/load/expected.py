"""Layers whose answers are known, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from tests.reference import F64, TOLERANCE, Host, activate, assert_close, f64, random


@dataclass(frozen=True)
class Dense:
    """activation(x·Wᵀ + b)."""

    weight: Host
    bias: Host
    activation: str

    @classmethod
    def random(
        cls, rng: np.random.Generator, inputs: int, outputs: int, dtype: str, activation: str
    ) -> Dense:
        """Its outputs are about as large as its inputs."""
        weight = random(rng, (outputs, inputs), dtype)
        weight *= weight.dtype.type(inputs**-0.5)
        return cls(weight, random(rng, (outputs,), dtype), activation)


def check_stack(layers: Sequence[Dense], x: Host, y: Host) -> None:
    """Raise AssertionError unless `y` is what the layers make of `x`."""
    value, scale = f64(x), np.abs(f64(x))
    for layer in layers:
        value, scale = _applied(layer, value, scale)
    check(y, value, scale, approximate=any(layer.activation == "gelu" for layer in layers))


def check(got: Host, exact: F64, scale: F64, *, approximate: bool = False) -> None:
    """Raise AssertionError unless `got` is right within its dtype, whose least number counts too:
    shapes are so many that some product is smaller.
    """
    dtype = got.dtype.name
    least = float(ml_dtypes.finfo(got.dtype).smallest_subnormal)  # type: ignore[no-untyped-call]
    assert_close(got, exact, scale + least / TOLERANCE[dtype], dtype, approximate=approximate)


def _applied(layer: Dense, value: F64, scale: F64) -> tuple[F64, F64]:
    """The exact output of a layer, and a bound of the terms that it sums."""
    weight, bias = f64(layer.weight), f64(layer.bias)
    exact = activate(layer.activation, value @ weight.T + bias)
    return exact, scale @ np.abs(weight.T) + np.abs(bias)
