"""What reads something over and over, and must stop when that goes."""

from __future__ import annotations

from typing import Protocol
from weakref import WeakSet


class Reader(Protocol):
    def close(self) -> None:
        """Read no more; closing twice is nothing."""


class Readers:
    """The readers of one thing, for as long as they live."""

    __slots__ = ("_readers",)

    def __init__(self) -> None:
        self._readers: WeakSet[Reader] | None = None

    def add(self, reader: Reader) -> None:
        if self._readers is None:
            self._readers = WeakSet()
        self._readers.add(reader)

    def close(self) -> None:
        """The thing goes."""
        for reader in list(self._readers or ()):
            reader.close()
