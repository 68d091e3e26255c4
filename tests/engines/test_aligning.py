"""Which slots stay: alignments as arithmetic over ids."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from compaction.engines.aligning import Alignment, Change, align, put_between
from compaction.engines.segments import Segment

OPENING = (1, 9)
HEAD = Segment((b"head",), (0, 7, 7))


def segment(name: str, *ids: int) -> Segment:
    """A message that begins as a reply is asked for and ends with 2."""
    return Segment((name.encode(),), (*OPENING, *ids, 2))


A, B, C, D, E = (segment(name, *(ord(name),) * 3) for name in "ABCDE")


def ids_of(segments: Sequence[Segment], *more: int) -> list[int]:
    """All ids in order."""
    return [token for each in segments for token in each.ids] + list(more)


def found(held: Sequence[Segment], wanted: Sequence[Segment], *reply: int) -> Alignment | None:
    """The alignment of a cache that holds a prompt and the beginning of a reply."""
    return align(held, ids_of(held, *OPENING, *reply), wanted, ids_of(wanted, *OPENING), len(OPENING))


def applied(alignment: Alignment, ids: Sequence[int]) -> list[int]:
    """What the cache holds afterwards."""
    left = list(ids[: alignment.cut])
    for change in reversed(alignment.changes):
        left[change.start : change.end] = change.ids
    return left


def test_what_went_is_one_change_and_the_rest_stays() -> None:
    """B goes, C stays; behind it stands the generation prompt, which begins D."""
    made = found([HEAD, A, B, C], [HEAD, A, C, D])

    assert made == Alignment(3 + 3 * 6 + 2, (Change(9, 15, ()),))


def test_a_message_that_became_another_one_is_replaced() -> None:
    """The new ids take the place of the old ones."""
    made = found([HEAD, A, B, C], [HEAD, A, E, C])

    assert made is not None and made.changes == (Change(9, 15, E.ids),)


def test_what_is_put_between_is_told_beforehand() -> None:
    """New segments in front of kept ones count, those at the end do not."""
    made = found([HEAD, A, B, C], [HEAD, A, E, C, D])

    assert made is not None and put_between([HEAD, A, B, C], [HEAD, A, E, C, D]) == len(made.changes[0].ids) == 6
    assert put_between([HEAD, A], [HEAD, A, B, C]) == put_between([], [HEAD, A]) == put_between([HEAD, A], [HEAD]) == 0


def test_a_finished_reply_stays() -> None:
    """What was sampled begins the message it has become."""
    made = found([HEAD, A], [HEAD, A, B, C], ord("B"), ord("B"), ord("B"))

    assert made == Alignment(3 + 6 + 2 + 3, ())


def test_a_reply_outlives_the_message_it_answers() -> None:
    """The prompt's last message is gone, a summary stands there, and the reply stays behind it."""
    made = found([HEAD, A, B], [HEAD, A, E, D, C], ord("D"), ord("D"))

    assert made == Alignment(3 + 2 * 6 + 4, (Change(9, 15, E.ids),))


def test_a_reply_that_is_said_otherwise_is_cut_where_it_differs() -> None:
    """Ids that agree stay."""
    made = found([HEAD, A], [HEAD, A, B, C], ord("B"), 5, 5)

    assert made == Alignment(3 + 6 + 2 + 1, ())


def test_another_head_has_no_alignment() -> None:
    """Other rules or tools: nothing that follows them is kept."""
    assert found([HEAD, A, B], [Segment((b"other",), HEAD.ids), A, B]) is None


def test_one_token_is_left_to_feed() -> None:
    """The same prompt again: its last token goes in once more."""
    made = found([HEAD, A], [HEAD, A])

    assert made == Alignment(3 + 6 + 2 - 1, ())


NAMES = st.lists(st.sampled_from("ABCDEFGH"), max_size=7)


@given(NAMES, NAMES, st.integers(0, 5))
def test_ids_lead_the_wanted_ones(held: list[str], wanted: list[str], fed: int) -> None:
    """Whatever stays and whatever comes: the cache's ids begin the wanted ones, and one token at least is left."""
    before = [HEAD, *(segment(name, *(ord(name),) * 3) for name in held)]
    after = [HEAD, *(segment(name, *(ord(name),) * 3) for name in wanted)]
    reply = segment("H", *(ord("H"),) * 3).ids[2 : 2 + fed]
    made = found(before, after, *reply)

    goal = ids_of(after, *OPENING)
    left = applied(made, ids_of(before, *OPENING, *reply)) if made else []
    assert goal[: len(left)] == left and len(left) < len(goal)
    assert made is None or all(change.end <= made.cut for change in made.changes)
