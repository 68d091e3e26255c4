"""Quantized layers: what is coded is coded once, whatever is cut, moved, parked, cropped or batched afterwards.

The oracle decodes naively: each slot's codes are noted when it is first coded, decoded alone with what the layer takes
off its keys, and turned to the slot's position by the plain rotation.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compaction.engines.forward import Forward
from compaction.errors import EngineError, InvalidInput
from compaction.kv.cache import ArenaCache, ArenaLayer
from compaction.kv.measure import saving, storage_bytes
from compaction.kv.probe import probe
from compaction.kv.quantization.codecs import Codec
from compaction.kv.quantization.layer import BLOCK, CALIBRATION, QuantizedLayer
from compaction.kv.quantization.settings import Setting
from compaction.kv.rope import LayerRope, RotaryPlan, Rotation, rotate
from compaction.kv.slot_map import Mode, SlotMap, SlotRows
from compaction.kv.splice import Block, Splicer
from tests.kv.architectures import model_of

HEADS, DIM = 2, 16
FREQUENCIES = 100.0 ** (-torch.arange(0, DIM, 2, dtype=torch.float64) / DIM)
ROTATION = Rotation("keys", "half", 0, FREQUENCIES)
ROPE = LayerRope("rotary", (ROTATION,))
SETTINGS = (
    "k8v4:sinks=4,window=8",
    "tq3:sinks=0,window=0",
    "tqk5v3:sinks=2,window=16",
    "k4v2:sinks=4,window=0,group=8",
)
Shown = tuple[torch.Tensor, torch.Tensor]


def states(count: int, seed: int = 0, batch: int = 1) -> Shown:
    """Keys before their rotation and values, `[batch, HEADS, count, DIM]` each; keys have a mean, as real ones have."""
    generator = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(batch, HEADS, count, DIM, generator=generator) for _ in range(2))
    return keys + 3 * torch.arange(DIM) / DIM, values


def feed(layer: QuantizedLayer, made: Shown, positions: list[int]) -> Shown:
    """What a forward pass does: rotate the keys, hand over both with the positions."""
    at = torch.tensor([positions])
    return layer.update(rotate(made[0], at[0], ROTATION), made[1], kwargs={"position_ids": at})


def filled(name: str, count: int, **options: Any) -> QuantizedLayer:
    """A layer that holds `count` slots at positions 0, 1, 2, …"""
    layer = QuantizedLayer(Setting.parse(name), ROPE, **options)
    feed(layer, states(count), list(range(count)))
    return layer


def naive(layer: QuantizedLayer, rows: dict[str, torch.Tensor], positions: torch.Tensor) -> Shown:
    """Coded slots decoded by their codecs alone: keys at their positions, and values, `[1, HEADS, n, DIM]`."""
    found = []
    for side, setting in (("keys", layer.setting.keys), ("values", layer.setting.values)):
        codec = Codec(setting, DIM)
        coded = {name: rows[f"body.{side}.{name}"] for name in codec.rows}
        found.append(codec.decode(coded, codec.constants(torch.device("cpu"))))
    return rotate(found[0] + rows["centre"].float(), positions, ROTATION), found[1]


def bytes_of(rows: dict[str, torch.Tensor]) -> list[bytes]:
    """What is stored for each coded slot, all tensors one behind the other."""
    parts = [t[0].transpose(0, 1).contiguous().view(torch.uint8).flatten(1) for n, t in rows.items() if "body" in n]
    return [row.numpy().tobytes() for row in torch.cat(parts, 1)] if parts else []


class Twin:
    """Two quantized layers under a splicer, and what each slot must show."""

    def __init__(self, name: str) -> None:
        self.layers = [QuantizedLayer(Setting.parse(name), ROPE, step=32) for _ in range(2)]
        self.splicer = Splicer(SimpleNamespace(layers=self.layers), RotaryPlan((ROPE, ROPE)))
        self.serial = 0
        self.exact: dict[int, Shown] = {}  # by token id: the slot's key before rotation and value, [HEADS, DIM]
        self.codes: dict[tuple[int, int], bytes] = {}  # by layer and token id: what is stored

    @property
    def map(self) -> SlotMap:
        return self.splicer.slot_map

    def append(self, count: int) -> None:
        ids = list(range(self.serial, self.serial + count))
        made = states(count, seed=self.serial)
        self.serial += count
        self.exact |= {token: (made[0][0, :, i], made[1][0, :, i]) for i, token in enumerate(ids)}
        positions = self.splicer.append(ids)
        for layer in self.layers:
            shown = feed(layer, made, positions)
            assert torch.equal(shown[1][:, :, -count:], made[1])

    def check(self) -> None:
        """Every slot shows what it was coded to, at its position; what is not coded is exact."""
        for index, layer in enumerate(self.layers):
            assert layer.held == len(self.map) and layer.positions[0].tolist() == self.map.position
            assert layer.meter.held == layer.nbytes() == storage_bytes(layer) - storage_bytes(layer.shared)
            if not layer.held:
                continue
            rows, positions = layer.cut(0, layer.held), torch.tensor(self.map.position)
            first = next((int(t.shape[2]) for n, t in rows.items() if n.startswith("first")), 0)
            coded = slice(first, first + layer.coded)
            for token, stored in zip(self.map.ids[coded], bytes_of(rows), strict=True):
                assert self.codes.setdefault((index, token), stored) == stored
            exact = [torch.stack([self.exact[token][i] for token in self.map.ids], 1)[None] for i in (0, 1)]
            want = [rotate(exact[0], positions, ROTATION), exact[1]]
            if layer.coded:
                for side, decoded in zip(want, naive(layer, rows, positions[coded]), strict=True):
                    side[:, :, coded] = decoded
            assert torch.allclose(layer.key_slice(0, layer.held), want[0], atol=5e-5)
            assert torch.allclose(layer.value_slice(0, layer.held), want[1], atol=1e-6)


STEP = st.tuples(
    st.sampled_from(["append", "token", "evict", "crop", "park", "restore", "compact"]),
    st.integers(1, 250),
    st.floats(0, 1),
    st.sampled_from(["gap", "compact"]),
)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(SETTINGS), st.lists(STEP, min_size=2, max_size=7))
def test_no_edit_changes_a_code(name: str, steps: list[tuple[str, int, float, Mode]]) -> None:
    """A slot's codes stay bit for bit the same through appends, evictions, shifts, crops, parking and restoring."""
    twin, parked = Twin(name), list[Block]()
    twin.append(180)
    for action, count, where, mode in steps:
        held = len(twin.map)
        start = int(where * max(0, held - 1))
        end = min(held, start + count)
        if action == "append":
            twin.append(count)
        elif action == "token":
            twin.append(1)
        elif action == "crop":
            twin.splicer.crop(max(0, held - count))
            parked.clear()
        elif action == "compact" and held:
            twin.splicer.compact()
            parked.clear()
        elif action in ("evict", "park") and start < end:
            # A slot in full precision that is restored between codes must be coded then: `check` would call it new.
            coded = all("body" in key or key == "centre" for key in twin.layers[0].cut(start, end))
            done = twin.splicer.evict([(start, end)], mode, park=action == "park" and coded)
            if mode == "compact" or not (action == "park" and coded):
                parked.clear()
            parked += done.parked
        elif action == "restore" and parked:
            twin.splicer.restore(parked.pop(), mode)
            parked.clear()
        twin.check()


