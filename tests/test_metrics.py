"""Metrics against real sessions: exact counts, and a page that Prometheus' own parser reads."""

from __future__ import annotations

import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from compaction.budget import Budget
from compaction.engines import TransformersEngine
from compaction.errors import BudgetUnsatisfiable, InvalidInput, LogConflict, LogError
from compaction.kv.residency import Pool
from compaction.manager import SessionManager
from compaction.metrics import Metrics, WatchedLog
from compaction.policies import NoOp, SlidingWindow, Summarize
from compaction.ports import Summary, Usage
from compaction.store import AuditLog, MemoryLog
from compaction.testing import FakeCounter, ScriptedSummarizer
from tests.builders import assistant, system, user

pytest.importorskip("prometheus_client")

DOCS = Path(__file__).resolve().parent.parent / "docs" / "metrics.md"
Page = dict[tuple[str, frozenset[tuple[str, str]]], float]


def page(metrics: Metrics) -> Page:
    """The rendered text, read back: (name, labels) → value."""
    from prometheus_client.parser import text_string_to_metric_families

    families = text_string_to_metric_families(metrics.text())
    samples = [sample for family in families for sample in family.samples]
    return {(sample.name, frozenset(sample.labels.items())): sample.value for sample in samples}


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    """One sample; None where there is no such series."""
    return page(metrics).get((f"compaction_{name}", frozenset(labels.items())))


def series(metrics: Metrics, name: str) -> dict[str, float]:
    """All samples of a name, under the values of their labels."""
    found = {labels: number for (known, labels), number in page(metrics).items() if known == f"compaction_{name}"}
    return {" ".join(value for _, value in sorted(labels)): number for labels, number in found.items()}


def manager(metrics: Metrics, log: AuditLog | MemoryLog | None = None, **options: Any) -> SessionManager:
    """A manager that counts, for a model of the caller's own."""
    settings: dict[str, Any] = {"policy": SlidingWindow(), "budget": Budget(tokens=300), "counter": FakeCounter()}
    return metrics.attach(SessionManager(log=log, **{**settings, **options}))


def talk(made: SessionManager, turns: int = 8) -> None:
    """A conversation that has to be compacted on the way."""
    session = made.session("talk-1")
    session.append(system("You are terse."))
    for number in range(turns):
        session.append(user(f"question {number} " + "words " * 20))
        session.prepare(max_new_tokens=16)
        session.append(assistant(f"answer {number} " + "more " * 20))


def chat(made: SessionManager, conversation: str, turns: int = 3) -> list[Usage]:
    """A conversation with the manager's engine; what its replies cost."""
    session = made.session(conversation)
    used = []
    for number in range(turns):
        session.append(user(f"question {number}"))
        used.append(session.generate(max_new_tokens=4).usage)
    return used


@pytest.fixture
def engine() -> Iterator[TransformersEngine]:
    """A tiny random model."""
    pytest.importorskip("torch")
    from tests.fixtures_models import shared_tiny_engine

    made = shared_tiny_engine()
    yield made
    made.close()


def test_compactions_are_those_of_the_log() -> None:
    """Decisions, spans and tokens by policy, rung, trigger and action are what the log's own tables say."""
    metrics, log = Metrics(), MemoryLog()

    talk(manager(metrics, log))

    decisions, spans = log.decisions(), log.spans()
    actions = {span.action for span in spans}
    assert len(decisions) > 1
    assert series(metrics, "compactions_total") == {"sliding_window 1 auto": len(decisions)}
    assert series(metrics, "discarded_spans_total") == {
        f"{action} sliding_window": sum(span.action == action for span in spans) for action in actions
    }
    assert series(metrics, "discarded_tokens_total") == {
        f"{action} sliding_window": sum(span.tokens for span in spans if span.action == action) for action in actions
    }
    assert value(metrics, "decision_seconds_count", outcome="committed") == len(decisions)


def test_every_event_is_counted_once() -> None:
    """By kind, the counters equal the log's events, and each commit was timed."""
    metrics, log = Metrics(), MemoryLog()

    talk(manager(metrics, log))

    kinds = [event.kind for event in log.events("talk-1")]
    assert series(metrics, "log_events_total") == {kind: kinds.count(kind) for kind in set(kinds)}
    commits = len(kinds)  # nothing here writes two events at once
    assert value(metrics, "log_write_seconds_count") == commits
    assert value(metrics, "log_write_seconds_bucket", le="+Inf") == commits


def test_what_cannot_fit_is_counted() -> None:
    """An unsatisfiable request leaves no event, and is counted by its trigger all the same."""
    metrics = Metrics()
    session = manager(metrics).session("c")
    session.append(user("x" * 2000))

    for ask in (session.prepare, session.prepare, session.compact_now):
        with pytest.raises(BudgetUnsatisfiable):
            ask()

    assert series(metrics, "unsatisfiable_total") == {"auto": 2, "manual": 1}
    assert series(metrics, "decision_seconds_count") == {"unsatisfiable": 3}


