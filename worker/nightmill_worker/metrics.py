"""Prometheus metrics of a worker, collected when they are asked for, and `/healthz` beside them.

Labels are bounded: tiers, ends, and at most MAX_JOBS jobs that are at work now.
"""

import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from nightmill.errors import ConfigError
from nightmill_worker.engine.stats import EngineStats
from nightmill_worker.fleet import Fleet
from nightmill_worker.model_host import ModelHost, Serving
from nightmill_worker.shard import ShardRun
from nightmill_worker.slots import TierSlots

MAX_JOBS = 20
# What an engine has now; everything else of EngineStats is a total.
_GAUGES = frozenset(
    {
        *("running", "waiting", "parked", "swapped", "mean_batch", "peak_pages", "predicted_peak_pages", "z"),
        *("host_pages_total", "host_pages_used"),
        *("pages_total", "pages_free", "pages_cached", "pages_active", "pages_in_flight"),
    }
)
_WORK_TOKENS = ("prompt", "cached", "computed", "recomputed", "generated")


class WorkerCollector(Collector):  # type: ignore[misc]  # prometheus_client is not looked into
    """Reads the fleet, its slots and its engine."""

    def __init__(self, fleet: Fleet, host: ModelHost, slots: TierSlots, worker_id: str) -> None:
        self._fleet = fleet
        self._host = host
        self._slots = slots
        self._worker_id = worker_id
        self._totals: dict[str, float] = {}  # of engines that are gone

    def collect(self) -> Iterator[Metric]:
        """All metrics as they stand."""
        info = GaugeMetricFamily("nightmill_worker_info", "Which worker this is.", labels=["worker", "model"])
        serving = self._host.serving
        info.add_metric([self._worker_id, serving.session.model.name if serving else ""], 1)
        yield info
        yield from self._shards(serving)
        yield self._bells()
        if serving is not None:
            yield from _jobs(serving.crew.active)
            yield from _feed(serving)
            stats = serving.session.supervisor.stats()
            yield from engine_metrics(stats)
            yield from work_metrics(stats)

    def _shards(self, serving: Serving | None) -> Iterator[Metric]:
        slots = GaugeMetricFamily("nightmill_slots", "Slots by tier and use.", labels=["tier", "state"])
        used = self._slots.used
        for tier, limit in self._slots.limits.items():
            slots.add_metric([tier.value, "limit"], limit)
            slots.add_metric([tier.value, "used"], used[tier])
        yield slots
        ended = CounterMetricFamily("nightmill_shard_attempts_ended", "Attempts by how they ended.", labels=["end"])
        for end, count in sorted(self._fleet.ends.items()):
            ended.add_metric([end], count)
        yield ended
        active = len(serving.crew.active) if serving is not None else 0
        yield GaugeMetricFamily("nightmill_shards_active", "Shards at work.", value=active)

    def _bells(self) -> Metric:
        bells = CounterMetricFamily("nightmill_bells", "Messages by tier and end.", labels=["tier", "end"])
        for (tier, end), count in sorted(self._fleet.bell_ends.items()):
            bells.add_metric([tier.value, end.value], count)
        return bells


def _jobs(active: list[ShardRun]) -> Iterator[Metric]:
    """Rows of shards at work, by job: the oldest MAX_JOBS, the others together as `other`."""
    rows = GaugeMetricFamily("nightmill_job_rows", "Rows of the shards at work here.", labels=["job", "tier", "state"])
    sums: dict[tuple[str, str], tuple[int, ...]] = {}
    known: list[str] = []
    for run in active:
        job_id = run.lease.job_id
        if job_id not in known and len(known) < MAX_JOBS:
            known.append(job_id)
        key = (job_id if job_id in known else "other", run.tier.value)
        progress = run.progress
        waiting = run.lease.range.num_rows - progress.rows_completed - progress.rows_failed - progress.rows_running
        values: tuple[int, ...] = (waiting, progress.rows_running, progress.rows_completed, progress.rows_failed)
        sums[key] = tuple(a + b for a, b in zip(sums.get(key, (0, 0, 0, 0)), values, strict=True))
    for (job, tier), values in sums.items():
        for state, value in zip(("waiting", "running", "done", "failed"), values, strict=True):
            rows.add_metric([job, tier, state], value)
    yield rows


