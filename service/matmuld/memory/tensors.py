"""The tensors, auxiliary data and tapes that the service holds."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Literal

from matmuld_client.errors import OutOfMemory

from ..engine.protocol import Array
from .handles import HandleMint

Kind = Literal["tensor", "relu_aux", "gelu_aux", "tape"]

FOREVER = float("inf")


@dataclass(slots=True, eq=False)
class Resident:
    """Something held by handle.

    Contents are never written in place: a replacement is a new value, so whoever has taken the
    value keeps a whole version. `lock` is for those who read, compute and replace.

    Attributes:
        value: an array; of a tape, what its kind keeps.
        rows: of aux data, the rows that are not padding.
        weight: of aux data, the handle of the weight of the layer that it belongs to, if that was
            resident.
    """

    handle: str
    tenant: str
    kind: Kind
    value: Any
    nbytes: int
    pinned: bool
    ttl: float
    expires_at: float
    rows: int | None = None
    weight: str | None = None
    version: int = 1
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def touch(self) -> None:
        """Start the time to live again."""
        if not self.pinned:
            self.expires_at = monotonic() + self.ttl

    def pin(self, pinned: bool) -> None:
        self.pinned = pinned
        self.expires_at = FOREVER if pinned else monotonic() + self.ttl


class TensorStore:
    """Residents by handle, within a quota of bytes for each tenant."""

    def __init__(self, mint: HandleMint, quota: int, ttl: float) -> None:
        self.mint = mint
        self.quota = quota
        self._ttl = ttl
        self._residents: dict[str, Resident] = {}
        self._nbytes: dict[str, int] = {}
        self.expired = 0

    def __len__(self) -> int:
        return len(self._residents)

    @property
    def nbytes(self) -> int:
        return sum(self._nbytes.values())

    def of(self, tenant: str) -> Iterator[Resident]:
        """What `tenant` holds, oldest first."""
        self.sweep()
        return iter([r for r in self._residents.values() if r.tenant == tenant])

    def get(self, tenant: str, handle: str, operand: str | None = None) -> Resident:
        """The resident of that handle, its time to live started again.

        Raises:
            UnknownHandle: it was never issued to this tenant.
            Gone: it was freed, has expired, or comes from before a restart.
        """
        resident = self._residents.get(handle)
        if resident is not None and resident.tenant == tenant:
            if resident.expires_at > monotonic():
                resident.touch()
                return resident
            self._expire(resident)
        raise self.mint.explain(tenant, handle, operand)

    def check(self, tenant: str, nbytes: int) -> None:
        """Raise OutOfMemory unless the tenant's quota has room for `nbytes` more."""
        used = self._nbytes.get(tenant, 0)
        if used + nbytes > self.quota:
            self.sweep()
            used = self._nbytes.get(tenant, 0)
        if used + nbytes > self.quota:
            raise OutOfMemory(
                f"{nbytes} bytes are needed, {used} of the tenant's quota of {self.quota} are used"
            )

    def add(
        self,
        tenant: str,
        value: Array,
        *,
        kind: Kind = "tensor",
        nbytes: int | None = None,
        pinned: bool = False,
        ttl: float | None = None,
        rows: int | None = None,
        weight: str | None = None,
    ) -> Resident:
        """Hold `value`. Raises OutOfMemory over quota."""
        nbytes = value.nbytes if nbytes is None else nbytes
        self.check(tenant, nbytes)
        resident = Resident(
            self.mint.issue(tenant),
            tenant,
            kind,
            value,
            nbytes,
            pinned,
            self._ttl if ttl is None else ttl,
            FOREVER,
            rows,
            weight,
        )
        resident.touch()
        self._residents[resident.handle] = resident
        self._nbytes[tenant] = self._nbytes.get(tenant, 0) + nbytes
        return resident

    def replace(self, resident: Resident, value: Array) -> None:
        """New contents of the same dtype and shape."""
        resident.value = value
        resident.version += 1
        resident.touch()

    def free(self, resident: Resident) -> None:
        """Forget the handle; the memory goes with its last user. Freeing twice is nothing."""
        if self._residents.pop(resident.handle, None) is not None:
            self._nbytes[resident.tenant] -= resident.nbytes

    def sweep(self) -> int:
        """Free what has expired; how many that were."""
        now = monotonic()
        expired = [r for r in self._residents.values() if r.expires_at <= now]
        for resident in expired:
            self._expire(resident)
        return len(expired)

    def _expire(self, resident: Resident) -> None:
        self.expired += 1
        self.free(resident)

    def clear(self) -> None:
        self._residents.clear()
        self._nbytes.clear()
