"""The counter contract on each of our counters, and what is special about each."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compaction.errors import CounterUnavailable, InvalidInput
from compaction.tokens import ChatTemplate, EstimateCounter, TemplateCounter, TiktokenCounter, default_counter
from tests.builders import assistant, image, tool_schema, user
from tests.contracts.counter_contract import CounterContract, added_up

Recorded = Callable[[str, int], list[list[dict[str, Any]]]]
FILES = (
    "aider_chat_history",
    "bfcl_multi_turn_executed",
    "memorybank_en",
    "openhands_multi_swe_bench",
    "swe_agent_trajectories",
    "tau_bench_airline_gpt4o",
)


def _tiktoken() -> TiktokenCounter:
    try:
        return TiktokenCounter(download=False)
    except CounterUnavailable as exc:
        pytest.skip(str(exc))


class TestSmolLM2(CounterContract):
    """The exact counter of a real model."""

    @pytest.fixture(scope="class")
    @classmethod
    def counter(cls, smollm2_counter: TemplateCounter) -> TemplateCounter:
        """SmolLM2's."""
        return smollm2_counter

    def test_is_exact_and_additive(self, smollm2_counter: TemplateCounter) -> None:
        """SmolLM2's ChatML is counted exactly, message by message."""
        assert (smollm2_counter.exact, smollm2_counter.additive) == (True, True)


class TestQwenLike(CounterContract):
    """A template that joins runs of results and drops earlier thinking."""

    @pytest.fixture(scope="class")
    @classmethod
    def counter(cls, template_of: Callable[[str], ChatTemplate]) -> TemplateCounter:
        """A made one."""
        return TemplateCounter(template_of("qwen"))


class TestLlama3Like(CounterContract):
    """A template that strips contents and writes the date."""

    @pytest.fixture(scope="class")
    @classmethod
    def counter(cls, template_of: Callable[[str], ChatTemplate]) -> TemplateCounter:
        """A made one."""
        return TemplateCounter(template_of("llama3"))


class TestMistralLike(CounterContract):
    """A template that refuses turns that do not alternate."""

    @pytest.fixture(scope="class")
    @classmethod
    def counter(cls, template_of: Callable[[str], ChatTemplate]) -> TemplateCounter:
        """A made one."""
        return TemplateCounter(template_of("mistral"))


class TestSentencepieceLike(CounterContract):
    """A tokenizer that cannot be used piece by piece."""

    @pytest.fixture(scope="class")
    @classmethod
    def counter(cls, template_of: Callable[[str], ChatTemplate]) -> TemplateCounter:
        """A made one."""
        return TemplateCounter(template_of("metaspace"))


class TestTiktoken(CounterContract):
    """A vocabulary without a public template."""

    @pytest.fixture(scope="class")
    @classmethod
    def counter(cls) -> TiktokenCounter:
        """cl100k_base."""
        return _tiktoken()


class TestEstimate(CounterContract):
    """Character classes."""

    @pytest.fixture(scope="class")
    @classmethod
    def counter(cls) -> EstimateCounter:
        """As it is."""
        return EstimateCounter()


class TestCalibratedEstimate(CounterContract):
    """Character classes, scaled by reported usage."""

    @pytest.fixture(scope="class")
    @classmethod
    def counter(cls) -> EstimateCounter:
        """Scaled by an odd factor."""
        return EstimateCounter().calibrated(1043, 911)


@pytest.mark.parametrize(
    ("family", "additive"),
    [
        ("chatml", True),
        ("llama3", True),
        ("metaspace", True),
        ("qwen", False),
        ("mistral", False),
        ("gemma", False),
        ("alpaca", False),
    ],
)
def test_additivity_is_found_out(template_of: Callable[[str], ChatTemplate], family: str, additive: bool) -> None:
    """A counter claims to be additive only for templates whose messages stand by themselves."""
    assert TemplateCounter(template_of(family)).additive is additive


@pytest.mark.parametrize("stem", FILES)
def test_recorded_conversations_add_up(smollm2_counter: TemplateCounter, recorded: Recorded, stem: str) -> None:
    """Over real conversations, messages counted one by one sum to the request rendered anew."""
    conversations = recorded(stem, 12)

    assert [added_up(smollm2_counter, messages, [tool_schema()]) for messages in conversations] == [
        smollm2_counter.request(messages, [tool_schema()]) for messages in conversations
    ]


def test_name_is_stable_and_tells_templates_apart(template_of: Callable[[str], ChatTemplate]) -> None:
    """Equal tokenizers and templates give equal names, other templates other names."""
    from tests.tokens.families import tokenizer_of

    chatml = TemplateCounter(template_of("chatml")).name

    assert chatml == TemplateCounter(ChatTemplate(tokenizer_of("chatml"))).name
    assert chatml.startswith("template:") and len(chatml) == len("template:") + 12
    assert chatml != TemplateCounter(template_of("alpaca")).name


def test_message_costs_its_own_length(smollm2_counter: TemplateCounter) -> None:
    """Counting a short message takes under 5 ms, however much was counted before."""
    smollm2_counter.head([{"role": "system", "content": "x " * 100_000}], None)
    times = []
    for _ in range(20):
        start = time.perf_counter()
        smollm2_counter.message(user("hello"))
        times.append(time.perf_counter() - start)

    assert statistics.median(times) < 0.005


def test_empty_request_costs_its_head(smollm2_counter: TemplateCounter) -> None:
    """No message costs what will stand around the first one."""
    assert smollm2_counter.request([], None) == smollm2_counter.head([], None)


