"""Programs of the client on a running service."""

from __future__ import annotations

import doctest
from typing import Any

import numpy as np
import pytest
from matmuld_client import (
    Accumulate,
    Client,
    Gone,
    InvalidOperands,
    Layer,
    Malformed,
    Program,
    RemoteTensor,
    StepResult,
    Tape,
)

from ..reference import DTYPES, FLOAT8, Host, activate, activation_prime, assert_close, f64, random

RNG = np.random.default_rng(11)
X = random(RNG, (6, 4), "float32")
W0, W1 = random(RNG, (8, 4), "float32"), random(RNG, (3, 8), "float32")
B0 = random(RNG, (8,), "float32")
DY = random(RNG, (6, 3), "float32")


def close(got: object, expected: Host) -> None:
    assert isinstance(got, np.ndarray)
    assert_close(got, expected, 20.0, "float32", approximate=True)


def gradients(x: Host = X) -> dict[str, Host]:
    z = f64(x) @ f64(W0).T + f64(B0)
    dz = (f64(DY) @ f64(W1)) * activation_prime("gelu", z)
    h = activate("gelu", z)
    return {"y": h @ f64(W1).T, "dw0": dz.T @ f64(x), "db0": dz.sum(0), "dw1": f64(DY).T @ h}


def test_the_example(client: Client) -> None:
    names: dict[str, Any] = {"client": client, "x": X, "w0": W0, "w1": W1, "dy": DY}
    examples = doctest.DocTestParser().get_examples(Program.__doc__ or "")
    for example in examples[:-1]:
        exec(example.source, names)
    assert len(examples) > 5
    assert repr(eval(examples[-1].source, names)) == examples[-1].want.strip()


def test_layers_forward_and_backward(client: Client) -> None:
    program = client.program()
    hidden, aux = program.linear(X, W0, B0, activation="gelu", save_aux=True)
    y = program.linear(hidden, W1)
    last = program.linear_backward(W1, hidden, dz=DY, input_aux=aux, input_dbias=True)
    first = program.linear_backward(x=X, dz=last.dx, wants=["dweight"])
    assert len(program) == 4
    wanted = {"y": y, "dw0": first.dweight, "db0": last.input_dbias, "dw1": last.dweight}
    results = program.run(wanted)
    for name, expected in gradients().items():
        close(results[name], expected)
        told = wanted[name]
        assert told is not None
        assert told.shape == expected.shape
        assert told.dtype == np.float32


def test_a_stack(client: Client) -> None:
    program = client.program()
    layers = [Layer(W0, B0, "gelu"), Layer(W1)]
    y, tape = program.mlp(X, layers, save_tape=True)
    below = program.mlp_backward(tape, dy=DY, wants=["dx", "dweight", "dbias"])
    wanted = {
        "y": y,
        "dw0": below.layers[0].dweight,
        "db0": below.layers[0].dbias,
        "dw1": below.layers[1].dweight,
    }
    assert below.layers[1].dbias is None
    results = program.run({**wanted, "dx": below.dx, "tape": tape})
    for name, expected in gradients().items():
        close(results[name], expected)
        told = wanted[name]
        assert told is not None
        assert told.shape == expected.shape
    assert isinstance(results["tape"], Tape)
    dx = client.mlp_backward(results["tape"], dy=DY, wants=["dx"]).dx
    assert isinstance(dx, np.ndarray)
    close(results["dx"], f64(dx))


def test_products(client: Client) -> None:
    program = client.program()
    d = program.matmul(X, W0.T)
    biased, mask = program.matmul(W0, X.T, epilog="RELU_AUX_BIAS", bias=B0)
    masked = program.matmul(np.eye(8, dtype=np.float32), biased, epilog="DRELU", relu_aux=mask)
    assert (d.shape, biased.shape, masked.shape) == ((6, 8), (8, 6), (8, 6))
    results = program.run({"d": d, "masked": masked})
    close(results["d"], f64(X) @ f64(W0).T)
    close(results["masked"], np.maximum(f64(W0) @ f64(X).T + f64(B0)[:, None], 0))


def test_new_contents_of_arrays_are_seen(client: Client) -> None:
    x = X.copy()
    program = client.program()
    hidden, aux = program.linear(x, W0, B0, activation="gelu", save_aux=True)
    last = program.linear_backward(W1, hidden, dz=DY, input_aux=aux)
    first = program.linear_backward(x=x, dz=last.dx, wants=["dweight"])
    for factor in range(1, 6):
        x[...] = factor * X
        close(program.run({"dw0": first.dweight})["dw0"], gradients(x)["dw0"])


