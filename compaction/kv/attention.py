"""Attention for one new token, registered beside SDPA.

Invariant: whatever this function computes itself equals SDPA's result to rounding. It takes one query position over
keys and values it understands; every other call (prefill, dropout, soft caps, sinks, position biases, other number
formats) goes to transformers' own `sdpa_attention_forward` with its arguments unchanged.

Why: for a single query over grouped heads, torch's CPU kernel reads every key once per *query* head. Here all query
heads of a group are columns of one product with the keys as they lie in memory, `[slots, head_dim] @ [head_dim,
group]`: each key and value is read once, and the keys need no transposed copy, so that prefill, eviction and offload
see plain `[slots, head_dim]` rows. (Keys stored transposed were measured too: not faster, and slower in prefill.)
Knows nothing about caches: keys and values may lie anywhere.
"""

from __future__ import annotations

import inspect
import re
import sys
from functools import cache
from typing import Any

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

__all__ = ["NAME", "AttentionSwitch", "GroupedDecode", "grouped_attention", "supports"]

NAME = "compaction_grouped"

_NAMED = re.compile(r"""_attn_implementation\w*\s*(==|!=|in\b|not in\b)[^\n]*["']sdpa["']""")
_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float64, torch.float16})
# Arguments of SDPA's function that change nothing for one query position. A parameter that a later transformers adds
# is not among them, so a call that uses it goes to SDPA.
_INERT = frozenset({"is_causal"})
_PARAMETERS = frozenset(
    name
    for name, parameter in inspect.signature(sdpa_attention_forward).parameters.items()
    if parameter.kind is not inspect.Parameter.VAR_KEYWORD
)
# What SDPA's function looks for among its other keywords, or refuses, and what backends beside it understand.
_FOREIGN = frozenset({"softcap", "output_attentions", "s_aux", "sinks", "head_mask", "block_mask", "cu_seq_lens_q"})


def grouped_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The attention function of transformers' interface.

    Args:
        module: the attention module; only `num_key_value_groups` is read.
        query: `[batch, heads, positions, head_dim]`.
        key: `[batch, kv_heads, slots, head_dim]`.
        value: `[batch, kv_heads, slots, value_dim]`.
        attention_mask: None, or what SDPA takes: boolean or added, broadcastable to `[batch, heads, positions, slots]`.
        dropout: probability; anything above zero goes to SDPA.
        scaling: of the scores; None: `head_dim ** -0.5`.
        kwargs: as SDPA's function takes them.

    Returns `[batch, positions, heads, value_dim]` and no weights.
    """
    if dropout or not _understood(module, query, key, value, attention_mask, kwargs):
        result: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return result
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return _one_position(query, key, value, attention_mask, float(scale)), None


def supports(model: Any) -> bool:
    """Whether this model's attention may go through `grouped_attention`: it uses SDPA now, by the shared interface."""
    if getattr(model.config, "_attn_implementation", None) != "sdpa":
        return False
    if not getattr(model, "_can_set_attn_implementation", lambda: False)():
        return False
    for name in {type(module).__module__ for module in model.modules()}:
        # A modeling file may keep a local "sdpa" of its own, which our fallback would pass by.
        own = getattr(sys.modules.get(name), "ALL_ATTENTION_FUNCTIONS", ALL_ATTENTION_FUNCTIONS)
        if own is not ALL_ATTENTION_FUNCTIONS and "sdpa" in own._local_mapping:
            return False
        if _asks_for_sdpa(name):
            return False
    return True


@cache
def _asks_for_sdpa(module: str) -> bool:
    """Whether a modeling file does something else where the attention's name is not "sdpa".

    Sparse models (DeepSeek V3.2, GLM MoE DSA, …) mask what their indexer did not choose only under that name.
    """
    try:
        source = inspect.getsource(sys.modules[module])
    except (KeyError, OSError, TypeError):
        return False
    return bool(_NAMED.search(source))


