"""Tensors that stay in a running service: stored, fetched, kept, shared and freed."""

from __future__ import annotations

import gc
from typing import Literal

import numpy as np
import pytest
from matmuld_client import (
    Client,
    Gone,
    Layer,
    RemoteTensor,
    Tape,
    UnknownHandle,
)

from ..reference import (
    DTYPES,
    f64,
    random,
)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 3, 3000])
def test_what_is_stored_comes_back(
    client: Client, rng: np.random.Generator, dtype: str, rows: int
) -> None:
    array = random(rng, (rows, 300), dtype)
    for stored in (array, np.asfortranarray(array)):
        tensor = client.put(stored)
        assert (tensor.shape, tensor.dtype, tensor.nbytes) == (
            array.shape,
            array.dtype,
            array.nbytes,
        )
        np.testing.assert_array_equal(tensor.numpy(), array)
    tensor.replace(np.asfortranarray(array[::-1]))
    np.testing.assert_array_equal(tensor.numpy(), array[::-1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("epilog", [None, "BIAS"])
def test_a_view_is_fetched_as_what_it_shows(
    client: Client, rng: np.random.Generator, dtype: str, epilog: Literal["BIAS"] | None
) -> None:
    a, b = random(rng, (2, 16, 8), dtype), random(rng, (2, 8, 24), dtype)
    bias = None if epilog is None else random(rng, (16,), dtype)
    d = client.matmul(a, b, epilog=epilog, bias=bias, out="tensor")
    assert (d.strides[-1] == 1) is (epilog is None)
    whole = d.numpy()
    for view, expected in (
        (d.T, whole.T),
        (d.mT[:, 3:], whole.swapaxes(1, 2)[:, 3:]),
        (d[1, 2::3, 4:20:5], whole[1, 2::3, 4:20:5]),
        (d[..., -1], whole[..., -1]),
        (d[:, 16:, 24:], whole[:, 16:, 24:]),
        (d[0, 1, 2], whole[0, 1, 2]),
    ):
        shown = view.numpy()
        assert shown.dtype == whole.dtype
        assert shown.flags.c_contiguous
        np.testing.assert_array_equal(shown, expected)


def test_a_list_is_stored_like_the_array_it_makes(client: Client) -> None:
    tensor = client.put([[1.0, 2.0]])  # type: ignore[arg-type]
    np.testing.assert_array_equal(tensor.numpy(), [[1.0, 2.0]])


def test_zeros_are_made_in_the_service(client: Client) -> None:
    assert client.zeros(5).shape == client.zeros(np.int64(5)).shape == (5,)
    for dtype in ("bfloat16", np.float64):
        tensor = client.zeros((2, 3), dtype)
        assert not f64(tensor.numpy()).any()
        assert tensor.shape == (2, 3)


def metadata(client: Client, handle: str) -> dict[str, object]:
    (found,) = [entry for entry in client.tensors() if entry["tensor"] == handle]
    return found


@pytest.mark.parametrize("rows", [3, 300_000])
def test_how_long_a_tensor_is_kept(client: Client, rows: int) -> None:
    pinned = client.put(np.zeros(rows), pinned=True)
    assert metadata(client, pinned.handle)["pinned"] is True
    brief = client.put(np.zeros(rows), ttl=5.5)
    assert metadata(client, brief.handle)["ttl_s"] == 5.5
    brief.keep(pinned=True, ttl=7)
    assert metadata(client, brief.handle)["pinned"] is True
    assert metadata(client, brief.handle)["ttl_s"] == 7


def test_a_handle_is_shared_between_clients(client: Client, url: str) -> None:
    array = np.arange(6.0).reshape(2, 3)
    with Client(url) as other:
        handle = other.put(array).release()
    tensor = client.tensor(handle)
    assert isinstance(tensor, RemoteTensor)
    np.testing.assert_array_equal(tensor.numpy(), array)
    tensor.free()
    with pytest.raises(Gone):
        client.tensor(handle)
    with pytest.raises(UnknownHandle):
        client.tensor("nothing")


def test_a_tape_is_shared_between_clients(client: Client, url: str) -> None:
    x = np.ones((2, 3))
    with Client(url) as other:
        handle = other.mlp(x, [Layer(x)], save_tape=True)[1].release()
    tape = client.tensor(handle)
    assert isinstance(tape, Tape)
    gradients = client.mlp_backward(tape, dz=np.ones((2, 2)))
    dweight = gradients.layers[0].dweight
    assert isinstance(dweight, np.ndarray)
    assert dweight.dtype == np.float64
    np.testing.assert_array_equal(dweight, np.full((2, 3), 2.0))


def test_collected_and_left_tensors_are_freed(client: Client, url: str) -> None:
    before = len(client.tensors())
    with Client(url) as other:
        kept = other.put(np.zeros(3))
        other.put(np.zeros(3))
        x = np.ones((2, 3))
        other.linear(x, x, activation="relu", save_aux=True)
        other.mlp(x, [Layer(x)], save_tape=True)
        gc.collect()
        other.info()
        assert len(client.tensors()) == before + 1
    assert kept.handle not in [entry["tensor"] for entry in client.tensors()]
    assert len(client.tensors()) == before
