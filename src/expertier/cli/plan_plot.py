"""The plot of a plan: hit rate and predicted speed over the memory, the optimum and the chosen point."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from expertier.atomic_file import check_output, output
from expertier.cli.report import spread
from expertier.errors import ConfigError
from expertier.units import GIB

_PACKAGES = {".png": "matplotlib", ".html": "plotly"}
_BLUE, _ORANGE, _GREY = "#1f77b4", "#d95f02", "#888888"


def check_plot(path: Path) -> None:
    """Raise ConfigError where a plot cannot be drawn into `path`, before anything is computed."""
    package = _PACKAGES.get(path.suffix)
    if package is None:
        raise ConfigError(f"--plot is {path}: give a name that ends with {' or '.join(_PACKAGES)}")
    if importlib.util.find_spec(package) is None:
        raise ConfigError(
            f"--plot {path} needs {package}, which is not installed: pip install 'expertier[plot]', or give the other "
            f"form ({', '.join(suffix for suffix in _PACKAGES if suffix != path.suffix)})"
        )
    check_output(path, "the plot")


def write_plot(path: Path, document: dict[str, Any]) -> None:
    """Draw the document's `curve`, completely or not at all. Raises ConfigError where the file cannot be written."""
    with output(path, "the plot") as unfinished:
        (_png if path.suffix == ".png" else _html)(unfinished, document)


def _axis(document: dict[str, Any]) -> tuple[str, str]:
    if document["devices"]:
        return "total_bytes", "GiB of VRAM in use, all devices"
    return "arena_bytes", "GiB of RAM for slots"


def _title(document: dict[str, Any]) -> str:
    return (
        f"{Path(document['model']).name}: {document['layers']} layers, {spread(document['experts'])} experts, "
        f"top-{spread(document['experts_used'])}"
    )


def _chosen(document: dict[str, Any]) -> dict[str, Any]:
    points: list[dict[str, Any]] = document["curve"]
    return min(points, key=lambda point: abs(point["arena_bytes"] - document["arena_bytes"]))


def _png(path: Path, document: dict[str, Any]) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    key, label = _axis(document)
    points, chosen = document["curve"], _chosen(document)
    x = [point[key] / GIB for point in points]
    figure = Figure(figsize=(8, 7), layout="constrained")
    FigureCanvasAgg(figure)
    hits, speed = figure.subplots(2, 1, sharex=True)
    figure.suptitle(_title(document))
    percent = [100 * point["hit_rate"] for point in points]
    hits.fill_between(
        x, [100 * p["hit_rate_low"] for p in points], [100 * p["hit_rate_high"] for p in points],
        color=_BLUE, alpha=0.18, linewidth=0, label="range",
    )  # fmt: skip
    hits.plot(x, percent, color=_BLUE, label="expected")
    if points[0]["optimum"] is not None:
        hits.plot(
            x, [100 * p["optimum"] for p in points], color=_GREY, linestyle="--", label="optimum (Belady)"
        )
    hits.plot([chosen[key] / GIB], [100 * chosen["hit_rate"]], "o", color=_ORANGE, label="this plan")
    hits.set_ylabel("hit rate of decode, %")
    hits.set_ylim(0, 102)
    speed.fill_between(
        x, [p["decode"]["low"] for p in points], [p["decode"]["high"] for p in points],
        color=_BLUE, alpha=0.18, linewidth=0, label="range",
    )  # fmt: skip
    speed.plot(x, [p["decode"]["predicted"] for p in points], color=_BLUE, label="predicted")
    speed.plot([chosen[key] / GIB], [chosen["decode"]["predicted"]], "o", color=_ORANGE, label="this plan")
    speed.set_ylabel("decode, tokens/s")
    speed.set_ylim(bottom=0)
    speed.set_xlabel(label)
    for axes in (hits, speed):
        axes.grid(alpha=0.3)
        axes.legend(loc="lower right" if axes is hits else "upper left", frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130, format="png")


def _html(path: Path, document: dict[str, Any]) -> None:
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    key, label = _axis(document)
    points, chosen = document["curve"], _chosen(document)
    x = [point[key] / GIB for point in points]
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.06)
    bands = (
        (1, [100 * p["hit_rate_low"] for p in points], [100 * p["hit_rate_high"] for p in points]),
        (2, [p["decode"]["low"] for p in points], [p["decode"]["high"] for p in points]),
    )
    for row, low, high in bands:
        figure.add_trace(
            go.Scatter(
                x=[*x, *reversed(x)], y=[*high, *reversed(low)], fill="toself", mode="none", fillcolor=_BLUE,
                opacity=0.18, hoverinfo="skip", name="range", showlegend=row == 1,
            ),
            row=row, col=1,
        )  # fmt: skip
    lines = [
        (1, "hit rate, %", [100 * p["hit_rate"] for p in points], {"color": _BLUE}),
        (2, "decode, tokens/s", [p["decode"]["predicted"] for p in points], {"color": _BLUE}),
    ]
    if points[0]["optimum"] is not None:
        optimum = [100 * p["optimum"] for p in points]
        lines.append((1, "optimum (Belady), %", optimum, {"color": _GREY, "dash": "dash"}))
    for row, name, y, line in lines:
        figure.add_trace(go.Scatter(x=x, y=y, mode="lines", name=name, line=line), row=row, col=1)
    for row, value in ((1, 100 * chosen["hit_rate"]), (2, chosen["decode"]["predicted"])):
        figure.add_trace(
            go.Scatter(
                x=[chosen[key] / GIB], y=[value], mode="markers", marker={"color": _ORANGE, "size": 10},
                name="this plan", showlegend=row == 1,
            ),
            row=row, col=1,
        )  # fmt: skip
    figure.update_yaxes(title_text="hit rate of decode, %", range=[0, 102], row=1, col=1)
    figure.update_yaxes(title_text="decode, tokens/s", rangemode="tozero", row=2, col=1)
    figure.update_xaxes(title_text=label, row=2, col=1)
    figure.update_layout(title=_title(document), template="simple_white", height=720)
    figure.write_html(path, include_plotlyjs=True)
