"""Runs the payload of a run to its verdict. With topology "separate", runs one payload for each component, all together.

A generator of type `Steps` does the work, so that a run needs no thread of its own. The generator yields payloads, and its caller
follows these payloads until they have ended, and then continues the generator. `drive` is such a caller.
"""

from __future__ import annotations

import inspect
import os
import secrets
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import dagster as dg
from dagster_pipes import PipesContextData

from ..backends.base import Backend, Register, RunningPayload, deferred_interrupts, delayed_interrupts, noticed_interrupts
from ..backends.layout import Layout
from ..backends.ownership import Ownership
from ..compute_fields import DETACH, ComputeFields
from ..config import ExecutionMode
from ..errors import FailureKind, StartError
from ..failures import CompletedRun, RunFailure
from ..follow import Evidence, Follower, Following
from ..follow.forward import RecordPipes
from ..follow.hub import Followed, follow_in_hub
from ..outcome.metadata import Metadata, failure_metadata, run_metadata, timeline_metadata
from ..outcome.verdict import SUCCESS, Judged, Verdict, judge, needs_job_facts, unhealthy_nodes, with_hint
from ..plan import Plan
from ..runtime.protocol.record import SECRETS, component_dir
from ..separate.together import ReportMerger, failures_metadata, judge_components, metadata_of_all
from ..slurm.accounting import relevant_lines
from ..slurm.shared_queue import SlurmUnanswered
from ..ssh.base import ConnectionFailed
from ..ssh.local import LocalConnection
from .announce import announce
from .files import discard, fetch_outputs, keeps_run_dir, missing_output_warnings, sweep_old_files
from .interrupts import INTERRUPTS, has_terminal, is_service_stop, mark_canceling
from .reattach import Launch, reattach_or_new
from .unhealthy import remember, second_try

if TYPE_CHECKING:
    from .partition_results import PartitionResults

T = TypeVar("T")
# The steps of a run: a generator that yields the payloads to follow. Its caller continues it when the payloads have ended, or
# raises inside it the exception that interrupts the caller. Each step may run in another thread.
Steps = Generator[Following, None, T]

Component = str | None  # The name of a component; None if the run has a single payload.
_CANCEL_MARGIN = 15.0  # Seconds beyond the grace period for which a cancelled payload's record is still read.


def drive(steps: Steps[T], follow: Callable[[Following, float], Followed] = follow_in_hub) -> T:
    """Run the generator `steps` to its end in this thread, and return the generator's result; blocks.

    When the generator yields payloads, `drive` calls `follow` with these payloads and with the time of the call of `drive`, by
    the monotonic clock. `follow` begins to follow the payloads, and returns at once. By default, the hub of the cluster follows
    the payloads: one thread for all callers in this process. If an exception, such as an interrupt, comes while payloads are
    followed, the exception is raised inside the generator.
    """
    began = time.monotonic()
    error: BaseException | None = None
    while True:
        followed = None
        try:
            following = next(steps) if error is None else steps.throw(error)
            error = None
            try:
                with delayed_interrupts():
                    followed = follow(following, began)
                followed.wait()
            finally:
                if followed is not None:
                    with delayed_interrupts():
                        followed.leave()
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]
        except BaseException as raised:
            if inspect.getgeneratorstate(steps) == inspect.GEN_CLOSED:  # The last step raised it.
                raise
            error = raised


