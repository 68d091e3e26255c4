"""Bytes before words: a narrower KV cache first, and only then less text.

Invariant: quantizing alone loses no message; what is dropped is what `then` drops, and only where bytes do not suffice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from compaction.budget import Target
from compaction.errors import InvalidPolicy
from compaction.plan import Plan
from compaction.plan import Quantize as ToStorage
from compaction.policies._checks import need_text
from compaction.policies.default import default_policy
from compaction.ports import Policy, Summarizer, planned
from compaction.view import View

__all__ = ["Quantize"]

_DEFAULT = default_policy()
_NO_GAIN = frozenset({"not_smaller", "too_little"})


@dataclass(frozen=True, slots=True)
class Quantize:
    """Keeps the conversation's KV cache in a narrower storage once the budget of KV bytes is reached; later, as `then`.

    Keeps: every message, as long as the narrower cache fits. Where even that does not, `then` plans on what is left to
    do, in the same decision.
    Loses: fidelity of keys and values, a little (the log says how much); beyond that, what `then` loses.
    Costs: one conversion of the cache, nothing is prefilled again.
    As `then` alone: where the budget is one of tokens, where the cache is that narrow already, and where the engine
    cannot quantize.
    Source: KIVI (arXiv:2402.02750) and KVQuant (arXiv:2401.18079): keys sit in the exponential, so they get more bits.

    Args:
        storage: which one; "k8v4" has 8-bit keys and 4-bit values, "tq4" is TurboQuant (arXiv:2504.19874) at 4 bits.
        then: the policy for what bytes alone do not solve; left out: the default policy.
    """

    storage: str = "k8v4"
    then: Policy = _DEFAULT

    name = "quantize"
    version = 1
    units = frozenset({"tokens", "kv_bytes"})

    def __post_init__(self) -> None:
        need_text(self.name, "storage", self.storage)
        if not callable(getattr(self.then, "plan", None)):
            raise InvalidPolicy(f"quantize: then must be a policy, not {self.then!r}")

    @property
    def needs(self) -> frozenset[str]:
        """The storage, and what `then` needs."""
        return self.then.needs | {f"storage:{self.storage}"}

    @property
    def summarizer_fn(self) -> Summarizer | None:
        """The callable `then` was given to summarise with."""
        function: Summarizer | None = getattr(self.then, "summarizer_fn", None)
        return function

    @property
    def params(self) -> dict[str, Any]:
        """What makes this policy again."""
        return {"storage": self.storage, "then": {"name": self.then.name, "params": dict(self.then.params)}}

    def plan(self, view: View, target: Target) -> Plan:
        """The storage, then what `then` drops for what must still fit; or the plan of `then`."""
        if view.reaches(target):
            return Plan()
        if not self._helps(view, target):
            return planned(self.then, view, target)
        first = Plan((ToStorage(self.storage, "bytes before words"),))
        left = view.advance(first)
        if left.reaches(target, "must"):
            return first
        return Plan((*first.actions, *planned(self.then, left, target).actions))

    def _helps(self, view: View, target: Target) -> bool:
        """Whether more tokens would fit in the narrower storage, and it has not been refused as no gain."""
        narrower, held = view.storages.get(self.storage), view.storage
        if target.unit != "kv_bytes" or narrower is None or held is None or narrower.per_token >= held.per_token:
            return False
        if any(failure.code in _NO_GAIN for failure in view.failures):
            return False
        gains = narrower.bytes(view.tokens) < held.bytes(view.tokens)
        return gains and target.in_tokens(narrower).must > target.in_tokens(held).must
