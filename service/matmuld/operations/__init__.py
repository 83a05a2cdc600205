"""What a request's header means: checked first, as a step that is then run on payloads."""

from __future__ import annotations

from ..schemas import Header, Run
from .program import STEPS, Operation, program

OPERATIONS: dict[str, tuple[type[Header], Operation]] = {**STEPS, "run": (Run, program)}
"""Operations by their path below `/v1`: the header that each takes, and what checks it."""
