"""The tuner on a real engine, with steps whose ways are good, slow, wrong or broken."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from io import StringIO
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from matmuld import measuring, strategies, tuner
from matmuld.calls import Call, Runtime, Tunable, Way
from matmuld.engine import open_engine
from matmuld.engine.epilogs import Epilog
from matmuld.engine.protocol import Array, Engine
from matmuld.engine.signature import Options
from matmuld.measuring import is_faster
from matmuld.memory.handles import HandleMint
from matmuld.memory.tensors import TensorStore
from matmuld.pool import PlanPool
from matmuld.settings import Mode
from matmuld.store import Choices, InMemoryChoices, PlanStore
from matmuld.strategies import NAMES, Forward, HiddenGradient, InputGradient, Product
from matmuld.tuner import Tuner

OPTIONS = Options("COMPUTE_32F")
SECONDS = 0.02
DEVICE = {"cpu": "of the tests"}


class Twice(NamedTuple):
    """y = 2 · x"""

    x: Array
    y: Array
    options: Options
    ways: dict[str, Way]

    @property
    def outputs(self) -> dict[str, Array]:
        return {"y": self.y}


def multiply(factor: float, x: Array, y: Array) -> None:
    np.multiply(x, factor, out=y)


def dawdle(seconds: float) -> None:
    time.sleep(seconds)


async def quick(call: Call, step: Twice) -> None:
    await call.compute(0, multiply, 2, step.x, step.y)


async def slow(call: Call, step: Twice) -> None:
    await quick(call, step)
    await call.compute(0, dawdle, 0.002)


async def slower(call: Call, step: Twice) -> None:
    await slow(call, step)
    await call.compute(0, dawdle, 0.001)


async def very_slow(call: Call, step: Twice) -> None:
    await quick(call, step)
    await call.compute(0, dawdle, 0.1)


async def wrong(call: Call, step: Twice) -> None:
    await call.compute(0, multiply, 2.001, step.x, step.y)


async def idle(call: Call, step: Twice) -> None:
    """Leaves in y whatever is there."""


async def partial(call: Call, step: Twice) -> None:
    await call.compute(0, multiply, 2, step.x[:-1], step.y[:-1])


async def impossible(call: Call, step: Twice) -> None:
    raise ZeroDivisionError


async def failing(call: Call, step: Twice) -> None:
    await call.compute(0, divide)


def divide() -> None:
    raise ZeroDivisionError


class Bench:
    """A tuner and what it works with."""

    def __init__(self, engine: Engine, choices: Choices, mode: Mode, forced: list[str]) -> None:
        self.engine = engine
        self.pool = PlanPool(engine, 64, 1 << 30)
        store = TensorStore(HandleMint(), 1 << 30, 60.0)
        self.runtime = Runtime(engine, self.pool, store, choices)
        self.tuner = Tuner(self.runtime, mode, SECONDS, forced)

    def twice(self, *ways: Way, rows: int = 8, options: Options = OPTIONS) -> Twice:
        x, y = (self.engine.empty((rows, 3), np.dtype(np.float32)) for _ in range(2))
        return Twice(x, y, options, {way.__name__: way for way in ways})

    async def settled(self) -> None:
        """Returns when nothing waits to be measured."""
        for _ in range(1000):
            await asyncio.sleep(0.005)
            if not self.tuner.pending and self.tuner.stats.settled + self.tuner.stats.failed:
                return
        raise AssertionError("the tuner does not settle")


def on(
    body: Callable[[Bench], Awaitable[None]],
    mode: Mode = "eager",
    choices: Choices | None = None,
    forced: list[str] | None = None,
    limit: int | None = None,
) -> None:
    """Run `body` with a tuner on a CPU engine, which has all its memory and tasks back after it."""

    async def main() -> None:
        engine = open_engine("cpu", limit)
        bench = Bench(engine, choices or InMemoryChoices(), mode, forced or [])
        try:
            await body(bench)
        finally:
            await bench.tuner.close()
            await bench.pool.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        gc.collect()
        assert engine.memory().used == 0
        engine.close()

    asyncio.run(main())


@pytest.fixture
def said() -> Iterator[StringIO]:
    """What is logged, and goes no further: a traceback that pytest keeps would hold arrays."""
    log, text = logging.getLogger("matmuld"), StringIO()

    def keep(record: logging.LogRecord) -> bool:
        print(logging.Formatter().format(record), file=text)
        return False

    level = log.level
    log.setLevel(logging.INFO)
    log.addFilter(keep)
    yield text
    log.removeFilter(keep)
    log.setLevel(level)


# What is chosen


def test_a_slow_first_way_is_replaced() -> None:
    async def body(bench: Bench) -> None:
        step = bench.twice(slow, quick)
        assert await bench.tuner.way(step) == "quick"
        assert await bench.tuner.way(bench.twice(slow, quick)) == "quick"
        stats = bench.tuner.stats
        assert (stats.settled, stats.changed, stats.failed) == (1, 1, 0)
        assert (bench.tuner.generation, len(bench.tuner)) == (1, 1)
        (described,) = bench.tuner.describe()
        times = described.pop("median_us")
        assert described == {
            "step": "Twice",
            "compute_type": "COMPUTE_32F",
            "operands": {name: "float32[8,3] strides [3,1] align 4" for name in ("x", "y")},
            "way": "quick",
            "settled": True,
        }
        assert times["slow"] > 2000 > times["quick"]

    on(body)


def test_a_first_way_that_is_not_slower_stays() -> None:
    async def body(bench: Bench) -> None:
        assert await bench.tuner.way(bench.twice(slow, slower)) == "slow"
        assert bench.tuner.stats.settled == 1
        assert bench.tuner.generation == 0

    on(body)


@pytest.mark.parametrize(
    ("other", "faster"),
    [
        ([0.5] * 10, True),
        ([0.98] * 10, True),
        ([0.995] * 10, False),
        ([1.0] * 10, False),
        ([0.5] * 9 + [2.0], True),
        ([0.5] * 8 + [2.0] * 2, False),
        ([2.0] * 10, False),
    ],
)
def test_faster_is_by_more_than_chance(other: list[float], faster: bool) -> None:
    assert is_faster(other, [1.0] * 10) is faster


def test_five_turns_must_all_be_won() -> None:
    assert is_faster([0.5] * 5, [1.0] * 5)
    assert not is_faster([0.5] * 4 + [1.5], [1.0] * 5)


@pytest.mark.parametrize("other", [wrong, idle, partial])
def test_a_way_that_gives_other_numbers_is_refused(other: Way, said: StringIO) -> None:
    async def body(bench: Bench) -> None:
        assert await bench.tuner.way(bench.twice(slow, other)) == "slow"
        assert bench.tuner.stats.settled == 1

    on(body)
    assert (
        f"is not done by {other.__name__}: its y: expected the same within 1e-05" in said.getvalue()
    )


def test_the_second_fastest_is_taken_if_the_fastest_is_wrong() -> None:
    async def body(bench: Bench) -> None:
        assert await bench.tuner.way(bench.twice(very_slow, slow, wrong)) == "slow"

    on(body)


@pytest.mark.parametrize("other", [impossible, failing])
def test_a_way_that_raises_is_left_out(other: Way, said: StringIO) -> None:
    async def body(bench: Bench) -> None:
        assert await bench.tuner.way(bench.twice(slow, other, quick)) == "quick"
        assert set(bench.tuner.describe()[0]["median_us"]) == {"slow", "quick"}
        assert f"cannot be done by {other.__name__}" in said.getvalue()

    on(body)


@pytest.mark.parametrize("first", [impossible, failing])
def test_a_first_way_that_raises_stays_and_its_request_will_tell(
    first: Way, said: StringIO
) -> None:
    async def body(bench: Bench) -> None:
        for _ in range(2):
            assert await bench.tuner.way(bench.twice(first, quick)) == first.__name__
        assert (bench.tuner.stats.failed, bench.tuner.stats.settled) == (1, 0)
        assert "stays as it is" in said.getvalue()

    on(body)


def test_without_memory_for_made_up_operands_nothing_changes(
    said: StringIO,
) -> None:
    async def body(bench: Bench) -> None:
        step = bench.twice(slow, quick, rows=1 << 16)
        assert await bench.tuner.way(step) == "slow"
        assert bench.tuner.stats.failed == 1

    on(body, limit=4 << 20)
    assert "6291456 bytes are needed to measure it" in said.getvalue()


def test_what_is_forced_or_deterministic_is_not_measured() -> None:
    async def body(bench: Bench) -> None:
        assert await bench.tuner.way(bench.twice(slow, quick)) == "slow"
        fixed = bench.twice(quick, wrong, options=OPTIONS._replace(deterministic=True))
        assert await bench.tuner.way(fixed) == "quick"
        assert (len(bench.tuner), bench.tuner.generation) == (0, 0)

    on(body, forced=["slow"])


def test_off_measures_nothing() -> None:
    async def body(bench: Bench) -> None:
        assert await bench.tuner.way(bench.twice(slow, quick)) == "slow"
        assert len(bench.tuner) == 0

    on(body, mode="off")


def test_deterministic_steps_never_change() -> None:
    async def body(bench: Bench) -> None:
        step = bench.twice(slow, quick, options=OPTIONS._replace(deterministic=True))
        for _ in range(3):
            assert await bench.tuner.way(step) == "slow"
        assert len(bench.tuner) == 0

    on(body)


# Many at once, and little time


def test_many_who_ask_at_once_wait_for_one_measurement() -> None:
    async def body(bench: Bench) -> None:
        steps = [bench.twice(slow, quick) for _ in range(50)]
        ways = await asyncio.gather(*(bench.tuner.way(step) for step in steps))
        assert set(ways) == {"quick"}
        assert bench.tuner.stats.settled == 1

    on(body)


def test_lazy_answers_at_once_and_measures_later() -> None:
    async def body(bench: Bench) -> None:
        step = bench.twice(slow, quick)
        assert await bench.tuner.way(step) == "slow"
        assert bench.tuner.describe()[0]["settled"] is False
        assert bench.tuner.info()["pending"] == 1
        await bench.settled()
        assert await bench.tuner.way(step) == "quick"
        assert bench.tuner.info()["pending"] == 0

    on(body, mode="lazy")


def test_lazy_waits_for_requests_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(bench: Bench) -> None:
        bench.runtime.scheduler.active = 1
        step = bench.twice(slow, quick)
        assert await bench.tuner.way(step) == "slow"
        await asyncio.sleep(0.1)
        assert bench.tuner.stats.settled == 0
        await bench.settled()
        assert await bench.tuner.way(step) == "quick"

    monkeypatch.setattr(measuring, "PATIENCE_SECONDS", 0.3)
    on(body, mode="lazy")


def test_lazy_does_not_count_a_sample_that_a_request_disturbed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def body(bench: Bench) -> None:
        taken = 0

        async def disturbed(call: Call, step: Twice) -> None:
            await call.compute(0, count)

        def count() -> None:
            nonlocal taken
            taken += 1
            bench.runtime.scheduler.served += taken < 40

        await bench.tuner.way(bench.twice(disturbed))
        await bench.settled()
        assert taken >= 40 + measuring.ROUNDS[0] - 1

    on(body, mode="lazy")


def test_the_least_recently_used_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(bench: Bench) -> None:
        bench.runtime.scheduler.active = 1
        for rows in range(1, 20):
            await bench.tuner.way(bench.twice(slow, quick, rows=100))
            await bench.tuner.way(bench.twice(slow, quick, rows=rows))
            assert len(bench.tuner) <= 4
            assert bench.tuner.pending <= 4
        known = [choice["operands"]["x"].split("]")[0] for choice in bench.tuner.describe()]
        assert known == [f"float32[{rows},3" for rows in (17, 18, 100, 19)]

    monkeypatch.setattr(tuner, "LIMIT", 4)
    on(body, mode="lazy")


@pytest.mark.parametrize("mode", ["eager", "lazy"])
def test_closing_stops_a_measurement_at_once(mode: Mode) -> None:
    async def body(bench: Bench) -> None:
        asking = asyncio.create_task(bench.tuner.way(bench.twice(very_slow, quick)))
        others = [
            asyncio.create_task(bench.tuner.way(bench.twice(very_slow, quick, rows=rows)))
            for rows in range(20, 30)
        ]
        await asyncio.sleep(0.25)
        began = time.perf_counter()
        await bench.tuner.close()
        assert time.perf_counter() - began < 0.5
        assert await asyncio.gather(asking, *others) == ["very_slow"] * 11
        assert bench.tuner.stats.settled == 0

    on(body, mode=mode)


def test_whoever_gives_up_waiting_does_not_stop_the_measurement() -> None:
    async def body(bench: Bench) -> None:
        step = bench.twice(slow, quick)
        asking = asyncio.create_task(bench.tuner.way(step))
        await asyncio.sleep(0.01)
        asking.cancel()
        with suppress(asyncio.CancelledError):
            await asking
        assert await bench.tuner.way(step) == "quick"
        assert bench.tuner.stats.settled == 1

    on(body)


# After a restart


def test_a_remembered_way_is_taken_unmeasured(tmp_path: Path) -> None:
    async def first(bench: Bench) -> None:
        assert await bench.tuner.way(bench.twice(slow, quick)) == "quick"

    async def again(bench: Bench) -> None:
        steps = [bench.twice(slow, quick) for _ in range(8)]
        ways = await asyncio.gather(*(bench.tuner.way(step) for step in steps))
        assert set(ways) == {"quick"}
        stats = bench.tuner.stats
        assert (stats.recalled, stats.settled, stats.seconds, bench.tuner.pending) == (1, 0, 0, 0)
        assert set(bench.tuner.describe()[0]["median_us"]) == {"slow", "quick"}

    on(first, choices=PlanStore(tmp_path, DEVICE))
    on(again, choices=PlanStore(tmp_path, DEVICE))
    on(again, mode="lazy", choices=PlanStore(tmp_path, DEVICE))


def test_a_remembered_way_that_is_no_more_is_forgotten(tmp_path: Path, said: StringIO) -> None:
    async def first(bench: Bench) -> None:
        assert await bench.tuner.way(bench.twice(slow, quick)) == "quick"

    async def without(bench: Bench) -> None:
        assert await bench.tuner.way(bench.twice(slow, idle)) == "slow"
        assert (bench.tuner.stats.recalled, bench.tuner.stats.settled) == (0, 1)

    on(first, choices=PlanStore(tmp_path, DEVICE))
    on(without, choices=PlanStore(tmp_path, DEVICE))
    assert "its way: expected one of slow, idle, got quick" in said.getvalue()
    (entry,) = PlanStore(tmp_path, DEVICE)
    assert entry.record.model_dump()["way"] == "slow"


# The service's own steps


def gradients(engine: Engine) -> list[Tunable]:
    """One step of every kind, of 16-bit numbers, whose plans hold memory."""
    bfloat16 = engine.empty((1,), np.dtype("bfloat16")).dtype

    def array(*shape: int) -> Array:
        return engine.empty(shape, bfloat16)

    mask = engine.empty((7, 16), np.dtype(np.uint8)).T
    above = (array(7, 5), array(5, 9), array(7, 9), OPTIONS)
    hidden = HiddenGradient(*above, mask, "relu_aux", array(7, 4), array(9, 4), array(9))
    return [
        Forward(array(7, 5), array(9, 5), array(7, 9), OPTIONS),
        Forward(array(7, 5), array(9, 5), array(7, 9), OPTIONS, array(9), "gelu", array(7, 16).T),
        InputGradient(*above, mask, "relu_aux", array(9)),
        hidden.below,
        hidden,
        hidden._replace(c=array(9, 4), beta=0.5),
        Product(array(7, 5), array(5, 9), array(9, 7).T, OPTIONS, Epilog.BGRADB, vector=array(9)),
    ]


@pytest.mark.parametrize("mode", ["eager", "lazy"])
def test_every_step_settles_and_holds_nothing_but_plans_of_the_pool(mode: Mode) -> None:
    async def body(bench: Bench) -> None:
        steps = gradients(bench.engine)
        for step in steps:
            assert set(step.ways) <= set(NAMES)
            assert await bench.tuner.way(step) in step.ways
        while bench.tuner.stats.settled < len(steps):
            await asyncio.sleep(0.01)
        del step, steps
        assert bench.tuner.stats.failed == 0
        assert bench.engine.memory().used == bench.pool.nbytes > 0
        assert bench.pool.leased == 0
        for choice in bench.tuner.describe():
            assert all(value > 0 for value in choice["median_us"].values())
        assert bench.pool.evict() > 0

    gc.disable()
    try:
        on(body, mode=mode)
    finally:
        gc.enable()


def test_measured_plans_are_those_that_requests_then_use() -> None:
    async def body(bench: Bench) -> None:
        x, y = (bench.engine.empty((4, 4), np.dtype(np.float32)) for _ in range(2))
        step = Forward(x, x, y, OPTIONS)
        bench.runtime.tuner = bench.tuner
        call = Call(bench.runtime, "me")
        await call.choose(step)
        (entry,) = bench.pool
        described = bench.pool.describe(entry)
        assert (described["owner"], described["hits"]) == ("me", 1)
        assert described["tflops"] >= 0
        assert (bench.pool.stats.planned, bench.pool.stats.misses) == (1, 0)

    on(body)


def test_the_names_are_those_of_all_ways() -> None:
    async def body(bench: Bench) -> None:
        steps: list[Tunable] = gradients(bench.engine)
        plain = steps[2]._replace(aux=None, dbias=None)
        masked = steps[2]._replace(dbias=None)
        alone = steps[3]._replace(dbias=None)
        found = {name for step in (*steps, plain, masked, alone) for name in step.ways}
        assert found == set(strategies.NAMES)

    on(body, mode="off")


def test_a_step_is_told_by_its_operands() -> None:
    async def body(bench: Bench) -> None:
        engine = bench.engine
        x, y = (engine.empty((4, 4), np.dtype(np.float32)) for _ in range(2))
        steps = [
            Forward(x, x, y, OPTIONS),
            Forward(x.T, x, y, OPTIONS),
            Forward(x, x, y, OPTIONS, activation="relu"),
            Forward(x, x, y, OPTIONS, x[0]),
            Forward(x, x, y, OPTIONS._replace(deterministic=True)),
        ]
        for step in steps:
            await bench.tuner.way(step)
        assert len(bench.tuner) == 4

    on(body)
