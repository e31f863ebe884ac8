"""Writes docs/counters.md from the list of the proxy's counters (engine_adapter/ggml_proxy/abi/counters.h).

Run `python docs/list_counters.py` after a change of the list; a test compares the two.
"""

from __future__ import annotations

from pathlib import Path

from expertier.engine_adapter.abi.counters import counter_list
from expertier.engine_adapter.telemetry.metrics import metric_name

PAGE = Path(__file__).with_name("counters.md")

_HEAD = """\
# What the proxy counts

For each model, since its tiers were bound. `LlamaModel.binding.counters()` returns these numbers by name, and
`expertier run --json` prints them under `proxy`; `--metrics-port` of `expertier serve` has them under the second name.
Over several devices they are sums. The table is made from `engine_adapter/ggml_proxy/abi/counters.h` by
`docs/list_counters.py`.

| counter | metric, after `expertier_` | meaning |
|---|---|---|
"""


def page() -> str:
    """Return the page's text."""
    rows = (
        f"| `{counter.name}` | `{metric_name(counter)}{'_total' if counter.grows else ''}` | {counter.meaning} |\n"
        for counter in counter_list()
    )
    return _HEAD + "".join(rows)


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
