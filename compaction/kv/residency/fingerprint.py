"""Whose cache it is: everything that must be the same for keys and values to be used again.

Invariant: two fingerprints are equal only where model, weights, adapters, number format, storage, tokenizer,
conversation and token ids are; texts of a conversation do not stand in one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

__all__ = ["Identity", "ids_digest", "tokenizer_digest"]

_SAMPLES = 32  # elements read of each weight


@dataclass(frozen=True, slots=True)
class Identity:
    """What all caches of one model and tokenizer have in common; each field is a name or a digest."""

    model: str
    config: str
    weights: str
    tokenizer: str
    dtype: str
    storage: str
    transformers: str

    @classmethod
    def of(cls, model: Any, tokenizer: str, *, name: str, storage: str = "full") -> Identity:
        """Look at a model as it is now; `tokenizer` is the `tokenizer_digest` of its tokenizer.

        Of each weight 32 elements are read, evenly spread, which takes milliseconds: training, merging or loading other
        weights changes nearly all elements, and it is such changes that are to be noticed. `storage` says how layers
        hold keys and values.
        """
        import transformers

        return cls(
            model=name,
            config=_digest([_config(model)]),
            weights=_digest([*_weights(model), *_adapters(model)]),
            tokenizer=tokenizer,
            dtype=str(model.dtype).removeprefix("torch."),
            storage=storage,
            transformers=str(transformers.__version__),
        )

    def again(self, model: Any) -> Identity:
        """The same with the model's weights, adapters and number format as they are now.

        Only these are looked at: while a pass runs in another thread, the config may name another attention.
        """
        dtype = str(model.dtype).removeprefix("torch.")
        return replace(self, weights=_digest([*_weights(model), *_adapters(model)]), dtype=dtype)

    def fingerprint(self, conversation: str, ids: str) -> dict[str, str]:
        """The fingerprint of a conversation's cache; `ids` is `ids_digest` of its tokens."""
        own = {name: str(getattr(self, name)) for name in self.__slots__}
        return {**own, "conversation": _digest([conversation.encode("utf-8", "surrogatepass")]), "ids": ids}


def ids_digest(ids: Sequence[int]) -> str:
    """A digest over token ids, in order."""
    return _digest([json.dumps(list(ids)).encode()])


def tokenizer_digest(tokenizer: Any) -> str:
    """A digest over vocabulary and special tokens; the template shows in the ids."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0]))
    return _digest([json.dumps([vocabulary, sorted(map(str, tokenizer.all_special_tokens))]).encode()])


def _digest(pieces: Iterable[bytes]) -> str:
    made = hashlib.blake2b(digest_size=16)
    for piece in pieces:
        made.update(len(piece).to_bytes(8, "little"))
        made.update(piece)
    return made.hexdigest()


def _config(model: Any) -> bytes:
    """The config without where it was loaded from, and how attention is computed: it decides the last bits."""
    values = {key: value for key, value in model.config.to_dict().items() if key not in {"_name_or_path", "dtype"}}
    attention = getattr(model.config, "_attn_implementation", None)
    return json.dumps([values, attention], sort_keys=True, default=str).encode()


def _weights(model: Any) -> Iterable[bytes]:
    """Name, shape, number format and some elements of each weight."""
    for name, tensor in sorted(model.state_dict().items()):
        if not isinstance(tensor, torch.Tensor):
            continue
        flat = tensor.detach().reshape(-1)
        some = flat[:: max(1, flat.numel() // _SAMPLES)][:_SAMPLES].contiguous()
        yield f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode()
        yield some.view(torch.uint8).cpu().numpy().tobytes() if some.numel() else b""


def _adapters(model: Any) -> Iterable[bytes]:
    """Which adapters are switched on: PEFT's layers say so, and their weights stay where they are when it changes."""
    for name, module in model.named_modules():
        if hasattr(module, "active_adapters") and hasattr(module, "disable_adapters"):
            yield f"{name} {module.active_adapters} {module.disable_adapters}".encode()
