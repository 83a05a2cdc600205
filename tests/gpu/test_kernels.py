"""The kernels against what they stand for, the steps of `elementwise`, in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from matmuld.engine import cuda_devices, elementwise
from matmuld.engine.elementwise import accumulator_dtype, in_turn, swap
from matmuld.engine.epilogs import AUX_KINDS, TABLE, AuxKind, Epilog
from matmuld.engine.protocol import Operands

from ..reference import (
    DTYPES,
    F64,
    Host,
    f64,
    pack_mask,
    padded_rows,
    pre_activation_aux,
    random,
    unpack_mask,
)

pytestmark = pytest.mark.gpu

if cuda_devices():
    import cupy
    from matmuld.engine import kernels

SIZES = [(1, 1), (1, 5), (7, 1), (1, 300), (300, 1), (8, 16), (33, 31), (129, 100), (260, 70)]
EACH_PASS = (
    Epilog.RELU,
    Epilog.RELU_AUX_BIAS,
    Epilog.SILU_BIAS,
    Epilog.GELU_AUX,
    Epilog.DRELU,
    Epilog.DRELU_BGRAD,
    Epilog.DLEAKY_RELU_BGRAD,
)
"""Every way through the kernel."""
ROUNDING = {"float64": 2**-46, "float32": 2**-17, "float16": 2**-10, "bfloat16": 2**-7}
"""Once to the dtype; in float32 and float64 a few times within the activation."""


def up(
    host: Host, *, column_major: bool = False, step: int = 1, offset: int = 0, gap: int = 0
) -> Any:
    """On the device, with `offset` elements in front of each row or column and `gap` behind it;
    `step`: only every so many elements of its memory are used.
    """
    if column_major:
        return swap(up(swap(host), step=step, offset=offset, gap=gap))
    memory = cupy.zeros((*host.shape[:-1], offset + host.shape[-1] * step + gap), host.dtype)
    view = memory[..., offset : offset + host.shape[-1] * step : step]
    view[...] = cupy.asarray(np.ascontiguousarray(host))
    return view


def down(array: Any) -> Host:
    return np.asarray(cupy.asnumpy(array))


def close(got: Host, expected: F64, dtype: str, scale: F64 | float = 1.0) -> None:
    bound = ROUNDING[dtype] * (np.abs(expected) + scale)
    assert got.shape == expected.shape
    error = np.abs(f64(got) - expected)
    assert np.all(error <= bound), f"{np.max(error / bound)} of what {dtype} allows"


class Case:
    """The operands of an epilog, on the host."""

    def __init__(
        self,
        epilog: Epilog,
        dtype: str,
        size: tuple[int, int],
        batch: int | None,
        *,
        rounded: bool = False,
    ) -> None:
        """`rounded`: the product has D's type."""
        rng = np.random.default_rng([*map(ord, epilog), *size])
        row, (m, n), k = TABLE[epilog], size, 11
        lead = () if batch is None else (batch,)
        self.row, self.dtype = row, dtype
        product_dtype = DTYPES[dtype] if rounded else accumulator_dtype(DTYPES[dtype])
        self.product = rng.standard_normal((*lead, m, n)).astype(product_dtype)
        self.vector = self.aux = None
        if row.bias or row.gradient is not None:
            length = n if row.gradient == "b" else m
            self.vector = random(rng, (*lead, length, 1) if lead else (length,), dtype)
        kind = row.aux
        if kind is not None:
            shape = (*lead, padded_rows(kind, m), n)
            self.aux = random(rng, shape, dtype)
            if kind == "relu_aux":
                self.aux = pack_mask(rng.integers(0, 2, (*lead, m, n)) == 1)
        self.a, self.b = random(rng, (*lead, m, k), dtype), random(rng, (*lead, k, n), dtype)
        self.c = random(rng, (*lead, m, n), dtype)

    def expected(self, beta: float) -> Operands:
        def exact(host: Host | None) -> Any:
            return host if host is None or host.dtype == np.uint8 else f64(host)

        product = f64(self.product)
        o = Operands(f64(self.a), f64(self.b), product, f64(self.c), 1.0, beta)
        o = replace(o, vector=exact(self.vector), aux=exact(self.aux))
        elementwise.finish(epilog_of(self), product, o)
        return o

    def run(
        self,
        beta: float,
        *,
        column_major: bool,
        in_place: bool,
        step: int = 1,
        offset: int = 0,
        gap: int = 0,
    ) -> Operands:
        lies: dict[str, Any] = {"column_major": column_major, "offset": offset, "gap": gap}
        product = up(self.product, **lies)
        d = product
        if not in_place:
            d = up(np.zeros(self.product.shape, DTYPES[self.dtype]), **lies)
        o = self.operands(beta, d, column_major=column_major, step=step, offset=offset, gap=gap)
        in_turn(kernels.finishing(epilog_of(self), product, o))
        return o

    def operands(
        self, beta: float, d: Any, *, column_major: bool = True, step: int = 1, **lies: int
    ) -> Operands:
        vector = None if self.vector is None else up(self.vector, step=step)
        aux = None if self.aux is None else up(self.aux, column_major=True, **lies)
        a, b = up(self.a, step=step), up(self.b, column_major=True)
        c = up(self.c, column_major=column_major, step=step)
        return Operands(a, b, d, c, 1.0, beta, vector, aux)

    def pre_activation(self, beta: float) -> F64:
        z = f64(self.product) + beta * f64(self.c)
        if self.row.bias and self.vector is not None:
            z = z + elementwise.as_column(f64(self.vector))
        return z

    def check(self, o: Operands, wanted: Operands) -> None:
        dtype, m = self.dtype, self.product.shape[-2]
        close(down(o.d), wanted.d, dtype)
        if self.row.aux_out == "relu_aux":
            aux, expected = down(o.aux), unpack_mask(aux_of(wanted), m)
            sure = np.abs(self.pre_activation(o.beta)) > 1e-5
            assert np.array_equal(unpack_mask(aux, m)[sure], expected[sure])
            assert not np.any(unpack_mask(aux, aux.shape[-2] * 8)[..., m:, :])
        elif self.row.aux_out is not None:
            close(down(o.aux)[..., :m, :], aux_of(wanted)[..., :m, :], dtype)
        if self.row.gradient is not None:
            terms = {"d": wanted.d, "a": f64(self.a), "b": swap(f64(self.b))}[self.row.gradient]
            sizes = np.abs(terms) + (self.row.gradient == "d")
            scale = np.sqrt(np.square(sizes).sum(-1)) + sizes.max(-1)
            close(down(o.vector).reshape(scale.shape), terms.sum(-1), dtype, scale)


