"""Draws charts of usage and timelines of phases for Dagster metadata, as small SVG images in Markdown. No side effects."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal
from xml.sax.saxutils import escape

_LIMIT = 1000  # Characters of Markdown from which on Dagster shows a link instead of the text (Dagster 1.13).
_WIDTH, _HEIGHT, _TOP = 400, 100, 34  # Pixels of the plot: its width, its height, and room for two lines of text above it.
# Numbers of points to try, in order; the first number whose drawing is shorter than `_LIMIT` is used.
_COLUMNS = range(80, 3, -4)
_CPU, _MEMORY = "#26e", "#d70"  # Colours of CPUs and of memory.
_NAMES, _ROW = 170, 18  # Pixels of the timeline: the width of the names of phases, and the height of a row.
_PHASES = ("#999", "#d70", "#26e")  # Colours of the phases, in turn.
_NODE_COLUMNS = range(24, 1, -2)  # Numbers of nodes to try, as for `_COLUMNS`.
_LONGEST = 24  # Most characters of a node's name.

MIB = 2**20
Point = Sequence[float]  # Seconds since the start, CPUs busy since the point before, and bytes of memory.
# A node's name, and its CPU time and its peak memory, each as a share of what was granted there (0 to 1).
NodeShare = tuple[str, float, float]


# ---- CPU and memory over time


def usage_chart(usage: Mapping[str, Any], cpus: float = 0.0, memory: float = 0.0) -> str:
    """Returns a chart as Markdown: the busy CPUs of all nodes, and the memory of the node that uses most memory.

    `usage` is the usage from the record of the payload. `cpus` and `memory` (bytes) are the granted amounts; 0 if unknown. The
    curves are drawn relative to the granted amounts, so one dashed line marks both amounts.
    """
    points: list[Point] = usage["points"]
    drawings = (_draw(usage, _resample(points, columns), cpus, memory) for columns in _COLUMNS)
    return next(drawing for drawing in drawings if len(drawing) < _LIMIT)


def _resample(points: Sequence[Point], columns: int) -> list[Point]:
    """Returns at most one point for each of `columns` columns of a chart: the mean of busy CPUs and the peak of the memory."""
    width = points[-1][0] / columns or 1.0
    resampled: list[Point] = []
    column, since, cpu_seconds, peak = -1, 0.0, 0.0, 0.0
    for place, (at, busy, memory) in enumerate(points):
        before, here = points[place - 1][0] if place else 0.0, min(int(at / width), columns - 1)
        if here != column:
            column, since, cpu_seconds, peak = here, before, 0.0, 0.0
        else:
            resampled.pop()
        cpu_seconds, peak = cpu_seconds + busy * (at - before), max(peak, memory)
        resampled.append((at, cpu_seconds / (at - since) if at > since else busy, peak))
    return resampled


def _draw(usage: Mapping[str, Any], points: Sequence[Point], cpus: float, memory: float) -> str:
    """Returns a chart of `points` as an SVG image in Markdown; for the other arguments see `usage_chart`."""
    last = points[-1][0] or 1.0
    peak = max(usage["peak_memory"], *(point[2] for point in points))
    busiest = max(point[1] for point in points)
    cpu_unit, memory_unit = cpus or busiest or 1.0, memory or peak or 1.0
    scale = _HEIGHT / max(1.0, busiest / cpu_unit, peak / memory_unit)
    bottom = _TOP + _HEIGHT

    def line(index: int, unit: float, colour: str) -> str:
        dots = [(round(_WIDTH * point[0] / last), round(bottom - scale * point[index] / unit)) for point in points]
        steps = [f"{x - before_x} {y - before_y}" for (before_x, before_y), (x, y) in pairwise(dots)]
        path = f"M{dots[0][0]} {dots[0][1]}l{' '.join(steps)}".replace(" -", "-")
        return f'<path stroke="{colour}" d="{path}"/>'

    grant = f'<path stroke="#999" stroke-dasharray="4" d="M0 {bottom - scale:.0f}h{_WIDTH}"/>' if cpus and memory else ""
    several = len(usage.get("nodes") or ()) > 1
    mean = usage["cpu_seconds"] / (usage["elapsed"] or last)
    busy = f"CPUs busy{' on all nodes' if several else ''}: {mean:.1f}{f' of {cpus:g}' if cpus else ''} on average"
    limit = f" of {memory / MIB:.0f}" if memory else ""
    used = f"memory{' on the largest node' if several else ''}: up to {peak / MIB:.0f}{limit} MiB"
    return _markdown(
        "usage",
        bottom + 18,
        f'<text y="11" fill="{_CPU}">{busy}</text><text y="26" fill="{_MEMORY}">{used}</text>'
        f'<text y="{bottom + 14}" fill="#888">{last:.{1 if last < 100 else 0}f} s{", dashes: granted" if grant else ""}</text>'
        f'<g fill="none"><path stroke="#999" d="M0 {_TOP}V{bottom}H{_WIDTH}"/>'
        f"{grant}{line(1, cpu_unit, _CPU)}{line(2, memory_unit, _MEMORY)}</g>",
    )


# ---- Phases


def timeline(phases: Sequence[tuple[str, float]]) -> str:
    """Returns a picture as Markdown: a row with a bar for each phase; each bar begins where the bar above ends.

    A phase is a name and a duration in seconds.
    """
    scale = (_WIDTH - _NAMES) / (sum(seconds for _, seconds in phases) or 1.0)
    rows, since = [], 0.0
    for row, (name, seconds) in enumerate(phases):
        start, end = (round(_NAMES + scale * at) for at in (since, since + seconds))
        length = f"{seconds:.{1 if seconds < 100 else 0}f} s"
        bar = f'<path stroke="{_PHASES[row % len(_PHASES)]}" d="M{start} {8 + _ROW * row}h{max(1, end - start)}"/>'
        rows.append(f'<text y="{12 + _ROW * row}">{name}: {length}</text>{bar}')
        since += seconds
    return _markdown("timeline", _ROW * len(phases) + 4, f'<g fill="#888" stroke-width="12">{"".join(rows)}</g>')


# ---- Nodes


def nodes_chart(nodes: Sequence[NodeShare]) -> str:
    """Returns a bar chart as Markdown: the used shares of CPU and memory of each node, the node with the busiest CPUs first.

    If there are too many nodes for one picture, the chart shows only some of them, at even distances in this order.
    """
    ordered = sorted(nodes, key=lambda node: (-node[1], -node[2], node[0]))
    drawings = (_draw_nodes(ordered, columns) for columns in _NODE_COLUMNS)
    return next(drawing for drawing in drawings if len(drawing) < _LIMIT)


def _draw_nodes(ordered: Sequence[NodeShare], columns: int) -> str:
    count = min(columns, len(ordered))
    shown = [ordered[round(place * (len(ordered) - 1) / max(1, count - 1))] for place in range(count)]
    step, bottom = _WIDTH / count, _TOP + _HEIGHT

    def bars(index: Literal[1, 2], left: float, colour: str) -> str:
        heights = [round(_HEIGHT * min(1.0, node[index])) for node in shown]
        path = "".join(f"M{round(step * (place + left))} {bottom}v-{height}" for place, height in enumerate(heights))
        return f'<path stroke="{colour}" d="{path}"/>'

    def extremes(index: Literal[1, 2]) -> str:
        least, most = (choose(ordered, key=lambda node: node[index]) for choose in (min, max))
        return f"{100 * least[index]:.0f} % ({least[0][:_LONGEST]}) to {100 * most[index]:.0f} % ({most[0][:_LONGEST]})"

    width = max(2, round(step / 3))
    return _markdown(
        "nodes",
        bottom + 4,
        f'<text y="11" fill="{_CPU}">CPUs busy: {escape(extremes(1))}</text>'
        f'<text y="26" fill="{_MEMORY}">peak memory: {escape(extremes(2))}</text>'
        f'<path stroke="#999" fill="none" d="M0 {_TOP}V{bottom}H{_WIDTH}"/>'
        f'<g stroke-width="{width}">{bars(1, 0.3, _CPU)}{bars(2, 0.7, _MEMORY)}</g>',
    )


def _markdown(name: str, height: int, drawing: str) -> str:
    """Returns Markdown with an SVG image of `height` pixels that shows `drawing`, a text of SVG elements.

    `name` is the text for readers without images.
    """
    size = f'width="{_WIDTH + 4}" height="{height}"'
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="Arial" font-size="12">{drawing}</svg>'
    return f"![{name}](data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()})"
