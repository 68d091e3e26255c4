"""Reading recorded conversations: what is accepted, and that each fault is one line with file and line number."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compaction.errors import InvalidTranscript
from compaction.transcripts import Transcript, read
from tests.builders import tool_batch, user
from tests.strategies import conversations

HELLO = [user("hello")]


def write(path: Path, *lines: Any) -> Path:
    """A file with one JSON value a line, packed where its name says so."""
    data = "".join(json.dumps(line) + "\n" for line in lines).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def problem(path: Path) -> InvalidTranscript:
    """What reading the file raises."""
    with pytest.raises(InvalidTranscript) as caught:
        list(read(path))
    return caught.value


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_one_conversation_a_line(tmp_path: Path, name: str) -> None:
    """JSON lines, packed or not, hold one conversation each, under its own id."""
    path = write(tmp_path / name, {"id": "x", "messages": HELLO, "reward": 1}, {"id": 7, "messages": []})

    assert list(read(path)) == [Transcript("x", tuple(HELLO), 1), Transcript("7", (), 2)]


def test_tools_are_kept(tmp_path: Path) -> None:
    """Tool schemas recorded with a conversation come along."""
    path = write(tmp_path / "a.jsonl", {"id": "x", "messages": HELLO, "tools": [{"type": "function"}]})

    assert next(read(path)).tools == ({"type": "function"},)


def test_bare_list_is_called_after_file_and_line(tmp_path: Path) -> None:
    """A bare list of messages takes its id from the file's name and the line's number, blank lines counted."""
    path = tmp_path / "tau.v1.jsonl"
    path.write_text(f"{json.dumps(HELLO)}\n\n{json.dumps(HELLO)}")

    assert [(item.id, item.line) for item in read(path)] == [("tau.v1-1", 1), ("tau.v1-3", 3)]


@pytest.mark.parametrize(
    ("value", "ids"),
    [
        (HELLO, ["a-1"]),
        ({"messages": HELLO}, ["a-1"]),
        ({"id": "x", "messages": HELLO}, ["x"]),
        ([{"id": "x", "messages": HELLO}, {"messages": HELLO}], ["x", "a-2"]),
        ([HELLO, HELLO], ["a-1", "a-2"]),
        ([], []),
    ],
)
def test_json_holds_one_or_several(tmp_path: Path, value: Any, ids: list[str]) -> None:
    """A .json file is one conversation as object or list of messages, or a list of conversations."""
    path = tmp_path / "a.json"
    path.write_text(json.dumps(value, indent=2))

    assert [item.id for item in read(path)] == ids


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.jsonl.gz"])
def test_empty_file_holds_no_conversation(tmp_path: Path, name: str) -> None:
    """An empty file is no error: there is nothing in it."""
    path = write(tmp_path / name)

    assert list(read(path)) == []


def test_byte_order_mark_is_no_content(tmp_path: Path) -> None:
    """A UTF-8 byte order mark, as Windows editors write it, is skipped."""
    path = tmp_path / "a.json"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(HELLO).encode())

    assert next(read(path)).messages == tuple(HELLO)


@pytest.mark.parametrize(
    ("raw", "line", "reason"),
    [
        (b'{"id": "x"}', 1, "messages: Field required"),
        (b'{"id": "", "messages": []}', 1, "id: String should have at least 1 character"),
        (b'{"messages": "hello"}', 1, "messages: Input should be a valid list"),
        (b'{"messages": [], "tools": {}}', 1, "tools: Input should be a valid list"),
        (b'[]\n\n"hello"', 3, "a conversation is an object with messages, or a list of messages"),
        (b"[]\n{", 2, "not JSON: Expecting property name enclosed in double quotes"),
        (b'[]\n{"messages": [{"role": "user"\n', 2, "not JSON: Expecting ',' delimiter at column 30"),
        (b'{"messages": [\r\n]}\r\n', 1, "not JSON: Expecting value at column 15"),
        (b'[]\n["a\xff"]', 2, "not UTF-8: 0xff is byte 4 of the line"),
        (b'[{"role": "user", "content": NaN}]', 1, "not JSON: NaN is no JSON number"),
        (b'{"messages": [], "tools": [{"x": -Infinity}]}', 1, "not JSON: -Infinity is no JSON number"),
        (b'{"messages": [], "tools": [{"x": 1e999}]}', 1, "tools: not JSON: Out of range float values"),
        (b'[{"role": "user", "content": "a", "content": "b"}]', 1, "key 'content' stands twice in one object"),
        (b'[{"role": "user"}, {"role": "wizard"}]', 1, "message 1: role 'wizard' is unknown"),
        (b'[{"role": "user"}, 5]', 1, "message 1: a message is a JSON object with a role, not int"),
        (b'[{"role": "tool", "content": "x"}]', 1, "message 0: a tool message needs the tool_call_id"),
        (b"[" * 100_000, 1, "not JSON: "),
        (b'[{"role": "user", "x": ' + b"9" * 5_000 + b"}]", 1, "not JSON: "),
    ],
)
def test_what_is_wrong_is_said_in_one_line(tmp_path: Path, raw: bytes, line: int, reason: str) -> None:
    """A malformed line is refused with file, line number and reason, in a message of one line."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(raw)

    error = problem(path)

    assert (str(error).startswith(f"{path}:{line}: "), reason in error.reason, "\n" in str(error)) == (
        True,
        True,
        False,
    )