def aux_of(operands: Operands) -> Host:
    return np.asarray(operands.aux)


def epilog_of(case: Case) -> Epilog:
    return next(epilog for epilog, row in TABLE.items() if row == case.row)


@pytest.mark.parametrize("batch", [None, 3])
@pytest.mark.parametrize("column_major", [True, False])
@pytest.mark.parametrize("epilog", Epilog)
def test_every_epilog(epilog: Epilog, column_major: bool, batch: int | None) -> None:
    for dtype in DTYPES:
        for size in SIZES:
            case = Case(epilog, dtype, size, batch)
            for beta in (0.0, -0.5):
                o = case.run(beta, column_major=column_major, in_place=False)
                case.check(o, case.expected(beta))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("epilog", Epilog)
def test_d_may_be_the_product_and_inputs_may_be_strided(epilog: Epilog, dtype: str) -> None:
    case = Case(epilog, dtype, (129, 70), 2)
    o = case.run(2.0, column_major=case.row.column_major, in_place=True, step=3)
    case.check(o, case.expected(2.0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("epilog", EACH_PASS)
def test_however_arrays_lie(epilog: Epilog, rounded: bool, dtype: str) -> None:
    for size in [(64, 3), (264, 33), (300, 36), (514, 40), (131, 130)]:
        case = Case(epilog, dtype, size, 2, rounded=rounded)
        expected = case.expected(0.0)
        for offset, gap in [(0, 0), (0, 1), (1, 0), (1, 7), (2, 6), (4, 0), (8, 24)]:
            o = case.run(0.0, column_major=True, in_place=rounded, offset=offset, gap=gap)
            case.check(o, expected)


def test_sums_do_not_depend_on_how_arrays_lie() -> None:
    case = Case(Epilog.DRELU_BGRAD, "bfloat16", (264, 1000), 2, rounded=True)
    sums = [
        down(case.run(0.0, column_major=True, in_place=True, offset=offset).vector)
        for offset in (0, 1, 2, 4)
    ]
    for other in sums[1:]:
        np.testing.assert_array_equal(f64(sums[0]), f64(other))


def test_what_is_bound_can_be_launched_again() -> None:
    case = Case(Epilog.DSILU_BGRAD, "float16", (72, 900), None)
    product = up(case.product, column_major=True)
    o = case.operands(0.0, up(case.c, column_major=True))
    launches = kernels.finishing(Epilog.DSILU_BGRAD, product, o)
    for _ in range(2):
        o.d[...] = 0
        in_turn(launches)
        case.check(o, case.expected(0.0))


@pytest.mark.parametrize("epilog", [Epilog.RELU_AUX, Epilog.RELU_AUX_BIAS, Epilog.LEAKY_RELU])
def test_nan_and_0(epilog: Epilog) -> None:
    case = Case(epilog, "float32", (6, 1), None)
    case.product[:, 0] = [np.nan, -np.inf, -1.0, np.inf, 0.0, 2.0]
    if case.vector is not None:
        case.vector[...] = 0
    got, wanted = case.run(0.0, column_major=True, in_place=False), case.expected(0.0)
    np.testing.assert_allclose(down(got.d), wanted.d, rtol=1e-6)
    if case.row.aux_out is not None:
        np.testing.assert_array_equal(down(got.aux), wanted.aux)


@pytest.mark.parametrize("kind", AUX_KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_pre_activation_gradients(kind: AuxKind, dtype: str) -> None:
    rng = np.random.default_rng(1)
    for outputs, batch in SIZES:
        dy, z = random(rng, (batch, outputs), dtype), random(rng, (outputs, batch), dtype)
        aux = pack_mask(z > 0) if kind == "relu_aux" else pre_activation_aux(z)
        dz = cupy.empty((batch, outputs), dy.dtype)
        kernels.masking(kind, up(dy), up(aux, column_major=True), dz)()
        expected = np.empty((batch, outputs))
        exact = aux if kind == "relu_aux" else f64(aux)
        elementwise.masking(kind, f64(dy), exact, expected)()
        close(down(dz), expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("column_major", [True, False])
def test_sums(dtype: str, column_major: bool) -> None:
    rng = np.random.default_rng(2)
    for outputs, batch in [*SIZES, (3, 5000), (1, 5000), (5000, 3), (65, 3001)]:
        matrix = random(rng, (batch, outputs), dtype)
        runs = []
        for _ in range(2):
            sums = cupy.empty((outputs,), matrix.dtype)
            kernels.summing(up(matrix, column_major=column_major), sums)()
            runs.append(down(sums))
        exact = f64(matrix)
        close(runs[0], exact.sum(0), dtype, np.sqrt(np.square(exact).sum(0)))
        np.testing.assert_array_equal(runs[0], runs[1])


def test_more_elements_than_32_bits_count() -> None:
    batch, outputs = 70_000, 32_768
    dy = cupy.full((batch, outputs), 2**-6, np.float16)
    z = cupy.zeros((batch, outputs), np.float16)
    z[-1] = -1
    z[-1, -1] = 8
    dz = cupy.empty_like(dy)
    kernels.masking("leaky_relu_aux", dy, z.T, dz)()
    ends = f64(down(dz[-1, -2:]))
    np.testing.assert_allclose(ends, [2**-6 * 0.01, 2**-6], rtol=1e-3)
    del z
    sums = cupy.empty((outputs,), np.float16)
    kernels.summing(dy, sums)()
    np.testing.assert_array_equal(f64(down(sums)), np.full(outputs, 1094.0))
