"""The complementary error function against the C library's, and its activations' tails."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from matmuld.engine.activations import DERIVATIVES, FUNCTIONS, erfc

from ..reference import activate, activation_prime, f64


@pytest.mark.parametrize(("dtype", "farthest"), [(np.float64, 26.0), (np.float32, 9.0)])
def test_erfc_is_good_to_a_few_roundings(dtype: Any, farthest: float) -> None:
    x = np.linspace(-6, farthest, 100_001).astype(dtype)
    expected = np.vectorize(math.erfc, [float])(f64(x))
    spacing = np.spacing(expected.astype(dtype)).astype(np.float64)
    assert np.max(np.abs(f64(erfc(x)) - expected) / spacing) < 10
    erf = np.vectorize(math.erf, [float])(f64(x))
    spacing = np.spacing(np.maximum(np.abs(erf), 0.5).astype(dtype)).astype(np.float64)
    assert np.max(np.abs((1 - f64(erfc(x))) - erf) / spacing) < 4


def test_erfc_at_the_ends() -> None:
    x = np.array([np.nan, np.inf, -np.inf, 0.0, 27.3, 1e300])
    np.testing.assert_array_equal(erfc(x), [np.nan, 0, 2, 1, 0, 0])


@pytest.mark.parametrize("name", DERIVATIVES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float64, 4e-15), (np.float32, 2e-6)])
def test_activations_and_their_derivatives(name: Any, dtype: Any, tolerance: float) -> None:
    z = np.linspace(-12, 12, 40_001).astype(dtype)
    value, slope = FUNCTIONS[name](z), DERIVATIVES[name](z)
    assert value.dtype == slope.dtype == dtype
    np.testing.assert_allclose(value, activate(name, f64(z)), tolerance, tolerance)
    np.testing.assert_allclose(slope, activation_prime(name, f64(z)), tolerance, tolerance)


def test_the_tail_of_gelu_erf_is_good_relatively() -> None:
    z = np.linspace(-12, -1, 10_001)
    np.testing.assert_allclose(FUNCTIONS["gelu_erf"](z), activate("gelu_erf", z), rtol=1e-13)
