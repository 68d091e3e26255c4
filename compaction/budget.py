"""What a conversation may cost, and where each limit came from.

A `Budget` is what the user asks for; `Limits` is what it comes to once the model's window, the engine's bytes per
token and the length of the reply are known. All figures are tokens of the rendered request unless they say bytes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from compaction.errors import InvalidBudget

__all__ = ["Budget", "Goal", "KVStorage", "Limits", "Target", "Window", "parse_bytes"]

Goal = Literal["must", "want"]
_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def parse_bytes(value: int | str) -> int:
    """Bytes from an int or a text such as "8GiB", "512 MiB", "1e9".

    Raises InvalidBudget for anything else.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?(?:e[0-9]+)?)\s*([kmgt]?i?b?)\s*", str(value), re.IGNORECASE)
    unit = match.group(2).lower() if match else None
    if match is None or unit not in _UNITS:
        raise InvalidBudget(f"cannot read {value!r} as bytes: write an integer, or a text such as '8GiB' or '512MiB'")
    return int(float(match.group(1)) * _UNITS[unit])


@dataclass(frozen=True, slots=True)
class Window:
    """How many tokens (prompt + reply) the model can hold, and who says so."""

    tokens: int
    source: str  # "user" > "server" > "model config" > "default"


@dataclass(frozen=True, slots=True)
class KVStorage:
    """How a conversation's keys and values are kept, and the most that costs: `fixed` + tokens x `per_token` bytes.

    `name` "" is the model's own number format. `fixed` is what the tokens that a quantized cache keeps in full
    precision (first ones, newest ones) cost beyond `per_token`.
    """

    name: str
    per_token: int
    fixed: int = 0

    def bytes(self, tokens: int) -> int:
        """Bytes of so many tokens."""
        return self.fixed + tokens * self.per_token

    def tokens(self, kv_bytes: int) -> int:
        """The most tokens that so many bytes hold."""
        return max(0, kv_bytes - self.fixed) // self.per_token


