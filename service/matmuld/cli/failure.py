"""What ends a command before it is done."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile


class Failure(Exception):
    """A command cannot go on; the message, one line, is for whoever typed it. Exit status 1."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Files are written to `path`, or in it. Raises Failure if they cannot be."""
    try:
        yield
    except OSError as error:
        raise Failure(f"output: cannot write to {path}: {error.strerror or error}") from error


def try_folder(folder: Path) -> None:
    """Raise Failure unless files can be made in `folder`: known before the work, not after it."""
    with writing(folder), TemporaryFile(dir=folder):
        pass
