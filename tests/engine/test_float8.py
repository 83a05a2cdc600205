"""8-bit floats on every engine: products against float64, and quantizing against its definition."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from matmuld.engine.epilogs import TABLE, Epilog
from matmuld.engine.protocol import Array, Operands

from .. import reference
from ..reference import DTYPES, F64, FLOAT8, Host, activate, assert_close, f64
from .conftest import Bench
from .test_epilogs import swapped

FORWARD = [e for e, row in TABLE.items() if row.aux_in is None and row.gradient is None]
PAIRS = [
    ("float8_e4m3fn", "float8_e4m3fn"),
    ("float8_e4m3fn", "float8_e5m2"),
    ("float8_e5m2", "float8_e4m3fn"),
]
RESULTS = ["bfloat16", "float16", "float32"]
LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
SCALES = 0.375, 2.5
SOURCES = ["float64", "float32", "float16", "bfloat16"]


def narrow(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Host:
    return rng.standard_normal(shape).astype(FLOAT8[dtype])


class Case:
    """Operands of one product; A row-major and B column-major, as cuBLASLt wants them."""

    def __init__(
        self,
        epilog: Epilog,
        pair: tuple[str, str],
        result: str,
        size: tuple[int, int, int],
        batch: tuple[int, ...] = (),
    ) -> None:
        rng = np.random.default_rng([len(epilog.value), *size])
        (self.m, self.n, self.k), self.result, self.row = size, result, TABLE[epilog]
        self.epilog, self.batch = epilog, batch
        self.a = narrow(rng, (*batch, self.m, self.k), pair[0])
        self.b = swapped(narrow(rng, (*batch, self.k, self.n), pair[1]))
        self.c = reference.random(rng, (*batch, self.m, self.n), result)
        bias = "float16" if result == "float16" else "bfloat16"
        self.bias = reference.random(rng, (self.m,), bias) if self.row.bias else None

    def operands(self, bench: Bench, *, column_major: bool = True) -> Operands:
        d = bench.empty(
            (*self.batch, self.m, self.n), DTYPES[self.result], column_major=column_major
        )
        aux = None
        if self.row.aux_out is not None:
            element = np.uint8 if self.row.aux_out == "relu_aux" else DTYPES[self.result]
            shape = (reference.padded_rows(self.row.aux_out, self.m), self.n)
            aux = bench.empty(shape, element, column_major=True)
        scale_a, scale_b = (bench.up(np.array([s], np.float32)) for s in SCALES)
        return Operands(
            bench.up(self.a),
            bench.up(self.b),
            d,
            vector=None if self.bias is None else bench.up(self.bias),
            aux=aux,
            scale_a=scale_a,
            scale_b=scale_b,
        )

    def pre_activation(self, factor: float = SCALES[0] * SCALES[1]) -> F64:
        z = factor * (f64(self.a) @ f64(self.b))
        return z if self.bias is None else z + f64(self.bias)[:, None]

    def magnitude(self) -> F64:
        total: F64 = SCALES[0] * SCALES[1] * (np.abs(f64(self.a)) @ np.abs(f64(self.b))) + 1
        return total

    def check(self, bench: Bench, operands: Operands) -> None:
        z, row = self.pre_activation(), self.row
        expected = activate(row.activation, z)
        assert_close(bench.down(operands.d), expected, self.magnitude(), f"float8 {self.result}")
        if row.aux_out == "relu_aux":
            got = reference.unpack_mask(bench.down(operands.aux), self.m)
            sure = np.abs(z) > 1e-2 * self.magnitude()
            np.testing.assert_array_equal(got[sure], (z > 0)[sure])
        elif row.aux_out == "gelu_aux":
            got = bench.down(operands.aux)[: self.m]
            assert_close(got, z, self.magnitude(), f"float8 {self.result}")


@pytest.mark.parametrize("result", RESULTS)
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("epilog", FORWARD)
def test_every_forward_epilog_matches_the_unfused_product(
    bench: Bench, epilog: Epilog, pair: tuple[str, str], result: str
) -> None:
    for size in ((16, 16, 16), (48, 80, 32), (256, 64, 144)):
        case = Case(epilog, pair, result, size)
        operands = case.operands(bench)
        bench.run(operands, epilog)
        case.check(bench, operands)


@pytest.mark.parametrize("epilog", FORWARD)
@pytest.mark.parametrize("n", [1, 2, 3, 8, 15, 17, 33])
def test_any_number_of_columns(bench: Bench, epilog: Epilog, n: int) -> None:
    """What lies behind the last column of D stays as it was."""
    for result in RESULTS:
        case = Case(epilog, PAIRS[0], result, (48, n, 32))
        operands = case.operands(bench)
        whole = bench.up(swapped(np.full((48, n + 16), 7, DTYPES[result])))
        operands.d = whole[:, :n]
        bench.run(operands, epilog)
        case.check(bench, operands)
        assert (f64(bench.down(whole))[:, n:] == 7).all()


@pytest.mark.parametrize("result", RESULTS)
@pytest.mark.parametrize("epilog", [Epilog.NONE, Epilog.RELU, Epilog.GELU])
def test_a_row_major_result(bench: Bench, epilog: Epilog, result: str) -> None:
    case = Case(epilog, PAIRS[0], result, (32, 48, 64))
    operands = case.operands(bench, column_major=False)
    bench.run(operands, epilog)
    case.check(bench, operands)


@pytest.mark.parametrize("epilog", [Epilog.NONE, Epilog.RELU_BIAS])
def test_batches(bench: Bench, epilog: Epilog) -> None:
    case = Case(epilog, PAIRS[1], "bfloat16", (32, 48, 64), (3,))
    operands = case.operands(bench)
    bench.run(operands, epilog)
    case.check(bench, operands)


def test_c_and_alpha(bench: Bench) -> None:
    for result in RESULTS:
        case = Case(Epilog.NONE, PAIRS[0], result, (32, 48, 64))
        operands = case.operands(bench)
        operands.c, operands.alpha, operands.beta = bench.up(swapped(case.c)), -2.0, 0.5
        bench.run(operands, Epilog.NONE)
        expected = -2.0 * case.pre_activation() + 0.5 * f64(case.c)
        magnitude = 3 * case.magnitude() + np.abs(f64(case.c))
        assert_close(bench.down(operands.d), expected, magnitude, f"float8 {result}")


def test_operands_in_other_layouts(bench: Bench) -> None:
    """A column-major, B row-major, unaligned, and with rows that begin anywhere."""
    case = Case(Epilog.BIAS, PAIRS[0], "bfloat16", (32, 48, 64))

    def shifted(host: Host) -> Array:
        return bench.up(host, offset=3)

    def spaced(host: Host) -> Array:
        padded = np.zeros((host.shape[0], host.shape[1] + 5), host.dtype)
        padded[:, :-5] = host
        return bench.up(padded)[:, :-5]

    ways: list[tuple[Any, Any]] = [
        (lambda a: bench.up(swapped(a)), lambda b: bench.up(np.ascontiguousarray(b))),
        (shifted, shifted),
        (spaced, spaced),
        (lambda a: spaced(a.T).T, lambda b: spaced(b.T).T),
    ]
    for lay_a, lay_b in ways:
        operands = case.operands(bench)
        operands.a, operands.b = lay_a(case.a), lay_b(case.b)
        bench.run(operands, Epilog.BIAS)
        case.check(bench, operands)


def test_a_plan_takes_other_scales_and_none_is_one(bench: Bench) -> None:
    case = Case(Epilog.NONE, PAIRS[0], "float32", (32, 16, 64))
    operands = case.operands(bench)
    plan = bench.plan(operands, Epilog.NONE)

    async def run() -> None:
        await bench.engine.run(plan, operands)
        await bench.engine.synchronize()

    for scales in ((4.0, 0.25), (None, 0.5), (3.0, None), (None, None)):
        operands.scale_a, operands.scale_b = (
            None if s is None else bench.up(np.full((), s, np.float32)) for s in scales
        )
        bench.wait(run())
        factor = (scales[0] or 1.0) * (scales[1] or 1.0)
        expected = case.pre_activation(factor)
        assert_close(bench.down(operands.d), expected, 8 * case.magnitude(), "float8 float32")
    plan.close()


@pytest.mark.parametrize("fast", [False, True])
def test_long_sums(bench: Bench, fast: bool) -> None:
    """Steps are added up in float32, but for fast accumulation, where sums keep about 14 bits."""
    case = Case(Epilog.NONE, PAIRS[0], "float32", (16, 16, 16384))
    operands = case.operands(bench)
    bench.run(operands, Epilog.NONE, bench.options(operands.a, fast_accumulation=fast))
    error = np.abs(f64(bench.down(operands.d)) - case.pre_activation()) / case.magnitude()
    assert error.max() < (1e-2 if fast else 1e-4)


def quantized(bench: Bench, host: Host, dtype: str) -> tuple[Host, float, float]:
    async def quantize() -> list[Host]:
        engine = bench.engine
        source = await engine.upload(host)
        return (await engine.download(list(await engine.quantize(source, FLOAT8[dtype]))))[0]

    values, scale, amax = bench.wait(quantize())
    assert (scale.shape, scale.dtype) == (amax.shape, amax.dtype) == ((1,), np.float32)
    assert (values.shape, values.dtype) == (host.shape, FLOAT8[dtype])
    return values, float(scale[0]), float(amax[0])


def nearest(values: F64, dtype: str) -> Host:
    """By trying all of them: the nearest, of two that whose last bit is 0."""
    codes = np.arange(128, dtype=np.uint8)
    numbers = f64(codes.view(FLOAT8[dtype]))
    codes, numbers = codes[np.isfinite(numbers)], numbers[np.isfinite(numbers)]
    distance = np.abs(np.abs(values)[:, None] - numbers[None, :])
    tied = distance == distance.min(axis=1, keepdims=True)
    even = tied & (codes % 2 == 0)
    chosen = np.where(even.any(axis=1), even.argmax(axis=1), tied.argmax(axis=1))
    signs = (np.signbit(values) * 128).astype(np.uint8)
    return np.asarray((codes[chosen] | signs).view(FLOAT8[dtype]))


@pytest.mark.parametrize("dtype", FLOAT8)
@pytest.mark.parametrize("source", SOURCES)
def test_quantizing(bench: Bench, source: str, dtype: str) -> None:
    rng = np.random.default_rng(1)
    host = rng.standard_normal((50, 60)) * np.exp2(rng.integers(-14, 3, (50, 60)))
    host[0, :2] = 0.0, -0.0
    host = host.astype(DTYPES[source])
    values, scale, amax = quantized(bench, host, dtype)
    single = host.astype(np.float32)
    assert amax == np.abs(single).max()
    assert scale == np.float32(amax) / np.float32(LARGEST[dtype])
    expected = nearest(f64(single / np.float32(scale)).reshape(-1), dtype).reshape(host.shape)
    np.testing.assert_array_equal(values.view(np.uint8), expected.view(np.uint8))


@pytest.mark.parametrize("dtype", FLOAT8)
def test_quantizing_rounds_half_to_even(bench: Bench, dtype: str) -> None:
    """All numbers of the dtype, what lies in the middle between them, and just beside that."""
    numbers = np.arange(128, dtype=np.uint8).view(FLOAT8[dtype]).astype(np.float32)
    numbers = numbers[np.isfinite(numbers)]
    middles = (numbers[1:] + numbers[:-1]) / 2
    beside = [np.nextafter(middles, np.float32(side)) for side in (0, np.inf)]
    points = np.concatenate([numbers, middles, *beside])
    points = np.concatenate([points, -points])
    values, scale, _ = quantized(bench, points, dtype)
    assert scale == 1
    expected = nearest(f64(points), dtype)
    np.testing.assert_array_equal(values.view(np.uint8), expected.view(np.uint8))


@pytest.mark.parametrize("dtype", FLOAT8)
def test_quantizing_zeros_nothing_and_the_least(bench: Bench, dtype: str) -> None:
    for shape in ((3, 4), (0, 4)):
        values, scale, amax = quantized(bench, np.zeros(shape, np.float32), dtype)
        assert (scale, amax) == (1, 0)
        assert not f64(values).any()
    tiny = np.finfo(np.float32).tiny  # of what is smaller, a GPU's reduction makes 0
    least = np.array([tiny, -tiny], np.float32)
    values, scale, amax = quantized(bench, least, dtype)
    assert amax == least[0]
    assert np.isfinite(f64(values)).all()
    assert scale > 0


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_shows_in_amax(bench: Bench, poison: float) -> None:
    for at in (0, 1000, 4999):
        host = np.ones(5000, np.float32)
        host[at] = poison
        assert not np.isfinite(quantized(bench, host, "float8_e4m3fn")[2])


def test_large_tensors_are_quantized_like_small_ones(bench: Bench) -> None:
    host = np.random.default_rng(2).standard_normal((1 << 11, 1 << 10)).astype(np.float32)
    values, scale, amax = quantized(bench, host, "float8_e4m3fn")
    assert amax == np.abs(host).max()
    np.testing.assert_allclose(f64(values) * scale, host, rtol=2**-4, atol=scale * 2**-9)


def test_8_bit_arrays_come_and_go(bench: Bench) -> None:
    for dtype in FLOAT8.values():
        host = np.arange(120, dtype=np.uint8).reshape(4, 5, 6).view(dtype)
        array = bench.up(host)
        np.testing.assert_array_equal(bench.down(array).view(np.uint8), host.view(np.uint8))
        turned = bench.down(array.swapaxes(-1, -2))
        np.testing.assert_array_equal(
            np.ascontiguousarray(turned).view(np.uint8),
            np.ascontiguousarray(host.swapaxes(-1, -2)).view(np.uint8),
        )
