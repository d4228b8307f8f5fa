"""Bar charts as SVG: medians as bars, from the smallest to the largest value as whiskers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from .figures import Sample, number

_WIDTH, _LABELS, _RIGHT, _ROW, _BAR, _TOP = 760, 270, 110, 20, 13, 34
_OURS = "#2563eb"
_COLOURS = ("#9ca3af", "#d97706", "#b45309", "#059669", "#7c3aed", "#db2777", "#0891b2", "#4d7c0f")


@dataclass(frozen=True)
class Group:
    """Bars below one heading; the first of them is this project's."""

    heading: str
    bars: tuple[Sample, ...]


def bars(title: str, groups: Sequence[Group], parties: bool = True) -> str:
    """A chart with one scale for all of its groups.

    Args:
        title: above it.
        groups: what is drawn.
        parties: whether bars with the same label have a colour of their own, instead of one for all.
    """
    samples = [sample for group in groups for sample in group.bars]
    top = max(max(sample.values) for sample in samples) or 1.0
    scale = (_WIDTH - _LABELS - _RIGHT) / top
    colours = _colours(groups) if parties else dict.fromkeys((sample.label for sample in samples), _OURS)
    parts, y = [f'<text x="8" y="20" font-size="14" font-weight="bold">{escape(title)}</text>'], _TOP
    for group in groups:
        if group.heading:
            parts.append(f'<text x="8" y="{y + 14}" font-weight="bold">{escape(group.heading)}</text>')
            y += _ROW
        for sample in group.bars:
            parts.append(_bar(sample, y, scale, colours[sample.label]))
            y += _ROW
        y += 6
    axis = f'<line x1="{_LABELS}" y1="{_TOP}" x2="{_LABELS}" y2="{y}" stroke="#9ca3af"/>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{y + 8}" viewBox="0 0 {_WIDTH} {y + 8}" '
        f'font-family="sans-serif" font-size="12" fill="#111827">\n<rect width="100%" height="100%" fill="white"/>\n'
        + "\n".join([*parts, axis])
        + "\n</svg>\n"
    )


def _bar(sample: Sample, y: int, scale: float, colour: str) -> str:
    middle, width = y + _ROW / 2, sample.median * scale
    least, most = _LABELS + min(sample.values) * scale, _LABELS + max(sample.values) * scale
    parts = [
        f'<text x="{_LABELS - 6}" y="{middle + 4:.1f}" text-anchor="end">{escape(sample.label)}</text>',
        f'<rect x="{_LABELS}" y="{middle - _BAR / 2:.1f}" width="{width:.1f}" height="{_BAR}" fill="{colour}"/>',
    ]
    if most - least >= 1:
        parts.append(
            f'<path d="M{least:.1f} {middle:.1f}H{most:.1f}M{least:.1f} {middle - 3:.1f}v6M{most:.1f} {middle - 3:.1f}v6" '
            'stroke="#111827" fill="none"/>'
        )
    said = f"{number(sample.median)} {sample.unit}".rstrip()
    parts.append(f'<text x="{max(most, _LABELS + width) + 6:.1f}" y="{middle + 4:.1f}">{escape(said)}</text>')
    return "".join(parts)


def _colours(groups: Sequence[Group]) -> dict[str, str]:
    colours = {group.bars[0].label: _OURS for group in groups}
    for sample in (sample for group in groups for sample in group.bars):
        if sample.label not in colours:
            others = len(colours) - len({group.bars[0].label for group in groups})
            colours[sample.label] = _COLOURS[others % len(_COLOURS)]
    return colours
