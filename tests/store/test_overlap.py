"""What is out, through restores, rewinds and forks, against a plain set of code points."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from compaction.plan import Span
from compaction.store.overlap import Outside

PATHS = ("", "/content", "/content/0/text")
spans = st.builds(
    lambda path, start, length: Span("m", path, start, start + length),
    st.sampled_from(PATHS),
    st.integers(0, 12),
    st.integers(1, 4),
)


def test_a_span_may_go_out_again_once_restored() -> None:
    """What came back into the view may leave it a second time."""
    outside, span = Outside(), Span("m", "/content", 2, 5)
    first = outside.take(1, [span])
    outside.restore(2, Span("m", "/content", 0, 9))

    assert (first, outside.take(3, [span])) == ([], [])


def test_the_rest_of_a_clamped_message_may_go_out() -> None:
    """A whole message takes what is still live of it along; after that nothing of it is left to take."""
    outside = Outside()
    outside.take(1, [Span("m", "/content", 2, 5)])

    whole = outside.take(2, [Span("m", "", 0, 99)])
    late = outside.take(3, [Span("m", "/content", 7, 8)])

    assert (whole, [position for position, _ in late]) == ([], [0])


def test_a_rewind_brings_back_what_was_out_then() -> None:
    """As of an event: decisions after it are undone, restores after it too."""
    outside, one, two = Outside(), Span("m", "/content", 0, 2), Span("m", "/content", 4, 6)
    outside.take(1, [one])
    outside.take(2, [two])
    outside.restore(3, one)
    outside.rewind(4, to=1)

    assert ([position for position, _ in outside.take(5, [one])], outside.take(6, [two])) == ([0], [])


def test_a_fork_starts_with_what_was_out() -> None:
    """The new conversation shares the state of the old one at that event, and goes its own way."""
    source, fork, one, two = Outside(), Outside(), Span("m", "/content", 0, 2), Span("m", "/content", 4, 6)
    source.take(1, [one])
    fork.fork(source, to=1)
    source.take(2, [two])

    assert ([position for position, _ in fork.take(2, [one])], fork.take(3, [two])) == ([0], [])


@given(steps=st.lists(st.tuples(st.sampled_from(["take", "take", "restore", "rewind"]), spans, st.integers(0, 20))))
def test_it_agrees_with_sets_of_code_points(steps: list[tuple[str, Span, int]]) -> None:
    """Clashes are found exactly where a code point is out twice, whatever was undone before."""
    outside, states = Outside(), [frozenset[Span]()]
    for seq, (do, span, number) in enumerate(steps, 1):
        state = states[-1]
        if do == "take":
            expected = any(_clash(other, span) for other in state)
            assert bool(outside.take(seq, [span])) == expected
            state = state | {span}
        elif do == "restore":
            outside.restore(seq, span)
            state = frozenset(o for o in state if not _undone(o, span))
        else:
            outside.rewind(seq, number % seq)
            state = states[number % seq]
        states.append(state)


def _points(span: Span) -> set[int]:
    return set(range(span.start, span.end))


def _clash(other: Span, span: Span) -> bool:
    return other.path == "" or (other.path == span.path and bool(_points(other) & _points(span)))


def _undone(other: Span, span: Span) -> bool:
    return other.path == span.path and (span.path == "" or bool(_points(other) & _points(span)))
