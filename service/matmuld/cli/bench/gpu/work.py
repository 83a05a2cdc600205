"""A piece of work to be measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Work:
    """`run` starts it on the current stream; `outputs` are its arrays then."""

    run: Callable[[], Any]
    outputs: Callable[[], Sequence[Any]]


Works = dict[str, Work]
