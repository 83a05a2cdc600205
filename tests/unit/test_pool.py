"""The plan pool on a real engine: single flight, exclusive use, eviction, flat memory."""

from __future__ import annotations

import asyncio
import gc
import resource
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from matmuld.engine import open_engine
from matmuld.engine.cpu import CpuPlan
from matmuld.engine.epilogs import Epilog
from matmuld.engine.protocol import Engine, Operands, Plan
from matmuld.engine.signature import Options, Signature
from matmuld.pool import PlanPool

OPTIONS = Options("COMPUTE_32F")


def operands(engine: Engine, m: int, k: int = 4, n: int = 3) -> Operands:
    float32 = np.dtype(np.float32)
    return Operands(
        engine.empty((m, k), float32), engine.empty((k, n), float32), engine.empty((m, n), float32)
    )


def key(engine: Engine, o: Operands) -> Signature:
    return engine.signature(o, Epilog.NONE, OPTIONS)


async def use(pool: PlanPool, o: Operands) -> None:
    signature = key(pool.engine, o)
    async with pool.lease(signature, o, "me") as plan:
        await pool.engine.run(plan, o)
        await pool.engine.synchronize()


def on(device: str, body: Callable[[Engine], Awaitable[None]]) -> None:
    """Run `body` with an engine of `device` on a loop of its own."""

    async def main() -> None:
        engine = open_engine(device)
        try:
            await body(engine)
        finally:
            engine.close()

    asyncio.run(main())


def test_64_callers_that_miss_at_once_plan_once(device: str) -> None:
    async def body(engine: Engine) -> None:
        pool = PlanPool(engine, capacity=8, byte_limit=1 << 30)
        mine = [operands(engine, 5) for _ in range(64)]
        await asyncio.gather(*(use(pool, o) for o in mine))
        assert (pool.stats.planned, pool.stats.misses, pool.stats.hits) == (1, 1, 63)
        assert pool.leased == 0
        await pool.close()

    on(device, body)


def test_a_plan_is_used_by_one_at_a_time_in_the_order_they_came(device: str) -> None:
    async def body(engine: Engine) -> None:
        pool = PlanPool(engine, capacity=8, byte_limit=1 << 30)
        o = operands(engine, 5)
        log: list[tuple[str, int]] = []

        async def hold(name: int) -> None:
            async with pool.lease(key(engine, o), o, "me"):
                log.append(("in", name))
                await asyncio.sleep(0)
                log.append(("out", name))

        await asyncio.gather(*(hold(name) for name in range(5)))
        assert log == [(step, name) for name in range(5) for step in ("in", "out")]
        await pool.close()

    on(device, body)


def test_a_plan_in_use_is_not_evicted_and_the_oldest_idle_one_is(device: str) -> None:
    async def body(engine: Engine) -> None:
        pool = PlanPool(engine, capacity=2, byte_limit=1 << 30)
        held, *others = (operands(engine, m) for m in (1, 2, 3, 4))
        async with pool.lease(key(engine, held), held, "me") as plan:
            for other in others:
                await use(pool, other)
            assert pool.evict() == 1
            await engine.run(plan, held)
        kept = [entry.signature for entry in pool]
        assert kept == [key(engine, held)]
        assert pool.stats.evicted == 3
        await pool.close()
        assert (len(pool), pool.nbytes) == (0, 0)

    on(device, body)


def test_the_pool_is_over_its_limit_only_while_all_its_plans_are_in_use(device: str) -> None:
    async def body(engine: Engine) -> None:
        pool = PlanPool(engine, capacity=1, byte_limit=1 << 30)
        first, second = operands(engine, 1), operands(engine, 2)
        async with pool.lease(key(engine, first), first, "me"):
            async with pool.lease(key(engine, second), second, "me"):
                assert len(pool) == 2
            assert len(pool) == 1
        assert [entry.signature for entry in pool] == [key(engine, first)]
        await pool.close()

    on(device, body)


def test_plans_are_limited_by_their_bytes() -> None:
    async def body(engine: Engine) -> None:
        float16 = np.dtype(np.float16)
        pool = PlanPool(engine, capacity=100, byte_limit=20_000)
        for m in range(1, 30):
            o = Operands(
                engine.empty((m, 32), float16),
                engine.empty((32, 32), float16),
                engine.empty((m, 32), float16),
            )
            await use(pool, o)
            assert pool.nbytes <= 20_000
            assert pool.nbytes == sum(entry.plan.nbytes for entry in pool if entry.plan)
        assert 1 <= len(pool) < 5
        await pool.close()

    on("cpu", body)


