"""Every epilog on every engine, against an unfused float64 reference."""

from __future__ import annotations

import numpy as np
import pytest
from matmuld.engine.elementwise import TILE_BYTES
from matmuld.engine.epilogs import ACTIVATION_OF, AUX_KINDS, TABLE, AuxKind, Epilog, aux_rows
from matmuld.engine.protocol import Operands

from .. import reference
from ..reference import DTYPES, F64, TOLERANCE, Host, activate, activation_prime, assert_close, f64
from .conftest import Bench

SIZES = [(1, 1, 1), (1, 2, 3), (3, 2, 1), (2, 1, 3), (8, 16, 32), (65, 43, 21), (129, 100, 57)]
BATCHES = [(), (3,)]


def swapped(host: Host) -> Host:
    """The same matrix with the other orientation in memory."""
    return np.ascontiguousarray(host.swapaxes(-1, -2)).swapaxes(-1, -2)


class Case:
    """Random operands of one product, and what its outputs must be."""

    def __init__(
        self, epilog: Epilog, dtype: str, size: tuple[int, int, int], batch: tuple[int, ...]
    ) -> None:
        rng = np.random.default_rng([len(epilog.value), *size])
        (self.m, self.k, self.n), self.batch, self.dtype = size, batch, dtype
        self.row = TABLE[epilog]
        self.a = reference.random(rng, (*batch, self.m, self.k), dtype)
        self.b = reference.random(rng, (*batch, self.k, self.n), dtype)
        self.c = reference.random(rng, (*batch, self.m, self.n), dtype)
        self.z = reference.random(rng, (*batch, self.m, self.n), dtype)
        if self.row.bias:
            shape = (self.m,) if not batch else (*batch, self.m, 1)
            self.bias: Host | None = reference.random(rng, shape, dtype)
        else:
            self.bias = None

    @property
    def aux_in(self) -> Host | None:
        if self.row.aux_in == "relu_aux":
            return reference.pack_mask(f64(self.z) > 0)
        return reference.pre_activation_aux(self.z) if self.row.aux_in else None

    def pre_activation(self, alpha: float, beta: float) -> F64:
        z = alpha * (f64(self.a) @ f64(self.b)) + beta * f64(self.c)
        if self.bias is not None:
            z = z + f64(self.bias).reshape(*self.batch, self.m, 1)
        return z

    def scale(self) -> F64:
        """What the terms of each element of D add up to in absolute value."""
        scale: F64 = np.abs(f64(self.a)) @ np.abs(f64(self.b)) + np.abs(f64(self.c)) + 1
        return scale


def outputs(bench: Bench, case: Case) -> tuple[Operands, str | None]:
    """Operands on the device, with memory for what the epilog writes."""
    row = case.row
    d = bench.empty(
        (*case.batch, case.m, case.n), DTYPES[case.dtype], column_major=row.column_major
    )
    vector = aux = None
    if case.bias is not None:
        vector = bench.up(case.bias)
    elif row.gradient is not None:
        length = case.n if row.gradient == "b" else case.m
        shape = (*case.batch, length, 1) if case.batch else (length,)
        vector = bench.empty(shape, DTYPES[case.dtype])
    if (given := case.aux_in) is not None:
        aux = bench.up(given)
    elif row.aux_out is not None:
        dtype = np.uint8 if row.aux_out == "relu_aux" else DTYPES[case.dtype]
        shape = (*case.batch, reference.padded_rows(row.aux_out, case.m), case.n)
        aux = bench.empty(shape, dtype, column_major=True)
    return Operands(bench.up(case.a), bench.up(case.b), d, vector=vector, aux=aux), row.aux_out


