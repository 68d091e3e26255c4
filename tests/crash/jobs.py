"""The parts of the crash tests as lists of things to do, so that a progress bar knows how many there are."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from compaction import Budget
from compaction.policies import SlidingWindow
from tests.crash import full_disk, writers
from tests.crash.failpoints import Reference, Strike, in_order, reference, strike, strikes
from tests.crash.kills import RunKiller, kill_story
from tests.crash.results import Outcome
from tests.crash.scenarios import SCENARIOS, Scenario, users

if TYPE_CHECKING:
    from compaction.engines import TransformersEngine

__all__ = ["PARTS", "QUICK", "Job", "Options", "jobs"]

QUICK = ("failpoints", "story", "writers", "disk")
"""Parts that need no model and take seconds."""
PARTS = (*QUICK, "model", "run")

INSIDE = ("sql decision_committed", "vm decision_committed")
"""Where the promise of one transaction is kept: tried more often than the rest."""


@dataclass(frozen=True)
class Options:
    """How much is tried: `kills` of a real run, each place of a story at most `each` times (0: once in all stories)."""

    kills: int
    seed: int
    each: int
    folder: Path

    def rng(self, part: str) -> random.Random:
        """A generator of its own for each part, so that leaving one out does not change the others."""
        return random.Random(f"{self.seed} {part}")


@dataclass(frozen=True)
class Job:
    """Something to do that gives `count` outcomes, or a few more."""

    part: str
    count: int
    run: Callable[[], Iterator[Outcome]]


def jobs(part: str, options: Options) -> list[Job]:
    """What a part consists of."""
    makers = {
        "failpoints": _failpoints,
        "model": _model,
        "story": _stories,
        "writers": _writers,
        "disk": _disk,
        "run": _run,
    }
    return makers[part](options)


def _failpoints(options: Options) -> list[Job]:
    rng = options.rng("failpoints")
    refs = [reference(scenario, options.folder) for scenario in SCENARIOS]
    if options.each:
        return [_struck("failpoints", ref, at, options) for ref in refs for at in strikes(ref, options.each, rng)]
    chosen: list[Job] = []
    for place in in_order({place for ref in refs for place in ref.reached}):
        ref = rng.choice([ref for ref in refs if ref.reached[place]])
        times = range(1, ref.reached[place] + 1)
        for nth in rng.sample(times, min(len(times), 4 if place in INSIDE else 1)):
            chosen.append(_struck("failpoints", ref, Strike(place, nth), options))
    return chosen


def _struck(part: str, ref: Reference, at: Strike, options: Options) -> Job:
    def run() -> Iterator[Outcome]:
        outcome = strike(ref, at, options.folder / f"strike-{ref.scenario.name}.db")
        yield outcome if part == "failpoints" else replace(outcome, row=f"{outcome.row} ({part})")

    return Job(part, 1, run)


def _model(options: Options) -> list[Job]:
    """The places around the engine again, with tensors: a tiny random model and a live KV cache."""
    scenario = Scenario("model", SlidingWindow(), Budget(tokens=400), users(8), _tiny)
    ref = reference(scenario, options.folder)
    _tiny().close()
    found = strikes(ref, options.each or 1, options.rng("model"))
    return [_struck("model", ref, at, options) for at in found if at.place.startswith(("engine", "hook", "log"))]


@cache
def _tiny() -> TransformersEngine:
    """Made once, in the parent: a forked child finds it loaded, and without conversations."""
    import torch

    from tests.fixtures_models import tiny_engine

    torch.set_num_threads(1)  # a pool of threads does not survive a fork
    return tiny_engine()


def _stories(options: Options) -> list[Job]:
    rng = options.rng("story")
    refs = [reference(scenario, options.folder) for scenario in (SCENARIOS if options.each else SCENARIOS[1:2])]
    kills = 12 if options.each else 3

    def one(ref: Reference) -> Job:
        path = options.folder / f"killed-{ref.scenario.name}.db"
        return Job("story", 1, lambda: iter([kill_story(ref, path, rng, kills)]))

    return [one(ref) for ref in refs]


def _writers(options: Options) -> list[Job]:
    turns = 150 if options.each else 15
    return [
        Job("writers", 1, lambda p=policy: iter([writers.two_writers(p, options.folder, turns=turns)]))  # type: ignore[misc]
        for policy in writers.POLICIES
    ]


def _disk(options: Options) -> list[Job]:
    tries = [full_disk.full_database]
    if full_disk.may_mount(options.folder):
        tries.append(full_disk.full_file_system)
    return [
        Job("disk", 1, lambda t=attempt, p=policy: iter([t(p, options.folder)]))  # type: ignore[misc]
        for attempt in tries
        for policy in full_disk.POLICIES
    ]


def _run(options: Options) -> list[Job]:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    killer = RunKiller(options.folder, options.rng("run"))
    return [
        Job("run", 1, lambda: iter([killer.measure()])),
        Job("run", options.kills + 1, lambda: killer.kills(options.kills)),
    ]
