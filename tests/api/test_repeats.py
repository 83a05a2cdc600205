"""Requests whose headers have come before: known at once, and never taken for another."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
from matmuld.steps import Steps

from ..local import Wire, packed, raw, running, tensor
from .refusals import BACKWARD, FORWARD, MLP_BACKWARD, MLP_FORWARD, refused_header

X = np.arange(6, dtype=np.float32).reshape(2, 3)
EYE = np.eye(3, dtype=np.float32)
HEADER = {"x": tensor(X, 0), "weight": tensor(EYE, 1)}


def test_a_repeated_header_computes_with_the_new_payloads(wire: Wire) -> None:
    for factor in (1, 2, 3):
        answer = wire.send(FORWARD, HEADER, raw(X * factor), raw(EYE))
        np.testing.assert_array_equal(answer.array("y"), X * factor)


def test_headers_of_one_length_are_told_apart(wire: Wire) -> None:
    for _ in range(3):
        for alpha in (0.5, 2.0, -1.0):
            answer = wire.send(FORWARD, HEADER | {"alpha": alpha}, raw(X), raw(EYE))
            np.testing.assert_array_equal(answer.array("y"), alpha * X)


def test_the_operation_is_part_of_what_is_known(wire: Wire) -> None:
    header = {"x": tensor(X, 0), "weight": tensor(EYE, 1)}
    assert wire.send(FORWARD, header, raw(X), raw(EYE)).status == 200
    refused_header(
        wire, BACKWARD, header, raw(X), raw(EYE), code="malformed", operand="dz", says="dz"
    )


def test_payloads_of_a_known_header_are_checked_again(wire: Wire) -> None:
    header = HEADER | {"alpha": 3.0}
    assert wire.send(FORWARD, header, raw(X), raw(EYE)).status == 200
    refused_header(
        wire,
        FORWARD,
        header,
        raw(X)[:-4],
        raw(EYE) + b"1234",
        code="invalid_operands",
        operand="x",
        says="x: expected 24 bytes for shape [2, 3] of float32, got 20",
    )
    refused_header(
        wire,
        FORWARD,
        header,
        raw(X) + raw(EYE) + b"\0\0",
        code="malformed",
        operand="weight",
        says="weight: expected a payload index below 1, got 1",
    )


def test_a_known_header_uses_what_the_tensor_holds_now_and_notices_when_it_is_gone(
    wire: Wire,
) -> None:
    handle = wire.hold(EYE)
    header = {"x": tensor(X, 0), "weight": {"tensor": handle}}
    np.testing.assert_array_equal(wire.send(FORWARD, header, raw(X)).array("y"), X)
    body = packed({"value": tensor(EYE, 0)}, raw(2 * EYE))
    replaced = wire.request(
        "PUT", f"/v1/tensors/{handle}", body, {"Content-Type": "application/msgpack"}
    )
    assert replaced.status == 200
    np.testing.assert_array_equal(wire.send(FORWARD, header, raw(X)).array("y"), 2 * X)
    assert wire.request("DELETE", f"/v1/tensors/{handle}").status == 204
    refused_header(
        wire, FORWARD, header, raw(X), code="gone", operand="weight", says="was freed or has"
    )


def test_nothing_known_keeps_a_tensor_or_a_tape_alive(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with running(path, device="cpu") as app:
        wire = Wire(path)
        before = wire.get("/v1/info")["memory"]["free_bytes"]
        handle = wire.hold(np.ones((300, 3), np.float32))
        header = {"x": tensor(X, 0), "layers": [{"weight": {"tensor": handle}}], "save_tape": True}
        for _ in range(2):
            tape = wire.send(MLP_FORWARD, header, raw(X)).header["tape"]["tensor"]
            dy = np.ones((2, 300), np.float32)
            backward = {"tape": tape, "dy": tensor(dy, 0)}
            assert wire.send(MLP_BACKWARD, backward, raw(dy)).status == 200
        assert wire.request("DELETE", f"/v1/tensors/{handle}").status == 204
        gc.collect()
        assert wire.get("/v1/info")["memory"]["free_bytes"] == before
        assert app.service is not None
        assert len(app.service.steps) == 1
        wire.close()


def test_only_so_many_headers_are_known(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with running(path, device="cpu") as app:
        wire = Wire(path)
        for alpha in range(Steps.LIMIT + 50):
            header = HEADER | {"alpha": float(alpha)}
            answer = wire.send(FORWARD, header, raw(X), raw(EYE))
            np.testing.assert_array_equal(answer.array("y"), alpha * X)
        assert app.service is not None
        assert len(app.service.steps) == Steps.LIMIT
        wire.close()


def test_a_known_header_before_broken_payloads_is_malformed(wire: Wire) -> None:
    header = HEADER | {"alpha": 7.0}
    body = packed(header, raw(X), raw(EYE))
    content = {"Content-Type": "application/msgpack"}
    assert wire.request("POST", FORWARD, body, content).status == 200
    start = len(packed(header))
    for at in (*range(start, start + 2), start + 2 + X.nbytes, start + 3 + X.nbytes):
        for wrong in (0x00, 0xC1, 0xFF):
            broken = body[:at] + bytes([wrong]) + body[at + 1 :]
            answer = wire.request("POST", FORWARD, broken, content)
            assert (answer.status, answer.header["code"]) == (400, "malformed"), answer.header
