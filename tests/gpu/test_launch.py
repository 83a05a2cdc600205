"""Products started through the binding give what nvmath's own `execute` gives, bit by bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from io import StringIO
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matmuld.cli.verify import verified
from matmuld.engine import open_engine
from matmuld.engine.epilogs import CUBLASLT, Epilog
from matmuld.engine.protocol import Disagreement, Operands
from matmuld_client import Client, Layer
from rich.console import Console

from .. import reference
from ..engine.conftest import Bench
from ..engine.test_epilogs import Case, check, outputs, swapped
from ..engine.test_float8 import FORWARD, PAIRS
from ..engine.test_float8 import Case as Float8Case
from ..local import running
from ..reference import Host

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_bare_launch_equals_execute(dtype: str) -> None:
    import cupy
    from nvmath.linalg.advanced import Matmul, MatmulEpilog

    engine = open_engine("cuda:0")
    bench = Bench(engine)
    rng = np.random.default_rng(0)
    weight, x, bias = (
        bench.up(reference.random(rng, shape, dtype)) for shape in ((256, 128), (64, 128), (256,))
    )
    y = bench.empty((64, 256), weight.dtype)
    aux = bench.empty((32, 64), np.uint8, column_major=True)
    operands = Operands(weight, x.T, y.T, vector=bias, aux=aux)
    plan: Any = bench.plan(operands, Epilog.RELU_AUX_BIAS)
    assert plan.path == "fused"
    algorithm = plan._matmul.algorithms[0]

    async def launch() -> None:
        await engine.run(plan, operands)
        await engine.synchronize()

    bench.wait(launch())
    with Matmul(weight, x.T, stream=cupy.cuda.get_current_stream()) as matmul:
        matmul.plan(
            epilog=MatmulEpilog.RELU_AUX_BIAS, epilog_inputs={"bias": bias}, algorithms=[algorithm]
        )
        d, extras = matmul.execute()
        expected = cupy.asnumpy(d.T)
        np.testing.assert_array_equal(bench.down(y).view(np.uint8), expected.view(np.uint8))
        np.testing.assert_array_equal(bench.down(aux), cupy.asnumpy(extras["relu_aux"]))
    plan.close()
    engine.close()


@pytest.mark.parametrize("lean", [True, False])
def test_every_thread_keeps_its_stream(lean: bool) -> None:
    """Whatever nvmath does to CuPy's current stream in planning, comparing and executing."""
    import cupy

    def current() -> int:
        stream: int = cupy.cuda.get_current_stream().ptr
        return stream

    with opened(lean=lean) as bench:
        engine: Any = bench.engine
        for epilog in (Epilog.RELU_AUX_BIAS, Epilog.GELU_AUX_BIAS, Epilog.DRELU_BGRAD):
            case = Case(epilog, "float16", (128, 64, 256), ())
            operands, _ = outputs(bench, case)
            plan: Any = bench.plan(operands, epilog)
            launches = bench.wait(engine.aside(plan.variants, operands))
            for launch in launches:
                bench.wait(engine.aside(launch))
            if lean:
                bench.wait(engine.aside(plan.execute_beside, operands, operands.d))
            if len(launches) > 1:
                with suppress(Disagreement):
                    bench.wait(engine.aside(plan.take, 1, operands))
            plan.close()
        assert bench.wait(engine.aside(current)) == engine._planning.stream.ptr
        assert current() == engine._stream.ptr


# Without the bare launch


def written(case: Case, bench: Bench, operands: Operands) -> dict[str, Host]:
    """All that a product has written, as the reference has it."""
    row = case.row
    found = {"d": bench.down(operands.d)}
    if row.gradient is not None:
        found["vector"] = bench.down(operands.vector)
    if row.aux_out is not None:
        aux = bench.down(operands.aux)
        is_mask = row.aux_out == "relu_aux"
        found["aux"] = reference.unpack_mask(aux, case.m) if is_mask else aux[..., : case.m, :]
    return found


@contextmanager
def opened(*, lean: bool) -> Iterator[Bench]:
    engine = open_engine("cuda:0", lean_launch=lean)
    assert engine.describe()["launch"] == ("lean" if lean else "execute")
    yield Bench(engine)
    engine.close()


