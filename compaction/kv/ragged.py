"""A cache in which each key-value head keeps slots of its own: what a head does not need takes no memory.

Invariant: attention equals that over the full cache with every head's dropped slots masked, to rounding; a head's slots
are at the positions they had (gap). What is kept of the old text lies in one flat tensor for keys and one for values of
a layer, head after head, as long as the sum of what the heads keep; tokens that come later go to all heads, into an
arena of their own, and can be cropped. Bytes are those of the storages.
A model reads such a cache only inside `with cache.attention(model):`; anywhere else its layers refuse.
Batch of one, no padding. Knows nothing about scores: it is told which slots stay.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from compaction.errors import CannotSplice, EngineError, InvalidInput
from compaction.kv.arena import ArenaLayer, Meter
from compaction.kv.attention import AttentionSwitch, grouped_attention
from compaction.kv.cache import ArenaCache
from compaction.kv.measure import logical_bytes, storage_bytes

__all__ = ["NAME", "RaggedCache", "RaggedLayer", "ragged_attention"]

NAME = "compaction_ragged"
_LAYER = "compaction_ragged_layer"


class RaggedLayer(CacheLayerMixin):
    """One layer: kept slots, ragged over heads, and a tail that all heads have.

    Args:
        keys: of each head, `[slots of this head, head_dim]`.
        values: likewise, `[slots of this head, value_dim]`.
        positions: likewise, `[slots of this head]`, ascending.
        tail: where later tokens go.
    """

    is_sliding = False

    def __init__(
        self,
        keys: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
        positions: Sequence[torch.Tensor],
        tail: ArenaLayer,
    ) -> None:
        super().__init__()
        self.counts = [int(head.shape[0]) for head in keys]
        self.tail = tail
        self.reading = False  # whether a model whose attention understands this layer runs now
        self.dtype, self.device = keys[0].dtype, keys[0].device
        self.is_initialized = True
        # Ordinary tensors even inside inference mode: a cache outlives the block it was compressed in.
        with torch.inference_mode(False):
            self._keys = torch.empty(sum(self.counts), keys[0].shape[1], dtype=self.dtype, device=self.device)
            self._values = torch.empty(sum(self.counts), values[0].shape[1], dtype=self.dtype, device=self.device)
            self._positions = torch.empty(sum(self.counts), dtype=torch.int32, device=self.device)
        for flat, heads in ((self._keys, keys), (self._values, values), (self._positions, positions)):
            for part, head in zip(torch.split(flat, self.counts), heads, strict=True):
                part.copy_(head.detach())

    @property
    def keys_of(self) -> tuple[torch.Tensor, ...]:
        """Kept keys of each head, views `[slots, head_dim]`."""
        return torch.split(self._keys, self.counts)

    @property
    def values_of(self) -> tuple[torch.Tensor, ...]:
        """Kept values of each head, views `[slots, value_dim]`."""
        return torch.split(self._values, self.counts)

    @property
    def positions_of(self) -> tuple[torch.Tensor, ...]:
        """Positions of each head's kept slots, int32 views `[slots]`."""
        return torch.split(self._positions, self.counts)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing: a ragged layer is made from a cache that has seen keys."""

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *_: Any,
        kwargs: dict[str, Any] | None = None,
        **__: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append states `[1, kv_heads, n, head_dim]` for all heads; returns the tail's keys and values.

        The attention function finds the layer itself in `kwargs`, which are the ones it will be called with.
        """
        if not self.reading:
            raise EngineError("a ragged cache is read inside `with cache.attention(model):` only")
        if kwargs is None:
            raise EngineError("this model does not show a cache layer the arguments of its attention: keep whole slots")
        if key_states.shape[0] != 1 or key_states.shape[1] != len(self.counts):
            raise EngineError(
                f"a ragged cache holds one conversation of {len(self.counts)} heads, "
                f"not {key_states.shape[0]} of {key_states.shape[1]}"
            )
        kwargs[_LAYER] = self
        found: tuple[torch.Tensor, torch.Tensor] = self.tail.update(key_states, value_states)
        return found

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Slots of the longest head and the coming tokens; the attention function makes its own masks."""
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        """Slots of the longest head. Not a position: give a pass the positions of its tokens."""
        return max(self.counts) + self.tail.held

    def get_max_length(self) -> int:
        """No limit of its own."""
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the newest tokens, given as a negative number, among those that came after the compression."""
        if -tokens_to_remove > self.tail.held:
            raise EngineError(
                f"{-tokens_to_remove} tokens cannot be taken back: {self.tail.held} came after the heads were cut"
            )
        self.tail.crop(tokens_to_remove)

    def reset(self) -> None:
        """Hold nothing any more."""
        self._keys, self._values, self._positions = (t.new_empty(0, *t.shape[1:]) for t in self._flat())
        self.counts = [0] * len(self.counts)
        self.tail.reset()

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:  # noqa: ARG002 - what transformers calls it with
        """Refused: there is one conversation."""
        raise EngineError("a ragged cache holds one conversation: no beams")

    def offload(self) -> None:
        """Move to the host."""
        self._keys, self._values, self._positions = (t.to("cpu", non_blocking=True) for t in self._flat())
        self.tail.offload()

    def prefetch(self) -> None:
        """Move back."""
        self._keys, self._values, self._positions = (t.to(self.device, non_blocking=True) for t in self._flat())
        self.tail.prefetch()

    def held(self) -> tuple[int, ...]:
        """Slots of each head, the tail included."""
        return tuple(count + self.tail.held for count in self.counts)

    def nbytes(self) -> int:
        """Bytes allocated, the positions' included."""
        return storage_bytes(self)

    def logical_nbytes(self) -> int:
        """Bytes of what is held."""
        return logical_bytes(self._flat()) + self.tail.logical_nbytes()

    def _flat(self) -> list[torch.Tensor]:
        return [self._keys, self._values, self._positions]


