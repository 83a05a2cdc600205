"""What HTTP itself can get wrong: media types, lengths, limits, paths; the forms of a problem."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path

import msgpack
import pytest

from ..local import MSGPACK, Answer, UnixConnection, Wire, packed, running
from .refusals import (
    BODY,
    FORWARD,
    JSON,
    OCTETS,
    TENSORS,
    WARM,
    forward,
    refused,
    refused_body,
    unchanged,
    works,
)

BODY_LIMIT = 1 << 16


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Wire]:
    """A service that takes bodies of 64 KiB."""
    with running(tmp_path / "s", device="cpu", body_limit=BODY_LIMIT):
        wire = Wire(tmp_path / "s")
        yield wire
        wire.close()


@pytest.mark.parametrize("form", ["", "text/plain", "application/x-msgpack", OCTETS, "*/*"])
@pytest.mark.parametrize("path", [FORWARD, WARM])
def test_media_types(wire: Wire, path: str, form: str) -> None:
    says = f"expected Content-Type application/msgpack or application/json, got '{form}'"
    code = "unsupported_media_type"
    refused_body(wire, path, packed(forward(), *BODY), code, says=says, form=form)


@pytest.mark.parametrize("form", [MSGPACK, JSON])
def test_parameters_and_case_of_a_media_type_do_not_matter(wire: Wire, form: str) -> None:
    body = packed({"requests": []}) if form == MSGPACK else b'{"requests": []}'
    answer = wire.request("POST", WARM, body, {"Content-Type": form.upper() + "; charset=utf-8"})
    assert answer.status == 200
    assert answer.headers["content-type"] == form


@pytest.mark.parametrize("encoding", ["gzip", "br", "identity, gzip"])
@pytest.mark.parametrize(
    ("path", "form"), [(FORWARD, MSGPACK), (f"{TENSORS}?dtype=float32&shape=", OCTETS)]
)
def test_compressed_bodies(wire: Wire, path: str, form: str, encoding: str) -> None:
    says = f"expected no Content-Encoding, got '{encoding}'"
    code, headers = "unsupported_media_type", {"Content-Encoding": encoding}
    refused_body(wire, path, b"1234", code, says=says, form=form, headers=headers)


@pytest.mark.parametrize(
    "path", ["/", "/v1", "/v2/matmul", f"{FORWARD}/", "/v1/tensors/", "/v1/info/x"]
)
def test_paths_that_are_not_there(wire: Wire, path: str) -> None:
    refused_body(wire, path, packed({}), "not_found", says=f"no such path: {path}")


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", FORWARD, "POST"),
        ("PUT", TENSORS, "GET, POST"),
        ("POST", f"{TENSORS}/x", "DELETE, GET, PATCH, PUT"),
        ("POST", "/v1/info", "GET"),
        ("OPTIONS", "/v1/plans", "DELETE, GET"),
    ],
)
def test_methods_that_a_path_does_not_take(
    wire: Wire, method: str, path: str, allowed: str
) -> None:
    says = f"{path} takes {allowed}, got {method}"
    refused_body(wire, path, b"", "method_not_allowed", says=says, method=method)
    assert wire.request(method, path).headers["allow"] == allowed


def test_a_plan_that_is_not_there(wire: Wire) -> None:
    refused(wire, lambda: wire.request("DELETE", "/v1/plans/0123"), "not_found", None, "'0123'")


def test_a_raw_body_of_unknown_length(wire: Wire) -> None:
    def chunked() -> Answer:
        path = f"{TENSORS}?dtype=float32&shape=1"
        return wire.request("POST", path, iter([bytes(4)]), {"Content-Type": OCTETS})

    refused(wire, chunked, "length_required", None, "expected a Content-Length ... got none")


@pytest.mark.parametrize("chunks", [1, 7])
def test_a_chunked_body_is_read(wire: Wire, chunks: int) -> None:
    body = packed(forward(), *BODY)
    step = len(body) // chunks + 1
    pieces = [body[at : at + step] for at in range(0, len(body), step)]
    answer = wire.request("POST", FORWARD, iter(pieces), {"Content-Type": MSGPACK})
    assert answer.body == wire.request("POST", FORWARD, body, {"Content-Type": MSGPACK}).body


@pytest.mark.parametrize(
    ("query", "operand", "says", "code"),
    [
        ("shape=1", "tensor", "expected a dtype, it is missing", "malformed"),
        ("dtype=float32", "tensor", "expected a shape, it is missing", "malformed"),
        ("dtype=float32&shape=1,a", "shape", "integers with commas, got '1,a'", "malformed"),
        ("dtype=float32&shape=1,", "shape", "integers with commas, got '1,'", "malformed"),
        ("dtype=float32&shape=1&kind=relu_aux", "kind", "unknown query parameter", "malformed"),
        ("dtype=float32&shape=1&pinned=1", "pinned", "true or false, got '1'", "malformed"),
        ("dtype=float32&shape=1&ttl_s=0", "ttl_s", "seconds > 0, got '0'", "malformed"),
        ("dtype=float32&shape=1&ttl_s=nan", "ttl_s", "seconds > 0, got 'nan'", "malformed"),
        ("dtype=float32&shape=1&ttl_s=inf", "ttl_s", "seconds > 0, got 'inf'", "malformed"),
        ("dtype=float32&shape=1&ttl_s=1s", "ttl_s", "seconds > 0, got '1s'", "malformed"),
        ("dtype=float32&shape=-1", "tensor", "extents ≥ 0, got [-1]", "invalid_operands"),
        ("dtype=int8&shape=1", "tensor", "expected dtype ... got 'int8'", "invalid_operands"),
        ("dtype=uint8&shape=4", "tensor", "expected dtype ... got 'uint8'", "invalid_operands"),
        ("dtype=float32&shape=" + "1," * 8 + "1", "tensor", "most 8 ... got 9", "malformed"),
        ("dtype=float32&shape=2", "tensor", "body of 8 bytes, Content-Length is 4", "malformed"),
        ("dtype=float64&shape=", "tensor", "body of 8 bytes, Content-Length is 4", "malformed"),
        ("dtype=float32&shape=0", "tensor", "body of 0 bytes, Content-Length is 4", "malformed"),
    ],
)
def test_what_a_raw_upload_says_of_itself(
    wire: Wire, query: str, operand: str, says: str, code: str
) -> None:
    refused_body(wire, f"{TENSORS}?{query}", bytes(4), code, operand, says, form=OCTETS)


def test_a_body_over_the_limit_is_refused_before_it_is_read(small: Wire, tmp_path: Path) -> None:
    with unchanged(small):
        connection = UnixConnection(str(tmp_path / "s"))
        connection.putrequest("POST", FORWARD)
        connection.putheader("Content-Type", MSGPACK)
        connection.putheader("Content-Length", str(1 << 40))
        connection.endheaders()
        reply = connection.getresponse()  # not a byte of the body was sent
        document = msgpack.unpackb(reply.read())
        connection.close()
    assert (reply.status, document["code"]) == (413, "too_large")
    expected = f"expected a body of at most {BODY_LIMIT} bytes (--body-limit), got {1 << 40} bytes"
    assert document["detail"] == expected
    assert works(small)


def test_the_limit_is_the_last_size_that_is_taken(small: Wire) -> None:
    padded = b"\x81\xa8requests\x90\xc5"
    fits = padded + (BODY_LIMIT - len(padded) - 2).to_bytes(2, "big")
    fits += bytes(BODY_LIMIT - len(fits))
    refused_body(small, WARM, fits, "malformed", says="payload 0: expected a tensor")
    refused_body(small, WARM, fits + b"\0", "too_large", says=f"{BODY_LIMIT + 1} bytes")


def test_a_chunked_body_over_the_limit(small: Wire) -> None:
    def chunked() -> Answer:
        return small.request(
            "POST", FORWARD, iter([bytes(1 << 12)] * 64), {"Content-Type": MSGPACK}
        )

    refused(small, chunked, "too_large", None, f"at most {BODY_LIMIT} bytes ... got more")


@pytest.mark.parametrize("sent", [0, 10])
def test_a_client_that_goes_away_within_its_body(wire: Wire, socket_path: Path, sent: int) -> None:
    body = packed(forward(), *BODY)
    with unchanged(wire):
        connection = UnixConnection(str(socket_path))
        connection.putrequest("POST", FORWARD)
        connection.putheader("Content-Type", MSGPACK)
        connection.putheader("Content-Length", str(len(body)))
        connection.endheaders(body[:sent])
        connection.close()
        assert works(wire)


@pytest.mark.parametrize(
    ("headers", "form"),
    [
        ({}, "json"),
        ({"Accept": "*/*"}, "json"),
        ({"Accept": MSGPACK}, "msgpack"),
        ({"Accept": "text/html, application/msgpack"}, "msgpack"),
        ({"Content-Type": MSGPACK}, "msgpack"),
        ({"Content-Type": JSON, "Accept": MSGPACK}, "json"),
    ],
)
@pytest.mark.parametrize("path", ["/nowhere", f"{TENSORS}/unknown"])
def test_a_problem_has_the_form_of_the_request(
    wire: Wire, path: str, headers: dict[str, str], form: str
) -> None:
    answer = wire.request("GET", path, None, headers)
    assert answer.status == 404
    assert answer.headers["content-type"] == f"application/problem+{form}"
    assert {"json": json.loads, "msgpack": msgpack.unpackb}[form](answer.body) == answer.header


@pytest.mark.parametrize("sent", ["a", "0af3-17", "x" * 128])
def test_a_request_id_is_echoed(wire: Wire, sent: str) -> None:
    answer = wire.request("GET", f"{TENSORS}/unknown", None, {"X-Request-ID": sent})
    assert answer.headers["x-request-id"] == answer.header["request_id"] == sent


@pytest.mark.parametrize("sent", ["", "two words", "é", "x" * 129])
def test_a_request_id_that_is_none_is_replaced(wire: Wire, sent: str) -> None:
    headers = {"X-Request-ID": sent}
    answers = [wire.request("GET", "/health/live", None, headers) for _ in range(2)]
    first, second = (answer.headers["x-request-id"] for answer in answers)
    assert first != second
    assert sent not in (first, second)


def test_json_bodies_and_tensors_are_limited_more_than_others(wire: Wire) -> None:
    """Base64 takes the whole service's time."""
    limit = 1 << 24
    connection = UnixConnection(wire._connection.path)
    connection.putrequest("POST", FORWARD)
    connection.putheader("Content-Type", "application/json")
    connection.putheader("Content-Length", str(limit + 1))
    connection.endheaders()
    reply = connection.getresponse()
    detail = json.loads(reply.read())["detail"]
    connection.close()
    assert reply.status == 413
    assert detail.startswith(f"expected a body of at most {limit} bytes (JSON bodies")

    created = wire.send("/v1/tensors", {"dtype": "float64", "shape": [limit // 8 + 1]})
    path = f"/v1/tensors/{created.header['tensor']}"
    refused(wire, lambda: wire.request("GET", path), "too_large", None, "octet-stream")
    assert wire.request("GET", path, headers={"Accept": MSGPACK}).status == 200
    wire.request("DELETE", path)

    shapes = {"x": [3000, 1], "weight": [3000, 1]}
    header = {
        name: {
            "dtype": "float32",
            "shape": shape,
            "data": base64.b64encode(bytes(12_000)).decode(),
        }
        for name, shape in shapes.items()
    }

    def request() -> Answer:
        body = json.dumps(header).encode()
        return wire.request("POST", FORWARD, body, {"Content-Type": "application/json"})

    says = f"outputs.y: expected a tensor for 36000000 bytes ... at most {limit}"
    refused(wire, request, "invalid_operands", "outputs.y", says)


@pytest.mark.parametrize(
    ("query", "operand"),
    [
        ("shape=1&shape=1", None),
        ("shape=1_0", "shape"),
        ("shape=%D9%A1", "shape"),
        ("shape=+1", "shape"),
    ],
)
def test_query_parameters_are_given_once_in_plain_digits(
    wire: Wire, query: str, operand: str | None
) -> None:
    def request() -> Answer:
        content = {"Content-Type": "application/octet-stream"}
        return wire.request("POST", f"/v1/tensors?dtype=float32&{query}", bytes(40), content)

    refused(wire, request, "malformed", operand, "shape: expected")
