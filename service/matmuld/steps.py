"""Steps by the bytes of their headers: most requests repeat one word for word."""

from __future__ import annotations

from collections import OrderedDict

from .calls import Step

Key = tuple[str, str, bytes]


class Steps:
    """Headers that were checked before, with what came of it; the least recently used go first.

    No MessagePack object is the beginning of another, so a body that begins with the bytes of a
    known header has that header. Where it ends is guessed from the length of the body.
    """

    LIMIT = 1 << 10
    LONGEST = 1 << 15
    BYTES = 1 << 22
    """Of all headers together, which bounds what their steps take, too."""

    def __init__(self) -> None:
        self._known: OrderedDict[Key, Step] = OrderedDict()
        self._ends: dict[int, int] = {}
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._known)

    def find(self, operation: str, tenant: str, body: memoryview) -> tuple[Step, int] | None:
        """The step of a body whose header is known, and where the header ends."""
        end = self._ends.get(len(body))
        if end is None:
            return None
        key = operation, tenant, bytes(body[:end])
        step = self._known.get(key)
        if step is None:
            return None
        self._known.move_to_end(key)
        return step, end

    def keep(self, operation: str, tenant: str, body: memoryview, end: int, step: Step) -> None:
        """Remember the step of a header that ends at `end`, if it may be run again."""
        if not step.repeatable or end > self.LONGEST:
            return
        if len(self._ends) >= self.LIMIT:
            self._ends.clear()
        self._ends[len(body)] = end
        key = operation, tenant, bytes(body[:end])
        if key not in self._known:
            self.nbytes += end
        self._known[key] = step
        while len(self._known) > self.LIMIT or self.nbytes > self.BYTES:
            (_, _, header), _ = self._known.popitem(last=False)
            self.nbytes -= len(header)
