"""JSON bodies that are none: 400 malformed."""

from __future__ import annotations

import json

import pytest

from ..local import Wire
from .refusals import FORWARD, JSON, forward, refused_body


@pytest.mark.parametrize(
    ("text", "operand", "says"),
    [
        ("", None, "the body is not JSON"),
        ("{", None, "the body is not JSON"),
        ('{"x": 1}}', None, "the body is not JSON: Extra data"),
        ("\udcff", None, "the body is not JSON"),
        ("[]", None, "expected a map, got []"),
        ('"x"', None, "expected a map, got 'x'"),
        ('{"alpha": NaN}', None, "the body is not JSON: NaN is no JSON number"),
        ('{"alpha": -Infinity}', None, "the body is not JSON: -Infinity is no JSON number"),
        ("1" * 5000, None, "the body is not JSON"),
    ],
)
def test_no_json(wire: Wire, text: str, operand: str | None, says: str) -> None:
    body = text.encode(errors="surrogateescape")
    refused_body(wire, FORWARD, body, "malformed", operand, says, form=JSON)


@pytest.mark.parametrize("data", ["AAA", "A A=", "AAAA*===", "ÄÄÄÄ", "\ud800"])
def test_no_base64(wire: Wire, data: str) -> None:
    x = {"dtype": "float32", "shape": [1, 1], "data": data}
    body = json.dumps({"x": x, "weight": x}).encode()
    says = "x: expected base64 in data"
    refused_body(wire, FORWARD, body, "malformed", "x", says, form=JSON)


def test_a_payload_in_json(wire: Wire) -> None:
    body = json.dumps(forward()).encode()
    says = "x: expected a payload index below 0, got 0"
    refused_body(wire, FORWARD, body, "malformed", "x", says, form=JSON)
