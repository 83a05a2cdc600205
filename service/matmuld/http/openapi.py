"""The OpenAPI description of the endpoints, MessagePack bodies included."""

from __future__ import annotations

import re
from typing import Any

from matmuld_client.wire import JSON, MSGPACK, OCTETS
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from .. import replies
from ..engine.float8 import FLOAT8
from ..operations import OPERATIONS
from ..scheduler import PRIORITIES
from ..schemas import CreateTensor, ReplaceTensor, TensorLife, Warm

PACKED = (
    "One MessagePack map, the header of this schema, then one `bin` object for each payload, "
    "which the header's tensors name by index: see docs/protocol.md."
)
INLINED = "The same header; payloads stand in their tensors as base64 in `data`."

BODIES: dict[tuple[str, str], type[BaseModel]] = {
    **{("POST", f"/v1/{name}"): model for name, (model, _) in OPERATIONS.items()},
    ("POST", "/v1/tensors"): CreateTensor,
    ("PUT", "/v1/tensors/{handle}"): ReplaceTensor,
    ("PATCH", "/v1/tensors/{handle}"): TensorLife,
    ("POST", "/v1/plans/warm"): Warm,
}
REPLIES: dict[tuple[str, str], type[BaseModel]] = {
    ("POST", "/v1/linear/forward"): replies.LinearForwardReply,
    ("POST", "/v1/linear/backward"): replies.LinearBackwardReply,
    ("POST", "/v1/mlp/forward"): replies.MlpForwardReply,
    ("POST", "/v1/mlp/backward"): replies.MlpBackwardReply,
    ("POST", "/v1/matmul"): replies.MatmulReply,
    ("POST", "/v1/run"): replies.RunReply,
    ("POST", "/v1/tensors"): replies.Metadata,
    ("GET", "/v1/tensors"): replies.Tensors,
    ("GET", "/v1/tensors/{handle}"): replies.Value,
    ("PUT", "/v1/tensors/{handle}"): replies.Metadata,
    ("PATCH", "/v1/tensors/{handle}"): replies.Metadata,
    ("GET", "/v1/tensors/{handle}/metadata"): replies.Metadata,
    ("GET", "/v1/tensors/{handle}/mask"): replies.Value,
    ("GET", "/v1/plans"): replies.Plans,
    ("POST", "/v1/plans/warm"): replies.Warmed,
    ("DELETE", "/v1/plans"): replies.Evicted,
    ("DELETE", "/v1/plans/{id}"): replies.Evicted,
    ("GET", "/v1/info"): replies.Info,
    ("GET", "/health/live"): replies.Health,
    ("GET", "/health/ready"): replies.Health,
}
RAW_BODIES = {("POST", "/v1/tensors"), ("PUT", "/v1/tensors/{handle}")}
RAW_REPLIES = {("GET", "/v1/tensors/{handle}")}
QUERY = {
    ("POST", "/v1/tensors"): {
        "dtype": "of a raw body",
        "shape": "of a raw body: extents with commas",
        "quantize": "of a raw body: " + " or ".join(FLOAT8),
        "pinned": "of a raw body: true or false",
        "ttl_s": "of a raw body: seconds",
    }
}
OPERATION_HEADERS: dict[str, tuple[str, dict[str, Any]]] = {
    "X-Deadline-Ms": (
        "milliseconds within which the operation must be at work; it is not run later",
        {"type": "integer", "minimum": 1, "maximum": 999_999_999},
    ),
    "X-Priority": (
        "of what waits, batch lets interactive work go first, for about a second",
        {"type": "string", "enum": list(PRIORITIES), "default": PRIORITIES[0]},
    ),
}
STATUS = {("POST", "/v1/tensors"): 201, ("DELETE", "/v1/tensors/{handle}"): 204}


def status(method: str, path: str) -> int:
    """The status of a success."""
    return STATUS.get((method, path), 200)


def describe(method: str, path: str) -> dict[str, Any]:
    """What FastAPI cannot see of an endpoint: its bodies, its replies and its parameters."""
    key = method, path
    success: dict[str, Any] = {"description": "done"}
    if key in REPLIES:
        success["content"] = _content(REPLIES[key], raw=key in RAW_REPLIES)
    problem = {"schema": _reference(replies.Problem)}
    described: dict[str, Any] = {
        "responses": {
            str(status(method, path)): success,
            "default": {
                "description": "a problem document (RFC 9457)",
                "content": {
                    "application/problem+json": problem,
                    "application/problem+msgpack": problem,
                },
            },
        },
        "parameters": [
            *_path_parameters(path),
            *_query_parameters(key),
            *_header_parameters(path),
        ],
    }
    if key in BODIES:
        content = _content(BODIES[key], raw=key in RAW_BODIES)
        described["requestBody"] = {"required": True, "content": content}
    return described


def components() -> dict[str, Any]:
    """The schemas that the descriptions refer to."""
    models: list[type[BaseModel]] = [*BODIES.values(), *REPLIES.values(), replies.Problem]
    _, schema = models_json_schema(
        [(model, "validation") for model in models],
        ref_template="#/components/schemas/{model}",
    )
    return dict(schema["$defs"])


def _content(model: type[BaseModel], *, raw: bool) -> dict[str, Any]:
    content: dict[str, Any] = {
        MSGPACK: {"schema": {**_reference(model), "description": PACKED}},
        JSON: {"schema": {**_reference(model), "description": INLINED}},
    }
    if raw:
        content[OCTETS] = {"schema": {"type": "string", "format": "binary"}}
    return content


def _reference(model: type[BaseModel]) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{model.__name__}"}


def _path_parameters(path: str) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)}", path)
    ]


def _query_parameters(key: tuple[str, str]) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "query", "description": text, "schema": {"type": "string"}}
        for name, text in QUERY.get(key, {}).items()
    ]


def _header_parameters(path: str) -> list[dict[str, Any]]:
    if path.removeprefix("/v1/") not in OPERATIONS:
        return []
    return [
        {"name": name, "in": "header", "description": text, "schema": schema}
        for name, (text, schema) in OPERATION_HEADERS.items()
    ]
