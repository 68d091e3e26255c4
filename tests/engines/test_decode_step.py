"""The own decode step: the model's logits, written into arenas, or a reason why the model must run."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache

from compaction.engines.decode_step import DecodeStep
from compaction.engines.forward import Forward
from compaction.engines.live_cache import LiveCache
from compaction.errors import EngineError, InvalidInput
from compaction.kv.arena import ArenaLayer
from compaction.kv.attention import AttentionSwitch
from compaction.kv.cache import ArenaCache
from compaction.kv.probe import probe
from compaction.kv.slot_map import SlotMap
from compaction.kv.splice import Splicer
from tests.fixtures_models import shared_smollm2_engine, tiny_engine, tiny_model
from tests.kv.architectures import ARCHITECTURES, config_of, model_of

# Everything else of tests/kv/architectures.py is refused. Granite's multipliers are one there.
TAKEN = {"llama", "qwen2, MQA", "qwen3", "granite"}
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]


def caches(model: Any, count: int = 2, capacity: int = 64) -> list[Any]:
    """Arenas that hold the prompt."""
    forward = Forward(model)
    made = [forward.new_cache(capacity) for _ in range(count)]
    for cache in made:
        forward(cache, PROMPT, 0)
    return made


def feed(step: DecodeStep, cache: Any, token: int, position: int) -> torch.Tensor:
    """One token through the step, which must take it."""
    logits = step(cache, token, position)
    assert logits is not None
    return logits


def own(name: str = "llama", dtype: str = "float32", **options: Any) -> Any:
    """A model whose config no other test shares, with options of it set."""
    config = copy.deepcopy(config_of(name))
    for option, value in options.items():
        setattr(config, option, value)
    with torch.random.fork_rng():
        torch.manual_seed(1234)
        return AutoModelForCausalLM.from_config(config).to(getattr(torch, dtype)).eval()


@pytest.fixture(scope="module")
def compiled() -> DecodeStep:
    """The compiled step of a tiny Llama. Takes ten seconds where Inductor's cache on disk does not know it."""
    return DecodeStep(tiny_model("llama"), "compiled")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", sorted(TAKEN))
def test_plain_step_equals_the_model_to_the_last_bit(name: str, dtype: str) -> None:
    """With grouped, single and normalised heads, biases, and positions that jump: logits, keys and values."""
    model = model_of(name, dtype)
    step, forward = DecodeStep(model), Forward(model)
    ours, theirs = caches(model)

    for token, position in ((7, 12), (2, 13), (9, 40), (4, 41), (4, 200)):
        assert torch.equal(feed(step, ours, token, position), forward(theirs, [token], position))
    for mine, other in zip(ours.layers, theirs.layers, strict=True):
        assert torch.equal(mine.keys, other.keys) and torch.equal(mine.values, other.values)


@pytest.mark.parametrize(
    "options",
    [
        {"attention_bias": True, "mlp_bias": True},
        {"num_attention_heads": 12, "num_key_value_heads": 1, "head_dim": 8, "hidden_size": 96},
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}},
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 500.0}},
        {"hidden_act": "gelu", "tie_word_embeddings": True},
    ],
    ids=["biases", "twelve heads on one", "linear", "dynamic", "gelu, tied"],
)
def test_variants_of_llama_equal_the_model_to_the_last_bit(options: dict[str, Any]) -> None:
    """What a config may change in a Llama: all of it is read off the modules."""
    model = own(**options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.linspace(-0.1, 0.1, parameter.numel()).view(parameter.shape))  # biases start at zero
    step, forward = DecodeStep(model), Forward(model)
    ours, theirs = caches(model)

    for token, position in ((7, 12), (2, 13), (9, 250), (4, 251)):
        assert torch.equal(feed(step, ours, token, position), forward(theirs, [token], position))


def test_a_mistral_without_a_window_is_a_llama() -> None:
    """Its window is an option of its config."""
    assert DecodeStep(own("mistral, sliding", sliding_window=None)).kind == "plain"


def test_smollm2_in_bfloat16_equals_the_model_to_the_last_bit() -> None:
    """Trained weights, in the format that people use."""
    model = shared_smollm2_engine("bfloat16").model
    step, forward = DecodeStep(model), Forward(model)
    ours, theirs = caches(model)

    for position in range(12, 18):
        assert torch.equal(feed(step, ours, 314, position), forward(theirs, [314], position))