def test_refused_plans_are_counted_with_their_reason() -> None:
    """A policy that raises twice is overruled on the third rung; both failures are counted."""

    class Broken(NoOp):
        name = "broken"

        def plan(self, view: Any, target: Any) -> Any:
            raise ZeroDivisionError("oops")

    metrics = Metrics()

    talk(manager(metrics, policy=Broken()))

    rungs = series(metrics, "compactions_total")
    assert list(rungs) == ["broken 3 auto"] and rungs["broken 3 auto"] >= 1
    assert series(metrics, "plan_failures_total")["policy_error 1"] == rungs["broken 3 auto"]
    assert series(metrics, "plan_failures_total")["policy_error 2"] == rungs["broken 3 auto"]


def test_nothing_done_is_told_apart() -> None:
    """A manual compaction that finds nothing to do is `held`."""
    metrics = Metrics()
    session = manager(metrics).session("c")
    session.append(user("short"))

    session.compact_now()

    assert series(metrics, "decision_seconds_count") == {"held": 1}
    assert series(metrics, "compactions_total") == {}


def test_summaries_cost_tokens() -> None:
    """Prompt and reply of a summariser's pass are counted, apart from those of replies."""
    usage = Usage(70, 5, 70, 0, 75, None, None, None, None)
    script = [Summary("They talked.", usage=usage)] * 20
    metrics, log = Metrics(), MemoryLog()

    talk(manager(metrics, log, policy=Summarize(max_tokens=40, keep_last=1), summarizer=ScriptedSummarizer(script)))

    asked = sum(len(e.payload["fulfilled"]) for e in log.events("talk-1") if e.kind.startswith("decision_c"))
    assert asked >= 1 and value(metrics, "summary_tokens_total") == 75 * asked
    assert series(metrics, "prompt_tokens_total") == {}


def test_reported_usage_has_no_cache_and_no_times() -> None:
    """A provider's figures are tokens alone: they must not look like a cache that never hits."""
    metrics = Metrics()
    session = manager(metrics).session("c")
    session.append(user("hello"))
    reply = {"choices": [{"message": assistant("hi")}], "usage": {"prompt_tokens": 12, "completion_tokens": 3}}

    session.record(reply)

    assert value(metrics, "prompt_tokens_total", model_name="none") == 12
    assert value(metrics, "generation_tokens_total", model_name="none") == 3
    assert series(metrics, "prefix_cache_queries_total") == {}
    assert series(metrics, "time_to_first_token_seconds_count") == {}


def test_replies_are_counted_as_their_usage_says(engine: TransformersEngine) -> None:
    """Tokens, hits and times of a real model's replies add up to the usages handed out."""
    metrics = Metrics()
    model = {"model_name": engine.name}

    used = chat(manager(metrics, engine=engine, counter=None, budget=Budget(tokens=400)), "c")

    assert value(metrics, "prompt_tokens_total", **model) == sum(usage.prompt_tokens for usage in used)
    assert value(metrics, "generation_tokens_total", **model) == sum(usage.completion_tokens for usage in used)
    assert value(metrics, "prefix_cache_queries_total", **model) == sum(usage.prompt_tokens for usage in used)
    assert value(metrics, "prefix_cache_hits_total", **model) == sum(usage.reused for usage in used) > 0
    whys = {usage.why or "new" for usage in used}
    assert "first" in whys
    for why in whys:
        expected = sum(usage.prefilled for usage in used if (usage.why or "new") == why)
        assert value(metrics, "prefilled_tokens_total", why=why, **model) == expected
    for name, times in (
        ("time_to_first_token_seconds", [usage.ttft_ms for usage in used if usage.ttft_ms is not None]),
        ("time_per_output_token_seconds", [usage.tpot_ms for usage in used if usage.tpot_ms is not None]),
    ):
        assert value(metrics, f"{name}_count", **model) == len(times) > 0
        assert value(metrics, f"{name}_sum", **model) == pytest.approx(sum(times) / 1000)


def test_an_interrupted_reply_is_counted(engine: TransformersEngine) -> None:
    """Closing a stream early counts one interruption, and no usage."""
    metrics = Metrics()
    session = manager(metrics, engine=engine, counter=None, budget=Budget(tokens=400)).session("c")
    session.append(user("hello"))
    stream = session.stream(max_new_tokens=32)
    next(stream)

    stream.close()

    assert value(metrics, "interrupted_total", model_name=engine.name) == 1
    assert series(metrics, "prompt_tokens_total") == {}


