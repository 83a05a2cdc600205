"""Which way a step is done, and by which algorithms: measured on operands made up for it.

A measurement has plans of its own, on the engine's planning stream, so that it holds none that a
request needs. While requests are at work it waits, and a sample that one has disturbed does not
count.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any, Literal

import numpy as np
from matmuld_client.errors import OutOfMemory

from .calls import Call, Runtime, Tunable
from .engine.agreement import difference, tolerance
from .engine.elementwise import assign
from .engine.epilogs import Epilog
from .engine.protocol import Array, Disagreement, Launch, Operands, Plan
from .engine.signature import Layout, Options, Signature
from .store import Choices

log = logging.getLogger("matmuld")

Mode = Literal["off", "lazy", "eager"]

LEAST_GAIN = 0.01
"""By which part another must be faster than what there is, so that near-ties do not flap."""
ROUNDS = (5, 30)
"""Samples of each candidate, at least and at most."""
LIMIT = 1 << 13
"""Steps whose choice is remembered."""
_IDLE_SECONDS = 0.002
_DISTURBED = 200
"""Samples in a row that requests may spoil until a measurement is put off."""
_NOISE = 1_000_003
"""Different numbers in an operand that is made up; odd, so that rows are not alike."""


class PutOff(Exception):
    """Requests left no time to measure."""


@dataclass(slots=True, eq=False)
class Choice:
    """The way of one kind of step.

    Attributes:
        layouts: how its arrays lie, by field.
        settled: whether there is nothing to measure any more.
        times: median seconds of every way, if they were measured.
    """

    key: str
    step: Tunable
    layouts: dict[str, Layout]
    way: str
    settled: bool = False
    queued: bool = False
    times: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class Stats:
    """What the tuner has done since the start."""

    settled: int = 0
    recalled: int = 0
    changed: int = 0
    failed: int = 0
    seconds: float = 0.0


class Trial(Call):
    """A call whose launches are not made but kept, bound to the planning stream."""

    def __init__(self, runtime: Runtime, plans: dict[Signature, tuple[Plan, Operands]]) -> None:
        super().__init__(runtime, "")
        self.launches: list[Launch] = []
        self.used: list[Signature] = []
        self._plans = plans

    async def run(self, operands: Operands, epilog: Epilog, options: Options) -> None:
        signature = self.engine.signature(operands, epilog, options)
        if signature not in self._plans:
            self._plans[signature] = await self.engine.plan(signature, operands), operands
        self.used.append(signature)
        self.launches.append(partial(self._launch, signature, operands))

    def _launch(self, signature: Signature, operands: Operands) -> None:
        """Bound late: the plan's algorithm may be another by then."""
        self._plans[signature][0].bind(operands, aside=True)()

    async def compute(self, nbytes: int, function: Callable[..., None], *args: Any) -> None:
        self.launches.append(partial(function, *args))


