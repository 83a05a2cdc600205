"""Which way a step is done, and by which algorithms: measured on operands made up for it.

A measurement has plans of its own, on the engine's planning stream, so that it holds none that a
request needs. While requests are at work it waits, for some time, and a sample that one has
disturbed does not count.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
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
from .settings import Mode

log = logging.getLogger("matmuld")

LEAST_GAIN = 0.01
"""By which part another must be faster than what there is, so that near-ties do not flap."""
ROUNDS = (5, 30)
"""Samples of each candidate, at least and at most."""
LIMIT = 1 << 13
"""Steps whose choice is remembered."""
SHOWN = 256
"""Of these, in a list."""
ROOM = 4
"""Times the memory of a step's operands must be free, for the temporaries of all its ways."""
PATIENCE_SECONDS = 5.0
"""That a measurement waits in all for requests to leave it time; then it is made among them."""
_IDLE_SECONDS = 0.002
_AMONG_SECONDS = 0.01
"""Between samples that are made among requests."""
_NOISE = 1_000_003
"""Different numbers in an operand that is made up; odd, so that rows are not alike."""
_DETAILS = ("activation", "kind", "epilog")
"""Fields of steps, beside arrays and options, that are part of what is chosen for."""


class Closing(Exception):
    """The service stops."""


@dataclass(slots=True, eq=False)
class Choice:
    """The way of one kind of step.

    Attributes:
        step: without its arrays.
        layouts: how its arrays lie, by field.
        names: of all its ways; the first is taken unless another is known to be better.
        settled: whether there is nothing to measure any more.
        times: median seconds of every way, if they were measured.
        opening: looks it up, and measures it if the mode is eager.
    """

    key: str
    step: Tunable
    layouts: dict[str, Layout]
    names: Sequence[str]
    settled: bool = False
    times: dict[str, float] = field(default_factory=dict)
    way: str = field(init=False)
    opening: asyncio.Task[None] = field(init=False)

    def __post_init__(self) -> None:
        self.way = self.names[0]

    def describe(self) -> dict[str, Any]:
        """For people."""
        fields = self.step._asdict()
        return {
            "step": type(self.step).__name__,
            **{name: str(fields[name]) for name in _DETAILS if name in fields},
            **self.step.options.describe(),
            "operands": {name: str(layout) for name, layout in self.layouts.items()},
            "way": self.way,
            "settled": self.settled,
            "median_us": {name: round(s * 1e6, 3) for name, s in self.times.items()},
        }


@dataclass(slots=True)
class Stats:
    """What the tuner has done since the start: choices that were measured, that the store
    remembered, that are not the first way, and that could not be measured.
    """

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
        self.launches.append(partial(_launch, self._plans[signature][0], operands))

    async def compute(self, nbytes: int, function: Callable[..., None], *args: Any) -> None:
        self.launches.append(partial(function, *args))


def _launch(plan: Plan, operands: Operands) -> None:
    """Bound late: the plan's algorithm may be another by then."""
    plan.bind(operands, aside=True)()


