"""Checks of policy parameters.

Invariant: a policy that exists has usable parameters. Knows nothing about views or plans.
"""

from __future__ import annotations

from compaction.errors import InvalidPolicy

__all__ = ["need_integer", "need_share", "need_text"]


def need_integer(policy: str, field: str, value: object, minimum: int) -> None:
    """Raise InvalidPolicy unless `value` is an integer of at least `minimum`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise InvalidPolicy(f"{policy}: {field} must be an integer of at least {minimum}, not {value!r}")


def need_share(policy: str, field: str, value: object) -> None:
    """Raise InvalidPolicy unless `value` is a number above 0 and at most 1."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 < value <= 1.0:
        raise InvalidPolicy(f"{policy}: {field} must be a share above 0 and at most 1, not {value!r}")


def need_text(policy: str, field: str, value: object) -> None:
    """Raise InvalidPolicy unless `value` is a text with something in it."""
    if not isinstance(value, str) or not value.strip():
        raise InvalidPolicy(f"{policy}: {field} must be a text that is not empty, not {value!r}")
