"""The contract, run on every built-in policy in several settings."""

from __future__ import annotations

import pytest

from compaction.policies import (
    ClampOversized,
    ClearToolResults,
    Fallback,
    NoOp,
    Pipeline,
    Quantize,
    ScoredEviction,
    SlidingWindow,
    Summarize,
    Truncate,
    default_policy,
)
from compaction.ports import Policy
from tests.contracts.policy_contract import PolicyContract

REACH_MUST: list[Policy] = [
    Truncate(),
    Truncate(keep_last=3),
    SlidingWindow(),
    SlidingWindow(sinks=0, keep_last=0),
    SlidingWindow(sinks=3, keep_last=5, sink_share=1.0),
    Summarize(),
    Summarize(max_tokens=20, keep_last=1, sinks=1),
    Fallback(ClearToolResults(), Truncate()),
    Fallback(Summarize(max_tokens=30), Truncate()),
    Pipeline([ClampOversized(0.1), ClearToolResults(0, 0), Summarize(max_tokens=24), Truncate()]),
    default_policy(),
    Quantize(),
    Quantize("k4v2", then=Truncate()),
    Quantize(then=Summarize(max_tokens=24)),
    Pipeline([ClearToolResults(0, 0), Quantize("k8v4", Truncate()), Quantize("k4v2", Truncate())]),
    Fallback(Quantize(then=NoOp()), Truncate()),
    ScoredEviction(),
    ScoredEviction("keydiff", keep_last=0),
    Quantize(then=ScoredEviction("expected", keep_last=3)),
]
GENTLE: list[Policy] = [
    NoOp(),
    ClearToolResults(),
    ClearToolResults(keep_last=0, min_tokens=0, exclude=("lookup",)),
    ClampOversized(),
    ClampOversized(max_fraction=0.05),
    Pipeline([ClampOversized(0.1), ClearToolResults(0, 0)]),
    Quantize(then=NoOp()),
    Quantize("unknown", then=ClampOversized(0.1)),
]


def described(policy: Policy) -> str:
    """A short test id."""
    return f"{policy.name}{len(repr(policy))}"


class TestDroppingPolicies(PolicyContract):
    """Policies that promise to fit."""

    @pytest.fixture(params=REACH_MUST, ids=described)
    def policy(self, request: pytest.FixtureRequest) -> Policy:
        """Each in turn."""
        policy: Policy = request.param
        return policy


class TestGentlePolicies(PolicyContract):
    """Policies that only edit, or do nothing."""

    drops = False

    @pytest.fixture(params=GENTLE, ids=described)
    def policy(self, request: pytest.FixtureRequest) -> Policy:
        """Each in turn."""
        policy: Policy = request.param
        return policy
