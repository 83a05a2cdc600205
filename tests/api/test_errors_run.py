"""Programs that must be refused: before anything runs, or with nothing left behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ..local import Wire, raw, running, tensor
from ..reference import Host
from .programs import RUN, of, program, step
from .refusals import (
    FORWARD,
    MLP_BACKWARD,
    MLP_FORWARD,
    OCTETS,
    TENSORS,
    WARM,
    refused_header,
    unchanged,
    works,
)

X = np.arange(24, dtype=np.float32).reshape(6, 4)
W = np.arange(32, dtype=np.float32).reshape(8, 4)
BODY = (raw(X), raw(W))

FIRST = step("a", "linear/forward", x=tensor(X, 0), weight=tensor(W, 1), activation="relu")
FIRST["header"]["save_aux"] = True
Y = {"y": of("a", "y")}


def after(operation: str = "linear/forward", **header: Any) -> dict[str, Any]:
    """A good step, and one more."""
    return program(FIRST, step("b", operation, **header), **Y)


def refused_program(
    wire: Wire, header: object, code: str, operand: str | None, says: str, *payloads: bytes
) -> None:
    """Also, nothing has been planned or run: the one product is of `works`, for which it was."""
    assert works(wire)
    before = wire.get("/v1/info")["plans"]
    refused_header(wire, RUN, header, *(payloads or BODY), code=code, operand=operand, says=says)
    after = wire.get("/v1/info")["plans"]
    assert after["planned"] == before["planned"]
    assert after["hits"] <= before["hits"] + 1


SQUARE = np.eye(4, dtype=np.float32)


@pytest.mark.parametrize(
    ("header", "operand", "says"),
    [
        (
            after(x=of("q", "y"), weight=tensor(W, 1)),
            "steps[1].x",
            "steps[1].x: expected the name of a step, got 'q'",
        ),
        (
            after(x=of("b", "y"), weight=tensor(W, 1)),
            "steps[1].x",
            "steps[1].x: expected an earlier step, got 'b', which is steps[1]",
        ),
        (
            program(step("c", "linear/forward", x=of("a", "y"), weight=tensor(W, 1)), FIRST, **Y),
            "steps[0].x",
            "steps[0].x: expected an earlier step, got 'a', which is steps[1]",
        ),
        (
            program(
                step("a", "linear/forward", x=of("b", "y"), weight=tensor(W, 1)),
                step("b", "linear/forward", x=of("a", "y"), weight=tensor(W, 1)),
                **Y,
            ),
            "steps[0].x",
            "expected an earlier step, got 'b', which is steps[1]",
        ),
        (
            after(x=of("a", "z"), weight=tensor(W, 1)),
            "steps[1].x",
            "expected an output of step 'a' (y, aux), got 'z'",
        ),
        (
            after(x=of("a", "y"), weight=tensor(W, 1)),
            "steps[1].x",
            "expected shape […, batch, 4] (weight is (8, 4)), got (6, 8)",
        ),
        (
            after(x=of("a", "y"), weight=of("a", "y", dtype="float64")),
            "steps[1].weight",
            "expected dtype float32, which the tensor has, got float64",
        ),
        (
            after(x=of("a", "y", shape=[8, 6]), weight=tensor(W, 1)),
            "steps[1].x",
            "expected shape [6, 8], which the tensor has, got [8, 6]",
        ),
        (
            after(x=of("a", "y", offset=1), weight=tensor(W, 1)),
            "steps[1].x",
            "expected a view within the tensor's 48 elements",
        ),
        (
            after(x=of("a", "aux"), weight=tensor(W, 1)),
            "steps[1].x",
            "expected dtype float64 ... the tensor has uint8",
        ),
        (
            after(x=tensor(np.zeros((3, 8)), 0), weight=of("a", "y")),
            "steps[1].weight",
            "expected dtype float64 (that of x), got float32",
        ),
        (
            after(x=tensor(X, 0), weight=tensor(W, 1), bias=of("a", "y")),
            "steps[1].bias",
            "expected shape (8,) ([out], weight is (8, 4)), got (6, 8)",
        ),
        (
            after(x=tensor(X, 0), weight=tensor(W, 1), c=of("a", "y", kind="relu_aux"), beta=1.0),
            "steps[1].c",
            "expected kind tensor, which the tensor has, got relu_aux",
        ),
        (
            after(x=tensor(X, 0), weight=tensor(W, 1), scales={"x": of("a", "y")}),
            "steps[1].scales.x",
            "expected no scale, x is float32",
        ),
        (
            after("linear/backward", dy=of("a", "y"), aux=of("a", "y")),
            "steps[1].aux",
            "expected a relu_aux",
        ),
        (
            after("linear/backward", dy=tensor(X, 0), aux=of("a", "aux")),
            "steps[1].aux",
            "expected the aux of 4 rows, it has 8",
        ),
        (
            after("mlp/forward", x=of("a", "y"), layers=[{"weight": tensor(W, 1)}]),
            "steps[1].x",
            "expected shape […, batch, 4]",
        ),
        (
            after(x=tensor(X, 0), weight=tensor(W, 1), activation="tanh"),
            "steps[1].activation",
            "steps[1].activation: expected none, relu",
        ),
        (
            program(FIRST, y=of("a", "z")),
            "outputs.y",
            "outputs.y: expected an output of step 'a' (y, aux), got 'z'",
        ),
        (
            program(FIRST, y=of("z", "y")),
            "outputs.y",
            "outputs.y: expected the name of a step, got 'z'",
        ),
        (
            program(FIRST, y=of("a", "y"), again=of("a", "y")),
            "outputs.again",
            "expected an output that is sent back once, outputs.y is the same",
        ),
    ],
)
def test_steps_that_do_not_fit(wire: Wire, header: object, operand: str, says: str) -> None:
    refused_program(wire, header, "invalid_operands", operand, says)


@pytest.mark.parametrize(
    ("header", "operand", "says"),
    [
        ({}, "steps", "steps: expected, is missing"),
        ({"steps": [], "outputs": Y}, "steps", "at least 1 item"),
        (program(*[FIRST] * 65, **Y), "steps", "at most 64 items"),
        ({"steps": [FIRST], "outputs": {}}, "outputs", "at least 1 item"),
        ({"steps": [3], "outputs": Y}, "steps[0]", "steps[0]: expected a map, got 3"),
        (program(FIRST, FIRST, **Y), "steps[1].name", "expected another than that of steps[0]"),
        (program({**FIRST, "name": ""}, **Y), "steps[0].name", "at least 1 character"),
        (program({**FIRST, "nom": "a"}, **Y), "steps[0].nom", "steps[0].nom: unknown field"),
        (
            program({**FIRST, "operation": "sum"}, **Y),
            "steps[0]",
            "steps[0]: expected as operation one of linear/forward, linear/backward",
        ),
        (
            program({"name": "a", "header": {}}, **Y),
            "steps[0]",
            "expected as operation one of",
        ),
        (
            program({"name": "a", "operation": "matmul"}, **Y),
            "steps[0].header",
            "steps[0].header: expected, is missing",
        ),
        (
            program(step("a", "run", steps=[FIRST], outputs=Y), **Y),
            "steps[0]",
            "expected as operation one of",
        ),
        (after(x=of("a", "y")), "steps[1].weight", "steps[1].weight: expected, is missing"),
        (
            after(x={"step": "a", "output": 3}, weight=tensor(W, 1)),
            "steps[1].x",
            "steps[1].x.output: expected a valid string, got 3",
        ),
        (
            after(x={"step": "a"}, weight=tensor(W, 1)),
            "steps[1].x",
            "expected both step and output, or neither",
        ),
        (
            after(x={**tensor(X, 0), "output": "y"}, weight=tensor(W, 1)),
            "steps[1].x",
            "expected both step and output, or neither",
        ),
        (
            after(x=of("a", "y", payload=0), weight=tensor(W, 1)),
            "steps[1].x",
            "expected exactly one source, got payload and step",
        ),
        (
            after("mlp/forward", x=tensor(X, 0), layers=[{"weight": {"dtype": 3}}]),
            "steps[1].layers[0].weight",
            "steps[1].layers[0].weight.dtype: expected a valid string, got 3",
        ),
        (
            after(x=tensor(X, 0), weight=tensor(W, 1), outputs={"y": "payload"}),
            "steps[1].outputs",
            "expected none in a step, the program's outputs say where they go",
        ),
        (
            program(FIRST, y=of("a", "y", placement="here")),
            "outputs.y",
            "expected 'payload' or 'tensor'",
        ),
        ({"steps": [FIRST], "outputs": {"y": "tensor"}}, "outputs.y", "expected a map"),
    ],
)
def test_malformed(wire: Wire, header: object, operand: str, says: str) -> None:
    refused_program(wire, header, "malformed", operand, says)


def test_a_stack_whose_tape_and_placements_do_not_fit(wire: Wire) -> None:
    stack = step("f", "mlp/forward", x=tensor(X, 0), layers=[{"weight": tensor(W, 1)}])
    y = {"y": of("f", "y")}

    def then(tape: object, **more: Any) -> dict[str, Any]:
        return program(stack, step("b", "mlp/backward", tape=tape, **more), **y)

    dy = of("f", "y")
    says = "steps[1].tape: expected an output of step 'f' (y), got 'tape'"
    header = then(of("f", "tape"), dy=dy)
    refused_program(wire, header, "invalid_operands", "steps[1].tape", says)
    header = then(of("f", "y"), dy=dy)
    says = "expected a tape, that output is a tensor"
    refused_program(wire, header, "conflict", "steps[1].tape", says)
    stack["header"]["save_tape"] = True
    header = then(of("f", "tape"), dy=dy, layers=[{"dweight": "tensor"}])
    refused_program(wire, header, "malformed", "steps[1].layers", "expected none in a step")
    header = then(of("f", "tape"), dy=tensor(X, 0))
    refused_program(wire, header, "invalid_operands", "steps[1].dy", "expected shape (6, 8)")
    header = program(stack, step("b", "matmul", a=of("f", "tape"), b=of("f", "y")), **y)
    refused_program(wire, header, "conflict", "steps[1].a", "expected a tensor, got a tape")
    header = program(stack, tape=of("f", "tape", placement="payload"))
    says = "expected tensor for a tape"
    refused_program(wire, header, "invalid_operands", "outputs.tape", says)


def test_a_source_of_programs_elsewhere(wire: Wire) -> None:
    says = "expected another source, a step is for /v1/run only"
    for path, header, operand in (
        (FORWARD, {"x": of("a", "y"), "weight": tensor(W, 0)}, "x"),
        (MLP_BACKWARD, {"tape": of("a", "tape"), "dy": tensor(W, 0)}, "tape"),
        (TENSORS, {"value": of("a", "y")}, "value"),
    ):
        refused_header(wire, path, header, raw(W), code="malformed", operand=operand, says=says)
    request = {"operation": "linear/forward", "header": {"x": of("a", "y"), "weight": of("a", "y")}}
    refused_header(wire, WARM, {"requests": [request]}, code="malformed", operand="x", says=says)


def test_payloads_that_are_missing_or_too_many(wire: Wire) -> None:
    header = after(x=tensor(X, 0), weight=tensor(W, 2))
    says = "steps[1].weight: expected a payload index below 2, got 2"
    refused_program(wire, header, "malformed", "steps[1].weight", says)
    header = after(x=of("a", "y"), weight=tensor(np.zeros((2, 8), np.float32), 2))
    says = "steps[1].weight: expected 64 bytes for shape [2, 8] of float32, got 63"
    refused_program(wire, header, "invalid_operands", "steps[1].weight", says, *BODY, bytes(63))
    header = after(x=tensor(X, 0), weight=tensor(W, 1))
    says = "payload 2: expected a tensor that names it"
    refused_program(wire, header, "malformed", None, says, *BODY, b"")


def test_accumulation_has_no_other_use(wire: Wire) -> None:
    total = wire.hold(np.zeros((8, 8), np.float32))
    into = {"tensor": total, "alpha": 1.0, "beta": 1.0}
    gradient = step("g", "linear/backward", dz=of("a", "y"), x=of("a", "y"), wants=["dweight"])
    added = of("g", "dweight", placement=into)
    reader = step("r", "matmul", a=of("g", "dweight"), b=of("g", "dweight"))
    says = "expected a gradient that is accumulated to have no other use, "
    for header, operand, user in (
        (program(FIRST, gradient, reader, t=added), "outputs.t", "steps[2].b uses it too"),
        (program(FIRST, gradient, t=added, g=of("g", "dweight")), "outputs.g", "outputs.t uses it"),
        (program(FIRST, gradient, g=of("g", "dweight"), t=added), "outputs.t", "outputs.g uses it"),
    ):
        refused_program(wire, header, "invalid_operands", operand, says + user)
    header = program(FIRST, y=of("a", "y", placement=into))
    says = "outputs.y: alpha and beta are for dweight and dbias"
    refused_program(wire, header, "invalid_operands", "outputs.y", says)
    assert wire.get(f"{TENSORS}/{total}/metadata")["version"] == 1


def test_tensors_that_do_not_take_the_output(wire: Wire) -> None:
    target = wire.hold(X)
    into = {"tensor": target}
    header = program(FIRST, y=of("a", "y", placement=into))
    says = "outputs.y: expected a tensor [6, 8] of float32"
    refused_program(wire, header, "invalid_operands", "outputs.y", says)
    same = step("b", "linear/forward", x=tensor(X, 0), weight=tensor(SQUARE, 2))
    header = program(FIRST, same, y=of("b", "y", placement=into), z=of("b", "y", placement=into))
    says = "outputs.z: expected a tensor of its own"
    refused_program(wire, header, "invalid_operands", "outputs.z", says, *BODY, raw(SQUARE))
    header = program(FIRST, aux=of("a", "aux", placement=into))
    says = "outputs.aux: expected payload or tensor, got a handle"
    refused_program(wire, header, "invalid_operands", "outputs.aux", says)


def test_handles_that_are_none(wire: Wire) -> None:
    says = "steps[1].x: expected a handle of this service, got 'nothing'"
    header = after(x={"tensor": "nothing"}, weight=tensor(W, 1))
    refused_program(wire, header, "unknown_handle", "steps[1].x", says)
    header = program(FIRST, y=of("a", "y", placement={"tensor": "nothing"}))
    says = "outputs.y: expected a handle of this service"
    refused_program(wire, header, "unknown_handle", "outputs.y", says)


def test_a_handle_that_was_freed_since_the_program_was_known(wire: Wire) -> None:
    handle = wire.hold(np.ones((2, 8), np.float32))
    header = after(x=of("a", "y"), weight={"tensor": handle})
    for _ in range(3):
        assert wire.send(RUN, header, *BODY).status == 200
    assert wire.request("DELETE", f"{TENSORS}/{handle}").status == 204
    says = "steps[1].weight: expected a tensor that is held"
    refused_program(wire, header, "gone", "steps[1].weight", says)


def test_a_header_nested_deeply(wire: Wire) -> None:
    nest: Any = 1
    for _ in range(400):
        nest = {"step": nest}
    refused_program(
        wire, after(x=nest, weight=tensor(W, 1)), "malformed", "steps[1].x", "steps[1].x.step"
    )


DEVICE = 1 << 20


def service(folder: Path, **settings: Any) -> Iterator[Wire]:
    with running(folder / "s", device="cpu", **settings), closing(Wire(folder / "s")) as wire:
        yield wire


@pytest.fixture
def frugal(tmp_path: Path) -> Iterator[Wire]:
    """A quota of 2000 bytes."""
    yield from service(tmp_path, tenant_bytes=2000)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Wire]:
    """1 MiB for arrays."""
    settings: dict[str, Any] = {"memory_limit": DEVICE, "tenant_bytes": 1 << 40}
    yield from service(tmp_path, **settings, recording_bytes=0)


def kept(wire: Wire, handle: str, array: Host) -> None:
    """The tensor is what it was."""
    assert wire.get(f"{TENSORS}/{handle}/metadata")["version"] == 1
    held = wire.request("GET", f"{TENSORS}/{handle}", headers={"Accept": OCTETS})
    assert held.body == raw(array)


def test_the_quota_of_results(frugal: Wire) -> None:
    """One result would fit, and be put into a tensor; the other does not: neither is."""
    target = np.zeros((6, 8), np.float32)
    handle = frugal.hold(target)
    wide = np.ones((100, 8), np.float32)
    steps = [FIRST, step("b", "linear/forward", x=of("a", "y"), weight=tensor(wide, 2))]
    header = program(
        *steps,
        y=of("a", "y", placement={"tensor": handle}),
        aux=of("a", "aux"),
        z=of("b", "y", placement="tensor"),
    )
    says = "2496 bytes are needed, 192 of the tenant's quota of 2000 are used"
    refused_header(frugal, RUN, header, *BODY, raw(wide), code="out_of_memory", says=says)
    kept(frugal, handle, target)


def test_intermediate_results_need_no_quota(frugal: Wire) -> None:
    wide, narrow = np.ones((100, 8), np.float32), np.ones((1, 100), np.float32)
    header = program(
        FIRST,
        step("b", "linear/forward", x=of("a", "y"), weight=tensor(wide, 2)),
        step("c", "linear/forward", x=of("b", "y"), weight=tensor(narrow, 3)),
        y=of("c", "y", placement="tensor"),
    )
    with unchanged(frugal):
        answer = frugal.send(RUN, header, *BODY, raw(wide), raw(narrow))
        assert answer.status == 200, answer.header
        handle = answer.header["y"]["tensor"]
        assert frugal.request("DELETE", f"{TENSORS}/{handle}").status == 204


def test_device_memory_in_the_middle(small: Wire) -> None:
    """The third step finds none: no weight is changed, the tape that the second uses is kept."""
    weight = np.ones((8, 4), np.float32)
    handle = small.hold(weight)
    stack = {"x": tensor(X, 0), "layers": [{"weight": {"tensor": handle}}], "save_tape": True}
    tape = small.send(MLP_FORWARD, stack, raw(X)).header["tape"]["tensor"]
    long = np.zeros((1 << 12, 1), np.float32)
    update = {"tensor": handle, "alpha": -1.0, "beta": 1.0}
    header = program(
        FIRST,
        step("b", "mlp/backward", tape=tape, dy=of("a", "y")),
        step("c", "linear/forward", x=tensor(long, 2), weight=tensor(long, 2)),
        w=of("b", "layers[0].dweight", placement=update),
        y=of("a", "y", placement="tensor"),
        z=of("c", "y", placement="tensor"),
    )
    says = f"bytes are needed ... of {DEVICE} are free"
    refused_header(small, RUN, header, *BODY, raw(long), code="out_of_memory", says=says)
    kept(small, handle, weight)
    assert small.get(f"{TENSORS}/{tape}/metadata")["kind"] == "tape"
    backward = {"tape": tape, "dy": tensor(np.zeros((6, 8), np.float32), 0)}
    assert small.send(MLP_BACKWARD, backward, bytes(192)).status == 200


def test_what_was_read_for_the_last_time_is_given_up(small: Wire) -> None:
    """Sixteen results of a fifth of the memory each, one after the other."""
    x, eye = np.ones((50_000, 1), np.float32), np.ones((1, 1), np.float32)
    steps = [step("0", "linear/forward", x=tensor(x, 0), weight=tensor(eye, 1))]
    for n in range(1, 16):
        before = of(str(n - 1), "y")
        steps.append(step(str(n), "linear/forward", x=before, weight=tensor(eye, 1)))
    sums = step("s", "linear/backward", dz=of("15", "y"), wants=["dbias"])
    header = program(*steps, sums, y=of("s", "dbias"))
    answer = small.send(RUN, header, raw(x), raw(eye))
    assert answer.status == 200, answer.header
    np.testing.assert_array_equal(answer.array("y"), [50_000])
