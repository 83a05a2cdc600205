"""What a request's header means: checked first, as a step that is then run on payloads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..calls import Step
from ..operands import Inputs
from ..schemas import Header, LinearBackward, LinearForward, Matmul, MlpBackward, MlpForward
from . import linear, matmul, mlp

Operation = Callable[[Inputs, Any], Step]

OPERATIONS: dict[str, tuple[type[Header], Operation]] = {
    "linear/forward": (LinearForward, linear.forward),
    "linear/backward": (LinearBackward, linear.backward),
    "mlp/forward": (MlpForward, mlp.forward),
    "mlp/backward": (MlpBackward, mlp.backward),
    "matmul": (Matmul, matmul.matmul),
}
"""Operations by their path below `/v1`: the header that each takes, and what checks it."""
