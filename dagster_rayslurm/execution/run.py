"""Run one plan to its verdict; and the parts of this that the separate topology (one payload per component) uses, too."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import dagster as dg
from dagster_pipes import PipesExtras

from ..backends.base import Backend, Register, RunningPayload
from ..errors import CompletedRun, FailureKind, RunFailure, StartError
from ..follow import Evidence, Follower
from ..follow.pipes import RecordContextInjector, RecordReader, pipes_session
from ..outcome import Judged, Verdict, judge, needs_job_facts
from ..outcome.hints import with_hint
from ..outcome.metadata import failure_metadata
from ..outcome.usage import Metadata
from ..plan import Plan
from ..runtime.protocol.record import SECRETS, component_dir
from ..ssh.base import ConnectionFailed
from .cleanup import RunSettings, discard, fetch_outputs, missing_output_warnings, sweep
from .follow_run import FollowedPayload, follow_until_end
from .reattach import Launch, reattach_or_new

Component = str | None
"""The name of a component; None if the run has a single payload."""


class PayloadRun:
    """One run from its start to its verdict, with a single payload or with a payload for each component.

    Args:
        plans: the plans by component, in the order of the components in the job.

    Attributes:
        payloads: the running payloads; empty until all of them have started.
    """

    def __init__(
        self,
        context: dg.OpExecutionContext,
        backend: Backend[Any, Any],
        settings: RunSettings,
        launch: Launch,
        plans: Mapping[Any, Plan],
    ) -> None:
        self.run_dir = str(backend.layout.runs / launch.name)
        self.payloads: list[FollowedPayload] = []
        self._context, self._backend, self._settings, self._launch, self._plans = context, backend, settings, launch, plans
        self._step = launch.step
        self._outputs = settings.home.outputs / launch.name
        self._outputs_left = False
        """Whether some output files could not be copied, and are only in the run directory."""

    def follow(self, start: Callable[[Register], Mapping[Any, RunningPayload]], handler_of: Callable[[Any], Any]) -> None:
        """Start the payloads, follow them to their ends, and release them whatever happens.

        Args:
            start: starts the payloads, registers each as soon as it runs, and returns all by component.
            handler_of: returns the handler for Pipes messages of a component.

        Raises:
            RunFailure: the payloads cannot be started, or a later attempt has taken the payload over.
        """
        registered: list[RunningPayload] = []
        bookmark = self._launch.bookmark
        try:
            with start_errors():
                running = start(registered.append)
            self.payloads = [self._followed(each, running[each], handler_of(each)) for each in self._plans]
            follow_until_end(self.payloads, self._context, self._settings, lambda: self._step.new_owner is not None)
        except BaseException as error:
            self._raise_if_superseded(error)
            if self.payloads and bookmark is not None:
                bookmark.remove()
            may_run_on = self._step.reattached and not self.payloads
            if not may_run_on and not self._settings.keeps_run_dir(failed=True):
                discard(self._backend.connection, self.run_dir)
            raise
        finally:
            if bookmark is not None:
                bookmark.close()
            self._release(registered)

    def judge(self) -> dict[Any, Judged]:
        """Fetch the output files of each payload; returns verdicts and evidence by component."""
        return {each.component: Judged(self._judge(each), each.evidence) for each in self.payloads}

    def clean_up(self, verdict: Verdict) -> str | None:
        """Remove the run directory unless the settings keep it; returns its path, with the host, if it stays.

        Raises:
            RunFailure: a later attempt has taken the payload over, and the verdict of that attempt counts.
        """
        remove = not self._outputs_left and not self._settings.keeps_run_dir(verdict.kind is not None)
        # Over a lost connection the payload may go on, and a retry may take it over.
        connection_lost = any(each.evidence.connection_lost for each in self.payloads)
        if self._step.owner is None:
            if remove:
                discard(self._backend.connection, self.run_dir)
        elif not connection_lost:
            with suppress(OSError):
                self._step.owner.confirm(remove=remove)
        if self._step.new_owner is not None:
            raise _superseded(self._step.new_owner)
        if self._launch.bookmark is not None and (remove or not connection_lost):
            self._launch.bookmark.remove()
        if remove:
            return None
        place = self.payloads[0].running.place
        return f"{place}:{self.run_dir}" if place else self.run_dir

    def completed(self, session: Any, metadata: Metadata) -> CompletedRun:
        """Returns what the user's asset gets of a run that succeeded."""
        outputs = sorted(path for path in self._outputs.rglob("*") if path.is_file())
        return CompletedRun(session, metadata, self.payloads[0].running, outputs)

    def _followed(self, component: Component, running: RunningPayload, handler: Any) -> FollowedPayload:
        plan, run_dir = self._plans[component], self._dir_of(component)
        follower = Follower(
            self._backend.connection,
            run_dir,
            plan.payload.nonce,
            handler,
            self._context.log,
            self._backend.cadence,
            self._settings.connection_loss_timeout,
            running.requeue,
            component,
            self._launch.state,
        )
        return FollowedPayload(plan, run_dir, running, follower, component)

    def _dir_of(self, component: Component) -> str:
        return self.run_dir if component is None else component_dir(self.run_dir, component)

    def _raise_if_superseded(self, error: BaseException) -> None:
        """Raise if a later attempt has taken the payload over: an interrupt as it is, else the failure that names the attempt."""
        if self._step.new_owner is None:
            return
        failure = _superseded(self._step.new_owner)
        if not isinstance(error, Exception):
            self._context.log.warning(f"[rayslurm] {failure.description}")
            raise error
        raise failure from None

    def _release(self, registered: Sequence[RunningPayload]) -> None:
        """Remove files with secrets that no runtime has read, and release all registered payloads."""
        try:
            for component, plan in self._plans.items():
                if plan.secret_env and self._step.new_owner is None:
                    # The runtime removes secrets when it starts; a runtime that never started leaves them.
                    discard(self._backend.connection, os.path.join(self._dir_of(component), SECRETS))
        finally:
            release_all(registered, {each.running: each.evidence for each in self.payloads})

    def _judge(self, payload: FollowedPayload) -> Verdict:
        """Fetch a payload's output files and return its verdict: a payload whose outputs are lost has not succeeded."""
        evidence = payload.evidence
        if needs_job_facts(evidence) and not evidence.connection_lost:
            payload.running.explain(evidence)
        verdict = judge(evidence, payload.plan.uses_pipes, self._settings.require_messages)
        verdict = with_hint(verdict, payload.plan, evidence)
        outputs = self._outputs if payload.component is None else self._outputs / payload.component
        problem = self._fetch_outputs(payload, outputs, succeeded=verdict.kind is None)
        if problem is None:
            return verdict
        self._outputs_left = True
        return Verdict(FailureKind.RECORD, f"the payload succeeded, but {problem}") if verdict.kind is None else verdict

    def _fetch_outputs(self, payload: FollowedPayload, outputs: Path, succeeded: bool) -> str | None:
        """Fetch output files and warn of missing ones; returns why some are only in the run directory, or None."""
        end = payload.evidence.end or {"outputs": []}
        problem = None
        try:
            fetch_outputs(end, self._backend.connection, payload.run_dir, outputs, self._settings.connection_loss_timeout)
        except OSError as error:
            problem = f"its outputs cannot be brought back: {error}"
        for warning in missing_output_warnings(end, succeeded):
            self._context.log.warning(f"[rayslurm] {payload.label}{warning}")
        if problem is None and end["outputs_failed"]:
            sentence = f"an output could not be copied to {outputs}"
            problem = f"{sentence}, and stays in the run directory: {end['outputs_failed'][0]}"
        return problem


