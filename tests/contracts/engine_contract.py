"""What every engine must do, whatever runs behind it. Subclass `EngineContract` and provide an `engine` fixture.

    class TestMine(EngineContract):
        @pytest.fixture
        def engine(self): return MyEngine(...)

Set `holds_cache = False` for an engine whose KV cache lives elsewhere, `deterministic = False` for one that samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from compaction.errors import EngineError
from compaction.ports import Engine, Generated, Generation

Messages = list[dict[str, Any]]
REASONS = {"", "first", "compaction", "edited", "template", "retokenized", "uncroppable", "spliced"}
HELLO: Messages = [{"role": "user", "content": "Tell me about the quick brown fox."}]


def finish(generation: Generation) -> Generated:
    """Run a reply to its end."""
    for _ in generation:
        pass
    if generation.result is None:
        raise AssertionError("a generation that has been iterated to its end has no result")
    return generation.result


def answered(messages: Messages, reply: Generated, question: str) -> Messages:
    """The conversation one turn on."""
    return [*messages, {"role": "assistant", "content": reply.text}, {"role": "user", "content": question}]


def say(engine: Engine, conversation: str, messages: Messages) -> tuple[int, ...]:
    """The ids of a short reply."""
    return finish(engine.generate(conversation, messages, None, max_new_tokens=5)).ids


class EngineContract:
    """One behaviour a test. Conversation ids are free for the engine under test."""

    holds_cache = True
    deterministic = True

    def test_pieces_join_to_the_text(self, engine: Engine) -> None:
        """What is streamed is what was said."""
        generation = engine.generate("c", HELLO, None, max_new_tokens=12)

        pieces = list(generation)

        assert generation.result is not None and "".join(pieces) == generation.result.text

    def test_usage_adds_up(self, engine: Engine) -> None:
        """Every prompt token was either prefilled or reused, and there are as many as the counter says."""
        result = finish(engine.generate("c", HELLO, None, max_new_tokens=4))

        usage = result.usage
        counted = engine.counter.request(HELLO, None)
        assert usage.prefilled + usage.reused == usage.prompt_tokens == counted

    def test_a_reply_is_no_longer_than_asked(self, engine: Engine) -> None:
        """`max_new_tokens` bounds ids and forward passes; the last token sampled needs no pass of its own."""
        result = finish(engine.generate("c", HELLO, None, max_new_tokens=5))

        usage = result.usage
        assert len(result.ids) == usage.completion_tokens <= 5
        assert usage.peak_tokens <= usage.prompt_tokens + usage.completion_tokens

    def test_every_prefill_has_a_stated_reason(self, engine: Engine) -> None:
        """A first turn, a further one, a compacted one and an edited one each name one of the documented reasons."""
        first = finish(engine.generate("c", HELLO, None, max_new_tokens=4))
        longer = answered(HELLO, first, "And the dog?")
        turns: Sequence[Messages] = [longer, longer[2:], [{"role": "user", "content": "Something else."}]]

        reasons = [first.usage.why, *(finish(engine.generate("c", t, None, max_new_tokens=2)).usage.why for t in turns)]

        assert set(reasons) <= REASONS and reasons[0] == "first"

    def test_the_next_turn_reuses_the_prompt(self, engine: Engine) -> None:
        """A conversation that only grows is not prefilled from the start again."""
        if not self.holds_cache:
            pytest.skip("the cache lives elsewhere")
        first = finish(engine.generate("c", HELLO, None, max_new_tokens=4))

        second = finish(engine.generate("c", answered(HELLO, first, "And the dog?"), None, max_new_tokens=2))

        assert second.usage.reused >= first.usage.prompt_tokens

    def test_the_same_request_gives_the_same_reply(self, engine: Engine) -> None:
        """A retry, in the same conversation or another one, says the same."""
        if not self.deterministic:
            pytest.skip("samples")

        replies = [finish(engine.generate(c, HELLO, None, max_new_tokens=6)).text for c in ("a", "a", "b")]

        assert len(set(replies)) == 1

    def test_a_reply_can_be_forgotten(self, engine: Engine) -> None:
        """Forgetting takes the reply's bytes out, twice as well as once, and the same turn can be asked again."""
        one = finish(engine.generate("c", HELLO, None, max_new_tokens=1))  # one token: the cache is the prompt alone
        prompt_bytes = engine.kv_bytes("c")
        engine.forget_reply("c")
        finish(engine.generate("c", HELLO, None, max_new_tokens=6))

        engine.forget_reply("c")
        engine.forget_reply("c")

        again = finish(engine.generate("c", HELLO, None, max_new_tokens=1))
        assert (engine.kv_bytes("c"), again.ids) == (prompt_bytes, one.ids if self.deterministic else again.ids)

    def test_closing_cancels(self, engine: Engine) -> None:
        """`close()` ends a running reply as cancelled, with what was said so far."""
        generation = engine.generate("c", HELLO, None, max_new_tokens=50)
        pieces = iter(generation)
        said = next(pieces, "")

        generation.close()
        generation.close()

        assert generation.result is not None and generation.result.finish_reason in {"cancelled", "stop"}
        assert generation.result.text.startswith(said)

    def test_leaving_the_loop_frees_the_conversation(self, engine: Engine) -> None:
        """A reply abandoned half way does not block the next turn."""
        for _ in engine.generate("c", HELLO, None, max_new_tokens=50):
            break

        assert finish(engine.generate("c", HELLO, None, max_new_tokens=2)).usage.completion_tokens >= 1

    def test_what_exceeds_the_window_is_refused(self, engine: Engine) -> None:
        """Prompt + reply over the window raise before anything is computed, and the conversation stays as it was."""
        finish(engine.generate("c", HELLO, None, max_new_tokens=2))
        before = engine.kv_bytes("c")

        with pytest.raises(EngineError):
            engine.generate("c", HELLO, None, max_new_tokens=engine.window.tokens)

        assert engine.kv_bytes("c") == before

    def test_release_frees_the_cache(self, engine: Engine) -> None:
        """A released conversation holds nothing; its next turn is a first one."""
        finish(engine.generate("c", HELLO, None, max_new_tokens=2))

        engine.release("c")

        assert engine.kv_bytes("c") == 0
        assert finish(engine.generate("c", HELLO, None, max_new_tokens=2)).usage.why in REASONS - {""}

    def test_unknown_conversations_hold_nothing(self, engine: Engine) -> None:
        """Asking about, forgetting or releasing a conversation that never was is no error."""
        engine.forget_reply("nobody")
        engine.release("nobody")

        assert engine.kv_bytes("nobody") == 0

    def test_complete_leaves_no_trace(self, engine: Engine) -> None:
        """A reply outside any conversation leaves the others' caches as they were."""
        finish(engine.generate("c", HELLO, None, max_new_tokens=2))
        before = engine.kv_bytes("c")

        result = engine.complete([{"role": "user", "content": "Summarise this."}], max_new_tokens=4)

        assert result.finish_reason in {"stop", "length"} and engine.kv_bytes("c") == before

    def test_messages_stay_untouched(self, engine: Engine) -> None:
        """An engine renders what it is given and changes none of it."""
        messages = [{"role": "system", "content": "Be brief."}, *HELLO]
        copy = [dict(message) for message in messages]

        finish(engine.generate("c", messages, None, max_new_tokens=2))

        assert messages == copy

    def test_many_threads_share_one_model(self, engine: Engine) -> None:
        """Conversations that run at the same time say what they say alone."""
        asked = {f"c{n}": [{"role": "user", "content": f"Count to {n} for the fox."}] for n in range(4)}
        alone = {c: say(engine, f"{c}-alone", m) for c, m in asked.items()}

        with ThreadPoolExecutor(4) as pool:
            running = {c: pool.submit(say, engine, c, m) for c, m in asked.items()}
            together = {c: future.result() for c, future in running.items()}

        assert together == alone or not self.deterministic

    def test_what_it_says_of_itself_is_usable(self, engine: Engine) -> None:
        """Name, window and bytes per token are there before the first turn."""
        assert engine.name and engine.window.tokens > 0 and engine.kv_bytes_per_token >= 0
