"""How far apart two results of one product are said to be."""

from __future__ import annotations

import math

import numpy as np
import pytest
from matmuld.engine.agreement import difference, tolerance
from matmuld.engine.signature import Options

from ..reference import DTYPES, Host, random


def apart(expected: list[float], got: list[float]) -> float:
    return difference(np, np.array(expected, np.float32), np.array(got, np.float32))


@pytest.mark.parametrize(
    ("expected", "got", "found"),
    [
        ([1, -4], [1, -4], 0.0),
        ([1, -4], [2, -4], 0.25),
        ([0, 0], [0, 0], 0.0),
        ([0, 0], [0, 1e-30], math.inf),
        ([1, 2], [1, math.nan], math.inf),
        ([math.nan, 2], [1, 2], math.inf),
        ([math.nan, 2], [math.nan, 2], 0.0),
        ([math.inf, -math.inf], [math.inf, -math.inf], 0.0),
        ([math.inf, 2], [-math.inf, 2], math.inf),
        ([math.inf, 2], [2, 2], math.inf),
        ([math.inf, 2], [math.inf, 3], 0.5),
    ],
)
def test_the_largest_difference_counts(
    expected: list[float], got: list[float], found: float
) -> None:
    assert apart(expected, got) == found


@pytest.mark.parametrize("column_major", [False, True])
def test_an_element_is_found_wherever_it_is(column_major: bool) -> None:
    rng = np.random.default_rng(0)
    expected = rng.uniform(1, 2, (3000, 4000)).astype(np.float32)
    expected = expected.T if column_major else expected
    got = expected.copy()
    got[-1, -1] = 20
    assert difference(np, expected, got) == (20 - expected[-1, -1]) / expected.max()


@pytest.mark.parametrize("dtype", DTYPES)
def test_another_order_of_summation_is_allowed_and_a_lost_term_is_not(dtype: str) -> None:
    rng = np.random.default_rng(0)
    a, b = (random(rng, shape, dtype).astype(np.float64) for shape in ((64, 512), (512, 64)))

    def product(k: slice) -> Host:
        wide = np.float64 if dtype == "float64" else np.float32
        found: Host = a[:, k].astype(wide) @ b[k].astype(wide)
        return found.astype(DTYPES[dtype])

    allowed = tolerance(dtype, dtype, Options("COMPUTE_32F"))
    assert difference(np, product(slice(None)), product(slice(None, None, -1))) <= allowed
    assert difference(np, product(slice(None)), product(slice(0, 480))) > allowed


def test_rounded_inputs_are_allowed_more() -> None:
    fast = tolerance("float32", "float32", Options("COMPUTE_32F_FAST_TF32"))
    assert fast > tolerance("float32", "float32", Options("COMPUTE_32F"))
