"""What the ways of a step cost, measured on operands made up for it.

A measurement has plans of its own, on the engine's planning stream, so that it holds none that a
request needs. While requests are at work it waits, for some time, and a sample that one has
disturbed does not count.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import numpy as np
from matmuld_client.errors import OutOfMemory

from .calls import Call, Runtime, Tunable
from .engine.agreement import difference, poison, tolerance
from .engine.elementwise import assign
from .engine.epilogs import Epilog
from .engine.protocol import Array, Disagreement, Launch, Operands, Plan
from .engine.signature import Layout, Options, Signature

log = logging.getLogger("matmuld")

LEAST_GAIN = 0.01
"""By which part another must be faster than what there is, so that near-ties do not flap."""
ROUNDS = (5, 30)
"""Samples of each candidate, at least and at most."""
ROOM = 4
"""Times the memory of a step's operands must be free, for the temporaries of all its ways."""
PATIENCE_SECONDS = 5.0
"""That a measurement waits in all for requests to leave it time; then it is made among them."""
_IDLE_SECONDS = 0.002
_AMONG_SECONDS = 0.01
"""Between samples that are made among requests."""
_NOISE = 1_000_003
"""Different numbers in an operand that is made up; odd, so that rows are not alike."""


class Closing(Exception):
    """The service stops."""


@dataclass(slots=True)
class Measured:
    """What came of a measurement.

    Attributes:
        way: the fastest that agrees with the first.
        times: median seconds of every way that could be gone.
        plans: of the products of that way, in their measured algorithms; the caller's to use or
            close.
        launches: of that way.
        records: of the algorithms of all ways, by their keys.
    """

    way: str
    times: dict[str, float]
    plans: dict[Signature, Plan]
    launches: int
    records: list[tuple[str, dict[str, Any]]]


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
        self.launches.append(partial(_launch, self._plans[signature][0], operands))

    async def compute(self, nbytes: int, function: Callable[..., None], *args: Any) -> None:
        self.launches.append(partial(function, *args))


def _launch(plan: Plan, operands: Operands) -> None:
    """Bound late: the plan's algorithm may be another by then."""
    plan.bind(operands, aside=True)()


