"""Programs: their steps in few words."""

from __future__ import annotations

from typing import Any

RUN = "/v1/run"


def step(name: str, operation: str, **header: Any) -> dict[str, Any]:
    return {"name": name, "operation": operation, "header": header}


def of(name: str, output: str, **more: Any) -> dict[str, Any]:
    """An output of an earlier step."""
    return {"step": name, "output": output, **more}


def program(*steps: dict[str, Any], **outputs: dict[str, Any]) -> dict[str, Any]:
    return {"steps": list(steps), "outputs": outputs}
