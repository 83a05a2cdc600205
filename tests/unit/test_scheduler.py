"""The scheduler alone: bounds, order, ageing, shares, deadlines, and that nobody is forgotten."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matmuld.scheduler import AGEING_SECONDS, LONGEST_RETRY, USUAL, Place, Scheduler, Urgency
from matmuld_client.errors import DeadlineExceeded, Overloaded

BATCH = Urgency(priority=1)


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Queue:
    """A scheduler of one request at a time, and requests whose turns are noted by name."""

    def __init__(self, **options: Any) -> None:
        self.clock = Clock()
        self.scheduler = Scheduler(1, clock=self.clock, **options)
        self.order: list[str] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._first = self.scheduler.admit(0)
        assert self._first.start(USUAL)

    async def add(self, name: str, tenant: str = "t", urgency: Urgency = USUAL) -> None:
        """A request that waits; its work takes one second."""

        async def request() -> None:
            with self.scheduler.admit(0) as place:
                assert not place.start(urgency)
                if await place.queue(tenant, urgency):
                    self.order.append(name)
                    self.clock.now += 1

        self._tasks.append(asyncio.create_task(request()))
        await asyncio.sleep(0)

    async def drain(self) -> list[str]:
        """The names in the order of their turns."""
        with self._first:
            pass
        await asyncio.gather(*self._tasks)
        assert_empty(self.scheduler)
        return self.order


def assert_empty(scheduler: Scheduler) -> None:
    info = scheduler.info()
    assert (info["admitted"], info["nbytes"], info["working"], info["waiting"]) == (0, 0, 0, 0)
    assert not scheduler._tenants


def on_loop(body: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await body()

    asyncio.run(main())


def test_at_most_so_many_work_at_once_and_the_rest_in_turn() -> None:
    async def body() -> None:
        scheduler = Scheduler(3, queue_requests=100)
        most = 0

        async def request() -> None:
            nonlocal most
            with scheduler.admit(1) as place:
                assert place.start(USUAL) or await place.queue("t", USUAL)
                most = max(most, scheduler.working)
                await asyncio.sleep(0)

        await asyncio.gather(*(request() for _ in range(100)))
        assert most == 3
        assert_empty(scheduler)

    on_loop(body)


def test_no_more_come_in_than_work_and_queue() -> None:
    scheduler = Scheduler(2, queue_requests=3)
    places = [scheduler.admit(0) for _ in range(5)]
    with pytest.raises(Overloaded, match="5 requests are being served") as caught:
        scheduler.admit(0)
    assert caught.value.retry_after == 1
    with places.pop():
        pass
    places.append(scheduler.admit(0))
    for place in places:
        with place:
            pass
    assert_empty(scheduler)
    assert scheduler.refused == 1


def test_bodies_are_counted_by_their_bytes_as_they_are_told_or_grow() -> None:
    scheduler = Scheduler(queue_bytes=100)
    with scheduler.admit(60), scheduler.admit(0) as grows:
        scheduler.admit(40).__exit__(None, None, None)
        with pytest.raises(Overloaded, match="60 bytes"):
            scheduler.admit(41)
        grows.grow(30)
        grows.grow(10)
        with pytest.raises(Overloaded, match="100 bytes"):
            grows.grow(1)
    assert_empty(scheduler)


def test_a_body_over_the_limit_comes_in_alone() -> None:
    scheduler = Scheduler(queue_bytes=100)
    with scheduler.admit(1000), pytest.raises(Overloaded):
        scheduler.admit(1)
    with scheduler.admit(0) as grows:
        grows.grow(60)
        grows.grow(60)
        with pytest.raises(Overloaded):
            scheduler.admit(1)
    assert_empty(scheduler)


def test_a_tenant_is_served_in_the_order_of_arrival() -> None:
    async def body() -> None:
        queue = Queue()
        for name in "abcdef":
            await queue.add(name)
        assert await queue.drain() == list("abcdef")

    on_loop(body)


def test_interactive_work_goes_before_batch_work_until_that_has_aged() -> None:
    async def body() -> None:
        queue = Queue()
        await queue.add("batch", urgency=BATCH)
        queue.clock.now += AGEING_SECONDS / 2
        await queue.add("first")
        await queue.add("second")
        assert await queue.drain() == ["first", "batch", "second"]

    on_loop(body)


def test_batch_work_gets_its_turn_whatever_comes_after_it() -> None:
    async def body() -> None:
        scheduler = Scheduler(1, queue_requests=10)
        turns: list[str] = []

        async def interactive() -> None:
            while "batch" not in turns:
                with scheduler.admit(0) as place:
                    assert place.start(USUAL) or await place.queue("t", USUAL)
                    turns.append("interactive")
                    await asyncio.sleep(0.02)

        async def batch() -> None:
            with scheduler.admit(0) as place:
                assert place.start(BATCH) or await place.queue("t", BATCH)
                turns.append("batch")

        callers = [asyncio.create_task(interactive()) for _ in range(5)]
        await asyncio.sleep(0.05)
        await asyncio.wait_for(batch(), 2 * AGEING_SECONDS)
        assert turns.count("interactive") > AGEING_SECONDS / 0.02 / 4
        await asyncio.gather(*callers)
        assert_empty(scheduler)

    on_loop(body)


def test_tenants_share_by_weight_however_much_they_ask_for() -> None:
    async def body() -> None:
        queue = Queue(weights={"a": 1.0, "b": 1.0, "c": 2.0})
        for tenant, count in {"a": 60, "b": 20, "c": 40}.items():
            for _ in range(count):
                await queue.add(tenant, tenant)
        order = await queue.drain()
        for until in (8, 40, 80):
            served = Counter(order[:until])
            shares = {"a": until / 4, "b": until / 4, "c": until / 2}
            assert all(abs(served[name] - share) <= 1 for name, share in shares.items())
        assert set(order[80:]) == {"a"}

    on_loop(body)


def test_a_tenant_that_comes_late_has_saved_nothing_up() -> None:
    async def body() -> None:
        queue = Queue()
        for _ in range(20):
            await queue.add("old", "old")
        draining = asyncio.create_task(queue.drain())
        while len(queue.order) < 10:
            await asyncio.sleep(0)
        for _ in range(10):
            await queue.add("new", "new")
        order = await draining
        assert abs(Counter(order[11:21])["new"] - 5) <= 1

    on_loop(body)


def test_who_leaves_the_queue_is_not_given_a_turn() -> None:
    async def body() -> None:
        queue = Queue()
        await queue.add("a")
        await queue.add("b")
        await queue.add("c")
        queue._tasks[1].cancel()
        await asyncio.wait([queue._tasks.pop(1)])
        assert queue.scheduler.waiting == 2
        assert await queue.drain() == ["a", "c"]

    on_loop(body)


def test_a_turn_given_to_who_leaves_at_that_moment_is_passed_on() -> None:
    async def body() -> None:
        scheduler = Scheduler(1)
        works, leaves, follows = (scheduler.admit(0) for _ in range(3))
        assert works.start(USUAL)
        leaves.queue("t", USUAL)
        turn = follows.queue("t", USUAL)
        works.finish()
        assert (leaves.working, turn.done()) == (True, False)
        with leaves:
            pass
        assert await turn
        for place in (works, follows):
            with place:
                pass
        assert_empty(scheduler)

    on_loop(body)


def test_a_deadline_that_has_passed_is_told_before_the_work() -> None:
    scheduler = Scheduler(clock=Clock())
    with scheduler.admit(0) as place, pytest.raises(DeadlineExceeded, match="nothing was run"):
        place.start(Urgency(deadline=100.0))
    with scheduler.admit(0) as place:
        assert place.start(Urgency(deadline=100.1))
    assert scheduler.late == 1


def test_a_deadline_that_passes_in_the_queue_ends_the_waiting() -> None:
    async def body() -> None:
        scheduler = Scheduler(1)
        with scheduler.admit(0) as works, scheduler.admit(0) as waits:
            assert works.start(USUAL)
            deadline = Urgency(deadline=scheduler.clock() + 0.05)
            assert not await waits.queue("t", deadline)
            assert scheduler.waiting == 0
            assert scheduler.clock() >= deadline.deadline - 0.01
        assert_empty(scheduler)

    on_loop(body)


def test_a_turn_that_comes_after_the_deadline_goes_to_the_next() -> None:
    """Also if the loop was too busy to notice the deadline when it passed."""

    async def body() -> None:
        queue = Queue()
        await queue.add("late", urgency=Urgency(deadline=queue.clock() + 5))
        await queue.add("next")
        queue.clock.now += 6
        assert await queue.drain() == ["next"]

    on_loop(body)


async def paced(seconds: float, room: int = 10) -> Queue:
    """A queue that has lately had a turn every `seconds`, and has ten in it."""
    queue = Queue(queue_requests=room)
    place = queue._first
    for _ in range(100):
        with queue.scheduler.admit(0) as following:
            following.queue("t", USUAL)
            queue.clock.now += seconds
            place.__exit__(None, None, None)
            place, following = following, queue.scheduler.admit(0)
        place = following
        assert place.start(USUAL)
    queue._first = place
    for name in "abcdefghij":
        await queue.add(name)
    return queue


@pytest.mark.parametrize(("seconds", "told"), [(0.001, 1), (1.0, 10), (2.5, 25), (60.0, 60)])
def test_who_is_refused_is_told_when_the_queue_will_be_done(seconds: float, told: int) -> None:
    async def body() -> None:
        queue = await paced(seconds)
        with pytest.raises(Overloaded) as caught:
            queue.scheduler.admit(0)
        assert caught.value.retry_after == told <= LONGEST_RETRY
        await queue.drain()

    on_loop(body)


def test_a_deadline_that_cannot_be_kept_is_told_at_once() -> None:
    async def body() -> None:
        queue = await paced(1.0, room=11)
        now = queue.clock()
        queue.scheduler.foresee("t", Urgency(deadline=now + 5.1))
        queue.scheduler.foresee("another", Urgency(deadline=now + 0.1))
        with pytest.raises(DeadlineExceeded, match=r"10 requests are before it, .* about 10\.0"):
            queue.scheduler.foresee("t", Urgency(deadline=now + 4.9))
        await queue.add("batch", urgency=BATCH)
        queue.scheduler.foresee("t", Urgency(deadline=now + 5.1))
        await queue.drain()

    on_loop(body)


def test_nothing_is_foreseen_of_a_service_that_has_not_been_busy() -> None:
    scheduler = Scheduler(clock=Clock())
    scheduler.foresee("t", Urgency(deadline=100.001))
    assert scheduler.late == 0


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["come", "batch", "finish", "leave", "expire", "wait"]),
        st.integers(0, 2),
        st.integers(0, 40),
    ),
    max_size=80,
)


@given(EVENTS, st.integers(1, 4))
@settings(max_examples=200, deadline=None)
def test_whatever_happens_nobody_is_forgotten(
    events: list[tuple[str, int, int]], limit: int
) -> None:
    """As many work as may, whenever somebody waits; in the end everything is given back."""

    async def body() -> None:
        clock = Clock()
        scheduler = Scheduler(limit, queue_requests=20, queue_bytes=50, clock=clock)
        here: list[tuple[Place, asyncio.Future[bool] | None]] = []
        for event, tenant, number in events:
            clock.now += 0.3
            if event in ("come", "batch", "expire"):
                soon = clock.now + 1 if event == "expire" else math.inf
                urgency = Urgency(int(event == "batch"), soon)
                try:
                    place = scheduler.admit(number)
                except Overloaded:
                    continue
                turn = None
                if not place.start(urgency):
                    turn = place.queue(str(tenant), urgency)
                here.append((place, turn))
            elif here and event != "wait":
                place, _ = here[number % len(here)]
                if event == "leave" or place.working:
                    here.pop(number % len(here))
                    place.__exit__(None, None, None)
            working = sum(place.working for place, _ in here)
            waiting = sum(turn is not None and not turn.done() for _, turn in here)
            assert working == scheduler.working <= limit
            assert waiting == scheduler.waiting
            assert working == limit or not waiting
            assert scheduler.nbytes == sum(place.nbytes for place, _ in here)
            assert scheduler.admitted == len(here) <= limit + 20
        for place, _ in here:
            place.__exit__(None, None, None)
        assert_empty(scheduler)

    on_loop(body)