class RaggedCache(Cache):
    """A conversation's cache after some heads dropped some slots; made by `RaggedCache.of`."""

    @classmethod
    def of(
        cls, cache: ArenaCache | RaggedCache, keep: Sequence[Any], positions: Sequence[int] | None = None
    ) -> RaggedCache:
        """Take a cache's slots over, layer by layer; `cache` is empty afterwards.

        Args:
            cache: batch of one. While one layer is taken, only that layer stands twice.
            keep: for each layer what stays: bool `[kv_heads, slots]`; for a layer that is ragged already a list of bool
                `[slots of this head, tail included]`; None leaves the layer as it is.
            positions: of an arena cache's slots, None: 0, 1, …; or of a ragged cache's tail, which it does not know.

        Raises CannotSplice, with nothing changed, for layers that cannot be cut by head, InvalidInput for masks of
        another shape.
        """
        if len(keep) != len(cache.layers):
            raise InvalidInput(f"{len(keep)} masks for {len(cache.layers)} layers")
        shared = [index for index, layer in enumerate(cache.layers) if type(layer).__name__ == "DummyLayer"]
        if shared:
            raise CannotSplice(f"layer {shared[0]} reads another layer's keys, which must stay whole for it")
        for index, (layer, mask) in enumerate(zip(cache.layers, keep, strict=True)):
            if mask is not None:
                _check(index, layer, mask, positions)
        meter = Meter()
        made: list[Any] = []
        for layer, mask in zip(cache.layers, keep, strict=True):
            made.append(layer if mask is None else _cut(layer, mask, positions, meter))
        cache.layers = []
        return cls(layers=made)

    @property
    def ragged(self) -> list[RaggedLayer]:
        """The layers that are ragged, in the model's order."""
        return [layer for layer in self.layers if isinstance(layer, RaggedLayer)]

    @contextmanager
    def attention(self, model: Any) -> Iterator[None]:
        """Inside, this model can be run with this cache.

        Raises EngineError where the model's attention cannot be told to use another function. Not thread-safe: the
        caller holds the model's lock.
        """
        switch = AttentionSwitch(model, NAME)
        if not switch.active:
            raise EngineError(
                f"{type(model).__name__} does not attend by SDPA through transformers' attention interface: "
                "it cannot read a ragged cache; keep whole slots instead"
            )
        with switch:
            self._set_reading(True)
            try:
                yield
            finally:
                self._set_reading(False)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the newest tokens, given as a negative number; only such as came after the compression."""
        if any(-tokens_to_remove > layer.tail.held for layer in self.ragged):
            held = min(layer.tail.held for layer in self.ragged)
            raise EngineError(f"{-tokens_to_remove} tokens cannot be taken back: {held} came after the heads were cut")
        layers: list[Any] = list(self.layers)
        for layer in layers:
            layer.crop(tokens_to_remove)

    def reserve(self, tokens: int) -> None:
        """Allocate now for `tokens` further ones."""
        for layer in self.ragged:
            layer.tail.reserve(tokens)

    def nbytes(self) -> int:
        """Bytes allocated, measured from the storages of all layers."""
        return storage_bytes(self)

    def logical_nbytes(self) -> int:
        """Bytes of what all layers hold."""
        own = [layer for layer in self.layers if isinstance(layer, (RaggedLayer, ArenaLayer))]
        others = [layer for layer in self.layers if not isinstance(layer, (RaggedLayer, ArenaLayer))]
        return sum(layer.logical_nbytes() for layer in own) + logical_bytes(others)

    def _set_reading(self, on: bool) -> None:
        for layer in self.ragged:
            layer.reading = on


def ragged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The attention function of transformers' interface; see `grouped_attention`, which gets all ordinary layers.

    For a ragged layer `key` and `value` are its tail; every new token sees all kept slots of its head, and the tail up
    to itself. Returns `[1, positions, heads, value_dim]` and no weights.
    """
    layer = kwargs.pop(_LAYER, None)
    if layer is None:
        return grouped_attention(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
    if dropout or any(kwargs.get(name) is not None for name in ("softcap", "s_aux", "sinks", "position_bias")):
        raise EngineError("a ragged cache cannot be read with dropout, soft caps, sinks or position biases")
    if key.shape[1] != len(layer.counts) or key.shape[2] != layer.tail.held:
        raise EngineError("this model changes keys between cache and attention: it cannot read a ragged cache")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    attend = _one if query.shape[2] == 1 else _many
    groups = query[0].reshape(len(layer.counts), -1, *query.shape[2:])
    heads = zip(groups, layer.keys_of, layer.values_of, key[0], value[0], strict=True)
    mixed = [attend(q, old_k, old_v, new_k, new_v, scale) for q, old_k, old_v, new_k, new_v in heads]
    return torch.cat(mixed).transpose(0, 1)[None].contiguous(), None


def _one(
    query: torch.Tensor,
    old_keys: torch.Tensor,
    old_values: torch.Tensor,
    new_keys: torch.Tensor,
    new_values: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """One position of one group, `[group, 1, head_dim]`: two products, one softmax, no copy of keys or values."""
    rows, kept = query[:, 0], old_keys.shape[0]
    scores = torch.cat([rows @ old_keys.T, rows @ new_keys.T], -1)
    exact = torch.promote_types(scores.dtype, torch.float32)
    weights = torch.softmax(scores.to(exact) * scale, -1).to(old_values.dtype)
    return (weights[:, :kept] @ old_values + weights[:, kept:] @ new_values)[:, None]


def _many(
    query: torch.Tensor,
    old_keys: torch.Tensor,
    old_values: torch.Tensor,
    new_keys: torch.Tensor,
    new_values: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Several positions of one group, `[group, positions, head_dim]`, by SDPA over a copy of this head's keys."""
    group, count, _ = query.shape
    kept, tail = old_keys.shape[0], new_keys.shape[0]
    sees = torch.ones(count, kept + tail, dtype=torch.bool, device=query.device).tril(kept + tail - count)
    keys, values = torch.cat([old_keys, new_keys]), torch.cat([old_values, new_values])
    shown = (query[None], keys.expand(1, group, -1, -1), values.expand(1, group, -1, -1))
    return torch.nn.functional.scaled_dot_product_attention(*shown, attn_mask=sees, scale=scale)[0]


def _check(index: int, layer: Any, mask: Any, positions: Sequence[int] | None) -> None:
    """Whether a layer can be cut by this mask."""
    if isinstance(layer, RaggedLayer):
        shapes, wanted = [list(head.shape) for head in mask], [[count] for count in layer.held()]
        if layer.tail.held and len(positions or ()) != layer.tail.held:
            raise InvalidInput(f"{layer.tail.held} tokens came after the heads were cut: give their positions")
    elif type(layer) is ArenaLayer and layer.keys is not None and layer.values is not None:
        if layer.keys.shape[0] != 1:
            raise CannotSplice(f"layer {index} holds a batch of {layer.keys.shape[0]}, heads are cut in one only")
        if layer.keys.shape[1] == 1 and layer.keys.shape[3] != layer.values.shape[3]:
            raise CannotSplice(f"layer {index} stores a latent, which all heads share")
        shapes, wanted = [list(mask.shape)], [list(layer.keys.shape[1:3])]
        if positions is not None and len(positions) != layer.held:
            raise InvalidInput(f"layer {index} holds {layer.held} slots, {len(positions)} positions are given")
    else:
        raise CannotSplice(f"layer {index} is a {type(layer).__name__} without slots for all tokens of each head")
    if shapes != wanted:
        raise InvalidInput(f"layer {index} has slots {wanted} by head, the mask {shapes}")


def _cut(layer: Any, mask: Any, positions: Sequence[int] | None, meter: Meter) -> RaggedLayer:
    """A ragged layer of what stays; `layer` is left empty."""
    if isinstance(layer, RaggedLayer):
        parts = _joined(layer, positions)
    else:
        where = torch.arange(layer.held) if positions is None else torch.tensor(list(positions))
        parts = list(layer.keys[0]), list(layer.values[0]), [where] * len(mask)
    rows = [head.nonzero()[:, 0] for head in mask]
    keys, values, places = ([part[row.to(part.device)] for part, row in zip(each, rows, strict=True)] for each in parts)
    layer.reset()
    return RaggedLayer(keys, values, places, ArenaLayer(step=64, meter=meter))


def _joined(
    layer: RaggedLayer, positions: Sequence[int] | None
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Keys, values and positions of each head, the tail's behind the kept ones."""
    tail = layer.tail
    if not tail.held:
        return list(layer.keys_of), list(layer.values_of), list(layer.positions_of)
    places = torch.tensor(list(positions or ()), dtype=torch.int32, device=layer.positions_of[0].device)
    new = zip(tail.key_slice(0, tail.held)[0], tail.value_slice(0, tail.held)[0], strict=True)
    old = zip(layer.keys_of, layer.values_of, layer.positions_of, strict=True)
    joined = [
        (torch.cat([k, new_k]), torch.cat([v, new_v]), torch.cat([p, places]))
        for (k, v, p), (new_k, new_v) in zip(old, new, strict=True)
    ]
    keys, values, where = zip(*joined, strict=True)
    return list(keys), list(values), list(where)


ALL_ATTENTION_FUNCTIONS.register(NAME, ragged_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, sdpa_mask)
