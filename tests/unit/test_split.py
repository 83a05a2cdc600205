"""What a product written into D, in D's type, has to do with its epilog."""

from __future__ import annotations

import numpy as np
import pytest
from matmuld.engine import elementwise
from matmuld.engine.epilogs import TABLE, Epilog
from matmuld.engine.protocol import Operands
from matmuld.engine.split import commutes_with_rounding, product_of

from ..reference import F64, Host, f64, pack_mask, relu

M, N = 33, 20
COMMUTING = [epilog for epilog in Epilog if commutes_with_rounding(epilog)]


def operands(d: Host, c: Host | None = None) -> Operands:
    a, b = np.ones((M, 3), d.dtype), np.ones((3, N), d.dtype)
    return Operands(a, b, d, c, beta=0.0 if c is None else 1.0)


def test_masks_and_relu_commute_with_rounding_and_nothing_that_computes_does() -> None:
    names = "NONE RELU DRELU DRELU_BGRAD BGRADA BGRADB"
    assert sorted(COMMUTING) == sorted(map(Epilog, names.split()))


@pytest.mark.parametrize("epilog", COMMUTING)
def test_d_is_the_same_if_the_product_is_rounded_first(epilog: Epilog) -> None:
    rng = np.random.default_rng(0)
    product = rng.standard_normal((M, N)).astype(np.float32)
    mask = rng.integers(0, 2, (M, N)) == 1
    row = TABLE[epilog]
    expected: F64 = f64(product)
    if row.activation == "relu":
        expected = relu(expected)
    if row.aux_in is not None:
        expected = np.where(mask, expected, 0.0)
    o = operands(np.empty((M, N), np.float16))
    if row.gradient is not None:
        o.vector = np.empty(N if row.gradient == "b" else M, np.float16)
    o.aux = pack_mask(mask) if row.aux_in is not None else None
    rounded = product.astype(np.float16).astype(np.float32)
    elementwise.finish(epilog, rounded, o)
    np.testing.assert_array_equal(o.d, expected.astype(np.float16))


def test_the_product_goes_into_d_where_it_may() -> None:
    d = np.empty((N, M), np.float16).T
    assert product_of(np, Epilog.DRELU_BGRAD, operands(d)) is d
    for epilog, c in ((Epilog.RELU, d), (Epilog.RELU_AUX_BIAS, None), (Epilog.DSILU, None)):
        product = product_of(np, epilog, operands(d, c))
        assert product.dtype == np.float32
        assert np.argsort(product.strides).tolist() == np.argsort(d.strides).tolist()
    single = np.empty((M, N), np.float32)
    assert product_of(np, Epilog.DSILU, operands(single)) is single