def test_error_in_json_names_the_line_of_the_file(tmp_path: Path) -> None:
    """A .json file over several lines is refused with the line the fault is on."""
    path = tmp_path / "a.json"
    path.write_text('[\n  {"role": "user"},\n  {"role": }\n]')

    assert problem(path).line == 3


def test_undecodable_byte_in_json_names_the_line_of_the_file(tmp_path: Path) -> None:
    """A byte that is no UTF-8 is placed by line and byte, also in a .json file."""
    path = tmp_path / "a.json"
    path.write_bytes(b'[\n {"role": "user", "content": "\xe9"}\n]')

    assert str(problem(path)) == f"{path}:2: not UTF-8: 0xe9 is byte 31 of the line"


def test_error_in_a_list_of_conversations_names_the_place(tmp_path: Path) -> None:
    """In a list of conversations the faulty one is counted from 1."""
    path = write(tmp_path / "a.json", [{"messages": HELLO}, {"messages": [{"role": "wizard"}]}])

    assert problem(path).reason.startswith("conversation 2: message 0: role 'wizard' is unknown")


def test_good_lines_before_a_bad_one_are_yielded(tmp_path: Path) -> None:
    """Reading streams: what precedes the fault has been handed out before it is found."""
    path = write(tmp_path / "a.jsonl", {"id": "good", "messages": HELLO}, 5)
    conversations = read(path)

    assert next(conversations).id == "good"


def test_truncated_gzip_is_refused(tmp_path: Path) -> None:
    """A .gz that ends too early is refused instead of being taken for shorter."""
    path = write(tmp_path / "a.jsonl.gz", *[{"id": str(n), "messages": [user(str(n) * 99)]} for n in range(99)])
    path.write_bytes(path.read_bytes()[:-20])

    assert problem(path).reason.startswith("broken gzip data: ")


def test_plain_text_named_gz_is_refused(tmp_path: Path) -> None:
    """A file that only claims to be packed is refused by name."""
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(b"[]\n")

    assert problem(path).reason.startswith("broken gzip data: ")


def test_missing_file_is_refused(tmp_path: Path) -> None:
    """A path that leads nowhere is an InvalidTranscript like any other fault; it has no line to name."""
    path = tmp_path / "no.jsonl"

    assert str(problem(path)) == f"{path}: cannot be read: No such file or directory"


@pytest.mark.parametrize("name", ["d.json", "d.jsonl", "d.jsonl.gz"])
def test_directory_is_refused(tmp_path: Path, name: str) -> None:
    """A folder is no transcript, whatever it is called."""
    (tmp_path / name).mkdir()

    assert problem(tmp_path / name).reason == "cannot be read: Is a directory"


def test_unknown_suffix_is_refused(tmp_path: Path) -> None:
    """Other kinds of file are refused with the kinds there are."""
    assert str(problem(Path("-"))) == "-: unknown kind of file: use one of .jsonl.gz, .jsonl, .json"
    assert str(problem(tmp_path)) == f"{tmp_path}: a folder: use one of .jsonl.gz, .jsonl, .json"


@given(st.lists(conversations(), max_size=3))
def test_what_is_written_is_what_is_read(tmp_path_factory: pytest.TempPathFactory, recorded: list[Any]) -> None:
    """Any legal conversation comes back equal, key order included."""
    path = write(tmp_path_factory.mktemp("t") / "a.jsonl.gz", *recorded)

    assert json.dumps([list(item.messages) for item in read(path)]) == json.dumps(recorded)


def test_orphan_results_are_read(tmp_path: Path) -> None:
    """Pairing is not this module's business: an excerpt may begin with a tool result."""
    excerpt = tool_batch([("call_1", "42")])[1:]
    path = write(tmp_path / "a.jsonl", excerpt)

    assert next(read(path)).messages == tuple(excerpt)


def test_recorded_data_is_read(shared_data: Path) -> None:
    """All 200 recorded airline conversations are legal transcripts."""
    assert sum(1 for _ in read(shared_data / "tau_bench_airline_gpt4o.jsonl.gz")) == 200
