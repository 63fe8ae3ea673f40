"""Small inline SVG charts, coloured by the page's CSS so that they follow its light or dark mode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from markupsafe import Markup, escape


class Point(NamedTuple):
    """A value at x with its interval, in the unit of the y axis."""

    x: int
    p: float
    low: float
    high: float


WIDTH, HEIGHT = 720, 260
LEFT, RIGHT, TOP, BOTTOM = 44, 16, 14, 36


def curve(points: Sequence[Point], label: str) -> Markup:
    """A line with its interval as a band; the y axis holds 0 to 1 and whatever lies outside."""
    if not points:
        return Markup("")
    y0, y1 = min(0.0, *(p.low for p in points)), max(1.0, *(p.high for p in points))
    x0, x1 = points[0].x, points[-1].x

    def x(v: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * ((v - x0) / (x1 - x0) if x1 > x0 else 0.5)

    def y(v: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (y1 - v) / (y1 - y0)

    out = []
    for i in range(5):
        v = y0 + (y1 - y0) * i / 4
        out.append(_line(LEFT, y(v), WIDTH - RIGHT, y(v), "grid"))
        out.append(_text(LEFT - 8, y(v) + 4, f"{v:.2f}", "end"))
    step = max(1, -(-len(points) // 12))
    out += [_text(x(p.x), HEIGHT - BOTTOM + 18, str(p.x), "middle") for p in points[::step]]
    out.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 2, "iteration", "middle"))
    band = [(x(p.x), y(p.high)) for p in points] + [(x(p.x), y(p.low)) for p in reversed(points)]
    out.append(Markup('<polygon class="band" points="{}"/>').format(_path(band)))
    line = [(x(p.x), y(p.p)) for p in points]
    out.append(Markup('<polyline class="line" points="{}"/>').format(_path(line)))
    for p in points:
        tip = f"iteration {p.x}: {p.p:.3f} [{p.low:.3f}, {p.high:.3f}]"
        if len(points) == 1:
            out.append(_line(x(p.x), y(p.low), x(p.x), y(p.high), "line"))
        out.append(_dot(x(p.x), y(p.p), 3.5, "after", tip))
    return _svg(WIDTH, HEIGHT, label, out)


def dumbbell(before: Point | None, after: Point | None, label: str) -> Markup:
    """Two values between 0 and 1 on one line, each with its interval: the change of one row of a table."""
    width, height, pad = 260, 26, 8

    def x(v: float) -> float:
        return pad + (width - 2 * pad) * v

    out = [_line(x(v), 2, x(v), height - 2, "grid") for v in (0, 0.5, 1)]
    for point, style, y in ((before, "before", 9.0), (after, "after", 17.0)):
        if point is None:
            continue
        out.append(_line(x(point.low), y, x(point.high), y, f"range {style}"))
        out.append(_dot(x(point.p), y, 4, style, f"{style}: {point.p:.3f} [{point.low:.3f}, {point.high:.3f}]"))
    return _svg(width, height, label, out, "dumbbell")


def ranges(rows: Sequence[tuple[str, Point]], label: str) -> Markup:
    """Values between 0 and 1 with their intervals, one a line below the others, each with its name."""
    if not rows:
        return Markup("")
    row, left, right = 24, 250, 60
    height = row * len(rows) + 22

    def x(v: float) -> float:
        return left + (WIDTH - left - right) * v

    out = []
    for v in (0, 0.25, 0.5, 0.75, 1):
        out += [_line(x(v), 0, x(v), height - 22, "grid"), _text(x(v), height - 6, f"{v:.2f}", "middle")]
    for i, (name, p) in enumerate(rows):
        y = row * i + row / 2
        out += [_text(left - 10, y + 4, name, "end"), _line(x(p.low), y, x(p.high), y, "range after")]
        out.append(_dot(x(p.p), y, 4, "after", f"{name}: {p.p:.3f} [{p.low:.3f}, {p.high:.3f}]"))
        out.append(_text(WIDTH - right + 12, y + 4, f"{p.p:.3f}", "start"))
    return _svg(WIDTH, height, label, out)


def bars(rows: Sequence[tuple[str, float, str]], label: str) -> Markup:
    """Horizontal bars of (name, value >= 0, text beside the bar), the longest across the chart."""
    if not rows:
        return Markup("")
    row, left, right = 26, 130, 90
    top = max(v for _, v, _ in rows) or 1.0
    out = []
    for i, (name, value, text) in enumerate(rows):
        y = i * row
        length = (WIDTH - left - right) * value / top
        out.append(_text(left - 10, y + 17, name, "end"))
        out.append(
            Markup('<rect class="bar" x="{}" y="{}" width="{:.1f}" height="16" rx="2"/>').format(left, y + 5, length)
        )
        out.append(_text(left + length + 8, y + 17, text, "start"))
    return _svg(WIDTH, row * len(rows), label, out)


def _svg(width: int, height: int, label: str, parts: Sequence[Markup], style: str = "chart") -> Markup:
    head = Markup('<svg class="{}" viewBox="0 0 {} {}" role="img" aria-label="{}">')
    return head.format(style, width, height, label) + Markup("").join(parts) + Markup("</svg>")


def _line(x0: float, y0: float, x1: float, y1: float, style: str) -> Markup:
    return Markup('<line class="{}" x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}"/>').format(style, x0, y0, x1, y1)


def _dot(x: float, y: float, r: float, style: str, tip: str) -> Markup:
    return Markup('<circle class="{}" cx="{:.1f}" cy="{:.1f}" r="{}"><title>{}</title></circle>').format(
        style, x, y, r, tip
    )


def _text(x: float, y: float, text: str, anchor: str) -> Markup:
    return Markup('<text x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>').format(x, y, anchor, escape(text))


def _path(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
