"""8-bit products that are worth a GPU are left to cuBLASLt, whatever the size of the batch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from matmuld.engine import open_engine
from matmuld.engine.epilogs import Epilog

from ..engine.conftest import Bench
from ..engine.test_float8 import PAIRS, Case

pytestmark = pytest.mark.gpu


@pytest.fixture
def bench() -> Iterator[Bench]:
    engine = open_engine("cuda:0")
    yield Bench(engine)
    engine.close()


@pytest.mark.parametrize("n", [1, 16, 17, 256])
@pytest.mark.parametrize("epilog", [Epilog.NONE, Epilog.BIAS, Epilog.RELU_BIAS, Epilog.GELU_BIAS])
def test_common_products_are_fused(bench: Bench, epilog: Epilog, n: int) -> None:
    case = Case(epilog, PAIRS[0], "bfloat16", (256, n, 512))
    operands = case.operands(bench)
    assert bench.run(operands, epilog) == "fused"
    case.check(bench, operands)


def test_a_batch_is_not_padded_by_copies(bench: Bench) -> None:
    """Nothing is read behind x, and y is written in place."""
    case = Case(Epilog.BIAS, PAIRS[0], "bfloat16", (4096, 3, 4096))
    operands = case.operands(bench)
    plan = bench.plan(operands, Epilog.BIAS)
    used = bench.engine.memory().used
    plan.bind(operands)()
    assert bench.engine.memory().used == used
    bench.wait(bench.engine.synchronize())
    case.check(bench, operands)
    plan.close()
