"""Random sequences of append, evict, insert, crop, park, quantize, offload and restore, against masked attention.

The machine is that of `test_splice_sequences`: a plain list beside the cache says what each slot should hold. Here the
cache also leaves for host memory or a file and comes back, becomes codes, and parked blocks go the same way. At the
end of a sequence all its tokens, evicted ones included, go through a model written down here, at once and without any
cache: each pair of tokens has its own mask and its own distance, as it was when the later one was fed. Every logit that
the cache has given must be the one found so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule, run_state_machine_as_test

from compaction.kv.cache import ArenaCache
from compaction.kv.measure import storage_bytes
from compaction.kv.quantization import layer as quantized
from compaction.kv.quantization.layer import QuantizedLayer
from compaction.kv.residency.blocks import BlockStore
from compaction.kv.residency.fingerprint import Identity, ids_digest
from compaction.kv.residency.pool import Pool
from compaction.kv.residency.shelf import Shelf
from compaction.kv.residency.snapshot import pack_cache, unpack_cache
from compaction.kv.rope import rotate
from compaction.kv.splice import Splicer
from tests.fixtures_rope import architecture_model
from tests.kv.test_splice_sequences import Sequences, Slot

CPU = torch.device("cpu")
IDENTITY = Identity("m", "c", "w", "t", "float32", "full", "5")
SETTING = "k8v4:sinks=2,window=8,group=16"


@dataclass
class Coded:
    """What one layer's codes say of a token: decoded once, at a position, from pass `since` on."""

    keys: torch.Tensor
    values: torch.Tensor
    position: int
    since: int


@dataclass
class Fed:
    """One token as it was fed: which others it saw, each where it stood then, and in which pass."""

    id: int
    position: int
    number: int
    seen: list[tuple[int, int]]
    logits: torch.Tensor | None = None
    coded: dict[int, Coded] = field(default_factory=dict)


