"""The separate topology: start barrier, output, reports and verdict of several components."""

from __future__ import annotations

import contextlib
import io
import json
import logging
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dagster as dg
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_rayslurm import BashLauncher, HetComponent, RayLauncher, SlurmQueueConfig
from dagster_rayslurm.backends.base import Layout, Step
from dagster_rayslurm.components import Component, arrange, component_specs, request_for
from dagster_rayslurm.compute_fields import ComputeFields
from dagster_rayslurm.environments import Interpreter
from dagster_rayslurm.errors import FailureKind, may_retry
from dagster_rayslurm.execution.reattach import Launch
from dagster_rayslurm.execution.run import PayloadRun, drive
from dagster_rayslurm.failures import RunFailure
from dagster_rayslurm.follow import Cadence, Evidence, Follower, follow_all
from dagster_rayslurm.follow.forward import OutputWriter, RecordPipes
from dagster_rayslurm.outcome.verdict import SUCCESS, Judged, Verdict, judge
from dagster_rayslurm.plan import Plan, by_component, make_plan
from dagster_rayslurm.runtime.node.allocation import from_environ, select_component
from dagster_rayslurm.runtime.protocol.record import JOURNAL, STDIO, encode
from dagster_rayslurm.runtime.protocol.spec import RuntimeSpec, from_fields, from_json, to_json
from dagster_rayslurm.runtime.separate.barrier import Barrier, ComponentAddress, ComponentState, Ended, RunState
from dagster_rayslurm.separate.backend import (
    ComponentJob,
    SeparateLocalBackend,
    barrier_specs,
    job_specs,
    local_specs,
)
from dagster_rayslurm.separate.together import (
    ReportMerger,
    failures_metadata,
    judge_components,
    merge,
    metadata_of_all,
)
from dagster_rayslurm.slurm.accounting import JobFacts
from dagster_rayslurm.ssh.local import LocalConnection

# ---- Start barrier


OK = Ended(None, 0, False)


def ready(name: str) -> ComponentState:
    return ComponentState(ComponentAddress(name, name, None, [name]))


def failed(why: str, exit_code: int) -> Ended:
    return Ended(why, exit_code, False)


class Told:
    """A barrier with 300 s of patience and 10 s of grace, whose guests are connected, and what its components have said."""

    def __init__(self, names: str, connected: str = "abc") -> None:
        self.barrier = Barrier(list(names), 300.0, 10.0, now=0.0)
        self.said = {name: ComponentState() for name in names}
        for name in names[1:]:
            if name in connected:
                self.barrier.connected(name)

    def tell(self, name: str, now: float, **news: Any) -> RunState:
        self.said[name] = replace(self.said[name], **news)
        self.barrier.update(name, self.said[name], now)
        return self.barrier.state

    def ready(self, names: str, now: float = 1.0) -> RunState:
        return [self.tell(name, now, place=ready(name).place) for name in names][-1]


def test_payloads_start_when_all_are_ready() -> None:
    three = Told("abc")
    assert three.ready("ba") == RunState()
    state = three.ready("c")
    assert list(state.places) == ["a", "b", "c"] and state.places["b"] == ready("b").place and state.failed is None


def test_only_the_first_failure_ends_the_others() -> None:
    three = Told("abc")
    three.ready("abc")
    assert three.tell("c", 2.0, ended=OK).failed is None
    state = three.tell("b", 3.0, ended=failed("exit code 3", 3))
    assert (state.failed, state.why, state.finished) == ("b", "exit code 3", False)
    state = three.tell("a", 4.0, ended=failed("component 'b': exit code 3", 1))
    assert (state.failed, state.finished, state.final, three.barrier.exit_code) == ("b", True, True, 3)
    assert not three.barrier.may_leave(5.0) and three.barrier.may_leave(14.0)
    three.tell("b", 5.0, left=True)
    three.tell("c", 5.0, left=True)
    assert three.barrier.may_leave(5.0)


def test_a_failure_before_the_start_starts_no_payload() -> None:
    two = Told("ab")
    two.ready("a")
    assert two.tell("b", 1.0, ended=failed("no cluster", 0)).failed == "b" and two.barrier.exit_code == 1
    assert not two.ready("b").places


def test_one_component_starts_and_ends_alone() -> None:
    one = Told("a")
    assert one.ready("a").places
    assert one.tell("a", 2.0, ended=OK).final and one.barrier.exit_code == 0 and one.barrier.may_leave(2.0)


