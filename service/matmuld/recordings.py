"""Steps that repeat: their launches, bound once to memory of their own and started all at once.

What a step does depends on its header alone. When a header comes for the second time its launches
are kept; from then on the payloads are copied to where these read them, and nothing else is looked
at again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic, perf_counter
from typing import Any

import numpy as np
from matmuld_client.wire import Buffer, octets, pack, payload_head
from msgpack import packb

from .calls import Call, Chooser, Reply, Results, Runtime, Step, Timing, leaves_of
from .engine.epilogs import Epilog
from .engine.protocol import Array, Engine, Launch, Operands, Plan
from .engine.signature import Options
from .memory.tensors import Resident
from .operands import Operand
from .pool import Entry, PlanPool
from .schemas import Into

JOIN_BYTES = 1 << 16
"""Replies up to this size are copied into one piece before they go out."""

CAPTURED_AT = 4
"""The repetition with which the launches of a recording become one."""


class Recordings:
    """All recordings, at most `limit` bytes of them and half of that each; the least recently used
    go first.
    """

    def __init__(self, pool: PlanPool, tuner: Chooser, limit: int) -> None:
        self.pool = pool
        self.tuner = tuner
        self.nbytes = 0
        self._limit = limit
        self._kept: OrderedDict[Recording, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def has_room(self, recording: Recording) -> bool:
        return 2 * recording.nbytes <= self._limit

    def add(self, recording: Recording) -> None:
        self._kept[recording] = None
        self.nbytes += recording.nbytes
        while self.nbytes > self._limit:
            next(iter(self._kept)).close()

    def touch(self, recording: Recording) -> None:
        self._kept.move_to_end(recording)

    def drop(self, recording: Recording) -> None:
        del self._kept[recording]
        self.nbytes -= recording.nbytes

    def clear(self) -> None:
        for recording in list(self._kept):
            recording.close()


class Recording:
    """What a step does, to be done again on other payloads.

    All that it starts is in the device's order, so it can be started again before its last results
    are delivered. It is closed when a tensor that it reads is freed or replaced.
    """

    def __init__(self, engine: Engine, recordings: Recordings) -> None:
        self.nbytes = 0
        self.closed = False
        self._engine = engine
        self._recordings = recordings
        self._replays = 0
        self._generation = recordings.tuner.generation
        self._length = 0
        self._frames: list[tuple[int, int, bytes]] = []
        self._spans: list[tuple[int, int]] = []
        self._sizes: list[int] = []
        self._fills: list[tuple[int, Callable[[memoryview], None]]] = []
        self._launches: list[Launch] = []
        self._entries: list[Entry] = []
        self._residents: Sequence[Resident] = ()
        self._results: Results = {}
        self._held_results = False
        self._targets: list[Into] = []
        self._values: list[Array] = []
        self._head = b""
        self._parts: list[Buffer] = []

    def fill(self, index: int, take: Callable[[memoryview], None]) -> None:
        """Every time `take` is given the payload of that index."""
        self._fills.append((index, take))

    def run(self, launch: Launch, entry: Entry | None = None) -> None:
        """Every time there is this launch, with the plan of `entry`."""
        self._launches.append(launch)
        if entry is not None:
            self._entries.append(entry)

    def complete(
        self,
        payloads: Sequence[memoryview],
        residents: Sequence[Resident],
        targets: Sequence[Resident],
        results: Results,
        head: bytes,
    ) -> None:
        """`residents` are read, `targets` written; `head`: the header of the reply, if nothing but
        payloads comes back.
        """
        leaves = list(leaves_of(results))
        self._results = results
        self._values = [leaf.value for leaf in leaves if leaf.placement == "payload"]
        self._held_results = any(leaf.placement != "payload" for leaf in leaves)
        self._targets = [leaf.placement for leaf in leaves if isinstance(leaf.placement, Into)]
        self._head = head
        if self._engine.xp is np:
            self._parts = pack(head, list(map(octets, self._values)))
        for payload in payloads:
            frame = payload_head(len(payload))
            start = self._length + len(frame)
            self._frames.append((self._length, start, frame))
            self._length = start + len(payload)
            self._spans.append((start, self._length))
        self._sizes = list(map(len, payloads))
        self._residents = tuple(set(residents))
        for readers in [part.readers for part in residents] + [e.readers for e in self._entries]:
            readers.add(self)
        for target in targets:
            target.writers.add(self)
        self._recordings.add(self)

    async def answer(self, body: memoryview, end: int, timing: Timing) -> list[Buffer] | None:
        """The parts of the reply to a body whose header ends at `end`, if nothing but payloads
        comes back; None if it must be done step by step.
        """
        if not self._head or len(body) - end != self._length:
            return None
        for start, stop, frame in self._frames:
            if body[end + start : end + stop] != frame:
                return None
        payloads = [body[end + start : end + stop] for start, stop in self._spans]
        if not self._start(payloads, timing):
            return None
        if self._parts:
            return [b"".join(self._parts)]  # now, for the next repetition writes there again
        began = perf_counter()
        arrays, copying = await self._engine.download(self._values)
        timing.copy += copying
        timing.compute += perf_counter() - began - copying
        return pack(self._head, list(map(octets, arrays)))

    async def replay(self, call: Call) -> Reply | None:
        """The reply to `call` if results are to be held; None if it must be done step by step."""
        async with call.writing(self._targets):
            same = [len(payload) for payload in call.payloads] == self._sizes
            if not self._held_results or not same or not self._start(call.payloads, call.timing):
                return None
            return await call.deliver(fresh(self._engine, self._results))

    def _start(self, payloads: Sequence[memoryview], timing: Timing) -> bool:
        """Start everything, unless a tensor has expired, a plan is in use or gone, or the payloads
        are not as they were.
        """
        began, now = perf_counter(), monotonic()
        if self.closed:
            return False
        if self._generation != self._recordings.tuner.generation:
            self.close()
            return False
        for entry in self._entries:
            if entry.in_use:
                return False
        for resident in self._residents:
            if resident.expires_at <= now:
                return False
            resident.touch(now)
        self._recordings.touch(self)
        for entry in self._entries:
            self._recordings.pool.touch(entry)
        self._replays += 1
        if self._replays == CAPTURED_AT and len(self._launches) > 1:
            self._launches = [self._engine.capture(self._launches)]
        for index, take in self._fills:
            take(payloads[index])
        self._engine.start(self._launches)
        timing.compute = perf_counter() - began
        return True

    def close(self) -> None:
        """Give up what is held; closing twice is nothing."""
        if not self.closed:
            self.closed = True
            self._recordings.drop(self)
            self._fills, self._launches, self._entries = [], [], []
            self._results, self._values, self._parts, self._residents = {}, [], [], ()


class Recorder(Call):
    """A call that leaves a recording with its step, if what it does can be repeated."""

    def __init__(self, recordings: Recordings, runtime: Runtime, *args: Any) -> None:
        super().__init__(runtime, *args)
        self._recordings = recordings
        self._recording = Recording(self.engine, recordings)
        self._possible = True
        self._plans: list[tuple[Entry, Plan]] = []

    async def perform(self, step: Step) -> Reply:
        self._step = step
        return await super().perform(step)

    def empty(self, shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
        array = super().empty(shape, dtype)
        self._recording.nbytes += array.nbytes
        return array

    async def load(self, operand: Operand) -> Array:
        if operand.payload is None:
            return await super().load(operand)
        data = self.payloads[operand.payload]
        flat = await self.engine.upload(np.frombuffer(data, operand.dtype))
        self._recording.nbytes += flat.nbytes
        self._recording.fill(operand.payload, self.engine.intake(flat))
        return operand.arrange(self.engine, flat)

    async def run(self, operands: Operands, epilog: Epilog, options: Options) -> None:
        await super().run(operands, epilog, options)
        entry = self._pool.peek(self._signatures[self._products - 1])
        if entry is None or entry.plan is None or not entry.plan.brief:
            self._possible = False
        else:
            used = self.engine.memory().used
            self._recording.run(entry.plan.bind(operands), entry)
            self._plans.append((entry, entry.plan))
            self._recording.nbytes += max(self.engine.memory().used - used, 0)

    async def compute(self, nbytes: int, function: Callable[..., None], *args: Any) -> None:
        await super().compute(nbytes, function, *args)
        self._possible &= nbytes <= self.engine.brief_bytes
        self._recording.run(partial(function, *args))

    def target(self, into: Into) -> Resident:
        """What is accumulated in is another array each time."""
        self._possible &= (into.alpha, into.beta) == (1.0, 0.0)
        return super().target(into)

    async def deliver(self, results: Results) -> Reply:
        leaves = list(leaves_of(results))
        tapes = any(leaf.kind == "tape" for leaf in leaves)
        if not tapes and self._possible and self._fits(results):
            payloads_only = all(leaf.placement == "payload" for leaf in leaves)
            head = packb(self.header(results)) if payloads_only else b""
            residents = [resident for resident, _ in self._residents]
            places = [leaf.placement for leaf in leaves]
            targets = [self.target(place) for place in places if isinstance(place, Into)]
            self._recording.complete(self.payloads, residents, targets, results, head)
            self._step.recording = self._recording
            results = fresh(self.engine, results)
        return await super().deliver(results)

    def _fits(self, results: Results) -> bool:
        """Whether its memory is little, and what it has read and run is still what is held."""
        if not self._recordings.has_room(self._recording):
            return False
        payloads = [leaf.value for leaf in leaves_of(results) if leaf.placement == "payload"]
        if self.engine.xp is np and sum(value.nbytes for value in payloads) > JOIN_BYTES:
            return False
        if any(entry.plan is not plan for entry, plan in self._plans):
            return False
        return all(
            self.store.holds(resident) and resident.version == version
            for resident, version in self._residents
        )


def fresh(engine: Engine, results: Results) -> Results:
    """`results` with copies of those arrays that outlive this repetition: what is to be held, and
    on the CPU, where a payload is the array itself, all.
    """
    copied: Results = {}
    for name, result in results.items():
        if isinstance(result, list):
            copied[name] = [fresh(engine, part) for part in result]
        elif result.placement == "payload" and engine.xp is not np:
            copied[name] = result
        else:
            copied[name] = result.of(engine.duplicate(result.value))
    return copied
