"""Charts as SVG text: bars with intervals, stacked bars, lines, points. Each stands alone, as a file or in a page.

Colours are Okabe and Ito's, told apart by the colour-blind; series differ by marker and dash too, so that a grey print
can be read. Knows numbers and labels; knows no results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

from dartspec.accounting import with_interval

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D31", "#555555")
DASHES = ("", "6 3", "2 3", "8 3 2 3", "4 4", "1 2", "10 4", "3 1")
INK, SOFT, GRID = "#222222", "#666666", "#E3E3E3"
FONT = "font-family='system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif'"
WIDTH = 720
SIZE = 12  # of labels
CHAR = 7.0  # their mean width, rather more than less

Point = tuple[float, float]


@dataclass
class Series:
    """name, and (x, y) points; `low` and `high` of each where there is an interval."""

    name: str
    points: Sequence[Point]
    low: Sequence[float] = field(default_factory=list)
    high: Sequence[float] = field(default_factory=list)


def colours(names: Sequence[str]) -> dict[str, str]:
    """One colour a name; plain decoding is grey."""
    others = [n for n in dict.fromkeys(names) if n != "plain"]
    return {n: COLOURS[i % (len(COLOURS) - 1)] for i, n in enumerate(others)} | {"plain": "#8A8A8A"}


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers from low to high."""
    if not high > low:
        return [low]
    raw = (high - low) / most
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(s * unit for s in (1, 2, 2.5, 5, 10) if s * unit >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(k * step, 10) for k in range(first, int(high / step + 1e-9) + 1)]


def number(x: float) -> str:
    return f"{x:g}"


def bars(
    categories: Sequence[str],
    series: Mapping[str, Sequence[tuple[float, float, float] | None]],
    colour: Mapping[str, str],
    *,
    unit: str,
    mark: float | None = 1.0,
) -> str:
    """Horizontal bars by category and series, each (value, low, high) with its interval. mark: a line to compare."""
    left = 20 + CHAR * max(len(c) for c in categories)
    each, gap, top = 15, 12, _legend_height(series) + 8
    height_of = each * len(series) + gap
    bottom = top + height_of * len(categories)
    highest = max((v[2] for s in series.values() for v in s if v), default=1.0)
    x = _scale(0.0, max(highest, mark or 0) * 1.08, left, WIDTH - 70)
    parts = [_legend(series, colour, boxes=True)]
    for t in ticks(0, highest * 1.05):
        parts.append(_line(x(t), top - 4, x(t), bottom, GRID))
        parts.append(_text(x(t), bottom + 16, number(t), SOFT, "middle"))
    parts.append(_text((left + WIDTH - 70) / 2, bottom + 34, unit, SOFT, "middle"))
    for i, category in enumerate(categories):
        y = top + i * height_of
        weight = "bold" if category == "all" else "normal"
        parts.append(_text(left - 8, y + each * len(series) / 2 + 4, category, INK, "end", weight))
        for k, (name, values) in enumerate(series.items()):
            value = values[i]
            if value is None:
                continue
            v, low, high = value
            at, middle = y + k * each, y + k * each + each / 2 - 1
            about = f"{category}, {name}: {with_interval((v, low, high))}"
            parts.append(
                f"<rect x='{x(0):.1f}' y='{at:.1f}' width='{max(0.5, x(v) - x(0)):.1f}' height='{each - 3}' "
                f"fill='{colour[name]}'><title>{escape(about)}</title></rect>"
            )
            if high > low:
                parts += [_line(x(low), middle, x(high), middle, INK, 1.2)]
                parts += [_line(x(e), middle - 3, x(e), middle + 3, INK, 1.2) for e in (low, high)]
            parts.append(_text(x(max(v, high)) + 5, middle + 4, f"{v:.2f}", INK, size=11))
    if mark is not None:
        parts.append(_line(x(mark), top - 4, x(mark), bottom, INK, 1, "3 3"))
    return _svg(bottom + 44, parts, f"{unit} by {', '.join(categories)}")


