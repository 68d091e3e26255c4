"""A full-attention layer whose keys and values are codes, but for the first and the newest slots.

Invariant: slots stand in three regions, oldest first: sinks and recent slots in the model's number format, codes in
between. A slot that was coded is never decoded and coded again: appending, cutting back, evicting, moving to other
positions, parking and restoring copy its codes. Coded keys are stored as they were *before* their rotation, so a slot's
position is a number beside it; keys in full precision stay as the model made them, beside the position they were made
for. Turning to the position of now happens in what is shown, never in what is stored: no number of shifts adds up.

From coded keys one vector a head is taken off first, the mean of the first ones that were coded: keys of a head have
much in common, and what differs needs fewer bits. What `update` shows of the tokens it is just given is exact.
Knows nothing about models: the owner hands in what `compaction.kv.probe` found, each pass brings its positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from compaction.errors import EngineError, InvalidInput
from compaction.kv.arena import ArenaLayer, Meta, Meter
from compaction.kv.quantization.angles import Shared, tables_of, turned
from compaction.kv.quantization.codecs import STATISTIC, Codec
from compaction.kv.quantization.edit import Arrangement, Piece
from compaction.kv.quantization.reading import Reader, Reading, read
from compaction.kv.quantization.regions import BLOCK, Region, Regions, length, own_copy
from compaction.kv.quantization.settings import Setting
from compaction.kv.rope import LayerRope

__all__ = ["BLOCK", "CALIBRATION", "QuantizedLayer"]

CALIBRATION = 128  # slots from which the mean key is taken at least: with 64, KL at 4 bits was half as large again
_PIECE = 1024  # slots that are coded at once in a long prompt: bounds the float32 copies
_SIDES = ("keys", "values")


class QuantizedLayer(ArenaLayer):
    """Takes the place of transformers' `DynamicLayer`; shows keys and values as attention needs them.

    Args:
        setting: how many bits, and what stays in full precision.
        rope: what the probe found for this layer.
        shared: with the other layers of the cache.
        compiled: whether reading goes through `torch.compile`.
        capacity, step, meter: as in `ArenaLayer`.

    `keys`, `values`, `key_slice` and `value_slice` are decoded copies: what is written into them is lost. Single slots
    cannot be overwritten; `compaction.kv.slots` edits the layer.
    """

    def __init__(
        self,
        setting: Setting,
        rope: LayerRope,
        *,
        shared: Shared | None = None,
        compiled: bool = False,
        capacity: int | None = None,
        step: int = 256,
        meter: Meter | None = None,
    ) -> None:
        self.setting, self.rope, self.compiled = setting, rope, compiled
        self.shared = shared if shared is not None else Shared()
        meter = meter if meter is not None else Meter()
        self._regions = Regions(setting.sinks, setting.window, meter, step, capacity)
        self._readers: dict[str, Reader] = {}
        self._like: Region = {}  # of each side: batch, heads, channels and number format, without a slot
        self._shifted = False
        super().__init__(capacity=capacity, step=step, meter=meter)

    # -- what transformers calls

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Take shapes, number format and device from the first states."""
        if self.rope.kind in ("state", "empty"):
            raise InvalidInput(f"a layer whose slots {self.rope.why or 'are another layer’s'} cannot be quantized")
        self.device, self.dtype = key_states.device, key_states.dtype
        self._like = {"keys": _like(key_states), "values": _like(value_states)}
        sides = {"keys": self.setting.keys, "values": self.setting.values}
        for name, like in self._like.items():
            codec = Codec(sides[name], int(like.shape[-1]))
            self._readers[name] = Reader(codec, self.rope.of(name), self.compiled)
        self.is_initialized = True

    @torch.no_grad()
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, kwargs: Any = None, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append states `[batch, kv_heads, n, head_dim]`; returns all keys and values, old and new.

        They stand in memory that the next quantized layer of the cache uses again. `kwargs` are those of the model's
        attention, with "position_ids". Raises EngineError, before anything changes, where `capacity` is exceeded or a
        layer that rotates is given no positions.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        new = {"keys": key_states.detach(), "values": value_states.detach()}
        positions = self._positions_of(kwargs, key_states)
        self._grown(self.held + int(key_states.shape[2]))
        shown = self._shown(new)
        self.take(new, positions)
        return shown["keys"], shown["values"]

    def take(self, new: Mapping[str, torch.Tensor], positions: torch.Tensor) -> None:
        """Store states that were rotated to `positions` `[rows, n]`; codes what has left the window."""
        if not self.is_initialized:
            self.lazy_initialization(new["keys"], new["values"])
        regions, setting = self._regions, self.setting
        positions = regions.for_batch(positions, int(self._like["keys"].shape[0]))[:, None, :, None]
        regions.where.append({"positions": positions})
        rows: Region = {**new, "encoded": positions}
        if not regions.body.held and not regions.recent.held and regions.first.held < setting.sinks:
            sinks, rows = _split(rows, setting.sinks - regions.first.held)
            regions.first.append(sinks)
        recent = regions.recent
        leaving = recent.held + length(rows) - setting.window
        if leaving < (CALIBRATION if regions.centre is None else BLOCK):
            recent.append(rows)
            return
        oldest, rows = _split(rows, max(0, leaving - recent.held))
        self._code([recent.views(0, min(leaving, recent.held)), oldest])
        recent.keep([(min(leaving, recent.held), recent.held)])
        recent.append(rows)

    def prefetch(self) -> None:
        """Move back to the device where the states came from."""
        self._map(lambda tensor: tensor.to(self.device, non_blocking=True))

    # -- what is held

    @property
    def keys(self) -> torch.Tensor | None:
        """All keys at their positions, a decoded copy `[batch, kv_heads, held, head_dim]`; None before the first."""
        return self.key_slice(0, self.held) if self.is_initialized else None

    @keys.setter
    def keys(self, value: object) -> None:
        self._drop(value)

    @property
    def values(self) -> torch.Tensor | None:
        """All values, a decoded copy `[batch, kv_heads, held, value_dim]`; None before the first update."""
        return self.value_slice(0, self.held) if self.is_initialized else None

    @values.setter
    def values(self, value: object) -> None:
        self._drop(value)

    @property
    def held(self) -> int:
        """Slots in use."""
        return self._regions.held

    @property
    def coded(self) -> int:
        """Slots whose keys and values are codes."""
        return self._regions.body.held

    @property
    def slots(self) -> int:
        """Slots allocated, all regions together."""
        return self._regions.slots

    @property
    def positions(self) -> torch.Tensor:
        """The position of each slot, int32 `[rows, held]`; one row where all conversations of the batch agree."""
        return self._regions.positions

    @property
    def slot_nbytes(self) -> int:
        """Bytes of one coded slot, its position included."""
        return sum(
            int(like.shape[0] * like.shape[1]) * self._readers[name].codec.nbytes for name, like in self._like.items()
        ) + 4 * int(self.positions.shape[0])

    def nbytes(self) -> int:
        """Bytes allocated: codes, scales, positions, sinks and recent slots; what layers share not included."""
        return self._regions.nbytes()

    def logical_nbytes(self) -> int:
        """Bytes of the slots in use."""
        return self._regions.logical_nbytes()

    def key_slice(self, start: int, end: int) -> torch.Tensor:
        """Keys of slots start … end-1 at their positions: a decoded copy."""
        return self._decoded("keys", start, end)

    def value_slice(self, start: int, end: int) -> torch.Tensor:
        """Values of slots start … end-1: a decoded copy."""
        return self._decoded("values", start, end)

    def write_keys(self, start: int, keys: torch.Tensor) -> None:
        """Refused: codes are made once."""
        self._refuse(start, int(keys.shape[2]))

    def write_values(self, start: int, values: torch.Tensor) -> None:
        """Refused, as `write_keys`."""
        self._refuse(start, int(values.shape[2]))

    def move(self, src_start: int, dst_start: int, length: int) -> None:
        """Refused, as `write_keys`: the three regions have no row in common."""
        self._refuse(min(src_start, dst_start), length)

    def extend(self, count: int) -> None:
        """Refused, as `write_keys`: there are no slots of undefined content."""
        self._refuse(self.held, count)

    def truncate(self, length: int) -> None:
        """Keep the oldest `length` slots."""
        self._check(0, length)
        self._regions.truncate(length)

    def reserve(self, slots: int) -> None:
        """Allocate for holding `slots`, so that nothing grows until then."""
        self._regions.reserve(slots if self.capacity is None else min(slots, self.capacity))

    def shrink(self, slots: int) -> None:
        """Give back what is allocated beyond `slots` and beyond what is held."""
        self._regions.shrink(slots)

    def dump(self) -> tuple[dict[str, torch.Tensor], Meta]:
        """Contiguous copies of exactly what is held, and what `load` must know besides."""
        tensors = self.cut(0, self.held)
        meta: Meta = {"kind": type(self).__name__, "held": self.held, "storage": repr(self.setting)}
        if self.held:
            tensors["positions"] = own_copy(self._regions.where.views()["positions"])
            if self._regions.centre is not None:
                tensors["centre"] = own_copy(self._regions.centre)
            meta |= {"dtype": str(self.dtype).removeprefix("torch."), "shifted": int(self._shifted)}
            meta |= {name: int(like.shape[3]) for name, like in self._like.items()}
        return tensors, meta | {region: rows.held for region, rows in self._regions.named().items()}

    def load(self, tensors: Mapping[str, torch.Tensor], meta: Mapping[str, int | float | str]) -> None:
        """Hold what `dump` gave, bit by bit. Raises InvalidInput where it was stored by another setting."""
        if meta.get("kind") != type(self).__name__ or meta.get("storage") != repr(self.setting):
            raise InvalidInput(
                f"a layer stored as {self.setting.name} cannot hold what a {meta.get('kind')} dumped "
                f"({meta.get('storage', 'full precision')})"
            )
        parts = {name: _part(tensors, name) for name in self._regions.named()}
        if any(length(part) != int(meta[name]) for name, part in parts.items()):
            raise InvalidInput(f"{meta['held']} slots belong to this dump: some of their tensors are missing")
        self._grown(int(meta["held"]))
        self._drop(None)
        self.is_initialized = False
        if not tensors:
            return
        batch, heads = next(iter(next(part for part in parts.values() if part).values())).shape[:2]
        empty = torch.empty(
            batch, heads, 0, 1, dtype=getattr(torch, str(meta["dtype"])), device=tensors["positions"].device
        )
        self.lazy_initialization(*(empty.new_empty(batch, heads, 0, int(meta[name])) for name in _SIDES))
        self._regions.fill(parts, tensors["positions"], tensors.get("centre"))
        self._shifted = bool(meta["shifted"])

    # -- what editors of slots use

    def cut(self, start: int, end: int) -> dict[str, torch.Tensor]:
        """Copies of slots [start, end) as they are stored, for `rearrange`."""
        return self._regions.cut(start, end)

    def spans(self, start: int, end: int) -> Iterator[tuple[str, int, int]]:
        """The part of each region ("first", "body", "recent") in slots [start, end), in the region's own slots."""
        return self._regions.spans(start, end)

    @torch.no_grad()
    def rearrange(self, pieces: Sequence[tuple[Piece, torch.Tensor]]) -> None:
        """Hold these pieces instead, in this order, each with the positions `[n]` of its slots now.

        A piece is a range of slots held now, or what stood outside: tensors of `cut`, or keys and values in full
        precision that were rotated to the positions given. Those are coded where they come to lie between codes.
        """
        arrangement = Arrangement(self, [piece for piece, _ in pieces], [at for _, at in pieces])
        regions = self._regions
        for name, rows in regions.named().items():
            arrangement.apply(name, rows)
        positions = torch.cat([at.to(self.device, torch.int32) for _, at in pieces]) if pieces else None
        regions.where.truncate(0)
        if positions is not None and positions.numel():
            regions.where.append({"positions": positions[None, None, :, None]})
        self._shifted = any(
            not torch.equal(rows.views()["encoded"][:, 0, :, 0], self.positions[:, start : start + rows.held])
            for start, rows in ((0, regions.first), (regions.first.held + regions.body.held, regions.recent))
            if rows.held
        )

    def code(self, rows: Mapping[str, torch.Tensor]) -> Region:
        """Codes of rows in full precision, `keys` turned back from the positions in `encoded`."""
        made: Region = {}
        for name in _SIDES:
            plain = self._unrotated(name, rows)
            if name == "keys" and self.centre is not None:
                plain = plain - self.centre
            for key, tensor in self._readers[name].codec.encode(plain).items():
                made[f"{name}.{key}"] = tensor
        return made

    def decode(self, rows: Mapping[str, torch.Tensor], centre: torch.Tensor | None, positions: torch.Tensor) -> Region:
        """Rows in full precision at `positions` `[rows, n]` from codes; the reverse of `code` but for what it lost."""
        made: Region = {"encoded": positions[:, None, :, None]}
        for name in _SIDES:
            reader, like = self._readers[name], self._like[name]
            made[name] = like.new_empty(*like.shape[:2], positions.shape[1], like.shape[3])
            tables = tables_of(reader.rotation, positions) if reader.rotation is not None else None
            reader(Reading(_side(rows, name), centre if name == "keys" else None, tables, made[name]))
        return made

    @property
    def centre(self) -> torch.Tensor | None:
        """What is taken off keys before they are coded, `[batch, kv_heads, 1, head_dim]`; None before the first."""
        return self._regions.centre

    @centre.setter
    def centre(self, value: torch.Tensor | None) -> None:
        self._regions.centre = value

    # -- inside

    def _drop(self, value: object) -> None:
        if value is not None:
            raise InvalidInput("a quantized layer's keys and values are not assigned")
        self._regions.clear()
        self._shifted = False

    def _refuse(self, start: int, count: int) -> None:
        raise InvalidInput(
            f"slots {start} to {start + count} of a quantized layer cannot be set one by one: "
            "edit it through compaction.kv.slots"
        )

    def _check(self, start: int, end: int) -> None:
        if not 0 <= start <= end <= self.held:
            raise InvalidInput(f"slots {start} to {end} are not among the {self.held} held")

    def _positions_of(self, kwargs: Any, like: torch.Tensor) -> torch.Tensor:
        """The positions of the coming tokens, int32 `[1 or batch, n]`."""
        count = int(like.shape[2])
        given = kwargs.get("position_ids") if isinstance(kwargs, Mapping) else None
        if given is None:
            given = self.shared.announced(self.held, count, like.device)
        if given is None:
            if self.rope.rotations:
                raise EngineError(
                    "quantized storage needs the positions of new tokens, which this attention does not hand on: "
                    "call the cache's announce() before each pass"
                )
            start = int(self.positions[:, -1].max()) + 1 if self.held else 0
            return torch.arange(start, start + count, dtype=torch.int32, device=like.device)[None]
        if given.dim() == 3:  # an axis each for time, height and width
            if not bool((given == given[:1]).all()):
                raise EngineError("quantized storage keeps one position a token, and these have several axes")
            given = given[0]
        given = given[:, -count:].to(torch.int32)
        return given[:1] if given.shape[0] == 1 or bool((given == given[:1]).all()) else given

    def _code(self, parts: list[Mapping[str, torch.Tensor]]) -> None:
        """Move rows in full precision into the body."""
        parts = [part for part in parts if length(part)]
        if self.centre is None:
            count = sum(map(length, parts))
            total = sum(
                self._unrotated("keys", piece).sum(2, keepdim=True) for part in parts for piece in _pieces(part)
            )
            self.centre = torch.as_tensor(total / count).to(STATISTIC)
        for part in parts:
            for piece in _pieces(part):
                self._regions.body.append(self.code(piece))

    def _unrotated(self, name: str, rows: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """float32 rows of one side as they were before their rotation."""
        rotation = self._readers[name].rotation
        if rotation is None:
            return rows[name].float()
        tables = tables_of(rotation, rows["encoded"][:, 0, :, 0])
        return turned(rows[name].float(), tables, rotation, back=True)

    def _shown(self, new: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """All of what is held and the new states behind it."""
        if not self.held:
            return dict(new)
        count = self.held + int(new["keys"].shape[2])
        shown = {name: self.shared.scratch.take(name, new[name], count) for name in _SIDES}
        self._read(shown)
        for name, out in shown.items():
            out[:, :, self.held :].copy_(new[name])
        return shown

    def _read(self, outs: Mapping[str, torch.Tensor]) -> None:
        """Write all slots held to `outs`, `[batch, heads, ≥ held, dim]` for each side."""
        regions, positions, held = self._regions, self.positions, self.held
        first, coded = regions.first.held, regions.first.held + regions.body.held
        for start, end, rows in ((0, first, regions.first), (coded, held, regions.recent)):
            if start < end:
                views = rows.views()
                for name, out in outs.items():
                    self._read_full(name, views, positions[:, start:end], out[:, :, start:end])
        if coded == first:
            return
        body, sides = regions.body.views(), []
        for name, out in outs.items():
            reader, tables = self._readers[name], None
            if reader.rotation is not None:
                cos, sin = self.shared.angles.tables(reader.rotation, positions)
                tables = cos[:, :, first:coded], sin[:, :, first:coded]
            centre = self.centre if name == "keys" else None
            sides.append((reader, Reading(_side(body, name), centre, tables, out[:, :, first:coded])))
        read(sides)

    def _read_full(
        self, name: str, rows: Mapping[str, torch.Tensor], positions: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Keys made for another position than they have now are turned by the difference; all others copied."""
        rotation = self._readers[name].rotation
        if rotation is None or not self._shifted:
            out.copy_(rows[name])
            return
        delta = positions - rows["encoded"][:, 0, :, 0]
        there = turned(rows[name], tables_of(rotation, delta), rotation)
        out.copy_(torch.where((delta != 0)[:, None, :, None], there, rows[name]))

    def _decoded(self, name: str, start: int, end: int) -> torch.Tensor:
        self._check(start, end)
        like = self._like[name]
        out = like.new_empty(*like.shape[:2], self.held, like.shape[3])
        with torch.no_grad():
            self._read({name: out})
        return out[:, :, start:end]

    def _map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Change what has a row for each conversation of the batch."""
        if not self.is_initialized:
            return
        self._regions.select(change, int(self._like["keys"].shape[0]))
        self._like = {name: change(like) for name, like in self._like.items()}


def _like(states: torch.Tensor) -> torch.Tensor:
    """Shape, number format and device of states, without a slot."""
    return states.detach().new_empty(*states.shape[:2], 0, states.shape[3])


def _pieces(rows: Mapping[str, torch.Tensor]) -> Iterator[Region]:
    for start in range(0, length(rows), _PIECE):
        yield {name: tensor[:, :, start : start + _PIECE] for name, tensor in rows.items()}


def _split(rows: Mapping[str, torch.Tensor], at: int) -> tuple[Region, Region]:
    return (
        {name: tensor[:, :, :at] for name, tensor in rows.items()},
        {name: tensor[:, :, at:] for name, tensor in rows.items()},
    )


def _part(tensors: Mapping[str, torch.Tensor], region: str) -> Region:
    """The tensors of one region, by their names there."""
    return {name.partition(".")[2]: tensor for name, tensor in tensors.items() if name.startswith(region + ".")}


def _side(rows: Mapping[str, torch.Tensor], side: str) -> Region:
    """The tensors of one side of coded rows, by the codec's names."""
    return {name.partition(".")[2]: tensor for name, tensor in rows.items() if name.startswith(side + ".")}
