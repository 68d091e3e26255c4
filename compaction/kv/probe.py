"""Finding a model's rotation by running it, not by a table of models.

A single token attends to itself only, so its hidden states do not depend on its position: between two forward passes
of one token at two positions every layer's keys differ by exactly the rotation, if that is what they have. Each tensor
that changed is tried with every layout and every `*inv_freq` buffer of the model. Two more passes tell whether
attention depends on where slots lie rather than on positions (ALiBi): with cached slots exchanged, logits must stay.

Invariant: the model is left as it was; positions stay below 128, where no scaling switches its frequencies.
Not seen: position-dependent scaling of *queries* (Llama 4 beyond 8,192), which leaves no trace in a cache.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from transformers import DynamicCache

from compaction.kv.rope import Kind, LayerRope, Layout, RotaryPlan, Rotation, rotate

__all__ = ["probe"]

_TENSORS = ("keys", "values", "indexer_keys")
_LAYOUTS: tuple[Layout, ...] = ("half", "interleaved")
_EMPTY = {"DummyLayer"}
# Relative to the largest element: what float32 and the short formats leave between equal computations.
_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}
_LATE = 100


@torch.no_grad()
def probe(model: Any) -> RotaryPlan:
    """The plan of a causal model: four passes over one or three tokens, with caches of their own.

    Raises whatever the model raises: one that cannot run a single token with a cache cannot be used here at all.
    """
    config = model.config.get_text_config(decoder=True)
    late = min(_LATE, (getattr(config, "max_position_embeddings", None) or _LATE + 1) - 1)
    early = late * 5 // 8
    run = _Run(model)
    first, second = run.layers(early), run.layers(late)
    buffers = list(_frequencies(model))
    layers = tuple(_layer(a, b, late - early, buffers) for a, b in zip(first, second, strict=True))
    return RotaryPlan(layers, by_slot=_by_slot(run, layers))


class _Run:
    """Forward passes with explicit positions and a cache for the purpose."""

    def __init__(self, model: Any) -> None:
        self.model = model
        names = set(inspect.signature(model.forward).parameters)
        self._cache = "cache" if "cache" in names else "past_key_values"
        self._positions = "position_ids" in names

    def __call__(self, cache: Any, ids: list[int], start: int) -> torch.Tensor:
        device = self.model.device
        keywords: dict[str, Any] = {self._cache: cache, "use_cache": True}
        if self._positions:
            keywords["position_ids"] = torch.arange(start, start + len(ids), device=device)[None]
        logits: torch.Tensor = self.model(input_ids=torch.tensor([ids], device=device), **keywords).logits[0, -1]
        return logits

    def layers(self, position: int) -> list[Any]:
        """The cache's layers after one token."""
        cache = DynamicCache(config=self.model.config)
        self(cache, [5], position)
        return list(cache.layers)


def _frequencies(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Every distinct table of frequencies: buffers, then what models without a buffer compute."""
    seen: set[bytes] = set()
    named = [(name, buffer) for name, buffer in model.named_buffers() if name.endswith("inv_freq")]
    # The copy of the unscaled table that some modules keep comes later: keys were made with the live one.
    named.sort(key=lambda item: "original" in item[0])
    for name, buffer in [*named, *_computed(model.config.get_text_config(decoder=True))]:
        table = buffer.detach().double().cpu().flatten()
        if table.numel() and table.numpy().tobytes() not in seen:
            seen.add(table.numpy().tobytes())
            yield name, table


def _computed(config: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The plain formula at base 10,000, for GPT-J and its kin, which keep a table of sines instead of frequencies."""
    heads = getattr(config, "num_attention_heads", None) or 1
    for dims in (getattr(config, "rotary_dim", None), (getattr(config, "hidden_size", 0) or 0) // heads):
        if dims:
            yield "computed", 10_000.0 ** (-torch.arange(0, dims, 2, dtype=torch.float64) / dims)


def _layer(first: Any, second: Any, delta: int, buffers: list[tuple[str, torch.Tensor]]) -> LayerRope:
    if type(first).__name__ in _EMPTY:
        return LayerRope("empty")
    if hasattr(first, "conv_states") or hasattr(first, "recurrent_states"):
        return LayerRope("state", why="hold a recurrent or convolutional state, which no token can be taken out of")
    if not isinstance(getattr(first, "keys", None), torch.Tensor):
        return LayerRope("state", why=f"({type(first).__name__}) hold no keys per token")
    rotations: list[Rotation] = []
    for where in _TENSORS:
        before, after = getattr(first, where, None), getattr(second, where, None)
        if before is None or after is None or _difference(before, after) <= _tolerance(before) / 100:
            continue
        found = _find(where, before, after, delta, buffers)
        if found is None:
            return LayerRope("fixed", why=f"position is in the {where}, but not as a rotation (learned positions?)")
        rotations.append(found)
    kind: Kind = "rotary" if rotations else "unrotated"
    return LayerRope(kind, tuple(rotations))


def _find(
    where: str, before: torch.Tensor, after: torch.Tensor, delta: int, buffers: list[tuple[str, torch.Tensor]]
) -> Rotation | None:
    """The hypothesis with the smallest error, where that is small enough; among nearly equal ones the first."""
    width, best = int(before.shape[-1]), None
    for source, table in buffers:
        dims = 2 * table.numel()
        for start in dict.fromkeys((0, width - dims)) if dims <= width else ():
            for layout in _LAYOUTS:
                guess = Rotation(where, layout, start, table, source)
                error = _difference(rotate(before, delta, guess), after)
                if best is None or error < best.error / 4:
                    best = Rotation(where, layout, start, table, source, error)
    return best if best is not None and best.error <= _tolerance(before) else None


def _difference(a: torch.Tensor, b: torch.Tensor) -> float:
    scale = float(b.abs().max()) or 1.0
    return float((a.double() - b.double()).abs().max()) / scale


def _tolerance(like: torch.Tensor) -> float:
    return _TOLERANCE.get(like.dtype, 1e-4)


def _by_slot(run: _Run, layers: tuple[LayerRope, ...]) -> bool:
    """Whether the next token's logits change when three cached slots trade places."""
    if any(layer.kind == "state" for layer in layers):
        return False
    logits = []
    for reverse in (False, True):
        cache = DynamicCache(config=run.model.config)
        run(cache, [5, 6, 7], 3)
        if reverse:
            for layer in cache.layers:
                for where in _TENSORS:
                    tensor = getattr(layer, where, None)
                    if isinstance(tensor, torch.Tensor):
                        setattr(layer, where, tensor.flip(-2))
        logits.append(run(cache, [8], 6))
    return _difference(logits[0], logits[1]) > 10 * _tolerance(logits[0])
