"""What has to happen to a cache so that it stands for the beginning of another request: pure arithmetic over ids.

Invariant: after the cut and all changes of an `Alignment` the cache's ids lead the wanted ones. Only whole segments of
the held request are kept or taken out; behind the last one kept, whatever ids both sides share stay. At least one
wanted token is left to be fed: without it there are no logits.
Knows nothing about tensors or positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

from compaction.engines.live_cache import common_prefix
from compaction.engines.segments import Segment

__all__ = ["Alignment", "Change", "align", "put_between"]


@dataclass(frozen=True, slots=True)
class Change:
    """Slots [start, end) of the cache as it stands, and the ids that take their place; either may be empty."""

    start: int
    end: int
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Alignment:
    """First cut the cache back to `cut` slots, then make the changes, all of which lie before it, in order."""

    cut: int
    changes: tuple[Change, ...]


def align(
    held: Sequence[Segment], ids: Sequence[int], wanted: Sequence[Segment], wanted_ids: Sequence[int], opening: int
) -> Alignment | None:
    """How to get from a cache of `ids`, which begin with the held segments, to `wanted_ids`.

    Behind the held segments stand the generation prompt, `opening` tokens, and a reply, or less. None where the head
    (leading messages, tools) is another one: then nothing is worth keeping in place.
    """
    if not held or not wanted or held[0] != wanted[0]:
        return None
    at, to = _offsets(held), _offsets(wanted)
    changes: list[Change] = []
    i = j = 0  # segments that are dealt with, on either side
    for block in SequenceMatcher(None, held, wanted, autojunk=False).get_matching_blocks():
        if not block.size:
            continue
        if block.a > i or block.b > j:
            changes.append(Change(at[i], at[block.a], tuple(wanted_ids[to[j] : to[block.b]])))
        i, j = block.a + block.size, block.b + block.size
    reply = ids[at[-1] :]
    behind = _continued(reply, wanted, j) if i < len(held) and len(reply) > opening else None
    if behind is not None:  # the messages before a reply went, the reply itself stays
        changes.append(Change(at[i], at[-1], tuple(wanted_ids[to[j] : to[behind]])))
        return Alignment(len(ids), tuple(changes))
    shared = common_prefix(ids[at[i] :], wanted_ids[to[j] :])
    if to[j] + shared < len(wanted_ids):
        return Alignment(at[i] + shared, tuple(changes))
    return Alignment(at[i] + shared - 1, tuple(changes)) if at[i] + shared - 1 >= _end(changes) else None


def put_between(held: Sequence[Segment], wanted: Sequence[Segment]) -> int:
    """Tokens of new segments in front of held ones: what `align` would insert, told before the cache is at hand."""
    known = set(held)
    last = max((index for index, segment in enumerate(wanted) if segment in known), default=0)
    return sum(len(segment.ids) for segment in wanted[:last] if segment not in known)


def _offsets(segments: Sequence[Segment]) -> list[int]:
    """Where each segment begins, and where the last one ends."""
    offsets = [0]
    for segment in segments:
        offsets.append(offsets[-1] + len(segment.ids))
    return offsets


def _continued(reply: Sequence[int], wanted: Sequence[Segment], start: int) -> int | None:
    """The first wanted segment from `start` on that begins with all ids of the reply and goes on after them."""
    for index in range(start, len(wanted)):
        ids = wanted[index].ids
        if len(reply) < len(ids) and tuple(reply) == ids[: len(reply)]:
            return index
    return None


def _end(changes: Sequence[Change]) -> int:
    return max((change.end for change in changes), default=0)
