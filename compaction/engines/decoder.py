"""Reading a Llama-shaped decoder off its module tree.

Invariant: a model is read whole or refused with the first thing that is not understood. Nothing is inferred from a
model's name: which modules there are decides, each norm is compared with the formula it must be, and what a tree does
not show (multipliers, layers without rotation) is left to the self-test of `compaction.engines.decode_step`.
Parameters are held as they are, never copied, so that what changes in place is seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["Attending", "Decoder", "Feeding", "Layer", "Linear", "Refused", "read_decoder"]

_DTYPES = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})
_ATTENTION = frozenset({"sdpa", "eager"})
# What attention does beside the modules: each would have to be computed, and shows in few configurations only.
_REFUSED_OPTIONS = ("final_logit_softcapping", "attn_logit_softcapping", "attention_chunk_size")


class Refused(Exception):
    """A model that is not Llama-shaped; the text says why. Never leaves `compaction.engines`."""


class Linear(NamedTuple):
    """`[out, in]`, and `[out]` or None."""

    weight: torch.Tensor
    bias: torch.Tensor | None


class Attending(NamedTuple):
    """What stands before a layer's attention: a norm, three projections, and norms of queries and keys or None."""

    norm: torch.Tensor
    query: Linear
    key: Linear
    value: Linear
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None


class Feeding(NamedTuple):
    """What stands behind a layer's attention: its output projection, a norm and the gated feed-forward network."""

    output: Linear
    norm: torch.Tensor
    gate: Linear
    up: Linear
    down: Linear


class Layer(NamedTuple):
    """One decoder layer, and the module of its attention."""

    before: Attending
    behind: Feeding
    attention: Any


@dataclass(frozen=True, eq=False, slots=True)
class Decoder:
    """A whole decoder of `heads` query and `kv_heads` key heads of `head_dim` channels."""

    embedding: torch.Tensor
    layers: tuple[Layer, ...]
    norm: torch.Tensor
    head: Linear
    rotary: Any
    activation: Any
    heads: int
    kv_heads: int
    head_dim: int
    scaling: float
    eps: float


def read_decoder(model: Any) -> Decoder:
    """The decoder behind a causal language model. Raises Refused with what is not understood."""
    _plain(model)
    body = _children(model, "the model", {"model", "lm_head"})["model"]
    parts = _children(body, "its decoder", {"embed_tokens", "layers", "norm", "rotary_emb"})
    embedding = parts["embed_tokens"]
    if type(embedding) is not nn.Embedding or embedding.max_norm is not None:
        raise Refused(f"its embedding is a {type(embedding).__name__}")
    read = [_layer(module, f"layer {index}") for index, module in enumerate(parts["layers"])]
    if not read:
        raise Refused("it has no layers")
    first = parts["layers"][0]
    eps = _eps(first.input_layernorm)
    for name, module in model.named_modules():
        if _is_norm(name):
            _require_rms_norm(name, module, eps)
    attention = first.self_attn
    dim = int(attention.head_dim)
    return Decoder(
        embedding.weight,
        tuple(read),
        parts["norm"].weight,
        _linear(model.lm_head, "lm_head"),
        parts["rotary_emb"],
        first.mlp.act_fn,
        attention.q_proj.out_features // dim,
        attention.k_proj.out_features // dim,
        dim,
        float(attention.scaling),
        eps,
    )