def test_a_page_in_the_middle_of_a_reply(engine: TransformersEngine) -> None:
    """While a reply is streamed, the page shows the bytes its cache holds by then."""
    metrics = Metrics()
    session = manager(metrics, engine=engine, counter=None, budget=Budget(tokens=400)).session("c")
    session.append(user("hello"))
    stream = session.stream(max_new_tokens=32)
    next(stream)

    during = value(metrics, "kv_cache_bytes", model_name=engine.name)

    assert during == engine.kv_bytes("c") > 0
    stream.close()


def test_kv_bytes_are_measured_when_asked(engine: TransformersEngine) -> None:
    """Each conversation's bytes, their sum, and their share of what they may hold; a released one is gone."""
    metrics = Metrics()
    made = manager(metrics, engine=engine, counter=None, budget=Budget(tokens=400))
    chat(made, "long", 3)
    chat(made, "short", 1)
    one, two = engine.kv_bytes("long"), engine.kv_bytes("short")

    assert 0 < two < one
    assert series(metrics, "conversation_kv_bytes") == {f"long {engine.name}": one, f"short {engine.name}": two}
    assert series(metrics, "kv_cache_bytes") == {engine.name: one + two}
    assert series(metrics, "kv_cache_conversations") == {engine.name: 2}
    allowed = 2 * 400 * engine.kv_bytes_per_token
    assert value(metrics, "kv_cache_usage_perc", model_name=engine.name) == pytest.approx((one + two) / allowed)

    made.release("long")

    assert series(metrics, "conversation_kv_bytes") == {f"short {engine.name}": two}
    made.release("short")
    assert series(metrics, "kv_cache_usage_perc") == {engine.name: 0.0}


def test_a_pool_shows_its_tiers_and_what_it_did(engine: TransformersEngine) -> None:
    """Bytes and conversations of each tier; usage is the share of the pool."""
    metrics = Metrics()
    size = 120 * engine.kv_bytes_per_token
    made = manager(metrics, engine=engine, counter=None, budget=Budget(tokens=400), pool=Pool(size, host="1MiB"))
    try:
        for name in ("a", "b", "c"):
            chat(made, name, 3)
        chat(made, "a", 1)
        assert made.pool is not None
        usage, model = made.pool.usage(), engine.name

        assert usage.parks > 0 and usage.restores["host"] > 0
        assert value(metrics, "pool_bytes", model_name=model, tier="device") == usage.device.bytes
        assert value(metrics, "pool_bytes", model_name=model, tier="host") == usage.host.bytes > 0
        assert value(metrics, "pool_budget_bytes", model_name=model, tier="device") == size
        assert value(metrics, "pool_conversations", model_name=model, tier="host") == usage.host.conversations
        assert value(metrics, "pool_parks_total", model_name=model) == usage.parks
        assert value(metrics, "pool_restores_total", model_name=model, tier="host") == usage.restores["host"]
        held = sum(engine.kv_bytes(name) for name in ("a", "b", "c"))
        assert value(metrics, "kv_cache_usage_perc", model_name=model) == pytest.approx(held / size)
    finally:
        engine.close()
        engine.pool = None


@pytest.mark.parametrize(("most", "names"), [(1, ["long", "(other)"]), (0, ["(other)"])])
def test_the_number_of_series_is_bounded(most: int, names: list[str], engine: TransformersEngine) -> None:
    """Beyond the heaviest few, conversations share one series; none is named where none is wanted."""
    metrics = Metrics(conversations=most)
    made = manager(metrics, engine=engine, counter=None, budget=Budget(tokens=400))
    chat(made, "long", 2)
    chat(made, "short", 1)
    chat(made, "also short", 1)

    shown = series(metrics, "conversation_kv_bytes")

    assert list(shown) == [f"{name} {engine.name}" for name in names]
    assert sum(shown.values()) == sum(map(engine.kv_bytes, ("long", "short", "also short")))


def test_a_fork_counts_too(engine: TransformersEngine) -> None:
    """A conversation the manager was never asked for, but made from one of its own, is measured."""
    metrics = Metrics()
    made = manager(metrics, engine=engine, counter=None, budget=Budget(tokens=400))
    chat(made, "c", 1)
    fork = made.session("c").fork("d")
    fork.append(user("again"))

    fork.generate(max_new_tokens=4)

    assert value(metrics, "conversation_kv_bytes", conversation="d", model_name=engine.name) == engine.kv_bytes("d")


def test_two_managers_of_one_engine_share_its_caches(engine: TransformersEngine) -> None:
    """Counters add up; a cache is measured once, however many managers know of it."""
    metrics, log = Metrics(), MemoryLog()
    options: dict[str, Any] = {"engine": engine, "counter": None, "budget": Budget(tokens=400)}
    one, two = manager(metrics, log, **options), manager(metrics, log, **options)

    used = [*chat(one, "c", 1), *chat(two, "c", 1)]

    model = {"model_name": engine.name}
    assert value(metrics, "generation_tokens_total", **model) == sum(usage.completion_tokens for usage in used)
    assert value(metrics, "kv_cache_bytes", **model) == engine.kv_bytes("c")