def test_a_timeout_names_the_missing_components() -> None:
    three = Told("abc", connected="b")
    three.ready("a")
    three.barrier.tick(299.0)
    assert three.barrier.state == RunState()
    three.barrier.tick(300.0)
    said = three.barrier.state.why
    assert "within 300 s" in said and "'b' (its cluster is not up)" in said and "'c' (no word from its runtime)" in said
    assert not three.tell("a", 301.0, ended=OK).finished
    state = three.tell("b", 301.0, ended=OK)
    assert state.finished and not state.final


def test_a_lost_guest_is_given_up_after_the_grace() -> None:
    two = Told("ab").barrier
    two.disconnected("b", "cut", 5.0)
    two.connected("b")
    two.disconnected("b", "cut", 9.0)
    two.tick(18.0)
    assert two.state.failed is None
    two.tick(19.0)
    assert (two.state.failed, two.state.why) == ("b", "its runtime is lost: cut")


EVENTS = st.sampled_from(["ready", "ended", "failed", "disconnected", "connected", "interrupted", "leaving", "tick"])


@given(st.lists(st.tuples(st.sampled_from("abc"), EVENTS, st.sampled_from([0.0, 1.0, 40.0])), max_size=30))
def test_the_state_in_any_course_of_events(course: list[tuple[str, str, float]]) -> None:
    """What was told stays so; no start after a failure; a failure makes the exit code."""
    job, now = Told("abc", connected=""), 0.0
    for component, event, pause in course:
        now += pause
        barrier, before = job.barrier, job.barrier.state
        guest = component if component != "a" or event in ("ready", "ended", "failed") else "b"
        if event == "connected":
            barrier.connected(guest)
        elif event == "disconnected":
            barrier.disconnected(guest, "cut", now)
        elif event == "interrupted":
            barrier.interrupted("signal", 143, now)
        elif event == "tick":
            barrier.tick(now)
        elif event == "ready":
            job.ready(guest, now)
        elif event == "leaving":
            job.tell(guest, now, left=True)
        elif job.said[guest].ended is None:
            job.tell(guest, now, ended=OK if event == "ended" else failed("it failed", 3))
        state = barrier.state
        assert (before.places or state.places if before.failed is None else before.places) == state.places
        assert before.failed in (None, state.failed) and state.finished >= before.finished
        assert (state.failed is not None) == (barrier.exit_code != 0)
        assert state.finished or not barrier.may_leave(now)
        assert from_fields(RunState, json.loads(json.dumps(asdict(state)))) == state


# ---- Allocation of a component

TASK = {
    "SLURM_JOB_ID": "17",
    "SLURM_HET_SIZE": "2",
    "SLURM_JOB_ID_HET_GROUP_0": "17",
    "SLURM_JOB_ID_HET_GROUP_1": "18",
    "SLURM_JOB_NODELIST": "c1,g[1-2]",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "c1",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "g[1-2]",
    "SLURM_JOB_PARTITION_HET_GROUP_0": "compute",
    "SLURM_JOB_PARTITION_HET_GROUP_1": "gpu",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",
}


@pytest.mark.parametrize(("node", "own"), [(0, 0), (1, 0), (2, 1)])
def test_a_component_sees_its_own_allocation(node: int, own: int) -> None:
    task = {**TASK, "SLURM_NODEID": str(node)}
    here = from_environ(task)
    assert here is not None
    part = select_component(task, here, ["cpu", "gpu"]).of_own_group()
    first = node == 0
    assert (part.node_id, part.nodes, part.first) == (own, ["c1"] if first else ["g1", "g2"], 0 if first else 1)
    assert (part.job_id, part.partition) == (("17", "compute") if first else ("18", "gpu"))
    assert part.head_addresses == (["10.0.0.1", "c1"] if first else ["g1"])
    assert part.component_of(0) is None and part.of_own_group() == part


# ---- Start records


def plans_of(components: tuple[Component, ...], **fields: Any) -> dict[str, Plan]:
    given = {
        "nonce": "n",
        "max_output_bytes": 1,
        "max_stdio_bytes": 1,
        **fields,
    }
    return {each.component_id: make_plan(payload_path="true", launcher=each.launcher, **given) for each in components}


def parts(**launchers: Any) -> tuple[Component, ...]:
    queue = {"mem": "1G", "cpus_per_node": 2}
    return arrange(
        [HetComponent(component_id=name, queue=SlurmQueueConfig(**queue), launcher=each) for name, each in launchers.items()]
    )