def check(bench: Bench, case: Case, operands: Operands, alpha: float, beta: float) -> None:
    """Compare everything that the product wrote."""
    row, z = case.row, case.pre_activation(alpha, beta)
    expected = activate(row.activation, z)
    if row.aux_in == "relu_aux":
        expected = z * (f64(case.z) > 0)
    elif row.aux_in is not None:
        expected = z * activation_prime(ACTIVATION_OF[row.aux_in], f64(case.z))
    scale = case.scale()
    approximate = "gelu" in (row.activation, str(row.aux)[:4])
    assert_close(bench.down(operands.d), expected, scale, case.dtype, approximate=approximate)
    if row.aux_out == "relu_aux":
        got = reference.unpack_mask(bench.down(operands.aux), case.m)
        sure = np.abs(z) > 1e-2 * scale
        np.testing.assert_array_equal(got[sure], (z > 0)[sure])
    elif row.aux_out is not None:
        assert_close(bench.down(operands.aux)[..., : case.m, :], z, scale, case.dtype)
    if row.gradient is not None:
        terms, axis = {
            "d": (expected, -1),
            "a": (f64(case.a), -1),
            "b": (f64(case.b), -2),
        }[row.gradient]
        spread = np.sum(scale, axis=-1) if row.gradient == "d" else np.sum(np.abs(terms), axis=axis)
        assert_close(
            bench.down(operands.vector).reshape(spread.shape),
            terms.sum(axis=axis),
            spread,
            case.dtype,
            approximate=approximate,
        )


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("epilog", Epilog)
def test_every_epilog_matches_the_unfused_product(
    bench: Bench, epilog: Epilog, size: tuple[int, int, int], batch: tuple[int, ...]
) -> None:
    for dtype in DTYPES:
        case = Case(epilog, dtype, size, batch)
        operands, _ = outputs(bench, case)
        bench.run(operands, epilog)
        check(bench, case, operands, 1.0, 0.0)


@pytest.mark.parametrize("size", [(1, 4096, 512), (512, 4096, 1), (1, 4096, 4096)])
@pytest.mark.parametrize("epilog", [Epilog.BGRADA, Epilog.BGRADB, Epilog.DRELU_BGRAD])
def test_sums_of_thousands_beside_a_vector(
    bench: Bench, epilog: Epilog, size: tuple[int, int, int]
) -> None:
    for dtype in DTYPES:
        case = Case(epilog, dtype, size, ())
        operands, _ = outputs(bench, case)
        bench.run(operands, epilog)
        check(bench, case, operands, 1.0, 0.0)


@pytest.mark.parametrize("epilog", Epilog)
def test_products_larger_than_a_tile(bench: Bench, epilog: Epilog) -> None:
    case = Case(epilog, "float32", (2100, 3, 4300), ())
    operands, _ = outputs(bench, case)
    assert case.m * case.n * 4 > TILE_BYTES
    bench.run(operands, epilog)
    check(bench, case, operands, 1.0, 0.0)


@pytest.mark.parametrize("size", [(40, 60, 50), (40, 50, 60), (64, 1000, 4095), (8, 16, 32)])
def test_16_bit_products_are_summed_in_float32_and_rounded_once(
    bench: Bench, size: tuple[int, int, int]
) -> None:
    for dtype, unit in (("float16", 2**-11), ("bfloat16", 2**-8)):
        case = Case(Epilog.NONE, dtype, size, ())
        operands, _ = outputs(bench, case)
        bench.run(operands, Epilog.NONE)
        z = case.pre_activation(1.0, 0.0)
        terms = np.abs(f64(case.a)) @ np.abs(f64(case.b))
        summing = 2 * np.sqrt(case.k) * 2**-24 * terms + 2**-24
        error = np.abs(f64(bench.down(operands.d)) - z)
        assert np.max(error / (unit * np.abs(z) + summing)) < 1.05


@pytest.mark.parametrize("epilog", Epilog)
def test_alpha_and_beta_scale_the_product_and_c_but_not_the_bias(
    bench: Bench, epilog: Epilog
) -> None:
    for dtype in DTYPES:
        case = Case(epilog, dtype, (40, 50, 60), ())
        operands, _ = outputs(bench, case)
        column_major = case.row.column_major
        operands.c = bench.up(swapped(case.c) if column_major else case.c)
        operands.alpha, operands.beta = 0.5, -2.0
        bench.run(operands, epilog)
        check(bench, case, operands, 0.5, -2.0)


