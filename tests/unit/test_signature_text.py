"""Signatures as text, to be kept on disk, and back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matmuld.engine.epilogs import Epilog
from matmuld.engine.signature import Layout, Options, Signature
from matmuld_client.wire import DTYPE_NAMES

EXTENTS = st.lists(st.integers(0, 1 << 48), max_size=3).map(tuple)
LAYOUTS = st.builds(
    Layout,
    st.sampled_from(sorted(DTYPE_NAMES.values())),
    EXTENTS,
    EXTENTS,
    st.sampled_from([1, 16, 256]),
)
MASKS = st.none() | st.integers(0, 1 << 31)
SIGNATURES = st.builds(
    Signature,
    LAYOUTS,
    LAYOUTS,
    st.none() | LAYOUTS,
    LAYOUTS,
    st.sampled_from(list(Epilog)),
    st.none() | LAYOUTS,
    st.none() | LAYOUTS,
    st.builds(
        Options,
        st.sampled_from(["COMPUTE_32F", "COMPUTE_32F_FAST_TF32"]),
        st.booleans(),
        st.integers(0, 132),
        MASKS,
        MASKS,
    ),
)

LAYOUT = Layout("float32", (3, 4), (4, 1), 256)
PLAIN = Signature(
    LAYOUT, LAYOUT, None, LAYOUT, Epilog.NONE, None, None, Options(compute_type="COMPUTE_32F")
)


@given(SIGNATURES)
def test_a_text_is_its_signature_again(signature: Signature) -> None:
    again = Signature.parse(signature.text)
    assert again == signature
    assert hash(again) == hash(signature)
    assert isinstance(again.epilog, Epilog)


@given(SIGNATURES, SIGNATURES)
def test_texts_are_equal_where_signatures_are(one: Signature, other: Signature) -> None:
    assert (one.text == other.text) == (one == other)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        PLAIN.text[:-1],
        PLAIN.text + " ",
        PLAIN.text.replace("256", "true"),
        PLAIN.text.replace("256", '"256"'),
        PLAIN.text.replace("256", "256.0"),
        PLAIN.text.replace("NONE", "SOFTMAX"),
        PLAIN.text.replace(",", ", "),
        '{"a": 1}',
    ],
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        Signature.parse(text)
