"""`compaction chat`: talk to a local model and watch its context."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from compaction.cli.talk import Talk
    from compaction.session import Session

__all__ = ["chat"]


@click.command(short_help="Talk to a local model, with a live meter of tokens, KV bytes and compactions.")
@click.option("--model", default="smollm2", show_default=True, help="smollm2, a local folder, or a hub id.")
@click.option("--budget", type=click.IntRange(min=1), default=2048, show_default=True, metavar="N",
              help="Tokens for prompt + reply.")  # fmt: skip
@click.option("--policy", metavar="P", help="name or name:param=value,… (default: default; see `compaction policies`).")
@click.option("--log", "log_path", metavar="DB", help="The audit log; resumes what it knows. Default: in memory.")
@click.option("--conversation", default="chat", show_default=True, metavar="NAME", help="Its name in the log.")
@click.option("--system", metavar="TEXT", help="A system message to begin with.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=256, show_default=True, help="Tokens a reply.")
@click.option("--apply", type=click.Choice(["exact", "splice"]), default="exact", show_default=True,
              help="exact: prefill what follows a cut; splice: edit the KV cache in place.")  # fmt: skip
@click.option("--device", help="cpu, cuda, mps; default: the best there is.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end, and nothing before.")
def chat(as_json: bool, system: str | None, conversation: str, **options: Any) -> int:
    """Talk to a local model; replies are streamed, with a live meter of tokens, KV bytes and compactions below.

    Each line is one message. Ctrl-C during a reply ends that reply only. A conversation the log knows is resumed. Lines
    may be piped in. /help lists the commands: /usage /history /pin /unpin /compact /quit; begin with // to say a slash.

    \b
    Examples:
      compaction chat --budget 1024 --log a.db
      compaction chat --log a.db --conversation trip --system "You are a travel agent." --policy summarize
      compaction chat --budget 512 --apply splice
      printf 'What is a KV cache?\\n' | compaction chat --max-new-tokens 40 --json

    \b
    JSON keys: conversation resumed_messages replies: [{text, finish_reason, usage}] interrupted errors
               tokens budget_tokens kv_bytes compactions log
    Exit code 2: some line could not be answered (each was one line on stderr).
    """
    from compaction.cli.opening import budget_of, engine_of, log_of, policy_of
    from compaction.cli.output import emit
    from compaction.cli.talk import Talk, lines
    from compaction.manager import SessionManager

    policy, budget = policy_of(options["policy"]), budget_of(options["budget"], None)
    with log_of(options["log_path"]) as log:
        engine = engine_of(options["model"], options["device"])
        manager = SessionManager(engine=engine, policy=policy, budget=budget, log=log, apply=options["apply"])
        session = manager.session(conversation)
        held = len(session.state.history)
        talk = Talk(session, options["max_new_tokens"], quiet=as_json)
        _begin(session, system)
        if not as_json:
            _greet(talk, held, options["log_path"])
        talk.run(lines(quiet=as_json))
        if as_json:
            emit(_to_json(talk, held, options["log_path"]))
    return 2 if talk.errors else 0


def _begin(session: Session, system: str | None) -> None:
    """The system message of a new conversation. Raises InvalidInput where it comes too late."""
    from compaction.errors import InvalidInput

    if system is None:
        return
    message = {"role": "system", "content": system}
    first = next(iter(session.state.history.values()), None)
    if first is None:
        session.append(message)
    elif first.data != message:
        raise InvalidInput(f"conversation {session.id!r} has begun: --system is for a new one (--conversation NAME)")


def _greet(talk: Talk, held: int, log_path: str | None) -> None:
    from compaction.cli.meter import meter
    from compaction.cli.output import plain

    name = plain(talk.session.id)
    went = f"resuming {name!r} with {held} messages" if held else f"new conversation {name!r}"
    talk.out.print(f"{went}; log: {log_path or 'in memory, gone when you leave'}; /help for commands")
    talk.out.print(meter(talk.session, talk.limit), style="dim")


def _to_json(talk: Talk, held: int, log_path: str | None) -> dict[str, Any]:
    usage = talk.session.usage
    return {
        "conversation": talk.session.id,
        "resumed_messages": held,
        "replies": [
            {"text": reply.text, "finish_reason": reply.finish_reason, "usage": reply.usage.to_json()}
            for reply in talk.replies
        ],
        "interrupted": talk.interrupted,
        "errors": talk.errors,
        "tokens": usage.tokens,
        "budget_tokens": talk.limit,
        "kv_bytes": usage.kv_bytes,
        "compactions": talk.session.state.decisions,
        "log": log_path,
    }
