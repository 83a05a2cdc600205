"""An algorithm that was recorded is used again only if it still runs and agrees."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np
import pytest
from matmuld.engine import open_engine
from matmuld.engine.epilogs import Epilog
from matmuld.engine.protocol import Operands
from matmuld.entries import entry_of, from_bytes, to_bytes

from .. import reference
from ..engine.conftest import Bench
from ..reference import Host

pytestmark = pytest.mark.gpu

SHAPE = (64, 512, 384)
CASES = [
    (epilog, dtype)
    for epilog in (Epilog.NONE, Epilog.GELU_AUX_BIAS, Epilog.RELU_AUX_BIAS, Epilog.BGRADB)
    for dtype in ("float32", "float16", "bfloat16")
]


@pytest.fixture
def bench() -> Iterator[Bench]:
    engine = open_engine("cuda:0")
    yield Bench(engine)
    engine.close()


def operands(bench: Bench, epilog: Epilog, dtype: str) -> Operands:
    """Of D ``[out, batch]`` column-major, with whatever the epilog needs."""
    batch, out, inner = SHAPE
    rng = np.random.default_rng(0)
    weight, x, bias = (
        bench.up(reference.random(rng, extents, dtype))
        for extents in ((out, inner), (batch, inner), (out,))
    )
    o = Operands(weight, x.T, bench.empty((batch, out), weight.dtype).T)
    if epilog is Epilog.RELU_AUX_BIAS:
        rows = -(-out // 128) * 16
        o.vector, o.aux = bias, bench.empty((rows, batch), np.uint8, column_major=True)
    elif epilog is Epilog.GELU_AUX_BIAS:
        o.vector, o.aux = bias, bench.empty((out, batch), weight.dtype, column_major=True)
    elif epilog is Epilog.BGRADB:
        o.a = bench.up(reference.random(rng, (inner, out), dtype)).T
        o.b = bench.up(reference.random(rng, (inner, batch), dtype))
        o.vector = bench.empty((batch,), weight.dtype)
    return o


def fused(bench: Bench, o: Operands, epilog: Epilog, record: Any = None) -> Any:
    """A plan, made on the planning thread."""
    from matmuld.engine.cublaslt import FusedPlan

    engine: Any = bench.engine
    bench.wait(engine.synchronize())  # the planning stream does not wait for the operands
    signature = bench.signature(o, epilog)
    arguments = (signature, o, engine._main, engine._planning, record)
    return engine._planner.submit(FusedPlan, *arguments).result()


def result(bench: Bench, plan: Any, o: Operands) -> Host:
    async def launch() -> None:
        await bench.engine.run(plan, o)
        await bench.engine.synchronize()

    bench.wait(launch())
    return bench.down(o.d)


def record_of(plan: Any) -> dict[str, Any]:
    _, record = plan.record()
    return dict(record)


def recorded(epilog: Epilog, dtype: str) -> tuple[dict[str, Any], bytes]:
    """By a process of its own: the record of the heuristic's last candidate, and its result."""
    engine = open_engine("cuda:0")
    bench = Bench(engine)
    o = operands(bench, epilog, dtype)
    plan = fused(bench, o, epilog)
    plan._algorithm = int(plan._algorithms[len(plan._algorithms) - 1]["algo"].ctypes.data)
    record = record_of(plan)
    data = result(bench, plan, o).tobytes()
    plan.close()
    engine.close()
    return record, data


def test_a_record_of_another_process_gives_the_same_bits(bench: Bench) -> None:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context) as process:
        found = [process.submit(recorded, *case) for case in CASES]
        for (epilog, dtype), future in zip(CASES, found, strict=True):
            record, data = future.result()
            o = operands(bench, epilog, dtype)
            plan = fused(bench, o, epilog, record)
            assert plan.refusal is None, (epilog, dtype)
            assert record_of(plan) == record
            assert result(bench, plan, o).tobytes() == data
            plan.close()


def test_a_record_survives_the_plan_store(bench: Bench) -> None:
    o = operands(bench, Epilog.NONE, "float16")
    plan = fused(bench, o, Epilog.NONE)
    record = record_of(plan)
    text = bench.signature(o, Epilog.NONE).text
    entry = from_bytes(to_bytes(entry_of(bench.engine.fingerprint(), "algorithm", text, record)))
    again = fused(bench, o, Epilog.NONE, entry.record.model_dump())
    assert again.refusal is None
    plan.close()
    again.close()


@pytest.mark.parametrize("algorithm", [bytes(64), bytes(8)], ids=["zeros", "short"])
def test_a_record_that_is_wrong_is_refused_and_the_product_is_right(
    bench: Bench, algorithm: bytes
) -> None:
    o = operands(bench, Epilog.NONE, "float32")
    first = fused(bench, o, Epilog.NONE)
    expected = result(bench, first, o)
    plan = fused(bench, o, Epilog.NONE, record_of(first) | {"algorithm": algorithm})
    assert plan.refusal
    np.testing.assert_array_equal(result(bench, plan, o), expected)
    first.close()
    plan.close()


def test_a_record_of_another_dtype_is_refused(bench: Bench) -> None:
    half = fused(bench, operands(bench, Epilog.NONE, "float16"), Epilog.NONE)
    o = operands(bench, Epilog.NONE, "float64")
    plan = fused(bench, o, Epilog.NONE, record_of(half))
    assert plan.refusal
    expected = reference.f64(bench.down(o.a)) @ reference.f64(bench.down(o.b))
    np.testing.assert_allclose(result(bench, plan, o), expected, rtol=1e-10, atol=1e-10)
    half.close()
    plan.close()