class Measurer:
    """Measures one step at a time.

    A measurement is never cancelled, since the device may be at work for it: it notices itself
    that the service stops, after its current sample or plan.

    Attributes:
        closing: whether the service stops.
    """

    def __init__(self, runtime: Runtime, seconds: float, *, eager: bool) -> None:
        """`seconds` for each comparison; `eager`: requests at work are not waited for."""
        self.closing = False
        self._runtime = runtime
        self._seconds = seconds
        self._eager = eager

    async def measure(self, key: str, bare: Tunable, layouts: Mapping[str, Layout]) -> Measured:
        """First the algorithms of every product, then the ways as wholes, of a step whose arrays
        lie so.

        Raises:
            OutOfMemory: it needs more memory than there is.
            Closing: the service stops.
        """
        step = await self._made_up(bare, layouts)
        plans: dict[Signature, tuple[Plan, Operands]] = {}
        until = time.perf_counter() + PATIENCE_SECONDS
        try:
            trials = await self._trials(key, step, plans)
            for plan, operands in plans.values():
                await self._choose_algorithm(plan, operands, until)
            samples = await self._race([trial.launches for trial in trials.values()], until)
            sampled = dict(zip(trials, samples, strict=True))
            way = await self._fastest(key, step, layouts, trials, sampled)
            records = [found for plan, _ in plans.values() if (found := plan.record()) is not None]
            times = {name: median(sampled[name]) for name in trials}
            used = {signature: plans.pop(signature)[0] for signature in set(trials[way].used)}
            return Measured(way, times, used, len(trials[way].launches), records)
        finally:
            for plan, _ in plans.values():
                plan.close()

    def complain(self, what: str, error: Exception) -> None:
        """Log it, with a traceback if the error is a fault of ours."""
        known = self._runtime.engine.explain(error) or error
        if isinstance(known, OutOfMemory):
            log.info("autotune: %s: %s", what, known.detail)
        else:
            log.warning("autotune: %s: %s", what, error, exc_info=error)

    async def _trials(
        self, key: str, step: Tunable, plans: dict[Signature, tuple[Plan, Operands]]
    ) -> dict[str, Trial]:
        """The ways that can be gone, each of which was gone once."""
        trials: dict[str, Trial] = {}
        first, *_ = step.ways
        for name, way in step.ways.items():
            if self.closing:
                raise Closing
            trial = Trial(self._runtime, plans)
            try:
                await way(trial, step)
                await self._runtime.engine.time(trial.launches)
            except Exception as error:
                if name == first:
                    raise
                self.complain(f"{key} cannot be done by {name}", error)
            else:
                trials[name] = trial
        return trials

    async def _choose_algorithm(self, plan: Plan, operands: Operands, until: float) -> None:
        """Of one product; the heuristic's own is the first."""
        engine = self._runtime.engine
        variants = await engine.aside(plan.variants, operands)
        if len(variants) < 2:
            return
        samples = await self._race([[variant] for variant in variants], until)
        for index in by_speed(samples):
            if not is_faster(samples[index], samples[0]):
                return
            try:
                await engine.aside(plan.take, index, operands)
                return
            except Disagreement as error:
                log.warning("autotune: an algorithm is not taken: %s", error)

    async def _fastest(
        self,
        key: str,
        step: Tunable,
        layouts: Mapping[str, Layout],
        trials: Mapping[str, Trial],
        sampled: Mapping[str, Sequence[float]],
    ) -> str:
        """The way that is faster than the first and agrees with it; else the first."""
        names = list(trials)
        first = names[0]
        for index in by_speed([sampled[name] for name in names]):
            name = names[index]
            if not is_faster(sampled[name], sampled[first]):
                break
            check = partial(self._disagreement, step, layouts, trials[first], trials[name])
            if (problem := await self._runtime.engine.aside(check)) is None:
                return name
            log.warning("autotune: %s is not done by %s: %s", key, name, problem)
        return first

    def _disagreement(
        self, step: Tunable, layouts: Mapping[str, Layout], first: Trial, other: Trial
    ) -> str | None:
        """Why the other way's results cannot be taken for the first's."""
        xp, outputs = self._runtime.engine.xp, step.outputs
        results = []
        for trial in (first, other):
            for array in outputs.values():
                poison(array)
            for launch in trial.launches:
                launch()
            results.append({name: array.copy() for name, array in outputs.items()})
        for name, expected in results[0].items():
            operand, *_ = layouts.values()
            allowed = tolerance(operand.dtype, layouts[name].dtype, step.options)
            apart = difference(xp, expected, results[1][name])
            if not apart <= allowed:
                return f"its {name}: expected the same within {allowed:.0e}, got {apart:.1e}"
        return None

    async def _race(
        self, candidates: Sequence[Sequence[Launch]], until: float
    ) -> list[list[float]]:
        """Seconds of every candidate, in turns, each warmed up first."""
        samples: list[list[float]] = [[] for _ in candidates]
        least, most = ROUNDS
        spent = 0.0
        for launches in candidates:
            await self._runtime.engine.time(launches)
        while len(samples[-1]) < most and (len(samples[-1]) < least or spent < self._seconds):
            for launches, times in zip(candidates, samples, strict=True):
                times.append(await self._sample(launches, until))
                spent += times[-1]
        return samples

    async def _sample(self, launches: Sequence[Launch], until: float) -> float:
        """Seconds of these launches: while no request is at work, if there is such a time before
        `until`, or if the mode is eager at once. Raises Closing.
        """
        runtime = self._runtime
        while not self._eager and time.perf_counter() < until and not self.closing:
            if runtime.scheduler.active:
                await asyncio.sleep(_IDLE_SECONDS)
                continue
            served = runtime.scheduler.served
            took = await runtime.engine.time(launches)
            if served == runtime.scheduler.served:
                return took
        if self.closing:
            raise Closing
        if not self._eager:
            await asyncio.sleep(_AMONG_SECONDS)
        return await runtime.engine.time(launches)

    async def _made_up(self, bare: Tunable, layouts: Mapping[str, Layout]) -> Tunable:
        """The step on arrays of random numbers. Raises OutOfMemory, Closing."""
        needed = ROOM * sum(map(_nbytes, layouts.values()))
        free = self._runtime.engine.memory().free
        if needed > free:
            raise OutOfMemory(f"{needed} bytes are needed to measure it, {free} are free")
        arrays = {}
        for seed, (name, layout) in enumerate(layouts.items()):
            arrays[name] = await self._random(layout, seed)
        step: Tunable = bare._replace(**arrays)
        return step

    async def _random(self, layout: Layout, seed: int) -> Array:
        """An array that lies so. Raises OutOfMemory, Closing."""
        engine = self._runtime.engine
        dtype = layout.numpy_dtype
        offset = layout.alignment // dtype.itemsize if layout.alignment < engine.alignment else 0
        flat = engine.empty((offset + _span(layout),), dtype)
        random = np.random.default_rng(seed)
        count = min(_NOISE, flat.size)
        if dtype == np.uint8:
            noise = random.integers(0, 256, count, np.uint8)
        else:
            noise = random.standard_normal(count, np.float32).astype(dtype)
        plain = flat.view(f"u{dtype.itemsize}")
        known = await engine.upload(noise.view(plain.dtype))
        done = 0
        while done < flat.size:
            if self.closing:
                raise Closing
            part = min(known.size, flat.size - done)
            await engine.call(
                part * dtype.itemsize, assign, plain[done : done + part], known[:part]
            )
            done += part
            known = plain[:done]
        return engine.view(flat, layout.shape, layout.strides, offset)


def _span(layout: Layout) -> int:
    """Elements from the first to the last."""
    return 1 + sum((n - 1) * s for n, s in zip(layout.shape, layout.strides, strict=True))


def _nbytes(layout: Layout) -> int:
    return _span(layout) * layout.numpy_dtype.itemsize


def by_speed(samples: Sequence[Sequence[float]]) -> list[int]:
    """The indices of candidates, that with the least median first."""
    medians = [median(times) for times in samples]
    return sorted(range(len(medians)), key=medians.__getitem__)


def is_faster(other: Sequence[float], than: Sequence[float]) -> bool:
    """Whether a candidate's median is less by more than `LEAST_GAIN`, and it was faster in so many
    of the turns that chance does not explain it: two standard deviations above half.
    """
    if median(other) > (1 - LEAST_GAIN) * median(than):
        return False
    turns = len(than)
    won = sum(mine < theirs for mine, theirs in zip(other, than, strict=True))
    return won >= turns / 2 + math.sqrt(turns)
