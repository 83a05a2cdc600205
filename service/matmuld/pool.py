"""The plan pool: signature → plan, planned once however many ask at once, used by one at a time."""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from time import perf_counter
from types import TracebackType
from typing import Any

from .engine.epilogs import Epilog
from .engine.protocol import Engine, Operands, Plan
from .engine.signature import Options, Signature


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
    """A signature's place in the pool. Its lock is held by whoever uses the plan."""

    id: str
    signature: Signature
    planning: asyncio.Task[Plan]
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    plan: Plan | None = None
    users: int = 0
    hits: int = 0
    planning_seconds: float = 0.0


class Lease:
    """An exclusive use of a plan, as an async context manager."""

    __slots__ = ("_entry", "_pool")

    def __init__(self, pool: PlanPool, entry: Entry) -> None:
        self._pool = pool
        self._entry = entry

    async def __aenter__(self) -> Plan:
        entry = self._entry
        entry.users += 1
        try:
            await entry.lock.acquire()
        except BaseException:
            self._pool.leave(entry)
            raise
        try:
            if entry.plan is None:
                return await asyncio.shield(entry.planning)
            return entry.plan
        except BaseException:
            entry.lock.release()
            self._pool.leave(entry)
            raise

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._entry.lock.release()
        self._pool.leave(self._entry)


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
        self._entries: OrderedDict[Signature, Entry] = OrderedDict()
        self._nbytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        """The entries that are planned, least recently used first."""
        return iter([entry for entry in self._entries.values() if entry.plan is not None])

    @property
    def nbytes(self) -> int:
        """Bytes held by the plans."""
        return self._nbytes

    @property
    def leased(self) -> int:
        """Plans in use or waited for."""
        return sum(1 for entry in self._entries.values() if entry.users)

    async def run(self, operands: Operands, epilog: Epilog, options: Options) -> None:
        """Start ``d = epilog(alpha · a @ b + beta · c)``, planned or found.

        Raises:
            OutOfMemory: planning needs more than there is.
        """
        engine = self.engine
        signature = Signature.of(operands, epilog, options, engine.alignment)
        async with self.lease(signature, operands) as plan:
            await engine.run(signature, plan, operands)

    def lease(self, signature: Signature, operands: Operands) -> Lease:
        """The plan of `signature`, for the time of an ``async with``; planned on `operands` if
        there is none.
        """
        entry = self._entries.get(signature)
        if entry is None:
            self.stats.misses += 1
            entry = self._insert(signature, operands)
        else:
            self.stats.hits += 1
            entry.hits += 1
            self._entries.move_to_end(signature)
        return Lease(self, entry)

    def _insert(self, signature: Signature, operands: Operands) -> Entry:
        planning = asyncio.ensure_future(self._plan(signature, operands))
        entry = Entry(secrets.token_hex(6), signature, planning)
        self._entries[signature] = entry
        planning.add_done_callback(lambda task: self._planned(entry, task))
        return entry

    async def _plan(self, signature: Signature, operands: Operands) -> Plan:
        began = perf_counter()
        plan = await self.engine.plan(signature, operands)
        seconds = perf_counter() - began
        self.stats.planned += 1
        self.stats.planning_seconds += seconds
        self._entries[signature].planning_seconds = seconds
        return plan

    def _planned(self, entry: Entry, task: asyncio.Task[Plan]) -> None:
        """Keep the plan; a failure is forgotten, so that a later request plans again."""
        if task.cancelled() or task.exception() is not None:
            self.stats.failed += 1
            self._entries.pop(entry.signature, None)
            return
        entry.plan = task.result()
        self._nbytes += entry.plan.nbytes
        self._trim()

    def leave(self, entry: Entry) -> None:
        """A user of `entry` is done with it."""
        entry.users -= 1
        if len(self._entries) > self._capacity or self._nbytes > self._byte_limit:
            self._trim()

    def _trim(self) -> None:
        idle = (entry for entry in list(self._entries.values()) if not entry.users and entry.plan)
        while len(self._entries) > self._capacity or self._nbytes > self._byte_limit:
            entry = next(idle, None)
            if entry is None:
                return
            self._close(entry)

    def _close(self, entry: Entry) -> None:
        assert entry.plan is not None
        del self._entries[entry.signature]
        self._nbytes -= entry.plan.nbytes
        self.stats.evicted += 1
        entry.plan.close()

    def evict(self, plan_id: str | None = None) -> int:
        """Free the idle plans, or the one of that id; how many were freed."""
        chosen = [
            entry for entry in self if not entry.users and (plan_id is None or entry.id == plan_id)
        ]
        for entry in chosen:
            self._close(entry)
        return len(chosen)

    def describe(self, entry: Entry) -> dict[str, Any]:
        """One planned entry, for people."""
        assert entry.plan is not None
        return {
            "id": entry.id,
            **entry.signature.describe(),
            "path": entry.plan.path,
            "flops": entry.signature.flops,
            "hits": entry.hits,
            "nbytes": entry.plan.nbytes,
            "planning_ms": round(entry.planning_seconds * 1e3, 3),
        }

    async def close(self) -> None:
        """Wait for planning in progress and free every plan."""
        pending = [entry.planning for entry in self._entries.values()]
        await asyncio.gather(*pending, return_exceptions=True)
        self.evict()