def _feed(serving: Serving) -> Iterator[Metric]:
    status = serving.session.supervisor.status()
    feed = GaugeMetricFamily("nightmill_feed_requests", "Tokenised requests by place.", labels=["place"])
    feed.add_metric(["lookahead"], status.waiting)
    feed.add_metric(["engine"], status.in_engine)
    yield feed
    yield CounterMetricFamily("nightmill_engine_deaths", "Engines that died.", value=status.deaths)
    yield GaugeMetricFamily(
        "nightmill_isolating", "1: looking for the row that ends the engine.", value=float(status.isolating)
    )
    counts = serving.crew.counts
    rows = CounterMetricFamily("nightmill_rows", "Rows of shards held so far, by end.", labels=["end"])
    for end in ("completed", "failed", "resumed", "recomputed"):
        rows.add_metric([end], counts[end])
    yield rows


def engine_metrics(stats: Iterable[EngineStats]) -> Iterator[Metric]:
    """EngineStats field by field: totals over all engines of the session, states of the living one."""
    known = list(stats)
    for field in fields(EngineStats):
        values = [getattr(one, field.name) for one in known]
        if not values or not all(isinstance(value, int | float) for value in values):
            continue
        name = f"nightmill_engine_{re.sub('_n?s$', '_seconds', field.name)}"
        if field.name.endswith("_ns"):
            values = [value * 1e-9 for value in values]
        text = f"EngineStats.{field.name}"
        if field.name in _GAUGES:
            yield GaugeMetricFamily(name, text, value=values[-1])
        else:
            yield CounterMetricFamily(name, text, value=sum(values))
    share = known[-1].roofline_share if known else None
    if share is not None:
        text = "EngineStats.roofline_share of the living engine since it was started."
        yield GaugeMetricFamily("nightmill_engine_roofline_share", text, value=share)


def work_metrics(stats: Iterable[EngineStats]) -> Iterator[Metric]:
    """What jobs have had of the living engine: the MAX_JOBS that have most of its time, the others as `other`."""
    had = [work for one in list(stats)[-1:] for work in one.work or ()]
    most = {work.job_id for work in sorted(had, key=lambda work: -work.engine_ns)[:MAX_JOBS] if work.job_id}
    sums: dict[tuple[str, str], list[float]] = {}
    for work in had:
        key = (work.job_id if work.job_id in most else "other", work.tier.value)
        values = [work.engine_ns * 1e-9, *(float(getattr(work, f"{name}_tokens")) for name in _WORK_TOKENS)]
        sums[key] = [a + b for a, b in zip(sums.get(key, [0.0] * len(values)), values, strict=True)]
    seconds = GaugeMetricFamily("nightmill_job_engine_seconds", "WorkStats.engine_ns.", labels=["job", "tier"])
    tokens = GaugeMetricFamily("nightmill_job_tokens", "Token counts of WorkStats.", labels=["job", "tier", "kind"])
    for (job, tier), (engine_s, *counts) in sums.items():
        seconds.add_metric([job, tier], engine_s)
        for kind, count in zip(_WORK_TOKENS, counts, strict=True):
            tokens.add_metric([job, tier, kind], count)
    yield seconds
    yield tokens


class MetricsServer:
    """`/metrics` and `/healthz` on a port; port 0 takes a free one, `port` says which.

    Raises:
        ConfigError: the port is taken, or not ours to take.
    """

    def __init__(self, port: int, collector: Collector, health: Callable[[], dict[str, Any]]) -> None:
        registry = CollectorRegistry()
        for each in (collector, ProcessCollector(registry=None), PlatformCollector(registry=None)):
            registry.register(each)
        GCCollector(registry=registry)
        try:
            self._server = ThreadingHTTPServer(("", port), _handler(registry, health))
        except OSError as error:
            hint = "choose another, 0 for a free one, or end what listens there"
            raise ConfigError(f"port {port} for metrics: {error.strerror or error}", hint=hint) from error
        self._server.daemon_threads = True
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _handler(registry: CollectorRegistry, health: Callable[[], dict[str, Any]]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            """Answer."""
            match self.path.partition("?")[0]:
                case "/metrics":
                    self._send(200, CONTENT_TYPE_LATEST, generate_latest(registry))
                case "/healthz":
                    state = health()
                    code = 503 if state["status"] == "stuck" else 200
                    self._send(code, "application/json", json.dumps(state, default=str).encode())
                case _:
                    self._send(404, "text/plain", b"/metrics or /healthz\n")

        def log_message(self, *_: Any) -> None:
            """A scrape every few seconds is no news."""

        def _send(self, code: int, content_type: str, body: bytes) -> None:
            self.send_response(code)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    return Handler
