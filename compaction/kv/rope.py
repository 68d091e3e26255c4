"""Moving keys to other positions: what a layer's rotation is, and how it is applied in place.

Invariant: a key stored at position p and turned by `delta` is what the model would have stored at p + delta, to one
rounding of the storage's number format: angles in float64, arithmetic in float32 (float64 where that is stored),
channels outside the rotary part bit-equal. The raw frequencies are used, never the model's own cos and sin, which some
scalings multiply by a factor. What cannot be turned is refused by name (`CannotRotate`), never approximated.
Knows nothing about models: `compaction.kv.probe` finds the plan. Shapes: keys are `[batch, kv_heads, slots, head_dim]`
(an indexer's `[batch, slots, dim]`); of any strides.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch

from compaction.errors import CannotRotate

__all__ = ["Kind", "LayerRope", "Layout", "RotaryPlan", "Rotation", "Turn", "carry", "rotate"]

Layout = Literal["half", "interleaved"]
Kind = Literal["rotary", "unrotated", "fixed", "state", "empty"]

# Most scratch for one step of a turn. On a CPU with 1 MiB of second-level cache steps that fit it were slower by a
# quarter: calling torch costs more than the misses.
_SCRATCH_BYTES = 3 << 20


@dataclass(frozen=True, eq=False, slots=True)
class Rotation:
    """How one tensor of a layer depends on position.

    Args:
        where: the layer's attribute: "keys", "values" (MLA's rotary part stands there) or "indexer_keys".
        layout: which channels form a pair: i and i + n/2 ("half") or 2i and 2i + 1 ("interleaved").
        start: first rotary channel.
        inv_freq: float64 on the CPU, `[n / 2]`, radians per position.
        source: where the frequencies were found.
        error: largest difference the probe saw, relative to the largest element.
        key: equal where cos and sin are.
    """

    where: str
    layout: Layout
    start: int
    inv_freq: torch.Tensor
    source: str = ""
    error: float = 0.0
    key: tuple[str, bytes] = field(init=False, repr=False)

    @property
    def dims(self) -> int:
        """Rotary channels, `n`."""
        return 2 * int(self.inv_freq.numel())

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", (self.layout, self.inv_freq.numpy().tobytes()))


@dataclass(frozen=True, slots=True)
class LayerRope:
    """What the probe found for one layer.

    `kind` is "rotary" (see `rotations`), "unrotated" (no position in it: NoPE), "fixed" (position is in it, but not as
    a known rotation), "state" (a recurrent or convolutional state beside or instead of keys) or "empty" (keys are
    another layer's). `why` explains "fixed" and "state".
    """

    kind: Kind
    rotations: tuple[Rotation, ...] = ()
    why: str = ""

    def of(self, where: str) -> Rotation | None:
        """The rotation of one tensor; None where position does not change it."""
        return next((rotation for rotation in self.rotations if rotation.where == where), None)


@dataclass(frozen=True, slots=True)
class RotaryPlan:
    """What may be done to a model's cache.

    `by_slot` says that attention depends on how far apart slots lie (ALiBi, relative biases), whatever their positions.
    """

    layers: tuple[LayerRope, ...]
    by_slot: bool = False

    @property
    def evict_refusal(self) -> str:
        """Why slots cannot be taken from the middle; "" where they can."""
        states = [index for index, layer in enumerate(self.layers) if layer.kind == "state"]
        if states:
            return f"{_names(states)} {self.layers[states[0]].why}"
        if self.by_slot:
            return "attention depends on the distance of slots (ALiBi or a relative bias), which an eviction changes"
        return ""

    @property
    def rotate_refusal(self) -> str:
        """Why keys cannot be moved to other positions; "" where they can."""
        if self.evict_refusal:
            return self.evict_refusal
        fixed = [index for index, layer in enumerate(self.layers) if layer.kind == "fixed"]
        return f"{_names(fixed)} {self.layers[fixed[0]].why}" if fixed else ""

    def require_rotation(self) -> None:
        """Raise CannotRotate where `rotate_refusal` says why."""
        if self.rotate_refusal:
            raise CannotRotate(self.rotate_refusal)


def _names(layers: list[int]) -> str:
    shown = ", ".join(map(str, layers[:4])) + (f" and {len(layers) - 4} more" if len(layers) > 4 else "")
    return f"layer{'s' if len(layers) > 1 else ''} {shown}:"


class _Workspace(NamedTuple):
    """What one step of a turn reads and writes beside source and target; the last four are views of the pairs."""

    cos: torch.Tensor
    sin: torch.Tensor
    minus_sin: torch.Tensor
    before: torch.Tensor
    after: torch.Tensor
    first: torch.Tensor
    second: torch.Tensor
    to_first: torch.Tensor
    to_second: torch.Tensor


@dataclass(slots=True)
class Turn:
    """One distance; its cos and sin are computed once for all layers that rotate alike, its scratch is shared."""

    delta: int
    _tables: dict[Any, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    _scratch: dict[Any, torch.Tensor] = field(default_factory=dict)
    _workspaces: dict[Any, _Workspace] = field(default_factory=dict)

    def tables(self, rotation: Rotation, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """cos of every rotary channel `[n]`, sin and -sin of every pair `[n / 2]`, on `like`'s device."""
        dtype = _compute_dtype(like.dtype)
        key = (rotation.key, dtype, like.device)
        if key not in self._tables:
            angles = self.delta * rotation.inv_freq
            cos, sin = angles.cos(), angles.sin()
            cos = torch.cat([cos, cos]) if rotation.layout == "half" else cos.repeat_interleave(2)
            made = [table.to(dtype).to(like.device) for table in (cos, sin, -sin)]
            self._tables[key] = (made[0], made[1], made[2])
        return self._tables[key]

    def workspace(self, rotation: Rotation, like: torch.Tensor) -> _Workspace:
        """Tables and scratch for a step of `like`'s shape; made once, for the many equal steps of many layers."""
        key = (rotation.key, like.shape, like.dtype, like.device)
        found = self._workspaces.get(key)
        if found is None:
            before, after = self._buffer("before", like), self._buffer("after", like)
            pairs = (*_pairs(before, rotation.layout), *_pairs(after, rotation.layout))
            found = self._workspaces[key] = _Workspace(*self.tables(rotation, like), before, after, *pairs)
        return found

    def _buffer(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """Scratch of `like`'s shape in the arithmetic's number format; steps of other shapes use the same memory."""
        dtype = _compute_dtype(like.dtype)
        key = (name, dtype, like.device)
        if key not in self._scratch or self._scratch[key].numel() < like.numel():
            self._scratch[key] = torch.empty(like.numel(), dtype=dtype, device=like.device)
        return self._scratch[key][: like.numel()].view(like.shape)


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype == torch.float64 else torch.float32


def carry(
    whole: torch.Tensor, src: int, dst: int, length: int, rotation: Rotation | None = None, turn: Turn | None = None
) -> None:
    """Copy slots src … src+length-1 of `[…, slots, dim]` to dst …, turned on the way; the ranges may overlap.

    Without a rotation, or without a turn, slots are copied as they are. Beside one step's scratch nothing is allocated.
    The caller switches gradients off, once for all layers: here it would take a twentieth of a whole eviction.
    (A kernel fused by `torch.compile` is a third faster by itself and a tenth in a whole eviction, but torch 2.13's
    Inductor generates code that fails where source and target share a storage and their shapes vary.)
    """
    if length <= 0:
        return
    if rotation is None or turn is None or turn.delta == 0:
        _copy(whole, src, dst, length)
        return
    row = whole.numel() // max(1, whole.shape[-2]) * _compute_dtype(whole.dtype).itemsize * 2
    steps = -(-length // max(64, _SCRATCH_BYTES // max(1, row)))
    for source, target in _steps(whole, src, dst, length, -(-length // steps)):
        _turn(source, target, rotation, turn)


def _copy(whole: torch.Tensor, src: int, dst: int, length: int) -> None:
    distance = abs(src - dst)
    if distance >= length:
        whole.narrow(-2, dst, length).copy_(whole.narrow(-2, src, length))
    elif distance:
        # A step no longer than the distance does not reach into its own target; shorter distances go through a copy.
        step = distance if distance >= 64 else 1024
        for source, target in _steps(whole, src, dst, length, step):
            target.copy_(source if source.shape[-2] <= distance else source.clone())


def _steps(whole: torch.Tensor, src: int, dst: int, length: int, step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Sources and targets of at most `step` slots, in the order in which no source is overwritten before it is read."""
    sources = torch.split(whole.narrow(-2, src, length), step, -2)
    targets = torch.split(whole.narrow(-2, dst, length), step, -2)
    pairs = list(zip(sources, targets, strict=True))
    return pairs if dst <= src else pairs[::-1]


def _turn(source: torch.Tensor, target: torch.Tensor, rotation: Rotation, turn: Turn) -> None:
    """Turn one step. Source and target may overlap: the source is read into scratch first."""
    start, dims = rotation.start, rotation.dims
    if dims != source.shape[-1]:
        _pass_through(source, target, start, start + dims)
        source, target = source.narrow(-1, start, dims), target.narrow(-1, start, dims)
    work = turn.workspace(rotation, source)
    work.before.copy_(source)
    torch.mul(work.before, work.cos, out=work.after)
    work.to_first.addcmul_(work.second, work.minus_sin)
    work.to_second.addcmul_(work.first, work.sin)
    target.copy_(work.after)


def _pass_through(source: torch.Tensor, target: torch.Tensor, start: int, end: int) -> None:
    if source.data_ptr() == target.data_ptr():
        return
    overlap = source.untyped_storage().data_ptr() == target.untyped_storage().data_ptr()
    for part in (slice(0, start), slice(end, source.shape[-1])):
        if part.start < part.stop:
            target[..., part].copy_(source[..., part].clone() if overlap else source[..., part])


def _pairs(x: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
    """The first and the second channel of each pair, `[…, n / 2]` each, as views."""
    if layout == "interleaved":
        return x[..., 0::2], x[..., 1::2]
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]


@torch.no_grad()
def rotate(x: torch.Tensor, delta: int | torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """A turned copy of `x`, `[…, slots, dim]`.

    `delta` is one distance, or a whole number per slot, `[slots]`.
    """
    if isinstance(delta, int):
        out = x.clone()
        carry(out, 0, 0, int(out.shape[-2]), rotation, Turn(delta))
        return out
    angles = delta.double().cpu()[:, None] * rotation.inv_freq
    dtype = _compute_dtype(x.dtype)
    cos, sin = (table.to(dtype).to(x.device) for table in (angles.cos(), angles.sin()))
    out = x.clone()
    turned = out.narrow(-1, rotation.start, rotation.dims)
    first, second = _pairs(turned.to(dtype), rotation.layout)
    to_first, to_second = _pairs(turned, rotation.layout)
    made = first * cos - second * sin, second * cos + first * sin
    to_first.copy_(made[0])
    to_second.copy_(made[1])
    return out
