"""A conversation at the keyboard: lines in, streamed replies out, slash commands between them.

Invariant: a line is durable in the log before anything is generated for it, and Ctrl-C during a reply ends that reply
and nothing else. Errors of one line are one line on stderr; the conversation goes on.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from compaction.cli.meter import meter
from compaction.cli.output import console, counted, mib, pairs, plain, say, table
from compaction.decide import Decision
from compaction.errors import CompactionError, InvalidInput
from compaction.prepared import Reply
from compaction.session import Session

__all__ = ["COMMANDS", "Talk", "lines"]

COMMANDS = {
    "/help": "this list",
    "/usage": "tokens, KV bytes, budget and floor now",
    "/history": "the messages, numbered, with what has left the context",
    "/pin [N]": "keep message N (default: your last one) byte for byte",
    "/unpin [N]": "let go of it again",
    "/compact": "compact now, down to the low mark",
    "/quit": "leave (so does Ctrl-D); the log keeps the conversation",
}


def lines(quiet: bool) -> Iterator[str]:
    """What the user types, or what stdin holds; ends at end of file."""
    if not sys.stdin.isatty():
        yield from (line.rstrip("\n") for line in sys.stdin)
        return
    import readline  # noqa: F401 - importing it gives `input` a history and line editing

    while True:
        try:
            yield input("" if quiet else "\nyou> ")
        except EOFError:
            return


@dataclass
class Talk:
    """One chat. `quiet`: nothing on stdout (for --json); `replies` and `errors` are what it comes to."""

    session: Session
    max_new_tokens: int
    quiet: bool = False
    replies: list[Reply] = field(default_factory=list)
    interrupted: int = 0
    errors: int = 0

    def __post_init__(self) -> None:
        self.out = console()
        self.limit = self.session.limits(self.max_new_tokens).limit
        self.session.on("after_compaction", lambda _, decision: self._tell(decision))

    def run(self, typed: Iterable[str]) -> None:
        """Answer line by line until /quit or the end."""
        for line in typed:
            if line.strip() in ("/quit", "/exit"):
                return
            if not line.strip():
                continue
            try:
                if line.startswith("/") and not line.startswith("//"):
                    self._command(*line.split(maxsplit=1))
                else:
                    self._turn(line.removeprefix("/"))
            except CompactionError as exc:
                self.errors += 1
                say(" ".join(f"error: {exc}".split()))

    # -- a turn -------------------------------------------------------------------------------------------------

    def _turn(self, text: str) -> None:
        self.session.append({"role": "user", "content": text})
        try:
            reply = self._streamed() if self.out.is_terminal and not self.quiet else self._plainly()
        except KeyboardInterrupt:
            self.interrupted += 1
            self._say("\n(interrupted: what came is in the log, not in the conversation)")
            return
        self.replies.append(reply)
        self._say(meter(self.session, self.limit))

    def _pieces(self, show: Callable[[str], None]) -> Reply:
        """Closing on the way out, so that a Ctrl-C between two pieces ends the reply in the session as well."""
        with closing(self.session.stream(max_new_tokens=self.max_new_tokens)) as pieces:
            while True:
                try:
                    show(next(pieces))
                except StopIteration as stop:
                    reply: Reply = stop.value
                    return reply

    def _plainly(self) -> Reply:
        if self.quiet:
            return self._pieces(lambda _: None)
        reply = self._pieces(lambda piece: print(_shown(piece), end="", flush=True))
        print(flush=True)
        return reply

    def _streamed(self) -> Reply:
        """The line being written and the meter below it stay live; finished lines move up."""
        from rich.console import Group
        from rich.live import Live
        from rich.text import Text

        line, written = "", 0
        with Live(console=self.out, transient=True, refresh_per_second=12) as live:

            def show(piece: str) -> None:
                nonlocal line, written
                written += 1
                *finished, line = (line + _shown(piece)).split("\n")
                for done in finished:
                    live.console.print(Text(done))
                live.update(Group(Text(line), Text(meter(self.session, self.limit, written), style="dim")))

            try:
                reply = self._pieces(show)
            finally:
                live.update(Text(""))
                live.console.print(Text(line))
        return reply

    def _tell(self, decision: Decision) -> None:
        gone = sum(span.tokens for span in decision.spans)
        self._say(
            f"(compacted: {decision.tokens_before:,} → {decision.tokens_after:,} tokens; "
            f"{counted(len(decision.spans), 'span')} with {gone:,} tokens are in the log)"
        )

    def _say(self, line: str) -> None:
        if not self.quiet:
            self.out.print(line, style="dim")

    # -- slash commands -----------------------------------------------------------------------------------------

    def _command(self, name: str, argument: str = "") -> None:
        known: dict[str, Callable[[str], None]] = {
            "/help": self._help,
            "/usage": self._usage,
            "/history": self._history,
            "/pin": self._pin,
            "/unpin": self._unpin,
            "/compact": self._compact,
        }
        if name not in known:
            raise InvalidInput(f"unknown command {name}: there are {', '.join(known)}, /quit; begin with // to say it")
        known[name](argument.strip())

    def _help(self, argument: str) -> None:
        del argument
        self._print(pairs("", COMMANDS.items()))

    def _usage(self, argument: str) -> None:
        del argument
        usage, floor = self.session.usage, self.session.state.floor()
        parts = ", ".join(f"{name} {tokens:,}" for name, tokens in floor.to_json().items() if tokens)
        rows: list[tuple[str, object]] = [
            ("tokens", f"{usage.tokens:,} of {self.limit:,}"),
            ("must stay", f"{floor.total:,} ({parts})"),
            ("KV cache", mib(usage.kv_bytes)),
            ("last turn", f"{usage.prefilled or 0:,} tokens prefilled, {usage.reused or 0:,} reused"),
            ("compactions", self.session.state.decisions),
        ]
        self._print(pairs("", rows))
        self._say(meter(self.session, self.limit))

    def _history(self, argument: str) -> None:
        del argument
        state = self.session.state
        pinned = {pin.message_id for pin in state.pins}
        rows = []
        for number, (id, message) in enumerate(state.history.items(), 1):
            entry = state.live.get(id)
            marks = ["gone" if entry is None else "clamped" if entry.edits else "", "pinned" if id in pinned else ""]
            text = plain(str(message.data.get("content") or message.text), 80)
            rows.append((number, message.role, " ".join(filter(None, marks)), text))
        self._print(table("", ("no", "role", "", "text"), rows, right=("no",)))

    def _pin(self, argument: str) -> None:
        number, id = self._message(argument)
        self.session.pin(id)
        self._say(f"(message {number} is pinned)")

    def _unpin(self, argument: str) -> None:
        number, id = self._message(argument)
        self.session.unpin(id)
        self._say(f"(message {number} is not pinned any more)")

    def _compact(self, argument: str) -> None:
        del argument
        if self.session.compact_now(max_new_tokens=self.max_new_tokens) is None:
            self._say("(nothing to compact)")

    def _message(self, argument: str) -> tuple[int, str]:
        """The message a number of /history names; without one, the last user message."""
        ids = list(self.session.state.history)
        if not argument and self.session.state.last_user is not None:
            return ids.index(self.session.state.last_user) + 1, self.session.state.last_user
        if not argument.isdecimal() or not 1 <= int(argument) <= len(ids):
            raise InvalidInput(f"no message {argument!r}: /history numbers them 1 to {len(ids)}")
        return int(argument), ids[int(argument) - 1]

    def _print(self, renderable: Any) -> None:
        if not self.quiet:
            self.out.print(renderable)


def _shown(piece: str) -> str:
    """A piece of a reply without control characters; line ends stay."""
    return "".join(c if c in "\n\t" or c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in piece)
