"""A whole model's cache: layers in, bytes per token, bytes of a conversation and JSON out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from compaction.errors import InvalidInput
from compaction.kv.geometry.families import with_defaults
from compaction.kv.geometry.fields import Config, of_layer, query_heads, text_config
from compaction.kv.geometry.layers import LayerGeometry, Width, kv_heads, read_layers

__all__ = ["KVGeometry"]


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """What a conversation's KV cache weighs.

    `family` is "MHA", "GQA", "MQA", "MLA" or "state" (no attention at all), with "+sliding", "+chunked", "+state" and
    "+shared" where some layers are of that kind. `element_bytes` are those of a key's element.
    """

    family: str
    layers: tuple[LayerGeometry, ...]
    element_bytes: float

    @property
    def bytes_per_token(self) -> int:
        """Bytes a token adds while no window is full: the bound a budget in bytes divides by."""
        return sum(layer.bytes_per_token for layer in self.layers)

    @property
    def state_bytes(self) -> int:
        """Bytes a conversation holds whatever its length: states of recurrent and convolutional layers."""
        return sum(layer.state_bytes or 0 for layer in self.layers)

    @property
    def unknown_states(self) -> int:
        """Layers that carry a state whose size the config does not tell; `total` is then a lower bound."""
        return sum(layer.state_bytes is None for layer in self.layers)

    def bytes(self, tokens: int) -> int:
        """Bytes of keys and values after so many tokens, windows taken into account: what grows and can be cut."""
        return sum(layer.bytes(tokens) for layer in self.layers)

    def total(self, tokens: int) -> int:
        """Bytes a conversation of so many tokens holds, fixed states included."""
        return sum(layer.total(tokens) for layer in self.layers)

    def to_json(self, tokens: int) -> dict[str, Any]:
        """`family, bytes_per_token, tokens, bytes, layers` as plain JSON values; `bytes` includes fixed states.

        A layer is `{kind, bytes_per_token, keeps, state_bytes, bytes}`.
        """
        return {
            "family": self.family,
            "bytes_per_token": self.bytes_per_token,
            "tokens": tokens,
            "bytes": self.total(tokens),
            "layers": [_layer_json(layer, tokens) for layer in self.layers],
        }

    @classmethod
    def from_config(
        cls,
        config: Mapping[str, Any],
        element_bytes: float = 2,
        *,
        value_bytes: float | None = None,
        latent: bool = True,
    ) -> KVGeometry:
        """The geometry of a model.

        Args:
            config: the model's `config.json` as a mapping; a multimodal one is read at its `text_config`.
            element_bytes: bytes of one stored element: 4 for float32, 2 for bfloat16 and float16, 1 for 8 bits,
                0.5 for 4 bits (the elements alone, without scales).
            value_bytes: the same for values where they are stored differently from keys.
            latent: MLA compressed, as transformers >= 5.15 keeps it; False: expanded to every head (<= 5.14).

        Raises InvalidInput with the key that is missing or makes no sense.
        """
        values = element_bytes if value_bytes is None else value_bytes
        for size in (element_bytes, values):
            if size <= 0:
                raise InvalidInput(f"element_bytes is {size}: give the bytes of one element, such as 2 for bfloat16")
        text = with_defaults(text_config(config))
        if text.get("is_encoder_decoder") is True:
            raise InvalidInput("config is_encoder_decoder is true: caches of cross-attention are not covered here")
        layers = read_layers(text, Width(element_bytes, values, latent))
        return cls(_family(text, layers), layers, element_bytes)


def _layer_json(layer: LayerGeometry, tokens: int) -> dict[str, Any]:
    return {
        "kind": layer.kind,
        "bytes_per_token": layer.bytes_per_token,
        "keeps": layer.keeps,
        "state_bytes": layer.state_bytes,
        "bytes": layer.total(tokens),
    }


def _family(config: Config, layers: tuple[LayerGeometry, ...]) -> str:
    present = {"state" if layer.kind == "hybrid" else layer.kind for layer in layers}
    attention = [index for index, layer in enumerate(layers) if layer.bytes_per_token]
    if not attention:
        return "state"
    if "latent" in present:
        base = "MLA"
    else:
        most = max(kv_heads(of_layer(config, index), index, len(layers)) for index in attention)
        queries = query_heads(config)
        base = "MHA" if most == queries else "MQA" if most == 1 else "GQA"
    return base + "".join(f"+{kind}" for kind in ("sliding", "chunked", "state", "shared") if kind in present)
