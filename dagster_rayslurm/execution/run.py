"""State of one run, shared by the single-payload and the separate topology.

A run on its way, of one payload or of several that start together: what is the same for both.

One payload from start to verdict.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import dagster as dg
from dagster_pipes import PipesContextData, PipesExtras

from ..backends.base import Backend, CanReattach, Place, Register, RunningPayload, Step
from ..backends.ownership import FIRST_OWNER, Ownership, owner_file
from ..backends.run_dir import FOLLOWED
from ..completed import CompletedRun
from ..errors import FailureKind, RunFailure, StartError
from ..follow import Bookmark, Evidence, Follower, ReattachState
from ..follow.pipes import RecordContextInjector, RecordReader, pipes_session
from ..outcome import Judged, Verdict, judge, needs_job_facts
from ..outcome.figures import Metadata
from ..outcome.hints import with_hint
from ..outcome.metadata import failure_metadata
from ..plan import Plan, nonce_of, run_dir_name
from ..runtime.protocol.record import SECRETS, component_dir
from ..ssh.base import ConnectionFailed
from .cleanup import Policy, discard, fetch_outputs, sweep, what_is_missing
from .follow_run import FollowedPayload, follow_until_end
from .reattach import Notes

Start = Callable[[Mapping[Any, Plan], str, PipesContextData, Step, Register], Mapping[Any, RunningPayload]]
"""As `Backend.start`, for plans by component: the runtimes by component."""


class PayloadRun:
    """A run between its start and its verdict.

    Args:
        context: of the step.
        plans: by component, in the order of the job; that of the only payload under None.
        place: where its runtimes work.
        policy: what the user decided.

    Attributes:
        parts: its payloads, once all of them are at work.
    """

    def __init__(self, context: dg.OpExecutionContext, plans: Mapping[Any, Plan], place: Place, policy: Policy) -> None:
        step_key = context.get_step_execution_context().step.key
        partition_key = context.partition_key if context.has_partition_key else None
        name = run_dir_name(context.run.run_id, step_key, next(iter(plans.values())).payload.nonce)
        self.parts: list[FollowedPayload] = []
        self._context, self._plans, self._place, self._policy = context, plans, place, policy
        self._step = Step(context.run.run_id, step_key, partition_key, context.log)
        self._name = name
        self._goes_on: Callable[[Plan, str, Step], bool] | None = None
        self._bookmark: Bookmark | None = None
        """Of a payload that outlives this process; another one goes on there."""
        self._handed_on = ReattachState()
        self._run_dir = ""
        self._stranded = False
        """Whether outputs are still where the payload ran."""

    def may_go_on(self, goes_on: Callable[[Plan, str, Step], bool]) -> None:
        """Let a payload that an attempt before started, and left behind, be this one: see `CanReattach`."""
        self._goes_on = goes_on

    def _take_up(self, goes_on: Callable[[Plan, str, Step], bool]) -> None:
        """Go on with what an attempt before left behind, and take note of this one for those after it."""
        notes = Notes(self._context, self._step.step_key)
        name = notes.before()
        connection, runs = self._place.connection, self._place.layout.runs
        owner = Ownership(connection, str(runs / self._name), FIRST_OWNER, notes.successor)
        if name is not None:
            (plan,) = self._plans.values()
            same = replace(plan, payload=replace(plan.payload, nonce=nonce_of(name)))
            later = Ownership(connection, str(runs / name), owner_file(self._step.run_id), notes.successor)
            if goes_on(same, str(runs / name), self._step) and later.take_over():
                self._plans, self._name, owner = {None: same}, name, later
                self._step = replace(self._step, reattached=True)
        self._step = replace(self._step, owner=owner)
        self._bookmark = Bookmark(self._policy.home.runs / f"{self._name}{FOLLOWED}")
        self._handed_on = ReattachState(note=self._bookmark.note)
        if self._step.reattached:
            offset = self._bookmark.read() if notes.output_stays else 0
            self._handed_on = replace(self._handed_on, offset=offset, logged=notes.logged(self._name))
            self._context.log.warning(
                "[rayslurm] an attempt before left its payload behind, and nobody heard how it ended: going on with "
                f"{self._name}, {_where_to_go_on(self._handed_on.offset)}"
            )
        notes.note(self._name)

    def follow(self, start: Start, injector: RecordContextInjector, handler_of: Callable[[Any], Any]) -> None:
        """Start the payloads, follow them to their ends, and let go of them whatever comes.

        Args:
            start: gets them started.
            injector: has the Pipes context.
            handler_of: takes the Pipes messages of a component's payload.

        Raises:
            RunFailure: they cannot be started.
        """
        held: list[RunningPayload] = []
        try:
            with start_errors():
                sweep(self._place, self._policy)
                if self._goes_on is not None:
                    self._take_up(self._goes_on)
                self._run_dir = str(self._place.layout.runs / self._name)
                assert injector.context_data is not None
                attempts = start(self._plans, self._run_dir, injector.context_data, self._step, held.append)
            self.parts = [self._followed(component, attempts[component], handler_of(component)) for component in self._plans]
            follow_until_end(self.parts, self._policy, self._context, lambda: self._step.new_owner is not None)
        except BaseException as error:
            self._step_back(error)
            if self.parts:
                self._forget()
            theirs = self._step.reattached and not self.parts  # Of a payload that may well run on.
            if self._run_dir and not theirs and not self._policy.keeps(failed=True):
                discard(self._place.connection, self._run_dir)
            raise
        finally:
            if self._bookmark is not None:
                self._bookmark.close()
            self._let_go(held)

    def _step_back(self, error: BaseException) -> None:
        """Leave everything to the attempt that has taken the payload over, if there is one.

        Raises:
            RunFailure: there is one. An interrupt goes on as it is.
        """
        if self._step.new_owner is None:
            return
        failure = handed_over(self._step.new_owner)
        if not isinstance(error, Exception):
            self._context.log.warning(f"[rayslurm] {failure.description}")
            raise error
        raise failure from None

    def _followed(self, component: str | None, attempt: RunningPayload, handler: Any) -> FollowedPayload:
        plan, run_dir, place = self._plans[component], self._dir_of(component), self._place
        follower = Follower(
            place.connection,
            run_dir,
            plan.payload.nonce,
            handler,
            self._context.log,
            place.cadence,
            self._policy.connection_loss_timeout,
            attempt.requeue,
            component,
            self._handed_on,
        )
        return FollowedPayload(plan, run_dir, attempt, follower, component)

    def _dir_of(self, component: str | None) -> str:
        return self._run_dir if component is None else component_dir(self._run_dir, component)

    def _let_go(self, held: list[RunningPayload]) -> None:
        """Let go of runtimes, each of them whatever becomes of the others; of secrets first."""
        try:
            for component, plan in self._plans.items():
                if plan.secret_env and self._run_dir and self._step.new_owner is None:
                    # The runtime takes them first thing; one that never came to it must not leave them.
                    discard(self._place.connection, os.path.join(self._dir_of(component), SECRETS))
        finally:
            release_all(held, {part.attempt: part.evidence for part in self.parts})

    def _forget(self) -> None:
        """Nobody goes on with the payload any more."""
        if self._bookmark is not None:
            self._bookmark.remove()

    @property
    def _outputs(self) -> Path:
        return self._policy.home.outputs / self._name

    def judge(self) -> dict[Any, Judged]:
        """What became of the payloads, by component; their outputs are brought back."""
        return {part.component: Judged(self._judge(part), part.evidence) for part in self.parts}

    def _judge(self, part: FollowedPayload) -> Verdict:
        if needs_job_facts(part.evidence) and not part.evidence.cut_off:
            part.attempt.explain(part.evidence)
        verdict = judge(part.evidence, part.plan.uses_pipes, self._policy.require_messages)
        verdict = with_hint(verdict, part.plan, part.evidence)
        outputs = self._outputs if part.component is None else self._outputs / part.component
        patience = self._policy.connection_loss_timeout
        end = part.evidence.end or {"outputs": []}
        error = None
        try:
            fetch_outputs(end, self._place.connection, part.run_dir, outputs, patience)
        except OSError as failed:
            error = failed
        for warning in what_is_missing(end, verdict.kind is None):
            self._context.log.warning(f"[rayslurm] {part.whose}{warning}")
        not_copied = end["outputs_failed"]
        self._stranded = self._stranded or error is not None or bool(not_copied)
        if verdict.kind is None and error is not None:
            return Verdict(FailureKind.RECORD, f"the payload succeeded, but its outputs cannot be brought back: {error}")
        if verdict.kind is None and not_copied:
            sentence = f"the payload succeeded, but an output could not be copied to {outputs}"
            return Verdict(FailureKind.RECORD, f"{sentence}, and stays in the run directory: {not_copied[0]}")
        return verdict

    def clean_up(self, verdict: Verdict) -> str | None:
        """Remove the run directory unless it stays; where it is then, in words.

        Raises:
            RunFailure: another attempt has taken the payload over, and its verdict is the one that counts.
        """
        removed = not self._stranded and not self._policy.keeps(verdict.kind is not None)
        cut_off = any(part.evidence.cut_off for part in self.parts)  # Then the payload may go on, for a retry to take it over.
        if self._step.owner is None:
            if removed:
                discard(self._place.connection, self._run_dir)
        elif not cut_off:
            with suppress(OSError):
                self._step.owner.confirm(remove=removed)
        if self._step.new_owner is not None:
            raise handed_over(self._step.new_owner)
        if removed or not cut_off:
            self._forget()
        place = self.parts[0].attempt.place
        if removed:
            return None
        return f"{place}:{self._run_dir}" if place else self._run_dir

    def completed(self, session: Any, metadata: Metadata) -> CompletedRun:
        """The run as the user gets it."""
        outputs = sorted(path for path in self._outputs.rglob("*") if path.is_file())
        return CompletedRun(session, metadata, self.parts[0].attempt, outputs)


def handed_over(successor: str) -> RunFailure:
    """What an attempt ends with whose payload another one has taken over."""
    return RunFailure(
        FailureKind.SUPERSEDED,
        f"{successor} has gone on with this payload, because this attempt was taken for dead: its result counts, and this "
        "attempt has neither ended nor judged the payload",
    )


def release_all(held: Sequence[RunningPayload], evidence: Mapping[RunningPayload, Evidence]) -> None:
    """Let go of attempts, of each whatever becomes of the others.

    Args:
        held: the attempts.
        evidence: what is known of those that were followed.
    """
    with ExitStack() as stack:
        for attempt in reversed(held):
            stack.callback(attempt.release, evidence.get(attempt) or Evidence())


def _where_to_go_on(offset: int) -> str:
    """What is to be said of output of which so many bytes of the record were handed on."""
    if not offset:
        return "whose output is repeated from its beginning"
    return f"at byte {offset} of its output; at most the last batch is repeated"


@contextmanager
def start_errors() -> Iterator[None]:
    """Turn what keeps a runtime from starting into one failure."""
    try:
        yield
    except StartError as error:
        raise RunFailure(error.kind, str(error), retry=error.retry) from None
    except ConnectionFailed as error:
        raise RunFailure(FailureKind.CONNECTION, f"the run cannot be started: {error}", retry=error.temporary) from error
    except OSError as error:
        raise RunFailure(FailureKind.RECORD, f"the run cannot be started: {error}") from error


def execute(
    context: dg.OpExecutionContext, plan: Plan, backend: Backend[Plan, RunningPayload], policy: Policy, extras: PipesExtras | None
) -> CompletedRun:
    """Run a plan and wait for it.

    Args:
        context: of the step.
        plan: what to run.
        backend: gets it started.
        policy: what the user decided.
        extras: Pipes extras.

    Raises:
        RunFailure: it did not succeed.
    """
    run = PayloadRun(context, {None: plan}, backend, policy)
    if isinstance(backend, CanReattach):
        run.may_go_on(backend.can_reattach)
    reader, injector = RecordReader(), RecordContextInjector(context)
    with pipes_session(context, injector, reader, extras, plan.uses_pipes) as session:
        run.follow(lambda plans, *how: {None: backend.start(plans[None], *how)}, injector, lambda _: reader.handler)
        judged = run.judge()[None]
        verdict, metadata = judged.verdict, run.parts[0].metadata(policy.mode)
        kept = run.clean_up(verdict)
        if verdict.kind is not None:
            metadata = {**failure_metadata(judged.evidence, kept), **metadata}
            raise RunFailure(verdict.kind, verdict.sentence, metadata, verdict.retry)
    return run.completed(session, metadata)