def turn(x: torch.Tensor, position: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """RoPE as the paper has it, halves as Llama pairs them; `x` `[…, heads, dim]`, `position` `[…]`."""
    angle = position[..., None].double() * inverse.double()
    cos, sin = (each.float()[..., None, :] for each in (angle.cos(), angle.sin()))
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


@torch.no_grad()
def masked_attention(model: Any, tokens: list[Fed]) -> tuple[torch.Tensor, float]:
    """Logits of every token `[n, vocabulary]`, and the largest relative error of what was coded.

    A Llama without a cache: its matrices and norms, attention written out for each pair of tokens.
    """
    n, config = len(tokens), model.config
    inverse = 1.0 / 10_000 ** (torch.arange(0, config.head_dim, 2).double() / config.head_dim)
    at = torch.tensor([token.position for token in tokens])
    hidden, places = [[-math.inf] * n for _ in tokens], [[0] * n for _ in tokens]
    for i, token in enumerate(tokens):
        for j, position in token.seen:
            hidden[i][j], places[i][j] = 0.0, position
    mask, where = torch.tensor(hidden), torch.tensor(places)
    number = torch.tensor([token.number for token in tokens])
    x, worst = model.model.embed_tokens(torch.tensor([token.id for token in tokens])), 0.0
    groups = config.num_attention_heads // config.num_key_value_heads
    for index, layer in enumerate(model.model.layers):
        h, own = layer.input_layernorm(x), layer.self_attn
        q, k, v = (p(h).view(n, -1, config.head_dim) for p in (own.q_proj, own.k_proj, own.v_proj))
        keys, values = k[None].repeat(n, 1, 1, 1), v[None].repeat(n, 1, 1, 1)
        for j, token in enumerate(tokens):
            if index in token.coded:
                coded = token.coded[index]
                plain = turn(coded.keys, torch.tensor(-coded.position), inverse)
                worst = max(worst, error(plain, k[j]) * 4, error(coded.values, v[j]))
                later = number >= coded.since
                keys[later, j], values[later, j] = plain, coded.values
        keys = turn(keys, where, inverse).repeat_interleave(groups, dim=2)
        scores = torch.einsum("ihd,ijhd->hij", turn(q, at, inverse), keys) / math.sqrt(config.head_dim)
        weights = torch.softmax(scores + mask, dim=-1)
        out = torch.einsum("hij,ijhd->ihd", weights, values.repeat_interleave(groups, dim=2))
        x = x + own.o_proj(out.reshape(n, -1))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    return model.lm_head(model.model.norm(x)), worst


def error(found: torch.Tensor, true: torch.Tensor) -> float:
    """Root mean square, relative."""
    return float((found - true).square().mean().sqrt() / true.square().mean().sqrt())


class Machine(Sequences):
    """A tiny Llama's cache in arenas; the others' caches are compared with the list alone."""

    kind = "arena"
    shelves: dict[str, Shelf]
    stores: dict[str, BlockStore]

    def note_encoded(self, before: list[Slot], made: list[Slot], logits: torch.Tensor | None) -> None:
        """Remember what each of them saw."""
        if not self.rows:
            self.fed: list[Fed] = []
            self.passes, self.offloads = 0, 0
        for count, slot in enumerate(made, 1):
            seen = [(other.row, other.position) for other in (*before, *made[:count])]
            self.fed.append(Fed(slot.id, slot.position, self.passes, seen))
        self.fed[-1].logits = logits
        self.passes += 1
        super().note_encoded(before, made, logits)

    @rule(tier=st.sampled_from(("host", "disk")))
    def offload(self, tier: str) -> None:
        """The cache leaves, and another one comes back from where it lay."""
        splicer, shelf = self.splicer, self.shelves[tier]
        fingerprint = IDENTITY.fingerprint("c", ids_digest(splicer.slot_map.ids))
        packed = pack_cache(splicer.cache.layers, splicer.slot_map, {"n": self.offloads})
        assert shelf.put("c", packed, fingerprint) == tier
        fresh = self.fresh()
        restored = unpack_cache(shelf.get("c", fingerprint), fresh.layers, CPU)
        again = pack_cache(fresh.layers, restored.slot_map, restored.extra)
        assert again.meta == packed.meta and set(again.tensors) == set(packed.tensors)
        assert all(torch.equal(tensor, packed.tensors[name]) for name, tensor in again.tensors.items())
        self.splicer = Splicer(fresh, splicer.plan, restored.slot_map)
        self.offloads += 1

    def fresh(self) -> Any:
        """An empty cache of the kind there is."""
        cache = self.splicer.cache
        coded = any(isinstance(layer, QuantizedLayer) for layer in cache.layers)
        return ArenaCache(
            self.forward.model.config, step=16, storage=SETTING if coded else None, plan=self.splicer.plan
        )

    @precondition(lambda self: self.parked)
    @rule(data=st.data(), tier=st.sampled_from(("host", "disk")))
    def offload_block(self, data: st.DataObject, tier: str) -> None:
        """A parked block leaves and comes back."""
        index = data.draw(st.integers(0, len(self.parked) - 1))
        block, slots = self.parked[index]
        assert self.stores[tier].put("c", "span", block) == tier
        self.parked[index] = (self.stores[tier].get("c", "span"), slots)
        self.stores[tier].discard("c")

    def teardown(self) -> None:
        """Every logit is that of masked attention over all tokens that were ever fed."""
        if self.name != "llama" or not getattr(self, "fed", None):
            return
        expected, worst = masked_attention(self.forward.model, self.fed)
        for token, row in zip(self.fed, expected, strict=True):
            if token.logits is not None:
                assert torch.allclose(token.logits, row, atol=2e-4, rtol=0), float((token.logits - row).abs().max())
        assert worst < 0.2


class Quantizing(Machine):
    """The same, and at some moment the cache becomes codes."""

    @precondition(lambda self: not self.layers())
    @rule(more=st.booleans())
    def quantize(self, more: bool) -> None:
        """What is held becomes codes where it stands; from then on so does what is fed."""
        if more:
            self.append(30, 5)
        cache = self.splicer.cache
        saved = cache.quantize(SETTING, self.splicer.plan, self.splicer.slot_map.position)
        assert saved.after == storage_bytes(cache)

    def layers(self) -> dict[int, QuantizedLayer]:
        """Those that are quantized."""
        found = enumerate(self.splicer.cache.layers)
        return {index: layer for index, layer in found if isinstance(layer, QuantizedLayer)}

    @invariant()
    def layers_agree(self) -> None:
        """Codes are noted when they are first seen, and must say the same ever after."""
        for index, layer in self.layers().items():
            assert layer.held == len(self.slots)
            if not layer.held:
                continue
            assert layer.positions[0].tolist() == [slot.position for slot in self.slots]
            keys, values = layer.key_slice(0, layer.held), layer.value_slice(0, layer.held)
            for at in self.coded(layer):
                slot = self.slots[at]
                known = self.fed[slot.row].coded.setdefault(
                    index, Coded(keys[0, :, at].clone(), values[0, :, at].clone(), slot.position, self.passes)
                )
                assert torch.equal(values[0, :, at], known.values)
                rotation = self.splicer.plan.layers[index].of("keys")
                assert rotation is not None
                turned = rotate(known.keys[:, None], slot.position - known.position, rotation)[:, 0]
                assert torch.allclose(keys[0, :, at], turned, atol=1e-4)
        if not self.layers():
            super().layers_agree()

    def coded(self, layer: QuantizedLayer) -> range:
        """The slots that are codes: they lie behind the sinks."""
        sinks = sum(b - a for name, a, b in layer.spans(0, layer.held) if name == "first")
        return range(sinks, sinks + layer.coded)

    @invariant()
    def bytes_agree(self) -> None:
        """What the meter says is what the regions hold, and that is what the storages hold."""
        cache = self.splicer.cache
        if not self.layers():
            return super().bytes_agree()
        assert cache.meter.held == sum(layer.nbytes() for layer in cache.layers)
        assert storage_bytes(cache) == cache.meter.held + storage_bytes(cache.shared)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes are made from few tokens."""
    monkeypatch.setattr(quantized, "CALIBRATION", 16)
    monkeypatch.setattr(quantized, "BLOCK", 8)


@pytest.fixture
def tiers(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """Where caches and blocks go: memory and files."""
    pools = {"host": Pool(1, host="1GiB"), "disk": Pool(1, disk=(tmp_path, "1GiB"))}
    shelves = {tier: Shelf(pool) for tier, pool in pools.items()}
    stores = {tier: BlockStore(pool, IDENTITY) for tier, pool in pools.items()}
    yield {"shelves": shelves, "stores": stores}
    for tier in pools:
        shelves[tier].close()
        stores[tier].close()
    assert list(tmp_path.iterdir()) == []


def run(machine: type[Machine], tiers: dict[str, Any], examples: int, **more: Any) -> None:
    """So many sequences."""
    run_state_machine_as_test(
        type("Here", (machine,), {**tiers, **more}),
        settings=settings(max_examples=examples, stateful_step_count=12, deadline=None),
    )


@pytest.mark.parametrize(("name", "examples"), [("llama", 60), ("deepseek_v3_mla", 15), ("gemma3_dual_theta", 25)])
def test_random_sequences_with_offloading(name: str, examples: int, tiers: dict[str, Any]) -> None:
    """100 sequences; a Llama's logits are those of masked attention, other layers hold what they should."""
    run(Machine, tiers, examples, name=name)


def test_random_sequences_with_codes(tiers: dict[str, Any]) -> None:
    """100 sequences in which the cache is quantized at some moment, or never."""
    run(Quantizing, tiers, 100)


def test_the_reference_is_a_llama() -> None:
    """Fed at once and unmasked, it says what transformers says."""
    model = architecture_model("llama")
    ids = [(7 * i * i) % 60 + 3 for i in range(40)]
    tokens = [Fed(token, at, 0, [(j, j) for j in range(at + 1)]) for at, token in enumerate(ids)]

    found, _ = masked_attention(model, tokens)
    with torch.no_grad():
        assert torch.allclose(found, model(torch.tensor([ids])).logits[0], atol=1e-5)
