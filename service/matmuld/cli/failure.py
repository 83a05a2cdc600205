"""What ends a command before it is done."""

from __future__ import annotations


class Failure(Exception):
    """A command cannot go on; the message, one line, is for whoever typed it. Exit status 1."""
