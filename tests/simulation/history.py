"""A history: one run of a scenario, made from a seed; and its faults, which can be left out one by one."""

from __future__ import annotations

import gc
import os
import random
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from .world import Host, Stuck, World

LIMIT = 6 * 3600.0
"""Seconds of virtual time in which a history must be over."""


class Violation(AssertionError):
    """A history broke a promise of the package."""


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong.

    Attributes:
        at: seconds from the beginning; for a fault of one process, the number of its turns.
        kind: the name of a method of the scenario, which takes the amount.
        amount: how much, as the kind understands it: seconds, most often.
    """

    at: float
    kind: str
    amount: float = 0.0

    def __str__(self) -> str:
        return f"{self.kind}({self.amount:g}) at {self.at:g}"


@dataclass(frozen=True)
class Outcome:
    """How a history ended.

    Attributes:
        ended: the scenario's word for it, such as the kind of failure.
        problem: the promise that it broke; "" for none.
    """

    seed: int
    scenario: str
    faults: tuple[Fault, ...]
    ended: str
    problem: str
    trace: tuple[str, ...] = ()


class History:
    """The base of the scenarios.

    Args:
        seed: makes all random choices.
        without: numbers of faults to leave out.
        faults: the faults, in place of those that the seed chooses.
        fixed: what holds in place of what the seed chooses; see `fix` of the scenario.
    """

    name = ""

    def __init__(
        self,
        seed: int,
        without: Iterable[int] = (),
        faults: Sequence[Fault] | None = None,
        fixed: Mapping[str, Any] | None = None,
    ) -> None:
        self.seed, self.world = seed, World(seed)
        self.choice = random.Random(f"choices of {seed}")
        """For all that is chosen before the history runs; `world.random` is for what happens in it."""
        self.directory = f"{SHARED}/rs-sim-{os.getpid()}"
        self.ended = "?"
        self.set_up()
        drawn = self.draw()
        self.fix(**(fixed or {}))
        self.faults = [fault for number, fault in enumerate(drawn if faults is None else faults) if number not in set(without)]

    # -- what a scenario defines

    def set_up(self) -> None:
        """Choose what the history is about."""

    def draw(self) -> list[Fault]:
        """Choose the faults."""
        raise NotImplementedError

    def fix(self, **fixed: Any) -> None:
        """Replace some of what was chosen."""

    def begin(self) -> None:
        """Start the processes."""
        raise NotImplementedError

    def over(self) -> bool:
        """Whether nothing more is to happen."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise `Violation` if a promise was broken; called at the end."""
        raise NotImplementedError

    def patches(self) -> list[Any]:
        """Context managers that hold while the history runs."""
        return []

    # -- the run

    def run(self) -> Outcome:
        """Run the history to its end."""
        world, problem = self.world, ""
        shutil.rmtree(self.directory, ignore_errors=True)
        os.makedirs(self.directory)
        gc.disable()  # So that nothing is collected at a time that depends on other histories.
        try:
            with ExitStack() as stack:
                stack.enter_context(world.clocks())
                for each in self.patches():
                    stack.enter_context(each)
                stack.callback(world.close)
                try:
                    self.begin()
                    for fault in self.faults:
                        self._schedule(fault)
                    world.run(self.over, LIMIT)
                    self.check()
                except (Violation, Stuck) as error:
                    failed = [f"; {each.name}: {each.error!r}" for each in world.processes if each.error is not None]
                    problem = f"{type(error).__name__}: {error}{''.join(failed[:1]) if isinstance(error, Stuck) else ''}"
                except Exception as error:  # noqa: BLE001
                    problem = f"{type(error).__name__}: {error} ({_where(error)})"
        finally:
            gc.enable()
            shutil.rmtree(self.directory, ignore_errors=True)
        trace = tuple(line.replace(self.directory, "$DIR") for line in world.trace)
        return Outcome(self.seed, self.name, tuple(self.faults), self.ended, problem, trace)

    def _schedule(self, fault: Fault) -> None:
        act = getattr(self, fault.kind)

        def wreak() -> None:
            self.world.say(f"FAULT {fault}")
            act(fault.amount)

        self.world.spawn("fate", Host("fate"), wreak, fault.at)


def _where(error: BaseException) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return f"{os.path.basename(trace.tb_frame.f_code.co_filename)}:{trace.tb_lineno}" if trace is not None else "?"


SHARED = "/dev/shm" if os.access("/dev/shm", os.W_OK) else "/tmp"


def shrink(make: Callable[[set[int]], History], count: int, without: set[int]) -> tuple[set[int], Outcome]:
    """Leave out more faults while the history still breaks a promise; returns which, and the outcome without them."""
    outcome = make(without).run()
    changed = bool(outcome.problem)
    while changed:
        changed = False
        for number in set(range(count)) - without:
            smaller = make({*without, number}).run()
            if smaller.problem:
                without, outcome, changed = {*without, number}, smaller, True
    return without, outcome
