"""Splicing in the engine: against masked attention, against a fresh prefill, and through long random conversations."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from compaction.engines import TransformersEngine
from compaction.engines.generation import TransformersGeneration
from compaction.errors import CannotSplice, EngineError
from tests.builders import assistant, system, user
from tests.fixtures_models import CROPPABLE, SLIDING, shared_tiny_engine, tiny_engine

Messages = list[dict[str, Any]]
ROTARY = tuple(family for family in CROPPABLE if family != "gpt2")
SUMMARY = user("[Summary] the fox said thank you")


def fresh(family: str) -> TransformersEngine:
    """The shared engine of a family, emptied: probing a template takes longer than most of these tests."""
    engine = shared_tiny_engine(family)
    engine.close()
    return engine


class Oracle:
    """Tokens in the order in which they were computed, what each of them saw, and where it stood then."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.ids: list[int] = []
        self.positions: list[int] = []
        self.seen: list[list[int]] = []
        self.alive: list[int] = []
        self.next = 0

    def feed(self, ids: Sequence[int], at: int | None = None) -> None:
        """Behind all that is alive; with `at`, behind the first so many only, and in front of the others."""
        before = self.alive[:at] if at is not None else list(self.alive)
        rest = self.alive[at:] if at is not None else []
        first = self.next if at is None else (self.positions[before[-1]] + 1 if before else 0)
        for offset, token in enumerate(ids):
            self.ids.append(token)
            self.positions.append(first + offset)
            before.append(len(self.ids) - 1)
            self.seen.append(list(before))
        self.alive = before + rest
        self.next = max(self.next, first + len(ids))

    def evict(self, start: int, end: int) -> None:
        """Nobody sees them any more."""
        del self.alive[start:end]

    def logits(self) -> torch.Tensor:
        """Of the last token, from one pass under the corresponding mask."""
        count = len(self.ids)
        bias = torch.full((count, count), torch.finfo(torch.float32).min)
        for row, seen in enumerate(self.seen):
            bias[row, seen] = 0.0
        keywords = {"attention_mask": bias[None, None], "position_ids": torch.tensor([self.positions])}
        with torch.no_grad():
            out = self.model(input_ids=torch.tensor([self.ids]), use_cache=False, **keywords)
        logits: torch.Tensor = out.logits[0, -1]
        return logits


def splice(engine: TransformersEngine, view: Messages, *, reply: int = 4, name: str = "c") -> TransformersGeneration:
    """One whole turn in splice mode."""
    generation = engine.generate(name, view, None, max_new_tokens=reply, apply="splice")
    for _ in generation:
        pass
    return generation


def applied(generation: TransformersGeneration) -> dict[str, Any]:
    """What the usage says was done."""
    if generation.result is None or generation.result.usage.applied is None:
        raise AssertionError("an ended reply says how the cache was brought there")
    return dict(generation.result.usage.applied)


def offsets(engine: TransformersEngine, view: Messages) -> list[int]:
    """Where each message begins, and where the last one ends, by rendering what stands before."""
    ends = [len(engine.template.ids(view[:end], None, generation_prompt=False)) for end in range(1, len(view) + 1)]
    return [0, *ends]


def tensors(engine: TransformersEngine, name: str = "c") -> list[torch.Tensor]:
    """Copies of everything a cache shows."""
    live = engine._conversations[name].live
    return [t.clone() for layer in live.layers for t in (layer.keys, layer.values) if isinstance(t, torch.Tensor)]


def check(engine: TransformersEngine, view: Messages, name: str = "c") -> None:
    """Ids, positions and layers agree with each other and with the view."""
    live = engine._conversations[name].live
    wanted = engine.template.ids(view, None)
    if live.ids[: len(wanted)] != wanted:
        raise AssertionError("the cache does not stand for the view")
    position = live.slot_map.position
    if any(a >= b for a, b in zip(position, [*position[1:], live.slot_map.next_position], strict=True)):
        raise AssertionError("positions do not rise")
    if live.slot_map.position[: live.clean] != list(range(live.clean)):
        raise AssertionError("clean slots are not where a prefill puts them")
    held = {layer.held for layer in live.layers}
    if held != {len(live)}:
        raise AssertionError(f"layers hold {held}, the map {len(live)}")


@contextmanager
def trained(engine: TransformersEngine, tokens: int) -> Iterator[None]:
    """As if the model had been trained on so many positions."""
    before, engine._splicing._trained = engine._splicing._trained, tokens
    try:
        yield
    finally:
        engine._splicing._trained = before