@dataclass(frozen=True, slots=True)
class Budget:
    """What one conversation may hold.

    Args:
        tokens: prompt + reply, in tokens of the rendered request.
        kv_bytes: the same in bytes of KV cache ("8GiB" or an int); needs an engine or a geometry.
        reserve: tokens kept free for the reply; None: `max_new_tokens` of each call.
        high, low: water marks as fractions of what is free (room - floor): compact above `high`, down to `low`.
        clamp_user: whether the last user message may be clamped when nothing else helps.
    """

    tokens: int | None = None
    kv_bytes: int | str | None = None
    reserve: int | None = None
    high: float = 0.9
    low: float = 0.5
    clamp_user: bool = False

    def __post_init__(self) -> None:
        if self.tokens is None and self.kv_bytes is None:
            raise InvalidBudget("a budget needs tokens=, kv_bytes=, or both")
        if self.tokens is not None and (isinstance(self.tokens, bool) or not isinstance(self.tokens, int)):
            raise InvalidBudget(f"budget tokens must be an integer, not {self.tokens!r}")
        if self.tokens is not None and self.tokens < 1:
            raise InvalidBudget(f"a budget of {self.tokens} tokens holds nothing: give a positive number")
        if self.kv_bytes is not None:
            object.__setattr__(self, "kv_bytes", parse_bytes(self.kv_bytes))
            if int(self.kv_bytes) < 1:
                raise InvalidBudget(f"a budget of {self.kv_bytes} KV bytes holds nothing: give a positive number")
        if self.reserve is not None and (isinstance(self.reserve, bool) or not isinstance(self.reserve, int)):
            raise InvalidBudget(f"reserve must be an integer number of tokens, not {self.reserve!r}")
        if self.reserve is not None and self.reserve < 0:
            raise InvalidBudget(f"reserve is {self.reserve}: it cannot be negative")
        if self.tokens is not None and (self.reserve or 0) >= self.tokens:
            raise InvalidBudget(f"a reserve of {self.reserve} leaves nothing of {self.tokens} tokens for a prompt")
        if not 0.0 <= self.low < self.high <= 1.0:
            raise InvalidBudget(f"water marks need 0 <= low < high <= 1, got low={self.low}, high={self.high}")

    def to_json(self) -> dict[str, Any]:
        """The budget as plain JSON values, in a fixed order."""
        return {
            "tokens": self.tokens,
            "kv_bytes": self.kv_bytes,
            "reserve": self.reserve,
            "high": self.high,
            "low": self.low,
            "clamp_user": self.clamp_user,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Budget:
        """The inverse of `to_json`."""
        return cls(**data)

    def limits(
        self, *, window: Window | None, max_new_tokens: int, kv_bytes_per_token: int | None, kv_bytes_fixed: int = 0
    ) -> Limits:
        """What this budget comes to for one request of a conversation whose KV cache costs that many bytes.

        Raises InvalidBudget where the reserve leaves no room, or where KV bytes are asked for and no geometry is known.
        """
        bounds: list[tuple[int, str]] = []
        if self.tokens is not None:
            bounds.append((self.tokens, "budget tokens"))
        if self.kv_bytes is not None:
            if not kv_bytes_per_token:
                raise InvalidBudget("kv_bytes needs an engine or a geometry that knows the bytes of a token")
            storage = KVStorage("", kv_bytes_per_token, kv_bytes_fixed)
            bounds.append((storage.tokens(int(self.kv_bytes)), "budget kv_bytes"))
        if window is not None:
            bounds.append((window.tokens, f"window ({window.source})"))
        limit, source = min(bounds)
        reserve = max(self.reserve or 0, max_new_tokens)
        if reserve >= limit:
            raise InvalidBudget(
                f"the reply may take {reserve:,} tokens but the limit is {limit:,} ({source}): "
                "lower max_new_tokens or reserve, or raise the budget"
            )
        binding = source == "budget kv_bytes"
        return Limits(
            limit=limit,
            source=source,
            reserve=reserve,
            high=self.high,
            low=self.low,
            clamp_user=self.clamp_user,
            kv_bytes=int(self.kv_bytes or 0) if binding else None,
            cap=min((tokens for tokens, whose in bounds if whose != source), default=None) if binding else None,
        )


@dataclass(frozen=True, slots=True)
class Limits:
    """One request's figures, in tokens: `limit` with its source, `reserve` for the reply, and the water marks.

    Where the budget of KV bytes is what limits, `kv_bytes` is that budget, `limit` what it comes to as the cache is
    stored now, and `cap` the most tokens that are allowed however it is stored (None: any number); else both are None.
    """

    limit: int
    source: str
    reserve: int
    high: float
    low: float
    clamp_user: bool
    kv_bytes: int | None = None
    cap: int | None = None

    @property
    def room(self) -> int:
        """Tokens a prompt may have."""
        return self.limit - self.reserve

    def high_mark(self, floor: int) -> int:
        """Compact above this many tokens. Where nothing is free, only at room."""
        free = self.room - floor
        return floor + int(self.high * free) if free > 0 else self.room

    def low_mark(self, floor: int) -> int:
        """Compact down to this many tokens. Where nothing is free, room."""
        free = self.room - floor
        return floor + int(self.low * free) if free > 0 else self.room

    def to_json(self) -> dict[str, Any]:
        """The figures as plain JSON values, in a fixed order."""
        in_bytes = {} if self.kv_bytes is None else {"kv_bytes": self.kv_bytes, "cap": self.cap}
        return {
            "limit": self.limit,
            "source": self.source,
            "reserve": self.reserve,
            "high": self.high,
            "low": self.low,
            "clamp_user": self.clamp_user,
            **in_bytes,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Limits:
        """The inverse of `to_json`."""
        return cls(**data)


@dataclass(frozen=True, slots=True)
class Target:
    """What a plan has to reach (`must`) and should reach (`want`), in tokens of the request or bytes of its KV cache.

    In bytes, `cap` is the most tokens the request may have besides; None: any number.
    """

    must: int
    want: int
    unit: Literal["tokens", "kv_bytes"] = "tokens"
    cap: int | None = None

    def met(self, tokens: int, storage: KVStorage | None, goal: Goal = "want") -> bool:
        """Whether a request of so many tokens, stored so, is down to `want`, or to `must`."""
        most = self.must if goal == "must" else self.want
        if self.unit == "tokens" or storage is None:
            return tokens <= most
        return storage.bytes(tokens) <= most and (self.cap is None or tokens <= self.cap)

    def in_tokens(self, storage: KVStorage | None) -> Target:
        """The same target in tokens of a conversation that is stored so."""
        if self.unit == "tokens" or storage is None:
            return self
        most = self.cap if self.cap is not None else storage.tokens(self.must)
        must = min(storage.tokens(self.must), most)
        return Target(must=must, want=min(storage.tokens(self.want), must))

    def to_json(self) -> dict[str, Any]:
        """The target as plain JSON values, in a fixed order."""
        plain = {"must": self.must, "want": self.want, "unit": self.unit}
        return plain if self.unit == "tokens" else {**plain, "cap": self.cap}
