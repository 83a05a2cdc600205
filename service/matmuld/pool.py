"""The plan pool: signature → plan, planned once however many ask at once, used by one at a time."""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from time import perf_counter
from types import TracebackType
from typing import Any

from .engine.protocol import Engine, Operands, Plan
from .engine.signature import Signature
from .readers import Readers


@dataclass(slots=True)
class Stats:
    """What the pool has done since the start."""

    hits: int = 0
    misses: int = 0
    planned: int = 0
    failed: int = 0
    evicted: int = 0
    planning_seconds: float = 0.0


@dataclass(slots=True, eq=False)
class Entry:
    """A signature's place in the pool.

    Attributes:
        owner: the tenant who was the first to need it, none yet if it is empty; all tenants use it.
        plan: None while it is being made, and after it was freed.
        in_use: whether somebody has the plan; whoever gives it back hands it to the first waiter.
        successor: what is to take the plan's place when it comes back.
        seconds: what a run takes on the device, if that was measured.
        readers: what launches the plan without a lease; closed before the plan is.
    """

    id: str
    signature: Signature
    owner: str
    plan: Plan | None = None
    in_use: bool = True
    waiters: deque[asyncio.Future[None]] = field(default_factory=deque)
    hits: int = 0
    planning_seconds: float = 0.0
    successor: Plan | None = None
    seconds: float | None = None
    readers: Readers = field(default_factory=Readers)

    @property
    def idle(self) -> bool:
        return not self.in_use and not self.waiters


class Lease:
    """An exclusive use of a plan, as an async context manager."""

    __slots__ = ("_entry", "_operands", "_owner", "_pool", "_signature")

    def __init__(
        self, pool: PlanPool, signature: Signature, operands: Operands, owner: str
    ) -> None:
        self._pool = pool
        self._signature = signature
        self._operands = operands
        self._owner = owner

    async def __aenter__(self) -> Plan:
        pool = self._pool
        entry = self._entry = pool.find(self._signature, self._operands, self._owner)
        if entry.in_use:
            await pool.wait(entry)
        else:
            entry.in_use = True
        assert entry.plan is not None
        return entry.plan

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if isinstance(error, Exception):
            self._pool.discard(self._entry)
        else:
            self._pool.give_back(self._entry)