class Stubborn:
    """An engine that cannot plan until it is told that it can."""

    def __init__(self, engine: Engine) -> None:
        self.broken = True
        self.planned = 0
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def plan(self, signature: Signature, operands: Operands) -> Plan:
        self.planned += 1
        await asyncio.sleep(0)
        if self.broken:
            raise MemoryError("no")
        return await self._engine.plan(signature, operands)


def test_a_failure_to_plan_reaches_all_who_wait_and_is_not_remembered() -> None:
    async def body(engine: Engine) -> None:
        stubborn = Stubborn(engine)
        pool = PlanPool(stubborn, capacity=8, byte_limit=1 << 30)
        o = operands(engine, 5)
        failures = await asyncio.gather(*(use(pool, o) for _ in range(8)), return_exceptions=True)
        assert [type(failure) for failure in failures] == [MemoryError] * 8
        assert (stubborn.planned, pool.leased, len(pool)) == (1, 0, 0)
        stubborn.broken = False
        await use(pool, o)
        assert stubborn.planned == 2
        await pool.close()

    on("cpu", body)


def test_a_caller_who_is_cancelled_while_the_plan_is_made_leaves_it_to_the_others(
    device: str,
) -> None:
    async def body(engine: Engine) -> None:
        pool = PlanPool(engine, capacity=8, byte_limit=1 << 30)
        o = operands(engine, 5)
        first = asyncio.ensure_future(use(pool, o))
        await asyncio.sleep(0)
        second = asyncio.ensure_future(use(pool, o))
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        await second
        assert (pool.stats.planned, pool.leased) == (1, 0)
        await pool.close()

    on(device, body)


def test_a_plan_stays_in_use_until_a_cancelled_product_has_ended() -> None:
    async def body(engine: Engine) -> None:
        pool = PlanPool(engine, capacity=8, byte_limit=1 << 30)
        o = operands(engine, 1500, 1500, 1500)
        o.a.fill(1)
        o.b.fill(2)
        task = asyncio.ensure_future(use(pool, o))
        await asyncio.sleep(0.005)
        assert pool.leased == 1
        task.cancel()
        while not task.done():
            assert pool.leased == 1
            await asyncio.sleep(0)
        assert task.cancelled()
        assert pool.leased == 0
        np.testing.assert_array_equal(o.d, np.full((1500, 1500), 3000))
        await pool.close()

    on("cpu", body)


def test_a_plan_that_fails_is_not_kept() -> None:
    async def body(engine: Engine) -> None:
        pool = PlanPool(engine, capacity=8, byte_limit=1 << 30)
        o = operands(engine, 5)
        with pytest.raises(ZeroDivisionError):
            async with pool.lease(key(engine, o), o, "me"):
                raise ZeroDivisionError
        assert (len(pool), pool.leased, pool.nbytes) == (0, 0, 0)
        await use(pool, o)
        assert pool.stats.planned == 2
        await pool.close()

    on("cpu", body)


def test_other_layouts_alignments_and_options_are_other_plans(device: str) -> None:
    engine = open_engine(device)
    float32 = np.dtype(np.float32)
    flat = engine.empty((4096,), float32)
    b, d = engine.empty((8, 8), float32), engine.empty((8, 8), float32)

    def signature(a: Any, options: Options = OPTIONS, epilog: Epilog = Epilog.NONE) -> Signature:
        return engine.signature(Operands(a, b, d), epilog, options)

    row = engine.view(flat, (8, 8), (8, 1))
    distinct = {
        signature(row),
        signature(engine.view(flat, (8, 8), (1, 8))),
        signature(engine.view(flat, (8, 8), (9, 1))),
        signature(row, Options("COMPUTE_32F_FAST_TF32")),
        signature(row, Options("COMPUTE_32F", fast_accumulation=True)),
        signature(row, Options("COMPUTE_32F", sm_count_target=4)),
        signature(row, Options("COMPUTE_32F", reduction_scheme_mask=0)),
        signature(row, Options("COMPUTE_32F", numerical_impl_mask=1)),
        signature(row, epilog=Epilog.RELU),
    }
    assert len(distinct) == 9
    shifted = {signature(engine.view(flat, (8, 8), (8, 1), 1 << shift)) for shift in range(12)}
    classes = {"cpu": {4}, "cuda:0": {4 << shift for shift in range(7)}}[device]
    assert {other.a.alignment for other in shifted} == classes
    assert len(shifted) == len(classes)
    engine.close()