def test_runtimes_of_a_job_share_a_token_but_no_control_key() -> None:
    components = parts(a=RayLauncher(startup_timeout=20), b=BashLauncher(), c=RayLauncher(startup_timeout=40))
    request = request_for(components, job_name="rayslurm", comment="")
    specs = job_specs("slurm-n", plans_of(components), request)
    assert list(specs) == ["a", "b", "c"] and [each.component_id for each in component_specs(request)] == ["a", "b", "c"]
    assert len({spec.control_key for spec in specs.values()}) == 3 and len({spec.token_key for spec in specs.values()}) == 1
    for name, spec in specs.items():
        assert spec.meeting is not None and spec.meeting.component_id == name and spec.meeting.components == ["a", "b", "c"]
        assert spec.components == [] and spec.asked_cpus == 2 and spec.meeting.patience == 70
        assert spec.meeting.key not in (spec.control_key, spec.token_key)
        assert from_json(RuntimeSpec, to_json(spec)) == spec
    assert specs["b"].ray is None and specs["a"].ray is not None


def test_local_runtimes_know_the_requirements_of_all_components() -> None:
    components = parts(a=RayLauncher(num_cpus_per_node=1, num_gpus_per_node=3), b=BashLauncher())
    specs = local_specs("local-n", plans_of(components), components)
    assert specs["a"].components == specs["b"].components and specs["a"].control_key is None
    wanted = [(each.component_id, each.asked_cpus, each.asked_gpus) for each in specs["b"].components]
    assert wanted == [("a", 1, 3), ("b", 2, None)] and specs["a"].token_key == specs["b"].token_key
    assert from_json(RuntimeSpec, to_json(specs["a"])) == specs["a"]


def test_the_barrier_server_uses_the_configured_address_and_ports() -> None:
    components = parts(a=RayLauncher(head_node_address="10.1.1.1", port_range="20000-20299"), b=RayLauncher())
    meeting = barrier_specs(plans_of(components), "aa")["b"]
    assert meeting.hosts == ["10.1.1.1"] and all(20000 <= port <= 20299 for port in meeting.ports)


def test_by_component_expands_an_argument() -> None:
    names = ["a", "b"]
    assert by_component("x", names, "payload_path") == {"a": "x", "b": "x"}
    assert by_component({"b": 2, "a": 1}, names, "payload_path") == {"a": 1, "b": 2}
    assert by_component({"b": False}, names, "uses_pipes", default=True) == {"a": True, "b": False}
    for value, words in (({"a": 1}, "none for component 'b'"), ({"a": 1, "b": 2, "c": 3}, "no component 'c'")):
        with pytest.raises(ValueError, match=words):
            by_component(value, names, "payload_path")


@pytest.mark.parametrize("value", ["no", None, 1, {"a": True}])
def test_uses_pipes_of_one_payload_is_a_boolean(value: Any) -> None:
    with pytest.raises(ValueError, match="uses_pipes"):
        make_plan(payload_path=["x"], launcher=BashLauncher(), nonce="n", max_output_bytes=1, max_stdio_bytes=1, uses_pipes=value)


# ---- Checks of components


@pytest.mark.parametrize(
    ("queue", "launcher", "words"),
    [
        ({"extra_sbatch": ["--job-name=x"]}, BashLauncher(), "--job-name"),
        ({"gpu_type": "a100"}, BashLauncher(), "gpu_type"),
        ({"time_limit": "00:01:00", "signal_before_timeout": "TERM@600"}, BashLauncher(), "signal_before_timeout"),
        ({"cpus_per_node": 1}, RayLauncher(num_cpus_per_node=2), "num_cpus_per_node=2"),
        ({"num_nodes": 2}, RayLauncher(min_nodes=3), "min_nodes=3"),
        ({"num_nodes": 4}, RayLauncher(min_nodes=3, max_workers=1), "min_nodes=3"),
    ],
)
def test_local_mode_refuses_components_that_no_job_can_have(tmp_path: Path, queue: Any, launcher: Any, words: str) -> None:
    bad = HetComponent(component_id="bad", queue=SlurmQueueConfig(**queue), launcher=launcher)
    components = arrange([HetComponent(component_id="good", queue=SlurmQueueConfig()), bad])
    backend = SeparateLocalBackend(layout=Layout(tmp_path), interpreter=Interpreter("python"), components=components)
    with pytest.raises(ValueError, match=f"component '(bad|good)': .*{words}"):  # The limit and the signal are the whole job's.
        backend.check(plans_of(components))
    fine = parts(a=RayLauncher(), b=BashLauncher())
    SeparateLocalBackend(layout=Layout(tmp_path), interpreter=Interpreter("python"), components=fine).check(plans_of(fine))


# ---- Output