@pytest.mark.parametrize("name", SETTINGS)
def test_a_thousand_shifts_do_not_drift(name: str) -> None:
    """Evicted one by one from the front of what is kept, the last slots are what one eviction at once makes of them."""
    shifted, at_once = filled(name, 1_300), filled(name, 1_300)
    one = Splicer(SimpleNamespace(layers=[shifted]), RotaryPlan((ROPE,)))
    other = Splicer(SimpleNamespace(layers=[at_once]), RotaryPlan((ROPE,)))
    one.append(range(1_300))
    other.append(range(1_300))

    for _ in range(1_000):
        one.evict([(10, 11)], "compact")
    other.evict([(10, 1_010)], "compact")

    assert torch.equal(shifted.key_slice(0, 300), at_once.key_slice(0, 300))
    assert torch.equal(shifted.value_slice(0, 300), at_once.value_slice(0, 300))
    assert shifted.positions[0].tolist() == list(range(300))


def test_the_newest_and_the_sinks_are_exact() -> None:
    """Bit for bit, until `window + BLOCK` wait; then all but the window is coded at once."""
    layer = filled("k8v4:sinks=4,window=8", 200)
    keys, values = rotate(states(200)[0], torch.arange(200), ROTATION), states(200)[1]
    before = layer.coded
    for slot in range(200, 200 + BLOCK):
        feed(layer, states(1, seed=slot), [slot])

    assert (before, layer.coded) == (200 - 4 - 8, 200 - 4 - 8 + BLOCK)
    assert torch.equal(layer.key_slice(0, 4), keys[:, :, :4]) and torch.equal(layer.value_slice(0, 4), values[:, :, :4])
    assert torch.equal(layer.value_slice(256, 264), torch.cat([states(1, seed=s)[1] for s in range(256, 264)], 2))