def test_after_an_eviction_the_step_runs_at_the_slot_maps_positions() -> None:
    """Gap positions: the cache is shorter than the position that the next token has."""
    model = tiny_model("llama")
    step, forward, plan = DecodeStep(model), Forward(model), probe(model)
    splicers = []
    for cache in caches(model):
        slot_map = SlotMap()
        slot_map.append(PROMPT)
        splicers.append(Splicer(cache, plan, slot_map))
    ours, theirs = splicers
    for splicer in splicers:
        splicer.evict([(2, 7)], "gap")

    for token in (7, 8, 9):
        position = ours.append([token])[0]
        logits = feed(step, ours.cache, token, position)
        assert position > ours.cache.get_seq_length() and theirs.append([token]) == [position]
        assert torch.equal(logits, forward(theirs.cache, [token], position))


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_every_architecture_is_taken_or_refused_with_a_reason(name: str) -> None:
    """A refused step touches nothing: it returns None."""
    model = model_of(name, "float32")
    step = DecodeStep(model)

    assert (step.kind == "plain") == (name in TAKEN), step
    assert bool(step.refusal) == (name not in TAKEN)
    if step.kind is None:
        assert step(ArenaCache(model.config, capacity=8), 1, 0) is None


REASONS = {
    "mistral, sliding": "other layers than full attention",
    "qwen3 moe": "network has",
    "gemma2, alternating": "softcapping",
    "deepseek v3, MLA": "attention has (kv_a|q_a)",
    "gpt2": "the model has transformer",
    "smollm3": "logits differ",
    "cohere": "layer 0 has no post_attention_layernorm",
    "glm4": "layer 0 has post_",
    "lfm2, convolution": "embedding_norm",
}


@pytest.mark.parametrize("name", sorted(REASONS))
def test_the_reason_names_what_is_not_understood(name: str) -> None:
    """Modules by their name, options of the config, and what only running shows."""
    refusal = DecodeStep(model_of(name, "float32")).refusal

    assert re.search(REASONS[name], refusal), refusal


@pytest.mark.parametrize("option", ["embedding_multiplier", "residual_multiplier", "logits_scaling"])
def test_what_only_running_shows_is_found_by_running(option: str) -> None:
    """Granite's modules are Llama's; its forward multiplies in places that no module tells."""
    model = own("granite", "bfloat16", **{option: 1.5})

    assert "logits differ" in DecodeStep(model).refusal


class Adapter(nn.Linear):
    """A projection that adds something of its own, as LoRA does."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Twice what the weights say."""
        return 2 * super().forward(input)


def hook(model: Any) -> None:
    """Change what a network returns."""
    model.model.layers[1].mlp.register_forward_hook(lambda module, args, out: out * 2)


def adapter(model: Any) -> None:
    """Put an adapter in the place of a projection."""
    old = model.model.layers[2].self_attn.v_proj
    new = Adapter(old.in_features, old.out_features, bias=False)
    new.weight = old.weight
    model.model.layers[2].self_attn.v_proj = new


def replaced(model: Any) -> None:
    """Replace the forward of one module, as accelerate does."""
    network = model.model.layers[0].mlp
    inner = network.forward
    network.forward = lambda x: inner(x) * 2


def quantized(model: Any) -> None:
    """Store a weight in eight bits."""
    weight = model.model.layers[0].mlp.up_proj.weight
    model.model.layers[0].mlp.up_proj.weight = nn.Parameter(weight.detach().to(torch.int8), requires_grad=False)


CHANGES: dict[str, tuple[Callable[[Any], None], str]] = {
    "hook": (hook, "model.layers.1.mlp has a forward hook"),
    "adapter": (adapter, "layer 2's v_proj is a Adapter"),
    "forward": (replaced, "the forward of model.layers.0.mlp was replaced"),
    "int8": (quantized, "model.layers.0.mlp.up_proj.weight is stored as torch.int8"),
    "training": (lambda model: model.train(), "it is in training mode"),
    "attention": (
        lambda model: model.set_attn_implementation("compaction_grouped"),
        "computed by 'compaction_grouped'",
    ),
}


@pytest.mark.parametrize("change", sorted(CHANGES))
def test_a_changed_model_is_refused_at_load(change: str) -> None:
    """What would make the step's logits wrong without a trace in the config."""
    model = own()
    CHANGES[change][0](model)

    assert CHANGES[change][1] in DecodeStep(model).refusal


@pytest.mark.parametrize("change", ["hook", "adapter", "forward", "int8", "training", "attention"])
def test_a_model_that_changes_later_runs_itself(change: str) -> None:
    """The step sees it at the next token, and does nothing."""
    model = own()
    step = DecodeStep(model)
    (cache,) = caches(model, 1)
    feed(step, cache, 7, 12)

    CHANGES[change][0](model)

    assert step(cache, 7, 13) is None and cache.get_seq_length() == 13


def test_while_attention_is_switched_the_model_runs() -> None:
    """Scores are taken by an attention function of their own, which the step would pass by."""
    model = own()
    step = DecodeStep(model)
    (cache,) = caches(model, 1)

    with AttentionSwitch(model, "compaction_grouped"):
        assert step(cache, 7, 12) is None
    feed(step, cache, 7, 12)


def test_weights_that_change_in_place_are_seen() -> None:
    """No copy of the weights is kept: a merged adapter or loaded weights count from the next token on."""
    model = own()
    step, forward = DecodeStep(model), Forward(model)
    ours, theirs = caches(model)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(3)

    assert torch.equal(feed(step, ours, 7, 12), forward(theirs, [7], 12))


