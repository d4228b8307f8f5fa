"""`rayslurm logs` prints the output of a run or the log of a session; `rayslurm cancel` ends a run, session or job."""

from __future__ import annotations

import logging
import os
import sys
import time
from functools import partial

import click

from ..backends.base import write_cancel_request
from ..backends.batch import live_jobs
from ..backends.layout import nonce_of
from ..backends.listing import Entry, Kind, json_object, list_here
from ..backends.sessions.listing import end_generations
from ..backends.sessions.local import end_session
from ..execution.files import discard
from ..execution.terminal import NOT_THE_PAYLOAD, TerminalPipes, exit_code
from ..follow import Cadence, Evidence, Follower, follow_all
from ..outcome.verdict import judge
from ..runtime.protocol.record import JOURNAL, PAYLOAD, RUNTIME_LOG, SECRETS, LineReader, node_log
from ..runtime.protocol.spec import PayloadSpec
from ..slurm.request import LOG
from ..slurm.shared_queue import fetch_queue
from ..slurm.states import TERMINAL
from ..slurm.submit import wait_until_gone
from .common import json_option, one_sentence_errors, print_json, see_troubles, terminal_log, with_link
from .options import cluster_options
from .ps import components_of, entry, ident_argument, record_dir, refuse_arrays

_CADENCE = Cadence(busy=0.2, idle=1.0, waiting=5.0)  # Short pauses: the run directory may be removed soon after the end.
_CHUNK = 1024 * 1024
_ASK_INTERVAL = 15.0  # Seconds between two looks into the queue while a record is silent.
_END_MARGIN = 45.0  # Seconds beyond the grace period in which a cancelled run must end; after that the job is cancelled.


@click.command()
@ident_argument
@click.option("--follow", "-f", is_flag=True, help="Go on until the run ends, and exit with its exit code.")
@cluster_options
def logs(ident: str, follow: bool) -> None:
    """Print the output of a run, or the log of a session's runtime.

    With -f, print new output until the run ends, and exit with the exit code that `submit` would have. Ctrl-C then ends this
    command, and the run goes on.
    """
    log = terminal_log(quiet=not follow)
    try:
        with one_sentence_errors():
            run = entry(ident)
            if run.kind == Kind.SESSION and not follow:
                return _print_log(run)
            if run.kind != Kind.RUN:
                raise ValueError(f"{run.name} is a {run.kind}, and only the output of a run can be printed and followed")
            refuse_arrays(run)
            own_job = bool(run.job_id) and bool(run.connection.read(f"{run.directory}/job_id", 0, 64))
            followed = [_follower(run, component, log, own_job) for component in components_of(run)]
            if not follow:
                for each in followed:
                    while each.read_once():
                        pass
                    each.finish()
                return
            job = _Job(run)
            follow_all([(each, partial(_runtime_exit, job)) for each in followed])
    except KeyboardInterrupt:
        click.echo(f"\n[rayslurm] {ident} goes on", err=True)
        sys.exit(130)
    except click.UsageError:
        raise
    except click.ClickException as error:
        if not follow:
            raise
        with_link(error).show()
        sys.exit(NOT_THE_PAYLOAD)
    if job.is_removed and not all(each.evidence.end for each in followed):
        click.echo(f"Error: {run.name} has ended, and its directory is removed; what started it has the exit code", err=True)
        sys.exit(NOT_THE_PAYLOAD)
    for each in followed:
        verdict = judge(each.evidence, uses_pipes=False, require_messages=False)
        if verdict.kind is not None:
            click.echo(f"Error: {verdict.sentence}{see_troubles(verdict.kind)}", err=True)
    sys.exit(next(filter(None, (exit_code(each.evidence.end) for each in followed)), 0))


def _print_log(session: Entry) -> None:
    """Prints the log of a session's runtime: the output of the batch script and of the head node or, without Slurm, one file."""
    for name in (LOG, node_log(0), RUNTIME_LOG):
        offset = 0
        while data := session.connection.read(f"{session.directory}/{name}", offset, _CHUNK):
            click.echo(data, nl=False)
            offset += len(data)


def _follower(run: Entry, component: str | None, log: logging.Logger, own_job: bool) -> Follower:
    """Returns an object that reads the record of a run while it grows, and prints the output; messages go to `log`.

    If `component` is not None, the object reads the record of this component of the run. `own_job` is True if the run has a Slurm
    job of its own, which Slurm may start again (requeue).
    """
    directory, pipes = record_dir(run, component), TerminalPipes(log)
    follower = Follower(run.connection, directory, nonce_of(run.name), pipes, log, _CADENCE, requeue=own_job, component=component)
    follower.output.needs_reader = True
    return follower


