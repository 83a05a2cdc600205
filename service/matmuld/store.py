"""The plan store: choices on disk, so that a service that is started again need not measure again.

Each device, told by its model and versions, has a folder below the store's, and each choice in it a
file, which is replaced as a whole. Any number of processes may use one store. Who can write to it
chooses the algorithms, so it must be as private as the service.
"""

from __future__ import annotations

import json
import logging
import os
import re
import stat
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, Protocol

from .entries import ENTRY_BYTES, Entry, Kind, device_id, entry_of, file_name, from_bytes, to_bytes

log = logging.getLogger("matmuld")

LIMIT = 1 << 16
"""Entries of a store."""
_LEFTOVER_SECONDS = 3600
"""A temporary file so old is of a process that was killed."""


@dataclass(slots=True)
class StoreStats:
    """What came of a store's entries since the start; `dropped` were loaded and then refused."""

    hits: int = 0
    misses: int = 0
    written: int = 0
    dropped: int = 0


class Choices(Protocol):
    """What is remembered of earlier runs. The methods may wait for a disk: not for the event loop.

    They never fail: what cannot be read is not there, and what cannot be written is forgotten.
    """

    stats: StoreStats

    def get(self, kind: Kind, key: str) -> dict[str, Any] | None:
        """The record of a key."""

    def put(self, kind: Kind, key: str, record: Mapping[str, Any]) -> None:
        """Remember a record. Raises ValueError if it is none of that kind."""

    def drop(self, kind: Kind, key: str, reason: str) -> None:
        """Forget a record that turned out wrong."""


class InMemoryChoices:
    """Remembers until the process ends; at most `LIMIT` records, the oldest go first."""

    def __init__(self) -> None:
        self.stats = StoreStats()
        self._records: dict[tuple[Kind, str], dict[str, Any]] = {}

    def get(self, kind: Kind, key: str) -> dict[str, Any] | None:
        return self._records.get((kind, key))

    def put(self, kind: Kind, key: str, record: Mapping[str, Any]) -> None:
        self._records[kind, key] = dict(record)
        if len(self._records) > LIMIT:
            del self._records[next(iter(self._records))]

    def drop(self, kind: Kind, key: str, reason: str) -> None:
        self._records.pop((kind, key), None)