class AttentionSwitch:
    """`with AttentionSwitch(model, name):` inside, the model attends by a registered function; outside it is as it was.

    A model that `supports()` refuses runs unchanged, which `active` tells. Make it once, enter it often. Not
    thread-safe: the caller holds the model's lock.
    """

    def __init__(self, model: Any, name: str) -> None:
        self._configs = _attention_configs(model) if supports(model) else []
        self._name = name

    @property
    def active(self) -> bool:
        """Whether the model's attention is changed at all."""
        return bool(self._configs)

    def __enter__(self) -> None:
        for config in self._configs:
            config._attn_implementation_internal = self._name

    def __exit__(self, *exc: object) -> None:
        for config in self._configs:
            config._attn_implementation_internal = "sdpa"


class GroupedDecode(AttentionSwitch):
    """`with GroupedDecode(model):` inside, the model decodes by `grouped_attention`."""

    def __init__(self, model: Any) -> None:
        super().__init__(model, NAME)


def _attention_configs(model: Any) -> list[Any]:
    """The configs from which modules of this model read their attention function, each once."""
    found = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
    return [c for c in found.values() if getattr(c, "_attn_implementation_internal", None) == "sdpa"]


def _understood(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    kwargs: dict[str, Any],
) -> bool:
    """Whether `_one_position` gives what SDPA gives for these arguments."""
    if query.dim() != 4 or query.shape[2] != 1:
        return False
    if not query.dtype == key.dtype == value.dtype or query.dtype not in _DTYPES:
        return False
    groups = getattr(module, "num_key_value_groups", 1)
    if query.shape[0] != key.shape[0] or query.shape[1] != key.shape[1] * groups or key.shape[2] == 0:
        return False
    if mask is not None and (mask.dim() != 4 or mask.shape[2] != 1 or mask.shape[-1] != key.shape[2]):
        return False
    return not any(
        value is not None and value is not False and name not in _INERT
        for name, value in kwargs.items()
        if name in _PARAMETERS or name in _FOREIGN
    )


def _one_position(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """Attention of one query position, query heads grouped by the key-value head they share."""
    batch, heads, _, dim = query.shape
    shared, slots = key.shape[1], key.shape[2]
    columns = query.reshape(batch * shared, heads // shared, dim).transpose(1, 2).contiguous()
    keys, values = key.reshape(batch * shared, slots, dim), value.reshape(batch * shared, slots, value.shape[-1])
    # beta=0: what the first argument holds is not read. The scale is applied to the sums, not to the rounded query.
    scores = torch.baddbmm(query.new_empty(1, 1, 1), keys, columns, beta=0, alpha=scale)
    rows = scores.transpose(1, 2)
    weights = torch.softmax(rows.contiguous(), -1, _exact(rows)) if mask is None else _weights(rows, mask, batch)
    mixed = torch.bmm(weights.to(value.dtype), values)
    return mixed.view(batch, 1, heads, value.shape[-1])


def _weights(rows: torch.Tensor, mask: torch.Tensor, batch: int) -> torch.Tensor:
    """Masked softmax over `[batch · kv_heads, group, slots]`; a row that may see nothing has no weights, as in SDPA."""
    group, slots = rows.shape[1], rows.shape[2]
    by_head = rows.reshape(batch, -1, group, slots).to(_exact(rows))
    if mask.shape[1] == 1:
        mask = mask.view(mask.shape[0], 1, 1, slots)
    else:
        mask = mask.reshape(mask.shape[0], -1, group, slots)
    if mask.dtype == torch.bool:
        by_head, blind = by_head.masked_fill(~mask, float("-inf")), ~mask.any(-1, keepdim=True)
    else:
        by_head, blind = by_head + mask, (mask == float("-inf")).all(-1, keepdim=True)
    return torch.softmax(by_head, -1).masked_fill(blind, 0.0).reshape(rows.shape)


def _exact(tensor: torch.Tensor) -> torch.dtype:
    """The number format for a softmax: float32 at least."""
    return torch.promote_types(tensor.dtype, torch.float32)


ALL_ATTENTION_FUNCTIONS.register(NAME, grouped_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, sdpa_mask)
