"""Which way a step is done: the first until another is known to be faster."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from .calls import Runtime, Tunable
from .engine.signature import Layout
from .measuring import Closing, Measurer
from .settings import Mode

LIMIT = 1 << 13
"""Steps whose choice is remembered."""
SHOWN = 256
"""Of these, in a list."""
_DETAILS = ("activation", "kind", "epilog")
"""Fields of steps, beside arrays and options, that are part of what is chosen for."""


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
        self._forced = forced
        self._choices: OrderedDict[str, Choice] = OrderedDict()
        self._pending: OrderedDict[str, Choice] = OrderedDict()
        self._awaited = asyncio.Event()
        self._measuring = asyncio.Lock()
        self._measurer = Measurer(runtime, seconds, eager=mode == "eager")
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

    def stop(self) -> None:
        """Measure no more; who waits for a measurement goes the way that there is."""
        self._measurer.closing = True
        self._awaited.set()

    async def close(self) -> None:
        """Stop; all that measuring held is free on return."""
        self.stop()
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
        while not self._measurer.closing:
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
                self._measurer.complain(f"{choice.key} stays as it is", error)
            finally:
                self.stats.seconds += time.perf_counter() - began
            choice.settled = True

    async def _measure(self, choice: Choice) -> None:
        """Go the way that is found; its plans, whose algorithms are measured, are used from now
        on.
        """
        found = await self._measurer.measure(choice.key, choice.step, choice.layouts)
        choice.times = found.times
        self._change(choice, found.way)
        seconds = found.times[found.way] if found.launches == 1 else None
        for signature, plan in found.plans.items():
            self._runtime.pool.adopt(signature, plan, seconds)
        await asyncio.to_thread(self._keep, choice, found.records)

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
