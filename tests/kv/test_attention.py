"""Grouped attention for one token: SDPA's results, or SDPA itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from transformers import DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from compaction.engines.forward import Forward
from compaction.kv.attention import NAME, GroupedDecode, grouped_attention, supports
from compaction.kv.cache import ArenaCache
from tests.fixtures_models import FAMILIES, shared_smollm2_engine, tiny_model
from tests.kv.architectures import ARCHITECTURES, model_of

SHAPES = [  # batch, heads, kv_heads, slots, head_dim, value_dim
    (1, 9, 3, 65, 16, 16),
    (1, 4, 4, 33, 8, 8),
    (2, 8, 1, 20, 24, 16),
    (3, 6, 2, 1, 12, 12),
]


def states(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, positions: int = 1) -> list[torch.Tensor]:
    """Query, keys and values of a shape, keys and values as views of a longer arena."""
    batch, heads, shared, slots, dim, value_dim = shape
    generator = torch.Generator().manual_seed(sum(shape))
    query = torch.randn(batch, heads, positions, dim, generator=generator)
    arenas = [torch.randn(batch, shared, slots + 7, size, generator=generator) for size in (dim, value_dim)]
    return [query.to(dtype), *(arena.to(dtype)[:, :, 3 : slots + 3] for arena in arenas)]


def module(shape: tuple[int, ...]) -> Any:
    """An attention module as far as the functions read one."""
    return SimpleNamespace(num_key_value_groups=shape[1] // shape[2], is_causal=True)


def masks(shape: tuple[int, ...]) -> dict[str, torch.Tensor | None]:
    """No mask, one for all heads, one a head, boolean and added."""
    batch, heads, _, slots = shape[:4]
    generator = torch.Generator().manual_seed(1)
    shared = torch.rand(batch, 1, 1, slots, generator=generator) > 0.4
    each = torch.rand(1, heads, 1, slots, generator=generator) > 0.4
    shared[..., -1] = each[..., -1] = True
    added = torch.zeros(batch, 1, 1, slots).masked_fill(~shared, float("-inf"))
    return {"none": None, "shared": shared, "heads": each, "added": added, "bias": added.clamp(min=-3.0)}


@pytest.mark.parametrize("kind", ["none", "shared", "heads", "added", "bias"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scaling", [None, 0.3])
def test_one_position_equals_sdpa(shape: tuple[int, ...], kind: str, scaling: float | None) -> None:
    """All groupings, with and without a mask, from views of a longer arena, in float32."""
    query, key, value = states(shape)
    mask = masks(shape)[kind]

    ours, _ = grouped_attention(module(shape), query, key, value, mask, scaling=scaling)
    theirs, _ = sdpa_attention_forward(module(shape), query, key, value, mask, scaling=scaling)

    torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", ["shared", "added"])
def test_a_row_that_sees_nothing_gives_zeros(kind: str) -> None:
    """As in SDPA: a padded conversation of a batch is no source of NaN."""
    shape = SHAPES[2]
    query, key, value = states(shape)
    mask = masks(shape)[kind]
    assert mask is not None
    mask[0] = False if mask.dtype == torch.bool else float("-inf")

    ours, _ = grouped_attention(module(shape), query, key, value, mask)

    assert ours[0].abs().max() == 0 and bool(ours[1].isfinite().all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_number_formats_stay_within_their_rounding(dtype: torch.dtype) -> None:
    """Compared with SDPA in float64."""
    query, key, value = states(SHAPES[0], dtype)

    ours, _ = grouped_attention(module(SHAPES[0]), query, key, value, None)
    exact, _ = sdpa_attention_forward(module(SHAPES[0]), query.double(), key.double(), value.double(), None)

    assert ours.dtype == dtype and float((ours - exact).abs().max()) < 8 * torch.finfo(dtype).eps


@pytest.mark.parametrize(
    ("positions", "options"),
    [(5, {}), (1, {"position_bias": torch.randn(1, 9, 1, 65)}), (1, {"s_aux": torch.zeros(9)})],
)
def test_what_it_does_not_take_is_sdpa_to_the_bit(positions: int, options: dict[str, Any]) -> None:
    """Prefill, position biases and sinks go to the unmodified function."""
    query, key, value = states(SHAPES[0], positions=positions)

    ours, _ = grouped_attention(module(SHAPES[0]), query, key, value, None, **options)
    theirs, _ = sdpa_attention_forward(module(SHAPES[0]), query, key, value, None, **options)

    assert torch.equal(ours, theirs)


def test_soft_caps_are_refused_as_sdpa_refuses_them() -> None:
    """The answer to an argument that would be ignored is SDPA's own error."""
    query, key, value = states(SHAPES[0])

    with pytest.raises(ValueError, match="softcap"):
        grouped_attention(module(SHAPES[0]), query, key, value, None, softcap=30.0)


