"""What a thousand plans cost."""

from __future__ import annotations

import asyncio
import gc

import numpy as np
import pytest
from matmuld.engine import open_engine
from matmuld.engine.epilogs import Epilog
from matmuld.engine.protocol import Engine, Operands
from matmuld.engine.signature import Options
from matmuld.pool import PlanPool

from ..unit.test_pool import resident_bytes

pytestmark = pytest.mark.gpu

WORKSPACE = 32 << 20
HOST_BYTES = 40 << 10


def test_1000_plans_share_a_workspace_and_take_little_of_the_host() -> None:
    async def body(engine: Engine) -> None:
        pool = PlanPool(engine, capacity=2_000, byte_limit=1 << 30)
        half = np.dtype(np.float16)
        weight, bias = engine.empty((256, 64), half), engine.empty((256,), half)

        async def hold(first: int, last: int) -> tuple[int, int]:
            for batch in range(first, last):
                x, y = engine.empty((batch, 64), half), engine.empty((batch, 256), half)
                o = Operands(weight, x.T, y.T, vector=bias)
                signature = engine.signature(o, Epilog.RELU_BIAS, Options("COMPUTE_32F"))
                async with pool.lease(signature, o, "me") as plan:
                    await engine.run(plan, o)
            gc.collect()
            await engine.trim()
            return resident_bytes(), engine.memory().free

        host, device = await hold(1, 201)
        host_after, device_after = await hold(201, 1_201)
        assert len(pool) == 1_200
        assert (host_after - host) / 1_000 <= HOST_BYTES
        assert device - device_after <= WORKSPACE
        await pool.close()

    async def main() -> None:
        engine = open_engine("cuda:0")
        try:
            await body(engine)
        finally:
            engine.close()

    asyncio.run(main())
