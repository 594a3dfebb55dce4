"""Pieces of SVG as text, with all words escaped. Pure. Lengths are in the picture's own units."""

from __future__ import annotations

from html import escape


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    """Return a line of text; ``kind``: its class."""
    return f'<text x="{x:.1f}" y="{y:.1f}"{_class(kind)} text-anchor="{anchor}">{escape(words)}</text>'


def rect(
    x: float, y: float, width: float, height: float, fill: str = "", tip: str = "", kind: str = "", least: float = 0.3
) -> str:
    """Return a rectangle, at least ``least`` wide; ``tip``: shown under the pointer."""
    colour = f' fill="{fill}"' if fill else ""
    where = f'x="{x:.2f}" y="{short(y)}" width="{max(width, least):.2f}" height="{short(height)}"'
    return (
        f"<rect {where}{_class(kind)}{colour}>{title(tip)}</rect>" if tip else f"<rect {where}{_class(kind)}{colour}/>"
    )


def title(tip: str) -> str:
    """Return what is shown under the pointer."""
    return f"<title>{escape(tip)}</title>" if tip else ""


def short(value: float) -> str:
    """Return a length with at most two decimals."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _class(kind: str) -> str:
    return f' class="{escape(kind)}"' if kind else ""