def test_a_conversation_s_name_may_be_anything(engine: TransformersEngine) -> None:
    """Quotes, backslashes and line breaks in a name do not break the page."""
    metrics = Metrics()

    chat(manager(metrics, engine=engine, counter=None, budget=Budget(tokens=400)), 'a"b\n\\', 1)

    labels = {"conversation": 'a"b\n\\', "model_name": engine.name}
    assert value(metrics, "conversation_kv_bytes", **labels) == engine.kv_bytes('a"b\n\\')


def test_the_log_stays_what_it_was(tmp_path: Path) -> None:
    """A watched log is a log, and whatever else it can do it still does."""
    with AuditLog(tmp_path / "a.db") as log:
        watched = manager(Metrics(), log).log

        assert isinstance(watched, WatchedLog) and watched.log is log
        assert watched.verify().ok and watched.conversations() == log.conversations()


def test_what_the_log_refuses_is_counted_and_raised(tmp_path: Path) -> None:
    """A closed log and a lost race keep their errors; a race is tried again, and both are counted by name."""
    metrics = Metrics()
    with AuditLog(tmp_path / "a.db") as log, AuditLog(tmp_path / "a.db") as other:
        session = manager(metrics, log).session("c")
        SessionManager(budget=Budget(tokens=300), counter=FakeCounter(), log=other).session("c").append(user("first"))
        session.append(user("second"))
    assert series(metrics, "log_write_failures_total") == {LogConflict.__name__: 1}

    with pytest.raises(LogError):
        session.append(user("too late"))

    assert sum(series(metrics, "log_write_failures_total").values()) == 2


def test_metrics_come_before_sessions() -> None:
    """Attached late, what sessions did before would be missing: that is refused."""
    made = SessionManager(budget=Budget(tokens=300), counter=FakeCounter())
    made.session("early")

    with pytest.raises(InvalidInput, match="'early' is open already"):
        Metrics().attach(made)


def test_a_registry_of_the_caller_s_own() -> None:
    """One that is given is used, and holds one `Metrics`; without one, two never clash."""
    from prometheus_client import CollectorRegistry, Gauge

    registry = CollectorRegistry()
    Gauge("mine", "Something of the caller's.", registry=registry).set(3)

    assert "\nmine 3.0\n" in Metrics(registry).text()
    assert "mine" not in Metrics().text()
    with pytest.raises(ValueError, match="Duplicated"):
        Metrics(registry)


def test_the_page_is_served_on_loopback() -> None:
    """GET /metrics answers what `text()` says, and no longer once closed; a taken port is one clear line."""
    metrics = Metrics()
    talk(manager(metrics))

    with metrics.serve(port=0) as server:
        with urllib.request.urlopen(server.url, timeout=10) as response:
            served = response.read().decode("utf-8")
        with pytest.raises(InvalidInput, match=f"{server.host}:{server.port}"):
            metrics.serve(port=server.port)

    assert (server.host, served) == ("127.0.0.1", metrics.text())
    server.close()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(server.url, timeout=10)


def test_a_missing_package_is_named() -> None:
    """Without prometheus-client the module imports, and making metrics says what to install."""
    code = (
        "import sys; sys.modules['prometheus_client'] = None\n"
        "import compaction.metrics as m\n"
        "try: m.Metrics()\n"
        "except m.attaching.InvalidInput as exc: print(exc)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert "pip install 'kv-compaction[metrics]'" in done.stdout


def test_a_negative_number_of_series_is_refused() -> None:
    """There is no such number."""
    with pytest.raises(InvalidInput, match="-1"):
        Metrics(conversations=-1)


def test_the_docs_list_every_metric() -> None:
    """docs/metrics.md has a row for each metric, with its type."""
    from prometheus_client.parser import text_string_to_metric_families

    rows = [line.split("|")[1:4] for line in DOCS.read_text("utf-8").splitlines() if line.startswith("| `compaction_")]
    listed = {name.strip(" `").removesuffix("_total"): kind.strip() for name, kind, _ in rows}
    families = {family.name: family.type for family in text_string_to_metric_families(Metrics().text())}
    ours = {name.removesuffix("_total"): kind for name, kind in families.items() if not name.endswith("_created")}

    assert listed == ours


def test_the_docs_sample_is_what_is_printed() -> None:
    """The snippet prints the text that stands below it."""
    code, printed = re.findall(r"```(?:python|text)\n(.*?)```", DOCS.read_text("utf-8"), re.DOTALL)[:2]

    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=DOCS.parent.parent
    )

    assert done.stdout == printed