def written(*chunks: tuple[str, str]) -> dict[str, str]:
    """What pieces of output look like with a prefix, by stream."""
    streams = {"stdout": io.StringIO(), "stderr": io.StringIO()}
    with contextlib.redirect_stdout(streams["stdout"]), contextlib.redirect_stderr(streams["stderr"]):
        writer = OutputWriter("> ", warn=pytest.fail)
        for stream, text in chunks:
            writer.write(stream, text)
        writer.finish()
    return {name: stream.getvalue() for name, stream in streams.items()}


@given(st.lists(st.text(alphabet="ab \r\n", max_size=12), max_size=12))
def test_prefixed_output_consists_of_whole_lines(chunks: list[str]) -> None:
    text = written(*(("stdout", chunk) for chunk in chunks))["stdout"]
    assert text.replace("> ", "").rstrip() == "".join(chunks).rstrip()
    assert all(line.startswith("> ") for line in text.splitlines())
    assert not text or text[-1] in "\r\n"


def test_streams_stay_apart_and_progress_bars_are_shown() -> None:
    shown = written(("stdout", "be"), ("stderr", "x\n"), ("stdout", "gin\nnext"), ("stderr", "10%\r20%\r"), ("stderr", "\n"))
    assert shown == {"stdout": "> begin\n> next\n", "stderr": "> x\n> 10%\r> 20%\r\n"}
    assert written(("stdout", "y" * 100_000), ("stdout", "z"))["stdout"].count("\n") == 2


class Started:
    """A running payload of which nothing is known but how its polls end."""

    requeue, waiting, job_id, place, cluster_id = False, False, "7", "", "c"

    def __init__(self, poll: Any = None, release: BaseException | None = None) -> None:
        self.calls: list[str] = []
        self._poll, self._release = poll, release

    def poll(self, evidence: Evidence) -> str | None:
        if isinstance(self._poll, BaseException):
            raise self._poll
        return "it is gone" if "cancel" in self.calls else None

    def kill(self) -> None:
        self.calls.append("kill")

    def cancel(self, now: bool = False) -> None:
        self.calls.append("cancel")

    def next_reads(self) -> list[Any]:
        return []

    def release(self, evidence: Evidence) -> None:
        self.calls.append("release")
        if self._release is not None:
            raise self._release


class Files(LocalConnection):
    """The records of two components, the first of which has said something."""

    def read(self, path: str, offset: int, limit: int) -> bytes:
        mine = "/a/" in path and path.endswith(STDIO)
        return encode({"s": "stdout", "d": "one\nunfinished"})[offset : offset + limit] if mine else b""

    def remove(self, path: str) -> None: ...


def run_of(tmp_path: Path) -> PayloadRun:
    """A run of components a and b, neither of which has started."""
    components = parts(a=BashLauncher(grace_period=0), b=BashLauncher(grace_period=0))
    backend: Any = SimpleNamespace(layout=Layout(tmp_path), connection=Files(), cadence=Cadence(busy=0.0, idle=0.0, waiting=0.0))
    resource = ComputeFields(keep_run_dirs="none", runtime_start_timeout=60, local_base=str(tmp_path))
    plans = plans_of(components)
    log = logging.getLogger("test")
    launch = Launch(Step("r", "s", None, log), plans["a"], "name")
    return PayloadRun(log, backend, resource, launch, plans)


def test_the_last_line_is_shown_if_another_component_never_starts(tmp_path: Path, capsys: Any) -> None:
    run = run_of(tmp_path)
    started = [Started(), Started(RunFailure("submission", "Slurm job 7 can never start"))]
    with pytest.raises(RunFailure, match="can never start"):
        drive(run.following(lambda register: list(map(register, started)), lambda _: None))  # type: ignore[arg-type]
    assert capsys.readouterr().out == "[a] one\n[a] unfinished\n"
    assert [each.calls for each in started] == [["kill", "release"]] * 2


def test_an_interrupt_before_the_first_poll_cancels_what_has_started(tmp_path: Path) -> None:
    """All are released, even if the release of one is interrupted."""
    run, one = run_of(tmp_path), Started(release=KeyboardInterrupt())

    def start(register: Any) -> None:
        register(one)
        raise SystemExit

    with pytest.raises(KeyboardInterrupt):
        drive(run.following(start, lambda _: None))
    assert one.calls == ["cancel", "kill", "release"] and run.first.evidence.interrupted
    both = [Started(KeyboardInterrupt(), release=KeyboardInterrupt()), Started()]
    with pytest.raises(KeyboardInterrupt):
        drive(run_of(tmp_path).following(lambda register: list(map(register, both)), lambda _: None))  # type: ignore[arg-type]
    assert [each.calls[-1] for each in both] == ["release"] * 2 and both[1].calls[0] == "cancel"


