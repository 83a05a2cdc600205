"""Programs: several operations in one request, against float64 and against separate requests."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matmuld.service import Service

from ..local import Answer, Wire, decoded, raw, running, tensor
from ..reference import FLOAT8, Host, activate, activation_prime, assert_close, f64, random
from .programs import RUN, of, program, step
from .refusals import BACKWARD, FORWARD, MLP_BACKWARD, MLP_FORWARD, OCTETS, TENSORS, WARM

RNG = np.random.default_rng(3)
X = random(RNG, (6, 4), "float32")
W0, W1 = random(RNG, (8, 4), "float32"), random(RNG, (3, 8), "float32")
B0 = random(RNG, (8,), "float32")
DY = random(RNG, (6, 3), "float32")
BODY = (raw(X), raw(W0), raw(B0), raw(W1), raw(DY))

LAYER = step(
    "hidden",
    "linear/forward",
    x=tensor(X, 0),
    weight=tensor(W0, 1),
    bias=tensor(B0, 2),
    activation="gelu",
    save_aux=True,
)
HEAD = step("head", "linear/forward", x=of("hidden", "y"), weight=tensor(W1, 3))
LAST = step("last", "linear/backward", dz=tensor(DY, 4), x=of("hidden", "y"), weight=tensor(W1, 3))
LAST["header"] |= {"input_aux": of("hidden", "aux"), "input_dbias": True}
FIRST = step("first", "linear/backward", dz=of("last", "dx"), x=tensor(X, 0), wants=["dweight"])
TRAINING = program(
    LAYER,
    HEAD,
    LAST,
    FIRST,
    y=of("head", "y"),
    dw0=of("first", "dweight"),
    db0=of("last", "input_dbias"),
    dw1=of("last", "dweight"),
)


def held(wire: Wire, handle: str, like: Host) -> Host:
    body = wire.request("GET", f"{TENSORS}/{handle}", headers={"Accept": OCTETS}).body
    return np.frombuffer(body, like.dtype).reshape(like.shape)


def done(answer: Answer) -> Answer:
    assert answer.status == 200, answer.header
    return answer


def check_training(answer: Answer, x: Host = X) -> None:
    z = f64(x) @ f64(W0).T + f64(B0)
    h = activate("gelu", z)
    dz = (f64(DY) @ f64(W1)) * activation_prime("gelu", z)
    expected = {
        "y": h @ f64(W1).T,
        "dw0": dz.T @ f64(x),
        "db0": dz.sum(axis=0),
        "dw1": f64(DY).T @ h,
    }
    assert list(done(answer).header) == list(expected)
    for name, value in expected.items():
        assert_close(answer.array(name), value, 20.0, "float32", approximate=True)


def test_forward_and_backward_in_one_request(wire: Wire) -> None:
    check_training(wire.send(RUN, TRAINING, *BODY))


def test_a_program_gives_what_its_steps_give_one_by_one(wire: Wire) -> None:
    hidden = wire.send(FORWARD, LAYER["header"], *BODY[:3])
    h = hidden.array("y")
    last = {
        "dz": tensor(DY, 0),
        "x": tensor(h, 1),
        "weight": tensor(W1, 2),
        "input_aux": {"tensor": hidden.header["aux"]["tensor"]},
        "input_dbias": True,
    }
    alone = wire.send(BACKWARD, last, raw(DY), raw(h), raw(W1))
    together = done(wire.send(RUN, TRAINING, *BODY))
    assert_close(together.array("dw1"), f64(alone.array("dweight")), 9.0, "float32")
    assert_close(together.array("db0"), f64(alone.array("input_dbias")), 9.0, "float32")


def test_a_stack_and_its_backward_pass_by_a_tape_that_is_never_held(wire: Wire) -> None:
    layers = [
        {"weight": tensor(W0, 1), "bias": tensor(B0, 2), "activation": "gelu"},
        {"weight": tensor(W1, 3)},
    ]
    stack = step("f", "mlp/forward", x=tensor(X, 0), layers=layers, save_tape=True)
    back = step("b", "mlp/backward", tape=of("f", "tape"), dy=tensor(DY, 4), wants=["dweight"])
    back["header"]["wants"].append("dbias")
    header = program(
        stack,
        back,
        y=of("f", "y"),
        dw0=of("b", "layers[0].dweight"),
        db0=of("b", "layers[0].dbias"),
        dw1=of("b", "layers[1].dweight"),
    )
    before = wire.get("/v1/info")["tensors"]["count"]
    for _ in range(4):
        check_training(wire.send(RUN, header, *BODY))
    assert wire.get("/v1/info")["tensors"]["count"] == before


def test_a_tape_that_is_asked_for_and_one_that_is_held(wire: Wire) -> None:
    layers = [{"weight": tensor(W0, 1), "activation": "relu"}]
    stack = step("f", "mlp/forward", x=tensor(X, 0), layers=layers, save_tape=True)
    tape = done(wire.send(RUN, program(stack, tape=of("f", "tape")), *BODY[:2])).header["tape"]
    assert set(tape) == {"tensor", "kind"}
    assert tape["kind"] == "tape"
    dy = np.ones((6, 8), np.float32)
    back = step("b", "mlp/backward", tape=tape["tensor"], dy=tensor(dy, 0))
    header = program(back, dw=of("b", "layers[0].dweight"))
    expected = (f64(X) @ f64(W0).T > 0).T @ f64(X)
    assert_close(done(wire.send(RUN, header, raw(dy))).array("dw"), expected, 9.0, "float32")
    again = wire.send(RUN, header, raw(dy))
    assert again.header["operand"] == "steps[0].tape"
    assert again.header["code"] == "gone"


def test_products_whose_sum_is_a_bias_and_whose_result_is_a_scale(wire: Wire) -> None:
    """Results as bias and as c, and as the scale of an 8-bit operand."""
    ones, small = np.ones((16, 16), np.float32), np.full((1, 1), 0.25, np.float32)
    eight = np.eye(16, dtype=np.float32).astype(FLOAT8["float8_e4m3fn"])
    scaled = {"dtype": "float8_e4m3fn", "shape": [16, 16], "payload": 2}
    quarter = of("scale", "d", shape=[1], strides=[1])
    header = program(
        step("sums", "linear/backward", dz=tensor(ones, 0), wants=["dbias"]),
        step("scale", "matmul", a=tensor(small, 1), b=tensor(small, 1), alpha=4.0),
        step(
            "eight",
            "linear/forward",
            x=scaled,
            weight=scaled,
            scales={"x": quarter, "weight": 1.0},
            options={"result_type": "float32"},
        ),
        step(
            "last",
            "linear/forward",
            x=tensor(ones, 0),
            weight=of("eight", "y"),
            bias=of("sums", "dbias"),
            c=of("eight", "y"),
            beta=8.0,
        ),
        y=of("last", "y"),
    )
    answer = wire.send(RUN, header, raw(ones), raw(small), raw(eight))
    expected = 0.25 + 16.0 + 2.0 * np.eye(16)
    np.testing.assert_array_equal(done(answer).array("y"), expected)


def test_views_of_results(wire: Wire) -> None:
    """The transpose by strides, and a part by an offset."""
    first = step("p", "matmul", a=tensor(X, 0), b=tensor(W0.T, 1, strides=[1, 4]))
    turned = of("p", "d", shape=[8, 6], strides=[1, 8])
    row = of("p", "d", shape=[1, 8], strides=[8, 1], offset=16)
    header = program(
        first,
        step("q", "matmul", a=turned, b=of("p", "d")),
        step("r", "linear/forward", x=row, weight=tensor(W1, 2)),
        gram=of("q", "d"),
        row=of("r", "y"),
    )
    answer = done(wire.send(RUN, header, raw(X), raw(W0), raw(W1)))
    p = f64(X) @ f64(W0).T
    assert_close(answer.array("gram"), p.T @ p, 60.0, "float32")
    assert_close(answer.array("row"), p[2:3] @ f64(W1).T, 20.0, "float32")


@pytest.mark.parametrize("epilog", ["RELU_AUX_BIAS", "GELU_AUX_BIAS"])
def test_products_with_epilogs_feed_each_other(wire: Wire, epilog: str) -> None:
    """D is column-major there; its aux masks the gradient."""
    kind = epilog.partition("_BIAS")[0].lower()
    name = kind.partition("_")[0]
    bias, dd = random(RNG, (8,), "float32"), random(RNG, (8, 6), "float32")
    x_t = {"dtype": "float32", "shape": [4, 6], "strides": [1, 4], "payload": 1}
    forward = step("f", "matmul", a=tensor(W0, 0), b=x_t, epilog=epilog, bias=tensor(bias, 2))
    eye = np.eye(8, dtype=np.float32)
    backward = step("b", "matmul", a=tensor(eye, 3), b=tensor(dd, 4), epilog=f"D{name.upper()}")
    backward["header"][kind] = of("f", kind)
    joined = step("j", "matmul", a=of("b", "d"), b=of("f", "d", shape=[6, 8], strides=[8, 1]))
    header = program(forward, backward, joined, dz=of("b", "d"), j=of("j", "d"))
    answer = done(wire.send(RUN, header, raw(W0), raw(X), raw(bias), raw(eye), raw(dd)))
    z = f64(W0) @ f64(X).T + f64(bias)[:, None]
    dz = f64(dd) * activation_prime(name, z)
    assert_close(answer.array("dz"), dz, 5.0, "float32", approximate=True)
    assert_close(answer.array("j"), dz @ activate(name, z).T, 60.0, "float32", approximate=True)


def test_an_empty_batch(wire: Wire) -> None:
    x, dy = X[:0], DY[:0]
    header = program(
        *({**s, "header": dict(s["header"])} for s in TRAINING["steps"]), **TRAINING["outputs"]
    )
    header["steps"][0]["header"]["x"] = header["steps"][3]["header"]["x"] = tensor(x, 0)
    header["steps"][2]["header"]["dz"] = tensor(dy, 4)
    answer = done(wire.send(RUN, header, raw(x), *BODY[1:4], raw(dy)))
    assert answer.array("y").shape == (0, 3)
    np.testing.assert_array_equal(answer.array("dw0"), np.zeros_like(W0))


def test_an_output_in_several_places(wire: Wire) -> None:
    target = wire.hold(np.zeros((6, 3), np.float32))
    header = program(
        LAYER,
        HEAD,
        back=of("head", "y"),
        kept=of("head", "y", placement="tensor"),
        too=of("head", "y", placement={"tensor": target}),
        aux=of("hidden", "aux"),
    )
    for _ in range(5):
        answer = done(wire.send(RUN, header, *BODY[:4]))
        y, told = answer.array("back"), answer.header
        assert told["too"]["tensor"] == target
        assert told["aux"]["kind"] == "gelu_aux"
        for name in ("kept", "too"):
            np.testing.assert_array_equal(held(wire, told[name]["tensor"], y), y)
        for name in ("kept", "aux"):
            wire.request("DELETE", f"{TENSORS}/{told[name]['tensor']}")


def test_a_step_of_sgd_in_the_product(wire: Wire) -> None:
    """Every step reads the weights that were there before; they change together, at the end."""
    w0, w1 = wire.hold(W0), wire.hold(W1)
    steps = [
        step("h", "linear/forward", x=tensor(X, 0), weight={"tensor": w0}),
        step("b1", "linear/backward", dz=tensor(DY, 1), x=of("h", "y"), weight={"tensor": w1}),
        step("b0", "linear/backward", dz=of("b1", "dx"), x=tensor(X, 0), wants=["dweight"]),
        step("again", "linear/forward", x=tensor(X, 0), weight={"tensor": w0}),
    ]
    header = program(
        *steps,
        w1=of("b1", "dweight", placement={"tensor": w1, "alpha": -0.01, "beta": 1.0}),
        w0=of("b0", "dweight", placement={"tensor": w0, "alpha": -0.01, "beta": 1.0}),
        y=of("again", "y"),
    )
    v0, v1 = f64(W0), f64(W1)
    for _ in range(4):
        answer = done(wire.send(RUN, header, raw(X), raw(DY)))
        h = f64(X) @ v0.T
        assert_close(answer.array("y"), h, 20.0, "float32")
        v0, v1 = v0 - 0.01 * (f64(DY) @ v1).T @ f64(X), v1 - 0.01 * f64(DY).T @ h
        assert_close(held(wire, w0, W0), v0, 20.0, "float32")
        assert_close(held(wire, w1, W1), v1, 20.0, "float32")


def test_a_tensor_that_is_read_and_replaced(wire: Wire) -> None:
    """All steps read what it was at the start, also after the step whose result goes into it."""
    eye = np.eye(4, dtype=np.float32)
    handle = wire.hold(X)
    header = program(
        step("twice", "linear/forward", x={"tensor": handle}, weight=tensor(eye, 0), alpha=2.0),
        step("once", "linear/forward", x={"tensor": handle}, weight=tensor(eye, 0)),
        new=of("twice", "y", placement={"tensor": handle}),
        old=of("once", "y"),
    )
    for times in range(5):
        answer = done(wire.send(RUN, header, raw(eye)))
        np.testing.assert_array_equal(answer.array("old"), X * 2**times)
        np.testing.assert_array_equal(held(wire, handle, X), X * 2 ** (times + 1))


def test_two_tensors_that_are_exchanged(wire: Wire) -> None:
    eye = np.eye(4, dtype=np.float32)
    one, two = wire.hold(X), wire.hold(-X)
    header = program(
        step("a", "linear/forward", x={"tensor": one}, weight=tensor(eye, 0)),
        step("b", "linear/forward", x={"tensor": two}, weight=tensor(eye, 0)),
        a=of("a", "y", placement={"tensor": two}),
        b=of("b", "y", placement={"tensor": one}),
    )
    for sign in (-1, 1, -1, 1):
        done(wire.send(RUN, header, raw(eye)))
        np.testing.assert_array_equal(held(wire, one, X), sign * X)
        np.testing.assert_array_equal(held(wire, two, X), -sign * X)


def test_programs_at_once_on_one_tensor_come_one_after_the_other(socket_path: Path) -> None:
    """Each adds 1 by reading and replacing: none is lost."""
    wires = [Wire(socket_path) for _ in range(8)]
    one, eye = np.ones((1, 4), np.float32), np.eye(4, dtype=np.float32)
    handle = wires[0].hold(np.zeros((1, 4), np.float32))
    add = {"c": tensor(one, 1), "beta": 1.0}
    header = program(
        step("read", "linear/forward", x={"tensor": handle}, weight=tensor(eye, 0)),
        step("add", "linear/forward", x=of("read", "y"), weight=tensor(eye, 0), **add),
        sum=of("add", "y", placement={"tensor": handle}),
    )

    def ask(wire: Wire) -> None:
        for _ in range(10):
            done(wire.send(RUN, header, raw(eye), raw(one)))

    with ThreadPoolExecutor(len(wires)) as threads:
        list(threads.map(ask, wires))
    np.testing.assert_array_equal(held(wires[0], handle, one), 80 * one)
    for wire in wires:
        wire.close()


def test_programs_at_once_do_not_mix(socket_path: Path) -> None:
    def ask(number: int) -> None:
        wire = Wire(socket_path)
        for times in range(10):
            x = X * (number + times / 10)
            check_training(wire.send(RUN, TRAINING, raw(x), *BODY[1:]), x)
        wire.close()

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(ask, range(1, 5)))


def test_as_json(wire: Wire) -> None:
    one = {"dtype": "float32", "shape": [1, 1], "data": "AACAPw=="}
    header = program(
        step("a", "linear/forward", x=one, weight=one, alpha=3.0),
        step("b", "linear/forward", x=of("a", "y"), weight=of("a", "y")),
        y=of("b", "y"),
    )
    body = json.dumps(header).encode()
    answer = wire.request("POST", RUN, body, {"Content-Type": "application/json"})
    assert answer.header == {"y": {"dtype": "float32", "shape": [1, 1], "data": "AAAQQQ=="}}


def test_what_is_between_may_be_larger_than_a_reply(wire: Wire) -> None:
    """A tensor in a JSON reply has at most 16 MiB; this one has 34."""
    column = {"dtype": "float32", "shape": [3000, 1]}
    ones = b64encode(raw(np.ones(3000, np.float32))).decode()
    wide = step(
        "wide", "linear/forward", x={**column, "data": ones}, weight=column | {"data": ones}
    )
    sums = step("sums", "linear/backward", dz=of("wide", "y"), wants=["dbias"])

    def ask(**outputs: Any) -> Answer:
        body = json.dumps(program(wide, sums, **outputs)).encode()
        return wire.request("POST", RUN, body, {"Content-Type": "application/json"})

    answer = ask(sums=of("sums", "dbias")).header
    got = np.frombuffer(b64decode(answer["sums"]["data"]), np.float32)
    np.testing.assert_array_equal(got, np.full(3000, 3000))
    refused = ask(y=of("wide", "y")).header
    assert (refused["code"], refused["operand"]) == ("invalid_operands", "outputs.y")
    assert "outputs.y: expected a tensor for 36000000 bytes" in refused["detail"]


@pytest.fixture
def own(tmp_path: Path, device: str) -> Iterator[tuple[Service, Wire]]:
    """A service of its own, so that its counters are ours."""
    with running(tmp_path / "s", device=device) as app, closing(Wire(tmp_path / "s")) as wire:
        assert app.service is not None
        yield app.service, wire


def test_64_steps(own: tuple[Service, Wire]) -> None:
    """Each adds the first result to that of the one before."""
    service, wire = own
    eye = np.eye(4, dtype=np.float32)
    steps = [step("0", "linear/forward", x=tensor(X, 0), weight=tensor(eye, 1))]
    for n in range(1, 64):
        more = {"c": of("0", "y"), "beta": 1.0}
        before = of(str(n - 1), "y")
        steps.append(step(str(n), "linear/forward", x=before, weight=tensor(eye, 1), **more))
    header = program(*steps, y=of("63", "y"), half=of("31", "y"))
    for factor in range(1, 8):
        answer = done(wire.send(RUN, header, raw(X * factor), raw(eye)))
        assert_close(answer.array("y"), 64 * factor * f64(X), 640.0, "float32")
        assert_close(answer.array("half"), 32 * factor * f64(X), 640.0, "float32")
        assert len(service.recordings) == (factor > 1)


def test_a_repeated_program_is_recorded(own: tuple[Service, Wire]) -> None:
    service, wire = own
    for times in range(8):
        x = X * (times + 1)
        check_training(wire.send(RUN, TRAINING, raw(x), *BODY[1:]), x)
        assert len(service.recordings) == (times > 0)


def test_the_products_of_a_program_are_planned_once(own: tuple[Service, Wire]) -> None:
    _, wire = own
    check_training(wire.send(RUN, TRAINING, *BODY))
    planned = wire.get("/v1/info")["plans"]["planned"]
    other = {**TRAINING, "outputs": {"dw0": of("first", "dweight")}}
    done(wire.send(RUN, other, *BODY))
    assert wire.get("/v1/info")["plans"]["planned"] == planned


def test_the_steps_of_a_program_are_tuned_like_any_others(tmp_path: Path, device: str) -> None:
    settings: dict[str, Any] = {"autotune": "eager", "autotune_s": 0.001}
    with running(tmp_path / "s", device=device, **settings), closing(Wire(tmp_path / "s")) as wire:
        for times in range(8):
            x = X * (times + 1)
            check_training(wire.send(RUN, TRAINING, raw(x), *BODY[1:]), x)
        strategies = wire.get("/v1/plans")["strategies"]
        assert {told["step"] for told in strategies} == {
            "Forward",
            "InputGradient",
            "WeightGradient",
        }
        assert all(told["settled"] for told in strategies)


def described(header: Any) -> Any:
    """A header without payloads."""
    if isinstance(header, dict):
        return {key: described(value) for key, value in header.items() if key != "payload"}
    return list(map(described, header)) if isinstance(header, list) else header


def test_a_program_that_is_warm_is_not_planned_again(own: tuple[Service, Wire]) -> None:
    _, wire = own
    request = {"operation": "run", "header": described(TRAINING)}
    assert done(wire.send(WARM, {"requests": [request]})).header["planned"] > 0
    planned = wire.get("/v1/info")["plans"]["planned"]
    check_training(wire.send(RUN, TRAINING, *BODY))
    assert wire.get("/v1/info")["plans"]["planned"] == planned


def test_warming_uses_no_tape_up(wire: Wire) -> None:
    layers = [{"weight": tensor(W0, 1)}]
    stack = {"x": tensor(X, 0), "layers": layers, "save_tape": True}
    tape = wire.send(MLP_FORWARD, stack, *BODY[:2]).header["tape"]["tensor"]
    dy = {"dtype": "float32", "shape": [6, 8]}
    header = program(step("b", "mlp/backward", tape=tape, dy=dy), g=of("b", "layers[0].dweight"))
    done(wire.send(WARM, {"requests": [{"operation": "run", "header": header}]}))
    backward = {"tape": tape, "dy": {**dy, "payload": 0}}
    assert wire.send(MLP_BACKWARD, backward, bytes(6 * 8 * 4)).status == 200


def test_a_program_in_16_bits(wire: Wire) -> None:
    x = X.astype("float16")
    header = program(
        step(
            "wide",
            "linear/forward",
            x=tensor(x, 0),
            weight=tensor(W0.astype("float16"), 1),
            options={"result_type": "float32"},
        ),
        step("head", "linear/forward", x=of("wide", "y"), weight=tensor(W1, 2)),
        y=of("head", "y"),
    )
    weights = raw(W0.astype("float16")), raw(W1)
    answer = done(wire.send(RUN, header, raw(x), *weights))
    expected = f64(x) @ f64(W0.astype("float16")).T @ f64(W1).T
    assert decoded(answer.header["y"], answer.payloads).dtype == np.float32
    assert_close(answer.array("y"), expected, 40.0, "float32")
