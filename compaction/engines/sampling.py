"""How the next token is chosen from logits.

Invariant: the same logits in the same order give the same tokens: greedy has no randomness, `Sampling` draws from a
generator of its own that starts from its seed at every reply.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from compaction.errors import EngineError, InvalidInput

__all__ = ["Sampling", "greedy"]


def greedy(logits: Any) -> int:
    """The likeliest token; of equals the one with the smallest id. `logits`: shape [vocabulary].

    Raises EngineError where the logits are no numbers.
    """
    best = (logits == logits.max()).nonzero()  # argmax leaves open which of equals it takes; bf16 has many
    if not len(best):
        raise EngineError("the model's logits are not numbers: try dtype='float32'")
    return int(best[0])


@dataclass(frozen=True, slots=True)
class Sampling:
    """Draw from the smallest set of likeliest tokens whose probabilities reach `top_p`, at `temperature`."""

    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature <= 0:
            raise InvalidInput(f"temperature is {self.temperature}: it must be above 0; leave sampling out for greedy")
        if not 0 < self.top_p <= 1:
            raise InvalidInput(f"top_p is {self.top_p}: it must be above 0 and at most 1")

    def chooser(self) -> Callable[[Any], int]:
        """A function from logits (shape [vocabulary]) to a token, with a fresh generator."""
        import torch

        generator = torch.Generator().manual_seed(self.seed)

        def choose(logits: Any) -> int:
            # On the CPU: one seed then means one reply, whatever the device.
            likely, tokens = torch.softmax(logits.float().cpu() / self.temperature, -1).sort(
                descending=True, stable=True
            )
            keep = likely.cumsum(-1) - likely < self.top_p
            drawn = torch.multinomial(likely * keep, 1, generator=generator)
            return int(tokens[drawn])

        return choose
