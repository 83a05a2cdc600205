"""`matmuld plans`: the choices that services have kept, on any machine."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import BaseModel, Field
from pydantic_settings import CliPositionalArg, CliSubCommand, SettingsError, get_subcommand
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..engine.signature import Layout, Signature
from ..entries import AlgorithmEntry, Entry, StrategyRecord, from_line, to_line
from ..settings import Stored
from ..store import PlanFolder
from .failure import Failure, writing


class _Kept(Stored):
    """A command on the plan store of a service on this machine."""

    @contextmanager
    def opened(self) -> Iterator[PlanFolder]:
        """Raises Failure if the store is off or cannot be had."""
        if self.plan_store is None:
            raise Failure("plan_store: expected a folder, got off")
        try:
            yield PlanFolder(self.plan_store)
        except OSError as error:
            raise Failure(f"plan_store: {self.plan_store}: {error.strerror or error}") from error


class _OfDevice(_Kept):
    device: str | None = Field(
        default=None, description="id of a device, as `list` shows it; default: every device"
    )

    def entries(self, folder: PlanFolder) -> list[Entry]:
        """Those asked for. Raises Failure if the device is not there."""
        entries = list(folder)
        if self.device is None:
            return entries
        chosen = [entry for entry in entries if entry.device_id == self.device]
        if not chosen:
            known = ", ".join(sorted({entry.device_id for entry in entries})) or "none"
            raise Failure(f"device: expected one of those kept, {known}; got {self.device!r}")
        return chosen


class List(_OfDevice):
    """Show what is kept."""

    def run(self) -> int:
        console = Console()
        with self.opened() as folder:
            entries = self.entries(folder)
        if entries:
            console.print(_devices(entries))
            console.print(_choices(entries))
        console.print(f"{len(entries)} choices in {self.plan_store}", soft_wrap=True)
        return 0


class Export(_OfDevice):
    """Write what is kept to a file, an entry a line, as JSON."""

    file: CliPositionalArg[Path] = Field(description="where to; - for the standard output")

    def run(self) -> int:
        with self.opened() as folder:
            entries = self.entries(folder)
        text = "".join(f"{to_line(entry)}\n" for entry in entries)
        if str(self.file) == "-":
            sys.stdout.write(text)
            return 0
        with writing(self.file):
            self.file.write_text(text)
        print(f"exported: {len(entries)}")
        return 0


class Import(_Kept):
    """Take what was exported, whatever devices it is of; the status is 1 if a line was refused.

    What is kept for the same device and key is replaced.
    """

    file: CliPositionalArg[Path] = Field(description="an export; - for the standard input")

    def run(self) -> int:
        refused: list[tuple[int, str]] = []
        taken = 0
        with self.opened() as folder:
            for number, line in enumerate(self._lines(), 1):
                try:
                    folder.write(_checked(line))
                except ValueError as error:
                    refused.append((number, str(error)))
                else:
                    taken += 1
        for number, reason in refused:
            print(f"line {number} was not taken: {reason}")
        print(f"imported: {taken}, not taken: {len(refused)}")
        return 1 if refused else 0

    def _lines(self) -> list[str]:
        try:
            text = sys.stdin.read() if str(self.file) == "-" else self.file.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise Failure(f"file: cannot read {self.file}: {reason}") from error
        return text.splitlines()


class Clear(_OfDevice):
    """Remove what is kept. A service that runs keeps the plans that it holds."""

    all: bool = Field(False, description="for every device")

    def run(self) -> int:
        if self.all == (self.device is not None):
            raise Failure("clear: expected either --device ID or --all")
        with self.opened() as folder:
            self.entries(folder)
            removed = folder.clear(self.device)
        print(f"removed: {removed}")
        return 0


class Plans(BaseModel):
    """Choices of algorithms and strategies, which a service finds again when it is restarted.

    No service needs to run, and no GPU needs to be there.
    """

    list_: CliSubCommand[List] = Field(alias="list", description="show what is kept")
    export: CliSubCommand[Export] = Field(description="write it to a file")
    import_: CliSubCommand[Import] = Field(alias="import", description="take it from a file")
    clear: CliSubCommand[Clear] = Field(description="remove it")

    def run(self) -> int:
        command = get_subcommand(self, is_required=False)
        if command is None:
            raise SettingsError("plans: expected list, export, import or clear")
        assert isinstance(command, List | Export | Import | Clear)
        return command.run()


def _checked(line: str) -> Entry:
    """The entry in a line; an algorithm's key must be a signature. Raises ValueError."""
    entry = from_line(line)
    if isinstance(entry, AlgorithmEntry) and _signature(entry.key) is None:
        raise ValueError(f"key: expected the text of a signature, got {entry.key[:80]!r}")
    return entry


def _signature(key: str) -> Signature | None:
    try:
        return Signature.parse(key)
    except ValueError:
        return None


def _devices(entries: list[Entry]) -> Table:
    table = Table("device", "model and versions", "choices")
    by_id: dict[str, list[Entry]] = {}
    for entry in entries:
        by_id.setdefault(entry.device_id, []).append(entry)
    for device, own in by_id.items():
        described = ", ".join(f"{name} {value}" for name, value in own[0].device.items())
        table.add_row(device, escape(described), str(len(own)))
    return table


def _choices(entries: list[Entry]) -> Table:
    table = Table("device", "signature", "choice", "median µs", show_lines=True)
    for entry in entries:
        record = entry.record
        way = record.way if isinstance(record, StrategyRecord) else "an algorithm"
        time = "" if record.median_us is None else f"{record.median_us:.1f}"
        table.add_row(entry.device_id, escape(_described(entry.key)), escape(way), time)
    return table


def _described(key: str) -> str:
    """A signature for people; of what is none, the text."""
    signature = _signature(key)
    if signature is None:
        return key
    operands = (
        f"{name} {part}"
        for name, part in zip(signature._fields, signature, strict=True)
        if isinstance(part, Layout)
    )
    return "\n".join((f"{signature.epilog} {signature.options.compute_type}", *operands))
