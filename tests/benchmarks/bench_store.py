"""The log against bare `sqlite3`: bytes on disk, time of a commit, time of a verification.

The comparator inserts the same bytes (message JSON, payload and hash, as the log has them) into one plain table, with
the same pragmas and as many commits. Repetitions alternate; ratios are medians with their spread.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from compaction.events import NewEvent, Text, seal
from compaction.messages import dumps
from compaction.store import AuditLog

__all__ = ["airline", "bytes_ratio", "fill", "run"]

AIRLINE = Path(__file__).resolve().parents[3] / "shared" / "data" / "tau_bench_airline_gpt4o.jsonl.gz"
AT = "2026-01-01T00:00:00.000000Z"
Turn = tuple[str, int, str, str]  # conversation, seq, role, message JSON


def airline(limit: int | None = None) -> list[Turn]:
    """The 200 recorded airline conversations, one turn a message."""
    turns: list[Turn] = []
    with gzip.open(AIRLINE, "rt", encoding="utf-8") as lines:
        for line in lines:
            run_ = json.loads(line)
            turns += [(run_["id"], i, m["role"], dumps(m)) for i, m in enumerate(run_["messages"], 1)]
    return turns[:limit]


def event_of(turn: Turn, salt: bytes) -> tuple[NewEvent, Text]:
    """The event and the text that a session writes for a message."""
    conversation, seq, role, body = turn
    text = seal(body, salt)
    payload = {
        "message": f"{conversation}.{seq}",
        "text": text.digest.hex(),
        "role": role,
        "tokens": len(body) // 4,
        "counter": "template:abcdef123456",
        "total": len(body),
    }
    return NewEvent("appended", AT, payload), text


def salts() -> Iterator[bytes]:
    """16 bytes for each text, the same at every run."""
    number = 0
    while True:
        yield hashlib.sha256(number.to_bytes(8, "big")).digest()[:16]
        number += 1


def fill(log: AuditLog, turns: list[Turn]) -> list[float]:
    """Write each turn in a transaction of its own; seconds for each."""
    took = []
    for turn, salt in zip(turns, salts(), strict=False):
        began = time.perf_counter()
        event, text = event_of(turn, salt)
        log.commit(turn[0], turn[1] - 1, [event], [text])
        took.append(time.perf_counter() - began)
    return took


def fill_bare(path: Path, turns: list[Turn], synchronous: str) -> list[float]:
    """The same bytes into one plain table, one commit each; seconds for each."""
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute(f"PRAGMA synchronous = {synchronous}")
    connection.execute(
        "CREATE TABLE log(id INTEGER PRIMARY KEY, conversation, seq, kind, at, payload, hash, salt, body)"
    )
    took = []
    for turn, salt in zip(turns, salts(), strict=False):
        event, text = event_of(turn, salt)
        row = (turn[0], turn[1], "appended", AT, dumps(event.payload), text.digest, salt, text.body)
        began = time.perf_counter()
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("INSERT INTO log VALUES (NULL, ?, ?, ?, ?, ?, ?, ?, ?)", row)
        connection.execute("COMMIT")
        took.append(time.perf_counter() - began)
    connection.close()
    return took


def bytes_ratio(folder: Path) -> float:
    """Bytes of the database of all airline conversations / bytes of their messages' compact JSON."""
    turns = airline()
    path = folder / "size.db"
    with AuditLog(path, durability="normal") as log:
        fill(log, turns)
    return path.stat().st_size / sum(len(body) for *_, body in turns)


def _commit_times(folder: Path, durability: str, turns: list[Turn], rounds: int) -> dict[str, Any]:
    """Our median turn against the bare one, alternating."""
    pairs: list[tuple[float, float]] = []
    for number in range(rounds):
        with AuditLog(folder / f"{durability}{number}.db", durability=durability) as log:  # type: ignore[arg-type]
            ours = statistics.median(fill(log, turns))
        bare = statistics.median(fill_bare(folder / f"{durability}{number}.bare", turns, durability.upper()))
        pairs.append((ours, bare))
    ratios = [ours / bare for ours, bare in pairs]
    more = [(ours - bare) * 1e6 for ours, bare in pairs]
    return {
        "ratio": statistics.median(ratios),
        "spread": [min(ratios), max(ratios)],
        "more_us": statistics.median(more),
        "more_us_spread": [min(more), max(more)],
        "bare_us": statistics.median(bare * 1e6 for _, bare in pairs),
    }


def _verify_ratio(folder: Path) -> dict[str, Any]:
    """Verification against SHA-256 and json.loads over the same rows."""
    path = folder / "size.db"
    ratios = []
    for _ in range(3):
        with AuditLog(path) as log:
            ours = _timed(log.verify)
        ratios.append(ours / _timed(lambda: _bare_scan(path)))
    return {"ratio": statistics.median(ratios), "spread": [min(ratios), max(ratios)]}


def _bare_scan(path: Path) -> None:
    connection = sqlite3.connect(path)
    sql = "SELECT e.payload, t.salt, coalesce(t.body, b.body) FROM events e "
    sql += "JOIN texts t ON t.digest = json_extract(e.payload, '$.text') "
    for payload, salt, body in connection.execute(sql + "LEFT JOIN bodies b ON b.id = t.shared"):
        json.loads(payload)
        hashlib.sha256(payload.encode()).digest()
        hashlib.sha256(salt + body.encode()).digest()
    connection.close()


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def run(turns: int = 400, rounds: int = 7) -> dict[str, Any]:
    """All figures by name. Takes about 15 seconds."""
    some = airline(turns)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        return {
            "store_bytes_per_json_byte": bytes_ratio(folder),
            "store_commit_full_vs_bare": _commit_times(folder, "full", some, rounds),
            "store_commit_normal_vs_bare": _commit_times(folder, "normal", some, rounds),
            "store_verify_vs_bare_scan": _verify_ratio(folder),
        }


if __name__ == "__main__":
    print(json.dumps(run(), indent=2))
