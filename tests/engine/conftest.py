"""An engine, and products on it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

import numpy as np
import pytest
from matmuld.engine import open_engine
from matmuld.engine.epilogs import Epilog
from matmuld.engine.protocol import Array, Engine, Operands, Plan
from matmuld.engine.signature import Options, Signature
from matmuld.operations.options import COMPUTE_TYPES

from ..reference import Host

T = TypeVar("T")


class Bench:
    """An engine to be driven from a test: host arrays in, host arrays out."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run(coroutine)

    def up(self, host: Host, offset: int = 0) -> Array:
        """A device array with the strides of `host`, `offset` elements into its memory."""
        shape = host.shape
        strides = tuple(stride // host.itemsize for stride in host.strides)
        span = 1 + sum((e - 1) * s for e, s in zip(shape, strides, strict=True)) if host.size else 0
        flat = np.zeros(offset + span, host.dtype)
        window = np.ndarray(shape, host.dtype, flat, offset * host.itemsize, host.strides)
        window[...] = host
        return self.engine.view(self.wait(self.engine.upload(flat)), shape, strides, offset)

    def empty(self, shape: tuple[int, ...], dtype: Any, *, column_major: bool = False) -> Array:
        dtype = np.dtype(dtype)
        if column_major:
            swapped = (*shape[:-2], shape[-1], shape[-2])
            return self.engine.empty(swapped, dtype).swapaxes(-1, -2)
        return self.engine.empty(shape, dtype)

    def down(self, array: Array) -> Host:
        (host,), _ = self.wait(self.engine.download([array]))
        return host

    def options(self, array: Array, **options: Any) -> Options:
        return Options(COMPUTE_TYPES[np.dtype(array.dtype).name][0], **options)

    def plan(self, operands: Operands, epilog: Epilog, options: Options | None = None) -> Plan:
        signature = self.signature(operands, epilog, options)
        return self.wait(self.engine.plan(signature, operands))

    def signature(
        self, operands: Operands, epilog: Epilog, options: Options | None = None
    ) -> Signature:
        options = options or self.options(operands.a)
        return self.engine.signature(operands, epilog, options)

    def run(self, operands: Operands, epilog: Epilog, options: Options | None = None) -> str:
        """Plan, run twice (the second time on a warm plan), close; how it was carried out."""

        async def product() -> str:
            signature = self.signature(operands, epilog, options)
            plan = await self.engine.plan(signature, operands)
            try:
                await self.engine.run(plan, operands)
                await self.engine.run(plan, operands)
                await self.engine.synchronize()
                return plan.path
            finally:
                plan.close()

        return self.wait(product())


@pytest.fixture
def bench(device: str) -> Iterator[Bench]:
    engine = open_engine(device)
    yield Bench(engine)
    engine.close()