def _superseded(successor: str) -> RunFailure:
    """Returns the failure of an attempt whose payload a later attempt has taken over."""
    return RunFailure(
        FailureKind.SUPERSEDED,
        f"{successor} has gone on with this payload, because this attempt was taken for dead: its result counts, and this "
        "attempt has neither ended nor judged the payload",
    )


def release_all(running: Sequence[RunningPayload], evidence: Mapping[RunningPayload, Evidence]) -> None:
    """Release all payloads, even if the release of one raises."""
    with ExitStack() as stack:
        for each in reversed(running):
            stack.callback(each.release, evidence.get(each) or Evidence())


@contextmanager
def start_errors() -> Iterator[None]:
    """Turn any StartError or OSError inside into a `RunFailure`, which says that the run cannot be started."""
    try:
        yield
    except StartError as error:
        raise RunFailure(error.kind, str(error), retry=error.retry) from None
    except ConnectionFailed as error:
        raise RunFailure(FailureKind.CONNECTION, f"the run cannot be started: {error}", retry=error.temporary) from error
    except OSError as error:
        raise RunFailure(FailureKind.RECORD, f"the run cannot be started: {error}") from error


def execute(
    context: dg.OpExecutionContext,
    plan: Plan,
    backend: Backend[Plan, RunningPayload],
    settings: RunSettings,
    extras: PipesExtras | None,
) -> CompletedRun:
    """Run a plan and wait for its end; returns what the user's asset gets of the run.

    Raises:
        RunFailure: the run did not succeed.
    """
    with start_errors():
        sweep(backend, settings)
        launch = reattach_or_new(context, plan, backend, settings.home)
        run = PayloadRun(context, backend, settings, launch, {None: launch.plan})
    reader, injector = RecordReader(), RecordContextInjector(context)

    def start(register: Register) -> dict[Component, RunningPayload]:
        return {None: backend.start(launch.plan, run.run_dir, injector.pipes_context, launch.step, register)}

    with pipes_session(context, injector, reader, extras, plan.uses_pipes) as session:
        run.follow(start, lambda _: reader.handler)
        judged = run.judge()[None]
        verdict, metadata = judged.verdict, run.payloads[0].metadata(settings.mode)
        kept = run.clean_up(verdict)
        if verdict.kind is not None:
            metadata = {**failure_metadata(judged.evidence, kept), **metadata}
            raise RunFailure(verdict.kind, verdict.sentence, metadata, verdict.retry)
    return run.completed(session, metadata)
