"""Many conversations of one engine under one budget: same answers, never too many bytes, and nobody waits for ever."""

from __future__ import annotations

import random
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from compaction import Budget, SessionManager
from compaction.engines import TransformersEngine
from compaction.engines.pooling import PooledCache
from compaction.errors import EngineError, InvalidBudget, InvalidInput, PoolFull
from compaction.kv import arena
from compaction.kv.measure import storage_bytes
from compaction.kv.residency import Pool
from compaction.policies import SlidingWindow
from tests.fixtures_models import tiny_engine

TRIED = ("llama", "deepseek_mla", "mistral_sliding", "gemma3_hybrid", "lfm2_conv")
ENGINES: dict[tuple[str, str], TransformersEngine] = {}
Messages = list[dict[str, Any]]
Answer = tuple[str, tuple[int, ...]]


def built(family: str, kind: str) -> TransformersEngine:
    """Each is built once: that takes longer than most tests."""
    if (family, kind) not in ENGINES:
        ENGINES[family, kind] = tiny_engine(family)
    return ENGINES[family, kind]


def plain(family: str = "llama") -> TransformersEngine:
    """An engine that has no pool."""
    return built(family, "plain")


def pooled(family: str = "llama") -> TransformersEngine:
    """One that a test may give a pool: it loses it afterwards."""
    return built(family, "pooled")


@pytest.fixture(autouse=True)
def afresh() -> Iterator[None]:
    """One thread for torch; engines are empty and have no pool."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    for engine in ENGINES.values():
        engine.close()
        engine.pool = None


class Allocations:
    """Bytes of the arenas that exist, looked at whenever one is made; counted apart from everything that is tested."""

    def __init__(self) -> None:
        self.now = self.peak = 0
        self._lock = threading.Lock()

    def watch(self, make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Stand in for what makes an arena."""

        def made(like: torch.Tensor, slots: int) -> torch.Tensor:
            tensor = make(like, slots)
            size = tensor.untyped_storage().nbytes()
            with self._lock:
                self.now += size
                self.peak = max(self.peak, self.now)
            weakref.finalize(tensor, self._gone, size)
            return tensor

        return made

    def _gone(self, size: int) -> None:
        with self._lock:
            self.now -= size


@pytest.fixture
def allocations(monkeypatch: pytest.MonkeyPatch) -> Allocations:
    """Counted from here on."""
    found = Allocations()
    monkeypatch.setattr(arena, "_empty", found.watch(arena._empty))
    return found


def text(conversation: int, turn: int) -> Messages:
    """What a conversation has come to before this turn's reply."""
    made: Messages = []
    for n in range(turn + 1):
        said = " ".join(f"the quick brown fox {conversation} {k * n}" for k in range(1 if n else 24))
        made.append({"role": "user", "content": f"{said}, thank you"})
        if n < turn:
            made.append({"role": "assistant", "content": f"a summary, number {n}"})
    return made


def answer(engine: TransformersEngine, conversation: int, turn: int, tokens: int = 6) -> Answer:
    """A reply, as text and ids."""
    generation = engine.generate(str(conversation), text(conversation, turn), None, max_new_tokens=tokens)
    list(generation)
    assert generation.result is not None
    return generation.result.text, generation.result.ids


def why(engine: TransformersEngine, conversation: int, turn: int) -> tuple[str, bool]:
    """Why tokens were prefilled, and whether some were not."""
    generation = engine.generate(str(conversation), text(conversation, turn), None, max_new_tokens=2)
    list(generation)
    assert generation.result is not None
    return generation.result.usage.why, generation.result.usage.reused > 0


def at_random(conversations: int, turns: int) -> list[tuple[int, int]]:
    """All turns of all conversations, each one's in order."""
    coming = {conversation: iter(range(turns)) for conversation in range(conversations)}
    drawn = [conversation for conversation in coming for _ in range(turns)]
    random.Random(7).shuffle(drawn)
    return [(conversation, next(coming[conversation])) for conversation in drawn]


def need(turn: int, conversations: int = 1, family: str = "llama") -> int:
    """Bytes of so many conversations at their longest, and what stands twice while one of them grows."""
    answer(plain(family), 10, turn)
    size = plain(family).kv_bytes("10")
    return conversations * size + size // 4


