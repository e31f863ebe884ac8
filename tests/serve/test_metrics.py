"""The tiers' numbers as Prometheus reads them."""

from __future__ import annotations

import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from expertier.engine_adapter.abi.counters import counter_list
from expertier.engine_adapter.telemetry.metrics import MetricsServer, TierCollector, metric_name
from expertier.errors import ConfigError
from servers.served import complete


@pytest.fixture
def scrape(server):
    with MetricsServer(TierCollector(server.tiers.stats, server.binding.counters), 0) as metrics:
        assert metrics.url.startswith("http://127.0.0.1:")

        def scrape():
            with urllib.request.urlopen(metrics.url, timeout=5) as answer:
                text = answer.read().decode()
            families = list(text_string_to_metric_families(text))
            assert len({family.name for family in families}) == len(families)
            for family in families:
                assert family.name.startswith("expertier_")
                assert family.documentation
                assert family.type in ("counter", "gauge")
            return {
                (sample.name, sample.labels.get("path")): sample.value
                for family in families
                for sample in family.samples
                if not sample.name.endswith("_created")
            }

        yield scrape


def test_they_are_the_tiers_own_numbers(server, client, scrape):
    before = scrape()
    complete(client, "a prompt for the metrics")
    after, stats, proxy = scrape(), server.tiers.stats(), server.binding.counters()
    for tier in ("l1", "l2"):
        numbers = getattr(stats, tier)
        for name in ("hits", "misses", "evictions"):
            assert after[f"expertier_{tier}_{name}_total", None] == getattr(numbers, name)
        for name in ("budget_bytes", "used_bytes"):
            assert after[f"expertier_{tier}_{name}", None] == getattr(numbers, name)
    assert after["expertier_l1_slots", None] == stats.l1.slots
    assert after["expertier_expert_bytes_total", "into_l1"] == stats.l1.bytes_in
    assert after["expertier_expert_bytes_total", "from_file"] == stats.file.bytes_read
    assert after["expertier_file_read_failures_total", None] == stats.file.failures
    assert after["expertier_proxy_fill_seconds_total", None] == pytest.approx(proxy.fill_ns / 1e9)
    for counter, value in zip(counter_list(), proxy.as_dict().values(), strict=True):
        scale = 1e9 if counter.name.endswith("_ns") else 1
        name = f"expertier_{metric_name(counter)}" + "_total" * counter.grows
        assert after[name, None] == pytest.approx(value / scale), counter
    assert after["expertier_load_skipped_bytes_total", None] == server.tiers.table.expert_bytes_total
    assert all(after[name] >= value for name, value in before.items() if name[0].endswith("_total"))
    assert after["expertier_l1_hits_total", None] > before["expertier_l1_hits_total", None]


def test_a_taken_port_is_refused_and_a_closed_one_is_free(server):
    collector = TierCollector(server.tiers.stats, server.binding.counters)
    with MetricsServer(collector, 0) as metrics:
        port = int(metrics.url.split(":")[2].split("/")[0])
        with pytest.raises(ConfigError, match="metrics-port"):
            MetricsServer(collector, port)
    metrics.close()
    MetricsServer(collector, port).close()
