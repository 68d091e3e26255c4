"""The probe finds how position enters a cache, and what it found moves keys to where the model would have put them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

from compaction.errors import CannotRotate, EngineError
from compaction.kv.probe import probe
from compaction.kv.rope import LayerRope, Layout, RotaryPlan, Rotation, Turn, carry, rotate
from tests.fixtures_rope import ARCHITECTURES, architecture_model

NAMES = tuple(ARCHITECTURES)
ROTATED = tuple(name for name, made in ARCHITECTURES.items() if any("/" in layer for layer in made.layers))
TABLE = 10_000.0 ** (-torch.arange(0, 16, 2, dtype=torch.float64) / 16)


def found(layer: LayerRope) -> str:
    """A layer in the notation of `Architecture.layers`."""
    return " ".join(f"{r.where}/{r.layout}/{r.dims}" for r in layer.rotations) or layer.kind


def layers_at(model: Any, position: int) -> list[Any]:
    """Cache layers after one token at a position."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=torch.tensor([[9]]), position_ids=torch.tensor([[position]]), cache=cache)
    return list(cache.layers)


def keys(slots: int, dim: int = 16, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Random keys `[1, 2, slots, dim]`."""
    return torch.randn(1, 2, slots, dim, generator=torch.Generator().manual_seed(slots)).to(dtype)


def rotation(layout: Layout = "half", start: int = 0) -> Rotation:
    """A rotation of 16 channels."""
    return Rotation("keys", layout, start, TABLE)


def complex_rotated(x: torch.Tensor, delta: int, by: Rotation) -> torch.Tensor:
    """The same by multiplication of complex numbers, in float64: an independent way to write it."""
    part = x.double()[..., by.start : by.start + by.dims]
    half = by.dims // 2
    pairs = (part[..., :half], part[..., half:]) if by.layout == "half" else (part[..., 0::2], part[..., 1::2])
    turned = torch.complex(*pairs) * torch.polar(torch.ones_like(by.inv_freq), delta * by.inv_freq)
    out = x.double().clone()
    where = out[..., by.start : by.start + by.dims]
    where.copy_(
        torch.cat([turned.real, turned.imag], -1)
        if by.layout == "half"
        else torch.stack([turned.real, turned.imag], -1).flatten(-2)
    )
    return out


@pytest.mark.parametrize("name", NAMES)
def test_the_probe_finds_what_each_layer_does(name: str) -> None:
    """Tensor, layout and width of every rotation, and every kind of layer without one, in each architecture."""
    plan = probe(architecture_model(name))

    assert tuple(map(found, plan.layers)) == ARCHITECTURES[name].layers


@pytest.mark.parametrize("name", NAMES)
def test_the_probe_tells_distance_by_slot(name: str) -> None:
    """ALiBi is told from layers without positions, which look alike in a cache."""
    assert probe(architecture_model(name)).by_slot == ARCHITECTURES[name].by_slot


@pytest.mark.parametrize("name", ROTATED)
def test_a_moved_key_is_the_models_own(name: str) -> None:
    """At positions the probe did not use, turned keys equal those of a forward pass there to 1e-5."""
    model = architecture_model(name)
    before, after = layers_at(model, 11), layers_at(model, 91)

    worst = 0.0
    for layer, a, b in zip(probe(model).layers, before, after, strict=True):
        for by in layer.rotations:
            theirs = getattr(b, by.where)
            worst = max(worst, float((rotate(getattr(a, by.where), 80, by) - theirs).abs().max() / theirs.abs().max()))
    assert worst < 1e-5


def test_yarn_is_turned_by_raw_frequencies() -> None:
    """A scaling that multiplies cos and sin by a factor is not applied a second time: lengths stay."""
    by = probe(architecture_model("yarn")).layers[0].rotations[0]
    x = keys(4)

    assert torch.allclose(rotate(x, 500, by).norm(dim=-1), x.norm(dim=-1), rtol=1e-6)


def test_the_probe_works_in_the_models_own_format() -> None:
    """A bf16 model gives the same plan as its fp32 original."""
    import copy

    half = copy.deepcopy(architecture_model("gemma3_dual_theta")).bfloat16()

    plan = probe(half)

    assert [r.source.rpartition(".")[2] for layer in plan.layers for r in layer.rotations] == [
        "sliding_attention_inv_freq",
        "full_attention_inv_freq",
    ] * 2


@pytest.mark.parametrize(
    ("name", "word"), [("gpt2_learned", "learned"), ("lfm2_conv", "state"), ("bloom_alibi", "ALiBi")]
)
def test_what_cannot_be_moved_is_refused_by_name(name: str, word: str) -> None:
    """Learned positions, states and biases by distance: the error says which it is and what to do instead."""
    with pytest.raises(CannotRotate, match=f"{word}.*prefill again") as caught:
        probe(architecture_model(name)).require_rotation()

    assert isinstance(caught.value, EngineError)


def test_learned_positions_may_keep_gaps() -> None:
    """Only moving is refused: slots of GPT-2 can be taken out where the others stay."""
    assert probe(architecture_model("gpt2_learned")).evict_refusal == ""


def test_a_plan_without_refusals_is_silent() -> None:
    """Layers that rotate, that know no position, and that hold nothing can all be moved."""
    RotaryPlan((LayerRope("rotary", (rotation(),)), LayerRope("unrotated"), LayerRope("empty"))).require_rotation()


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("start", [0, 8])
@pytest.mark.parametrize("delta", [-4000, -1, 77])
def test_rotation_equals_complex_multiplication(layout: Layout, start: int, delta: int) -> None:
    """Both layouts, partial rotary parts in front and behind, against float64: to fp32 rounding."""
    x, by = keys(5, dim=24), rotation(layout, start)

    assert float((rotate(x, delta, by) - complex_rotated(x, delta, by)).abs().max()) < 1e-6


def test_channels_outside_the_rotary_part_are_bit_equal() -> None:
    """A partial rotation copies the rest, also while slots move."""
    x, by = keys(40, dim=24), rotation("half", 4)
    expected = torch.cat([x[:, :, 10:30, :4], x[:, :, 10:30, 20:]], -1)
    carry(x, 10, 3, 20, by, Turn(-7))

    assert torch.equal(torch.cat([x[:, :, 3:23, :4], x[:, :, 3:23, 20:]], -1), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(("src", "dst"), [(300, 0), (300, 299), (0, 300), (5, 6), (70, 0), (9, 9)])
@pytest.mark.parametrize("turned", [False, True])
def test_carrying_equals_a_copy(dtype: torch.dtype, src: int, dst: int, turned: bool) -> None:
    """Ranges that overlap in either direction give the bits of turning a copy that was made before."""
    x = keys(900, dim=16, dtype=dtype)
    turn = Turn(dst - src) if turned else None
    by = rotation()
    copy = x[:, :, src : src + 500].clone()
    expected = rotate(copy, dst - src, by) if turned else copy

    carry(x, src, dst, 500, by, turn)

    assert torch.equal(x[:, :, dst : dst + 500], expected)


def test_carrying_leaves_other_slots_alone() -> None:
    """Only the target range changes."""
    x = keys(300)
    before = x.clone()
    carry(x, 200, 50, 100, rotation(), Turn(-150))
    x[:, :, 50:150] = before[:, :, 50:150]

    assert torch.equal(x, before)


def test_any_strides_are_carried() -> None:
    """Keys that lie transposed in memory, `[head_dim, slots]`, are turned through a view."""
    x = keys(300)
    stored = x.transpose(-1, -2).contiguous()
    carry(x, 100, 20, 150, rotation("interleaved"), Turn(-80))
    carry(stored.transpose(-1, -2), 100, 20, 150, rotation("interleaved"), Turn(-80))

    assert torch.equal(stored.transpose(-1, -2), x)


def test_a_distance_per_slot_equals_one_distance_each() -> None:
    """A tensor of distances turns every slot by its own."""
    x, by = keys(3), rotation()
    deltas = [-5, 0, 9]
    each = torch.cat([rotate(x[:, :, i : i + 1], delta, by) for i, delta in enumerate(deltas)], dim=2)

    assert torch.allclose(rotate(x, torch.tensor(deltas), by), each, atol=1e-7)


def test_tables_are_computed_once_for_layers_that_rotate_alike() -> None:
    """One turn over many layers of equal frequencies holds one table."""
    turn, x = Turn(3), keys(4)
    for _ in range(5):
        carry(x, 0, 0, 4, rotation(), turn)
    assert turn.tables(rotation(), x) is turn.tables(rotation(), x)