class Tuner:
    """Chooses the ways of steps, one measurement at a time.

    A measurement is never cancelled, since the device may be at work for it: it notices itself
    that the service stops, after its current sample or plan.

    Attributes:
        generation: counts changes; what was derived from older choices is to be derived again.
    """

    def __init__(
        self, runtime: Runtime, mode: Mode, seconds: float, forced: Sequence[str] = ()
    ) -> None:
        """`seconds` of measuring for each comparison; `forced` ways are taken where there are such,
        unmeasured.
        """
        self.generation = 0
        self.stats = Stats()
        self._runtime = runtime
        self._mode = mode
        self._seconds = seconds
        self._forced = forced
        self._choices: OrderedDict[str, Choice] = OrderedDict()
        self._pending: OrderedDict[str, Choice] = OrderedDict()
        self._awaited = asyncio.Event()
        self._measuring = asyncio.Lock()
        self._closing = False
        self._tasks: set[asyncio.Task[None]] = set()
        if mode == "lazy":
            self._start(self._work())

    def __len__(self) -> int:
        return len(self._choices)

    @property
    def pending(self) -> int:
        """Choices that wait to be measured."""
        return len(self._pending)

    def describe(self) -> list[dict[str, Any]]:
        """The choices that were used last, in that order."""
        return [choice.describe() for choice in list(self._choices.values())[-SHOWN:]]

    def info(self) -> dict[str, Any]:
        """How it works, and counters."""
        counts = {"choices": len(self._choices), "pending": self.pending}
        mode = {"mode": self._mode, "strategies": list(self._forced)}
        return {**mode, **asdict(self.stats), **counts}

    async def way(self, step: Tunable) -> str:
        """The name of the way to do `step` now. A new kind of step is looked up in the store, then
        measured as the mode says; unless its way is forced, or its result must never change.
        """
        forced = next((name for name in self._forced if name in step.ways), None)
        if forced is not None:
            return forced
        if self._mode == "off" or step.options.deterministic:
            return next(iter(step.ways))
        layouts, key = self._described(step)
        choice = self._choices.get(key)
        if choice is None:
            choice = self._add(key, step, layouts)
        else:
            self._choices.move_to_end(key)
        if not choice.settled:
            await asyncio.shield(choice.opening)
        return choice.way

    def _described(self, step: Tunable) -> tuple[dict[str, Layout], str]:
        fields = step._asdict()
        layout = self._runtime.engine.layout
        arrays = {
            name: layout(value) for name, value in fields.items() if hasattr(value, "strides")
        }
        words = [f"{name} {arrays[name]}" for name in arrays]
        words += [str(fields[name]) for name in _DETAILS if name in fields]
        return arrays, "; ".join([type(step).__name__, *words, str(step.options)])

    def _add(self, key: str, step: Tunable, layouts: dict[str, Layout]) -> Choice:
        bare = step._replace(**dict.fromkeys(layouts))
        choice = self._choices[key] = Choice(key, bare, layouts, list(step.ways))
        choice.opening = self._start(self._open(choice))
        if len(self._choices) > LIMIT:
            oldest, _ = self._choices.popitem(last=False)
            self._pending.pop(oldest, None)
        return choice

    def _start(self, work: Any) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """Measure no more; all that measuring held is free on return."""
        self._closing = True
        self._awaited.set()
        await asyncio.gather(*self._tasks)

    async def _open(self, choice: Choice) -> None:
        """Take what the store remembers; else measure now or put it in line."""
        if await self._recalled(choice):
            return
        if self._mode == "eager":
            await self._settle(choice)
        elif self._choices.get(choice.key) is choice:
            self._pending[choice.key] = choice
            self._awaited.set()

    async def _recalled(self, choice: Choice) -> bool:
        key, choices = choice.key, self._runtime.choices
        record = await asyncio.to_thread(choices.get, "strategy", key)
        if record is None:
            return False
        way, times = record["way"], record["candidates"]
        if way not in choice.names or way not in times:
            reason = f"its way: expected one of {', '.join(choice.names)}, got {way}"
            await asyncio.to_thread(choices.drop, "strategy", key, reason)
            return False
        choice.times = {name: us / 1e6 for name, us in times.items()}
        choice.settled = True
        self.stats.recalled += 1
        self._change(choice, way)
        return True

    async def _work(self) -> None:
        """Settle what is pending, in the order in which it came."""
        while not self._closing:
            if self._pending:
                key, choice = next(iter(self._pending.items()))
                await self._settle(choice)
                self._pending.pop(key, None)
            else:
                self._awaited.clear()
                await self._awaited.wait()

    async def _settle(self, choice: Choice) -> None:
        """Measure; if that fails, the choice stays as it is."""
        async with self._measuring:
            began = time.perf_counter()
            try:
                await self._measure(choice)
                self.stats.settled += 1
            except Closing:
                return
            except Exception as error:
                self.stats.failed += 1
                self._complain(f"{choice.key} stays as it is", error)
            finally:
                self.stats.seconds += time.perf_counter() - began
            choice.settled = True

    def _complain(self, what: str, error: Exception) -> None:
        """With a traceback if the error is a fault of ours."""
        known = self._runtime.engine.explain(error) or error
        if isinstance(known, OutOfMemory):
            log.info("autotune: %s: %s", what, known.detail)
        else:
            log.warning("autotune: %s: %s", what, error, exc_info=error)

    async def _measure(self, choice: Choice) -> None:
        """First the algorithms of every product, then the ways as wholes."""
        step = await self._made_up(choice)
        plans: dict[Signature, tuple[Plan, Operands]] = {}
        until = time.perf_counter() + PATIENCE_SECONDS
        try:
            trials = await self._trials(choice, step, plans)
            for plan, operands in plans.values():
                await self._choose_algorithm(plan, operands, until)
            samples = await self._race([trial.launches for trial in trials.values()], until)
            sampled = dict(zip(trials, samples, strict=True))
            way = await self._fastest(choice, step, trials, sampled)
            records = [found for plan, _ in plans.values() if (found := plan.record()) is not None]
            choice.times = {name: median(sampled[name]) for name in trials}
            self._change(choice, way)
            seconds = choice.times[way] if len(trials[way].launches) == 1 else None
            for signature in dict.fromkeys(trials[way].used):
                plan, _ = plans.pop(signature)
                self._runtime.pool.adopt(signature, plan, seconds)
        finally:
            for plan, _ in plans.values():
                plan.close()
        await asyncio.to_thread(self._keep, choice, records)

    async def _trials(
        self, choice: Choice, step: Tunable, plans: dict[Signature, tuple[Plan, Operands]]
    ) -> dict[str, Trial]:
        """The ways that can be gone, each of which was gone once."""
        trials: dict[str, Trial] = {}
        first, *_ = choice.names
        for name, way in step.ways.items():
            if self._closing:
                raise Closing
            trial = Trial(self._runtime, plans)
            try:
                await way(trial, step)
                await self._runtime.engine.time(trial.launches)
            except Exception as error:
                if name == first:
                    raise
                self._complain(f"{choice.key} cannot be done by {name}", error)
            else:
                trials[name] = trial
        return trials

    def _keep(self, choice: Choice, records: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
        choices = self._runtime.choices
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
        choice: Choice,
        step: Tunable,
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
            check = partial(self._disagreement, choice, step, trials[first], trials[name])
            if (problem := await self._runtime.engine.aside(check)) is None:
                return name
            log.warning("autotune: %s is not done by %s: %s", choice.key, name, problem)
        return first

    def _disagreement(
        self, choice: Choice, step: Tunable, first: Trial, other: Trial
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
            operand, *_ = choice.layouts.values()
            allowed = tolerance(operand.dtype, choice.layouts[name].dtype, step.options)
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
        while self._mode != "eager" and time.perf_counter() < until and not self._closing:
            if runtime.active:
                await asyncio.sleep(_IDLE_SECONDS)
                continue
            served = runtime.served
            took = await runtime.engine.time(launches)
            if served == runtime.served:
                return took
        if self._closing:
            raise Closing
        if self._mode != "eager":
            await asyncio.sleep(_AMONG_SECONDS)
        return await runtime.engine.time(launches)

    async def _made_up(self, choice: Choice) -> Tunable:
        """The step on arrays of random numbers. Raises OutOfMemory, Closing."""
        layouts = choice.layouts
        needed = ROOM * sum(map(_nbytes, layouts.values()))
        free = self._runtime.engine.memory().free
        if needed > free:
            raise OutOfMemory(f"{needed} bytes are needed to measure it, {free} are free")
        arrays = {}
        for seed, (name, layout) in enumerate(layouts.items()):
            arrays[name] = await self._random(layout, seed)
        step: Tunable = choice.step._replace(**arrays)
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
            if self._closing:
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
