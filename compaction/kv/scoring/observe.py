"""Seeing the queries of any model while it runs: an attention function that shows them to an observer.

Invariant: what the model computes is SDPA's result with unchanged arguments; observing adds reading only. The observer
travels through the call's own keywords, so nothing is global and two models do not meet. A model that cannot be
observed is refused by name before or right after the first pass, never scored by half of its layers.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from compaction.errors import CannotScore
from compaction.kv.arena import ArenaLayer
from compaction.kv.attention import AttentionSwitch

__all__ = ["NAME", "Observed", "Observer", "feed", "require_seen", "restored", "rewound", "slot_layers"]

NAME = "compaction_observed"
_OBSERVER = "compaction_observer"
# What would make the observed products differ from the model's weights.
_FOREIGN = ("softcap", "s_aux", "sinks", "position_bias")


@dataclass(frozen=True, slots=True)
class Observed:
    """One layer's attention in one pass.

    `query` is `[heads, positions, head_dim]`, after rotation; `key` `[kv_heads, slots, head_dim]` with the new tokens'
    keys last; `value` likewise. Weights are `softmax(scale · query · key)` over what each position may see. `module` is
    the attention module.
    """

    module: torch.nn.Module
    layer: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scale: float

    def groups(self) -> torch.Tensor:
        """Queries by the head they read: `[kv_heads, group, positions, head_dim]`."""
        return self.query.reshape(self.key.shape[0], -1, *self.query.shape[1:])


class Observer(Protocol):
    """Whatever wants to see attention."""

    def see(self, observed: Observed) -> None:
        """One layer of one pass, layers in the order in which they run."""

    def passed(self, hidden: Sequence[torch.Tensor]) -> None:
        """A pass is over: what entered each layer, `[1, positions, hidden]`; empty where the model does not tell."""


def observed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """SDPA as transformers calls it, after showing batch 0 to the observer among the keywords."""
    observer = kwargs.pop(_OBSERVER, None)
    if observer is not None:
        foreign = [name for name in _FOREIGN if kwargs.get(name) is not None]
        if foreign:
            raise CannotScore(f"{type(module).__name__} attends with {foreign[0]}, which scores would miss")
        scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
        observer.see(Observed(module, int(module.layer_idx), query[0], key[0], value[0], scale))  # type: ignore[arg-type]
    result: tuple[torch.Tensor, None] = sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
    )
    return result


@torch.no_grad()
def feed(model: Any, cache: Any, ids: Sequence[int], start: int, observer: Observer, chunk: int = 256) -> None:
    """Run tokens at positions start, start + 1, … behind a cache, `chunk` a pass, every layer shown to the observer.

    Raises CannotScore where the model does not attend by SDPA through transformers' interface.
    """
    switch = AttentionSwitch(model, NAME)
    if not switch.active:
        raise CannotScore(f"{type(model).__name__} does not attend by SDPA through transformers' attention interface")
    names = set(inspect.signature(model.forward).parameters)
    keywords: dict[str, Any] = {"cache" if "cache" in names else "past_key_values": cache, "use_cache": True}
    keywords["output_hidden_states"] = True
    if "logits_to_keep" in names:
        keywords["logits_to_keep"] = 1
    with switch:
        for at in range(0, len(ids), chunk):
            part = torch.tensor([list(ids[at : at + chunk])], device=model.device)
            if "position_ids" in names:
                keywords["position_ids"] = torch.arange(start + at, start + at + part.shape[1], device=model.device)[
                    None
                ]
            out = model(input_ids=part, **keywords, **{_OBSERVER: observer})
            observer.passed(getattr(out, "hidden_states", None) or ())


def require_seen(model: Any, layers: Sequence[int], seen: Collection[int]) -> None:
    """Raise CannotScore where some of these layers were never shown: half a score would be a wrong one."""
    missing = [layer for layer in layers if layer not in seen]
    if missing:
        raise CannotScore(
            f"{type(model).__name__} does not hand the caller's keywords to the attention of layer {missing[0]}"
        )


def slot_layers(cache: Any, slots: int) -> list[int]:
    """Layers that hold keys and values of all `slots` tokens by head; others cannot be cut by score.

    Raises CannotScore where there is none, or where one holds latents or another number of slots than there are tokens.
    """
    found = []
    for index, layer in enumerate(cache.layers):
        if type(layer) is not ArenaLayer or layer.keys is None or layer.values is None:
            continue
        if layer.held != slots or layer.keys.shape[0] != 1:
            raise CannotScore(
                f"layer {index} holds {layer.held} slots of {layer.keys.shape[0]} conversations, not {slots} of one"
            )
        if layer.keys.shape[1] == 1 and layer.keys.shape[3] != layer.values.shape[3]:
            raise CannotScore(f"layer {index} stores a latent, which all heads share")
        found.append(index)
    if not found:
        raise CannotScore("no layer of this cache is an arena with a slot for every token")
    return found


@contextmanager
def restored(cache: Any) -> Iterator[None]:
    """Take out again whatever is fed inside; the slots that were there are not touched, bit for bit.

    Raises CannotScore, before anything is fed, where some layer could not be cut back.
    """
    for index, layer in enumerate(cache.layers):
        if not isinstance(layer, ArenaLayer) and type(layer).__name__ != "DummyLayer":
            raise CannotScore(f"layer {index} is a {type(layer).__name__}, from which tokens cannot be taken out again")
    arenas: list[Any] = [layer for layer in cache.layers if isinstance(layer, ArenaLayer)]
    before = [(layer.get_seq_length(), layer.slots) for layer in arenas]
    for layer in arenas:
        if layer.is_sliding:
            layer.record_past = True
    try:
        yield
    finally:
        for layer, (length, slots) in zip(arenas, before, strict=True):
            layer.crop(length - layer.get_seq_length())
            layer.shrink(slots)
            if layer.is_sliding:
                layer.record_past = False


@contextmanager
def rewound(cache: Any, count: int) -> Iterator[None]:
    """Without its newest `count` slots, so that their tokens can be fed again; put back bit for bit afterwards.

    Raises CannotScore, before anything changes, where a layer is no arena of all slots: a window before them is gone.
    """
    for index, layer in enumerate(cache.layers):
        if type(layer) is not ArenaLayer and type(layer).__name__ != "DummyLayer":
            raise CannotScore(f"layer {index} is a {type(layer).__name__}, which cannot go back by {count} tokens")
    arenas = [layer for layer in cache.layers if isinstance(layer, ArenaLayer)]
    ends = [layer.held for layer in arenas]
    saved = [
        (a.key_slice(e - count, e).clone(), a.value_slice(e - count, e).clone())
        for a, e in zip(arenas, ends, strict=True)
    ]
    for layer, end in zip(arenas, ends, strict=True):
        layer.truncate(end - count)
    try:
        yield
    finally:
        for layer, end, (keys, values) in zip(arenas, ends, saved, strict=True):
            layer.truncate(end - count)
            layer.extend(count)
            layer.write_keys(end - count, keys)
            layer.write_values(end - count, values)


ALL_ATTENTION_FUNCTIONS.register(NAME, observed_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, sdpa_mask)