def test_tiktoken_counts_openai_constants() -> None:
    """A request costs 3, each message 3 and its role, a name 1 more, as OpenAI publishes."""
    counter = _tiktoken()

    assert counter.request([user("hello")], None) == 3 + 3 + 1 + 1
    assert counter.message(user("hello", name="ann")) == 3 + 1 + 1 + 1 + counter.text("ann")


def test_unknown_encoding_is_refused_with_advice() -> None:
    """An encoding tiktoken does not know is named, with those it knows."""
    pytest.importorskip("tiktoken")

    with pytest.raises(CounterUnavailable, match="cl100k_base"):
        TiktokenCounter("no_such_encoding")


def test_vocabulary_that_is_not_at_hand_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing vocabulary is refused at once, in one line with the next step."""
    pytest.importorskip("tiktoken")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))

    with pytest.raises(CounterUnavailable, match="TIKTOKEN_CACHE_DIR") as error:
        TiktokenCounter("r50k_base", download=False)
    assert "\n" not in str(error.value)


def test_default_counter_is_tiktoken_where_it_is_at_hand() -> None:
    """Without a model, tiktoken counts."""
    assert default_counter().name == _tiktoken().name


def test_estimate_keeps_its_bound(recorded: Recorded, smollm2_counter: TemplateCounter) -> None:
    """Over real conversations of 200 tokens or more, both vocabularies count within the stated bound."""
    estimate, tiktoken = EstimateCounter(), _tiktoken()
    ratios = [
        counter.request(messages, None) / estimate.request(messages, None)
        for stem in FILES
        for messages in recorded(stem, 25)
        if tiktoken.request(messages, None) >= 200
        for counter in (tiktoken, smollm2_counter)
    ]

    assert max(abs(ratio - 1) for ratio in ratios) <= EstimateCounter.bound
    assert 0.9 < statistics.median(ratios) < 1.2


def test_calibration_brings_an_estimate_home(recorded: Recorded) -> None:
    """Scaled by what was reported for the first half, the second half is within 15 % in the median."""
    estimate, tiktoken = EstimateCounter(), _tiktoken()
    errors = []
    for messages in recorded("tau_bench_airline_gpt4o", 40):
        half = len(messages) // 2
        first, rest = messages[:half], messages[half:]
        scaled = estimate.calibrated(tiktoken.request(first, None), estimate.request(first, None))
        errors.append(abs(scaled.request(rest, None) / tiktoken.request(rest, None) - 1))

    assert statistics.median(errors) < 0.15


def test_calibration_disbelieves_the_absurd() -> None:
    """A factor beyond 4 is clipped, figures that are none are refused."""
    assert EstimateCounter().calibrated(100_000, 1).milli == 4000
    with pytest.raises(InvalidInput):
        EstimateCounter().calibrated(0, 10)


@pytest.mark.parametrize(
    "text", ["请帮我查一下订单号和退款的状态，谢谢。", "注文の状況を教えてください。", "주문 상태를 확인해 주세요."]
)
def test_estimate_is_sound_for_cjk(text: str) -> None:
    """Han, kana and Hangul cost about a token a character, not a quarter."""
    assert 0.8 * len(text) <= EstimateCounter().text(text) <= 2.5 * len(text)


def test_estimate_is_fast() -> None:
    """Ten megabytes take under three seconds."""
    text = "hello there, some words 12 and 漢字\n" * 300_000
    start = time.perf_counter()
    EstimateCounter().text(text)

    assert time.perf_counter() - start < 3


def test_estimate_never_falls_below_one() -> None:
    """No run of equal characters is free or negative."""
    counter = EstimateCounter()

    assert all(counter.text(char * count) >= 1 for char in "=  \n\t#1aA漢😀\x00" for count in (1, 2, 3, 4, 7, 5000))
    assert counter.text("=" * 5000) > counter.text("=" * 50)


def test_images_cost_by_detail_and_size() -> None:
    """A low-detail image costs 85 tokens, one of known size its tiles, whatever the payload."""
    counter = EstimateCounter()
    bare = counter.message(user([]))
    low = {"type": "image_url", "image_url": {"url": "https://x.example/a.png", "detail": "low"}}
    sized = {"type": "image_url", "width": 1024, "height": 1024, "image_url": {"url": "u"}}

    assert counter.message(user([low])) - bare == 85
    assert counter.message(user([sized])) - bare == 765
    assert counter.message(user([image("A" * 4)])) == counter.message(user([image("A" * 40_000)]))


def test_size_is_read_from_a_png_header() -> None:
    """A data URI's PNG header gives the tiles."""
    import base64

    header = b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR" + (512).to_bytes(4, "big") + (512).to_bytes(4, "big") + b"\x08" * 24
    counter = EstimateCounter()

    assert counter.message(user([image(base64.b64encode(header).decode())])) - counter.message(user([])) == 85 + 170


def test_calls_are_counted_by_name_and_arguments() -> None:
    """Longer arguments cost more, whether they are text or an object."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    longer = {**call, "function": {"name": "f", "arguments": {"query": "the order with the number 7712"}}}
    counter = EstimateCounter()

    assert counter.message(assistant(None, calls=[longer])) > counter.message(assistant(None, calls=[call]))


def test_importing_is_light() -> None:
    """Importing the package loads no tokenizer library."""
    heavy = "{'torch', 'transformers', 'tiktoken', 'tokenizers', 'numpy'}"
    code = f"import sys, compaction.tokens; print(sorted({heavy} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert run.stdout.strip() == "[]"
