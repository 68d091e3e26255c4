"""Which ids are which messages', over chat templates of many kinds."""

from __future__ import annotations

from typing import Any

import pytest

from compaction.engines.reasons import Request
from compaction.engines.segments import Segment, Segmenter
from compaction.errors import CannotSplice
from compaction.tokens.counter import TemplateCounter
from compaction.tokens.template import ChatTemplate
from tests.builders import assistant, system, user
from tests.fixtures_models import tiny_tokenizer

MERGING = (
    "{% for m in messages %}"
    "{% if m['role'] != 'assistant' and loop.index0 % 2 %}{{ raise_exception('order') }}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
COUNTING = (
    "{{ messages|length }} messages:{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
Messages = list[dict[str, Any]]


def segmenter(template: str | None = None) -> Segmenter:
    """On the tiny tokenizer."""
    made = ChatTemplate(tiny_tokenizer() if template is None else tiny_tokenizer(template))
    asked = [user("a")]
    opening = len(made.ids(asked, None)) - len(made.ids(asked, None, generation_prompt=False))
    return Segmenter(made, TemplateCounter(made), opening)


def split(segmenter: Segmenter, messages: Messages) -> tuple[Segment, ...]:
    """The segments of a request without tools."""
    ids = segmenter._template.ids(messages, None)
    return segmenter.split(messages, None, Request.of(messages, None), ids)


TALK = [system("Be brief."), user("one"), assistant("two"), user("three"), assistant("four"), user("five")]


@pytest.mark.parametrize("messages", [TALK, TALK[1:], TALK[:2], [TALK[0], *TALK[2:]], [*TALK[:3], TALK[4], TALK[5]]])
def test_segments_are_the_request_message_by_message(messages: Messages) -> None:
    """Head, messages, and nothing else but the generation prompt."""
    made = segmenter()
    parts = split(made, messages)

    ids = made._template.ids(messages, None, generation_prompt=False)
    assert [token for part in parts for token in part.ids] == ids
    assert [len(part.digests) for part in parts[1:]] == [1] * (len(messages) - len(parts[0].digests) + 1)


def test_a_segment_is_the_same_wherever_it_stands() -> None:
    """So that what is kept is found again after a cut."""
    made = segmenter()

    assert set(split(made, [TALK[0], *TALK[3:]])) < set(split(made, TALK))


def test_counting_and_rendering_agree() -> None:
    """Both ways of finding boundaries find the same ones."""
    made, other = segmenter(), segmenter()
    other._counter.additive = False

    assert split(made, TALK) == split(other, TALK)


def test_messages_that_are_merged_share_a_segment() -> None:
    """Where turns must alternate, two user messages are one turn, with no boundary inside it."""
    made = segmenter(MERGING)
    talk = [user("one"), assistant("two"), user("three"), user("four"), assistant("five"), user("six")]
    parts = split(made, talk)

    assert not made._counter.additive
    assert [len(part.digests) for part in parts] == [2, 1, 2, 1, 1]


def test_rules_alone_are_a_head() -> None:
    """Nothing has been said yet, and that is no reason to refuse."""
    assert [len(part.digests) for part in split(segmenter(), TALK[:1])] == [2]


def test_a_template_that_writes_all_messages_differently_each_time_is_refused() -> None:
    """No boundary holds: the conversation cannot be edited message by message."""
    with pytest.raises(CannotSplice, match="message by message"):
        split(segmenter(COUNTING), TALK[1:])
