"""Random sequences of append, evict, crop, park, restore and insert keep tokens, positions, lengths and bytes together.

Beside the cache stands a plain list with each slot's token, position and keys and values as they were encoded; after
every step each layer must hold exactly that, keys turned by the distance their slot has moved.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from transformers import DynamicCache

from compaction.engines.forward import Forward
from compaction.errors import CompactionError
from compaction.kv.arena import ArenaLayer
from compaction.kv.cache import ArenaCache
from compaction.kv.measure import logical_bytes, storage_bytes
from compaction.kv.probe import probe
from compaction.kv.rope import rotate
from compaction.kv.slot_map import Mode
from compaction.kv.slots import slots_of
from compaction.kv.splice import Block, Splicer
from tests.fixtures_rope import architecture_model

MODES = st.sampled_from(("gap", "compact"))
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Slot:
    """One token as it should stand in the cache; `row` counts tokens in the order in which they were encoded."""

    id: int
    original: int
    position: int
    encoded: tuple[Tensors | None, ...]
    row: int


class Sequences(RuleBasedStateMachine):
    """The machine; subclasses name a model and a kind of cache."""

    name, kind = "llama", "dynamic"

    @initialize(tokens=st.integers(1, 60))
    def start(self, tokens: int) -> None:
        model = architecture_model(self.name)
        self.forward = Forward(model)
        cache: Any = DynamicCache(config=model.config) if self.kind == "dynamic" else ArenaCache(model.config, step=16)
        self.splicer = Splicer(cache, probe(model))
        self.slots: list[Slot] = []
        self.next = self.rows = 0
        self.parked: list[tuple[Block, list[Slot]]] = []
        self.append(tokens, 0)

    @rule(tokens=st.integers(1, 30), seed=st.integers(0, 99))
    def append(self, tokens: int, seed: int) -> None:
        ids = [(seed * 7 + i * i) % 60 + 3 for i in range(tokens)]
        first = self.next
        for layer in self.splicer.cache.layers:
            if hasattr(layer, "record_past"):
                layer.record_past = True  # so that the test sees all new slots
        assert self.splicer.append(ids) == list(range(first, first + tokens))
        logits = self.forward(self.splicer.cache, ids, first)
        encoded = self.newest(tokens)
        for layer in self.splicer.cache.layers:
            if hasattr(layer, "record_past"):
                layer.crop(0)
                layer.record_past = False
        before = list(self.slots)
        self.slots += [Slot(ids[i], first + i, first + i, encoded[i], self.rows + i) for i in range(tokens)]
        self.next += tokens
        self.note_encoded(before, self.slots[len(before) :], logits)

    def note_encoded(self, before: list[Slot], made: list[Slot], logits: torch.Tensor | None) -> None:
        """Tokens went through the model behind these slots, all at once; `logits` are the last one's."""
        self.rows += len(made)

    def newest(self, count: int) -> list[tuple[Tensors | None, ...]]:
        """What each layer encoded for the last tokens."""
        found = []
        for layer in slots_of(self.splicer.cache):
            shown = layer.tensors() if layer else {}
            found.append({name: tensor[..., -count:, :].clone() for name, tensor in shown.items()})
        return [
            tuple({name: t[..., i : i + 1, :] for name, t in layer.items()} or None for layer in found)
            for i in range(count)
        ]

    @precondition(lambda self: self.slots)
    @rule(data=st.data(), mode=MODES, park=st.booleans(), underfill=st.booleans())
    def evict(self, data: st.DataObject, mode: Mode, park: bool, underfill: bool) -> None:
        cuts = sorted(data.draw(st.lists(st.integers(0, len(self.slots)), min_size=2, max_size=4, unique=True)))
        ranges = list(zip(cuts[::2], cuts[1::2], strict=False))
        before = list(self.slots)
        try:
            done = self.splicer.evict(ranges, mode, park=park, underfill=underfill)
        except CompactionError:
            return
        kept, delta, at = [], 0, 0
        following = [slot.position for slot in before[1:]] + [self.next]
        for a, b in ranges:
            kept += [replace(slot, position=slot.position + delta) for slot in before[at:a]]
            delta -= following[b - 1] - before[a].position if mode == "compact" else 0
            at = b
        self.slots = kept + [replace(slot, position=slot.position + delta) for slot in before[at:]]
        self.next += delta
        if park:
            self.parked += [(block, before[a:b]) for block, (a, b) in zip(done.parked, ranges, strict=True)]

    @precondition(lambda self: self.parked)
    @rule(data=st.data(), mode=MODES, underfill=st.booleans())
    def restore(self, data: st.DataObject, mode: Mode, underfill: bool) -> None:
        index = data.draw(st.integers(0, len(self.parked) - 1))
        block, slots = self.parked[index]
        at = sum(slot.position < slots[0].position for slot in self.slots)
        try:
            self.splicer.restore(block, mode, underfill=underfill)
        except CompactionError:
            return
        del self.parked[index]
        self.put(at, at, slots, block.extent, mode)

    @precondition(lambda self: self.slots)
    @rule(data=st.data(), tokens=st.integers(1, 12), mode=MODES)
    def summarise(self, data: st.DataObject, tokens: int, mode: Mode) -> None:
        a, b = sorted(data.draw(st.tuples(*[st.integers(0, len(self.slots))] * 2)))
        ids = [(5 * i + tokens) % 60 + 3 for i in range(tokens)]
        try:
            block = self.splicer.encode(self.forward, ids, a)
            self.splicer.insert(block, a, b, mode)
        except CompactionError:
            return
        rows = block.rows
        made = [
            Slot(rows.ids[i], rows.original[i], rows.position[i], self.of_block(block, i), self.rows + i)
            for i in range(len(rows))
        ]
        self.note_encoded(self.slots[:a], made, None)
        self.put(a, b, made, tokens, mode)

    def of_block(self, block: Block, index: int) -> tuple[Tensors | None, ...]:
        """What a block holds of one of its tokens, layer by layer."""
        found: list[Tensors | None] = []
        for layer in block.tensors:
            one = {}
            for name, tensor in layer.items():
                slot = index - (len(block.rows) - tensor.shape[-2])
                if slot >= 0:
                    one[name] = tensor[..., slot : slot + 1, :]
            found.append(one or None)
        return tuple(found)

    def put(self, a: int, b: int, made: list[Slot], extent: int, mode: Mode) -> None:
        """The list's own way to insert."""
        behind = self.slots[b].position if b < len(self.slots) else self.next
        delta = made[0].position + extent - behind
        if mode == "gap":
            delta = max(0, made[-1].position + 1 - behind)
        tail = [replace(slot, position=slot.position + delta) for slot in self.slots[b:]]
        self.slots = self.slots[:a] + made + tail
        self.next += delta

    @precondition(lambda self: self.slots)
    @rule(data=st.data())
    def crop(self, data: st.DataObject) -> None:
        length = data.draw(st.integers(0, len(self.slots)))
        try:
            self.splicer.crop(length)
        except CompactionError:
            return
        if length < len(self.slots):
            self.next = self.slots[length].position
        del self.slots[length:]

    @invariant()
    def rows_agree(self) -> None:
        """The slot map has the tokens and positions of the list; positions rise and are below the next one."""
        slot_map = self.splicer.slot_map
        assert slot_map.ids == [slot.id for slot in self.slots]
        assert slot_map.original == [slot.original for slot in self.slots]
        assert slot_map.position == [slot.position for slot in self.slots]
        assert slot_map.next_position == self.next
        assert all(a < b for a, b in itertools.pairwise([*slot_map.position, self.next]))

    @invariant()
    def layers_agree(self) -> None:
        """Each layer holds the newest slots, turned to where they stand; a full layer holds them all."""
        for index, layer in enumerate(slots_of(self.splicer.cache)):
            if layer is None:
                continue
            assert layer.held <= len(self.slots)
            assert layer.held == len(self.slots) if layer.window is None else layer.held <= layer.window
            held = self.slots[len(self.slots) - layer.held :]
            for name, tensor in layer.tensors().items():
                if held:
                    self.same(index, name, tensor, held)

    def same(self, index: int, name: str, tensor: torch.Tensor, held: list[Slot]) -> None:
        """One tensor of one layer; what position does not touch has the same bits."""
        encoded = torch.cat([(slot.encoded[index] or {})[name] for slot in held], dim=-2)
        rotation = self.splicer.plan.layers[index].of(name)
        if rotation is None:
            assert torch.equal(tensor, encoded)
        else:
            deltas = torch.tensor([slot.position - slot.original for slot in held])
            assert torch.allclose(tensor, rotate(encoded, deltas, rotation), atol=1e-4)

    @invariant()
    def bytes_agree(self) -> None:
        """No byte hides behind a view of transformers' layers; an arena counts the slots it holds."""
        cache = self.splicer.cache
        arenas = [layer for layer in cache.layers if isinstance(layer, ArenaLayer)]
        assert all(layer.logical_nbytes() == layer.held * layer.slot_nbytes for layer in arenas)
        if arenas:
            assert cache.meter.held == sum(layer.nbytes() for layer in arenas)
        elif not any(layer.is_sliding for layer in cache.layers):
            assert storage_bytes(cache) == logical_bytes(cache)


@pytest.mark.parametrize(("name", "examples"), [("llama", 40), ("deepseek_v3_mla", 20), ("gemma3_dual_theta", 40)])
def test_random_sequences(name: str, examples: int) -> None:
    """100 sequences over full, latent and sliding layers of transformers' own; arenas are in test_cache_machine."""
    run_state_machine_as_test(
        type(f"{name}_dynamic", (Sequences,), {"name": name}),
        settings=settings(max_examples=examples, stateful_step_count=15),
    )