class PlanPool:
    """Plans by signature, at most `capacity` of them and `byte_limit` bytes; the least recently
    used go first.

    For one event loop. A plan in use is neither shared nor evicted: if all are in use, the pool is
    over its limits until one comes back. Waiters for one plan are served in the order they came.
    """

    def __init__(self, engine: Engine, capacity: int, byte_limit: int) -> None:
        self.engine = engine
        self.stats = Stats()
        self._capacity = capacity
        self._byte_limit = byte_limit
        self._entries: dict[Signature, Entry] = {}
        self._order: OrderedDict[Entry, None] = OrderedDict()
        """Least recently used first; a signature takes too long to hash for every use."""
        self._nbytes = 0
        self._making: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        """The entries that are planned, least recently used first."""
        return iter([entry for entry in self._order if entry.plan is not None])

    @property
    def nbytes(self) -> int:
        """Bytes held by the plans."""
        return self._nbytes

    @property
    def leased(self) -> int:
        """Plans in use or being made."""
        return sum(entry.in_use for entry in self._entries.values())

    def lease(self, signature: Signature, operands: Operands, owner: str) -> Lease:
        """The plan of `signature` for an ``async with``; made on `operands` if there is none, for
        the tenant `owner`.

        Raises:
            OutOfMemory: planning needs more than there is.
        """
        return Lease(self, signature, operands, owner)

    def find(self, signature: Signature, operands: Operands, owner: str) -> Entry:
        """The place of `signature`; if it is new, its plan is being made."""
        entry = self._entries.get(signature)
        if entry is not None:
            entry.owner = entry.owner or owner
            self.touch(entry)
            return entry
        self.stats.misses += 1
        entry = self._add(Entry(secrets.token_hex(6), signature, owner))
        task = asyncio.ensure_future(self._make(entry, operands))
        self._making.add(task)
        task.add_done_callback(self._making.discard)
        return entry

    def _add(self, entry: Entry) -> Entry:
        self._entries[entry.signature] = entry
        self._order[entry] = None
        return entry

    def _remove(self, entry: Entry) -> None:
        del self._entries[entry.signature]
        del self._order[entry]

    def touch(self, entry: Entry) -> None:
        """Count a use of a plan that is held."""
        self.stats.hits += 1
        entry.hits += 1
        self._order.move_to_end(entry)

    def peek(self, signature: Signature) -> Entry | None:
        """The place of `signature`, if there is one; this is no use of it."""
        return self._entries.get(signature)

    def adopt(self, signature: Signature, plan: Plan, seconds: float | None) -> None:
        """Use a plan that was made elsewhere from now on, unless the one here is made alike; one in
        use is exchanged when it comes back. `seconds`: what a run takes, if that is known.
        """
        entry = self._entries.get(signature)
        if entry is None:
            entry = self._add(Entry(secrets.token_hex(6), signature, "", plan))
            entry.in_use = False
            self.stats.planned += 1
            self._nbytes += plan.nbytes
            self._trim()
        elif entry.plan is not None and entry.plan.record() == plan.record():
            plan.close()
        else:
            if entry.successor is not None:
                entry.successor.close()
            entry.successor = plan
            if entry.idle:
                self._succeed(entry)
        entry.seconds = seconds

    def _succeed(self, entry: Entry) -> None:
        """Exchange a plan that nobody uses."""
        assert entry.plan is not None
        assert entry.successor is not None
        self._nbytes += entry.successor.nbytes - entry.plan.nbytes
        entry.readers.close()
        entry.plan.close()
        entry.plan, entry.successor = entry.successor, None

    async def wait(self, entry: Entry) -> None:
        """Return once the plan is the caller's."""
        turn = asyncio.get_running_loop().create_future()
        entry.waiters.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self.give_back(entry)
            raise

    async def _make(self, entry: Entry, operands: Operands) -> None:
        """Plan. A failure reaches all who wait, and is not remembered."""
        began = perf_counter()
        try:
            entry.plan = await self.engine.plan(entry.signature, operands)
        except BaseException as error:
            self.stats.failed += 1
            self._remove(entry)
            if entry.successor is not None:
                entry.successor.close()
            for turn in entry.waiters:
                if not turn.done():
                    turn.set_exception(error)
            return
        entry.planning_seconds = perf_counter() - began
        self.stats.planned += 1
        self.stats.planning_seconds += entry.planning_seconds
        self._nbytes += entry.plan.nbytes
        self.give_back(entry)

    def give_back(self, entry: Entry) -> None:
        """The user of `entry` is done with it; the next in line has it."""
        if entry.successor is not None:
            self._succeed(entry)
        while entry.waiters:
            turn = entry.waiters.popleft()
            if not turn.done():
                turn.set_result(None)
                break
        else:
            entry.in_use = False
        if len(self._entries) > self._capacity or self._nbytes > self._byte_limit:
            self._trim()

    def discard(self, entry: Entry) -> None:
        """The plan of `entry` failed: it is freed, unless others wait for it."""
        self.give_back(entry)
        if entry.idle and self._entries.get(entry.signature) is entry:
            self._close(entry)

    def _trim(self) -> None:
        idle = (entry for entry in list(self._order) if entry.idle)
        while len(self._entries) > self._capacity or self._nbytes > self._byte_limit:
            entry = next(idle, None)
            if entry is None:
                return
            self._close(entry)

    def _close(self, entry: Entry) -> None:
        assert entry.plan is not None
        self._remove(entry)
        self._nbytes -= entry.plan.nbytes
        self.stats.evicted += 1
        entry.readers.close()
        entry.plan.close()
        entry.plan = None

    def evict(self, plan_id: str | None = None) -> int:
        """Free the idle plans, or the one of that id; how many were freed."""
        chosen = [
            entry for entry in self if entry.idle and (plan_id is None or entry.id == plan_id)
        ]
        for entry in chosen:
            self._close(entry)
        return len(chosen)

    def describe(self, entry: Entry) -> dict[str, Any]:
        """One planned entry, for people."""
        assert entry.plan is not None
        flops, seconds = entry.signature.flops, entry.seconds
        described = {
            "id": entry.id,
            "owner": entry.owner,
            **entry.signature.describe(),
            "path": entry.plan.path,
            "flops": flops,
            "hits": entry.hits,
            "nbytes": entry.plan.nbytes,
            "planning_ms": round(entry.planning_seconds * 1e3, 3),
        }
        if seconds is not None:
            described["tflops"] = round(flops / seconds / 1e12, 3)
        return described

    async def close(self) -> None:
        """Wait for planning in progress and free every plan."""
        await asyncio.gather(*self._making)
        self.evict()
