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
from compaction.kv.quantization.rows import Rows
from compaction.kv.quantization.settings import Setting
from compaction.kv.rope import LayerRope

__all__ = ["BLOCK", "CALIBRATION", "QuantizedLayer"]

BLOCK = 64  # slots that are coded at once, when the window has grown by as many
CALIBRATION = 128  # slots from which the mean key is taken at least: with 64, KL at 4 bits was half as large again
_PIECE = 1024  # slots that are coded at once in a long prompt: bounds the float32 copies
_SIDES = ("keys", "values")
Region = dict[str, torch.Tensor]


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
        self._first, self._recent = Rows(meter, max(1, setting.sinks)), Rows(meter, BLOCK)
        self._body, self._where = Rows(meter, step, capacity), Rows(meter, step, capacity)
        self._centre: torch.Tensor | None = None
        self._readers: dict[str, Reader] = {}
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
        positions = self._widened(positions)
        self._where.append({"positions": positions[:, None, :, None]})
        rows: Region = {**new, "encoded": positions[:, None, :, None]}
        if not self._body.held and not self._recent.held and self._first.held < self.setting.sinks:
            sinks, rows = _split(rows, self.setting.sinks - self._first.held)
            self._first.append(sinks)
        waiting = self._recent.held + _length(rows)
        if waiting < self.setting.window + (CALIBRATION if self._centre is None else BLOCK):
            self._recent.append(rows)
            return
        oldest, rows = _split(rows, max(0, waiting - self.setting.window - self._recent.held))
        leaving = min(self._recent.held, waiting - self.setting.window)
        self._code([self._recent.views(0, leaving), oldest])
        self._recent.keep([(leaving, self._recent.held)])
        self._recent.append(rows)

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
        return self._where.held

    @property
    def coded(self) -> int:
        """Slots whose keys and values are codes."""
        return self._body.held

    @property
    def slots(self) -> int:
        """Slots allocated, all regions together."""
        return self._first.slots + self._body.slots + self._recent.slots

    @property
    def positions(self) -> torch.Tensor:
        """The position of each slot, int32 `[rows, held]`; one row where all conversations of the batch agree."""
        views = self._where.views()
        return views["positions"][:, 0, :, 0] if views else torch.empty(1, 0, dtype=torch.int32)

    @property
    def slot_nbytes(self) -> int:
        """Bytes of one coded slot, its position included."""
        return sum(
            int(like.shape[0] * like.shape[1]) * self._readers[name].codec.nbytes for name, like in self._likes()
        ) + 4 * int(self.positions.shape[0])

    def nbytes(self) -> int:
        """Bytes allocated: codes, scales, positions, sinks and recent slots; what layers share not included."""
        centre = self._centre.untyped_storage().nbytes() if self._centre is not None else 0
        return sum(rows.nbytes() for rows in self._regions()) + centre

    def logical_nbytes(self) -> int:
        """Bytes of the slots in use."""
        centre = self._centre.numel() * self._centre.element_size() if self._centre is not None else 0
        return sum(rows.logical_nbytes() for rows in self._regions()) + centre

    def key_slice(self, start: int, end: int) -> torch.Tensor:
        """Keys of slots start … end-1 at their positions: a decoded copy."""
        return self._decoded("keys", start, end)

    def value_slice(self, start: int, end: int) -> torch.Tensor:
        """Values of slots start … end-1: a decoded copy."""
        return self._decoded("values", start, end)

    def write_keys(self, *_: Any) -> None:
        """Refused: codes are made once."""
        raise InvalidInput("single slots of a quantized layer cannot be changed: edit it through compaction.kv.slots")

    def write_values(self, *_: Any) -> None:
        """Refused, as `write_keys`."""
        self.write_keys()

    def move(self, *_: Any) -> None:
        """Refused, as `write_keys`: the three regions have no row in common."""
        self.write_keys()

    def extend(self, *_: Any) -> None:
        """Refused, as `write_keys`: there are no slots of undefined content."""
        self.write_keys()

    def truncate(self, length: int) -> None:
        """Keep the oldest `length` slots."""
        self._check(0, length)
        first = self._first.held
        coded = first + self._body.held
        self._first.truncate(length)
        self._body.truncate(max(0, length - first))
        self._recent.truncate(max(0, length - coded))
        self._where.truncate(length)

    def reserve(self, slots: int) -> None:
        """Allocate for holding `slots`, so that nothing grows until then."""
        slots = slots if self.capacity is None else min(slots, self.capacity)
        self._where.reserve(slots)
        self._first.reserve(min(slots, self.setting.sinks))
        self._recent.reserve(min(slots, self.setting.window + BLOCK))
        self._body.reserve(max(0, slots - self.setting.sinks - self.setting.window))

    def shrink(self, slots: int) -> None:
        """Give back what is allocated beyond `slots` and beyond what is held."""
        rest = max(slots, self.held)
        self._where.shrink(rest)
        self._body.shrink(max(0, rest - self._first.held - self._recent.held))
        self._recent.shrink(min(rest, self.setting.window + BLOCK) if slots else 0)

    def dump(self) -> tuple[dict[str, torch.Tensor], Meta]:
        """Contiguous copies of exactly what is held, and what `load` must know besides."""
        tensors = self.cut(0, self.held)
        meta: Meta = {"kind": type(self).__name__, "held": self.held, "storage": repr(self.setting)}
        if self.held:
            tensors["positions"] = _copy(self._where.views()["positions"])
            if self._centre is not None:
                tensors["centre"] = _copy(self._centre)
            meta |= {"dtype": str(self.dtype).removeprefix("torch."), "shifted": int(self._shifted)}
            meta |= {name: int(like.shape[3]) for name, like in self._likes()}
        return tensors, meta | {region: rows.held for region, rows in self._named()}

    def load(self, tensors: Mapping[str, torch.Tensor], meta: Mapping[str, int | float | str]) -> None:
        """Hold what `dump` gave, bit by bit. Raises InvalidInput where it was stored by another setting."""
        if meta.get("kind") != type(self).__name__ or meta.get("storage") != repr(self.setting):
            raise InvalidInput(
                f"a layer stored as {self.setting.name} cannot hold what a {meta.get('kind')} dumped "
                f"({meta.get('storage', 'full precision')})"
            )
        parts = {name: _part(tensors, name) for name, _ in self._named()}
        if any(_length(part) != int(meta[name]) for name, part in parts.items()):
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
        if "centre" in tensors:
            self.centre = tensors["centre"]
        self._where.append({"positions": tensors["positions"]})
        for name, rows in self._named():
            if parts[name]:
                rows.append(parts[name])
        self._shifted = bool(meta["shifted"])

    # -- what editors of slots use

    def cut(self, start: int, end: int) -> dict[str, torch.Tensor]:
        """Copies of slots [start, end) as they are stored, for `put` and `join`: tensors named by region."""
        made: dict[str, torch.Tensor] = {}
        for name, a, b in self.spans(start, end):
            region = dict(self._named())[name]
            made |= {f"{name}.{key}": _copy(view) for key, view in region.views(a, b).items()}
        if any(name.startswith("body.") for name in made) and self._centre is not None:
            made["centre"] = _copy(self._centre)
        return made

    @torch.no_grad()
    def rearrange(self, pieces: Sequence[tuple[Piece, torch.Tensor]]) -> None:
        """Hold these pieces instead, in this order, each with the positions `[n]` of its slots now.

        A piece is a range of slots held now, or what stood outside: tensors of `cut`, or keys and values in full
        precision that were rotated to the positions given. Those are coded where they come to lie between codes.
        """
        arrangement = Arrangement(self, [piece for piece, _ in pieces], [at for _, at in pieces])
        for name, rows in self._named():
            arrangement.apply(name, rows)
        positions = torch.cat([at.to(self.device, torch.int32) for _, at in pieces]) if pieces else None
        self._where.truncate(0)
        if positions is not None and positions.numel():
            self._where.append({"positions": positions[None, None, :, None]})
        self._shifted = any(
            not torch.equal(rows.views()["encoded"][:, 0, :, 0], self.positions[:, start : start + rows.held])
            for start, rows in ((0, self._first), (self._first.held + self._body.held, self._recent))
            if rows.held
        )

    def code(self, rows: Mapping[str, torch.Tensor]) -> Region:
        """Codes of rows in full precision, `keys` turned back from the positions in `encoded`."""
        made: Region = {}
        for name in _SIDES:
            plain = self._unrotated(name, rows)
            if name == "keys" and self._centre is not None:
                plain = plain - self._centre
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
        return self._centre

    @centre.setter
    def centre(self, value: torch.Tensor) -> None:
        old = self._centre.untyped_storage().nbytes() if self._centre is not None else 0
        self._centre = _copy(value)
        self.meter.swap(old, self._centre.untyped_storage().nbytes())

    # -- inside

    def _drop(self, value: object) -> None:
        if value is not None:
            raise InvalidInput("a quantized layer's keys and values are not assigned")
        centre = self._centre.untyped_storage().nbytes() if self._centre is not None else 0
        self.meter.swap(centre, 0)
        for rows in self._regions():
            rows.clear()
        self._centre, self._shifted = None, False

    def _named(self) -> list[tuple[str, Rows]]:
        return [("first", self._first), ("body", self._body), ("recent", self._recent)]

    def _regions(self) -> list[Rows]:
        return [self._first, self._body, self._recent, self._where]

    def _likes(self) -> list[tuple[str, torch.Tensor]]:
        return list(self._like.items()) if self.is_initialized else []

    def spans(self, start: int, end: int) -> Iterator[tuple[str, int, int]]:
        """The part of each region that lies in slots [start, end), in the region's own slots."""
        self._check(start, end)
        offset = 0
        for name, rows in self._named():
            a, b = max(start - offset, 0), min(end - offset, rows.held)
            if a < b:
                yield name, a, b
            offset += rows.held

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

    def _widened(self, positions: torch.Tensor) -> torch.Tensor:
        """Positions with as many rows as those held; where they need more, those held get them."""
        rows, batch = int(self.positions.shape[0]), int(self._like["keys"].shape[0])
        if not self.held and positions.shape[0] != rows:
            for region in (self._where, self._first, self._recent):
                region.clear()
            return positions
        if positions.shape[0] > rows:
            for region in (self._where, self._first, self._recent):
                region.select(
                    lambda t: t if t.shape[0] != 1 or t.dtype != torch.int32 else _own(t.expand(batch, -1, -1, -1))
                )
            rows = batch
        return positions.expand(rows, -1)

    def _code(self, parts: list[Mapping[str, torch.Tensor]]) -> None:
        """Move rows in full precision into the body."""
        parts = [part for part in parts if part and _length(part)]
        if self._centre is None:
            count = sum(map(_length, parts))
            total = sum(
                self._unrotated("keys", piece).sum(2, keepdim=True) for part in parts for piece in _pieces(part)
            )
            self.centre = torch.as_tensor(total / count).to(STATISTIC)
        for part in parts:
            for piece in _pieces(part):
                self._body.append(self.code(piece))

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
        positions, held = self.positions, self.held
        first, coded = self._first.held, self._first.held + self._body.held
        for start, end, rows in ((0, first, self._first), (coded, held, self._recent)):
            if start < end:
                views = rows.views()
                for name, out in outs.items():
                    self._read_full(name, views, positions[:, start:end], out[:, :, start:end])
        if coded == first:
            return
        body, sides = self._body.views(), []
        for name, out in outs.items():
            reader, tables = self._readers[name], None
            if reader.rotation is not None:
                cos, sin = self.shared.angles.tables(reader.rotation, positions)
                tables = cos[:, :, first:coded], sin[:, :, first:coded]
            centre = self._centre if name == "keys" else None
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
        """Change what has a row for each conversation of the batch; positions that all share get rows of their own."""
        if not self.is_initialized:
            return
        batch = int(self._like["keys"].shape[0])
        for region in self._regions():
            region.select(lambda t: _own(change(t.expand(batch, -1, -1, -1))))
        if self._centre is not None:
            self.centre = change(self._centre)
        self._like = {name: change(like) for name, like in self._like.items()}


def _like(states: torch.Tensor) -> torch.Tensor:
    """Shape, number format and device of states, without a slot."""
    return states.detach().new_empty(*states.shape[:2], 0, states.shape[3])


def _length(rows: Mapping[str, torch.Tensor]) -> int:
    return next((int(tensor.shape[2]) for tensor in rows.values()), 0)


def _pieces(rows: Mapping[str, torch.Tensor]) -> Iterator[Region]:
    for start in range(0, _length(rows), _PIECE):
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


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that shows all of its storage."""
    return _copy(tensor) if tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size() else tensor
