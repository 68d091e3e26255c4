"""How much of a KV cache a chat template lets the next turn use, measured in tokens on a made conversation.

Invariant: equal templates give equal figures: the conversation is fixed, three turns, with or without a batch of two
tool calls in the second. What stands in a cache is the prompt and its reply as the template writes it while it is the
newest message; what can be used again is what the next prompt's ids begin with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from compaction.tokens.folding import fold
from compaction.tokens.profile import PLAIN
from compaction.tokens.template import ChatTemplate

__all__ = ["SYSTEM", "TOOLS", "Messages", "Reuse", "measure", "talk"]

Messages = list[dict[str, Any]]
SYSTEM = "You work for a parcel service. Answer briefly and with figures, and say so where you do not know."
_TURNS = (
    (
        "Hello! I ordered two lamps and a desk last week, and nothing has come yet. When will they be here?",
        "Nothing is known about this customer so far. Without an order number nothing can be looked up.",
        "I am sorry to hear that. What is the order number? It stands at the top of your confirmation.",
    ),
    (
        "It is 7712. There should be a second one as well, 7713, but I am not sure about that one.",
        "There are two numbers now. Both orders have been found: one is under way, the other was never paid.",
        "Order 7712 left Zurich on Monday and comes on Thursday. Order 7713 waits for its payment of 48.50.",
    ),
    (
        "Good, then please cancel the second one, and tell me what I still have to pay for the first.",
        "The first order was paid in full, so nothing is due, and the second one can be cancelled at once.",
        "Done: 7713 is cancelled. For 7712 nothing is due, it was paid in full when you ordered.",
    ),
)
_CALLS = (
    ("call_Rk3vT8a1", "7712", '{"order": "7712", "state": "shipped", "from": "Zurich", "due": "Thursday"}'),
    ("call_Rk3vT8a2", "7713", '{"order": "7713", "state": "unpaid", "open": "48.50"}'),
)
TOOLS: tuple[Mapping[str, Any], ...] = (
    {
        "type": "function",
        "function": {
            "name": "find_order",
            "description": "Look up an order by its number: where it is, and what is due.",
            "parameters": {
                "type": "object",
                "properties": {"order": {"type": "string", "description": "The order's number."}},
                "required": ["order"],
            },
        },
    },
)


def talk(*, batch: bool, reasoning: bool = False) -> Messages:
    """The conversation: a system message, three turns; with `reasoning`, each reply has thoughts of its own."""
    messages: Messages = [{"role": "system", "content": SYSTEM}]
    for number, (asked, thought, said) in enumerate(_TURNS):
        thoughts = {"reasoning_content": thought} if reasoning else {}
        messages.append({"role": "user", "content": asked})
        if batch and number == 1:
            messages += _batch(thoughts)
        messages.append({"role": "assistant", "content": said, **thoughts})
    return messages


def _batch(thoughts: Mapping[str, Any]) -> Messages:
    calls = [
        {"id": id, "type": "function", "function": {"name": "find_order", "arguments": f'{{"order": "{order}"}}'}}
        for id, order, _ in _CALLS
    ]
    results = [{"role": "tool", "tool_call_id": id, "name": "find_order", "content": text} for id, _, text in _CALLS]
    return [{"role": "assistant", "content": None, "tool_calls": calls, **thoughts}, *results]


@dataclass(frozen=True, slots=True)
class Reuse:
    """Tokens over all replies but the first: `held` in the cache before a turn, `reused` of them, in `prompts`.

    `prefix_stable`: the text of each prompt, generation prompt included, begins the next one. `history_stable`: a turn
    leaves the text of the messages before it as it was.
    """

    held: int
    reused: int
    prompts: int
    prefix_stable: bool
    history_stable: bool

    @property
    def fraction(self) -> float:
        """Reused of held, 0…1."""
        return self.reused / self.held if self.held else 1.0

    @property
    def retokenized(self) -> bool:
        """Whether tokens change though the text before them does not."""
        return self.prefix_stable and self.history_stable and self.reused < self.held

    @property
    def prefilled(self) -> int:
        """Tokens of the prompts that go through the model."""
        return self.prompts - self.reused

    def to_json(self) -> dict[str, Any]:
        """The figures as plain JSON values, the fraction rounded to four digits."""
        return {
            "fraction": round(self.fraction, 4),
            "held": self.held,
            "reused": self.reused,
            "prefilled": self.prefilled,
            "prefix_stable": self.prefix_stable,
            "history_stable": self.history_stable,
        }


def measure(
    template: ChatTemplate,
    messages: Messages,
    tools: Sequence[Mapping[str, Any]] | None,
    *,
    later: ChatTemplate | None = None,
) -> Reuse:
    """Play the conversation: a prompt before each assistant message. `later` renders the prompts a cache meets."""
    later = later or template
    replies = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    prompts = [template.ids(messages[:index], tools) for index in replies]
    wanted = [later.ids(messages[:index], tools) for index in replies[1:]]
    held = [_answered(template, messages[: index + 1], tools, ids) for index, ids in zip(replies, prompts, strict=True)]
    steps = list(zip(held, wanted, strict=False))
    asked = [template.render(messages[:index], tools) for index in replies]
    asked_later = [later.render(messages[:index], tools) for index in replies[1:]]
    turns = sorted({*replies, *(index + 1 for index in replies)})
    history = [template.render(messages[:end], tools, generation_prompt=False) for end in turns]
    return Reuse(
        held=sum(len(before) for before, _ in steps),
        reused=sum(_shared(before, after) for before, after in steps),
        prompts=sum(len(after) for _, after in steps),
        prefix_stable=all(two.startswith(one) for one, two in zip(asked, asked_later, strict=False)),
        history_stable=all(two.startswith(one) for one, two in pairwise(history)),
    )


def _answered(
    template: ChatTemplate, messages: Messages, tools: Sequence[Mapping[str, Any]] | None, prompt: list[int]
) -> list[int]:
    """The cache once the last message was generated after `prompt`."""
    written = template.ids(messages, tools, generation_prompt=False)
    if _shared(prompt, written) == len(prompt):
        return written
    # The template writes a reply otherwise than it asks for one: what the model itself would write is the best guess.
    said = str(fold(messages[-1:], None, PLAIN).messages[-1]["content"])
    return prompt + template.text_ids(said)


def _shared(one: Sequence[int], two: Sequence[int]) -> int:
    for index, (a, b) in enumerate(zip(one, two, strict=False)):
        if a != b:
            return index
    return min(len(one), len(two))
