"""What every kind of user has: an address, a client on it, and locust to tell what came back.

They talk through the project's own client, which says what programs say to a service. Locust's HTTP
clients know no unix sockets, and would need the wire format written out once more.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from http.client import HTTPException
from itertools import count
from time import perf_counter
from typing import TypeVar

import numpy as np
from locust import User
from locust.exception import RescheduleTask
from matmuld_client import Client, MatmuldError

T = TypeVar("T")

CHECKED: Counter[str] = Counter()
"""Answers that were compared with what they must be, by the kind of user."""

_NUMBERS: defaultdict[str, count[int]] = defaultdict(count)


class Caller(User):
    """A user of one of the addresses in locust's host, which has commas between them."""

    abstract = True

    def on_start(self) -> None:
        self.kind = type(self).__name__
        self.number = next(_NUMBERS[self.kind])
        addresses = (self.environment.host or "").split(",")
        self.address = addresses[self.number % len(addresses)]
        self.rng = np.random.default_rng([len(self.kind), self.number])
        self.client = Client(self.address)

    def on_stop(self) -> None:
        self.client.close()

    def ask(self, what: str, call: Callable[[], T], check: Callable[[T], None] | None = None) -> T:
        """The answer, which `check` may object to. What is wrong is told, and ends the task."""
        began = perf_counter()
        error: Exception | None = None
        try:
            answer = call()
        except (MatmuldError, HTTPException, OSError) as failed:
            error = failed
        seconds = perf_counter() - began
        if error is None and check is not None:
            CHECKED[self.kind] += 1
            try:
                check(answer)
            except AssertionError as wrong:
                error = wrong
        self.environment.events.request.fire(
            request_type=self.address.partition(":")[0].replace("http", "tcp"),
            name=f"{self.kind}: {what}",
            response_time=seconds * 1e3,
            response_length=0,
            exception=error,
        )
        if error is not None:
            raise RescheduleTask from error
        return answer