def executing(
    context: dg.OpExecutionContext,
    plan: Any,
    backend: Backend,
    resource: ComputeFields,
    extras: Any,
    partitions: PartitionResults | None = None,
    number: int | None = None,
) -> Steps[CompletedRun]:
    """Generator that runs the payloads of a step until all have ended, and returns the result for the user's asset.

    The caller must follow the payloads that the generator yields, and then continue it: `drive` or `drive_async` does so. Raises
    RunFailure unless all payloads succeeded.

    Args:
        context: The context of the step.
        plan: A `Plan`; for several components, a mapping from component names to plans, in the order of the components in the
            job.
        backend: The backend that starts the payloads.
        resource: The settings of the run.
        extras: The Pipes extras.
        partitions: The object that gets the Pipes messages of a payload with several partitions; otherwise None.
        number: The result of `next_call`; None if the caller has not called `next_call` for this run.
    """
    home = Layout.here(resource.local_base)
    plans: Mapping[Any, Plan] = plan if isinstance(plan, Mapping) else {None: plan}
    with start_errors():
        sweep_old_files(backend, home, resource.retention_days)
        launch = reattach_or_new(context, next(iter(plans.values())), backend, home, number, partitions is not None)
    if None in plans:
        plans = {None: launch.plan}
    writers = sum(each.uses_pipes for each in plans.values())
    pipes = RecordPipes(context, max(1, writers))
    run = PayloadRun(context.log, backend, resource, launch, plans, context)
    with pipes.session(extras, writers > 0) as session:
        pipes_context, handler = pipes.pipes_context, pipes.handler
        if partitions:
            pipes_context, handler = partitions.attach(pipes, lambda: run.launch.step.owner)
            run.verdict = partitions.verdict
        metadata = yield from run.completing(
            pipes_context,
            handler,
            # A throwaway handler checks each result of a component, so that Dagster does not get the result yet.
            check=lambda each: dg.PipesMessageHandler(context, pipes).handle_message(each),
        )
    outputs = sorted(path for path in run.outputs.rglob("*") if path.is_file())
    running = run.first.running
    metadata = {**metadata, **(partitions.metadata() if partitions else {})}
    return CompletedRun(session, metadata, running.cluster_id, running.job_id, outputs)


@contextmanager
def start_errors() -> Iterator[None]:
    """Context manager: turns a StartError or OSError of the block into a RunFailure that says why the run cannot be started."""
    try:
        yield
    except StartError as error:
        raise RunFailure(error.kind, str(error), retry=error.retry) from None
    except ConnectionFailed as error:
        raise RunFailure(FailureKind.CONNECTION, f"the run cannot be started: {error}", retry=error.temporary) from error
    except SlurmUnanswered as error:
        raise RunFailure(FailureKind.SUBMISSION, f"the run cannot be started: {error}", retry=True) from error
    except OSError as error:
        raise RunFailure(FailureKind.RECORD, f"the run cannot be started: {error}") from error


@dataclass
class FollowedPayload:
    """A running payload, and the follower that reads the payload's record and passes output and messages to Dagster."""

    plan: Plan
    running: RunningPayload
    follower: Follower
    start_by: float  # The value of `time.monotonic()` by which the payload's runtime must have started.

    @property
    def evidence(self) -> Evidence:
        """The known facts about the payload, from its run record and from Slurm."""
        return self.follower.evidence

    @property
    def label(self) -> str:
        """The beginning of each line about the payload in the Dagster log; "" if the run has a single payload."""
        return "" if self.follower.component is None else f"component {self.follower.component!r}: "

    @property
    def unhealthy(self) -> list[dict[str, str]]:
        """The nodes that failed a health check of the payload's Ray cluster; empty if there are none.

        Each node is a dictionary from the payload's run record, with the name of the node, the check and its result.
        """
        return (self.evidence.end_or_partial or {}).get("context", {}).get("unhealthy") or []

    def metadata(self, mode: str) -> Metadata:
        """Returns the Dagster metadata of the payload, for a result and a failure alike. `mode` is the execution mode."""
        own = self.running.metadata(self.evidence)
        figures = run_metadata(self.evidence.end_or_partial, mode, self.running.cluster_id)
        return {**own, **figures, **timeline_metadata(self.evidence, mode, own.get("Queue wait (s)"))}


