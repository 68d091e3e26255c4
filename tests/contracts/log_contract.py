"""What every log must do, wherever it keeps things. Subclass `LogContract` and provide a `make_log` fixture.

    class TestMine(LogContract):
        @pytest.fixture
        def make_log(self): return lambda: MyLog(...)

`make_log()` gives a new, empty log each time it is called.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from compaction.errors import InvalidInput, LogConflict, LogError, LogMissing
from compaction.events import Event, NewEvent, Text, chain, seal
from compaction.messages import dumps
from compaction.ports import Log
from tests import strategies

__all__ = ["AT", "LogContract", "MakeLog", "append", "appended", "committed", "note"]

AT = "2026-01-01T00:00:00.000000Z"
MakeLog = Callable[[], Log]
shared = settings(
    max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.differing_executors]
)


def note(body: str, number: int = 0) -> Text:
    """A sealed text; equal bodies with other numbers get other salts."""
    return seal(body, hashlib.sha256(f"{number}".encode()).digest()[:16])


def appended(message_id: str, message: Mapping[str, Any], *, tokens: int = 5) -> tuple[NewEvent, Text]:
    """The event and the text of an appended message."""
    text = seal(dumps(dict(message)), hashlib.sha256(message_id.encode("utf-8", "surrogatepass")).digest()[:16])
    payload = {
        "message": message_id,
        "text": text.digest.hex(),
        "role": message["role"],
        "tokens": tokens,
        "counter": "template:0",
        "total": tokens,
    }
    return NewEvent("appended", AT, payload), text


def append(log: Log, conversation: str, message_id: str, message: Mapping[str, Any]) -> Event:
    """Append one message after whatever the conversation holds."""
    event, text = appended(message_id, message)
    return log.commit(conversation, log.seq(conversation), [event], [text])[0]


def committed(spans: Sequence[list[Any]], plan: Sequence[Mapping[str, Any]] = (), **more: Any) -> NewEvent:
    """A `decision_committed` event as the session writes it."""
    payload = {
        "trigger": "auto",
        "policy": {"name": "truncate", "version": 1, "params": {"keep": 3}},
        "limits": {"limit": 100},
        "target": {"must": 90, "want": 50, "unit": "tokens"},
        "rung": 1,
        "failures": [],
        "answers": [10, 5],
        "plan": list(plan),
        "summaries": [],
        "spans": list(spans),
        "changed": [],
        "before": {"entries": 3, "tokens": 80},
        "after": {"entries": 2, "tokens": 40, "reusable_tokens": 9},
        **more,
    }
    return NewEvent("decision_committed", AT, payload)


class LogContract:
    """One behaviour a test."""

    def test_a_new_log_is_empty(self, make_log: MakeLog) -> None:
        """Nobody is known and nothing stands in it."""
        log = make_log()

        assert (log.seq("c"), list(log.events("c"))) == (0, [])

    def test_seqs_follow_without_a_gap(self, make_log: MakeLog) -> None:
        """Events written together are numbered in their order, after the newest."""
        log = make_log()
        append(log, "c", "m1", {"role": "user", "content": "one"})

        pairs = [appended(f"n{i}", {"role": "user", "content": "x"}) for i in range(3)]
        written = log.commit("c", 1, [event for event, _ in pairs], [text for _, text in pairs])

        assert [event.seq for event in written] == [2, 3, 4]

    def test_what_was_written_is_read(self, make_log: MakeLog) -> None:
        """`events` gives back exactly what `commit` returned."""
        log = make_log()

        written = [append(log, "c", f"m{i}", {"role": "user", "content": str(i)}) for i in range(5)]

        assert list(log.events("c")) == written

    def test_reading_starts_after_a_seq(self, make_log: MakeLog) -> None:
        """Only events with a greater seq are given."""
        log = make_log()
        for i in range(4):
            append(log, "c", f"m{i}", {"role": "user", "content": "x"})

        assert [event.seq for event in log.events("c", 2)] == [3, 4]

    def test_long_conversations_are_read_whole(self, make_log: MakeLog) -> None:
        """However events are fetched, none is skipped and none comes twice."""
        log = make_log()
        pairs = [appended(f"m{i}", {"role": "user", "content": "x"}) for i in range(700)]
        log.commit("c", 0, [event for event, _ in pairs], [text for _, text in pairs])

        assert [event.seq for event in log.events("c")] == list(range(1, 701))

    def test_conversations_do_not_see_each_other(self, make_log: MakeLog) -> None:
        """Each has seqs of its own; ids count in the log."""
        log = make_log()
        append(log, "a", "m1", {"role": "user", "content": "x"})
        append(log, "b", "m2", {"role": "user", "content": "x"})

        assert [(e.id, e.seq) for e in [*log.events("a"), *log.events("b")]] == [(1, 1), (2, 1)]

    def test_payloads_keep_their_key_order(self, make_log: MakeLog) -> None:
        """What is replayed byte for byte must come back in the order it was written."""
        log = make_log()
        log.commit("c", 0, [NewEvent("reanchored", AT, {"z": 1, "a": {"y": [1, 2.5, None], "b": "é\ud800\x00"}})])

        assert dumps(next(log.events("c")).payload) == '{"z":1,"a":{"y":[1,2.5,null],"b":"\\u00e9\\ud800\\u0000"}}'

    def test_one_chain_for_the_whole_log(self, make_log: MakeLog) -> None:
        """Each hash covers the row and the hash before it, whichever conversation that belongs to."""
        log = make_log()
        events = [append(log, name, f"m{i}", {"role": "user", "content": name}) for i, name in enumerate("aabac")]

        hashes = [b""]
        for e in events:
            hashes.append(chain(hashes[-1], e.id, e.conversation, e.seq, e.kind, e.at, dumps(e.payload)))
        assert hashes[1:] == [event.hash for event in events]

    def test_a_stale_writer_is_refused(self, make_log: MakeLog) -> None:
        """Who decides on an old state loses, is told the newest seq, and has written nothing."""
        log = make_log()
        append(log, "c", "m1", {"role": "user", "content": "x"})
        event, text = appended("m2", {"role": "user", "content": "late"})

        with pytest.raises(LogConflict) as caught:
            log.commit("c", 0, [event], [text])

        assert (caught.value.expected, caught.value.found, log.seq("c")) == (0, 1, 1)

    def test_a_writer_from_the_future_is_refused(self, make_log: MakeLog) -> None:
        """Seqs are never skipped."""
        log = make_log()
        event, text = appended("m1", {"role": "user", "content": "x"})

        with pytest.raises(LogConflict):
            log.commit("c", 7, [event], [text])

    def test_a_text_that_was_refused_is_not_there(self, make_log: MakeLog) -> None:
        """Texts and events are written together or not at all."""
        log = make_log()
        event, text = appended("m1", {"role": "user", "content": "x"})
        with pytest.raises(LogConflict):
            log.commit("c", 7, [event], [text])

        with pytest.raises(LogMissing):
            log.text(text.digest)

    @shared
    @given(body=strategies.texts() | st.text(min_size=190, max_size=230))
    def test_texts_come_back_exactly(self, make_log: MakeLog, body: str) -> None:
        """Any string, a NUL and a lone surrogate included, short or long."""
        log = make_log()
        text = note(body)

        log.commit("c", 0, [NewEvent("probe", AT, {"text": text.digest.hex()})], [text])

        assert log.text(text.digest) == body

    def test_equal_texts_are_told_apart(self, make_log: MakeLog) -> None:
        """Two texts with equal bodies have two digests, and both are there, long as they may be."""
        log = make_log()
        texts = [note("long " * 100, number) for number in range(3)]

        log.commit("c", 0, [NewEvent("probe", AT, {"text": t.digest.hex()}) for t in texts], texts)

        assert [log.text(t.digest) for t in texts] == ["long " * 100] * 3

    def test_a_text_may_be_named_again(self, make_log: MakeLog) -> None:
        """A later event may name a text that stands in the log, with or without bringing it along."""
        log = make_log()
        text = note("tools")
        event = NewEvent("probe", AT, {"text": text.digest.hex()})
        log.commit("c", 0, [event], [text])

        log.commit("c", 1, [event], [text])
        log.commit("c", 2, [event], [])

        assert log.text(text.digest) == "tools"

    def test_an_unknown_text_is_missing(self, make_log: MakeLog) -> None:
        """Nothing is made up for a digest that was never written."""
        with pytest.raises(LogMissing):
            make_log().text(bytes(32))

    def test_an_event_may_not_name_what_is_not_there(self, make_log: MakeLog) -> None:
        """A text must be in the log by the time an event names it."""
        log = make_log()

        with pytest.raises(LogMissing):
            log.commit("c", 0, [NewEvent("probe", AT, {"text": "0" * 64})])

        assert log.seq("c") == 0

    @pytest.mark.parametrize(
        ("event", "texts"),
        [
            (NewEvent("probe", AT, {}), []),
            (NewEvent("nonsense", AT, {}), []),  # type: ignore[arg-type]
            (NewEvent("reanchored", AT, {"x": float("nan")}), []),
            (NewEvent("reanchored", AT, {"x": {1, 2}}), []),
            (NewEvent("reanchored", "", {}), []),
            (NewEvent("reanchored", AT, {}), [note("named by nobody")]),
            (NewEvent("reanchored", AT, {"n": {"t": note("x").digest.hex()}}), [Text(note("x").digest, b"salt", "x")]),
            (committed([["m", "/content", 0, 3]]), []),
            (committed([["m", "/content", 0, -3, 0, 1]]), []),
        ],
    )
    def test_what_cannot_be_is_refused(self, make_log: MakeLog, event: NewEvent, texts: list[Text]) -> None:
        """Malformed payloads, wrong digests and texts without an event never get into the log."""
        log = make_log()

        with pytest.raises(InvalidInput):
            log.commit("c", 0, [event], texts)

        assert log.seq("c") == 0

    @pytest.mark.parametrize("conversation", ["", "a\x00b", "\ud800"])
    def test_conversation_ids_are_plain_text(self, make_log: MakeLog, conversation: str) -> None:
        """An id that not every store and tool can hold is refused."""
        with pytest.raises(InvalidInput):
            make_log().commit(conversation, 0, [NewEvent("reanchored", AT, {})])

    @pytest.mark.parametrize("conversation", ["'; DROP TABLE events; --", "é 漢字 🙂", "%", "c/../d", "x" * 5000])
    def test_conversation_ids_are_data(self, make_log: MakeLog, conversation: str) -> None:
        """Whatever an id holds, it is only ever compared."""
        log = make_log()
        append(log, conversation, "m", {"role": "user", "content": "x"})

        assert (log.seq(conversation), log.seq("c")) == (1, 0)

    def test_all_or_nothing(self, make_log: MakeLog) -> None:
        """A message id that is taken already takes the whole commit with it."""
        log = make_log()
        append(log, "c", "m1", {"role": "user", "content": "x"})
        good, good_text = appended("m2", {"role": "user", "content": "y"})
        bad, bad_text = appended("m1", {"role": "user", "content": "z"})

        with pytest.raises(LogError):
            log.commit("c", 1, [good, bad], [good_text, bad_text])

        assert log.seq("c") == 1

    def test_a_log_goes_on_after_a_failure(self, make_log: MakeLog) -> None:
        """A refused commit leaves no lock and no open transaction behind."""
        log = make_log()
        with pytest.raises(LogConflict):
            log.commit("c", 3, [NewEvent("reanchored", AT, {})])

        assert append(log, "c", "m1", {"role": "user", "content": "x"}).seq == 1

    def test_a_closed_log_says_so(self, make_log: MakeLog) -> None:
        """Everything but closing again raises LogError."""
        log = make_log()
        log.close()
        log.close()

        for use in (
            lambda: log.seq("c"),
            lambda: list(log.events("c")),
            lambda: log.text(bytes(32)),
            lambda: log.commit("c", 0, [NewEvent("reanchored", AT, {})]),
        ):
            with pytest.raises(LogError):
                use()

    def test_threads_lose_and_double_nothing(self, make_log: MakeLog) -> None:
        """Writers that read again after a conflict all get their messages in, each once."""
        log = make_log()

        def write(worker: int) -> None:
            for i in range(20):
                while True:
                    try:
                        append(log, "c", f"w{worker}-{i}", {"role": "user", "content": "x"})
                        break
                    except LogConflict:
                        continue

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(write, range(4)))

        ids = [event.payload["message"] for event in log.events("c")]
        assert sorted(ids) == sorted(f"w{w}-{i}" for w in range(4) for i in range(20))

    @shared
    @given(
        steps=st.lists(
            st.tuples(
                st.sampled_from("abc"), st.integers(0, 2), st.lists(strategies.messages(), min_size=1, max_size=3)
            ),
            max_size=8,
        )
    )
    def test_it_is_a_list_of_events_for_each_conversation(
        self, make_log: MakeLog, steps: list[tuple[str, int, list[dict[str, Any]]]]
    ) -> None:
        """Against plain lists: same seqs, same events, same texts, same conflicts."""
        log, model, number = make_log(), {name: list[str]() for name in "abc"}, 0
        for name, off, messages in steps:
            pairs = [appended(f"m{number + i}", message) for i, message in enumerate(messages)]
            after = len(model[name]) + off
            try:
                log.commit(name, after, [event for event, _ in pairs], [text for _, text in pairs])
            except LogConflict:
                assert off
            else:
                assert not off
                model[name] += [text.body for _, text in pairs]
                number += len(pairs)

        read = {name: [log.text(bytes.fromhex(event.payload["text"])) for event in log.events(name)] for name in "abc"}
        assert read == model


LONG = "long words " * 40


def story(log: Log) -> None:
    """Two conversations with every kind of row: long and short texts, tricky ones, each action, usage, a fork."""
    tools, reason, odd = note('[{"type":"function"}]', 1), note("old", 2), note("quotes \ud800\x00", 3)
    other, summary = note("[see file]", 4), note("a summary of it all", 5)
    opened = {
        "policy": {"name": "truncate", "version": 1, "params": {}},
        "counter": "template:0",
        "budget": {"tokens": 100},
        "head": [1, 2, 3],
        "total": 6,
    }
    log.commit("c", 0, [NewEvent("opened", AT, {**opened, "tools": tools.digest.hex()})], [tools])
    append(log, "c", "c.1", {"role": "user", "content": "order 7712, please 🙂 now"})
    append(log, "c", "c.2", {"role": "assistant", "content": None, "tool_calls": [{"id": "a"}]})
    append(log, "c", "c.3", {"role": "tool", "tool_call_id": "a", "content": LONG})
    append(log, "c", "c.4", {"role": "user", "content": [{"type": "text", "text": "nul \x00 lone \udfff end"}]})
    append(log, "c", "c.5", {"role": "user", "content": LONG, 'k/e~y"': {"0": "deep value"}})
    append(log, "d", "d.1", {"role": "user", "content": LONG, 'k/e~y"': {"0": "deep value"}})
    usage = {"prompt_tokens": 9, "completion_tokens": 2, "prefilled": 4, "reused": 5, "kv_bytes": 1024, "ttft_ms": 1.5}
    log.commit("c", 6, [NewEvent("usage", AT, {**usage, "why": "first"})])
    plan: list[dict[str, Any]] = [
        {"do": "drop", "entries": ["c.2"], "reason": {"t": reason.digest.hex()}},
        {"do": "clamp", "message": "c.1", "path": "/content", "start": 0, "end": 10, "reason": {"t": odd.digest.hex()}},
        {"do": "replace", "message": "c.5", "path": '/k~1e~0y"/0', "start": 0, "end": 4, "reason": "plain"}
        | {"text": {"t": other.digest.hex()}},
        {"do": "digest", "entries": ["c.3"], "max_tokens": 9, "reason": "r", "instruction": {"t": reason.digest.hex()}},
        {"do": "clamp", "message": "c.4", "path": "/content/0/text", "start": 2, "end": 1202, "reason": "r"},
    ]
    spans = [
        ["c.2", "", 0, 60, 0, 7],
        ["c.1", "/content", 0, 10, 1, 4],
        ["c.5", '/k~1e~0y"/0', 0, 4, 2, 1],
        ["c.3", "", 0, 400, 3, 100],
        ["c.4", "/content/0/text", 2, 12, 4, 3],
    ]
    decision = committed(spans, plan, summaries=[{"t": summary.digest.hex()}])
    log.commit("c", 7, [decision], [reason, odd, other, summary])
    log.commit(
        "f", 0, [NewEvent("opened", AT, {**opened, "tools": None, "forked_from": {"conversation": "c", "seq": 8}})]
    )
    log.commit("f", 1, [committed([["c.1", "/content", 10, 12, 0, 1]], [{"do": "drop", "entries": [], "reason": "r"}])])
