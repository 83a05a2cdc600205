"""The OpenAPI description: valid, complete, and true of what the service really answers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matmuld import replies
from matmuld.http.app import ROUTES
from openapi_spec_validator import OpenAPIV31SpecValidator

from ..local import MSGPACK, Answer, Wire, packed, raw, tensor
from .programs import RUN, of, program, step
from .refusals import (
    BACKWARD,
    BODY,
    FORWARD,
    JSON,
    MATMUL,
    MLP_BACKWARD,
    MLP_FORWARD,
    OCTETS,
    TENSORS,
    WARM,
    WEIGHT,
    X,
    forward,
)

PROTOCOL = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()


@pytest.fixture
def description(wire: Wire) -> dict[str, Any]:
    return wire.get("/openapi.json")


def operations(description: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in description["paths"].items():
        for method, operation in methods.items():
            yield method.upper(), path, operation


def properties(description: dict[str, Any], name: str) -> set[str]:
    return set(description["components"]["schemas"][name]["properties"])


def test_it_is_valid(description: dict[str, Any]) -> None:
    assert description["openapi"].startswith("3.1.")
    assert list(OpenAPIV31SpecValidator(description).iter_errors()) == []


def test_every_route_is_in_it(description: dict[str, Any]) -> None:
    described = [(method, path) for method, path, _ in operations(description)]
    assert sorted(described) == sorted((route.method, route.path) for route in ROUTES)


def test_every_operation_says_what_it_is(description: dict[str, Any]) -> None:
    told = [operation for _, _, operation in operations(description)]
    assert len({operation["operationId"] for operation in told}) == len(ROUTES)
    assert not any(operation["summary"] in ("", "Handler") for operation in told)
    for operation in told:
        problem = operation["responses"]["default"]["content"]
        assert set(problem) == {"application/problem+json", "application/problem+msgpack"}


def test_bodies_are_described_in_every_form(description: dict[str, Any]) -> None:
    raw_too = {("POST", TENSORS), ("PUT", f"{TENSORS}/{{handle}}")}
    for method, path, operation in operations(description):
        if method not in ("POST", "PUT", "PATCH"):
            assert "requestBody" not in operation
            continue
        content = operation["requestBody"]["content"]
        assert set(content) == {MSGPACK, JSON} | ({OCTETS} if (method, path) in raw_too else set())
        packed_schema, json_schema = content[MSGPACK]["schema"], content[JSON]["schema"]
        assert packed_schema["$ref"] == json_schema["$ref"]
        assert "`bin` object for each payload" in packed_schema["description"]
        assert "base64" in json_schema["description"]


def test_operations_and_only_they_have_deadline_and_priority(description: dict[str, Any]) -> None:
    for method, path, operation in operations(description):
        headers = {
            parameter["name"]
            for parameter in operation.get("parameters", ())
            if parameter["in"] == "header"
        }
        is_operation = method == "POST" and path in (
            FORWARD,
            BACKWARD,
            MLP_FORWARD,
            MLP_BACKWARD,
            MATMUL,
            RUN,
        )
        assert headers == ({"X-Deadline-Ms", "X-Priority"} if is_operation else set())


@pytest.mark.parametrize(
    ("heading", "schema"),
    [
        ("## 2. Tensors", "Tensor"),
        (f"### {FORWARD}", "LinearForward"),
        (f"### {BACKWARD}", "LinearBackward"),
        (f"### {MLP_BACKWARD}", "MlpBackward"),
        (f"### {MATMUL}", "Matmul"),
        (f"### {RUN}", "Run"),
        ("### Options", "Options"),
    ],
)
def test_the_fields_are_those_of_the_protocol(
    description: dict[str, Any], heading: str, schema: str
) -> None:
    """The names in the first column of the table under that heading in docs/protocol.md."""
    table = PROTOCOL.split(f"\n{heading}\n")[1].split("\n|---")[1].split("\n\n")[0]
    rows = [row.split("|")[1] for row in table.split("\n")[1:]]
    assert properties(description, schema) == {
        name for row in rows for name in re.findall(r"`(\w+)`", row)
    }


def test_problems_are_those_of_the_protocol(description: dict[str, Any]) -> None:
    listed = re.search(r'`{("type": .*?)}`', PROTOCOL)
    assert listed is not None
    assert properties(description, "Problem") == set(re.findall(r'"([a-z_]+)"', listed[1]))


def test_the_pages(wire: Wire) -> None:
    page = wire.request("GET", "/docs")
    assert page.status == 200
    assert page.headers["content-type"].startswith("text/html")
    assert b"/openapi.json" in page.body


SQUARE = np.arange(9, dtype=np.float32).reshape(3, 3)
LAYERS = {
    "x": tensor(X, 0),
    "layers": [{"weight": tensor(WEIGHT, 1), "activation": "relu"}],
    "save_tape": True,
}
PROGRAM = program(
    step("stack", "mlp/forward", **LAYERS),
    step("layer", "linear/forward", **forward(activation="relu", save_aux=True)),
    y=of("stack", "y", placement="tensor"),
    tape=of("stack", "tape"),
    aux=of("layer", "aux", placement="payload"),
)
DESCRIBED = {
    "x": {"dtype": "float32", "shape": [7, 3]},
    "weight": {"dtype": "float32", "shape": [5, 3]},
}


def hold(wire: Wire) -> str:
    return wire.hold(X, pinned=True)


def mask(wire: Wire) -> str:
    header = forward(activation="relu", save_aux=True)
    return str(wire.send(FORWARD, header, *BODY).header["aux"]["tensor"])


def all_gradients(wire: Wire) -> Answer:
    x, aux = np.ones((2, 4), np.float32), {"input_aux": {"tensor": mask(wire)}}
    weight, dz = np.ones((3, 4), np.float32), np.ones((2, 3), np.float32)
    header = {"dz": tensor(dz, 0), "x": tensor(x, 1), "weight": tensor(weight, 2), **aux}
    outputs = {"outputs": {"dweight": "tensor"}}
    return wire.send(
        BACKWARD, {**header, "input_dbias": True, **outputs}, *map(raw, (dz, x, weight))
    )


def through_a_stack(wire: Wire) -> Answer:
    tape = wire.send(MLP_FORWARD, LAYERS, *BODY).header["tape"]["tensor"]
    header = {
        "tape": tape,
        "dy": tensor(WEIGHT[:2, :1].repeat(4, 1), 0),
        "wants": ["dx", "dweight"],
    }
    return wire.send(MLP_BACKWARD, header, raw(np.ones((2, 4), np.float32)))


def one_plan(wire: Wire) -> Answer:
    wire.send(FORWARD, forward(), *BODY)
    return wire.request("DELETE", f"/v1/plans/{wire.get('/v1/plans')['plans'][0]['id']}")


def put(wire: Wire) -> Answer:
    return wire.send(f"{TENSORS}/{hold(wire)}", {"value": tensor(X, 0)}, raw(X), method="PUT")


def patch(wire: Wire) -> Answer:
    body, headers = packed({"pinned": False}), {"Content-Type": MSGPACK}
    return wire.request("PATCH", f"{TENSORS}/{hold(wire)}", body, headers)


def product(epilog: str) -> dict[str, Any]:
    return {"a": tensor(SQUARE, 0), "b": tensor(SQUARE, 0), "epilog": epilog}


ANSWERS: dict[tuple[str, str], list[Callable[[Wire], Answer]]] = {
    ("POST", FORWARD): [
        lambda wire: wire.send(FORWARD, forward(), *BODY),
        lambda wire: wire.send(FORWARD, forward(activation="gelu", save_aux=True), *BODY),
    ],
    ("POST", BACKWARD): [all_gradients],
    ("POST", MLP_FORWARD): [lambda wire: wire.send(MLP_FORWARD, LAYERS, *BODY)],
    ("POST", MLP_BACKWARD): [through_a_stack],
    ("POST", MATMUL): [
        lambda wire: wire.send(MATMUL, product("RELU_AUX"), raw(SQUARE)),
        lambda wire: wire.send(MATMUL, product("GELU_AUX"), raw(SQUARE)),
        lambda wire: wire.send(MATMUL, product("BGRADA"), raw(SQUARE)),
        lambda wire: wire.send(MATMUL, product("BGRADB"), raw(SQUARE)),
    ],
    ("POST", RUN): [
        lambda wire: wire.send(RUN, PROGRAM, *BODY),
        lambda wire: wire.send(RUN, {**PROGRAM, "outputs": {"y": of("stack", "y")}}, *BODY),
    ],
    ("POST", TENSORS): [lambda wire: wire.send(TENSORS, {"dtype": "float16", "shape": [2]})],
    ("GET", TENSORS): [lambda wire: wire.request("GET", TENSORS)],
    ("GET", f"{TENSORS}/{{handle}}"): [
        lambda wire: wire.request("GET", f"{TENSORS}/{hold(wire)}"),
        lambda wire: wire.request("GET", f"{TENSORS}/{mask(wire)}", headers={"Accept": MSGPACK}),
    ],
    ("PUT", f"{TENSORS}/{{handle}}"): [put],
    ("PATCH", f"{TENSORS}/{{handle}}"): [patch],
    ("GET", f"{TENSORS}/{{handle}}/metadata"): [
        lambda wire: wire.request("GET", f"{TENSORS}/{hold(wire)}/metadata"),
        lambda wire: wire.request("GET", f"{TENSORS}/{mask(wire)}/metadata"),
    ],
    ("GET", f"{TENSORS}/{{handle}}/mask"): [
        lambda wire: wire.request("GET", f"{TENSORS}/{mask(wire)}/mask")
    ],
    ("GET", "/v1/plans"): [lambda wire: wire.request("GET", "/v1/plans")],
    ("POST", WARM): [
        lambda wire: wire.send(
            WARM, {"requests": [{"operation": "linear/forward", "header": DESCRIBED}]}
        )
    ],
    ("DELETE", "/v1/plans/{id}"): [one_plan],
    ("DELETE", "/v1/plans"): [lambda wire: wire.request("DELETE", "/v1/plans")],
    ("GET", "/v1/info"): [lambda wire: wire.request("GET", "/v1/info")],
    ("GET", "/health/live"): [lambda wire: wire.request("GET", "/health/live")],
    ("GET", "/health/ready"): [lambda wire: wire.request("GET", "/health/ready")],
}
NO_REPLY = {("DELETE", f"{TENSORS}/{{handle}}")}


def test_every_route_has_a_real_reply_here() -> None:
    assert set(ANSWERS) | NO_REPLY == {(route.method, route.path) for route in ROUTES}


@pytest.mark.parametrize("route", ANSWERS, ids=" ".join)
def test_replies_are_as_described(
    wire: Wire, description: dict[str, Any], route: tuple[str, str]
) -> None:
    method, path = route
    responses = description["paths"][path][method.lower()]["responses"]
    (status,) = set(responses) - {"default"}
    for ask in ANSWERS[route]:
        answer = ask(wire)
        assert answer.status == int(status), answer.header
        reference = responses[status]["content"][answer.headers["content-type"]]["schema"]["$ref"]
        model = getattr(replies, reference.rpartition("/")[2])
        model.model_validate(answer.header, strict=True)


def test_a_problem_is_as_described(wire: Wire) -> None:
    for answer in (wire.request("GET", "/nowhere"), wire.send(FORWARD, {"x": 1})):
        replies.Problem.model_validate(answer.header, strict=True)


def test_the_json_form_of_a_reply_is_as_described(wire: Wire) -> None:
    """`data` stands where `payload` was."""
    value = {"dtype": "float32", "shape": [1, 1], "data": "AACAPw=="}
    body = json.dumps({"x": value, "weight": value}).encode()
    answer = wire.request("POST", FORWARD, body, {"Content-Type": JSON})
    reply = replies.LinearForwardReply.model_validate(answer.header, strict=True)
    assert (reply.y.data, reply.y.payload) == ("AACAPw==", None)
