"""Tells whether a person or the end of the Dagster process interrupts a run, and sets the run's status in Dagster."""

from __future__ import annotations

import contextlib
import os

import dagster as dg

INTERRUPTS = (KeyboardInterrupt, dg.DagsterExecutionInterruptedError)
_ENDED_BY_USER = (dg.DagsterRunStatus.CANCELING, dg.DagsterRunStatus.CANCELED)


def is_service_stop(context: dg.OpExecutionContext, interrupt: BaseException) -> bool:
    """Returns True if `interrupt` means that this Dagster process is stopped from outside, and False if a person ends the run.

    A person ends a run by Ctrl-C in a terminal, or by Dagster's terminate button. The result is therefore False if this process
    has a terminal. If Dagster's storage does not say whether the button was pressed, the result is True. For an exception that is
    no interrupt (see `INTERRUPTS`), the result is False.
    """
    if not isinstance(interrupt, INTERRUPTS) or has_terminal():
        return False
    try:
        run = context.instance.get_run_by_id(context.run.run_id)
    except Exception:  # noqa: BLE001 - the storage may raise anything; without it nobody can have pressed the button
        return True
    return run is None or run.status not in _ENDED_BY_USER


def has_terminal() -> bool:
    """Returns whether this process has a terminal, in which a person may have pressed Ctrl-C. A service has no terminal."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY))
        return True
    except OSError:
        return False


def mark_canceling(context: dg.OpExecutionContext) -> None:
    """Set the status of the step's Dagster run to "canceling". Called after a Ctrl-C.

    Otherwise, Dagster 1.13 would give the run the status "failed" in the end. Does nothing if the run's status is not "started",
    or if Dagster will resume the run. An error of Dagster's storage is ignored, because the payload must be ended in any case.
    """
    with contextlib.suppress(Exception):
        run = context.instance.get_run_by_id(context.run.run_id)
        if run is not None and run.status == dg.DagsterRunStatus.STARTED and not context.instance.run_will_resume(run.run_id):
            context.instance.report_run_canceling(run)
