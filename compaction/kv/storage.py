"""How wide one stored element is: number formats and quantised storage by name.

Invariant: the width of the elements alone. Scales, zero points and full-precision windows of a quantised cache come on
top; a figure at less than two bytes is a lower bound of what any such cache holds.
"""

from __future__ import annotations

from dataclasses import dataclass

from compaction.errors import InvalidInput

__all__ = ["STORAGES", "Storage", "storage"]


@dataclass(frozen=True, slots=True)
class Storage:
    """Bytes of one element of a key and of a value."""

    name: str
    keys: float
    values: float

    @property
    def quantized(self) -> bool:
        """Whether scales come on top."""
        return min(self.keys, self.values) < 2


def _same(name: str, width: float) -> Storage:
    return Storage(name, width, width)


STORAGES: dict[str, Storage] = {
    **dict.fromkeys(("fp32", "float32"), _same("fp32", 4)),
    **dict.fromkeys(("bf16", "bfloat16"), _same("bf16", 2)),
    **dict.fromkeys(("fp16", "float16"), _same("fp16", 2)),
    "fp8": _same("fp8", 1),
    "int8": _same("int8", 1),
    "int4": _same("int4", 0.5),
    "int2": _same("int2", 0.25),
    "k8v4": Storage("k8v4", 1, 0.5),
}


def storage(name: str) -> Storage:
    """The storage of this name. Raises InvalidInput where there is none."""
    found = STORAGES.get(name.lower())
    if found is None:
        raise InvalidInput(f"dtype {name!r} is unknown: use one of {', '.join(STORAGES)}")
    return found