def edited(talk: Messages) -> Messages:
    """Two messages gone, a clamped one, a summary between kept ones, one more gone."""
    clamped = {**talk[4], "content": talk[4]["content"][:8] + "[26 characters removed]"}
    return [talk[0], *talk[2:4], clamped, SUMMARY, *talk[7:]]


@pytest.mark.parametrize("family", CROPPABLE)
def test_several_edits_at_once_equal_masked_attention(family: str, talk: Messages) -> None:
    """Evicted, clamped and inserted messages in one turn: the logits of one pass under the corresponding mask."""
    engine = fresh(family)
    oracle, view = Oracle(engine.model), [*edited(talk), assistant("Yes."), user("And the dog?")]
    splice(engine, talk, reply=1)
    done = splice(engine, view)

    at, to = offsets(engine, talk), offsets(engine, view)
    ids, wanted = engine.template.ids(talk, None), engine.template.ids(view, None)
    oracle.feed(ids)
    oracle.evict(at[4], at[7])
    oracle.evict(at[1], at[2])
    oracle.feed(wanted[to[3] : to[5]], at=to[3])
    oracle.feed(wanted[len(oracle.alive) :])
    expected, said = oracle.logits(), applied(done)
    assert (said["how"], said["mode"], said["removal"]) == ("splice", "gap", "evicted")
    assert (said["evicted"], said["inserted"]) == (at[2] - at[1] + at[7] - at[4], to[5] - to[3])
    assert float((done.prompt_logits - expected).abs().max()) <= 1e-6 * max(1.0, float(expected.abs().max())) * 4
    check(engine, view)


@pytest.mark.parametrize("family", CROPPABLE)
def test_the_oracle_tells_splice_from_exact(family: str, talk: Messages) -> None:
    """The comparison above has teeth: a fresh prefill of the same view differs by far more."""
    engine = fresh(family)
    splice(engine, talk, reply=1)

    spliced = splice(engine, edited(talk)).prompt_logits

    assert float((spliced - engine.logits(edited(talk))).abs().max()) > 1e-3


@pytest.mark.parametrize("family", ROTARY)
def test_what_goes_from_the_front_goes_exactly_in_compact_mode(family: str, talk: Messages) -> None:
    """Positions begin at 0 again, and logits are those of masked attention at the old ones."""
    engine = fresh(family)
    oracle, view = Oracle(engine.model), [*talk[3:], assistant("Yes."), user("And the dog?")]
    splice(engine, talk, reply=1)
    at, ids, wanted = offsets(engine, talk), engine.template.ids(talk, None), engine.template.ids(view, None)
    with trained(engine, len(ids)):
        done = splice(engine, view)

    oracle.feed(ids)
    oracle.evict(0, at[3])
    oracle.feed(wanted[len(oracle.alive) :])
    live = engine._conversations["c"].live
    assert (applied(done)["mode"], applied(done)["moved"]) == ("compact", len(ids) - at[3])
    assert live.slot_map.position == list(range(len(live))) and live.slot_map.most_shifts() == 1
    assert float((done.prompt_logits - oracle.logits()).abs().max()) <= 2e-5


@pytest.mark.parametrize("family", SLIDING)
def test_windows_are_compacted_like_everything_else(family: str, talk: Messages) -> None:
    """What went from the front went from every distance: compact and gap give the same logits, also in later turns."""
    views = [[*talk[3:], assistant("Yes."), user("And the dog?")]]
    views.append([*views[0], assistant("No."), user("And the quick brown fox?")])
    said = []
    for length in (1024, len(shared_tiny_engine(family).template.ids(talk, None))):
        engine = fresh(family)
        splice(engine, talk, reply=1)
        with trained(engine, length):
            said.append([splice(engine, view, reply=1) for view in views])

    gap, compact = said
    assert (applied(gap[0])["mode"], applied(compact[0])["mode"]) == ("gap", "compact")
    pairs = zip(gap, compact, strict=True)
    assert max(float((a.prompt_logits - b.prompt_logits).abs().max()) for a, b in pairs) < 2e-5


@pytest.mark.parametrize("family", CROPPABLE)
def test_a_splice_is_cheap_where_exact_is_not(family: str, talk: Messages) -> None:
    """Only what is new goes through the model, and the figures add up."""
    engine = fresh(family)
    splice(engine, talk, reply=1)
    view = [talk[0], *talk[2:], assistant("Yes."), user("And the dog?")]

    usage = splice(engine, view).result
    list(engine.generate("exact", talk, None, max_new_tokens=1))
    fallback = engine.generate("exact", view, None, max_new_tokens=4)
    list(fallback)

    new = len(engine.template.ids(view, None)) - len(engine.template.ids([talk[0], *talk[2:]], None))
    assert usage is not None and fallback.result is not None
    assert usage.usage.prefilled == new and usage.usage.prefilled + usage.usage.reused == usage.usage.prompt_tokens
    assert fallback.result.usage.prefilled > 3 * new
    assert usage.usage.peak_tokens == usage.usage.prompt_tokens + usage.usage.completion_tokens - 1