class _Job:
    """The Slurm job of a run or, without Slurm, the process of the run's runtime.

    The method `exit` checks at intervals whether the job or process still exists, and more often whether the run directory does:
    what started a run in a session removes the directory at the run's end, and the session's job goes on.
    """

    def __init__(self, run: Entry) -> None:
        self._run, self._asked_at = run, time.monotonic()
        self._looked_at = self._asked_at
        self.is_removed = False
        self._over = "it has ended" if run.over else None

    def exit(self, ended: bool) -> str | None:
        """Returns a phrase that says how the job or process ended; None if it still existed at the last check.

        Makes a new check if the last check is old enough. `ended` is True if the journal of the run has an `end` record. Then the
        checks are more frequent: the run may be over, but only Slurm knows whether Slurm will start the job again (requeue).
        """
        interval, now = _CADENCE.idle if ended else _ASK_INTERVAL, time.monotonic()
        if self._over is None and now - self._looked_at > _CADENCE.idle:
            self._looked_at = now
            self.is_removed = self._run.connection.modified(self._run.directory) is None
            self._over = "its directory is removed" if self.is_removed else None
        if self._over is None and now - self._asked_at > interval:
            self._asked_at = now
            self._over = self._look()
        return self._over

    def _look(self) -> str | None:
        """Makes a check, and returns the result as `exit` does."""
        run = self._run
        if run.job_id is None:
            base = os.path.dirname(os.path.dirname(run.directory))
            now = next((each for each in list_here(base) if each.name == run.name), None)
            return "its process is gone" if now is None or now.over else None
        row = fetch_queue(run.connection).job(int(run.job_id))
        if row is None:
            return "Slurm no longer knows the job"
        return f"Slurm calls the job {row.state}" if row.state in TERMINAL else None


def _runtime_exit(job: _Job, evidence: Evidence) -> str | None:
    """Returns the result of `job.exit`; None if the connection is lost. `evidence` has what the journal has shown so far."""
    try:
        return job.exit(evidence.end is not None)
    except OSError:  # A lost link says nothing about the job; the follower reports it.
        return None


@click.command()
@ident_argument
@click.option("--now", is_flag=True, help="Kill the payload at once, without a grace period.")
@json_option
@cluster_options
def cancel(ident: str, now: bool, as_json: bool) -> None:
    """End a run, session or job, and wait until the end is confirmed.

    The payload of a run has its grace period to end by itself. With --now, the payload gets no grace period.
    """
    with one_sentence_errors():
        one = entry(ident)
        if one.over:
            raise ValueError(f"{one.name} has ended already")
        _end(one, now)
    if as_json:
        return print_json({**one.row(), "state": "ended"})
    click.echo(f"ended the {one.kind} {one.name}" + (f", Slurm job {one.job_id}" if one.job_id else ""))


def _end(one: Entry, now: bool) -> None:
    """Ends a run, session or job; raises StartError or OSError if the end is not confirmed.

    If `now` is True, the payload of a run gets no grace period.
    """
    if one.kind == Kind.SESSION:
        assert one.generation is not None
        if one.job_id is None:
            end_session(one.generation)
        else:
            end_generations(one.connection, [one.generation])
        return
    if one.kind == Kind.RUN:
        write_cancel_request(one.connection, one.directory, now)
        timeout = _END_MARGIN if now else _grace_period(one) + _END_MARGIN
        # A run that waits has no runtime that would read the request. A run in a session shares the job with other runs.
        if one.state != "pending" and _ends(one, timeout):
            return
        if one.job_id is None or not one.connection.read(f"{one.directory}/job_id", 0, 64):
            raise OSError(f"{one.connection.place}: {one.name} was asked to end and has not within {timeout:g} s")
    assert one.job_id is not None
    jobs: list[int | str] = [one.job_id]
    if one.kind == Kind.RUN:  # Its partitions may run in several job arrays.
        jobs = [*live_jobs(one.connection, nonce_of(one.name))] or jobs
    gone = all(wait_until_gone(one.connection, each) for each in jobs)
    if one.kind == Kind.RUN and gone:
        discard(one.connection, f"{one.directory}/{SECRETS}")  # A runtime that has never started left them.
    if not gone:
        raise OSError(f"Slurm does not confirm the end of job {one.job_id}; run `scancel {one.job_id}` on {one.connection.place}")


def _grace_period(run: Entry) -> float:
    """Returns the longest grace period of a run's payloads, in seconds.

    A payload without a readable file `payload.json` counts with the default grace period.
    """
    paths = [f"{record_dir(run, component)}/{PAYLOAD}" for component in components_of(run)]
    specs = [json_object(run.connection.read(path, 0, _CHUNK)) for path in paths]
    return max(float(spec.get("grace_period", PayloadSpec.grace_period)) for spec in specs)


def _ends(run: Entry, timeout: float) -> bool:
    """Waits until each journal of a run has an `end` record, or the run's job or process is gone, and returns True.

    Returns False after `timeout` seconds. Returns False at once if a journal is missing, as in the run directory of job arrays:
    each element has a journal of its own there, and no runtime reads the cancel request of the whole run.
    """
    records = [_EndOfRecord(run, component) for component in components_of(run)]
    if not all(each.exists() for each in records):
        return False
    job, deadline = _Job(run), time.monotonic() + timeout
    while not all(each.seen() for each in records) and job.exit(ended=False) is None:
        if time.monotonic() > deadline:
            return False
        time.sleep(_CADENCE.busy)
    return True


class _EndOfRecord:
    """A reader that looks for the `end` record in the journal of a run, or of the component `component` of a run."""

    def __init__(self, run: Entry, component: str | None) -> None:
        self._connection, self._path = run.connection, f"{record_dir(run, component)}/{JOURNAL}"
        self._reader, self._seen = LineReader(), False

    def exists(self) -> bool:
        """Returns whether the run or component has a journal."""
        return self._connection.modified(self._path) is not None

    def seen(self) -> bool:
        """Reads new records of the journal; returns True if an `end` record follows the last `start` record."""
        while data := self._connection.read(self._path, self._reader.next_read, _CHUNK):
            for record in self._reader.feed(data):
                if record.get("type") in ("start", "end"):  # After a requeue, a further start follows.
                    self._seen = record["type"] == "end"
        return self._seen
