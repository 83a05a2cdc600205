"""The tensors, auxiliary data and tapes that the service holds."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Literal, NamedTuple

import numpy as np
from matmuld_client.errors import OutOfMemory

from ..engine.epilogs import AuxKind
from ..engine.protocol import Array
from ..readers import Readers
from .handles import HandleMint

Kind = Literal["tensor", AuxKind, "tape"]

FOREVER = float("inf")


class Quantization(NamedTuple):
    """What an 8-bit tensor is to be multiplied by, on the device and as a number; the largest
    magnitude that it was made from, and the dtype of that.
    """

    scale: Array
    number: float
    amax: float
    source: np.dtype[Any]


@dataclass(slots=True, eq=False)
class Resident:
    """Something held by handle.

    Contents are never written in place: a replacement is a new value, so whoever has taken the
    value keeps a whole version. `lock` is for those who read, compute and replace.

    Attributes:
        value: an array; of a tape, what its kind keeps, made of `arrays`.
        rows: of aux data, the rows that are not padding.
        readers: what reads the value over and over; closed when it is freed or replaced.
        writers: what replaces it over and over; closed when it is freed.
        weight: of aux data, the handle of the weight of the layer that it belongs to, if that was
            resident.
        quantization: of a tensor that the service quantized.
    """

    handle: str
    tenant: str
    kind: Kind
    value: Any
    arrays: Sequence[Array]
    pinned: bool
    ttl: float
    expires_at: float
    rows: int | None = None
    weight: str | None = None
    quantization: Quantization | None = None
    version: int = 1
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    readers: Readers = field(default_factory=Readers)
    writers: Readers = field(default_factory=Readers)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    def touch(self, now: float) -> None:
        """Start the time to live again."""
        if not self.pinned:
            self.expires_at = now + self.ttl

    def pin(self, pinned: bool) -> None:
        self.pinned = pinned
        self.expires_at = FOREVER if pinned else monotonic() + self.ttl


class TensorStore:
    """Residents by handle, within a quota of bytes for each tenant.

    An array that several residents hold, such as a weight and the tapes that it was used for,
    counts once, for as long as one of them holds it.

    Attributes:
        expired: residents whose time was over, since the start.
        freed: arrays that no resident holds any more, since the start.
    """

    def __init__(self, mint: HandleMint, quota: int, ttl: float) -> None:
        self.mint = mint
        self.quota = quota
        self._ttl = ttl
        self._residents: dict[str, Resident] = {}
        self._nbytes: dict[str, int] = {}
        self._holders: dict[tuple[str, int], int] = {}
        self.expired = 0
        self.freed = 0

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
            now = monotonic()
            if resident.expires_at > now:
                resident.touch(now)
                return resident
            self._expire(resident)
        raise self.mint.explain(tenant, handle, operand)

    def fresh(self, tenant: str, arrays: Iterable[Array]) -> int:
        """Bytes that holding `arrays` would add to what the tenant uses."""
        distinct = {id(array): array.nbytes for array in arrays}
        return sum(n for key, n in distinct.items() if (tenant, key) not in self._holders)

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

    @contextmanager
    def reserved(self, tenant: str, nbytes: int) -> Iterator[None]:
        """Count `nbytes` as used for a while. Raises OutOfMemory over quota."""
        self.check(tenant, nbytes)
        self._nbytes[tenant] = self._nbytes.get(tenant, 0) + nbytes
        try:
            yield
        finally:
            self._nbytes[tenant] -= nbytes

    def add(
        self,
        tenant: str,
        value: Any,
        *,
        kind: Kind = "tensor",
        arrays: Sequence[Array] | None = None,
        pinned: bool = False,
        ttl: float | None = None,
        rows: int | None = None,
        weight: str | None = None,
        quantization: Quantization | None = None,
    ) -> Resident:
        """Hold `value`, which is an array or made of `arrays`. Raises OutOfMemory over quota."""
        arrays = (value,) if arrays is None else arrays
        self.check(tenant, self.fresh(tenant, arrays))
        resident = Resident(
            self.mint.issue(tenant),
            tenant,
            kind,
            value,
            arrays,
            pinned,
            self._ttl if ttl is None else ttl,
            FOREVER,
            rows,
            weight,
            quantization,
        )
        resident.touch(monotonic())
        self._residents[resident.handle] = resident
        self._retain(resident)
        return resident

    def replace(
        self, resident: Resident, value: Array, quantization: Quantization | None = None
    ) -> None:
        """New contents of the same dtype, shape and layout; quantized if the old were."""
        self._release(resident)
        resident.quantization = quantization
        resident.value, resident.arrays = value, (value,)
        self._retain(resident)
        resident.version += 1
        resident.touch(monotonic())

    def holds(self, resident: Resident) -> bool:
        """Whether it has not been freed."""
        return resident.handle in self._residents

    def free(self, resident: Resident) -> None:
        """Forget the handle; the memory goes with its last user. Freeing twice is nothing."""
        if self._residents.pop(resident.handle, None) is not None:
            resident.writers.close()
            self._release(resident)

    def _retain(self, resident: Resident) -> None:
        """Count the arrays that nothing else of the tenant's holds."""
        for array in resident.arrays:
            key = resident.tenant, id(array)
            holders = self._holders.get(key, 0)
            self._holders[key] = holders + 1
            if not holders:
                used = self._nbytes.get(resident.tenant, 0)
                self._nbytes[resident.tenant] = used + array.nbytes

    def _release(self, resident: Resident) -> None:
        """Nothing reads or counts what it had any more."""
        resident.readers.close()
        for array in resident.arrays:
            key = resident.tenant, id(array)
            self._holders[key] -= 1
            if not self._holders[key]:
                del self._holders[key]
                self._nbytes[resident.tenant] -= array.nbytes
                self.freed += 1

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
        self._holders.clear()
        self._nbytes.clear()