@pytest.mark.parametrize(
    ("family", "reason"), [("lfm2_conv", "state"), *((name, "window") for name in SLIDING)], ids=str
)
def test_what_cannot_be_spliced_is_exact_by_name(family: str, reason: str, talk: Messages) -> None:
    """States, and windows that no longer hold what is needed: the logits of a fresh prefill, and the reason."""
    engine = fresh(family)
    splice(engine, talk)

    done = splice(engine, edited(talk))

    assert applied(done)["how"] == "exact" and reason in applied(done)["refused"]
    assert applied(done)["removal"] == "purged"
    assert float((done.prompt_logits - engine.logits(edited(talk))).abs().max()) < 2e-5


def test_keys_that_cannot_be_turned_are_computed_afresh(talk: Messages) -> None:
    """Learned positions that would run out: exact, by name."""
    engine = fresh("gpt2")
    splice(engine, talk)
    with trained(engine, len(engine.template.ids(talk, None))):
        done = splice(engine, [*talk[:2], *talk[4:], assistant("Yes."), user("And the dog?")])

    view = [*talk[:2], *talk[4:], assistant("Yes."), user("And the dog?")]
    assert applied(done)["how"] == "exact" and "learned positions" in applied(done)["refused"]
    assert float((done.prompt_logits - engine.logits(view)).abs().max()) < 2e-5
    check(engine, view)


def test_other_tools_or_rules_are_prefilled(talk: Messages) -> None:
    """What follows another head was computed under other rules: nothing of it is kept in place."""
    engine = fresh("llama")
    splice(engine, [system("Be brief."), *talk])

    done = splice(engine, [system("Be long."), *talk])

    assert (applied(done)["how"], applied(done)["refused"]) == ("exact", "the system messages or tools have changed")
    assert float((done.prompt_logits - engine.logits([system("Be long."), *talk])).abs().max()) < 2e-5


def test_exact_after_splice_trusts_nothing_that_was_edited(tiny: TransformersEngine, talk: Messages) -> None:
    """The next turn may be exact: what carries traces is computed afresh, and the reason is given."""
    splice(tiny, talk)
    splice(tiny, edited(talk))
    done = tiny.generate("c", edited(talk), None, max_new_tokens=2)
    list(done)

    assert done.result is not None and done.result.usage.why == "spliced"
    assert float((done.prompt_logits - tiny.logits(edited(talk))).abs().max()) < 2e-5
    assert tiny._conversations["c"].live.slot_map.position == list(range(len(tiny.cached_ids("c"))))


@pytest.mark.parametrize("family", CROPPABLE)
def test_purging_equals_a_fresh_prefill(family: str, talk: Messages) -> None:
    """After a purge nothing carries traces: keys and values are those of a prefill of the same ids."""
    engine = fresh(family)
    splice(engine, talk)
    splice(engine, edited(talk), reply=6)
    spliced = tensors(engine)

    again = engine.purge("c")

    ids, live = engine.cached_ids("c"), engine._conversations["c"].live
    pure_cache = engine._new_live()
    engine._prefill(pure_cache, list(ids))
    pure = [t for layer in pure_cache.layers for t in (layer.keys, layer.values)]
    assert 0 < again < len(ids) and live.dirty_from is None and live.slot_map.position == list(range(len(ids)))
    assert max(float((a - b).abs().max()) for a, b in zip(tensors(engine), pure, strict=True)) < 1e-5
    assert max(float((a - b).abs().max()) for a, b in zip(spliced, pure, strict=True)) > 1e-3
    assert engine.purge("c") == 0


def test_purging_a_window_prefills_all(talk: Messages) -> None:
    """Sliding layers cannot be cut back: the whole cache is computed afresh."""
    engine = fresh("gemma3_hybrid")
    splice(engine, talk, reply=1)
    done = splice(engine, [*talk[:2], *talk[4:], assistant("Yes."), user("And the dog?")])
    assert applied(done)["how"] == "splice"

    assert engine.purge("c") == len(engine.cached_ids("c"))
    assert engine.divergence("c").kl < 1e-9