@pytest.mark.parametrize("family", FAMILIES)
def test_models_decode_the_same_logits(family: str) -> None:
    """Nine families in float32: arenas and grouped attention against `DynamicCache` and SDPA, prefill and decode."""
    model = tiny_model(family)
    forward = Forward(model)  # puts grouped attention in for arenas only
    theirs, ours = DynamicCache(config=model.config), ArenaCache(model.config, capacity=256, step=16)
    ids = torch.randint(3, 300, (120,), generator=torch.Generator().manual_seed(2)).tolist()
    at, worst = 0, 0.0
    for count in [40, *[1] * 80]:
        tokens = ids[at : at + count]
        want = forward(theirs, tokens, at)
        worst = max(worst, float((want - forward(ours, tokens, at)).abs().max()))
        at += count

    assert supports(model) and worst < 1e-5


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_decodes_the_same_logits(name: str) -> None:
    """Whatever a modeling file does beside attention, arenas change nothing: sparse indexers, windows, states, …"""
    model = model_of(name, "float32")
    forward = Forward(model)
    theirs, ours = DynamicCache(config=model.config), ArenaCache(model.config, capacity=64)
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    ids = torch.randint(3, vocabulary, (48,), generator=torch.Generator().manual_seed(2)).tolist()
    at, worst, size = 0, 0.0, 1.0
    for count in [40, *[1] * 8]:
        want = forward(theirs, ids[at : at + count], at)
        worst = max(worst, float((want - forward(ours, ids[at : at + count], at)).abs().max()))
        at, size = at + count, max(size, float(want.abs().max()))

    assert worst < 1e-5 * size


@pytest.mark.parametrize("name", ["deepseek v3.2, MLA indexed", "glm moe, MLA indexed"])
def test_a_model_that_asks_for_sdpa_by_name_keeps_it(name: str) -> None:
    """Under another name these would not mask what their indexer left out."""
    assert not supports(model_of(name, "float32"))


def test_the_model_is_as_it_was_afterwards() -> None:
    """The name of its attention function returns, also after an error, and stays within the block."""
    model, names = tiny_model("llama"), []

    with pytest.raises(RuntimeError, match="inside"), GroupedDecode(model):
        names.append(model.config._attn_implementation)
        raise RuntimeError("inside")

    assert [*names, model.config._attn_implementation] == [NAME, "sdpa"]


def test_a_model_without_sdpa_runs_unchanged() -> None:
    """Learned sinks and soft caps live in eager functions that ours would pass by."""
    options: dict[str, Any] = {"attn_implementation": "eager", "vocab_size": 50, "num_hidden_layers": 1}
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    config = transformers.Gemma2Config(intermediate_size=32, **sizes, **options)
    model = transformers.Gemma2ForCausalLM(config)

    with GroupedDecode(model):
        assert not supports(model) and model.config._attn_implementation == "eager"


def test_only_arenas_decode_by_it() -> None:
    """A pass over any other cache, or over several tokens, runs by the name the model came with."""
    model, names = tiny_model("llama"), []
    handle = model.register_forward_pre_hook(lambda *_: names.append(model.config._attn_implementation))
    forward = Forward(model)
    for cache in (DynamicCache(config=model.config), ArenaCache(model.config)):
        forward(cache, [5, 6], 0)
        forward(cache, [7], 2)
    handle.remove()

    assert names == ["sdpa", "sdpa", "sdpa", NAME]


@pytest.mark.model
def test_smollm2_gives_the_same_logits_in_float32() -> None:
    """Logits of a real model differ by no more than 1e-5 of their size."""
    model = shared_smollm2_engine("float32").model
    forward = Forward(model)  # puts grouped attention in for arenas only
    theirs, ours = DynamicCache(config=model.config), ArenaCache(model.config)
    ids = torch.randint(3, 40_000, (140,), generator=torch.Generator().manual_seed(2)).tolist()
    forward(theirs, ids[:128], 0)
    forward(ours, ids[:128], 0)
    worst = 0.0
    for at in range(128, 140):
        want = forward(theirs, ids[at : at + 1], at)
        found = forward(ours, ids[at : at + 1], at)
        worst = max(worst, float((want - found).abs().max() / want.abs().max()))

    assert worst < 1e-5


@pytest.mark.model
def test_smollm2_in_bfloat16_is_as_near_to_float32_as_with_sdpa() -> None:
    """Scores rounded to bfloat16 cost no more than the rounding that the rest of the model does anyway."""
    ids = torch.randint(3, 40_000, (266,), generator=torch.Generator().manual_seed(2)).tolist()

    def replies(dtype: str, *, ours: bool) -> torch.Tensor:
        model = shared_smollm2_engine(dtype).model
        forward, found = Forward(model), []
        cache: Any = ArenaCache(model.config) if ours else DynamicCache(config=model.config)
        forward(cache, ids[:256], 0)
        for at in range(256, 266):
            found.append(forward(cache, ids[at : at + 1], at))
        return torch.stack(found).float().log_softmax(-1)

    exact = replies("float32", ours=False)
    grouped, sdpa = (
        float((exact.exp() * (exact - replies("bfloat16", ours=ours))).sum(-1).mean()) for ours in (True, False)
    )

    assert grouped < 2 * sdpa
