"""Products started through the binding give what nvmath's own `execute` gives, bit by bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from matmuld.engine import open_engine
from matmuld.engine.epilogs import Epilog
from matmuld.engine.protocol import Operands

from .. import reference
from ..engine.conftest import Bench

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