def products(epilog: Epilog, *, lean: bool) -> list[dict[str, Host]]:
    """Of many sizes and dtypes, each also with C, and with C in the memory of D."""
    found = []
    with opened(lean=lean) as bench:
        for size in ((1, 1, 1), (1, 2, 3), (8, 16, 32), (65, 43, 21), (128, 64, 256)):
            for dtype, batch in product(("float32", "float16", "bfloat16"), ((), (3,))):
                case = Case(epilog, dtype, size, batch)
                operands, _ = outputs(bench, case)
                path = bench.run(operands, epilog)
                assert ("executed" in path) is not lean
                check(bench, case, operands, 1.0, 0.0)
                found.append(written(case, bench, operands))
                column_major = case.row.column_major
                c = bench.up(swapped(case.c) if column_major else case.c)
                operands = replace(operands, c=c, alpha=-0.75, beta=2.0)
                bench.run(operands, epilog)
                check(bench, case, operands, -0.75, 2.0)
                found.append(written(case, bench, operands))
    return found


@pytest.mark.parametrize("epilog", CUBLASLT)
def test_execute_gives_the_bits_of_the_bare_launch(epilog: str) -> None:
    ours, theirs = (products(Epilog(epilog), lean=lean) for lean in (True, False))
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.keys() == other.keys()
        for name, array in mine.items():
            assert array.tobytes() == other[name].tobytes(), name


@pytest.mark.parametrize("n", [1, 3, 16, 17])
@pytest.mark.parametrize("epilog", FORWARD)
def test_execute_multiplies_8_bit_floats_of_any_batch(epilog: Epilog, n: int) -> None:
    with opened(lean=False) as bench:
        case = Float8Case(epilog, PAIRS[0], "bfloat16", (48, n, 32))
        operands = case.operands(bench)
        bench.run(operands, epilog)
        case.check(bench, operands)


def test_execute_reads_its_operands_anew_each_time() -> None:
    """Of one plan, in views whose strides differ where the extent is 1."""
    with opened(lean=False) as bench:
        rng = np.random.default_rng(0)
        weight = bench.up(reference.random(rng, (64, 32), "float16"))
        wide = bench.up(reference.random(rng, (4, 96), "float16"))
        first, *others = (bench.engine.view(wide, (1, 32), (96, 1), 96 * i) for i in range(4))
        plan = None
        for x in (first, *others):
            y = bench.empty((1, 64), weight.dtype)
            operands = Operands(weight, x.T, y.T)
            plan = plan or bench.plan(operands, Epilog.NONE)
            plan.bind(operands)()
            expected = reference.f64(bench.down(x)) @ reference.f64(bench.down(weight)).T
            np.testing.assert_allclose(bench.down(y), expected, rtol=2e-2, atol=2e-2)
        assert plan is not None
        plan.close()


def test_a_service_without_the_bare_launch_is_right_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with running(path, device="cuda:0", lean_launch=False), Client(f"unix:{path}") as client:
        assert client.info()["engine"]["launch"] == "execute"
        report = verified(client, [(65, 43, 21)], Console(file=StringIO()))
        assert not report.failures, report.failures[:3]
        assert any("executed" in path for path in report.paths)


def test_repetitions_without_the_bare_launch_are_right(tmp_path: Path) -> None:
    path = tmp_path / "s"
    rng = np.random.default_rng(0)
    weights = [reference.random(rng, shape, "float16") for shape in ((70, 50), (30, 70))]
    layers = [Layer(weights[0], activation="relu"), Layer(weights[1])]
    with running(path, device="cuda:0", lean_launch=False), Client(f"unix:{path}") as client:
        for _ in range(10):
            x = reference.random(rng, (20, 50), "float16")
            hidden = reference.relu(reference.f64(x) @ reference.f64(weights[0]).T)
            expected = hidden @ reference.f64(weights[1]).T
            np.testing.assert_allclose(client.mlp(x, layers), expected, rtol=1e-2, atol=0.5)


def test_the_self_test_finds_a_bare_launch_that_is_wrong(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from matmuld.engine import cublaslt

    for fault in (lambda *_: None, lambda *_: 1 / 0):  # nothing is launched; launching fails
        monkeypatch.setattr(cublaslt, "multiply", fault)
        engine = open_engine("cuda:0")
        assert engine.describe()["launch"] == "execute"
        engine.close()
    assert "its d differs from that of execute" in caplog.text
    assert "ZeroDivisionError" in caplog.text
