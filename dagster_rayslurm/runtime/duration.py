"""Spans of time as Slurm's programs print them."""

from __future__ import annotations

import re
from typing import Optional

_DURATION = re.compile(r"(?:([0-9]+)-)?(?:([0-9]+):)?([0-9]+):([0-9]+(?:\.[0-9]+)?)")


def parse_duration(text: str) -> Optional[float]:
    """Seconds of "[D-]HH:MM:SS" or "MM:SS.mmm"; None for "UNLIMITED" and the like (squeue(1), sacct(1), Slurm 22.05)."""
    match = _DURATION.fullmatch(text)
    if match is None:
        return None
    days, hours, minutes = (int(part or 0) for part in match.groups()[:3])
    return 86400.0 * days + 3600 * hours + 60 * minutes + float(match.group(4))