class Tuner:
    """Chooses the ways of steps, one measurement at a time.

    Attributes:
        generation: counts changes; what was derived from older choices is to be derived again.
    """

    def __init__(
        self, runtime: Runtime, mode: Mode, seconds: float, forced: Sequence[str] = ()
    ) -> None:
        """`seconds` of measuring for each choice; `forced` ways are taken where there are such,
        unmeasured.
        """
        self.generation = 0
        self.stats = Stats()
        self._runtime = runtime
        self._mode = mode
        self._seconds = seconds
        self._forced = forced
        self._choices: OrderedDict[str, Choice] = OrderedDict()
        self._queue: asyncio.Queue[Choice] = asyncio.Queue()
        self._measuring = asyncio.Lock()
        self._worker = asyncio.create_task(self._work()) if mode == "lazy" else None

    def __len__(self) -> int:
        return len(self._choices)

    @property
    def pending(self) -> int:
        """Choices that wait to be measured."""
        return sum(not choice.settled for choice in self._choices.values())

    async def way(self, step: Tunable) -> str:
        """The name of the way to do `step` now. A new one is looked up in the store, then measured
        as the mode says.
        """
        layouts, key = self._described(step)
        choice = self._choices.get(key)
        if choice is None:
            choice = self._choices[key] = self._new(key, step, layouts)
            if len(self._choices) > LIMIT:
                self._choices.popitem(last=False)
            if not choice.settled:
                await self._recall(choice)
        if not choice.settled:
            if self._mode == "eager":
                await self._settle(choice)
            elif not choice.queued:
                choice.queued = True
                self._queue.put_nowait(choice)
        return choice.way

    def _described(self, step: Tunable) -> tuple[dict[str, Layout], str]:
        fields = step._asdict()
        layout = self._runtime.engine.layout
        arrays = {
            name: layout(value) for name, value in fields.items() if hasattr(value, "strides")
        }
        words = [f"{name} {arrays[name]}" for name in arrays]
        words += [str(fields[name]) for name in ("activation", "kind", "epilog") if name in fields]
        return arrays, "; ".join([type(step).__name__, *words, str(step.options)])

    def _new(self, key: str, step: Tunable, layouts: dict[str, Layout]) -> Choice:
        names = list(step.ways)
        forced = [name for name in self._forced if name in names]
        bare = step._replace(**dict.fromkeys(layouts))
        choice = Choice(key, bare, layouts, forced[0] if forced else names[0])
        choice.settled = bool(forced) or self._mode == "off" or step.options.deterministic
        return choice

    async def _recall(self, choice: Choice) -> None:
        """Take what the store remembers."""
        record = await asyncio.to_thread(self._runtime.choices.get, "strategy", choice.key)
        if record is not None and not choice.settled and record["way"] in record["candidates"]:
            self.stats.recalled += 1
            self._change(choice, record["way"])
            choice.times = {name: us / 1e6 for name, us in record["candidates"].items()}
            choice.settled = True

    async def close(self) -> None:
        """Measure no more."""
        if self._worker is not None:
            self._worker.cancel()
            with suppress(asyncio.CancelledError):
                await self._worker

    async def _work(self) -> None:
        while True:
            choice = await self._queue.get()
            await self._settle(choice)
            if not choice.settled:
                self._queue.put_nowait(choice)

    async def _settle(self, choice: Choice) -> None:
        async with self._measuring:
            if choice.settled:
                return
            began = time.perf_counter()
            try:
                await self._measure(choice)
                self.stats.settled += 1
            except PutOff:
                return
            except OutOfMemory as error:
                self.stats.failed += 1
                log.info("autotune: %s stays as it is: %s", choice.key, error.detail)
            except Exception:
                self.stats.failed += 1
                log.exception("autotune: %s stays as it is", choice.key)
            finally:
                self.stats.seconds += time.perf_counter() - began
            choice.settled = True

    async def _measure(self, choice: Choice) -> None:
        """First the algorithms of every product, then the ways as wholes."""
        engine, choices = self._runtime.engine, self._runtime.choices
        arrays = {name: await self._made_up(layout) for name, layout in choice.layouts.items()}
        step = choice.step._replace(**arrays)
        plans: dict[Signature, tuple[Plan, Operands]] = {}
        try:
            trials = {name: Trial(self._runtime, plans) for name in step.ways}
            for name, trial in trials.items():
                await step.ways[name](trial, step)
            for plan, operands in plans.values():
                await self._choose_algorithm(plan, operands)
            times = await self._race([trial.launches for trial in trials.values()])
            choice.times = dict(zip(trials, times, strict=True))
            way = await self._fastest(choice, step, trials)
            records = [found for plan, _ in plans.values() if (found := plan.record()) is not None]
            self._change(choice, way)
            for signature in dict.fromkeys(trials[way].used):
                plan, _ = plans.pop(signature)
                if self._runtime.pool.adopt(signature, plan):
                    self.generation += 1
        finally:
            for plan, _ in plans.values():
                plan.close()
        await asyncio.to_thread(self._keep, choices, choice, records)
        await engine.synchronize()

    @staticmethod
    def _keep(
        choices: Choices, choice: Choice, records: Sequence[tuple[str, Mapping[str, Any]]]
    ) -> None:
        for key, record in records:
            choices.put("algorithm", key, record)
        record = {
            "way": choice.way,
            "median_us": choice.times[choice.way] * 1e6,
            "candidates": {name: seconds * 1e6 for name, seconds in choice.times.items()},
            "measured_at": time.time(),
        }
        choices.put("strategy", choice.key, record)

    def _change(self, choice: Choice, way: str) -> None:
        if way != choice.way:
            choice.way = way
            self.stats.changed += 1
            self.generation += 1

    async def _choose_algorithm(self, plan: Plan, operands: Operands) -> None:
        """Of one product; the heuristic's own is the first."""
        variants = plan.variants(operands)
        if len(variants) < 2:
            return
        times = await self._race([[variant] for variant in variants])
        for index in sorted(range(len(times)), key=times.__getitem__):
            if times[index] > (1 - LEAST_GAIN) * times[0]:
                return
            try:
                await self._runtime.engine.aside(plan.take, index, operands)
                return
            except Disagreement as error:
                log.warning("autotune: an algorithm is not taken: %s", error)

    async def _fastest(self, choice: Choice, step: Tunable, trials: Mapping[str, Trial]) -> str:
        """The way that is faster than the first and agrees with it; else the first."""
        first, *_ = trials
        times = choice.times
        for name in sorted(times, key=times.__getitem__):
            if times[name] > (1 - LEAST_GAIN) * times[first]:
                break
            check = partial(self._disagreement, choice, step, trials[first], trials[name])
            if (problem := await self._runtime.engine.aside(check)) is None:
                return name
            log.warning("autotune: %s by %s: %s", choice.key, name, problem)
        return first

    def _disagreement(
        self, choice: Choice, step: Tunable, first: Trial, other: Trial
    ) -> str | None:
        """Why the other way's results cannot be taken for the first's."""
        xp = self._runtime.engine.xp
        outputs = {name: getattr(step, name) for name in step.outputs}
        outputs = {name: array for name, array in outputs.items() if array is not None}
        results = []
        for trial in (first, other):
            for launch in trial.launches:
                launch()
            results.append({name: array.copy() for name, array in outputs.items()})
        for name, expected in results[0].items():
            operand, *_ = choice.layouts.values()
            allowed = tolerance(operand.dtype, choice.layouts[name].dtype, step.options)
            apart = difference(xp, expected, results[1][name])
            if not apart <= allowed:
                return f"its {name}: expected the same within {allowed:.0e}, got {apart:.1e}"
        return None

    async def _race(self, candidates: Sequence[Sequence[Launch]]) -> list[float]:
        """Median seconds of every candidate, in turns. Raises PutOff."""
        engine, runtime, eager = self._runtime.engine, self._runtime, self._mode == "eager"
        samples: list[list[float]] = [[] for _ in candidates]
        least, most = ROUNDS
        spent, spoilt = 0.0, 0
        for launches in candidates:
            await engine.time(launches)
        while len(samples[-1]) < most and (len(samples[-1]) < least or spent < self._seconds):
            for launches, times in zip(candidates, samples, strict=True):
                while True:
                    while runtime.active and not eager:
                        await asyncio.sleep(_IDLE_SECONDS)
                    served = runtime.served
                    took = await engine.time(launches)
                    if eager or served == runtime.served:
                        break
                    spoilt += 1
                    if spoilt > _DISTURBED:
                        raise PutOff
                spoilt = 0
                times.append(took)
                spent += took
        return [median(times) for times in samples]

    async def _made_up(self, layout: Layout) -> Array:
        """An array that lies so, full of random numbers."""
        engine = self._runtime.engine
        dtype = layout.numpy_dtype
        strides = layout.strides
        span = 1 + sum((n - 1) * s for n, s in zip(layout.shape, strides, strict=True))
        offset = layout.alignment // dtype.itemsize if layout.alignment < engine.alignment else 0
        flat = engine.empty((offset + span,), dtype)
        random = np.random.default_rng(0)
        count = min(_NOISE, flat.size)
        if dtype == np.uint8:
            noise = random.integers(0, 256, count, np.uint8)
        else:
            noise = random.standard_normal(count, np.float32).astype(dtype)
        plain = flat.view(f"u{dtype.itemsize}")
        known = await engine.upload(noise.view(plain.dtype))
        done = 0
        while done < flat.size:
            part = min(known.size, flat.size - done)
            await engine.call(
                part * dtype.itemsize, assign, plain[done : done + part], known[:part]
            )
            done += part
            known = plain[:done]
        return engine.view(flat, layout.shape, strides, offset)