def stacks(rows: Sequence[tuple[str, Mapping[str, float]]], colour: Mapping[str, str], *, unit: str) -> str:
    """One horizontal bar a row, its parts side by side."""
    left, each, names = 20 + CHAR * max(len(n) for n, _ in rows), 26, list(rows[-1][1])
    top = _legend_height(names) + 6
    bottom = top + each * len(rows)
    highest = max(sum(parts.values()) for _, parts in rows)
    x = _scale(0, highest * 1.05, left, WIDTH - 70)
    out = [_legend(names, colour, boxes=True)]
    for t in ticks(0, highest):
        out += [_line(x(t), top - 4, x(t), bottom, GRID), _text(x(t), bottom + 16, number(t), SOFT, "middle")]
    for i, (name, parts) in enumerate(rows):
        y, begun = top + i * each, 0.0
        out.append(_text(left - 8, y + 14, name, INK, "end"))
        for part, value in parts.items():
            width = x(begun + value) - x(begun)
            about = f"{name}, {part}: {value:.2f}"
            out.append(
                f"<rect x='{x(begun):.1f}' y='{y}' width='{max(width, 0):.1f}' height='{each - 7}' "
                f"fill='{colour[part]}'><title>{escape(about)}</title></rect>"
            )
            if width > 34:
                out.append(_text(x(begun) + width / 2, y + 14, f"{value:.1f}", "#FFFFFF", "middle", size=11))
            begun += value
        out.append(_text(x(begun) + 6, y + 14, f"{begun:.1f}", INK, size=11))
    out.append(_text((left + WIDTH - 70) / 2, bottom + 34, unit, SOFT, "middle"))
    return _svg(bottom + 44, out, unit)


def lines(
    series: Sequence[Series],
    colour: Mapping[str, str],
    *,
    x_label: str,
    y_label: str,
    log2: bool = False,
    joined: bool = True,
    mark: float | None = None,
    diagonal: bool = False,
    zero: bool = True,
    height: int = 300,
) -> str:
    """Lines, or points where not joined, with bands for intervals. log2: a logarithmic x axis with ticks at the points.
    mark: a horizontal line; diagonal: the line y = x. Axes begin at 0 when zero."""
    names = [s.name for s in series]
    top, left, bottom = _legend_height(names) + 10, 56, _legend_height(names) + 10 + height
    xs = [p[0] for s in series for p in s.points]
    ys = [p[1] for s in series for p in s.points] + [v for s in series for v in (*s.low, *s.high)]
    ys += [mark] if mark is not None else []
    inner: Callable[[float], float] = (lambda v: math.log2(v)) if log2 else (lambda v: v)
    low_x = inner(min(xs)) if log2 or not zero else 0.0
    high_x, low_y, high_y = inner(max(xs)), 0.0 if zero else min(ys), max(ys)
    pad = 0.04 * (high_x - low_x or 1)
    if not zero:
        low_y -= 0.06 * (high_y - low_y or 1)
    if diagonal:
        low_x, high_x, pad, low_y, high_y = 0.0, 1.0, 0.0, 0.0, 1.0
    place = _scale(low_x - (pad if log2 or not zero else 0), high_x + pad, left, WIDTH - 24)
    y = _scale(low_y, high_y + 0.06 * (high_y - low_y or 1) * (not diagonal), bottom, top)

    def x(v: float) -> float:
        return place(inner(v))

    out = [_legend(names, colour, boxes=False, joined=joined)]
    for t in ticks(low_y, high_y):
        out += [_line(left, y(t), WIDTH - 24, y(t), GRID), _text(left - 8, y(t) + 4, number(t), SOFT, "end")]
    whole = sorted(set(xs))
    named = log2 or (len(whole) <= 16 and all(v == int(v) for v in whole))
    for t in whole if named else ticks(low_x, high_x, 8):
        out.append(_text(x(t), bottom + 18, number(t), SOFT, "middle"))
        out.append(_line(x(t), bottom, x(t), bottom + 4, SOFT))
    out.append(_line(left, bottom, WIDTH - 24, bottom, SOFT))
    out.append(_text((left + WIDTH - 24) / 2, bottom + 36, x_label, SOFT, "middle"))
    out.append(_text(left - 40, top - 10, y_label, SOFT))
    if mark is not None:
        out.append(_line(left, y(mark), WIDTH - 24, y(mark), INK, 1, "3 3"))
    if diagonal:
        out.append(_line(x(0), y(0), x(1), y(1), INK, 1, "3 3"))
    for i, s in enumerate(series):
        own, points = colour[s.name], sorted(zip(s.points, range(len(s.points)), strict=True))
        if s.low and joined:
            upper = [f"{x(p[0]):.1f},{y(s.high[k]):.1f}" for p, k in points]
            lower = [f"{x(p[0]):.1f},{y(s.low[k]):.1f}" for p, k in reversed(points)]
            out.append(f"<polygon points='{' '.join(upper + lower)}' fill='{own}' opacity='0.14'/>")
        if joined:
            path = " ".join(f"{x(p[0]):.1f},{y(p[1]):.1f}" for p, _ in points)
            dash = f" stroke-dasharray='{DASHES[i % len(DASHES)]}'" if DASHES[i % len(DASHES)] else ""
            out.append(f"<polyline points='{path}' fill='none' stroke='{own}' stroke-width='2'{dash}/>")
        for p, _ in points:
            out.append(_marker(i, x(p[0]), y(p[1]), own, f"{s.name}: {p[0]:g}, {p[1]:.3g}"))
    return _svg(bottom + 46, out, f"{y_label} against {x_label}")