# ---- Several records at once


def test_a_requeued_job_restarts_all_records(capsys: Any) -> None:
    """One that had ended runs again with the other; what its first attempt reported does not count."""

    def start(attempt: int) -> bytes:
        return encode({"type": "start", "attempt": attempt, "at": 1.0 + attempt})

    def said(text: str) -> bytes:
        line = json.dumps({"method": "report_custom_message", "params": {"payload": text}})
        return encode({"type": "pipes", "at": 0, "line": line})

    def end(reason: str) -> bytes:
        return encode({"type": "end", "nonce": "n", "reason": reason, "exit_code": 0, "signal": None, "stdio_bytes": 0})

    first, again = end("exit"), start(1) + said("second") + end("exit")
    files = {
        "/a": [start(0) + said("first") + first, again],
        "/b": [start(0), end("terminated"), again],
    }

    class Files:
        """Each journal grows by a part whenever all of it has been read, the first one's last part after the other's."""

        def __init__(self) -> None:
            self.shown = {name: parts[0] for name, parts in files.items()}
            self.left = {name: parts[1:] for name, parts in files.items()}

        def read(self, path: str, offset: int, limit: int) -> bytes:
            name, _, what = path.rpartition("/")
            if what != JOURNAL:
                return b""
            if offset == len(self.shown[name]) and self.left[name] and (name == "/b" or not self.left["/b"]):
                self.shown[name] += self.left[name].pop(0)
            return self.shown[name][offset : offset + limit]

    handler, connection = Handler(), Files()
    fast = Cadence(busy=0.0, idle=0.0, waiting=0.0)
    followers = [
        Follower(connection, name, "n", handler, logging.getLogger("test"), fast, requeue=True, component=name) for name in files
    ]
    follow_all([(follower, lambda _: None) for follower in followers])
    assert [message["params"]["payload"] for message in handler.messages] == ["second", "second"]
    assert all(follower.evidence.started_at == 2.0 and follower.evidence.end is not None for follower in followers)


# ---- Reports


def report(version: str | None = None, **metadata: Any) -> dict[str, Any]:
    return {"asset_key": "a", "metadata": metadata, "data_version": version}


def test_materializations_of_several_components_are_merged() -> None:
    (one,) = merge([("cpu", report(rows=1, both="x")), ("gpu", report("v", rows=2, both="x", loss=0.5))])
    assert one["metadata"] == {"rows (cpu)": 1, "rows (gpu)": 2, "both": "x", "loss": 0.5} and one["data_version"] == "v"
    assert merge([("cpu", report("v")), ("gpu", report("v"))])[0]["data_version"] == "v"


def test_reports_of_one_component_are_not_merged() -> None:
    alone = [("cpu", report(rows=1)), ("cpu", report(rows=2))]
    assert [each["metadata"] for each in merge(alone)] == [{"rows": 1}, {"rows": 2}]


def test_different_data_versions_are_refused() -> None:
    with pytest.raises(ValueError, match="'1' in component 'cpu' and '2' in component 'gpu'"):
        merge([("cpu", report("1")), ("gpu", report("2"))])


def test_a_component_that_reports_a_shared_asset_twice_is_refused() -> None:
    reports = collected({"cpu": [report(), report("v")], "gpu": [report(rows=sent(3))]})
    ((component, error),) = reports.hand_over()
    assert component == "gpu" and "component 'cpu' reports asset 'a' twice" in str(error)
    twice = [("gpu", check()), ("cpu", check()), ("gpu", check())]
    with pytest.raises(ValueError, match="component 'gpu' reports asset check 'good' of 'a' twice"):
        merge(twice)


def test_merged_keys_replace_no_other_key() -> None:
    (one,) = merge([("a", report(**{"n": 1, "n (b)": "mine"})), ("b", report(n=2)), ("c", report(**{"n (b) 2": 0}))])
    assert one["metadata"] == {"n (a)": 1, "n (b)": "mine", "n (b) 2 2": 2, "n (b) 2": 0}


@given(st.lists(st.dictionaries(st.sampled_from(["n", "n (a)", "n (b)", "n (b) 2"]), st.integers(0, 2)), min_size=2, max_size=3))
def test_merging_loses_no_value(said: list[dict[str, int]]) -> None:
    (one,) = merge([(component, report(**metadata)) for component, metadata in zip("abc", said, strict=False)])
    keys = {key for metadata in said for key in metadata}
    expected = [
        value
        for key in keys
        for values in [[metadata[key] for metadata in said if key in metadata]]
        for value in (values[:1] if len(set(values)) == 1 else values)
    ]
    assert sorted(one["metadata"].values()) == sorted(expected)


