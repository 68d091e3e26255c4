"""Where metrics and managers are put together.

Invariant: a manager is changed in its settings only, before its first session: its log is watched and its attempts to
compact are heard. No session, policy or engine knows of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from compaction.errors import InvalidInput
from compaction.events import Event
from compaction.manager import SessionManager
from compaction.metrics.families import Compaction, Generation, Writes
from compaction.metrics.kv import KVGauges, Source
from compaction.metrics.watching import WatchedLog

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

__all__ = ["PORT", "Metrics", "Server"]

PORT = 9464
"""Where OpenTelemetry's Prometheus exporters listen by default; vLLM's own 8000 is its API's."""


class Metrics:
    """Counters, histograms and gauges of one or several managers. Safe to use from many threads.

    Args:
        registry: where they are registered; None: a registry of its own, which holds nothing else. Pass
            `prometheus_client.REGISTRY` to show them beside what a process exports already; one `Metrics` a registry.
        conversations: how many conversations get a KV series of their own, the heaviest first; the others are one
            series, `(other)`, so that the number of series stays bounded.

    Raises InvalidInput where prometheus-client is not installed.
    """

    def __init__(self, registry: CollectorRegistry | None = None, *, conversations: int = 20) -> None:
        if find_spec("prometheus_client") is None:
            raise InvalidInput("metrics need prometheus-client: pip install 'kv-compaction[metrics]'")
        from prometheus_client import CollectorRegistry

        if conversations < 0:
            raise InvalidInput(f"conversations is {conversations}: it cannot be negative")
        self.registry: CollectorRegistry = registry if registry is not None else CollectorRegistry()
        self._generation = Generation(self.registry)
        self._compaction = Compaction(self.registry)
        self._log = Writes(self.registry)
        self._kv = KVGauges(conversations)
        self.registry.register(self._kv)

    def attach(self, manager: SessionManager) -> SessionManager:
        """Count what this manager's sessions do from now on; returns the manager.

        Raises InvalidInput where it has sessions already: what they did before would be missing.
        """
        if manager.conversations:
            raise InvalidInput(f"attach metrics before the first session: {manager.conversations[0]!r} is open already")
        settings = manager.settings
        source = Source(manager)
        log = WatchedLog(settings.log, lambda *written: self._written(source, *written), self._log.failed)
        before = settings.observer

        def observe(conversation: str, trigger: str, outcome: object, seconds: float) -> None:
            self._compaction.attempted(trigger, outcome, seconds)
            if before is not None:
                before(conversation, trigger, outcome, seconds)

        manager.settings = replace(settings, log=log, observer=observe)
        self._kv.sources.append(source)
        return manager

    def text(self) -> str:
        """All metrics now, in the Prometheus exposition format."""
        from prometheus_client import generate_latest

        return generate_latest(self.registry).decode("utf-8")

    def serve(self, port: int = PORT, host: str = "127.0.0.1") -> Server:
        """Answer `GET /metrics` in a background thread until closed; port 0 takes a free one.

        Loopback unless told otherwise: names of conversations are among the labels.
        Raises InvalidInput where the port cannot be had.
        """
        from prometheus_client import start_http_server

        try:
            server, thread = start_http_server(port, addr=host, registry=self.registry)
        except (OSError, OverflowError) as exc:
            raise InvalidInput(f"cannot serve metrics on {host}:{port}: {exc}") from exc
        return Server(host, int(server.server_port), server, thread)

    def _written(self, source: Source, events: Sequence[Event], seconds: float) -> None:
        self._log.written(events, seconds)
        for event in events:
            source.seen[event.conversation] = None
            match event.kind:
                case "usage":
                    self._generation.used(source.model, event.payload)
                case "interrupted":
                    self._generation.interrupted.labels(source.model).inc()
                case "decision_committed" | "decision_failed":
                    self._compaction.decided(event.payload)
                case _:
                    pass


@dataclass(frozen=True)
class Server:
    """A running `/metrics` endpoint. A context manager; closing it twice does nothing."""

    host: str
    port: int
    _server: Any
    _thread: Any

    @property
    def url(self) -> str:
        """Where to look."""
        return f"http://{self.host}:{self.port}/metrics"

    def close(self) -> None:
        """Stop answering and free the port."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