def test_nothing_is_coded_before_there_are_enough_to_take_a_mean_of() -> None:
    """A short conversation stays as it is."""
    layer = filled("tq2:sinks=0,window=0", CALIBRATION - 1)
    waiting = layer.coded
    feed(layer, states(1), [CALIBRATION - 1])

    assert (waiting, layer.coded) == (0, CALIBRATION)


def test_a_pass_sees_its_own_tokens_exactly() -> None:
    """What `update` shows of the new states is what it was given, although it may have coded them."""
    layer = filled("tq2:sinks=0,window=0", 300)
    keys, values = states(200, seed=7)
    at = torch.arange(300, 500)

    shown = feed(layer, (keys, values), at.tolist())

    assert torch.equal(shown[0][:, :, 300:], rotate(keys, at, ROTATION)) and torch.equal(shown[1][:, :, 300:], values)
    assert layer.coded == 500


@pytest.mark.parametrize(("at", "coded"), [(80, 10), (200, 0)])
def test_a_summary_is_coded_where_codes_follow_it(at: int, coded: int) -> None:
    """Full-precision slots that are put in the middle are coded; put at the end they stay as they are."""
    layer = filled("k8v4:sinks=4,window=8", 220)
    splicer = Splicer(SimpleNamespace(layers=[layer]), RotaryPlan((ROPE,)))
    splicer.append(range(220))
    splicer.evict([(at, at + 20)], "gap")
    positions = list(range(at, at + 10))
    keys, values = states(10, seed=5)
    made = {"keys": rotate(keys, torch.tensor(positions), ROTATION), "values": values}
    before = layer.coded

    splicer.insert(Block(SlotRows(positions, positions, list(positions), [0] * 10), [made], 10), at, at)

    assert layer.coded - before == coded and layer.positions[0].tolist() == splicer.slot_map.position
    shown = layer.key_slice(at, at + 10)
    assert torch.equal(shown, made["keys"]) if not coded else torch.allclose(shown, made["keys"], atol=0.1)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_dump_comes_back_bit_by_bit(name: str) -> None:
    """Codes, scales, positions, what is in full precision, what is taken off; and what follows is coded alike."""
    layer, restored = filled(name, 300), QuantizedLayer(Setting.parse(name), ROPE)
    tensors, meta = layer.dump()
    restored.load(tensors, meta)

    again, _ = restored.dump()
    assert all(torch.equal(again[key], tensors[key]) for key in tensors) and set(again) == set(tensors)
    assert storage_bytes(list(tensors.values())) == layer.logical_nbytes()
    one, other = (
        feed(layer, states(70, seed=3), list(range(300, 370))),
        feed(restored, states(70, seed=3), list(range(300, 370))),
    )
    assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1]) and layer.coded == restored.coded


def test_another_settings_dump_is_refused() -> None:
    """Nothing changes; an empty layer dumps nothing and takes it back."""
    layer = filled("k8v4", 300)
    with pytest.raises(InvalidInput, match="tq4"):
        QuantizedLayer(Setting.parse("tq4"), ROPE).load(*layer.dump())
    layer.load(*QuantizedLayer(Setting.parse("k8v4"), ROPE).dump())

    assert (layer.held, layer.nbytes(), layer.meter.held) == (0, 0, 0)


def test_bytes_are_those_of_the_formula() -> None:
    """Codes, statistics, a position a slot, sinks, window and the mean key; measured from the storages."""
    setting = Setting.parse("tqk5v3:sinks=4,window=8,group=8")
    layer = QuantizedLayer(setting, ROPE, step=1)
    feed(layer, states(1_004 + 8), list(range(1_012)))
    coded = 1_000 * HEADS * DIM * 2 * setting.bits_per_element(DIM, DIM) / 8

    full = (4 + 8) * (HEADS * DIM * 2 * 4 + 4)  # float32, and the position each key was made for
    assert layer.logical_nbytes() == coded + full + 1_012 * 4 + HEADS * DIM * 2
    assert layer.nbytes() == storage_bytes(layer._regions)
    assert layer.nbytes() - layer.logical_nbytes() == (BLOCK - 8) * (HEADS * DIM * 2 * 4 + 4)