def test_results_in_tensors(client: Client) -> None:
    weight, total = client.put(W0), client.zeros((6, 8))
    program = client.program()
    y = program.linear(X, weight)
    step = program.linear_backward(x=X, dz=y, wants=["dweight"])
    results = program.run(
        {"w": step.dweight, "y": y, "kept": y},
        out={"w": Accumulate(weight, alpha=-0.1), "y": total, "kept": "tensor"},
    )
    assert results["w"] is weight
    assert results["y"] is total
    kept, expected = results["kept"], f64(X) @ f64(W0).T
    assert isinstance(kept, RemoteTensor)
    close(kept.numpy(), expected)
    close(total.numpy(), expected)
    close(weight.numpy(), f64(W0) - 0.1 * expected.T @ f64(X))


def test_views_and_scales_and_what_is_known_of_results(client: Client) -> None:
    held = client.put(np.concatenate([X, X]))
    program = client.program()
    y = program.linear(held[:6], W0.astype("float32"))
    close(program.run({"y": y})["y"], f64(X) @ f64(W0).T)
    assert y.dtype == np.float32
    eight = np.zeros((16, 16), FLOAT8["float8_e4m3fn"])
    assert program.linear(eight, eight).dtype == DTYPES["bfloat16"]
    wide = program.linear(eight, eight, options={"result_type": "float32"})
    assert wide.dtype == np.float32
    _, aux = program.linear(X, W0, activation="relu", save_aux=True)
    assert (aux.shape, aux.dtype) == (None, None)
    scaled = program.linear(eight, eight, scales={"x": wide, "weight": 1.0})
    with pytest.raises(InvalidOperands, match=r"steps\[1\]\.scales\.x: expected a scale for x"):
        program.run({"y": scaled})


def test_an_array_is_sent_once(client: Client) -> None:
    program = client.program()
    y = program.linear(X, W0)
    for _ in range(5):
        program.linear(X, W0)
    assert len(program._payloads) == 2
    assert client.linear(X, X).shape == (6, 6)
    close(program.run({"y": y})["y"], f64(X) @ f64(W0).T)


def test_errors_name_the_step(client: Client) -> None:
    program = client.program()
    y = program.linear(X, W0)
    z = program.linear(y, W0)
    with pytest.raises(InvalidOperands, match=r"^steps\[1\]\.x: expected shape") as caught:
        program.run({"z": z})
    assert caught.value.operand == "steps[1].x"
    weight = client.put(W0)
    program = client.program()
    y = program.linear(X, weight)
    program.run({"y": y})
    weight.free()
    with pytest.raises(Gone, match=r"^steps\[0\]\.weight: "):
        program.run({"y": y})
    with pytest.raises(Malformed, match="outputs"):
        program.run({})


def test_a_step_that_could_not_be_added_is_not_there(client: Client) -> None:
    program: Any = client.program()
    y = program.linear(X, W0)
    with pytest.raises(TypeError, match=r"layers\[0\]: expected a Layer"):
        program.mlp(DY, [DY])
    assert len(program) == 1
    close(program.run({"y": y})["y"], f64(X) @ f64(W0).T)


NOWHERE: Any = Client("unix:/nowhere")
STEP: Any = NOWHERE.program().linear(X, W0)


def run(outputs: dict[str, Any], out: Any = None) -> object:
    return NOWHERE.program().run(outputs, out=out)


@pytest.mark.parametrize(
    ("mistake", "says"),
    [
        (lambda: NOWHERE.linear(STEP, W0), "x: expected a result of a step of this program"),
        (lambda: NOWHERE.program().linear(STEP, W0), "x: expected a result of a step of this"),
        (lambda: NOWHERE.program().mlp_backward(STEP), "tape: expected a result of a step of"),
        (lambda: STEP.program.mlp_backward(STEP), "tape: expected the tape of an mlp, got its y"),
        (lambda: run({"y": X}), "y: expected a result of a step, got ndarray"),
        (lambda: run({"y": None}), "y: expected a result of a step, got NoneType"),
        (lambda: run({"y": STEP}, {"z": "tensor"}), "out: expected names of outputs, got 'z'"),
        (lambda: run({"y": STEP}, {"y": X}), "y: expected 'array', 'tensor' or a RemoteTensor"),
    ],
)
def test_mistakes_are_type_errors(mistake: Any, says: str) -> None:
    with pytest.raises(TypeError, match=says):
        mistake()


def test_results_are_told_apart() -> None:
    program = NOWHERE.program()
    first, second = program.linear(X, W0), program.linear(X, W0)
    assert isinstance(first, StepResult)
    assert first != second
    assert repr(first) == ("StepResult(step='0', output='y', shape=(6, 8), dtype=dtype('float32'))")
