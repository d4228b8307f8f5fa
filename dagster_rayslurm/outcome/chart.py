"""The chart of CPU and memory usage over time, small enough for Dagster to show it in place. Pure."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

# Bytes of a mebibyte.
MIB = 2**20

# Characters of Markdown from which on Dagster shows a link instead of the text (Dagster 1.13).
_LIMIT = 1000
# Pixels of the plot: its width, its height, and the room for two lines of text above it.
_WIDTH, _HEIGHT, _TOP = 400, 100, 34
# Numbers of points to try; the first whose drawing is shorter than `_LIMIT` is used.
_COLUMNS = (80, 60, 50, 40, 35, 30, 25, 22, 20, 18, 16, 14, 12, 10, 5)
# Colours of the line of CPUs and the line of memory.
_CPU, _MEMORY = "#26e", "#d70"

# One measurement: seconds since the start, CPUs busy since the point before, and bytes of memory.
Point = Sequence[float]


def usage_chart(usage: Mapping[str, Any], cpus: float = 0.0, memory: float = 0.0) -> str:
    """Returns a chart as Markdown: the busy CPUs of all nodes, and the memory of the node that uses most memory.

    If granted CPUs and memory are known, one dashed line marks both, because each curve is drawn relative to its grant.

    Args:
        usage: the usage in the `end` record.
        cpus: CPUs granted on all nodes; 0 if unknown.
        memory: bytes granted on the node that uses most memory; 0 if unknown.
    """
    points: list[Point] = usage["points"]
    drawings = (_draw(usage, _resample(points, columns), cpus, memory) for columns in _COLUMNS)
    return next(drawing for drawing in drawings if len(drawing) < _LIMIT)


def _resample(points: Sequence[Point], columns: int) -> list[Point]:
    """Returns at most one point per column: the mean of the busy CPUs and the peak of the memory."""
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
    """Returns the points as an SVG image in Markdown; the other arguments are those of `usage_chart`."""
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
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH + 4}" height="{bottom + 18}" font-family="Arial" font-size="12">'
        f'<text y="11" fill="{_CPU}">{busy}</text><text y="26" fill="{_MEMORY}">{used}</text>'
        f'<text y="{bottom + 14}" fill="#888">{last:.{1 if last < 100 else 0}f} s{", dashes: granted" if grant else ""}</text>'
        f'<g fill="none"><path stroke="#999" d="M0 {_TOP}V{bottom}H{_WIDTH}"/>'
        f"{grant}{line(1, cpu_unit, _CPU)}{line(2, memory_unit, _MEMORY)}</g></svg>"
    )
    return f"![usage](data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()})"
