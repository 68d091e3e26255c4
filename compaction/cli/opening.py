"""What commands open: a log that is there, a log to write, an engine.

Invariant: opening a log to read it creates no file.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from compaction.cli.output import errors
from compaction.errors import LogMissing

if TYPE_CHECKING:
    from compaction.budget import Budget
    from compaction.engines import TransformersEngine
    from compaction.ports import Policy
    from compaction.store import AuditLog, MemoryLog

__all__ = ["budget_of", "check_budget", "engine_of", "existing_log", "log_of", "policy_of"]

_WROTE = "give the file that `run --log` or `chat --log` wrote"


def existing_log(path: str, *, readonly: bool = True) -> AuditLog:
    """A log that exists, opened to read it only.

    Raises LogMissing where there is none (nothing is created), and what `AuditLog` raises.
    """
    from compaction.errors import NotALog
    from compaction.store import AuditLog

    file = Path(path)
    if not file.exists():
        raise LogMissing(f"{path}: no such log, and none was created: {_WROTE}")
    if file.is_file() and file.stat().st_size == 0:
        raise NotALog(f"{path}: an empty file, not a compaction log: {_WROTE}")
    return AuditLog(path, readonly=readonly)


def log_of(path: str | None, durability: str = "full") -> AuditLog | MemoryLog:
    """The log to write to; None: one in memory, gone with the process."""
    from compaction.store import AuditLog, MemoryLog

    level: Literal["full", "normal"] = "normal" if durability == "normal" else "full"
    return MemoryLog() if path is None else AuditLog(path, durability=level)


def policy_of(text: str | None) -> Policy:
    """The policy of a `--policy` option. Raises InvalidPolicy with what there is."""
    from compaction.plugins import parse_policy
    from compaction.policies import default_policy

    return default_policy() if text is None else parse_policy(text)


def budget_of(tokens: int | None, kv_bytes: str | None, reserve: int | None = None) -> Budget:
    """The budget of the options. Raises InvalidBudget, in the words of the command line."""
    from compaction.budget import Budget
    from compaction.errors import InvalidBudget

    if tokens is None and kv_bytes is None:
        raise InvalidBudget("no budget: give --budget TOKENS, --kv-budget BYTES, or both")
    return Budget(tokens=tokens, kv_bytes=kv_bytes, reserve=reserve)


def check_budget(log: AuditLog | MemoryLog, conversations: Iterable[str], budget: Budget) -> None:
    """Raises InvalidBudget where the log holds one of them under another budget: figures of two would be mixed."""
    from compaction.budget import Budget
    from compaction.errors import InvalidBudget

    for name in conversations:
        opened = [event.payload for event in log.events(name) if event.kind == "opened"]
        if opened and (before := Budget.from_json(opened[-1]["budget"])) != budget:
            raise InvalidBudget(
                f"conversation {name!r} is in the log under {_options(before)}, not {_options(budget)}: "
                f"give {_options(before)} to go on with it, or another --log"
            )


def _options(budget: Budget) -> str:
    """A budget as options; what the command line cannot set is told by its Python name."""
    names = {"tokens": "--budget", "kv_bytes": "--kv-budget", "reserve": "--reserve"}
    usual = type(budget)(tokens=1).to_json() | dict.fromkeys(names)
    differing = {name: value for name, value in budget.to_json().items() if value != usual[name]}
    return " ".join(
        f"{names[name]} {value}" if name in names else f"{name}={value}" for name, value in differing.items()
    )


def engine_of(model: str, device: str | None) -> TransformersEngine:
    """The model, loaded. Raises ModelNotFound or EngineError, and EngineError where the extra is not installed."""
    from compaction.errors import EngineError

    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads make torch 10 x slower on a busy machine
    for cache in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(cache, "64")  # kernels that torch keeps, one for each length of a pass: 1,024 if unsaid
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")  # else an unreachable hub writes six lines before our one
    shown = errors()
    with shown.status(f"loading {model} …") if shown.is_terminal else _Quiet():
        try:
            from compaction.engines import TransformersEngine

            return TransformersEngine(model, device=device)
        except ImportError as exc:
            install = "pip install 'kv-compaction[model]'"
            raise EngineError(f"a local model needs torch and transformers ({exc}): {install}") from exc


class _Quiet:
    def __enter__(self) -> None: ...

    def __exit__(self, *exc: object) -> None: ...
