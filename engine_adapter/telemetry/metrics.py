"""The tiers' numbers in Prometheus' text form, on a port of their own."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator
from socketserver import ThreadingMixIn
from types import TracebackType
from typing import Any, Self
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from expertier.engine_adapter.abi.counters import Counter, ProxyCounters, counter_list
from expertier.engine_adapter.allowed_hosts import AllowedHosts
from expertier.errors import ConfigError
from expertier.tiers.shared.stats import TierStats

try:
    from prometheus_client import CollectorRegistry, make_wsgi_app
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
    from prometheus_client.registry import Collector
except ImportError as missing:  # pragma: no cover - an installation without the extra
    raise ConfigError(
        "metrics need the package prometheus-client: pip install 'expertier[serve]', or leave --metrics-port out"
    ) from missing

_NANOSECONDS = 1e-9
_OTHER_NAMES = {"dropped_writes": "load_skipped_bytes"}
"""Counters of the proxy whose metric has another name than the counter."""


def metric_name(counter: Counter) -> str:
    """Return the name of the metric for a counter of the proxy, without `expertier_` and `_total`."""
    name = counter.name.removesuffix("_ns") + "_seconds" * counter.name.endswith("_ns")
    return _OTHER_NAMES.get(counter.name, f"proxy_{name}")


class TierCollector(Collector):
    """Reads the tiers' and the proxy's counters whenever it is scraped."""

    def __init__(self, stats: Callable[[], TierStats], counters: Callable[[], ProxyCounters]) -> None:
        self._stats = stats
        self._counters = counters

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics with their present values."""
        stats, proxy = self._stats(), self._counters()
        l1, l2, file = stats.l1, stats.l2, stats.file
        for tier, name, numbers in (("l1", "expert slots", l1), ("l2", "host pool", l2)):
            yield _counter(f"{tier}_hits", f"Experts found in the {name}.", numbers.hits)
            yield _counter(f"{tier}_misses", f"Experts not found in the {name}.", numbers.misses)
            yield _counter(f"{tier}_evictions", f"Experts that left the {name}.", numbers.evictions)
            yield _gauge(f"{tier}_budget_bytes", f"Budget of the {name}.", numbers.budget_bytes)
            yield _gauge(
                f"{tier}_used_bytes", f"Bytes of the budget that the {name} use.", numbers.used_bytes
            )
        yield _gauge("l1_slots", "Expert slots of all layers.", l1.slots)
        yield _gauge("l2_peak_bytes", "The most that the host pool ever took.", l2.peak_bytes)
        yield _gauge("l2_bounce_bytes", "Bounce blocks beside the host pool.", l2.bounce_bytes)
        paths = CounterMetricFamily(
            "expertier_expert_bytes", "Expert bytes moved, by the path of the move.", labels=["path"]
        )
        for path, n_bytes in (
            ("into_l1", l1.bytes_in),
            ("into_l2", l2.bytes_in),
            ("from_file", file.bytes_read),
        ):
            paths.add_metric([path], n_bytes)
        yield paths
        yield _counter(
            "l2_ahead_fills", "Experts read into the host pool before a layer asked for them.", l2.ahead_fills
        )
        yield _counter("l2_ahead_bytes", "Bytes of the experts that were read ahead.", l2.ahead_bytes)
        yield _counter("l2_refusals", "Allocations that the host pool was refused.", l2.refusals)
        yield _counter(
            "l2_given_back_bytes", "Bytes that the host pool gave back under pressure.", l2.given_back_bytes
        )
        yield _counter("moves", "Moves of the slots.", stats.moves.moves)
        yield _counter(
            "moved_bytes", "Bytes that moves of the slots copied within the device.", stats.moves.moved_bytes
        )
        yield _counter("prefetches", "Experts that were prefetched.", stats.prefetch.done)
        yield _counter(
            "prefetch_useful_bytes",
            "Bytes that were prefetched, and that a layer asked for later.",
            stats.prefetch.useful_bytes,
        )
        yield _counter(
            "prefetch_wasted_bytes", "Bytes that were prefetched in vain.", stats.prefetch.wasted_bytes
        )
        yield _counter("file_reads", "Reads of the model's file that returned all bytes.", file.reads)
        yield _counter("file_read_failures", "Reads of the model's file that failed.", file.failures)
        yield from _proxy_metrics(proxy)


class MetricsServer:
    """Serves the metrics on `host`:`port` until it is closed; port 0 takes a free port.

    Only requests for a name of loopback or for one of `hosts` are answered.
    """

    def __init__(
        self,
        collector: TierCollector,
        port: int,
        hosts: AllowedHosts | None = None,
        host: str = "127.0.0.1",
    ) -> None:
        """Raises `ConfigError` where the port cannot be used."""
        registry = CollectorRegistry()
        registry.register(collector)
        guarded = _guarded(make_wsgi_app(registry), hosts or AllowedHosts.of(host))
        try:
            self._server = make_server(host, port, guarded, _Server, handler_class=_SilentHandler)
        except OSError as error:
            raise ConfigError(
                f"--metrics-port {port} of {host} cannot be used: {error.strerror}; give another port"
            ) from error
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="expertier-metrics", daemon=True
        )
        self._thread.start()
        self._closed = False
        self.url = f"http://{host}:{self._server.server_port}/metrics"

    def close(self) -> None:
        """Stop serving and free the port; a second call does nothing."""
        if not self._closed:
            self._closed = True
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _SilentHandler(WSGIRequestHandler):
    timeout = 10

    def log_message(self, *_: object) -> None:
        """Log nothing, as a scraper asks every few seconds."""


def _guarded(app: Callable[..., Iterable[bytes]], hosts: AllowedHosts) -> Callable[..., Iterable[bytes]]:
    """Return the application; it answers only requests for an allowed host."""

    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        host, origin = environ.get("HTTP_HOST"), environ.get("HTTP_ORIGIN")
        if hosts.allows_host(host) and hosts.allows_origin(origin):
            return app(environ, start_response)
        message = (
            f"metrics are for localhost, loopback addresses and what the server was started with, not for the host "
            f"{host!r} or the web page {origin!r}: start it with --allow-host and that name"
        )
        start_response("403 Forbidden", [("Content-Type", "application/json; charset=utf-8")])
        return [json.dumps({"error": {"code": 403, "message": message, "type": "permission_error"}}).encode()]

    return answer


def _proxy_metrics(counted: ProxyCounters) -> Iterator[Metric]:
    for counter, value in zip(counter_list(), counted.as_dict().values(), strict=True):
        text = counter.meaning[0].upper() + counter.meaning[1:] + "."
        scale = _NANOSECONDS if counter.name.endswith("_ns") else 1
        yield (_counter if counter.grows else _gauge)(metric_name(counter), text, value * scale)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"expertier_{name}", text, value=value)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"expertier_{name}", text, value=value)
