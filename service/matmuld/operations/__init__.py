"""What a request's header means: shapes checked, products run, results delivered."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from ..calls import Call, Reply
from ..schemas import Header, LinearBackward, LinearForward, Matmul, MlpBackward, MlpForward
from . import linear, matmul, mlp

Operation = Callable[[Call, Any], Awaitable[Reply]]

OPERATIONS: dict[str, tuple[type[Header], Operation]] = {
    "linear/forward": (LinearForward, linear.forward),
    "linear/backward": (LinearBackward, linear.backward),
    "mlp/forward": (MlpForward, mlp.forward),
    "mlp/backward": (MlpBackward, mlp.backward),
    "matmul": (Matmul, matmul.matmul),
}
"""Operations by their path below `/v1`: the header that each takes, and what it does."""