@dataclass
class PayloadRun:
    """Runs the payloads of one step, or of one call without Dagster, from their start to the verdict."""

    log: Any
    backend: Backend
    resource: ComputeFields
    launch: Launch
    plans: Mapping[Any, Plan]  # By component, in the order of the components in the job.
    context: dg.OpExecutionContext | None = None  # The context of the step; None without Dagster.
    # Called when all payloads have succeeded; returns a further verdict, such as a failure if partitions are missing.
    verdict: Callable[[], Verdict] = lambda: SUCCESS
    payloads: dict[Component, FollowedPayload] = field(default_factory=dict)  # Those that have started.
    detached: bool = False  # Whether the payloads were left running for the next attempt at this step.
    outputs_left: bool = False  # Whether some output files could not be copied, and are only in the run directory.

    @property
    def run_dir(self) -> str:
        """The path of the run directory on the machine or cluster where the payloads run."""
        return str(self.backend.layout.runs / self.launch.name)

    @property
    def outputs(self) -> Path:
        """The directory on this machine to which the output files of the payloads are copied."""
        return Path(Layout.here(self.resource.local_base).outputs, self.launch.name)

    @property
    def _owner(self) -> Ownership:
        return self.launch.step.owner

    @property
    def _plan(self) -> Any:
        """The plan of the only payload; in a run with components, the mapping from components to plans."""
        return self.plans.get(None, self.plans)

    @property
    def first(self) -> FollowedPayload:
        """The payload that started first."""
        return next(iter(self.payloads.values()))

    def completing(self, context: PipesContextData, handler: Any, check: Callable[[Any], object]) -> Steps[Metadata]:
        """Generator that runs the payloads to their ends, and returns the metadata for Dagster.

        The caller must follow the payloads that the generator yields, and then continue it, as `drive` does.

        Raises RunFailure unless all payloads succeeded. If unhealthy nodes kept the Ray cluster from starting, and `on_unhealthy`
        of the resource is "exclude-and-retry", the payloads are started once more without these nodes.

        Args:
            context: The Pipes context.
            handler: The handler of the Pipes messages. In a run with components, this handler gets the results of the components
                merged, after all payloads have ended.
            check: A function that raises an exception for an invalid result. In a run with components, the function is called
                with each Pipes message that reports a result, as soon as the message comes. In any other run, it is unused.
        """
        try:
            return (yield from self._complete_once(context, handler, check))
        except RunFailure as failure:
            if not second_try(failure, self._plan, self.backend, self.resource.on_unhealthy, self.log):
                raise
            causes = failure.unhealthy
        self._start_over()
        try:
            metadata = yield from self._complete_once(context, handler, check)
        except RunFailure as failure:
            remember(failure.unhealthy, self.backend, self.log)
            raise
        return {**metadata, "Unhealthy nodes": "; ".join(map(str, causes))}

    def _start_over(self) -> None:
        """Prepare a second start of the payloads, which have never started: choose a new nonce and a new run directory."""
        nonce = secrets.token_hex(6)
        self.plans = {name: replace(each, payload=replace(each.payload, nonce=nonce)) for name, each in self.plans.items()}
        with start_errors():
            self.launch = self.launch.again(nonce, self.backend, Layout.here(self.resource.local_base))
        self.payloads, self.outputs_left = {}, False

    def _complete_once(self, context: PipesContextData, handler: Any, check: Callable[[Any], object]) -> Steps[Metadata]:
        merger = ReportMerger(handler, self.plans, check)
        yield from self.following(
            lambda register: self.backend.start(self._plan, self.run_dir, context, self.launch.step, register),
            lambda component: handler if component is None else merger.of(component),
        )
        for component, error in merger.hand_over():
            self.payloads[component].follower.messages.refuse(error, self.payloads[component].evidence)
        judged = {component: self.judge(each) for component, each in self.payloads.items()}
        verdict = judge_components(judged)
        verdict = self.verdict() if verdict.kind is None else verdict
        own = {component: each.metadata(self.resource.mode) for component, each in self.payloads.items()}
        metadata = metadata_of_all(own, judged, self.resource.mode, self.first.running.job_id)
        kept = self.clean_up(verdict)
        unhealthy = unhealthy_nodes([row for each in self.payloads.values() for row in each.unhealthy])
        if verdict.kind is not None:
            metadata = {**failures_metadata(judged, kept), **metadata}
            causes = unhealthy if verdict.kind == FailureKind.CLUSTER_START else ()
            raise RunFailure(verdict.kind, verdict.sentence, metadata, verdict.retry, causes)
        if unhealthy:  # Nodes without which the cluster started, as `min_nodes` allows.
            metadata["Unhealthy nodes"] = "; ".join(map(str, unhealthy))
            remember(unhealthy, self.backend, self.log)
        return metadata

    def following(self, start: Callable[[Register], object], handler_of: Callable[[Any], Any]) -> Steps[None]:
        """Generator that starts the payloads and yields them; the caller must follow them until all have ended.

        Then the caller continues the generator, as `drive` does. After the end or an error, the generator calls `release` of each
        payload, unless the payloads shall outlive this process. An error or interrupt that is raised inside the generator first
        ends the payloads. Raises RunFailure if the payloads cannot be started, or if a later attempt has taken the payloads over.

        Args:
            start: A function that starts all payloads. `start` gets a function as its argument, and calls this function with each
                payload as soon as the payload runs, in the order of the plans.
            handler_of: A function that returns the handler for the Pipes messages of a component. The argument is the name of the
                component, or None if the run has a single payload.
        """

        def register(running: RunningPayload) -> None:
            component = list(self.plans)[len(self.payloads)]
            with delayed_interrupts():
                self.payloads[component] = self._followed(component, running, handler_of(component))

        try:
            try:
                with noticed_interrupts() as raise_ignored:
                    with start_errors():
                        start(register)
                    # Not in `register`: an interrupt there would cancel the job, also where it has to go on.
                    self._announce()
                    followed = [(each.follower, partial(self._poll, each, raise_ignored)) for each in self.payloads.values()]
                    yield Following(followed)
            except GeneratorExit:  # The steps are given up, as at the death of this process.
                self.detached = True
                raise
            except BaseException as error:
                with deferred_interrupts() as interrupted_again:
                    self.detached = self._detaches(error)
                    if self.detached:
                        raise
                    if not isinstance(error, RunFailure):
                        yield from self._end_interrupted(error, interrupted_again)
                        raise
                    for each in self.payloads.values():
                        each.running.kill()
                        each.follower.flush_output()
                raise
        except BaseException as error:
            if self.detached:
                raise
            self._raise_if_superseded(error)
            if self.payloads:
                self.launch.forget()
            may_run_on = self.launch.step.reattached and not self.payloads
            if not may_run_on and not keeps_run_dir(self.resource, failed=True):
                discard(self.backend.connection, self.run_dir)
            raise
        finally:
            if not self.detached:
                self._release()

    def _announce(self) -> None:
        """Show the Slurm job of the first payload in Dagster."""
        if self.context is not None:
            base, running, ray = Layout.here(self.resource.local_base).base, self.first.running, self.first.plan.ray
            name, connection = self.launch.name, self.backend.connection
            announce(self.context, base, running.job_id, running.cluster_id, ray, name, connection)

    def judge(self, payload: FollowedPayload) -> Judged:
        """Judge a payload that has ended, and copy the payload's output files to this machine.

        Returns the verdict with the evidence for the verdict. If the payload succeeded, but its output files cannot be copied,
        the verdict is a failure.
        """
        evidence = payload.evidence
        if needs_job_facts(evidence) and not evidence.connection_lost:
            payload.running.explain(evidence)
        verdict = judge(evidence, payload.plan.uses_pipes, self.resource.require_messages)
        verdict = with_hint(verdict, evidence)
        problem = self._fetch_outputs(payload, succeeded=verdict.kind is None)
        if problem is not None:
            self.outputs_left = True
            if verdict.kind is None:
                verdict = Verdict(FailureKind.RECORD, f"the payload succeeded, but {problem}")
        return Judged(verdict, evidence)

    def clean_up(self, verdict: Verdict) -> str | None:
        """Remove the run directory and return None, or keep the run directory and return its path as "HOST:PATH".

        The run directory is kept if some output files were not copied, if the connection is lost, or if `keep_run_dirs` of the
        resource says so. `keep_run_dirs` may ask to keep the run directories of failures only; `verdict` is the verdict on the
        run. If output files of a successful run exceed the size limit, or if no file matches a pattern, the run directory has the
        only copy of the files, and is kept with a warning. For a run directory on this machine, the result is the path without a
        host. Raises RunFailure if a later attempt has taken the payload over.
        """
        # Over a lost connection the payload may go on, and a retry may take it over.
        lost = any(each.evidence.connection_lost for each in self.payloads.values())
        ends = [each.evidence.end or {} for each in self.payloads.values()]
        left_out = verdict.kind is None and any(end.get("outputs_left_out") for end in ends)
        left = self.outputs_left or left_out
        remove = not lost and not left and not keeps_run_dir(self.resource, failed=verdict.kind is not None)
        if not lost:
            with suppress(OSError):  # A later sweep removes what stays.
                if self._owner.confirm() and remove:
                    self.backend.connection.remove(self.run_dir)
        if self._owner.new_owner is not None:
            raise superseded(self._owner.new_owner)
        if not lost:
            self.launch.forget()
        if remove:
            return None
        connection = self.backend.connection
        kept = self.run_dir if isinstance(connection, LocalConnection) else f"{connection.place}:{self.run_dir}"
        if left_out:
            days = self.resource.retention_days
            self.log.warning(f"[rayslurm] the run directory {kept} keeps the files that were left out for {days} days")
        return kept

    def _followed(self, component: Component, running: RunningPayload, handler: Any) -> FollowedPayload:
        plan = self.plans[component]
        follower = Follower(
            self.backend.connection,
            self._dir_of(component),
            plan.payload.nonce,
            handler,
            self.log,
            self.backend.cadence,
            self.resource.connection_loss_timeout,
            running.requeue,
            component,
            self.launch.state,
            plan.fabric,
            running.next_reads,
        )
        return FollowedPayload(plan, running, follower, time.monotonic() + self.resource.runtime_start_timeout)

    def _dir_of(self, component: Component) -> str:
        return self.run_dir if component is None else component_dir(self.run_dir, component)

    def _poll(self, payload: FollowedPayload, raise_ignored: Callable[[], None], evidence: Evidence) -> str | None:
        """Returns how the payload's runtime ended, in words; None while the runtime lives.

        Raises RunFailure if the runtime does not start in time or can never start, or if a later attempt has taken the payload
        over. `raise_ignored` raises the exception of an interrupt that Python has ignored. `evidence` is what the payload's
        record and Slurm have shown so far; the method may add to `evidence`.
        """
        raise_ignored()
        if self._owner.new_owner is not None:
            raise superseded(self._owner.new_owner)
        limit = self.resource.runtime_start_timeout
        # The timeout does not run while the job waits in the queue, or while the record cannot be read.
        if payload.running.waiting or payload.follower.state.unreachable_since is not None:
            payload.start_by = time.monotonic() + limit
        if not evidence.started and time.monotonic() > payload.start_by:
            payload.running.explain(evidence)
            log = f": {lines[-1]}" if (lines := relevant_lines(evidence.runtime_log)) else ""
            sentence = f"{payload.label}the runtime did not start within runtime_start_timeout={limit:g} s{log}"
            metadata = {**failure_metadata(evidence, None), **payload.running.metadata(evidence)}
            raise RunFailure(FailureKind.RUNTIME, sentence, metadata)
        return payload.running.poll(evidence)

    def _detaches(self, interrupt: BaseException) -> bool:
        """Returns whether the payloads shall go on although `interrupt` ends this Dagster process. If so, logs a warning.

        The result is True only if four conditions hold: the Dagster process is stopped from outside, and not by a person who ends
        the run (see `is_service_stop`); `on_service_stop` of the resource is "detach"; a payload was started; and a later attempt
        can take the payloads over. In a session with scope "run", the payloads never go on.
        """
        ends_with_run = self.resource.mode == ExecutionMode.SLURM_SESSION and self.resource.session.scope == "run"
        if self.resource.on_service_stop != DETACH or ends_with_run or not self.launch.lasts or not self.payloads:
            return False
        if self.context is None or not is_service_stop(self.context, interrupt):
            return False
        self.log.warning(
            f"[rayslurm] this Dagster process is stopped, and Slurm job {self.first.running.job_id} goes on: the next attempt at "
            "this step takes it over, if it asks for the same"
        )
        return True

    def _end_interrupted(self, interrupt: BaseException, interrupted_again: Callable[[], bool]) -> Steps[None]:
        """Generator that asks the payloads to end because of `interrupt`, and waits for their ends.

        The generator yields the payloads. The caller follows them until all have ended or the deadline has passed, and then
        continues the generator. The payloads have a grace period to end by themselves. When `interrupted_again` returns True,
        after a second interrupt, the grace period is over. Payloads that do not end in time are killed. Raises `interrupt` if a
        later attempt has taken the payloads over; otherwise raises nothing.
        """
        payloads, log = list(self.payloads.values()), self.log
        for each in payloads:
            each.evidence.interrupted = True
        if self.context is not None and isinstance(interrupt, INTERRUPTS) and has_terminal():
            mark_canceling(self.context)
        if not payloads:
            return
        log.warning(f"[rayslurm] ending the payload{'s' * (len(payloads) > 1)}: {type(interrupt).__name__}")
        for each in payloads:
            each.running.cancel()
        if self._owner.new_owner is not None:
            raise interrupt
        hurried: list[None] = []

        def poll(running: RunningPayload, evidence: Evidence) -> str | None:
            if hurried or interrupted_again():
                running.cancel(now=True)
            exited = running.poll(evidence)
            if self._owner.new_owner is not None:
                raise interrupt
            return exited

        grace_period = max(each.plan.payload.grace_period for each in payloads)
        followed = [(each.follower, partial(poll, each.running)) for each in payloads]
        yield Following(followed, time.monotonic() + grace_period + _CANCEL_MARGIN, partial(hurried.append, None))
        for each in payloads:
            if each.evidence.end is None:
                each.running.kill()
            verdict = judge(each.evidence, each.plan.uses_pipes, self.resource.require_messages)
            log.info(f"[rayslurm] {each.label}{verdict.sentence}")

    def _raise_if_superseded(self, error: BaseException) -> None:
        """Raise RunFailure if a later attempt has taken the payload over; otherwise return.

        `error` is the exception that ended this attempt. If `error` is an interrupt, the method raises `error` in place of
        RunFailure.
        """
        if self._owner.new_owner is None:
            return
        failure = superseded(self._owner.new_owner)
        if not isinstance(error, Exception):
            self.log.warning(f"[rayslurm] {failure.description}")
            raise error
        raise failure from None

    def _release(self) -> None:
        """Let go of all payloads at the end of a run: call `RunningPayload.release` of each, and remove secrets that are left.

        If one `release` raises an exception, the method first finishes its work, and then raises the exception. The secrets stay
        if a later attempt has taken the payloads over.
        """
        with ExitStack() as stack:
            for each in self.payloads.values():
                stack.callback(each.running.release, each.evidence)
            for component, plan in self.plans.items():
                # A job that was submitted before may go on to wait if the connection is lost.
                ended = self.launch.submitted and any(not each.evidence.connection_lost for each in self.payloads.values())
                if (plan.secret_env or ended) and self._owner.new_owner is None:
                    # The runtime removes secrets when it starts; a runtime that never started leaves them.
                    discard(self.backend.connection, os.path.join(self._dir_of(component), SECRETS))

    def _fetch_outputs(self, payload: FollowedPayload, succeeded: bool) -> str | None:
        """Copy a payload's output files to this machine, and log a warning about each kind of output that is incomplete.

        Returns None if all files were copied; otherwise a sentence that says why some files are only in the run directory.
        `succeeded` says whether the payload succeeded. If the payload has not succeeded, files that do not exist or exceed the
        size limit get no warning.
        """
        end, run_dir = payload.evidence.end or {"outputs": []}, payload.follower.run_dir
        outputs = self.outputs / (payload.follower.component or "")
        problem = None
        try:
            fetch_outputs(end, self.backend.connection, run_dir, outputs, self.resource.connection_loss_timeout)
        except OSError as error:
            problem = f"its outputs cannot be brought back: {error}"
        for warning in missing_output_warnings(end, succeeded):
            self.log.warning(f"[rayslurm] {payload.label}{warning}")
        if problem is None and end["outputs_failed"]:
            copy = f"an output could not be copied to {outputs}"
            problem = f"{copy}, and stays in the run directory: {end['outputs_failed'][0]}"
        return problem


def superseded(successor: str) -> RunFailure:
    """Returns the failure of an attempt whose payload a later attempt has taken over.

    `successor` describes the later attempt, such as "run 0123abcd".
    """
    return RunFailure(
        FailureKind.SUPERSEDED,
        f"{successor} has gone on with this payload, because this attempt was taken for dead: its result counts, and this "
        "attempt has neither ended nor judged the payload",
    )