def _scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    span = high - low or 1.0
    return lambda v: start + (v - low) / span * (end - start)


def _rows(names: Sequence[str] | Mapping[str, object]) -> list[list[str]]:
    """Legend entries, line by line."""
    found: list[list[str]] = [[]]
    used = 0.0
    for name in names:
        width = 44 + CHAR * len(name)
        if found[-1] and used + width > WIDTH - 20:
            found.append([])
            used = 0
        found[-1].append(name)
        used += width
    return found


def _legend_height(names: Sequence[str] | Mapping[str, object]) -> int:
    return 12 + 18 * len(_rows(names)) + 8


def _legend(
    names: Sequence[str] | Mapping[str, object], colour: Mapping[str, str], *, boxes: bool, joined: bool = True
) -> str:
    out, number_of = [], 0
    for row, entries in enumerate(_rows(names)):
        x, y = 10.0, 14 + 18 * row
        for name in entries:
            if boxes:
                out.append(f"<rect x='{x}' y='{y - 9}' width='14' height='11' fill='{colour[name]}'/>")
            else:
                if joined:
                    out.append(_line(x, y - 4, x + 18, y - 4, colour[name], 2, DASHES[number_of % len(DASHES)]))
                out.append(_marker(number_of, x + 9, y - 4, colour[name], name))
            out.append(_text(x + 23, y, name, INK))
            x += 44 + CHAR * len(name)
            number_of += 1
    return "".join(out)


def _marker(kind: int, x: float, y: float, colour: str, about: str) -> str:
    shape = (
        f"<circle cx='{x:.1f}' cy='{y:.1f}' r='4'",
        f"<rect x='{x - 3.5:.1f}' y='{y - 3.5:.1f}' width='7' height='7'",
        f"<path d='M{x:.1f},{y - 5:.1f} l5,9 h-10 z'",
        f"<path d='M{x:.1f},{y - 5:.1f} l5,5 l-5,5 l-5,-5 z'",
    )[kind % 4]
    fill = colour if kind % 8 < 4 else "#FFFFFF"
    tag = shape.split()[0][1:]
    return f"{shape} fill='{fill}' stroke='{colour}' stroke-width='1.5'><title>{escape(about)}</title></{tag}>"


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, width: float = 1, dash: str = "") -> str:
    dashed = f" stroke-dasharray='{dash}'" if dash else ""
    return (
        f"<line x1='{x1:.1f}' y1='{y1:.1f}' x2='{x2:.1f}' y2='{y2:.1f}' stroke='{colour}' "
        f"stroke-width='{width}'{dashed}/>"
    )


def _text(
    x: float, y: float, text: str, colour: str, anchor: str = "start", weight: str = "normal", size: int = SIZE
) -> str:
    bold = " font-weight='600'" if weight == "bold" else ""
    return (
        f"<text x='{x:.1f}' y='{y:.1f}' fill='{colour}' text-anchor='{anchor}' font-size='{size}'{bold}>"
        f"{escape(text)}</text>"
    )


def _svg(height: float, parts: Sequence[str], about: str) -> str:
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {height:.0f}' width='{WIDTH}' "
        f"height='{height:.0f}' role='img' aria-label='{escape(about, quote=True)}' {FONT}>{''.join(parts)}</svg>"
    )