def held(engine: TransformersEngine) -> int:
    """Bytes of all caches of an engine, measured."""
    return sum(storage_bytes(item.live.layers) for item in engine._conversations.values())


def tensors(engine: TransformersEngine, conversation: int) -> list[torch.Tensor]:
    """Copies of all keys, values and states."""
    live = engine._conversations[str(conversation)].live
    assert isinstance(live, PooledCache)
    return list(live.pack().tensors.values())


@pytest.mark.parametrize(
    ("family", "tiers"),
    [*((family, "host") for family in TRIED), *(("gemma3_hybrid", tiers) for tiers in ("disk", "both", "text"))],
)
def test_everybody_answers_as_without_a_pool(family: str, tiers: str, allocations: Allocations, tmp_path: Path) -> None:
    """Seven conversations at random, room for two: the same ids, and never a byte too many."""
    budget = need(1, 2, family)
    below = {
        "host": Pool(budget, host="1GiB"),
        "disk": Pool(budget, disk=(tmp_path, "1GiB")),
        "both": Pool(budget, host=2 * budget, disk=(tmp_path, "1GiB")),
        "text": Pool(budget),
    }[tiers]
    order = at_random(7, 2)
    expected = [answer(plain(family), *item) for item in order]
    engine = pooled(family)
    pool = engine.use_pool(below)
    allocations.peak = allocations.now = 0
    found = []
    for item in order:
        found.append(answer(engine, *item))
        assert held(engine) <= pool.usage().device.bytes <= budget

    usage = pool.usage()
    assert found == expected
    assert allocations.peak <= usage.peak_bytes <= budget
    assert usage.parks >= 8 and usage.device.conversations >= 2
    assert {name for name, count in usage.restores.items() if count} == {
        "host": {"host"},
        "disk": {"disk"},
        "both": {"host", "disk"},
        "text": set(),
    }[tiers]
    engine.close()
    assert pool.usage().device.bytes == pool.usage().host.bytes == pool.usage().disk.bytes == 0
    assert list(tmp_path.rglob("*.safetensors")) == []


@pytest.mark.parametrize("family", ["llama", "gemma3_hybrid", "lfm2_conv"])
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_keys_and_values_come_back_bit_by_bit(family: str, tier: str, tmp_path: Path) -> None:
    """As do the tokens; only what is new goes through the model."""
    budget = need(2, 1, family)
    engine = pooled(family)
    engine.use_pool(Pool(budget, host="1GiB") if tier == "host" else Pool(budget, disk=(tmp_path, "1GiB")))
    answer(engine, 0, 2)
    before, ids = tensors(engine, 0), engine.cached_ids("0")
    answer(engine, 1, 2)
    assert engine.pool is not None
    away = engine.pool.where("0"), engine.kv_bytes("0"), engine.cached_ids("0")
    with engine._idle("0"):
        after, back = tensors(engine, 0), engine.cached_ids("0")

    assert away == (tier, 0, ()) and back == ids
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    engine.close()


def test_a_turn_that_cannot_fit_is_refused_before_anything_happens() -> None:
    """One clear error: nobody was parked, and the caches are what they were."""
    engine = pooled()
    pool = engine.use_pool(Pool(need(1, 2), host="1GiB"))
    answer(engine, 0, 1)
    answer(engine, 1, 1)
    before = [tensors(engine, 0), tensors(engine, 1)]
    with pytest.raises(PoolFull, match=r"may need [0-9,]+ bytes of KV cache and the pool has [0-9,]+: raise") as caught:
        engine.generate("2", text(2, 1), None, max_new_tokens=700)

    assert caught.value.needed > caught.value.budget > caught.value.busy == 0
    assert pool.usage().parks == 0 and pool.where("2") == "text"
    assert all(torch.equal(a, b) for n in (0, 1) for a, b in zip(before[n], tensors(engine, n), strict=True))
    assert answer(engine, 2, 1)[1]
    engine.close()