@pytest.mark.parametrize("family", ["llama", "gemma3_hybrid"])
def test_divergence_is_measured_and_leaves_no_trace(family: str, talk: Messages) -> None:
    """Zero for an exact cache, more for a spliced one; not a bit of the cache changes, nor what is said next."""
    engine, other = fresh(family), tiny_engine(family)
    view = [*talk[:2], *talk[4:], assistant("Yes."), user("And the dog?")]
    for each in (engine, other):
        splice(each, talk, reply=1)
    exact = engine.divergence("c", tokens=5)
    for each in (engine, other):
        splice(each, view, reply=3)
    before, rows = tensors(engine), engine.cached_ids("c")

    found = engine.divergence("c", tokens=5)

    longer = [*view, assistant("No."), user("Why?")]
    assert exact.kl < 1e-9 < 1e-5 < found.kl and exact.top1 == 1.0 and (found.tokens, exact.tokens) == (5, 5)
    assert all(map(torch.equal, before, tensors(engine))) and engine.cached_ids("c") == rows
    assert torch.equal(splice(engine, longer).prompt_logits, splice(other, longer).prompt_logits)


def test_divergence_needs_something_to_compare(tiny: TransformersEngine, talk: Messages) -> None:
    """No conversation, and a reply that still runs, are refused."""
    with pytest.raises(EngineError, match="holds nothing"):
        tiny.divergence("nobody")
    running = tiny.generate("c", talk, None, max_new_tokens=4, apply="splice")

    with pytest.raises(EngineError, match="still generating"):
        tiny.divergence("c")
    running.close()


def test_a_summary_comes_out_of_the_live_cache(tiny: TransformersEngine, talk: Messages) -> None:
    """It says what a fresh prefill of the same request says, reads almost nothing, and leaves every bit as it was."""
    splice(tiny, talk, reply=3)
    before, rows, dirty = tensors(tiny), tiny.cached_ids("c"), tiny._conversations["c"].live.dirty_from
    asked = "Summarise what stands above."

    made = tiny.summarize("c", talk, None, asked, need=5, max_new_tokens=8, limit=400)

    assert made.ids == tiny.complete([*talk[:5], user(asked)], max_new_tokens=8).ids
    assert made.usage.prefilled < 30 and made.usage.reused >= offsets(tiny, talk)[5]
    assert made.usage.peak_tokens <= made.usage.prompt_tokens + 8 <= 400
    assert all(map(torch.equal, before, tensors(tiny)))
    assert (tiny.cached_ids("c"), tiny._conversations["c"].live.dirty_from) == (rows, dirty)
    check(tiny, talk)


def test_a_window_is_asked_behind_all_it_holds(talk: Messages) -> None:
    """Sliding layers cannot go back to an earlier place: the instruction comes last, and the window is as before."""
    engine = fresh("gemma3_hybrid")
    splice(engine, talk, reply=1)
    before = tensors(engine)

    made = engine.summarize("c", [*talk, assistant("Yes.")], None, "Summarise.", need=4, max_new_tokens=8, limit=400)

    assert made.ids == engine.complete([*talk, assistant("Yes."), user("Summarise.")], max_new_tokens=8).ids
    assert all(map(torch.equal, before, tensors(engine)))


@pytest.mark.parametrize(("limit", "need"), [(60, 5), (400, 40)])
def test_a_summary_that_does_not_fit_is_refused(
    tiny: TransformersEngine, talk: Messages, limit: int, need: int
) -> None:
    """Too long for the limit, or of messages nobody has: refused before anything is fed."""
    splice(tiny, talk)
    before = tensors(tiny)
    with pytest.raises(CannotSplice):
        tiny.summarize("c", talk, None, "Summarise.", need=need, max_new_tokens=8, limit=limit)

    assert all(map(torch.equal, before, tensors(tiny)))


def test_a_cancelled_reply_after_a_splice_leaves_the_prompt(tiny: TransformersEngine, talk: Messages) -> None:
    """Cut off in the middle, the cache holds the spliced prompt, and the next turn goes on from there."""
    splice(tiny, talk)
    running = tiny.generate("c", edited(talk), None, max_new_tokens=9, apply="splice")
    next(iter(running))
    running.close()

    check(tiny, edited(talk))
    assert len(tiny.cached_ids("c")) == len(tiny.template.ids(edited(talk), None))
    again = splice(tiny, edited(talk))
    assert applied(again)["how"] == "splice" and again.result is not None
    assert torch.allclose(again.prompt_logits, running.prompt_logits, atol=1e-5)