def _plain(model: Any) -> None:
    """Weights on the CPU, in one number format, in tensors of torch's own; attention torch's own too."""
    config = model.config.get_text_config(decoder=True)
    for option in _REFUSED_OPTIONS:
        if getattr(config, option, None) is not None:
            raise Refused(f"its config sets {option}")
    implementation = getattr(config, "_attn_implementation", None)
    if implementation not in _ATTENTION:
        raise Refused(f"its attention is computed by {implementation!r}")
    if model.training:
        raise Refused("it is in training mode")
    for name, parameter in model.named_parameters():
        if type(parameter) is not nn.Parameter or type(parameter.data) is not torch.Tensor:
            raise Refused(f"{name} is a {type(parameter.data).__name__}")
        if parameter.device.type != "cpu":
            raise Refused(f"{name} is on {parameter.device}: own steps were measured on CPUs only")
        if parameter.dtype not in _DTYPES or parameter.dtype != model.dtype:
            raise Refused(f"{name} is stored as {parameter.dtype}")
    for name, module in model.named_modules():
        if "forward" in vars(module):
            raise Refused(f"the forward of {name or 'the model'} was replaced")
        if any(hooks(module)):
            raise Refused(f"{name or 'the model'} has a forward hook")


def hooks(module: Any) -> Iterator[dict[int, Any]]:
    """The dicts in which torch keeps what runs before and after a module."""
    yield module._forward_hooks
    yield module._forward_pre_hooks


def _children(module: Any, where: str, wanted: set[str], optional: frozenset[str] = frozenset()) -> dict[str, Any]:
    """The modules directly inside one, exactly those named; it may hold no weights of its own."""
    found = dict(module.named_children())
    foreign = [*(set(found) - wanted - optional), *dict(module.named_parameters(recurse=False))]
    if foreign:
        raise Refused(f"{where} has {min(foreign)}")
    if wanted - set(found):
        raise Refused(f"{where} has no {min(wanted - set(found))}")
    return found


def _layer(module: Any, where: str) -> Layer:
    parts = _children(module, where, {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"})
    attention, network = parts["self_attn"], parts["mlp"]
    projections = {"q_proj", "k_proj", "v_proj", "o_proj"}
    found = _children(attention, f"{where}'s attention", projections, frozenset({"q_norm", "k_norm"}))
    gated = _children(network, f"{where}'s network", {"gate_proj", "up_proj", "down_proj", "act_fn"})
    if getattr(attention, "sliding_window", None) is not None:
        raise Refused(f"{where} attends to a sliding window")
    lines = {
        name: _linear(part, f"{where}'s {name}") for name, part in [*found.items(), *gated.items()] if "_proj" in name
    }
    before = Attending(
        parts["input_layernorm"].weight,
        lines["q_proj"],
        lines["k_proj"],
        lines["v_proj"],
        found["q_norm"].weight if "q_norm" in found else None,
        found["k_norm"].weight if "k_norm" in found else None,
    )
    behind = Feeding(
        lines["o_proj"],
        parts["post_attention_layernorm"].weight,
        lines["gate_proj"],
        lines["up_proj"],
        lines["down_proj"],
    )
    return Layer(before, behind, attention)


def _linear(module: Any, where: str) -> Linear:
    if type(module) is not nn.Linear:
        raise Refused(f"{where} is a {type(module).__name__}")
    return Linear(module.weight, module.bias)


def _is_norm(name: str) -> bool:
    return name.endswith(("norm", "layernorm"))


def _eps(module: Any) -> float:
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(eps, float):
        raise Refused(f"its norms ({type(module).__name__}) tell no epsilon")
    return eps


@torch.no_grad()
def _require_rms_norm(name: str, module: Any, eps: float) -> None:
    """By behaviour: some norms of that name subtract a mean, or scale by one more than their weight."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, nn.Parameter) or weight.dim() != 1 or [*module.parameters()] != [weight]:
        raise Refused(f"{name} ({type(module).__name__}) has other parameters than one weight")
    probe = torch.linspace(-1, 2, weight.numel(), dtype=weight.dtype)[None]
    expected, found = F.rms_norm(probe, weight.shape, weight, eps), module(probe)
    tolerance = 2e-2 if weight.dtype.itemsize == 2 else 1e-5
    if not torch.allclose(found, expected, atol=tolerance, rtol=tolerance):
        raise Refused(f"{name} ({type(module).__name__}) is no RMS norm, or its epsilon is not {eps:g}")
