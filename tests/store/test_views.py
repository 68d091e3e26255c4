"""The SQL views, queried as anybody would: with a plain connection that knows none of our code."""

from __future__ import annotations

import json
import re
import shutil
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compaction.messages import dumps, leaves
from compaction.plan import Span, marker
from compaction.store import AuditLog, MemoryLog
from tests import strategies
from tests.contracts.log_contract import LONG, append, committed, story


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "audit.db"
    with AuditLog(path, durability="normal") as log:
        story(log)
    return path


@pytest.fixture
def sql(path: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(path)) as connection:
        connection.row_factory = sqlite3.Row
        yield connection


def rows(sql: sqlite3.Connection, query: str) -> list[dict[str, Any]]:
    return [dict(row) for row in sql.execute(query)]


def test_conversations_sum_up_their_events(sql: sqlite3.Connection) -> None:
    """One row each, with its counts."""
    found = rows(sql, "SELECT conversation, events, messages, tokens, decisions FROM conversations ORDER BY 1")

    assert [tuple(row.values()) for row in found] == [("c", 8, 5, 25, 1), ("d", 1, 1, 5, 0), ("f", 2, 0, 0, 1)]


def test_messages_show_content_beside_exact_json(sql: sqlite3.Connection) -> None:
    """Text content as text, parts as JSON, and a flag where SQLite cannot hold a string."""
    found = rows(sql, "SELECT message_id, exact, content, json FROM messages WHERE conversation = 'c' ORDER BY seq")

    shown = [(row["message_id"], row["exact"], row["content"]) for row in found]
    assert shown == [
        ("c.1", 1, "order 7712, please 🙂 now"),
        ("c.2", 1, None),
        ("c.3", 1, LONG),
        ("c.4", 0, '[{"type":"text","text":"nul \\u0000 lone \\udfff end"}]'),
        ("c.5", 1, LONG),
    ]


def test_spans_show_what_went_why_and_for_what(sql: sqlite3.Connection) -> None:
    """Verbatim text by JSON Pointer and code points, the action's reason, and what stands in its place."""
    found = rows(sql, "SELECT message_id, action, reason, exact, text, replaced_by FROM spans WHERE conversation = 'c'")

    shown = [tuple(row.values()) for row in found if row["message_id"] in {"c.1", "c.5", "c.4"}]
    assert shown == [
        ("c.1", "clamp", "quotes \ud800\x00".encode("utf-8", "surrogatepass"), 1, "order 7712", marker(10)),
        ("c.5", "replace", "plain", 1, "deep", "[see file]"),
        ("c.4", "clamp", "r", 0, None, "[1,200 characters removed]"),
    ]


def test_a_summarised_message_is_replaced_by_the_summary(sql: sqlite3.Connection) -> None:
    """The n-th digest of the plan has the n-th summary; a dropped message has nothing in its place."""
    found = rows(sql, "SELECT message_id, replaced_by FROM spans WHERE path = '' ORDER BY position")

    assert [tuple(row.values()) for row in found] == [("c.2", None), ("c.3", "a summary of it all")]


def test_span_ids_are_those_of_the_plan(sql: sqlite3.Connection) -> None:
    """The view's ids are what `plan.Span.id` computes."""
    found = rows(sql, 'SELECT id, message_id, path, start, "end" AS "end" FROM spans')

    assert [row["id"] for row in found] == [
        Span(row["message_id"], row["path"], row["start"], row["end"]).id for row in found
    ]


def test_decisions_and_usage_have_their_figures(sql: sqlite3.Connection) -> None:
    """Tokens before and after, what was discarded, and the cost of each turn."""
    decision = rows(sql, "SELECT seq, policy, rung, actions, spans, discarded_tokens, tokens_after FROM decisions")[0]
    usage = rows(sql, "SELECT prompt_tokens, reused, kv_bytes, ttft_ms, tpot_ms, why FROM usage")[0]

    assert (*decision.values(), *usage.values()) == (
        *(8, "truncate", 1, '["drop","clamp","replace","digest","clamp"]', 5, 115, 40),
        *(9, 5, 1024, 1.5, None, "first"),
    )


