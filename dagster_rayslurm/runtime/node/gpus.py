"""How busy the granted GPUs of this node are, by `nvidia-smi` or `rocm-smi`; there is no such program for Intel's."""

from __future__ import annotations

import contextlib
import functools
import json
import os
from typing import Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from ..process.loop import Loop, Timer
from ..process.subprocesses import query_program
from .resources import granted_gpus

_INTERVAL = 5.0
_TIMEOUT = 20.0
"""Seconds in which the program must answer."""
_NVIDIA = ("nvidia-smi", "--query-gpu=index,uuid,utilization.gpu,memory.used", "--format=csv,noheader,nounits")
_AMD = ("rocm-smi", "--showuniqueid", "--showuse", "--showmeminfo", "vram", "--json")
_CARD = "card"


class Gpu(NamedTuple):
    """How busy one GPU is."""

    number: str
    uuid: str
    percent_busy: float
    memory: int
    """Bytes in use."""


Take = Callable[[List[Gpu]], None]
Parse = Callable[[str], List[Gpu]]


class Gpus:
    """Asks for the figures of this node's granted GPUs, once for all payloads that are measured.

    Args:
        loop: where everything happens.
    """

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._listeners: List[Take] = []
        self._asking = False
        self._timer: Optional[Timer] = None

    def listen(self, take: Take) -> None:
        """Have `take` called with the figures, soon and then every few seconds."""
        self._listeners.append(take)
        self._ask_later(0.0)

    def leave(self, take: Take) -> None:
        """End the calls of `take`."""
        if take in self._listeners:
            self._listeners.remove(take)
        if not self._listeners and self._timer is not None:
            self._timer.cancel()

    def _ask_later(self, delay: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(delay, self._ask)

    def _ask(self) -> None:
        granted = granted_gpus(os.environ)
        if self._asking or granted == []:
            return

        def answered(parse: Parse, text: Optional[str]) -> None:
            self._asking = False
            if text is None or not self._listeners:
                return  # A program that fails once is asked again when the next payload starts.
            found = only(granted, parse(text))
            for take in list(self._listeners):
                take(found)
            self._ask_later(_INTERVAL)

        for command, parse in _programs(os.environ):
            with contextlib.suppress(OSError):  # It is not installed.
                query_program(self._loop, command, _TIMEOUT, functools.partial(answered, parse))
                self._asking = True
                return


def only(granted: Optional[Sequence[str]], found: List[Gpu]) -> List[Gpu]:
    """The granted ones of some GPUs; a slice of one (MIG) has no figures of its own, so it is none of them.

    UUIDs may be abbreviated (CUDA_VISIBLE_DEVICES in the CUDA C++ Programming Guide).
    """
    if granted is None:
        return found
    uuids = tuple(name.lower() for name in granted if name.startswith("GPU-"))
    return [gpu for gpu in found if gpu.number in granted or gpu.uuid.lower().startswith(uuids)]


def parse_nvidia(text: str) -> List[Gpu]:
    """What `nvidia-smi` prints; a line with "[N/A]", as for a GPU that is cut in slices, is left out."""
    found = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            index, uuid, busy, memory = (field.strip() for field in line.split(","))
            found.append(Gpu(index, uuid, float(busy), int(float(memory) * 2**20)))
    return found


def parse_amd(text: str) -> List[Gpu]:
    """What `rocm-smi --json` prints, after warnings perhaps (ROCm 5 to 7)."""
    cards: Dict[str, Dict[str, str]] = {}
    with contextlib.suppress(ValueError):
        cards = json.loads(text[text.index("{") :])
    found = []
    for card, values in cards.items():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            uuid = "GPU-" + values.get("Unique ID", "").replace("0x", "", 1)  # As ROCR_VISIBLE_DEVICES has it.
            busy, memory = float(values["GPU use (%)"]), int(values["VRAM Total Used Memory (B)"])
            found.append(Gpu(card[len(_CARD) :], uuid, busy, memory))
    return found


def _programs(environ: Mapping[str, str]) -> List[Tuple[Sequence[str], Parse]]:
    """Programs to ask, the likeliest first."""
    amd = "CUDA_VISIBLE_DEVICES" not in environ and any(
        name in environ for name in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
    )
    nvidia = [] if amd else [(_NVIDIA, parse_nvidia)]
    return [] if "ZE_AFFINITY_MASK" in environ else [*nvidia, (_AMD, parse_amd)]