@pytest.mark.parametrize(
    ("one", "other"), [(1, True), (1, 1.0), (0, False), ({"raw_value": 1, "type": "x"}, {"raw_value": True, "type": "x"})]
)
def test_merging_distinguishes_types(one: Any, other: Any) -> None:
    (both,) = merge([("a", report(n=one)), ("b", report(n=other))])
    assert list(both["metadata"]) == ["n (a)", "n (b)"]
    nan = float("nan")
    assert list(merge([("a", report(n=nan)), ("b", report(n=nan))])[0]["metadata"]) == ["n"]


def check(passed: bool = True, severity: str = "ERROR", **metadata: Any) -> dict[str, Any]:
    return {
        "asset_key": "a",
        "check_name": "good",
        "passed": passed,
        "severity": severity,
        "metadata": metadata or None,
    }


def test_checks_of_several_components_are_merged() -> None:
    (one,) = merge([("cpu", check(rows=1, both=0)), ("gpu", check(passed=False, severity="WARN", rows=2, both=0))])
    assert one == check(passed=False, severity="WARN", **{"rows (cpu)": 1, "rows (gpu)": 2, "both": 0})
    (worst,) = merge([(each, check(passed=False, severity=how)) for each, how in (("a", "ERROR"), ("b", "WARN"))])
    assert worst["severity"] == "ERROR" and not worst["passed"]
    assert merge([("cpu", check()), ("gpu", check(severity="WARN"))])[0]["passed"] is True
    assert merge([("cpu", check(rows=1))]) == [check(rows=1)]


class Handler:
    def __init__(self) -> None:
        self.messages: list[Any] = []

    def handle_message(self, message: Any) -> None:
        if message["method"] == "closed" and (message["params"] or {}).get("exception") == "no exception":
            raise KeyError("exception")
        self.messages.append(message)


def sent(value: Any) -> dict[str, Any]:
    """A value of metadata as payloads send it."""
    return {"raw_value": value, "type": "__infer__"}


def dagsters(message: Any) -> None:
    """Dagster's own handler, which takes one message."""
    dg.PipesMessageHandler(None, RecordPipes(None)).handle_message(message)  # type: ignore[arg-type]


def collected(said: dict[str, list[dict[str, Any]]]) -> ReportMerger:
    reports = ReportMerger(Handler(), said, dagsters)
    for component, materializations in said.items():
        for params in materializations:
            reports.of(component).handle_message({"method": "report_asset_materialization", "params": params})
    return reports


def test_results_wait_for_all_components_and_closed_comes_last() -> None:
    handler = Handler()
    reports = ReportMerger(handler, ["cpu", "gpu"], dagsters)
    cpu, gpu = reports.of("cpu"), reports.of("gpu")
    gpu.handle_message({"method": "report_asset_materialization", "params": report(x=sent(1))})
    gpu.handle_message({"method": "closed", "params": None})
    cpu.handle_message({"method": "log", "params": {"message": "m"}})
    cpu.handle_message({"method": "report_asset_materialization", "params": report(y=sent(2))})
    assert [each["method"] for each in handler.messages] == ["log"]
    assert reports.hand_over() == [] and reports.hand_over() == []
    assert [each["method"] for each in handler.messages] == ["log", "report_asset_materialization", "closed"]
    assert handler.messages[1]["params"]["metadata"] == {"y": sent(2), "x": sent(1)}


def test_checks_wait_for_all_components() -> None:
    handler = Handler()
    reports = ReportMerger(handler, ["cpu", "gpu"], dagsters)
    for component, passed in (("gpu", False), ("cpu", True)):
        reports.of(component).handle_message({"method": "report_asset_check", "params": check(passed=passed)})
    assert handler.messages == [] and reports.hand_over() == []
    ((one),) = handler.messages
    assert (one["method"], one["params"]["passed"]) == ("report_asset_check", False)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({**report(), "asset_key": ["a", "b"]}, "asset_key"),
        ({**report(), "asset_key": {"a": 1}}, "asset_key"),
        ({**report(), "data_version": 7}, "data_version"),
        ({**report(), "metadata": [1]}, "metadata"),
        ({**report(), "metadata": {"n": {"raw_value": 1, "type": "no such type"}}}, "no such type"),
        ({**report(), "partition": "p"}, "partition"),
        ({"asset_key": "a"}, "missing"),
        ({**check(), "passed": "yes"}, "passed"),
        ({**check(), "severity": "FATAL"}, "severity"),
        ({**check(), "check_name": None}, "check_name"),
    ],
)
def test_a_malformed_report_is_refused_at_once_for_its_component(wrong: dict[str, Any], words: str) -> None:
    method = "report_asset_check" if "passed" in wrong else "report_asset_materialization"
    reports = ReportMerger(Handler(), ["cpu", "gpu"], dagsters)
    reports.of("gpu").handle_message({"method": "report_asset_materialization", "params": report(n=sent(1))})
    with pytest.raises(Exception, match=words):
        reports.of("cpu").handle_message({"method": method, "params": wrong})
    assert reports.hand_over() == []