class Coded(ArenaLayer):
    """A layer that keeps its slots in a way of its own, as quantized and per-head layers do."""


def test_other_caches_are_left_to_the_model() -> None:
    """transformers' own layers, an empty cache, a batch, layers of different length, or of a kind built on arenas."""
    model = tiny_model("llama")
    step = DecodeStep(model)
    dynamic = DynamicCache(config=model.config)
    Forward(model)(dynamic, PROMPT, 0)
    batch, uneven, coded = caches(model, 3)
    batch.batch_repeat_interleave(2)
    layer, coded.layers[3] = coded.layers[3], Coded(capacity=64)
    coded.layers[3].update(layer.keys, layer.values)
    uneven.layers[1].truncate(5)

    for cache in (dynamic, ArenaCache(model.config, capacity=8), batch, uneven, coded):
        assert step(cache, 7, 12) is None
    assert [layer.held for layer in uneven.layers] == [12, 5, 12, 12]


def test_a_full_arena_is_refused_before_anything_is_written() -> None:
    """As in the model's own pass: the caller compacts, and goes on."""
    model = tiny_model("llama")
    step = DecodeStep(model)
    (cache,) = caches(model, 1, capacity=len(PROMPT))

    with pytest.raises(EngineError, match="compact first"):
        step(cache, 7, 12)
    assert [layer.held for layer in cache.layers] == [12] * 4


def test_compiled_step_equals_the_model_at_every_length(compiled: DecodeStep) -> None:
    """Within 1e-4 in float32; other lengths and arenas of other sizes need no further compilation."""
    model = tiny_model("llama")
    forward = Forward(model)

    assert compiled.kind == "compiled", compiled
    with torch._dynamo.config.patch(error_on_recompile=True):
        for capacity in (40, 64, 300):
            ours, theirs = caches(model, capacity=capacity)
            for position in range(12, 36):
                found, wanted = feed(compiled, ours, position, position), forward(theirs, [position], position)
                assert float((found - wanted).abs().max()) <= 1e-4
            for mine, other in zip(ours.layers, theirs.layers, strict=True):
                torch.testing.assert_close(mine.keys, other.keys, atol=1e-5, rtol=1e-4)
                torch.testing.assert_close(mine.values, other.values, atol=1e-5, rtol=1e-4)


def test_without_a_compiler_the_plain_step_is_used() -> None:
    """The reason says what is missing."""
    import torch._inductor.config as inductor

    missing = {"cpp.cxx": ("/nowhere/no-such-compiler",), "force_disable_caches": True}
    with inductor.patch(missing):
        step = DecodeStep(own(), "compiled")

    assert step.kind == "plain" and step.refusal.startswith("compiled step:")


@pytest.mark.parametrize("stepping", [False, True])
def test_two_thousand_tokens_allocate_nothing_and_stay_in_budget(stepping: bool) -> None:
    """The storages are the budget's bytes at rest and at each token; no arena is allocated anew."""
    model = own(num_hidden_layers=2)
    budget = 2_100
    live = LiveCache(Forward(model, DecodeStep(model) if stepping else None), budget)
    live.start_turn(budget)
    live.feed(PROMPT)
    meter, per_token = live.layers[0].meter, sum(layer.slot_nbytes for layer in live.layers)
    allocations, held = meter.allocations, live.bytes

    seen = set()
    for token in range(2_000):
        live.feed([token % 60])
        seen.add(live.bytes)

    assert seen == {held} and held == budget * per_token
    assert meter.allocations == allocations and live.peak_bytes == held


def test_an_engine_decodes_by_its_step(
    compiled: DecodeStep, talk: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same reply, ids and bytes as by the model."""
    by_model, by_step = tiny_engine("llama"), tiny_engine("llama")
    monkeypatch.setattr(by_step._forward, "step", compiled)

    replies = []
    for engine in (by_model, by_step):
        reply = engine.generate("a", talk, None, max_new_tokens=40)
        for _ in reply:
            pass
        assert reply.result is not None
        replies.append((reply.result.ids, engine.cached_ids("a"), engine.kv_bytes("a")))

    assert replies[0] == replies[1]


def test_an_engine_tells_why_its_model_decodes(talk: list[dict[str, Any]]) -> None:
    """A refusal is no error: the model runs."""
    engine = tiny_engine("gpt2", decode="compiled")

    assert engine.step is not None and engine.step.refusal == "the model has transformer"
    assert len(engine.complete(talk, max_new_tokens=3).ids) <= 3
    assert tiny_engine("gpt2").step is None


def test_an_unknown_way_to_decode_is_refused() -> None:
    """With the names that there are."""
    with pytest.raises(InvalidInput, match="'model' or 'compiled'"):
        tiny_engine("llama", decode="fast")
