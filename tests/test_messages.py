"""Messages stay what they were."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compaction.errors import InvalidMessage
from compaction.messages import Message, apply_edits, leaves, resolve, validate
from tests.strategies import batches, messages


@given(message=st.one_of(messages(), batches().map(lambda batch: batch[0])))
def test_a_message_is_lossless(message: dict[str, Any]) -> None:
    """Equal as a JSON value, key order kept, pure ASCII, and every copy is fresh."""
    kept = Message("m", validate(message))
    copy = kept.fresh()
    copy["content"] = "changed"

    assert kept.fresh() == message and kept.text.isascii()
    assert json.dumps(kept.fresh()) == json.dumps(message)


@given(message=messages(), data=st.data())
def test_edits_replace_just_their_ranges(message: dict[str, Any], data: st.DataObject) -> None:
    """Ranges are code points of the original string, whatever their number and order; the original is untouched."""
    message["content"] = data.draw(st.text(min_size=4, max_size=30))
    text = message["content"]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), min_size=4, max_size=4)))
    edits = [("/content", cuts[2], cuts[3], "<B>"), ("/content", cuts[0], cuts[1], "<A>")]

    edited = apply_edits(message, edits)

    assert edited["content"] == f"{text[: cuts[0]]}<A>{text[cuts[1] : cuts[2]]}<B>{text[cuts[3] :]}"
    assert message["content"] == text
    assert {**edited, "content": text} == message


@given(message=messages())
def test_every_string_is_found_under_its_pointer(message: dict[str, Any]) -> None:
    """`leaves` and `resolve` are inverse, for keys with `/` and `~` too."""
    found = list(leaves(message))

    assert all(resolve(message, path) == text for path, text in found)
    assert len(dict(found)) == len(found)


def test_a_pointer_to_nothing_is_an_error() -> None:
    """KeyError with the whole pointer."""
    for path in ("/content/7/text", "/nope", "/content/x"):
        with pytest.raises(KeyError, match=path):
            resolve({"content": [{"text": "a"}]}, path)


@pytest.mark.parametrize("message", [{1: "a"}, {"role": "user", "content": {"a": 1}}, {"content": "no role"}, [], None])
def test_what_is_no_message_is_refused(message: Any) -> None:
    """With the position in the caller's list."""
    with pytest.raises(InvalidMessage, match="message 3: "):
        validate(message, index=3)