@pytest.mark.parametrize("epilog", Epilog)
@pytest.mark.parametrize("layout", ["transposed", "padded", "odd offset", "every other column"])
def test_operands_may_lie_in_any_way(bench: Bench, epilog: Epilog, layout: str) -> None:
    for dtype in DTYPES:
        case = Case(epilog, dtype, (33, 24, 17), ())
        operands, _ = outputs(bench, case)
        for name in ("a", "b"):
            host = getattr(case, name)
            if layout == "transposed":
                host = swapped(host)
            elif layout != "odd offset":
                step = 2 if layout == "every other column" else 1
                wide = np.zeros((host.shape[0], host.shape[1] * step + 3), host.dtype)
                window = wide[:, : host.shape[1] * step : step]
                window[...] = host
                host = window
            setattr(operands, name, bench.up(host, 3 if layout == "odd offset" else 0))
        bench.run(operands, epilog)
        check(bench, case, operands, 1.0, 0.0)


@pytest.mark.parametrize("kind", AUX_KINDS)
@pytest.mark.parametrize("m", [1, 8, 9, 127, 128, 129, 1000])
def test_aux_is_padded_as_cublaslt_pads_it(kind: AuxKind, m: int) -> None:
    assert aux_rows(kind, m) == reference.padded_rows(kind, m)


NUMBERS = [np.nan, -np.inf, -1.0, np.inf, 0.0, 2.0]


@pytest.mark.parametrize("size", [(6, 1, 8), (64, 64, 64), (256, 8, 256)])
@pytest.mark.parametrize(
    "epilog", [epilog for epilog, row in TABLE.items() if row.aux is None and row.gradient is None]
)
def test_nan_and_infinity_go_through_as_ieee_numbers(
    bench: Bench, epilog: Epilog, size: tuple[int, int, int]
) -> None:
    m, n, k = size
    row = TABLE[epilog]
    numbers = np.asarray(NUMBERS)
    with np.errstate(invalid="ignore"):
        expected = activate(row.activation, numbers)
    if row.activation == "relu":
        expected = np.maximum(numbers, 0)
    for dtype in DTYPES:
        a, b = np.zeros((m, k), DTYPES[dtype]), np.zeros((k, n), DTYPES[dtype])
        a[:6, 0], b[0] = np.asarray(NUMBERS).astype(DTYPES[dtype]), DTYPES[dtype].type(1)
        d = bench.empty((m, n), DTYPES[dtype], column_major=row.column_major)
        bias = bench.up(np.zeros(m, DTYPES[dtype])) if row.bias else None
        bench.run(Operands(bench.up(a), bench.up(b), d, vector=bias), epilog)
        got = f64(bench.down(d))[:6, 0]
        tolerance = TOLERANCE[dtype] if dtype == "float64" else max(TOLERANCE[dtype], 1.5e-5)
        np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance)


def test_the_mask_lets_the_gradient_of_0_and_nan_through(bench: Bench) -> None:
    a = np.zeros((64, 64), np.float32)
    a[:6, 0] = NUMBERS
    b = np.zeros((64, 8), np.float32)
    b[0] = 1
    d = bench.empty((64, 8), np.float32, column_major=True)
    aux = bench.empty((16, 8), np.uint8, column_major=True)
    bench.run(Operands(bench.up(a), bench.up(b), d, aux=aux), Epilog.RELU_AUX)
    bits = reference.unpack_mask(bench.down(aux), 6)[:, 0]
    np.testing.assert_array_equal(bits, [True, False, False, True, True, True])


@pytest.mark.parametrize("epilog", [Epilog.DRELU, Epilog.DRELU_BGRAD])
def test_a_masked_gradient_is_0_even_if_it_was_nan(bench: Bench, epilog: Epilog) -> None:
    a = np.full((64, 64), np.nan, np.float32)
    b = np.ones((64, 8), np.float32)
    mask = np.zeros((64, 8), np.bool_)
    d = bench.empty((64, 8), np.float32, column_major=True)
    sums = bench.empty((64,), np.float32) if TABLE[epilog].gradient else None
    aux = bench.up(reference.pack_mask(mask))
    bench.run(Operands(bench.up(a), bench.up(b), d, vector=sums, aux=aux), epilog)
    np.testing.assert_array_equal(bench.down(d), np.zeros((64, 8)))