def test_batches_are_selected_repeated_and_reordered() -> None:
    """Each conversation keeps its codes, its mean key and its own positions."""
    setting = Setting.parse("k4v4:sinks=2,window=8")
    keys, values = states(220, batch=3)
    at = torch.arange(220)[None] + torch.tensor([[0], [5], [9]])
    turned = torch.cat([rotate(keys[i : i + 1], at[i], ROTATION) for i in range(3)])
    batched = QuantizedLayer(setting, ROPE)
    batched.update(turned, values, kwargs={"position_ids": at})
    alone = []
    for i in range(3):
        layer = QuantizedLayer(setting, ROPE)
        layer.update(turned[i : i + 1], values[i : i + 1], kwargs={"position_ids": at[i : i + 1]})
        alone.append(layer)
    whole = torch.cat([layer.key_slice(0, 220) for layer in alone])

    assert torch.allclose(batched.key_slice(0, 220), whole, atol=1e-5)
    batched.reorder_cache(torch.tensor([2, 0, 0]))
    assert torch.allclose(batched.key_slice(0, 220), whole[[2, 0, 0]], atol=1e-5)
    batched.batch_select_indices(torch.tensor([1]))
    batched.batch_repeat_interleave(2)
    assert torch.allclose(batched.key_slice(0, 220), whole[[0, 0]], atol=1e-5)
    assert batched.meter.held == batched.nbytes() and batched.positions.shape[0] == 2


def test_a_batch_whose_positions_part_later_is_widened() -> None:
    """One row of positions serves all conversations as long as they agree."""
    layer = QuantizedLayer(Setting.parse("k8v8:sinks=2,window=8"), ROPE)
    keys, values = states(200, batch=2)
    at = torch.arange(200)[None]
    layer.update(rotate(keys, at[0], ROTATION), values, kwargs={"position_ids": at})
    one = layer.positions.shape[0]
    layer.update(*states(1, batch=2), kwargs={"position_ids": torch.tensor([[200], [300]])})

    assert (one, layer.positions.tolist()[1][-2:]) == (1, [199, 300])
    assert torch.allclose(layer.key_slice(0, 200), rotate(keys, at[0], ROTATION), atol=0.1)


def test_positions_are_never_guessed() -> None:
    """Without positions a layer that rotates refuses; several axes are refused; announced ones hold for one pass."""
    layer = QuantizedLayer(Setting.parse("k8v4"), ROPE)
    keys, values = states(3)
    with pytest.raises(EngineError, match="announce"):
        layer.update(keys, values)
    with pytest.raises(EngineError, match="axes"):
        layer.update(keys, values, kwargs={"position_ids": torch.arange(9).view(3, 1, 3)})
    layer.shared.announce(0, [5, 6, 9])
    layer.update(keys, values)
    with pytest.raises(EngineError, match="announce"):
        layer.update(keys, values)

    assert layer.positions.tolist() == [[5, 6, 9]]


def test_capacity_holds_and_slots_are_not_written() -> None:
    """A full layer refuses before anything changes; single slots cannot be overwritten or moved."""
    layer = filled("k8v4", 300, capacity=310)
    with pytest.raises(EngineError, match="310"):
        feed(layer, states(11), list(range(300, 311)))
    refused: list[Callable[[], None]] = [
        lambda: layer.write_keys(0, states(1)[0]),
        lambda: layer.write_values(0, states(1)[1]),
        lambda: layer.move(0, 5, 3),
        lambda: layer.extend(3),
    ]
    for change in refused:
        with pytest.raises(InvalidInput, match="one by one"):
            change()
    with pytest.raises(InvalidInput, match="not assigned"):
        layer.keys = states(1)[0]

    assert layer.held == 300


def test_reset_forgets_all() -> None:
    """Shapes too."""
    layer = filled("k8v4", 300)
    layer.reset()

    assert (layer.held, layer.nbytes(), layer.meter.held, layer.keys) == (0, 0, 0, None)


# -- inside models


@pytest.mark.parametrize(
    "name",
    ["llama", "gemma3, hybrid", "gemma3n, shared", "glm4", "phi", "deepseek v3, MLA", "smollm3", "gpt2", "jamba"],
)
def test_decoding_equals_a_full_cache_of_the_decoded_keys(name: str) -> None:
    """Whatever the rotation: what the layers show is what a full cache would have to hold."""
    model = model_of(name, "float32")
    forward, cache = Forward(model), ArenaCache(model.config, storage="tq4:sinks=2,window=8", plan=probe(model))
    ids = torch.randint(3, 60, (240,), generator=torch.Generator().manual_seed(0)).tolist()
    forward(cache, ids[:150], 0)
    for at in (150, 151, 152):
        forward(cache, ids[at : at + 1], at)
    plain: Any = copy.deepcopy(cache)
    for layer, shown in zip(plain.layers, cache.layers, strict=True):
        if isinstance(shown, QuantizedLayer):
            full = ArenaLayer()
            full.update(shown.key_slice(0, shown.held), shown.value_slice(0, shown.held))
            plain.layers[plain.layers.index(layer)] = full

    ours, theirs = forward(cache, ids[153:154], 153), forward(plain, ids[153:154], 153)

    assert "tq4:sinks=2,window=8" in cache.storages and float((ours - theirs).abs().max()) < 1e-5


