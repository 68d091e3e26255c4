"""The policy that does nothing.

Invariant: its plan is empty, so that only the core's own clamp keeps a request inside the room.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from compaction.budget import Target
from compaction.plan import Plan
from compaction.view import View

__all__ = ["NoOp"]


@dataclass(frozen=True, slots=True)
class NoOp:
    """Plans nothing.

    Keeps everything, loses nothing, costs nothing. For measuring what a conversation needs without compaction.
    """

    name = "noop"
    version = 1
    needs = frozenset[str]()

    @property
    def params(self) -> dict[str, Any]:
        """No parameters."""
        return {}

    def plan(self, view: View, target: Target) -> Plan:  # noqa: ARG002 - the signature is the protocol's
        """An empty plan."""
        return Plan()