def test_looking_up_one_span_scans_nothing(sql: sqlite3.Connection) -> None:
    """A span, its decision, its message and its text are each found by an index."""
    plan = [row[3] for row in sql.execute("EXPLAIN QUERY PLAN SELECT text FROM spans WHERE id = 'x'")]

    assert [step for step in plan if re.match(r"SCAN (?!j|walk|CONSTANT|p\b)", step)] == []


@pytest.mark.skipif(shutil.which("sqlite3") is None, reason="no sqlite3 shell")
def test_the_plain_shell_can_read_every_view(path: Path) -> None:
    """The views need no function of ours."""
    views = ("conversations", "messages", "decisions", "spans", "usage")
    counts = " UNION ALL ".join(f"SELECT count(*) FROM (SELECT * FROM {view})" for view in views)

    shell = subprocess.run(["sqlite3", str(path), counts], capture_output=True, text=True, check=True)

    assert shell.stdout.split() == ["3", "6", "2", "6", "1"]


def _is_exact(message: Any) -> bool:
    keys_and_strings = json.dumps(message, ensure_ascii=False)
    lone = any("\ud800" <= c <= "\udfff" for c in keys_and_strings)
    return not lone and "\\u0000" not in keys_and_strings.replace("\\\\", "")


@settings(max_examples=150)
@given(
    content=strategies.texts()
    | st.text(st.sampled_from(["\\", "u", "d", "8", "\ud83d", "\ude00", "😀", "\x00", "a"]), max_size=8).map(
        lambda text: str(json.loads(json.dumps(text)))
    )
)
def test_the_flag_is_right_and_the_text_exact(content: str) -> None:
    """`exact` says precisely whether a NUL or a lone surrogate is there; without, the view's text is the text."""
    message = {"role": "user", "content": content, "x": ["é"]}
    with MemoryLog() as log:
        append(log, "c", "m", message)
        log.commit("c", 1, [committed([["m", "/content", 0, len(content), 0, 1]], [{"do": "drop", "reason": ""}])])
        row = log._store.query("SELECT exact, text FROM spans")[0]

    assert row == {"exact": int(_is_exact(message)), "text": content if _is_exact(message) else None}


@settings(max_examples=60)
@given(message=strategies.messages(), data=st.data())
def test_restore_is_exact_whatever_it_holds(message: dict[str, Any], data: st.DataObject) -> None:
    """Any range of any string of any message comes back as it was, and so does the whole message."""
    found = sorted(leaves(message))
    path, string = data.draw(st.sampled_from(found))
    start = data.draw(st.integers(0, len(string)))
    end = data.draw(st.integers(start, len(string)))
    whole = dumps(message)
    with MemoryLog() as log:
        append(log, "c", "m", message)
        log.commit("c", 1, [committed([["m", path, start, end, 0, 1]]), committed([["m", "", 0, len(whole), 0, 1]])])
        restored = [log.restore(span.id) for span in log.spans()]

    assert restored == [string[start:end], whole]


@settings(max_examples=60)
@given(message=strategies.messages())
def test_the_view_follows_any_pointer(message: dict[str, Any]) -> None:
    """For every string of an exact message the view's text is the string at that JSON Pointer."""
    found = list(leaves(message))
    spans = [["m", path, 0, len(string), 0, 1] for path, string in found]
    with MemoryLog() as log:
        append(log, "c", "m", message)
        log.commit("c", 1, [committed(spans, [{"do": "drop", "reason": ""}])])
        texts = [row["text"] for row in log._store.query("SELECT text FROM spans ORDER BY position")]

    assert texts == ([string for _, string in found] if _is_exact(message) else [None] * len(found))
