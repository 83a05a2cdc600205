"""A weight that one user replaces while others use it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tests.reference import Host

PERIOD = 17
"""Versions until the contents come again."""


@dataclass
class Shared:
    """A square weight of small integers, so that products with integers are exact.

    Users are greenlets of one thread: `begun` and `done` are what has happened, in its order.

    Attributes:
        handle: in the service.
        begun: the version that was sent last, whether or not it has arrived.
        done: the version that the service acknowledged last.
    """

    size: int
    handle: str = ""
    begun: int = 0
    done: int = 0

    def check(self, got: Host, since: int, expected: Callable[[Host], Host]) -> None:
        """Raise AssertionError unless `got` is that of one whole version, none that was replaced
        before the request was sent, when `since` was there.
        """
        last = self.begun
        for version in range(last, max(last - PERIOD, -1), -1):
            if np.array_equal(got, expected(contents(self.size, version))):
                assert version >= since, f"expected version {since} to {last}, got {version}"
                return
        raise AssertionError(f"expected a whole version, {since} to {last}, got a mixture")


SHARED: list[Shared] = []
"""All that there are."""


def contents(size: int, version: int) -> Host:
    """Integers between -8 and 8; every version of a period is different in every row."""
    rows = np.arange(size)[:, None] * 7 + np.arange(size) * 3
    return np.asarray((rows + version * 5) % PERIOD - 8)
