"""How a layer's keys and values are stored: a codec and a number of bits for each, and what stays in full precision.

Invariant: a setting and its name say the same: `Setting.parse(setting.name) == setting`. Imports no torch.

Names: `k8v4` is 8 bits for keys and 4 for values, each row cut into groups with a scale and a lowest value of their own
(affine). `tq4` is TurboQuant (arXiv 2504.19874) at 4 bits for both, `tqk5v3` at 5 and 3. Options follow a colon:
`k8v4:sinks=8,window=128,group=32`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from compaction.errors import InvalidInput

__all__ = ["CodecName", "Setting", "Side", "Storage", "by_layer"]

CodecName = Literal["affine", "turbo"]

# Bits of a stored scale or lowest value: bfloat16, whose range no key exceeds, as float16's is by attention sinks.
_STATISTIC = 16
_NAME = re.compile(r"(?:k(?P<ak>\d)v(?P<av>\d)|tq(?P<both>\d)|tqk(?P<tk>\d)v(?P<tv>\d))(?::(?P<options>.*))?")
_OPTIONS = ("sinks", "window", "group")


@dataclass(frozen=True, slots=True)
class Side:
    """How keys, or values, are coded.

    Args:
        bits: of one code, 1 to 8.
        codec: "affine" (lowest value and step of each group) or "turbo" (rotated, levels of the normal distribution,
            one scale a group).
        group: channels that share a scale; where it does not divide a head's channels, the largest divisor below it.
    """

    bits: int
    codec: CodecName = "affine"
    group: int = 64

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= 8:
            raise InvalidInput(f"{self.bits} bits: a code has 1 to 8")
        if self.group < 1:
            raise InvalidInput(f"a group of {self.group} channels: at least 1 is needed")

    def group_of(self, dim: int) -> int:
        """Channels of a group where a head has `dim`."""
        return next(size for size in range(min(self.group, dim), 0, -1) if dim % size == 0)

    def bits_per_element(self, dim: int) -> float:
        """Bits of one element of a head of `dim` channels, its share of the scales included."""
        statistics = 2 if self.codec == "affine" else 1
        padded = sum(-(-dim * width // 8) * 8 for width in (8, 4, 2, 1) if self.bits & width)
        return (padded + statistics * _STATISTIC * (dim // self.group_of(dim))) / dim


@dataclass(frozen=True, slots=True)
class Setting:
    """One layer's storage.

    Args:
        keys: how keys are coded. From all keys of a head one vector, the mean of the first ones, is taken off before.
        values: how values are coded.
        sinks: the first slots, which stay in full precision.
        window: the newest slots, which stay in full precision until they are `window + BLOCK`.
    """

    keys: Side
    values: Side
    sinks: int = 4
    window: int = 64

    def __post_init__(self) -> None:
        if self.sinks < 0 or self.window < 0:
            raise InvalidInput(f"{self.sinks} sinks and a window of {self.window}: neither can be negative")

    @classmethod
    def parse(cls, name: str) -> Setting:
        """The setting of this name. Raises InvalidInput where there is none."""
        found = _NAME.fullmatch(name.strip().lower())
        if found is None:
            raise InvalidInput(f"storage {name!r} is unknown: write it like k8v4, tq4, tqk5v3 or k8v4:window=128")
        if found["ak"]:
            keys, values = Side(int(found["ak"])), Side(int(found["av"]), group=32)
        else:
            bits = (found["both"], found["both"]) if found["both"] else (found["tk"], found["tv"])
            keys, values = (Side(int(b), "turbo", group=128) for b in bits)
        options = _options(name, found["options"])
        group = options.pop("group", None)
        if group is not None:
            keys, values = replace(keys, group=group), replace(values, group=group)
        return cls(keys, values, **options)

    @property
    def name(self) -> str:
        """What `parse` takes; for a mixture of codecs or groups that has no name, a description."""
        k, v = self.keys, self.values
        if k.codec != v.codec:
            return f"{k.codec} k{k.bits} {v.codec} v{v.bits}"
        pair = f"k{k.bits}v{v.bits}"
        base = pair if k.codec == "affine" else f"tq{k.bits}" if k.bits == v.bits else f"tq{pair}"
        usual = Setting.parse(base)
        changed = [f"{name}={getattr(self, name)}" for name in ("sinks", "window")]
        changed = [c for c, name in zip(changed, ("sinks", "window"), strict=True) if _differs(self, usual, name)]
        if (k, v) != (usual.keys, usual.values):
            changed.append(f"group={k.group}" if k.group == v.group else f"groups {k.group} and {v.group}")
        return base + (":" + ",".join(changed) if changed else "")

    def bits_per_element(self, key_dim: int, value_dim: int) -> float:
        """Mean bits of an element where a conversation is long: scales included, sinks, window and positions not."""
        total = self.keys.bits_per_element(key_dim) * key_dim + self.values.bits_per_element(value_dim) * value_dim
        return total / (key_dim + value_dim)


# What a user may give: one for all layers, one for each, or some by index ("default" for the rest); None: full.
One = str | Setting | None
Storage = One | Sequence[One] | Mapping[int | str, One]


def by_layer(storage: Storage, layers: int) -> list[Setting | None]:
    """A setting for each of `layers` layers; None where keys and values stay as they are.

    `storage` is a setting or its name for all of them, a sequence of one for each, or a mapping from layer (negative:
    from the end) to setting, with "default" for the layers it does not name.
    """
    if storage is None or isinstance(storage, (str, Setting)):
        return [_one(storage)] * layers
    if isinstance(storage, Mapping):
        made = [_one(storage.get("default"))] * layers
        for index, one in storage.items():
            if index == "default":
                continue
            if not isinstance(index, int) or not -layers <= index < layers:
                raise InvalidInput(f"storage of layer {index!r}: the model's layers are 0 to {layers - 1}")
            made[index] = _one(one)
        return made
    if len(storage) != layers:
        raise InvalidInput(f"storage has {len(storage)} entries, the model {layers} layers")
    return [_one(one) for one in storage]


def _one(storage: One) -> Setting | None:
    return Setting.parse(storage) if isinstance(storage, str) else storage


def _differs(one: Setting, other: Setting, name: str) -> bool:
    return bool(getattr(one, name) != getattr(other, name))


def _options(name: str, text: str | None) -> dict[str, int]:
    made: dict[str, int] = {}
    for part in (text or "").split(",") if text is not None else ():
        key, _, value = part.strip().partition("=")
        if key not in _OPTIONS or not value.isdecimal():
            raise InvalidInput(f"storage {name!r}: {part.strip()!r} is not one of {', '.join(_OPTIONS)} with a number")
        made[key] = int(value)
    return made