class PlanFolder:
    """The choices for all devices; the least recently used go first. Raises OSError."""

    def __init__(self, path: Path, limit: int = LIMIT) -> None:
        self.path = path
        self._limit = limit
        self._step = max(limit // 16, 1)
        self._unchecked = 0
        self._lock = threading.Lock()
        self._ignored: set[Path] = set()

    def __iter__(self) -> Iterator[Entry]:
        """All entries that are sound."""
        return self.of()

    def of(self, device: str | None = None) -> Iterator[Entry]:
        """The sound entries of one device, or of all."""
        for path in sorted(self._files(device)):
            if (entry := self.read(path)) is not None:
                yield entry

    def place(self, device: str, kind: Kind, key: str) -> Path:
        """Where an entry is kept."""
        return self.path / device / file_name(kind, key)

    def read(self, path: Path) -> Entry | None:
        """The entry in a file; None if there is none, or no sound one, which is logged once."""
        try:
            with open(path, "rb", opener=_regular) as file:
                entry = from_bytes(file.read(ENTRY_BYTES + 1))
            place = self.place(entry.device_id, entry.kind, entry.key)
            if place != path:
                raise ValueError(f"it is the entry of {place}")
            return entry
        except FileNotFoundError:
            return None
        except ValueError as error:
            if path not in self._ignored:
                self._ignored.add(path)
                log.warning("plan store: %s is ignored: %s", path, error)
            return None

    def write(self, entry: Entry) -> None:
        """Keep an entry. Raises ValueError if it is too large."""
        data = to_bytes(entry)
        path = self.place(entry.device_id, entry.kind, entry.key)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._lock:
            if self._unchecked == 0:
                self._make_room(self._step)
                self._unchecked = self._step
            self._unchecked -= 1
        device = path.with_name("device.json")
        if not device.exists():
            _replace(device, json.dumps(entry.device, indent=2).encode() + b"\n")
        _replace(path, data)

    def clear(self, device: str | None = None) -> int:
        """Remove the entries of one device, or of all; how many there were."""
        removed = 0
        for path in self._files(device):
            with suppress(FileNotFoundError):
                path.unlink()
                removed += 1
        return removed

    def _files(self, device: str | None = None) -> Iterator[Path]:
        """The files of entries; what else lies there is not ours."""
        folders = [device] if device else _names(self.path, "[0-9a-f]{16}")
        for folder in folders:
            for name in _names(self.path / folder, r"(algorithm|strategy)-[0-9a-f]{32}\.plan"):
                yield self.path / folder / name

    def _make_room(self, count: int) -> None:
        """Remove the least recently used, so that there is room for `count`."""
        used: list[tuple[float, Path]] = []
        for path in self._files():
            with suppress(FileNotFoundError):
                used.append((path.stat().st_mtime, path))
        used.sort()
        for _, path in used[: max(len(used) + count - self._limit, 0)]:
            path.unlink(missing_ok=True)
        for folder in _names(self.path, "[0-9a-f]{16}"):
            for name in _names(self.path / folder, r"\..*\.tmp"):
                path = self.path / folder / name
                with suppress(FileNotFoundError):
                    if time.time() - path.stat().st_mtime > _LEFTOVER_SECONDS:
                        path.unlink()


class PlanStore:
    """The choices for one device, told by its model and versions.

    Safe for threads. A disk that fails is logged once for reading and once for writing.
    """

    def __init__(self, folder: Path, device: Mapping[str, Any], limit: int = LIMIT) -> None:
        self.stats = StoreStats()
        self._device = dict(device)
        self._id = device_id(device)
        self._folder = PlanFolder(folder, limit)
        self._complaints: set[str] = set()

    def __iter__(self) -> Iterator[Entry]:
        """All entries of the device that are sound. Raises OSError."""
        return self._folder.of(self._id)

    def get(self, kind: Kind, key: str) -> dict[str, Any] | None:
        path = self._folder.place(self._id, kind, key)
        entry = None
        try:
            entry = self._folder.read(path)
        except OSError as error:
            self._complain("read", path, error)
        if entry is None:
            self.stats.misses += 1
            return None
        self.stats.hits += 1
        with suppress(OSError):
            os.utime(path)  # it was used
        return entry.record.model_dump()

    def put(self, kind: Kind, key: str, record: Mapping[str, Any]) -> None:
        entry = entry_of(self._device, kind, key, record)
        try:
            self._folder.write(entry)
        except OSError as error:
            self._complain("write", self._folder.path, error)
        else:
            self.stats.written += 1

    def drop(self, kind: Kind, key: str, reason: str) -> None:
        path = self._folder.place(self._id, kind, key)
        self.stats.dropped += 1
        log.warning("plan store: %s is dropped: %s", path, reason)
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            self._complain("write", path, error)

    def clear(self) -> int:
        """Remove the entries of the device; how many there were. Raises OSError."""
        return self._folder.clear(self._id)

    def _complain(self, what: str, path: Path, error: OSError) -> None:
        if what not in self._complaints:
            self._complaints.add(what)
            reason = error.strerror or error
            log.warning("plan store: cannot %s %s: %s; this is said once", what, path, reason)


def _names(folder: Path, pattern: str) -> list[str]:
    """What lies in a folder under such a name."""
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [name for name in names if re.fullmatch(pattern, name)]


def _replace(path: Path, data: bytes) -> None:
    """Write a file that others see whole or not at all, also after a loss of power."""
    with NamedTemporaryFile(dir=path.parent, prefix=".", suffix=".tmp", delete=False) as file:
        try:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            os.replace(file.name, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(file.name)
            raise


def _regular(path: str, flags: int) -> int:
    """Open a file that is none to wait for. Raises ValueError."""
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError("it is no regular file")
    return descriptor
