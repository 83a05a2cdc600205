"""Who may come in, who works, and whose turn is next."""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from time import monotonic
from types import TracebackType
from typing import Any, NamedTuple

from matmuld_client.errors import DeadlineExceeded, Overloaded

AGEING_SECONDS = 1.0
"""After so long in the queue, batch work counts as interactive."""
LONGEST_RETRY = 60
"""Seconds: more is never told to a caller, for nobody knows what will be then."""
_SMOOTHING = 0.2
"""Weight of the last interval between turns in their mean."""
_DOUBT = 2.0
"""By how much the queue may turn out to be faster than it was."""

PRIORITIES = ("interactive", "batch")


class Urgency(NamedTuple):
    """What a request says of its own.

    Attributes:
        priority: index into `PRIORITIES`.
        deadline: by the clock of `monotonic`, when it must be at work.
    """

    priority: int = 0
    deadline: float = math.inf


USUAL = Urgency()


class Place:
    """A request that has come in, for a ``with``: at the end it has gone, from wherever it was.

    Attributes:
        nbytes: of its body.
        working: whether it is at work.
    """

    __slots__ = ("_scheduler", "_waiter", "nbytes", "working")

    def __init__(self, scheduler: Scheduler, nbytes: int) -> None:
        self._scheduler = scheduler
        self._waiter: _Waiter | None = None
        self.nbytes = nbytes
        self.working = False

    def __enter__(self) -> Place:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        scheduler = self._scheduler
        if self.working:
            self.finish()
        elif self._waiter is not None:
            scheduler._forget(self._waiter)
        scheduler.admitted -= 1
        scheduler.nbytes -= self.nbytes

    def grow(self, nbytes: int) -> None:
        """Count more of a body whose length was not known. Raises Overloaded."""
        scheduler = self._scheduler
        scheduler._check_bytes(nbytes, scheduler.nbytes - self.nbytes)
        self.nbytes += nbytes
        scheduler.nbytes += nbytes

    def start(self, urgency: Urgency) -> bool:
        """Begin to work, if that is possible at once. Raises DeadlineExceeded."""
        scheduler = self._scheduler
        if urgency is not USUAL and scheduler.clock() >= urgency.deadline:
            raise self.late()
        if scheduler.working >= scheduler.limit:
            return False
        scheduler.working += 1
        self.working = True
        return True

    def queue(self, tenant: str, urgency: Urgency) -> asyncio.Future[bool]:
        """This request's turn: True once it is at work, False if its deadline has passed."""
        self._waiter = self._scheduler._enqueue(self, tenant, urgency)
        return self._waiter.turn

    def late(self) -> DeadlineExceeded:
        """What to raise when the deadline has passed before the work began."""
        self._scheduler.late += 1
        return DeadlineExceeded("the deadline passed before the work began; nothing was run")

    def finish(self) -> None:
        """Work no more; whoever is next begins."""
        self.working = False
        scheduler = self._scheduler
        scheduler.working -= 1
        if scheduler.waiting:
            scheduler._begin_next()


class _Waiter:
    """A request in the queue."""

    __slots__ = ("arrived", "number", "place", "tenant", "timer", "turn", "urgency")

    def __init__(
        self, place: Place, tenant: _Tenant, urgency: Urgency, number: int, arrived: float
    ) -> None:
        loop = asyncio.get_running_loop()
        self.place = place
        self.tenant = tenant
        self.urgency = urgency
        self.number = number
        self.arrived = arrived
        self.turn: asyncio.Future[bool] = loop.create_future()
        self.timer: asyncio.TimerHandle | None = None

    def tell(self, works: bool) -> None:
        if not self.turn.done():  # cancelled, and about to leave
            self.turn.set_result(works)


class _Tenant:
    """The queues of a tenant, by priority, and how much of the service it has had."""

    __slots__ = ("queues", "served", "weight")

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.served = 0.0
        self.queues: tuple[OrderedDict[int, _Waiter], ...] = (OrderedDict(), OrderedDict())


