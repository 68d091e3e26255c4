"""An own step: one token through a Llama-shaped decoder, on arenas in place.

Invariant: a step that is used has passed its self-test: on this model, its logits equalled the model's own, after a
prompt, in a row, and at a position far behind a gap. Whatever the step does not understand (other layers in the cache,
a hook, a module or an attention function that was exchanged meanwhile) it leaves to the model by returning None, before
anything is written. Weights are read where the model keeps them: no second copy.

A step is three functions: `first` (norm, projections, rotation), `middle` (write the slot, attend, feed forward, then
the next layer's `first`), and `last` (the last layer's rest, final norm and logits). All layers share them, so they are
compiled once, whatever the number of layers. Plain, they call torch's kernels. Compiled, products with weights are
written as sums, which torch's Inductor turns into loops that read each weight once, row by row, at twice the speed of
the matrix kernels for one token; arithmetic is float32.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F

from compaction.engines.decoder import Attending, Decoder, Feeding, Linear, Refused, hooks, read_decoder
from compaction.engines.forward import Forward
from compaction.errors import InvalidInput
from compaction.kv.arena import ArenaLayer
from compaction.kv.attention import grouped_attention
from compaction.kv.cache import ArenaCache

__all__ = ["Decode", "DecodeStep", "StepKind", "step_for"]

Decode = Literal["model", "compiled"]
StepKind = Literal["plain", "compiled"]
_KINDS: tuple[StepKind, ...] = ("plain", "compiled")

# Largest difference to the model's own logits, as a part of the largest logit. The plain step computes what the model
# does, in its order; the compiled one adds up in another order and rounds to a short format less often.
_TOLERANCE: dict[StepKind, dict[torch.dtype, float]] = {
    "plain": {torch.float64: 1e-9, torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3},
    "compiled": {torch.float64: 1e-9, torch.float32: 4e-6, torch.float16: 1e-2, torch.bfloat16: 6e-2},
}
# No fused multiply-add by default in Inductor's C++; sums are no less exact with it.
_OPTIONS: dict[str, Any] = {"cpp.enable_floating_point_contract_flag": "fast"}
# Query heads of a group beyond which scores are a matrix product: the unrolled loop would run out of registers.
_UNROLLED = 8

# Queries `[heads, head_dim]` and the new token's keys and values, `[kv_heads, head_dim]`.
_States = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class _Functions(NamedTuple):
    first: Callable[..., Any]
    middle: Callable[..., Any]
    last: Callable[..., Any]


class DecodeStep:
    """`step(cache, token, position)`; read `kind` for what is used, and `refusal` for why it is not what was asked for.

    Args:
        model: a causal language model of transformers.
        kind: "plain", or "compiled": by torch.compile, here and now, in some ten seconds; it needs a C++ compiler.
            Where that fails the plain step is used.

    Not thread-safe: the caller holds the model's lock.
    """

    def __init__(self, model: Any, kind: StepKind = "plain") -> None:
        self.kind: StepKind | None = None
        self.refusal = ""
        self._model = model
        try:
            self._decoder = read_decoder(model)
        except Refused as exc:
            self.refusal = str(exc)
            return
        self._watch()
        # The plain step first: what it computes wrongly, the compiled one would compute wrongly too.
        for tried in _KINDS[: 1 + _KINDS.index(kind)]:
            functions = _functions(self._decoder, compiled=tried == "compiled")
            self.refusal = self._self_test(functions, tried)
            if self.refusal:
                return
            self._functions, self.kind = functions, tried

    def __repr__(self) -> str:
        return f"DecodeStep(kind={self.kind!r}, refusal={self.refusal!r})"

    @torch.no_grad()
    def __call__(self, cache: Any, token: int, position: int) -> torch.Tensor | None:
        """Feed one token; returns its logits, `[vocabulary]`, or None, with nothing done, where the model must run.

        Raises EngineError, before anything is written, where the cache's capacity is exceeded.
        """
        if self.kind is None or not self._takes(cache) or not self._unchanged():
            return None
        return self._run(self._functions, cache, token, position)

    def _run(self, functions: _Functions, cache: Any, token: int, position: int) -> torch.Tensor:
        decoder = self._decoder
        arenas: list[ArenaLayer] = cache.layers
        hidden = F.embedding(torch.tensor([token]), decoder.embedding)
        cos, sin = (table[0] for table in decoder.rotary(hidden[None], torch.tensor([[position]])))
        states = functions.first(hidden, cos, sin, decoder.layers[0].before)
        for arena, layer, following in zip(arenas, decoder.layers, decoder.layers[1:], strict=False):
            keys, values = _one_more(arena)
            hidden, states = functions.middle(hidden, states, keys, values, cos, sin, layer.behind, following.before)
        keys, values = _one_more(arenas[-1])
        last = decoder.layers[-1].behind
        logits: torch.Tensor = functions.last(hidden, states, keys, values, last, decoder.norm, decoder.head)
        return logits[0]

    def _takes(self, cache: Any) -> bool:
        """Whether all layers are full arenas of one conversation that hold equally many tokens."""
        if not isinstance(cache, ArenaCache) or len(cache.layers) != len(self._decoder.layers):
            return False
        arenas, dtype = [layer for layer in cache.arenas if type(layer) is ArenaLayer], self._model.dtype
        held = arenas[0].held if len(arenas) == len(cache.layers) else 0
        if not held or arenas[0].key_slice(0, 1).shape[:2] != (1, self._decoder.kv_heads):
            return False
        return all(arena.held == held and arena.dtype == dtype for arena in arenas)

    def _watch(self) -> None:
        """Note what the step was read from, to see at each call that it still stands."""
        modules = list(self._model.modules())
        self._hooks = [found for module in modules for found in hooks(module)]
        self._own = [vars(module) for module in modules]
        self._parts = [
            (owner, name, part)
            for module in modules
            for owner in (module._modules, module._parameters)
            for name, part in owner.items()
        ]
        self._config = self._model.config.get_text_config(decoder=True)
        self._attention = self._config._attn_implementation

    def _unchanged(self) -> bool:
        return (
            not any(self._hooks)
            and not any("forward" in own for own in self._own)
            and all(owner.get(name) is part for owner, name, part in self._parts)
            and self._config._attn_implementation == self._attention
            and not self._model.training
            and self._decoder.embedding.device.type == "cpu"
        )

    @torch.no_grad()
    def _self_test(self, functions: _Functions, kind: StepKind) -> str:
        """Why these functions must not be used; "" where their logits are the model's."""
        forward, prompt = Forward(self._model), self._ids(8)
        ours, theirs = (forward.new_cache(16) for _ in range(2))
        try:
            for cache in (ours, theirs):
                forward(cache, prompt, 0)
            if not self._takes(ours):
                return "its cache has other layers than full attention"
            for token, position in zip(self._ids(5)[::-1], self._positions(kind, len(prompt)), strict=False):
                found = self._run(functions, ours, token, position)
                reason = _difference(found, forward(theirs, [token], position), _TOLERANCE[kind])
                if reason:
                    return f"{kind} step at position {position:,}: {reason}"
        except Exception as exc:  # noqa: BLE001  a foreign model may raise anything, so may a missing compiler
            lines = str(exc).strip().splitlines()
            return f"{kind} step: {type(exc).__name__}: {(lines[0] if lines else '')[:200]}"
        return ""

    def _ids(self, count: int) -> list[int]:
        """From all over the vocabulary: its first ids are often control tokens, which say little in a row."""
        return [len(self._decoder.embedding) * (index + 1) // (2 * count + 1) for index in range(count)]

    def _positions(self, kind: StepKind, start: int) -> list[int]:
        """Behind the prompt; and far behind a gap, where a scale shows that depends on the position."""
        far = getattr(self._config, "max_position_embeddings", None) or 4096
        return [start, start + 1, start + 2, *((far // 2, far - 1) if kind == "plain" else ())]


def _difference(ours: torch.Tensor, theirs: torch.Tensor, tolerance: dict[torch.dtype, float]) -> str:
    """How logits differ by more than rounding; "" where they do not."""
    allowed = tolerance[theirs.dtype] * float(theirs.abs().max())
    largest = float((ours.double() - theirs.double()).abs().max())
    if not largest <= allowed:  # also where one is not a number
        return f"logits differ by {largest:.2g}, where rounding explains {allowed:.2g}"
    behind = float(theirs.max() - theirs[ours.argmax()])
    return f"another token is chosen, {behind:.2g} behind the model's" if behind > allowed / 2 else ""


def _one_more(layer: ArenaLayer) -> tuple[torch.Tensor, torch.Tensor]:
    """All keys and values of a layer, `[1, kv_heads, slots, head_dim]`, with a slot more whose content is undefined."""
    layer.extend(1)
    keys, values = layer.key_slice(0, layer.held), layer.value_slice(0, layer.held)
    for held in (keys, values):
        torch._dynamo.maybe_mark_dynamic(held, 2)
    return keys, values


def _functions(decoder: Decoder, *, compiled: bool) -> _Functions:
    """The three functions of a step, over this decoder's shape; hidden states are `[1, hidden]`."""
    heads, kv_heads, dim, scaling = decoder.heads, decoder.kv_heads, decoder.head_dim, decoder.scaling
    eps, activation = decoder.eps, decoder.activation
    project = _as_sums if compiled else F.linear
    module = decoder.layers[0].attention

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return weight * F.rms_norm(x.to(_exact(x)), weight.shape, None, eps).to(x.dtype)

    def first(hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, before: Attending) -> _States:
        x = norm(hidden, before.norm)
        query, key = project(x, *before.query).view(heads, dim), project(x, *before.key).view(kv_heads, dim)
        if before.query_norm is not None and before.key_norm is not None:
            query, key = norm(query, before.query_norm), norm(key, before.key_norm)
        query, key = _turned(query, cos, sin), _turned(key, cos, sin)
        # Made ready here, in a tensor of its own: inside the loop over all slots it would be computed for each of them.
        ready = query.to(_exact(query)) * scaling if compiled else query
        return ready, key, project(x, *before.value).view(kv_heads, dim)

    def attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        if compiled:
            return _attention(query.view(kv_heads, -1, dim), keys[0], values[0])
        return grouped_attention(module, query[None, :, None], keys, values, None, scaling=scaling)[0]

    def rest(hidden: torch.Tensor, states: _States, keys: Any, values: Any, behind: Feeding) -> torch.Tensor:
        query, key, value = states
        keys[0, :, -1], values[0, :, -1] = key, value
        hidden = hidden + project(attend(query, keys, values).reshape(1, -1), *behind.output)
        x = norm(hidden, behind.norm)
        return hidden + project(activation(project(x, *behind.gate)) * project(x, *behind.up), *behind.down)

    def middle(
        hidden: torch.Tensor,
        states: _States,
        keys: torch.Tensor,
        values: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        behind: Feeding,
        before: Attending,
    ) -> tuple[torch.Tensor, _States]:
        hidden = rest(hidden, states, keys, values, behind)
        return hidden, first(hidden, cos, sin, before)

    def last(
        hidden: torch.Tensor,
        states: _States,
        keys: torch.Tensor,
        values: torch.Tensor,
        behind: Feeding,
        final: torch.Tensor,
        head: Linear,
    ) -> torch.Tensor:
        return project(norm(rest(hidden, states, keys, values, behind), final), *head)

    if compiled:
        return _Functions(_compile(first), _compile(middle), _compile(last))
    return _Functions(first, middle, last)


def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled apart from other models: torch caches by code object, and stops at eight entries of one."""
    code: types.CodeType = function.__code__
    own = types.FunctionType(code.replace(), function.__globals__, function.__name__, None, function.__closure__)
    compiled: Callable[..., Any] = torch.compile(own, fullgraph=True, options=_OPTIONS)
    return compiled


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Heads `[n, head_dim]` at their position; channel i and i + half form a pair."""
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


def _as_sums(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`F.linear` for one row, written for Inductor: it fuses the product into the sum."""
    exact = _exact(x)
    total = (weight.to(exact) * x.to(exact)).sum(-1)
    return (total if bias is None else total + bias.to(exact)).to(x.dtype)[None]


def _attention(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Attention of one position for Inductor: scaled query `[kv_heads, group, dim]`, `[kv_heads, slots, dim]` each.

    The loop over a group is unrolled so that a key is loaded once for all of its queries.
    """
    if query.shape[1] > _UNROLLED:
        scores = torch.bmm(query.to(keys.dtype), keys.transpose(1, 2)).to(query.dtype)
    else:
        rows = keys.to(query.dtype)
        scores = torch.stack([(query[:, group, None] * rows).sum(-1) for group in range(query.shape[1])], 1)
    return torch.bmm(torch.softmax(scores, -1).to(values.dtype), values)


def _exact(like: torch.Tensor) -> torch.dtype:
    """The number format to compute in: float32 at least."""
    return torch.promote_types(like.dtype, torch.float32)


def step_for(model: Any, decode: Decode) -> DecodeStep | None:
    """What an engine decodes by: None for "model". Raises InvalidInput for a name that is none."""
    if decode not in ("model", "compiled"):
        raise InvalidInput(f"decode is {decode!r}: use 'model' or 'compiled'")
    return DecodeStep(model, "compiled") if decode == "compiled" else None