def test_a_broken_splice_is_made_good(tiny: TransformersEngine, talk: Messages) -> None:
    """An error while a block is encoded leaves a cache that the next turn can be trusted with."""
    splice(tiny, talk)

    def fail(*_: Any) -> None:
        raise RuntimeError("injected")

    handle = tiny.model.model.layers[2].register_forward_hook(fail)
    with pytest.raises(RuntimeError):
        splice(tiny, edited(talk))
    handle.remove()
    done = tiny.generate("c", edited(talk), None, max_new_tokens=2)
    list(done)

    assert float((done.prompt_logits - tiny.logits(edited(talk))).abs().max()) < 2e-5


def conversation(seed: int, turns: int) -> Iterator[tuple[Messages, int]]:
    """Views of a conversation whose policy drops, clamps, summarises at random, and how long each reply may be."""
    rng = random.Random(seed)
    view: Messages = [system("Be brief.")]
    for turn in range(turns):
        view = [*view, user(f"question {turn}: " + "the fox and the dog " * rng.randint(0, 4))]
        yield list(view), rng.randint(1, 6)
        view.append(assistant(f"answer {turn} " + "thank you " * rng.randint(0, 3)))
        if len(view) > 8:
            keep = [view[0], *(m for m in view[1:-1] if rng.random() < 0.6), view[-1]]
            at = rng.randrange(1, len(keep))
            if rng.random() < 0.5:
                keep.insert(at, user(f"[Summary {turn}] " + "the order " * rng.randint(1, 5)))
            elif len(keep) > 2:
                keep[at] = {**keep[at], "content": keep[at]["content"][:6] + "[cut]"}
            view = keep


def test_long_conversations_stay_consistent() -> None:
    """Thirty turns with a trained length of three prompts: ids, positions, layers, figures and drift budget hold."""
    engine = tiny_engine("llama", drift_budget=1)
    said = []
    with trained(engine, 330):
        for seed in range(2):
            for view, reply in conversation(seed, 30):
                done = splice(engine, view, reply=reply, name=str(seed))
                check(engine, view, str(seed))
                usage = done.result.usage if done.result else None
                live = engine._conversations[str(seed)].live
                assert usage is not None and usage.prefilled + usage.reused == usage.prompt_tokens
                assert usage.peak_tokens <= usage.prompt_tokens + usage.completion_tokens
                assert live.slot_map.next_position <= 330 and live.slot_map.most_shifts() <= 1
                said.append(applied(done))

    assert {a.get("mode") for a in said} >= {"gap", "compact"} and any(a.get("reanchored") for a in said)
    assert not any(a.get("refused") for a in said)


def test_equal_conversations_are_equal_to_the_bit() -> None:
    """Two engines told the same views hold the same bits in the same places."""
    one, two = tiny_engine("llama"), tiny_engine("llama")
    for engine in (one, two):
        for view, reply in conversation(7, 14):
            splice(engine, view, reply=reply)

    assert all(map(torch.equal, tensors(one), tensors(two)))
    assert one._conversations["c"].live.slot_map == two._conversations["c"].live.slot_map


def test_memory_stays_within_what_the_turn_needs(talk: Messages) -> None:
    """At rest no more is held than prompt and reply need; while a block is encoded, one layer stands twice."""
    engine = fresh("llama")
    splice(engine, talk, reply=1)
    done = splice(engine, [*edited(talk), assistant("Yes."), user("And the dog?")], reply=4)
    usage = done.result.usage if done.result else None

    slot = engine.kv_bytes_per_token
    room = (usage.prompt_tokens + 4) * slot if usage else 0
    assert usage is not None and usage.kv_bytes is not None and usage.peak_kv_bytes is not None
    assert usage.kv_bytes <= room and engine.kv_bytes("c") == usage.kv_bytes
    block, layer = applied(done)["inserted"] * slot, room // 4
    assert room < usage.peak_kv_bytes <= room + block + layer + layer // 2  # half a layer: keys or values that grow


@pytest.mark.model
def test_smollm2_through_a_conversation(smollm2: TransformersEngine) -> None:
    """On the real model: a spliced turn says much what exact says, and a purge takes the rest of the difference out."""
    talk = [
        system("You answer briefly."),
        user("My order number is 7712. " + "It was late. " * 20),
        assistant("Noted: 7712."),
        user("The parcel was green, and the street is Elm Street."),
        assistant("Green, Elm Street."),
        user("What is my order number?"),
    ]
    splice(smollm2, talk, reply=4)
    view = [*talk[:2], SUMMARY, *talk[3:], assistant("7712."), user("And the street?")]

    done = splice(smollm2, view, reply=4)

    check(smollm2, view)
    before = smollm2.divergence("c")
    assert applied(done)["how"] == "splice" and 0 < before.kl < 0.5
    assert smollm2.purge("c") > 0 and smollm2.divergence("c").kl < 1e-6