class Scheduler:
    """Lets requests in, up to a number and an amount of bytes; lets `limit` of them work at once;
    and gives turns to the others.

    Interactive requests go before batch ones, until these have waited for `AGEING_SECONDS`. Among
    equals the tenant goes first that has had least, by its weight, since the queue was last empty;
    and of one tenant the request that came first. For the event loop only.

    Attributes:
        limit: requests at work at most.
        active: requests of every kind that are being answered.
        served: requests of every kind that have come, since the start.
        admitted: those that had to be let in: they are read, wait, work, or are answered.
        nbytes: the bytes of their bodies.
        working: those at work.
        waiting: those in the queue; if there are any, `limit` are at work.
        refused: those that were not let in, since the start.
        late: those whose deadline could not be kept, since the start.
    """

    def __init__(
        self,
        limit: int = 64,
        queue_requests: int = 1024,
        queue_bytes: int = 1 << 30,
        weights: Mapping[str, float] | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.limit = limit
        self.clock = clock
        self.active = self.served = 0
        self.admitted = self.nbytes = self.working = self.waiting = 0
        self.refused = self.late = 0
        self._most = limit + queue_requests
        self._most_bytes = queue_bytes
        self._weights = weights or {}
        self._tenants: dict[str, _Tenant] = {}
        self._number = 0
        self._least = 0.0
        """What a tenant whose turn it was last had had; nobody counts as having had less."""
        self._turn_at = 0.0
        self._interval = 0.0
        """Mean seconds between turns while there was a queue."""

    def admit(self, nbytes: int) -> Place:
        """Let a request in with a body of `nbytes`. Raises Overloaded.

        A body that is larger than what all may have together is let in if there is no other.
        """
        if self.admitted >= self._most:
            raise self._overloaded(f"{self.admitted} requests are being served, or wait")
        if self.nbytes + nbytes > self._most_bytes:
            self._check_bytes(nbytes, self.nbytes)
        self.admitted += 1
        self.nbytes += nbytes
        return Place(self, nbytes)

    def _check_bytes(self, nbytes: int, others: int) -> None:
        if nbytes and others and self.nbytes + nbytes > self._most_bytes:
            raise self._overloaded(f"{self.nbytes} bytes of requests are being served, or wait")

    def _overloaded(self, why: str) -> Overloaded:
        self.refused += 1
        seconds = math.ceil(self.waiting * self._pace())
        return Overloaded(f"{why}; try later", retry_after=min(max(seconds, 1), LONGEST_RETRY))

    def foresee(self, tenant: str, urgency: Urgency) -> None:
        """Raise DeadlineExceeded if `urgency` cannot be met: if what is before such a request takes
        too long even at twice the recent pace.
        """
        queues = self._tenants[tenant].queues if tenant in self._tenants else ()
        before = sum(map(len, queues[: urgency.priority + 1]))
        seconds = before * self._pace()
        if seconds / _DOUBT > urgency.deadline - self.clock():
            self.late += 1
            raise DeadlineExceeded(
                f"the deadline cannot be kept: {before} requests are before it, which takes about "
                f"{seconds:.3f} s"
            )

    def _pace(self) -> float:
        """Seconds between turns: the mean, or the present wait if that is longer."""
        if not self.waiting:
            return self._interval
        return max(self._interval, self.clock() - self._turn_at)

    def info(self) -> dict[str, int]:
        """Counters."""
        return {
            "admitted": self.admitted,
            "nbytes": self.nbytes,
            "working": self.working,
            "waiting": self.waiting,
            "refused": self.refused,
            "late": self.late,
        }

    def _enqueue(self, place: Place, name: str, urgency: Urgency) -> _Waiter:
        now = self.clock()
        if not self.waiting:
            self._turn_at = now
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = _Tenant(self._weights.get(name, 1.0))
        self._number += 1
        waiter = _Waiter(place, tenant, urgency, self._number, now)
        if urgency.deadline < math.inf:
            loop = asyncio.get_running_loop()
            waiter.timer = loop.call_later(urgency.deadline - now, self._expire, waiter)
        tenant.queues[urgency.priority][waiter.number] = waiter
        self.waiting += 1
        return waiter

    def _expire(self, waiter: _Waiter) -> None:
        self._forget(waiter)
        waiter.tell(False)

    def _forget(self, waiter: _Waiter) -> None:
        """Take a request out of the queue, if it is there."""
        queue = waiter.tenant.queues[waiter.urgency.priority]
        if queue.pop(waiter.number, None) is None:
            return
        self.waiting -= 1
        if waiter.timer is not None:
            waiter.timer.cancel()
        if not self.waiting:
            self._tenants.clear()
            self._least = 0.0

    def _begin_next(self) -> None:
        """Give the next turn, to whoever is not too late for it."""
        now = self.clock()
        self._interval += (now - self._turn_at - self._interval) * _SMOOTHING
        self._turn_at = now
        while self.waiting:
            waiter = min(self._heads(), key=lambda head: self._rank(head, now))
            tenant = waiter.tenant
            if now >= waiter.urgency.deadline:
                self._expire(waiter)
                continue
            self._least = max(tenant.served, self._least)
            tenant.served = self._least + 1 / tenant.weight
            self._forget(waiter)
            self.working += 1
            waiter.place.working = True
            waiter.tell(True)
            return

    def _heads(self) -> Iterator[_Waiter]:
        """The first of every queue."""
        for tenant in self._tenants.values():
            for queue in tenant.queues:
                if queue:
                    yield next(iter(queue.values()))

    def _rank(self, waiter: _Waiter, now: float) -> tuple[Any, ...]:
        """The smallest is next."""
        batch = waiter.urgency.priority > 0 and now - waiter.arrived < AGEING_SECONDS
        return batch, max(waiter.tenant.served, self._least), waiter.number