def test_10000_signatures_through_64_places_leave_memory_flat(device: str) -> None:
    async def body(engine: Engine) -> None:
        pool = PlanPool(engine, capacity=64, byte_limit=1 << 30)

        async def pass_through(first: int, last: int) -> tuple[int, int]:
            for m in range(first, last):
                await use(pool, operands(engine, 1 + m % 100, 1 + m // 100))
            assert len(pool) == 64
            gc.collect()
            await engine.trim()
            return resident_bytes(), engine.memory().free

        host, device_free = await pass_through(0, 2_000)
        host_after, device_free_after = await pass_through(2_000, 10_000)
        assert pool.stats.planned == 10_000
        assert pool.stats.evicted == 10_000 - 64
        assert host_after - host < 8 << 20
        assert device_free - device_free_after < 4 << 20
        await pool.close()

    on(device, body)


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


# Plans made elsewhere


class Recorded(CpuPlan):
    """A plan that is told from others of its signature, and knows whether it was closed."""

    def __init__(self, engine: Engine, o: Operands, name: str = "") -> None:
        super().__init__(key(engine, o), engine.empty)
        self.name = name
        self.closed = False

    def record(self) -> Any:
        return ("signature", {"name": self.name}) if self.name else None

    def close(self) -> None:
        assert not self.closed
        self.closed = True
        super().close()


def adopting(body: Callable[[Engine, PlanPool], Awaitable[None]]) -> None:
    async def main(engine: Engine) -> None:
        pool = PlanPool(engine, capacity=2, byte_limit=1 << 30)
        await body(engine, pool)
        await pool.close()
        assert (len(pool), pool.nbytes) == (0, 0)

    on("cpu", main)


def test_a_plan_that_was_made_elsewhere_is_held_for_the_first_who_needs_it() -> None:
    async def body(engine: Engine, pool: PlanPool) -> None:
        o = operands(engine, 5)
        plan = Recorded(engine, o, "one")
        pool.adopt(key(engine, o), plan, 1e-6)
        async with pool.lease(key(engine, o), o, "me") as leased:
            assert leased is plan
        (entry,) = pool
        described = pool.describe(entry)
        assert (described["owner"], described["hits"]) == ("me", 1)
        assert described["tflops"] == round(2 * 5 * 4 * 3 / 1e6, 3)
        assert (pool.stats.misses, pool.stats.planned, pool.leased) == (0, 1, 0)

    adopting(body)


def test_an_idle_plan_is_exchanged_at_once_and_one_made_alike_is_not() -> None:
    async def body(engine: Engine, pool: PlanPool) -> None:
        o = operands(engine, 5)
        one, other, alike = (Recorded(engine, o, name) for name in ("one", "other", "other"))
        for plan in (one, other, alike):
            pool.adopt(key(engine, o), plan, None)
        assert (one.closed, other.closed, alike.closed) == (True, False, True)
        (entry,) = pool
        assert entry.plan is other
        assert "tflops" not in pool.describe(entry)

    adopting(body)


def test_a_plan_in_use_is_exchanged_when_it_comes_back() -> None:
    async def body(engine: Engine, pool: PlanPool) -> None:
        o = operands(engine, 5)
        one, other, last = (Recorded(engine, o, name) for name in ("one", "other", "last"))
        pool.adopt(key(engine, o), one, None)

        async def next_in_line() -> Plan:
            async with pool.lease(key(engine, o), o, "me") as plan:
                return plan

        async with pool.lease(key(engine, o), o, "me") as plan:
            assert plan is one
            waiting = asyncio.create_task(next_in_line())
            await asyncio.sleep(0)
            pool.adopt(key(engine, o), other, None)
            pool.adopt(key(engine, o), last, None)
            assert (one.closed, other.closed) == (False, True)
        assert one.closed
        assert await waiting is last

    adopting(body)


def test_a_plan_that_is_being_made_makes_way_for_one_that_was_measured() -> None:
    async def body(engine: Engine, pool: PlanPool) -> None:
        o = operands(engine, 5)
        asking = asyncio.create_task(use(pool, o))
        await asyncio.sleep(0)
        plan = Recorded(engine, o, "measured")
        pool.adopt(key(engine, o), plan, None)
        await asking
        (entry,) = pool
        assert entry.plan is plan

    adopting(body)


def test_plans_made_elsewhere_count_against_the_limit() -> None:
    async def body(engine: Engine, pool: PlanPool) -> None:
        plans = []
        for m in (1, 2, 3):
            o = operands(engine, m)
            plans.append(Recorded(engine, o, "one"))
            pool.adopt(key(engine, o), plans[-1], None)
        assert [plan.closed for plan in plans] == [True, False, False]

    adopting(body)


def test_a_failed_plan_takes_its_successor_with_it() -> None:
    async def body(engine: Engine, pool: PlanPool) -> None:
        o = operands(engine, 5)
        one, other = Recorded(engine, o, "one"), Recorded(engine, o, "other")
        pool.adopt(key(engine, o), one, None)

        async def fail() -> None:
            async with pool.lease(key(engine, o), o, "me"):
                pool.adopt(key(engine, o), other, None)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await fail()
        assert (one.closed, other.closed, len(pool)) == (True, True, 0)

    adopting(body)