def test_a_closed_message_may_lack_its_params() -> None:
    handler = Handler()
    reports = ReportMerger(handler, ["cpu", "gpu"], dagsters)
    reports.of("cpu").handle_message({"method": "closed"})
    with pytest.raises(KeyError, match="params"):
        reports.of("gpu").handle_message({"method": "report_asset_materialization"})
    assert reports.hand_over() == [] and handler.messages == [{"method": "closed", "params": None}]


def test_a_refused_closed_message_is_returned() -> None:
    reports = ReportMerger(Handler(), ["cpu", "gpu"], dagsters)
    reports.of("cpu").handle_message({"method": "closed", "params": {"exception": "no exception"}})
    reports.of("gpu").handle_message({"method": "closed", "params": None})
    ((component, error),) = reports.hand_over()
    assert component == "cpu" and isinstance(error, KeyError)


# ---- The verdict


def judged(reason: str = "exit", exit_code: int | None = 0, at: float = 1.0, message: str | None = None, **fields: Any) -> Judged:
    end = {"reason": reason, "exit_code": exit_code, "signal": None, "message": message, "ended_at": at}
    evidence = Evidence(end=end, started_at=0.0, **fields)  # type: ignore[arg-type]
    return Judged(judge(evidence, uses_pipes=False, require_messages=False), evidence)


BY_OTHERS = judged("other-component", None, 2.0, "component 'x': its payload ended with exit code 3")


def test_the_run_succeeds_if_all_components_do() -> None:
    assert judge_components({"a": judged(), "b": judged()}) == SUCCESS


def test_the_root_failure_and_its_consequences_are_named() -> None:
    verdict = judge_components({"cpu": BY_OTHERS, "gpu": judged(exit_code=3), "io": judged()})
    assert verdict.kind == "payload"
    assert verdict.sentence == ("component 'gpu': the payload ended with exit code 3; component 'cpu' was ended because of that")


def test_the_first_failure_gives_the_kind_and_all_decide_on_retry() -> None:
    start = judged("cluster-start", None, 1.0, "no node")
    wrong = judged("environment", None, 2.0, "no ray")
    verdict = judge_components({"a": wrong, "b": start, "c": BY_OTHERS, "d": BY_OTHERS})
    assert verdict.kind == "cluster-start" and verdict.retry is False and may_retry(FailureKind.CLUSTER_START)
    assert "component 'a': the environment" in verdict.sentence and "component 'b': the Ray cluster" in verdict.sentence
    assert verdict.sentence.endswith("components 'c' and 'd' were ended because of that")
    assert judge_components({"b": start, "c": BY_OTHERS}).retry is True


def test_a_dead_runtime_is_the_cause_of_signals_to_others() -> None:
    """srun ends the others when one runtime is killed."""
    killed = Evidence(started_at=0.0, runtime_exit="exit code 137", culprit="the runtime on node g1 ended (Killed)")
    dead = Judged(judge(killed, uses_pipes=False, require_messages=False), killed)
    verdict = judge_components({"cpu": judged("terminated", None, 5.0, "the runtime received SIGTERM"), "gpu": dead})
    assert verdict.kind == "runtime" and verdict.sentence.startswith("component 'gpu': the runtime on node g1 ended")
    assert verdict.sentence.endswith("component 'cpu' was ended because of that")


def gone(**fields: Any) -> Judged:
    """A runtime that ended without a word."""
    evidence = Evidence(started_at=0.0, runtime_exit="exit code 1", **fields)
    return Judged(judge(evidence, uses_pipes=False, require_messages=False), evidence)


