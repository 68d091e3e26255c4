"""What every policy must do. Subclass `PolicyContract` and provide a `policy` fixture.

    class TestMine(PolicyContract):
        @pytest.fixture
        def policy(self): return MyPolicy(...)

        factories = {**BUILTIN, "mine": MyPolicy}

Set `drops = False` for a policy that does not promise to reach `target.must` by dropping. The views are generated;
hash-seed independence is tested in fresh processes, for which the policy has to be made again from its parameters.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from compaction.budget import Target
from compaction.plan import Digest, Drop, Plan, Quantize
from compaction.policies import BUILTIN, Factory, make
from compaction.ports import Policy, planned
from compaction.testing import check_conservation
from compaction.view import View
from tests.policies.views import small_views, targets

SETTINGS = settings(
    max_examples=int(os.environ.get("EXAMPLES", "25")),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.differing_executors],
)
_CHILD = """
import json, pickle, sys
from compaction.budget import Target
from compaction.policies import BUILTIN, make
from compaction.ports import planned
from tests.policies.views import PLAIN, STORAGES, agent_run, make_view
view = make_view(agent_run(40, parallel=3), user_first=True, pins=[9, 21], storage=PLAIN, storages=STORAGES)
name, params = json.loads(sys.argv[1])
policy = make(name, params, {**BUILTIN, **pickle.loads(bytes.fromhex(sys.argv[2]))})
targets = [Target(m, m // 2) for m in (900, 2500, view.tokens)]
targets += [Target(64 * m, 32 * m, "kv_bytes") for m in (900, 2500, view.tokens)]
plans = [planned(policy, view, target).to_json() for target in targets]
print(json.dumps(plans))
"""


def snapshot(view: View) -> tuple[Any, ...]:
    """All of a view that a plan could change."""
    texts = {id: (message.text, json.dumps(message.data)) for id, message in view.messages.items()}
    return view.entries, texts, view.tokens, view.floor, view.keep, view.pins, view.failures, view.storage


def touched(plan: Plan) -> list[str]:
    """Every entry each action names."""
    ids: list[str] = []
    for action in plan.actions:
        if not isinstance(action, Quantize):
            ids += action.entries if isinstance(action, Drop | Digest) else [action.message_id]
    return ids


def starts_with_user(view: View, entries: tuple[Any, ...]) -> bool:
    """Whether a user entry stands first after the leading ones, or nothing does."""
    return len(entries) <= view.leading or entries[view.leading].role == "user"


class PolicyContract:
    """One promise a test."""

    drops = True
    factories: ClassVar[Mapping[str, Factory]] = BUILTIN

    @SETTINGS
    @given(data=st.data())
    def test_a_plan_is_pure(self, policy: Policy, data: st.DataObject) -> None:
        """The same view and target give the same plan, and the view stays as it was."""
        view = data.draw(small_views())
        target = data.draw(targets(view))
        before = snapshot(view)

        plans = [planned(policy, view, target), planned(policy, view, target)]

        assert plans[0] == plans[1]
        assert snapshot(view) == before

    @SETTINGS
    @given(data=st.data())
    def test_a_plan_is_legal(self, policy: Policy, data: st.DataObject) -> None:
        """Nothing is touched twice, nothing that must stay goes, batches go whole, and a user stays first."""
        view = data.draw(small_views())
        plan = planned(policy, view, data.draw(targets(view)))

        applied = view.after(plan)

        ids = touched(plan)
        live = {entry.id for entry in applied.entries}
        gone = {entry.id for entry in view.entries} - live
        assert len(ids) == len(set(ids))
        assert not gone & view.keep
        for unit in view.units:
            assert len({entry.id in live for entry in view.entries[unit.start : unit.end]}) == 1
        if view.user_first and starts_with_user(view, view.entries):
            assert starts_with_user(view, applied.entries)

    @SETTINGS
    @given(data=st.data())
    def test_a_plan_that_does_something_makes_the_view_smaller(self, policy: Policy, data: st.DataObject) -> None:
        """A plan is empty, or the request is strictly smaller after it, in the unit of the target."""
        view = data.draw(small_views())

        target = data.draw(targets(view))

        plan = planned(policy, view, target)

        after = view.after(plan)
        smaller = (
            after.tokens < view.tokens if target.unit == "tokens" else (after.kv_bytes or 0) < (view.kv_bytes or 0)
        )
        assert not plan.actions or smaller

    @SETTINGS
    @given(data=st.data())
    def test_what_fits_by_dropping_fits(self, policy: Policy, data: st.DataObject) -> None:
        """Where dropping all that may go reaches `must`, the plan does."""
        view = data.draw(small_views())
        target = data.draw(targets(view))
        everything = [entry.id for unit in view.units if not unit.kept for entry in view.entries[unit.start : unit.end]]
        least = view.after(Plan((Drop(tuple(everything), "all"),) if everything else ()))
        user_stays = not view.user_first or starts_with_user(view, least.entries)

        plan = planned(policy, view, target)

        # Where a pinned assistant would come first, one user entry more stays: the core's own rung is for that.
        if self.drops and user_stays and least.within(target, "must"):
            assert view.after(plan).within(target, "must")

    @SETTINGS
    @given(data=st.data())
    def test_nothing_happens_where_the_target_is_met(self, policy: Policy, data: st.DataObject) -> None:
        """A view that is small enough is left alone."""
        view = data.draw(small_views())
        target = data.draw(targets(view))

        plan = planned(policy, view, target)

        assert not view.reaches(target) or plan == Plan()

    @SETTINGS
    @given(data=st.data())
    def test_pins_are_untouched(self, policy: Policy, data: st.DataObject) -> None:
        """A pinned message is in the view afterwards, without an edit."""
        view = data.draw(small_views())

        after = {entry.id: entry for entry in view.after(planned(policy, view, data.draw(targets(view)))).entries}

        assert all(after[pin.message_id].edits == () for pin in view.pins)

    @SETTINGS
    @given(data=st.data())
    def test_no_word_is_lost(self, policy: Policy, data: st.DataObject) -> None:
        """After two plans in a row, what is live and what is out partition every message."""
        view = data.draw(small_views())
        first = planned(policy, view, data.draw(targets(view)))
        left = view.advance(first)
        # What stands for a summary that is not written yet has no text; the session puts it there.
        written = replace(left, entries=tuple(replace(e, text="gist") if e.text == "" else e for e in left.entries))
        low = Target(must=max(written.tokens - 1, 0), want=0)

        second = written.after(planned(policy, written, low))

        check_conservation(view.messages, left.entries, view.after(first).discards)
        check_conservation(view.messages, second.entries, [*view.after(first).discards, *second.discards])

    @SETTINGS
    @given(data=st.data())
    def test_plan_and_parameters_survive_json(self, policy: Policy, data: st.DataObject) -> None:
        """A plan equals its JSON read back, and the policy made again from its parameters plans the same."""
        view = data.draw(small_views())
        target = data.draw(targets(view))
        plan = planned(policy, view, target)
        again = make(policy.name, json.loads(json.dumps(dict(policy.params))), self.factories)

        assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
        assert again.params == policy.params
        assert planned(again, view, target) == plan

    def test_its_identity_is_plain(self, policy: Policy) -> None:
        """Name, version and needs are what a decision can be written down with."""
        assert policy.name.isidentifier()
        assert isinstance(policy.version, int)
        assert isinstance(policy.needs, frozenset)
        assert all(isinstance(need, str) for need in policy.needs)

    def test_the_hash_seed_does_not_matter(self, policy: Policy) -> None:
        """Fresh processes with different hash seeds give the same bytes."""
        strangers = {name: factory for name, factory in self.factories.items() if name not in BUILTIN}
        described = json.dumps([policy.name, dict(policy.params)])

        outputs = [self._in_a_child(described, pickle.dumps(strangers).hex(), seed) for seed in ("1", "4242")]

        assert outputs[0] == outputs[1]
        assert outputs[0].strip()

    def _in_a_child(self, described: str, strangers: str, seed: str) -> str:
        env = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", _CHILD, described, strangers], capture_output=True, text=True, env=env, check=True
        )
        return done.stdout
