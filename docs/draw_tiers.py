"""Draws docs/tiers.svg: the four tiers, what moves between them, and where the engine looks experts up.

Run `python docs/draw_tiers.py` after a change; the picture is committed, because the README shows it.
"""

from __future__ import annotations

from pathlib import Path
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 860, 430
FONT = "font-family='system-ui, -apple-system, Segoe UI, Roboto, sans-serif'"

TIERS = (
    ("L1", "slab", "device memory; today host memory", "one slot an expert, a range a layer", "#2f6f4f"),
    (
        "L2",
        "host pool",
        "host memory with its own budget",
        "one block an expert, the oldest goes first",
        "#3b5b8c",
    ),
    (
        "L3",
        "page cache",
        "the kernel's memory, through the GGUF",
        "never pinned, never counted as ours",
        "#7a5a2f",
    ),
    (
        "L4",
        "disk",
        "the GGUF file, only ever opened to read",
        "the one complete copy of the experts",
        "#6b4a6f",
    ),
)
MOVES = ("copy into a slot", "read into a block", "read ahead by the kernel")


def text(x: float, y: float, words: str, size: int = 14, *, fill: str = "#1d1d1f", extra: str = "") -> str:
    """Return one line of text."""
    return f"<text x='{x}' y='{y}' font-size='{size}' fill='{fill}' {FONT} {extra}>{escape(words)}</text>"


def box(x: float, y: float, w: float, h: float, fill: str, stroke: str) -> str:
    """Return a rounded box."""
    return f"<rect x='{x}' y='{y}' width='{w}' height='{h}' rx='8' fill='{fill}' stroke='{stroke}' stroke-width='1.5'/>"


def arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    """Return a straight arrow."""
    return f"<line x1='{x1}' y1='{y1}' x2='{x2}' y2='{y2}' stroke='#444' stroke-width='1.6' marker-end='url(#head)'/>"


def draw() -> str:
    """Return the picture as SVG."""
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {HEIGHT}' width='{WIDTH}' height='{HEIGHT}'>",
        "<defs><marker id='head' viewBox='0 0 10 10' refX='9' refY='5' markerWidth='7' markerHeight='7' "
        "orient='auto-start-reverse'><path d='M0 0 10 5 0 10z' fill='#444'/></marker></defs>",
        f"<rect width='{WIDTH}' height='{HEIGHT}' fill='#ffffff'/>",
    ]
    # Left: the engine and our proxy in it.
    parts += [
        box(24, 30, 300, 372, "#f6f6f4", "#b8b8b0"),
        text(40, 56, "llama.cpp, unmodified", 16, extra="font-weight='600'"),
        text(40, 78, "graph of one layer", 12, fill="#555"),
    ]
    nodes = ("attention", "router: expert ids", "MUL_MAT_ID gate, up, down", "weighted sum")
    for i, name in enumerate(nodes):
        y = 92 + 58 * i
        ours = i == 2
        parts.append(box(40, y, 268, 38, "#e3efe8" if ours else "#ffffff", "#2f6f4f" if ours else "#b8b8b0"))
        parts.append(text(54, y + 24, name))
        if i:
            parts.append(arrow(174, y - 20, 174, y - 2))
    parts += [
        box(40, 328, 268, 58, "#ffffff", "#2f6f4f"),
        text(54, 350, "expertier proxy device", 14, extra="font-weight='600'"),
        text(54, 370, "reads the ids once, points at the slots", 12, fill="#555"),
    ]
    # Right: the tiers.
    for i, (short, name, what, detail, colour) in enumerate(TIERS):
        y = 30 + 98 * i
        parts.append(box(430, y, 406, 74, "#ffffff", colour))
        parts.append(f"<rect x='430' y='{y}' width='54' height='74' rx='8' fill='{colour}'/>")
        parts.append(
            text(457, y + 44, short, 18, fill="#ffffff", extra="text-anchor='middle' font-weight='700'")
        )
        parts.append(text(500, y + 22, name, 14, extra="font-weight='600'"))
        parts.append(text(500, y + 42, what, 12, fill="#333"))
        parts.append(text(500, y + 60, detail, 12, fill="#777"))
        if i:
            parts.append(arrow(633, y - 2, 633, y - 22))
            parts.append(text(645, y - 8, MOVES[i - 1], 11, fill="#555"))
    parts += [
        arrow(308, 211, 426, 76),
        text(330, 72, "hit: a table", 12, fill="#2f6f4f"),
        text(330, 88, "look-up", 12, fill="#2f6f4f"),
        arrow(308, 352, 426, 166),
        text(376, 290, "miss: fill", 12, fill="#8a3b2f"),
        text(376, 306, "the slot", 12, fill="#8a3b2f"),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    (Path(__file__).parent / "tiers.svg").write_text(draw())
