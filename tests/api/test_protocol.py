"""The examples of docs/protocol.md, replayed byte for byte."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from ..local import MSGPACK, Answer, Wire, packed
from ..reference import DTYPES, FLOAT8
from .refusals import FORWARD

PAGE = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()
SECTION = PAGE[PAGE.index("\n## 8. Examples\n") :]
HEADINGS = re.findall(r"\n### (.*)\n", SECTION)
NAME = re.compile(r"{(\w+)}")

Names = dict[str, str]
"""What the examples call `{name}`, once it is known."""


@dataclass
class Message:
    """A request or a reply as the page has it.

    Attributes:
        start: the request line, or the status.
        shown: the objects of a MessagePack body as JSON; or the JSON body.
        octets: their bytes, as hexadecimal digits and names.
    """

    start: str
    headers: dict[str, str] = field(default_factory=dict)
    shown: list[str] = field(default_factory=list)
    octets: list[str] = field(default_factory=list)

    @classmethod
    def parse(cls, lines: list[str]) -> Message:
        """Of lines without their `>` or `<`."""
        message = cls(lines[0])
        end = lines.index("") if "" in lines else len(lines)
        message.headers = dict(line.split(": ", 1) for line in lines[1:end])
        for line in lines[end + 1 :]:
            if line.startswith("  "):
                if len(message.octets) < max(len(message.shown), 1):
                    message.octets.append("")
                message.octets[-1] += line
            else:
                message.shown.append(line)
        return message

    def body(self, names: Names) -> bytes | None:
        """The bytes to send."""
        if not self.octets:
            return filled(self.shown[0], names).encode() if self.shown else None
        parts = (part for line in self.octets for part in line.split())
        return b"".join(_bytes(part, names) for part in parts)

    def pattern(self) -> bytes:
        """A regular expression of the bytes to come, with a group for each name."""
        if not self.octets:
            return _pattern(self.shown[0]) if self.shown else b""
        parts = (part for line in self.octets for part in line.split())
        return b"".join(
            _pattern(part) if NAME.match(part) else re.escape(bytes.fromhex(part)) for part in parts
        )


def _bytes(part: str, names: Names) -> bytes:
    return filled(part, names).encode() if NAME.match(part) else bytes.fromhex(part)


def _pattern(text: str) -> bytes:
    """`text` with a group for each name; handles, times and ids are of these characters."""
    pieces = [re.escape(piece) for piece in re.split(r"{(\w+)}", text)]
    pieces[1::2] = [f"(?P<{name}>[0-9a-z.-]+)" for name in pieces[1::2]]
    return "".join(pieces).encode()


def filled(text: str, names: Names) -> str:
    return NAME.sub(lambda found: names[found[1]], text)


def exchanges(heading: str) -> list[tuple[Message, Message]]:
    """The requests under a heading, and their replies."""
    part = SECTION.split(f"\n### {heading}\n")[1].split("\n### ")[0]
    found = []
    for block in re.findall(r"\n```http\n(.*?)\n```", part, re.DOTALL):
        for exchange in block.split("\n\n"):
            lines = exchange.split("\n")
            sides = ([line[2:] for line in lines if line[:1] == sign] for sign in "><")
            request, reply = map(Message.parse, sides)
            found.append((request, reply))
    return found


def learn(pattern: bytes, text: bytes, names: Names) -> None:
    """`text` must be as `pattern` says; what it has for names is kept, and must not change."""
    found = re.fullmatch(pattern, text, re.DOTALL)
    assert found is not None, (pattern, text)
    for name, value in found.groupdict().items():
        assert names.setdefault(name, value.decode()) == value.decode()


def check_reply(expected: Message, answer: Answer, names: Names) -> None:
    assert answer.status == int(expected.start), answer.header
    for name, value in expected.headers.items():
        learn(_pattern(value), answer.headers[name.lower()].encode(), names)
    learn(expected.pattern(), answer.body, names)
    check_shown(expected, answer.body, names)


def check_shown(message: Message, body: bytes | None, names: Names) -> None:
    """What is shown of a MessagePack body is what its bytes are."""
    if "msgpack" not in message.headers.get("Content-Type", ""):
        return
    assert body is not None
    unpacker = msgpack.Unpacker()
    unpacker.feed(body)
    header, *payloads = unpacker
    told, *elements = (json.loads(filled(shown, names)) for shown in message.shown)
    assert header == told
    dtypes = dict(payload_dtypes(header))
    known = DTYPES | FLOAT8
    arrays = [np.array(part, known[dtypes[index]]) for index, part in enumerate(elements)]
    assert payloads == [array.tobytes() for array in arrays]


def payload_dtypes(header: Any) -> list[tuple[int, str]]:
    """The dtype that each payload is said to have."""
    if isinstance(header, list):
        return [found for part in header for found in payload_dtypes(part)]
    if not isinstance(header, dict):
        return []
    mine = [(header["payload"], header["dtype"])] if "payload" in header else []
    return mine + [found for part in header.values() for found in payload_dtypes(part)]


@pytest.mark.parametrize("heading", HEADINGS)
def test_examples(wire: Wire, heading: str) -> None:
    names: Names = {}
    for request, reply in exchanges(heading):
        method, path = filled(request.start, names).split(" ")
        body = request.body(names)
        check_shown(request, body, names)
        answer = wire.request(method, path, body, request.headers)
        check_reply(reply, answer, names)


def test_the_examples_are_all_found() -> None:
    """None is lost by a slip in the page's notation."""
    found = [pair for heading in HEADINGS for pair in exchanges(heading)]
    assert len(found) == len(re.findall(r"^> [A-Z]+ /", SECTION, re.MULTILINE)) >= 15
    assert SECTION.count("```http") == len(re.findall("^```$", SECTION, re.MULTILINE))
    told = {request.start.split(" ")[1].split("/{")[0] for request, _ in found}
    assert told >= {
        "/v1/run",
        FORWARD,
        "/v1/linear/backward",
        "/v1/mlp/forward",
        "/v1/mlp/backward",
    }
    assert {reply.start for _, reply in found} == {"200", "201", "204", "422"}


@pytest.mark.parametrize("change", ["status", "header", "octet", "shown"])
def test_a_page_that_is_wrong_is_found_out(wire: Wire, change: str) -> None:
    request, reply = exchanges(HEADINGS[0])[0]
    answer = wire.request("POST", FORWARD, request.body({}), request.headers)
    if change == "status":
        reply.start = "201"
    elif change == "header":
        reply.headers["X-Request-ID"] += "1"
    elif change == "octet":
        reply.octets[1] = reply.octets[1].replace("40", "41")
    else:
        reply.shown[1] = "[0, 0, 0, 0]"
    with pytest.raises(AssertionError):
        check_reply(reply, answer, {})


def test_every_operation_tells_its_time(wire: Wire) -> None:
    header = {"x": {"dtype": "float32", "shape": [1, 1], "payload": 0}}
    answer = wire.request(
        "POST",
        FORWARD,
        packed({**header, "weight": header["x"]}, bytes(4)),
        {"Content-Type": MSGPACK},
    )
    told = answer.headers["server-timing"]
    pattern = r"queue;dur=(\S+), plan;dur=(\S+), compute;dur=(\S+), copy;dur=(\S+)"
    found = re.fullmatch(pattern, told)
    assert found is not None, told
    assert all(0 <= float(duration) < 60_000 for duration in found.groups())
    assert "server-timing" not in wire.request("GET", "/v1/info").headers
