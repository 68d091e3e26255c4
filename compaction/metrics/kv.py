"""KV bytes, measured when somebody looks.

Invariant: a figure is what the engine measures from distinct tensor storages at that moment; it may wait for a forward
pass of the conversation that is running. A conversation that holds nothing has no series.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from compaction.kv.residency.pool import PoolView
from compaction.manager import SessionManager
from compaction.ports import Engine

if TYPE_CHECKING:
    from prometheus_client.core import Metric

__all__ = ["NO_MODEL", "OTHERS", "KVGauges", "Source"]

NO_MODEL = "none"
"""The `model_name` of a manager without an engine."""
OTHERS = "(other)"
"""The `conversation` of all that have no series of their own."""
_Key = tuple[int, str]


@dataclass(eq=False, slots=True)
class Source:
    """A manager, and the conversations that may hold a cache in its engine."""

    manager: SessionManager
    seen: dict[str, None] = field(default_factory=dict)

    @property
    def engine(self) -> Engine | None:
        """Where the caches are."""
        return self.manager.settings.engine

    @property
    def model(self) -> str:
        """What its series are called."""
        return self.engine.name if self.engine else NO_MODEL

    def measure(self) -> dict[str, int]:
        """Bytes of each conversation that holds any."""
        found: dict[str, int] = {}
        if self.engine is None:
            return found
        sessions = set(self.manager.conversations)
        for conversation in list(self.seen):
            held = self.engine.kv_bytes(conversation)
            if held:
                found[conversation] = held
            elif conversation not in sessions:
                self.seen.pop(conversation, None)  # the next event of a conversation that goes on puts it back
        return found

    @property
    def allowed(self) -> int:
        """KV bytes one conversation may hold: its limit in tokens times the bytes of a token."""
        settings = self.manager.settings
        per_token = settings.engine.kv_bytes_per_token if settings.engine else 0
        limits = settings.budget.limits(window=settings.window, max_new_tokens=0, kv_bytes_per_token=per_token)
        return limits.limit * per_token


class KVGauges:
    """A collector: its gauges are made anew each time the registry is asked."""

    def __init__(self, most: int) -> None:
        self.sources: list[Source] = []
        self._most = most

    def collect(self) -> Iterator[Metric]:
        """KV bytes by conversation and in all, how many conversations that is, and the share of what they may hold.

        Where caches share a pool, that is the pool's bytes on the device; its tiers and what it did come on top.
        """
        from prometheus_client.core import GaugeMetricFamily

        def gauge(name: str, help: str, *more: str) -> GaugeMetricFamily:
            return GaugeMetricFamily(f"compaction_{name}", help, labels=["model_name", *more])

        one = gauge("conversation_kv_bytes", "Measured bytes of a conversation's KV cache.", "conversation")
        pool = gauge("kv_cache_bytes", "Measured bytes of all KV caches.")
        holders = gauge("kv_cache_conversations", "Conversations that hold a KV cache.")
        share = gauge("kv_cache_usage_perc", "KV bytes by what the conversations may hold. 1 means 100 percent usage.")
        for model, sources in self._by_model().items():
            held, allowed = self._held(sources)
            used = sum(held.values())
            pool.add_metric([model], used)
            holders.add_metric([model], len(held))
            pools = _pools(sources)
            allowed = sum(each.budget.device_bytes for each in pools) or allowed
            share.add_metric([model], used / allowed if allowed else 0.0)
            for conversation, size in self._shown(held).items():
                one.add_metric([model, conversation], size)
        yield from (one, pool, holders, share)
        yield from self._tiers()

    def _tiers(self) -> Iterator[Metric]:
        """What pools hold in each tier, and what they have done."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        model = ["model_name"]
        held = GaugeMetricFamily("compaction_pool_bytes", "Bytes of a pool's tier.", labels=[*model, "tier"])
        budget = GaugeMetricFamily("compaction_pool_budget_bytes", "What a tier may hold.", labels=[*model, "tier"])
        holders = GaugeMetricFamily("compaction_pool_conversations", "Caches in a tier.", labels=[*model, "tier"])
        parks = CounterMetricFamily("compaction_pool_parks", "Caches that left the device.", labels=model)
        back = CounterMetricFamily("compaction_pool_restores", "Caches that came back.", labels=[*model, "tier"])
        gone = CounterMetricFamily("compaction_pool_dropped", "Caches that no tier had room for.", labels=model)
        refused = CounterMetricFamily("compaction_pool_refused", "Caches not used.", labels=[*model, "reason"])
        for name, sources in self._by_model().items():
            for usage in (pool.usage() for pool in _pools(sources)):
                for tier, of in (("device", usage.device), ("host", usage.host), ("disk", usage.disk)):
                    held.add_metric([name, tier], of.bytes)
                    budget.add_metric([name, tier], of.budget)
                    holders.add_metric([name, tier], of.conversations)
                parks.add_metric([name], usage.parks)
                gone.add_metric([name], usage.dropped)
                for tier, count in usage.restores.items():
                    back.add_metric([name, tier], count)
                for reason, count in usage.refused.items():
                    refused.add_metric([name, reason], count)
        yield from (held, budget, holders, parks, back, gone, refused)

    def _by_model(self) -> dict[str, list[Source]]:
        """Managers of models that go by one name share series."""
        found: dict[str, list[Source]] = {}
        for source in self.sources:
            if source.engine is not None:
                found.setdefault(source.model, []).append(source)
        return found

    def _held(self, sources: Sequence[Source]) -> tuple[dict[_Key, int], int]:
        """Bytes of each cache, and what all of them together may hold; managers that share an engine share caches."""
        held: dict[_Key, int] = {}
        allowed = 0
        for source in sources:
            for conversation, size in source.measure().items():
                key = (id(source.engine), conversation)
                allowed += 0 if key in held else source.allowed
                held[key] = size
        return held, allowed

    def _shown(self, held: Mapping[_Key, int]) -> dict[str, int]:
        """The heaviest few by name, all others in one."""
        total: dict[str, int] = {}
        for (_, conversation), size in held.items():
            total[conversation] = total.get(conversation, 0) + size
        ranked = sorted(total.items(), key=lambda item: (-item[1], item[0]))
        shown = dict(ranked[: self._most])
        rest = sum(size for _, size in ranked[self._most :])
        if rest:
            shown[OTHERS] = shown.get(OTHERS, 0) + rest
        return shown


def _pools(sources: Sequence[Source]) -> list[PoolView]:
    """The pools of these managers, each once: managers that share an engine share its pool."""
    return list({id(source.manager.pool): source.manager.pool for source in sources if source.manager.pool}.values())