def test_a_payload_failure_ranks_before_an_unexplained_end() -> None:
    both = {"b": gone(), "a": judged(exit_code=1, at=9.0), "c": BY_OTHERS}
    verdict = judge_components(both)
    assert verdict.kind == "payload" and verdict.sentence.startswith(
        "component 'a': the payload ended with exit code 1; component"
    )
    assert "component 'b': the runtime ended" in verdict.sentence
    assert verdict.sentence.endswith("component 'c' was ended because of that")
    assert list(failures_metadata(both, None)) and not any("(c)" in key for key in failures_metadata(both, None))
    assert judge_components({"a": judged(), "b": gone()}).kind == "runtime"
    slurms = JobFacts(7, "OUT_OF_MEMORY")
    assert judge_components({"a": judged(exit_code=1), "b": gone(job=slurms)}).kind == "allocation"


def test_components_with_missing_resources_are_named() -> None:
    short = judged("allocation", None, 1.0, "2 CPUs, not 4")
    assert judge_components({"a": short, "b": short}).sentence.startswith("components 'a' and 'b': ")


def test_the_same_failure_of_all_components_is_said_once() -> None:
    cancelled = judged("cancel", None, 1.0, "cancelled from Dagster")
    verdict = judge_components({"a": cancelled, "b": cancelled})
    assert verdict == cancelled.verdict and "component" not in verdict.sentence
    both = judge_components({"a": judged(exit_code=3), "b": judged(exit_code=3)})
    assert both.sentence == "components 'a' and 'b': the payload ended with exit code 3"
    partly = judge_components({"a": cancelled, "b": cancelled, "c": judged()})
    assert partly.sentence.startswith("components 'a' and 'b': the run was cancelled")
    assert judge_components({"a": BY_OTHERS}).kind == "cancelled"


@given(st.dictionaries(st.sampled_from("abcd"), st.sampled_from(["ok", "exit", "other", "terminated"]), min_size=1))
def test_every_failure_is_named(outcomes: dict[str, str]) -> None:
    kinds = {
        "ok": judged(),
        "exit": judged(exit_code=3),
        "other": BY_OTHERS,
        "terminated": judged("terminated", None, 3.0, "SIGTERM"),
    }
    verdict = judge_components({name: kinds[outcome] for name, outcome in outcomes.items()})
    failed = {name for name, outcome in outcomes.items() if outcome != "ok"}
    assert (verdict.kind is None) == (not failed)
    alike = len(set(outcomes.values())) == 1 and verdict.kind == "cancelled"
    assert alike or all(repr(name) in verdict.sentence for name in failed)
    assert isinstance(verdict, Verdict)


def test_components_share_logs_of_the_job_but_not_of_their_records() -> None:
    class Job:
        job_id, directory, log, requeue = "7", "/run", None, False
        asked = 0

        def explain(self, evidence: Evidence) -> None:
            self.asked += 1
            evidence.runtime_log, evidence.tails["runtime on c1"] = "srun: error: c1: task 0: Killed", "a log"

    job, shared, step = Job(), Evidence(), Step("run", "step", None, None)
    parts = [ComponentJob(job, "c", f"/run/{name}", step, shared=shared) for name in "ab"]  # type: ignore[arg-type]
    own, other = Evidence(tails={"ray of a": "mine"}), Evidence()
    for part, evidence in zip(parts, (own, other), strict=True):
        part.explain(evidence)
    assert own.tails == {"ray of a": "mine", "runtime on c1": "a log"} and other.tails == {"runtime on c1": "a log"}
    assert own.culprit == other.culprit == "the runtime on node c1 ended (Killed)" and job.asked == 1


@pytest.mark.parametrize(("names", "ids"), [("a", ["7"]), ("ab", ["7+0", "7+1"])])
def test_job_ids_are_as_slurm_shows_them(names: str, ids: list[str]) -> None:
    both = {name: Judged(SUCCESS, Evidence()) for name in names}
    found = metadata_of_all({name: {} for name in names}, both, "slurm-hetjob", "7")
    assert [record.data["Slurm job ID"] for record in found["Components"].records] == ids


def test_different_metadata_gets_the_components_name() -> None:
    own = {"a": {"Ray version": "2", "Usage": 1, "Mine": 0}, "b": {"Ray version": "2", "Usage": 2}}
    found = metadata_of_all(own, dict.fromkeys("ab", Judged(SUCCESS, Evidence())), "local", None)
    del found["Components"]
    assert found == {"Execution mode": "local", "Ray version": "2", "Usage (a)": 1, "Usage (b)": 2, "Mine (a)": 0}
    failed_alone = {"a": judged(exit_code=1, job=JobFacts(7, "FAILED")), "b": judged()}
    assert failures_metadata(failed_alone, None) == {"Exit code (a)": 1, "Slurm state": "FAILED"}