def test_quantizing_a_live_cache_frees_what_it_says() -> None:
    """A conversation in arenas is coded in place: bytes before and after are those of the storages."""
    model = model_of("llama", "float32")
    forward, cache, plan = Forward(model), ArenaCache(model.config, step=32), probe(model)
    ids = torch.randint(3, 60, (250,), generator=torch.Generator().manual_seed(0)).tolist()
    full = forward(cache, ids[:240], 0)
    exact = forward(cache, ids[240:241], 240)
    before = cache.nbytes()
    for layer in cache.arenas:
        layer.crop(-1)
    made = cache.quantize({"default": "k8v8", 1: None}, plan)
    held = cache.meter.held
    logits = forward(cache, ids[240:241], 240)

    assert (made.before, made.after) == (before, held) and made.saved > 0.3 * before
    assert cache.storages == ["k8v8", "full (ArenaLayer)", "k8v8", "k8v8"]
    assert float((logits - exact).abs().max()) < 0.01 * float(full.std())
    assert cache.quantize("k8v4", plan).saved > 0 and cache.storages == ["k8v8", "k8v4", "k8v8", "k8v8"]


def test_a_saving_that_is_not_in_the_storages_is_refused() -> None:
    """Views of what was there before keep all of it alive."""
    whole = torch.zeros(1_000)

    with pytest.raises(EngineError, match="not there"):
        saving(4_000, [whole[:10]], claimed=40)
    assert saving(4_000, [whole[:10].clone()], claimed=40).ratio == 0.01


def test_positions_must_belong_to_the_slots() -> None:
    """And a cache without a plan cannot store keys before their rotation."""
    model = model_of("llama", "float32")
    cache = ArenaCache(model.config)
    Forward(model)(cache, [5] * 9, 0)
    with pytest.raises(InvalidInput, match="8 positions"):
        cache.quantize("k8v4", probe(model), range(8))
    with pytest.raises(InvalidInput, match="probe"):
        ArenaCache(model.config, storage="k8v4")

    assert cache.storages == ["full (ArenaLayer)"] * 4


def test_steady_decoding_allocates_no_storage() -> None:
    """What is reserved suffices for codes, window and what layers share: 100 steps, the same storages."""
    model = model_of("llama", "float32")
    forward, cache = Forward(model), ArenaCache(model.config, storage="k8v4", plan=probe(model), capacity=400)
    cache.reserve(400)
    forward(cache, [5] * 250, 0)
    for at in range(250, 260):
        forward(cache, [7], at)
    layer: Any = cache.layers[0]
    allocated, held, coded = cache.meter.allocations, storage_bytes(cache), layer.coded
    for at in range(260, 360):
        forward(cache, [7], at)

    assert (cache.meter.allocations, storage_bytes(cache)) == (allocated, held)
    assert layer.held == 360 and layer.coded == coded + BLOCK


def test_generate_runs_on_quantized_layers() -> None:
    """transformers' own loop, unmodified."""
    model = model_of("llama", "float32")
    ids = torch.randint(3, 60, (1, 200), generator=torch.Generator().manual_seed(0))
    cache = ArenaCache(model.config, storage="k8v8", plan=probe(model))
    made = model.generate(ids, cache=cache, max_new_tokens=20, do_sample=False)

    assert made.shape[1] > 200 and cache.get_seq_length() == made.shape[1] - 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["k8v4:sinks=4,window=8", "tqk5v3:sinks=2,window=16"])
def test_compiled_reading_shows_what_plain_reading_shows(name: str) -> None:
    """To rounding, at any length, after growth and evictions. Compiling takes some ten seconds."""
    plain, compiled = filled(name, 200, step=32), filled(name, 200, step=32, compiled=True)
    splicers = [Splicer(SimpleNamespace(layers=[layer]), RotaryPlan((ROPE,))) for layer in (plain, compiled)]
    for splicer in splicers:
        splicer.append(range(200))
    for count in (1, 1, 300, 70):
        positions, _ = (splicer.append(range(count)) for splicer in splicers)
        shown = [feed(layer, states(count, seed=count), positions) for layer in (plain, compiled)]
        assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(*shown, strict=True))
        for splicer in splicers:
            splicer.evict([(20, 40)], "compact")
    assert torch.allclose(plain.key_slice(0, plain.held), compiled.key_slice(0, compiled.held), atol=1e-4)
