"""Keeping conversations' caches in narrower storages: what that costs, and turning a live cache into one.

Invariant: `cost` bounds from above the bytes a cache of so many tokens has allocated during any forward pass, with
scales, positions, sinks, recent window, and the memory in which one layer at a time is decoded. A cache is converted
layer by layer: beside it stand one layer's old keys and values, and nothing else.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, sqrt

import torch

from compaction.budget import KVStorage
from compaction.engines.forward import Forward
from compaction.engines.live_cache import LiveCache, ran_out
from compaction.errors import EngineError
from compaction.kv.arena import ArenaLayer
from compaction.kv.quantization.layer import BLOCK, CALIBRATION, QuantizedLayer
from compaction.kv.quantization.settings import Setting
from compaction.kv.rope import LayerRope, RotaryPlan
from compaction.ports import Quantized

__all__ = ["Storing"]

_STEP = 256  # slots by which what all layers share grows
_SCRATCH, _ANGLES = 9 / 8, 3 / 2  # and how much larger than needed it then is
_POSITION = 4


@dataclass(frozen=True, slots=True)
class _Layer:
    """One full-attention layer: heads, channels of a key and of a value, bytes of a channel, how keys are rotated."""

    heads: int
    key: int
    value: int
    itemsize: int
    rope: LayerRope

    @property
    def full(self) -> int:
        """Bytes of one slot in the model's own number format."""
        return self.heads * (self.key + self.value) * self.itemsize

    def coded(self, setting: Setting) -> int:
        """Bytes of one slot as codes with their scales."""
        bits = setting.keys.bits_per_element(self.key) * self.key
        return ceil(self.heads * (bits + setting.values.bits_per_element(self.value) * self.value) / 8)


class Storing:
    """Storages of one model's caches. Safe to use from many threads: whoever converts holds the conversation's lock.

    Args:
        forward: the model.
        lock: held during each forward pass.
        plan: finds how the model's keys are rotated.
        per_token: bytes of a token in the model's own number format.
    """

    def __init__(self, forward: Forward, lock: threading.Lock, plan: Callable[[], RotaryPlan], per_token: int) -> None:
        self._forward, self._lock, self._plan, self._per_token = forward, lock, plan, per_token
        self._layers: list[_Layer] | None = None

    def cost(self, name: str) -> KVStorage:
        """What a conversation costs when it is stored so.

        Raises InvalidInput for a name that is none, EngineError where no layer of the model can be stored so.
        """
        setting = Setting.parse(name)
        layers = self._quantizable()
        recent = BLOCK * ceil(max(setting.window + CALIBRATION, 3 / 2 * (setting.window + BLOCK)) / BLOCK)
        # Recent slots are many only where a conversation was short when it began: fewer codes stand beside them then.
        exact = sum(
            (layer.full + _POSITION) * (setting.sinks + recent)
            - layer.coded(setting) * (setting.sinks + setting.window)
            for layer in layers
        )
        centres = sum(layer.heads * layer.key * 2 for layer in layers)
        scratch = max(layer.full for layer in layers)
        rotations = {rotation.key: rotation for layer in layers for rotation in layer.rope.rotations}
        angles = sum(_POSITION + 4 * rotation.dims for rotation in rotations.values())
        coded = sum(layer.coded(setting) + _POSITION for layer in layers)
        per_token = self._per_token - sum(layer.full for layer in layers) + coded
        per_token += ceil(_SCRATCH * scratch + _ANGLES * angles)
        return KVStorage(name, per_token, exact + centres + _STEP * (scratch + angles))

    def convert(self, live: LiveCache, name: str, *, drop: bool = False) -> Quantized | None:
        """Keep a cache so from now on; None where it is already.

        Codes are made once: from one storage to another, or back, what is held is dropped; with `drop` in any case.
        Raises EngineError where memory does not suffice; the cache is empty then, and kept so.
        """
        name = Setting.parse(name).name if name else ""
        if live.storage == name:
            return None
        price, before = self.cost(name) if name else None, live.bytes
        if drop or price is None or live.storage or not len(live):
            setting = Setting.parse(name) if name else None
            live.keep_as(price, setting, self._plan() if setting else None)
            return Quantized(name, before, live.bytes)
        errors = self._in_place(live, price)
        return Quantized(name, before, live.bytes, *errors)

    def _in_place(self, live: LiveCache, price: KVStorage) -> tuple[float | None, float | None]:
        """Code what the cache holds, one layer after the other; returns the relative errors of keys and values."""
        plan, setting = self._plan(), Setting.parse(price.name)
        cache, sides = live.cache, ([0.0, 0.0], [0.0, 0.0])
        try:
            for index, full in _full(cache.layers):
                exact = [part(0, full.held).clone() for part in (full.key_slice, full.value_slice)]
                cache.quantize({index: setting}, plan, live.slot_map.position, compiled=self._forward.compiled)
                for side, found in zip(sides, _squares(cache.layers[index], exact), strict=True):
                    side[:] = [a + b for a, b in zip(side, found, strict=True)]
        except BaseException as exc:
            live.keep_as(price, setting, plan)
            if ran_out(exc):
                raise EngineError(
                    f"out of memory while a cache is stored as {price.name}: it is prefilled again"
                ) from exc
            raise
        live.keep_as(price, setting, plan, drop=False)
        keys, values = (sqrt(error / norm) if norm else None for error, norm in sides)
        return keys, values

    def _quantizable(self) -> list[_Layer]:
        """The layers that can be; found by running one token through the model."""
        if self._layers is None:
            ropes = self._plan().layers
            cache = self._forward.new_cache(1)
            with self._lock:
                self._forward(cache, [0], 0)
            self._layers = [_shape(layer, ropes[index]) for index, layer in _full(cache.layers)]
        if not self._layers:
            raise EngineError("no layer of this model keeps all keys and values: its cache cannot be quantized")
        return self._layers


def _full(layers: Sequence[object]) -> list[tuple[int, ArenaLayer]]:
    return [(index, layer) for index, layer in enumerate(layers) if type(layer) is ArenaLayer]


def _shape(layer: ArenaLayer, rope: LayerRope) -> _Layer:
    if rope.kind in ("state", "empty"):
        raise EngineError(f"a layer of this model {rope.why or 'has no keys of its own'}: it cannot be quantized")
    keys, values = layer.key_slice(0, 1), layer.value_slice(0, 1)
    return _Layer(int(keys.shape[1]), int(keys.shape[3]), int(values.shape[3]), keys.element_size(), rope)


def _squares(layer: QuantizedLayer, exact: Sequence[torch.Tensor]) -> list[tuple[float, float]]:
    """Of a layer's coded slots, for keys and for values: the squared error, and the squared norm it is relative to."""
    first = min(layer.setting.sinks, layer.held)
    coded = slice(first, first + layer.coded)
    shown = (layer.key_slice(0, layer.held), layer.value_slice(0, layer.held))
    pairs = [(new[:, :, coded].double(), old[:, :, coded].double()) for new, old in zip(shown, exact, strict=True)]
    return [(float((new - old).square().sum()), float(old.square().sum())) for new, old in pairs]