@pytest.mark.parametrize("conversations", [1, 2])
def test_a_shorter_turn_fits_where_the_longer_one_did(conversations: int, allocations: Allocations) -> None:
    """Moving to smaller arenas takes room for a moment: others are parked for it, else the arenas stay."""
    wanted, longest = [], 0
    for turn in (6, 2):
        wanted.append(answer(plain(), 0, turn))
        longest = longest or plain().kv_bytes("0")
    plain().close()
    allocations.peak = 0
    engine = pooled()
    pool = engine.use_pool(Pool(conversations * longest + longest // 20, host="1MiB"))
    for other in range(1, conversations):
        answer(engine, other, 6)

    assert [answer(engine, 0, turn) for turn in (6, 2)] == wanted
    assert pool.usage().parks == conversations - 1
    assert allocations.peak <= pool.budget.device_bytes


def test_a_running_reply_is_not_parked() -> None:
    """It goes on as if nobody else were there; a turn that does not fit beside it is refused and says why."""
    budget = need(2)
    expected = answer(plain(), 0, 2)
    engine = pooled()
    pool = engine.use_pool(Pool(budget, host="1GiB"))
    running = engine.generate("0", text(0, 2), None, max_new_tokens=6)
    pieces = iter(running)
    next(pieces)
    with pytest.raises(PoolFull, match="of running replies and pinned conversations: finish or close"):
        engine.generate("1", text(1, 2), None, max_new_tokens=6)
    with pytest.raises(EngineError, match="still generating"):
        engine.generate("0", text(0, 2), None, max_new_tokens=6)
    list(pieces)

    assert running.result is not None and (running.result.text, running.result.ids) == expected
    assert answer(engine, 1, 2)[1] and pool.where("0") == "host"
    engine.close()


def test_a_reply_that_is_given_up_makes_room() -> None:
    """Closed, cancelled by an error, or released."""
    engine = pooled()
    pool = engine.use_pool(Pool(need(3), host="1GiB"))
    engine.generate("0", text(0, 2), None, max_new_tokens=6).close()
    assert answer(engine, 1, 2)[1]
    engine.generate("0", text(0, 2), None, max_new_tokens=6)
    engine.release("0")
    assert answer(engine, 1, 2)[1]
    engine.generate("0", text(0, 2), None, max_new_tokens=6)
    engine.forget_reply("0")

    assert answer(engine, 1, 2)[1] and pool.where("0") == "host"
    engine.close()


def test_a_broken_pass_makes_room() -> None:
    """What was promised to a turn that failed is free again."""
    engine = pooled()
    pool = engine.use_pool(Pool(need(3), host="1GiB"))

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("broken")

    works, engine._forward.model.forward = engine._forward.model.forward, broken
    try:
        with pytest.raises(RuntimeError, match="broken"):
            engine.generate("0", text(0, 2), None, max_new_tokens=6)
    finally:
        engine._forward.model.forward = works

    assert answer(engine, 1, 2)[1] and pool.usage().device.conversations == 1
    engine.close()


def test_the_least_recently_used_goes_first_and_pins_stay() -> None:
    """A pinned conversation keeps its cache until it is unpinned."""
    engine = pooled()
    pool = engine.use_pool(Pool(need(1, 3), host="1GiB"))
    for conversation in (0, 1, 2, 0):
        answer(engine, conversation, 1)
    pool.pin("1")
    answer(engine, 3, 1)
    first = [pool.where(str(n)) for n in range(4)]
    pool.unpin("1")
    answer(engine, 4, 1)

    assert first == ["device", "device", "host", "device"]
    assert [pool.where(str(n)) for n in range(5)] == ["device", "host", "host", "device", "device"]
    engine.close()


def test_pins_that_fill_the_pool_refuse_others() -> None:
    """And are named in the error."""
    engine = pooled()
    pool = engine.use_pool(Pool(need(3), host="1GiB"))
    answer(engine, 0, 2)
    pool.pin("0")

    with pytest.raises(PoolFull, match="pinned"):
        answer(engine, 1, 2)
    engine.close()


def test_why_says_what_became_of_a_parked_cache(tmp_path: Path) -> None:
    """Restored: nothing to say. Gone, changed, or of another model: prefilled, with the reason."""
    engine = pooled()
    pool = engine.use_pool(Pool(need(3), disk=(tmp_path, "1GiB")))
    weight = engine.model.model.layers[1].self_attn.k_proj.weight
    found = {"new": why(engine, 0, 0)}
    why(engine, 1, 0)
    found["restored"] = why(engine, 0, 1)
    why(engine, 1, 1)
    (path,) = tmp_path.rglob("*.safetensors")
    path.write_bytes(path.read_bytes()[:-100])
    found["truncated"] = why(engine, 0, 2)
    why(engine, 1, 2)
    next(tmp_path.rglob("*.safetensors")).unlink()
    found["removed"] = why(engine, 0, 3)
    before = weight.detach().clone()
    with torch.no_grad():
        weight.mul_(1.01)
    try:
        found["other weights"] = why(engine, 1, 3)
    finally:
        with torch.no_grad():
            weight.copy_(before)

    assert found == {
        "new": ("first", False),
        "restored": ("edited", True),
        "truncated": ("corrupted", False),
        "removed": ("missing", False),
        "other weights": ("fingerprint", False),
    }
    assert pool.usage().refused == {"corrupted": 1, "missing": 1, "fingerprint": 1}
    engine.close()


def test_what_no_tier_could_keep_is_prefilled_and_says_so() -> None:
    """Text only: the answer is the same, the reason is "parked away"."""
    engine = pooled()
    pool = engine.use_pool(Pool(need(1)))
    expected = answer(plain(), 0, 1)
    answer(engine, 0, 0)
    answer(engine, 1, 0)
    where = pool.where("0")
    generation = engine.generate("0", text(0, 1), None, max_new_tokens=6)
    list(generation)

    assert generation.result is not None
    assert (generation.result.usage.why, where) == ("parked away", "text")
    assert (generation.result.text, generation.result.ids) == expected
    assert pool.usage().dropped == 2
    engine.close()


def test_a_reply_forgotten_while_it_is_parked_does_not_come_back() -> None:
    """Only the prompt counts when the cache is restored."""
    engine = pooled()
    engine.use_pool(Pool(need(3), host="1GiB"))
    answer(engine, 0, 2)
    prompt = engine._conversations["0"].prompt
    answer(engine, 1, 2)
    engine.forget_reply("0")
    with engine._idle("0"):
        back = len(engine.cached_ids("0"))

    assert back == prompt
    engine.close()


def test_what_was_forgotten_of_a_lost_cache_is_not_cut_off_the_next_one(tmp_path: Path) -> None:
    """The file is gone, the conversation prefilled and parked again: all of that comes back."""
    engine = pooled()
    engine.use_pool(Pool(need(4), disk=(tmp_path, "1GiB")))
    answer(engine, 0, 0)
    answer(engine, 1, 4)
    engine.forget_reply("0")
    next(tmp_path.rglob("*.safetensors")).unlink()
    answer(engine, 0, 4)
    whole = engine.cached_ids("0")
    answer(engine, 1, 4)
    assert not engine.cached_ids("0")

    with engine._idle("0"):
        assert engine.cached_ids("0") == whole


def test_a_turn_that_overtakes_a_release_leaves_nothing_parked(tmp_path: Path) -> None:
    """Between a release's two halves the conversation begins afresh: what was parked of the old one goes."""
    engine = pooled()
    pool = engine.use_pool(Pool(need(4), disk=(tmp_path, "1GiB")))
    answer(engine, 0, 0)
    answer(engine, 1, 4)
    assert pool.where("0") == "disk"
    old = engine._conversations.pop("0")
    answer(engine, 0, 0)
    pool.forget("0", old.live)  # type: ignore[arg-type]

    assert pool.where("0") == "device" and pool.usage().disk.conversations == (pool.where("1") == "disk")


def test_what_runs_outside_conversations_is_counted_too(allocations: Allocations) -> None:
    """A summariser's reply and a fresh prefill push others out, and leave nothing."""
    engine = pooled()
    budget = need(3, 2)
    pool = engine.use_pool(Pool(budget, host="1GiB"))
    allocations.peak = allocations.now = 0
    answer(engine, 0, 2)
    answer(engine, 1, 2)
    engine.complete(text(2, 3), max_new_tokens=6)
    engine.logits(text(3, 3))

    usage = pool.usage()
    assert allocations.peak <= usage.peak_bytes <= budget and usage.parks >= 1
    assert usage.device.bytes == held(engine)
    engine.close()


def test_releasing_removes_what_is_parked(tmp_path: Path) -> None:
    """In every tier, at once."""
    engine = pooled()
    pool = engine.use_pool(Pool(need(3), disk=(tmp_path, "1GiB")))
    answer(engine, 0, 1)
    answer(engine, 1, 1)
    before = len(list(tmp_path.rglob("*.safetensors")))
    engine.release("0")

    assert (before, list(tmp_path.rglob("*.safetensors")), pool.usage().disk.bytes) == (1, [], 0)
    assert why(engine, 0, 1) == ("first", False)
    engine.close()


@pytest.mark.timeout(120)
def test_threads_park_each_others_conversations(allocations: Allocations, tmp_path: Path) -> None:
    """Four threads, twelve conversations, room for five: same answers, never a byte too many, no deadlock."""
    budget = need(2, 5)
    expected = {(c, t): answer(plain(), c, t) for c in range(12) for t in range(2)}
    engine = pooled()
    pool = engine.use_pool(Pool(budget, host=2 * budget, disk=(tmp_path, "1GiB")))
    allocations.peak = allocations.now = 0
    wrong: list[object] = []

    def work(thread: int) -> None:
        rng = random.Random(thread)
        try:
            for turn in range(2):
                for conversation in rng.sample(range(thread, 12, 4), 3):
                    found = answer(engine, conversation, turn)
                    if found != expected[conversation, turn]:
                        wrong.append((conversation, turn, found))
                    engine.kv_bytes(str(rng.randrange(12)))
                    pool.usage()
                    if rng.random() < 0.2:
                        engine.release(str(conversation))
        except BaseException as exc:  # noqa: BLE001
            wrong.append(exc)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert wrong == []
    assert allocations.peak <= pool.usage().peak_bytes <= budget
    assert pool.usage().parks > 5 and pool.usage().device.bytes == held(engine)
    engine.close()


@pytest.mark.timeout(60)
def test_a_conversation_released_by_others_all_the_time_still_answers() -> None:
    """A turn that loses this race says so in one error; whatever is answered is right, and no byte stays promised."""
    engine = pooled()
    expected = answer(plain(), 0, 1)
    pool = engine.use_pool(Pool(need(3, 2), host="1GiB"))
    stop = threading.Event()

    def release() -> None:
        while not stop.is_set():
            engine.release("0")

    thread = threading.Thread(target=release)
    thread.start()
    answered = 0
    try:
        for _ in range(30):
            try:
                generation = engine.generate("0", text(0, 1), None, max_new_tokens=6)
                list(generation)
            except EngineError as exc:
                assert "released" in str(exc) or "ended" in str(exc)
                continue
            assert generation.result is not None
            if generation.result.finish_reason != "cancelled":
                answered += 1
                assert (generation.result.text, generation.result.ids) == expected
    finally:
        stop.set()
        thread.join()
    engine.release("0")

    assert pool.usage().device.bytes == 0 == held(engine)


def test_a_manager_takes_a_pool(tmp_path: Path) -> None:
    """Named in bytes or as tiers; its usage and pins are the manager's."""
    engine = pooled()
    budget = need(3, 2)
    manager = SessionManager(engine=engine, budget=Budget(tokens=400), pool=Pool(budget, disk=(tmp_path, "1MiB")))
    for name in ("a", "b", "c"):
        session = manager.session(name)
        session.append({"role": "user", "content": text(1, 1)[0]["content"]})
        session.generate(max_new_tokens=4)

    pool = manager.pool
    assert pool is not None
    assert [engine.pool] == [pool]
    assert pool.usage().device.budget == budget
    again = SessionManager(engine=engine, budget=Budget(tokens=400), pool=pool.budget)
    assert again.pool is pool
    with pytest.raises(InvalidInput, match="has a pool already"):
        SessionManager(engine=engine, budget=Budget(tokens=400), pool="1MiB")
    for name in ("a", "b", "c"):
        manager.release(name)
    assert list(tmp_path.rglob("*.safetensors")) == []


def test_a_pool_needs_an_engine_that_has_caches() -> None:
    """And figures that can be; without one, there is none."""
    with pytest.raises(InvalidInput, match="pool= needs an engine"):
        SessionManager(budget=Budget(tokens=400), pool="1MiB")
    with pytest.raises(InvalidBudget, match="cannot read"):
        SessionManager(engine=plain(), budget=Budget(tokens=400), pool="lots")
    engine = pooled()
    answer(engine, 0, 0)
    with pytest.raises(InvalidInput, match="before its first conversation"):
        engine.use_pool(Pool("1GiB"))

    assert SessionManager(engine=engine, budget=Budget(tokens=400)).pool is None


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_quantized_caches_are_parked_as_codes(tier: str, tmp_path: Path) -> None:
    """Converted in the pool, parked, restored: the same answers as without, and bytes within what was promised."""
    storage = "k8v4:sinks=2,window=8"
    order = at_random(4, 2)
    expected = []
    for engine, pool in ((plain(), None), (pooled(), need(1, 3))):
        if pool is not None:
            engine.use_pool(Pool(pool, host="1GiB") if tier == "host" else Pool(pool, disk=(tmp_path, "1GiB")))
        found = []
        for conversation, turn in order:
            found.append(answer(engine, conversation, turn))
            engine.quantize(str(conversation), storage)
            if engine.pool is not None:
                assert held(engine) <= engine.pool.usage().device.bytes <= engine.pool.usage().peak_bytes <= (pool or 0)
        expected.append(found)

    usage = pooled().pool.usage()  # type: ignore[union-attr]
    assert expected[0] == expected[1]
    assert usage.restores.get(tier, 0) >= 2 and not usage.refused


def test_a_full_pool_makes_room_for_what_is_put_between_kept_messages(allocations: Allocations) -> None:
    """A summary is encoded beside its cache: idle conversations are parked for that, and the turn is spliced."""
    before, after = text(0, 6), text(0, 6)
    after[3:6] = [{"role": "user", "content": "[Summary] " + "the fox said thank you, " * 12}]
    sizes = []
    for messages in (before, after):
        list(plain().generate("c", messages, None, max_new_tokens=4))
        sizes.append(plain().kv_bytes("c"))
    assert sizes[0] < sizes[1]
    plain().close()
    allocations.peak = 0
    engine = pooled()
    pool = engine.use_pool(Pool(sizes[0] + sizes[1] * 9 // 8, host="1MiB"))
    for name in ("other", "c"):
        list(engine.generate(name, before, None, max_new_tokens=4, apply="splice"))
    generation = engine.generate("c", after, None, max_new_tokens=4, apply="splice")
    list(generation)

    assert generation.result is not None and generation.result.usage.applied is not None
    applied = generation.result.usage.applied
    assert (applied["how"], applied["inserted"] > 0, pool.where("other")) == ("splice", True, "host"), applied
    assert allocations.peak <= pool.budget.device_bytes


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_spliced_conversations_are_parked_as_they_stand(tier: str, allocations: Allocations, tmp_path: Path) -> None:
    """Holes, moved keys and what is dirty come back: conversations cut in place say what they say without a pool."""
    size = 420 * plain().kv_bytes_per_token
    pool = Pool(size, host="1GiB") if tier == "host" else Pool(size, disk=(tmp_path, "1GiB"))
    said: list[list[tuple[str, int, dict[str, Any]]]] = []
    for engine, within in ((plain(), None), (pooled(), pool)):
        manager = SessionManager(
            engine=engine, budget=Budget(tokens=260), policy=SlidingWindow(), apply="splice", pool=within
        )
        allocations.peak = allocations.now = 0
        said.append([])
        for turn in range(6):
            for name in ("a", "b", "c"):
                session = manager.session(name)
                session.append({"role": "user", "content": f"{name} {turn}: the quick brown fox, thank you " * 3})
                reply = session.generate(max_new_tokens=4)
                said[-1].append((reply.text, reply.usage.prefilled, dict(reply.usage.applied or {})))

    pool_usage = manager.pool.usage() if manager.pool else None
    assert said[0] == said[1]
    assert sum(applied.get("how") == "splice" for *_, applied in said[1]) >= 6
    assert pool_usage is not None and pool_usage.restores[tier] >= 6
    assert allocations.peak <= pool_usage.peak_bytes <= size


def test_the_docs_example_runs(tmp_path: Path) -> None:
    """The first one of docs/residency.md, with a small model in the place of SmolLM2."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "residency.md").read_text("utf-8")
    code = page.split("```python\n")[1].split("```")[0]
    for said, here in (
        ('TransformersEngine("smollm2")', "engine"),
        ("/var/tmp/kv", str(tmp_path)),
        ("tokens=2048", "tokens=512"),
    ):
        assert said in code
        code = code.replace(said, here)
    names: dict[str, Any] = {"engine": pooled()}
    exec(code, names)

    assert names["manager"].pool.where("conversation-42") == "device"
