"""/v1/matmul through the SDK: batches, strides, epilogs and options, against float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from matmuld_client import Client, RemoteTensor

from .. import reference
from ..reference import DTYPES, Host, assert_close, f64

LEADS: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
    ((), ()),
    ((3,), (3,)),
    ((3,), ()),
    ((), (3,)),
    ((2, 3), (2, 3)),
    ((2, 3), ()),
]


def pair(dtype: str, lead_a: tuple[int, ...], lead_b: tuple[int, ...]) -> tuple[Host, Host]:
    rng = np.random.default_rng(3)
    return (
        reference.random(rng, (*lead_a, 24, 10), dtype),
        reference.random(rng, (*lead_b, 10, 13), dtype),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("lead_a", "lead_b"), LEADS)
def test_batches_are_equal_or_absent_on_one_side(
    client: Client, dtype: str, lead_a: tuple[int, ...], lead_b: tuple[int, ...]
) -> None:
    a, b = pair(dtype, lead_a, lead_b)
    z = f64(a) @ f64(b)
    scale = np.abs(f64(a)) @ np.abs(f64(b)) + 1
    assert_close(client.matmul(a, b), z, scale, dtype)
    bias = reference.random(np.random.default_rng(4), (24,), dtype)
    d = client.matmul(a, b, epilog="RELU_BIAS", bias=bias)
    assert_close(d, reference.relu(z + f64(bias)[:, None]), scale + 1, dtype)


@pytest.mark.parametrize(("lead_a", "lead_b"), LEADS)
def test_the_gradient_epilogs_take_the_aux_of_the_forward_epilogs(
    client: Client, lead_a: tuple[int, ...], lead_b: tuple[int, ...]
) -> None:
    a, b = pair("float64", lead_a, lead_b)
    z = f64(a) @ f64(b)
    lead = lead_a or lead_b
    for name, slope in (("relu", (z >= 0) * 1.0), ("gelu", reference.gelu_prime(z))):
        forward: Any = f"{name.upper()}_AUX"
        backward: Any = f"D{name.upper()}_BGRAD"
        _, extras = client.matmul(a, b, epilog=forward)
        aux = extras[f"{name}_aux"]
        assert isinstance(aux, RemoteTensor)
        keywords: Any = {f"{name}_aux": aux}
        d, more = client.matmul(a, b, epilog=backward, **keywords)
        np.testing.assert_allclose(d, z * slope, rtol=1e-10, atol=1e-10)
        shape = (*lead, 24, 1) if lead else (24,)
        sums = (z * slope).sum(-1).reshape(shape)
        np.testing.assert_allclose(more[f"d{name}_bgrad"], sums, rtol=1e-9, atol=1e-9)
    _, more = client.matmul(a, b, epilog="BGRADA")
    shape = (*lead, 24, 1) if lead else (24,)
    sums = np.broadcast_to(a.sum(-1), (*lead, 24)).reshape(shape)
    np.testing.assert_allclose(as_array(more["bgrada"]), sums)
    _, more = client.matmul(a, b, epilog="BGRADB")
    shape = (*lead, 13, 1) if lead else (13,)
    sums = np.broadcast_to(b.sum(-2), (*lead, 13)).reshape(shape)
    np.testing.assert_allclose(as_array(more["bgradb"]), sums)


def as_array(value: Host | RemoteTensor) -> Host:
    assert isinstance(value, np.ndarray)
    return value


@pytest.mark.parametrize("shape", [(24, 13), (24, 1), (1, 13), (1, 1), (13,), (3, 24, 13)])
@pytest.mark.parametrize("epilog", [None, "BIAS", "RELU"])
def test_c_broadcasts(client: Client, shape: tuple[int, ...], epilog: Any) -> None:
    lead = (3,) if len(shape) == 3 else ()
    a, b = pair("float64", lead, lead)
    rng = np.random.default_rng(5)
    c, bias = rng.standard_normal(shape), rng.standard_normal(24)
    extra: Any = {"bias": bias} if epilog == "BIAS" else {}
    d = client.matmul(a, b, c, alpha=0.5, beta=-1.0, epilog=epilog, **extra)
    expected = 0.5 * (a @ b) - c + (bias[:, None] if extra else 0)
    if epilog == "RELU":
        expected = reference.relu(expected)
    np.testing.assert_allclose(d, expected, rtol=1e-12, atol=1e-12)


def test_a_bias_may_have_a_batch(client: Client) -> None:
    a, b = pair("float32", (3,), (3,))
    for shape in ((24,), (24, 1), (3, 24, 1)):
        bias = reference.random(np.random.default_rng(6), shape, "float32")
        d = client.matmul(a, b, epilog="BIAS", bias=bias)
        column = bias[:, None] if bias.ndim == 1 else bias
        assert_close(d, f64(a) @ f64(b) + f64(column), 40.0, "float32")


def test_transposed_and_sliced_operands(client: Client) -> None:
    rng = np.random.default_rng(8)
    held_a, held_b = rng.standard_normal((40, 60)), rng.standard_normal((40, 60))
    with client.put(held_a) as a, client.put(held_b) as b:
        np.testing.assert_allclose(client.matmul(a.T, b), held_a.T @ held_b)
        np.testing.assert_allclose(client.matmul(a, b.T), held_a @ held_b.T)
        np.testing.assert_allclose(
            client.matmul(a[3:33:3, 1:50:2], b[::2, 7:32].T),
            held_a[3:33:3, 1:50:2] @ held_b[::2, 7:32].T,
        )


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_compute_type_of_a_dtype_computes(client: Client, dtype: str) -> None:
    compute_types: Any = {
        "float64": ["COMPUTE_64F", "COMPUTE_64F_PEDANTIC"],
        "float32": [
            "COMPUTE_32F",
            "COMPUTE_32F_PEDANTIC",
            "COMPUTE_32F_FAST_16F",
            "COMPUTE_32F_FAST_16BF",
            "COMPUTE_32F_FAST_TF32",
        ],
        "float16": ["COMPUTE_32F", "COMPUTE_32F_PEDANTIC", "COMPUTE_16F", "COMPUTE_16F_PEDANTIC"],
        "bfloat16": ["COMPUTE_32F", "COMPUTE_32F_PEDANTIC"],
    }[dtype]
    a, b = pair(dtype, (), ())
    bias = reference.random(np.random.default_rng(4), (24,), dtype)
    for compute_type in compute_types:
        d = client.matmul(
            a,
            b,
            epilog="RELU_BIAS",
            bias=bias,
            options={"compute_type": compute_type},
        )
        fast = "FAST" in compute_type
        tolerance = "bfloat16" if fast else dtype
        expected = reference.relu(f64(a) @ f64(b) + f64(bias)[:, None])
        assert_close(d, expected, np.abs(f64(a)) @ np.abs(f64(b)) + 1, tolerance)


@pytest.mark.parametrize(
    "options",
    [
        {"fast_accumulation": True},
        {"sm_count_target": 8},
        {"reduction_scheme_mask": 0},
        {"numerical_impl_mask": (1 << 64) - 1},
    ],
)
def test_the_planners_options_are_part_of_the_plan(client: Client, options: Any) -> None:
    a, b = pair("float32", (), ())
    client.matmul(a, b)
    planned = client.plans()["stats"]["planned"]
    for _ in range(2):
        d = client.matmul(a, b, options=options)
        assert_close(d, f64(a) @ f64(b), 40.0, "float32")
    assert client.plans()["stats"]["planned"] == planned + 1
    described = [plan for plan in client.plans()["plans"] if options.items() <= plan.items()]
    assert described


def test_d_may_stay_or_take_the_place_of_a_tensor(client: Client) -> None:
    a, b = pair("float64", (), ())
    bias = np.ones(24)
    with client.matmul(a, b, epilog="BIAS", bias=bias, out="tensor") as d:
        np.testing.assert_allclose(d.numpy(), a @ b + 1)
        np.testing.assert_allclose(client.matmul(d.T, a), (a @ b + 1).T @ a)
        client.matmul(a, b, out=d)
        np.testing.assert_allclose(d.numpy(), a @ b)


@pytest.mark.parametrize("epilog", [None, "BIAS"])
def test_views_stay_right_whatever_was_put_into_their_tensor(client: Client, epilog: Any) -> None:
    """D is row-major without an epilog, column-major with a bias; the tensor keeps its layout."""
    a, b = pair("float64", (), ())
    bias = np.ones(24)
    other: Any = {None: "BIAS", "BIAS": None}[epilog]

    def product(name: Any, out: Any) -> Any:
        extra: Any = {"bias": bias} if name else {}
        return client.matmul(a, b, epilog=name, out=out, **extra)

    with product(epilog, "tensor") as d:
        view = d[3:21:2, 1:9]
        expected = a @ b + (1 if epilog else 0)
        np.testing.assert_allclose(client.matmul(view, b[:8]), expected[3:21:2, 1:9] @ b[:8])
        product(other, d)
        expected = a @ b + (1 if other else 0)
        np.testing.assert_allclose(client.matmul(view, b[:8]), expected[3:21:2, 1:9] @ b[:8])
        np.testing.assert_allclose(d.numpy(), expected)
        d.replace(2 * expected)
        np.testing.assert_allclose(client.matmul(view, b[:8]), 2 * expected[3:21:2, 1:9] @ b[:8])
