"""What Slurm knows of one job, from recorded answers of two versions."""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_rayslurm.runtime.node.allocation import expand_nodelist
from dagster_rayslurm.slurm.accounting import (
    SACCT_FIELDS,
    JobFacts,
    fetch_job_facts,
    memory_kill,
    merge_facts,
    parse_duration,
    parse_sacct,
    parse_scontrol,
    parse_size,
    state_word,
)
from dagster_rayslurm.slurm.shared_queue import SlurmUnanswered
from dagster_rayslurm.ssh.base import Completed
from dagster_rayslurm.ssh.local import LocalConnection

from .slurm_said import VERSIONS, said

MIB = 1024 * 1024


def controller(version: str, name: str) -> JobFacts:
    number, text = said(version, name, "scontrol")
    facts = parse_scontrol(text)
    assert facts is not None and facts.job_id == number
    return facts


def accounting(version: str, name: str) -> JobFacts:
    number, text = said(version, name, "sacct")
    facts = parse_sacct(text, number)
    assert facts is not None and facts.job_id == number
    return facts


def both(version: str, name: str) -> JobFacts:
    facts = merge_facts(controller(version, name), accounting(version, name))
    assert facts is not None
    return facts


@pytest.mark.parametrize("version", VERSIONS)
class TestRecorded:
    def test_success(self, version: str) -> None:
        facts = both(version, "ok")
        assert (facts.state, facts.reason, facts.exit_code, facts.signal) == ("COMPLETED", "", 0, None)
        assert (facts.nodes, facts.num_nodes, facts.memory) == (("c1", "c2"), 2, 2048 * MIB)
        assert (facts.elapsed, facts.time_limit, facts.restarts) == (0, 300, 0)
        assert facts.max_rss is None and facts.cancelled_by is None and not facts.out_of_memory

    def test_exit_code(self, version: str) -> None:
        facts = both(version, "bad")
        assert (facts.state, facts.reason, facts.exit_code) == ("FAILED", "NonZeroExitCode", 3), "a comment is no state"

    def test_signal(self, version: str) -> None:
        facts = both(version, "sig")
        assert (facts.state, facts.exit_code, facts.signal) == ("FAILED", 0, 11)
        assert not facts.out_of_memory

    def test_cancelled(self, version: str) -> None:
        facts = both(version, "can")
        assert (facts.state, facts.cancelled_by, facts.signal) == ("CANCELLED", 1001, 15)
        assert facts.max_rss and facts.max_rss > MIB and not facts.out_of_memory

    def test_cancelled_while_pending(self, version: str) -> None:
        facts = both(version, "pec")
        assert (facts.state, facts.cancelled_by, facts.nodes, facts.elapsed) == ("CANCELLED", 1001, (), 0)
        assert facts.time_limit is None and accounting(version, "pec").time_limit is None

    def test_time_limit(self, version: str) -> None:
        facts = both(version, "tim")
        assert (facts.state, facts.reason, facts.time_limit) == ("TIMEOUT", "TimeLimit", 60)
        assert facts.elapsed is not None and 60 < facts.elapsed < 120

    @pytest.mark.parametrize(("name", "state", "code"), [("oom", "FAILED", 137), ("ooc", "COMPLETED", 0)])
    def test_memory_limit_enforced_by_slurmd(self, version: str, name: str, state: str, code: int) -> None:
        facts = both(version, name)
        assert (facts.state, facts.exit_code) == (state, code)
        assert facts.max_rss and facts.memory and facts.max_rss > facts.memory == 100 * MIB
        assert not facts.out_of_memory, "only slurmstepd's line in the log shows it"

    def test_pending(self, version: str) -> None:
        facts = both(version, "pen")
        assert (facts.state, facts.reason, facts.nodes) == ("PENDING", "JobHeldUser", ())
        assert facts.num_nodes == accounting(version, "pen").num_nodes == 1

    def test_running(self, version: str) -> None:
        facts = both(version, "run")
        assert (facts.state, facts.reason, facts.nodes) == ("RUNNING", "", ("c2",))
        assert facts.time_limit == 300

    def test_a_requeued_job_is_its_last_attempt(self, version: str) -> None:
        running = both(version, "req")
        assert (running.state, running.restarts) == ("RUNNING", 1)
        ended = accounting(version, "req2")
        assert (ended.state, ended.exit_code, ended.restarts, ended.elapsed) == ("FAILED", 1, 1, 30)

    @pytest.mark.parametrize("name", ["tim", "can", "bad", "oom", "ok"])
    def test_a_long_epilog_hides_nothing_that_accounting_knows(self, version: str, name: str) -> None:
        _, text = said(version, name, "scontrol")
        shown = parse_scontrol(re.sub("JobState=\\S+", "JobState=COMPLETING", text))
        ended = both(version, name)
        assert shown is not None and shown.state == "COMPLETING"
        assert merge_facts(shown, accounting(version, name)) == ended
        assert ended.final_state == ended.state != "COMPLETING"
        # Without accounting the reason tells, where there is one.
        known = {"tim": "TIMEOUT", "bad": "FAILED", "oom": "FAILED"}
        assert shown.final_state == known.get(name)
        assert dataclasses.replace(shown, reason="").final_state is None
        # What accounting knows of the attempt before is not what becomes of this one.
        again = dataclasses.replace(shown, restarts=1)
        assert merge_facts(again, accounting(version, name)) == dataclasses.replace(
            ended, state="COMPLETING", restarts=1, step_out_of_memory=False
        )

    def test_heterogeneous_job(self, version: str) -> None:
        facts = both(version, "het")
        assert (
            (facts.state, facts.exit_code, facts.nodes)
            == ("FAILED", 4, ("c1", "c2"))
            == (*("FAILED", 4, accounting(version, "het").nodes),)
        )

    def test_a_component_that_is_cancelled_explains_the_others(self, version: str) -> None:
        facts = both(version, "hcc")
        assert [each.state for each in facts.components] == ["FAILED", "CANCELLED"]
        assert (facts.state, facts.cancelled_by, facts.final_state) == ("CANCELLED", 1001, "CANCELLED")
        assert [each.job_id for each in facts.components] == [facts.job_id, facts.job_id + 1]
        assert facts.with_component_ids(["a", "b"]).components[1].component_id == "b" and facts.with_component_ids(["a"]) == facts

    def test_a_component_out_of_memory(self, version: str) -> None:
        facts = both(version, "hoo")
        assert facts.components[1].max_rss and facts.components[1].max_rss > 200 * MIB and not facts.out_of_memory

    def test_a_heterogeneous_job_that_is_cancelled(self, version: str) -> None:
        facts = both(version, "hca")
        assert facts.state == "CANCELLED" and facts.nodes == ("c1", "g1")
        assert {each.cancelled_by for each in facts.components} == {1001}

    def test_an_unknown_job(self, version: str) -> None:
        assert parse_scontrol(said(version, "none", "scontrol")[1]) is None
        assert parse_sacct(said(version, "none", "sacct")[1], 9999999) is None
        assert parse_sacct(said(version, "ok", "sacct")[1], 9999999) is None


def test_a_failed_node_has_no_exit_code() -> None:
    facts = both("24.11", "nodefail")
    assert (facts.state, facts.reason, facts.exit_code, facts.signal) == ("NODE_FAIL", "NodeDown", None, None)
    assert accounting("24.11", "nodefail").exit_code is None
    failing = dataclasses.replace(controller("24.11", "nodefail"), state="COMPLETING", exit_code=0, signal=15)
    assert failing.final_state == "NODE_FAIL"
    assert merge_facts(failing, accounting("24.11", "nodefail")) == facts
    of_two = dataclasses.replace(accounting("24.11", "nodefail"), nodes=("c1", "c2"))
    merged = merge_facts(dataclasses.replace(failing, nodes=("c1",)), of_two)
    assert merged is not None and merged.nodes == ("c1", "c2"), "the lost one is not among those that let go"
    waiting = both("24.11", "nodereq")
    assert (waiting.state, waiting.reason, waiting.restarts) == ("PENDING", "ReqNodeNotAvail,_UnavailableNodes:c2", 1)


@pytest.mark.parametrize("state", ["RUNNING", "PENDING", "CONFIGURING", "REQUEUED", "SUSPENDED", "NEW_STATE"])
def test_the_reason_decides_the_final_state_of_a_completing_job_only(state: str) -> None:
    assert JobFacts(7, state, reason="TimeLimit").final_state is None
    assert JobFacts(7, "COMPLETING", reason="RaisedSignal:9(Killed)").final_state == "FAILED"
    accounting = JobFacts(7, "TIMEOUT")
    merged = merge_facts(JobFacts(7, state), accounting)
    assert merged is not None and merged.state == state


def test_out_of_memory_where_cgroups_tell() -> None:
    """As a cluster with task/cgroup says it; the stack has none."""
    lines = [
        "7|OUT_OF_MEMORY|0:125|None|1|5|1|c2|100M|",
        "7.batch|OUT_OF_MEMORY|0:125||1||1|c2||4052K",
    ]
    facts = parse_sacct("\n".join(lines), 7)
    assert facts is not None and facts.out_of_memory and facts.signal == 125
    assert JobFacts(7, "FAILED", reason="OutOfMemory").out_of_memory
    assert JobFacts(7, "FAILED", exit_code=0, signal=125).out_of_memory
    of_step = parse_sacct("\n".join([lines[0].replace("OUT_OF_MEMORY|0:125", "COMPLETED|0:0"), lines[1]]), 7)
    assert of_step is not None and of_step.state == "COMPLETED" and of_step.out_of_memory
    assert not JobFacts(7, "FAILED", exit_code=137).out_of_memory


@pytest.mark.parametrize(
    "line",
    [
        "slurmstepd-c2: error: StepId=45.0 exceeded memory limit (317251584 > 104857600), being killed",
        "slurmstepd: error: Detected 1 oom_kill event in StepId=45.0. Some of the step tasks have been OOM Killed.",
        "slurmstepd: error: Detected 2 oom-kill event(s) in StepId=45.batch. Some of your processes may have been killed",
    ],
)
def test_slurmstepd_reports_a_kill_for_memory(line: str) -> None:
    output = f"step 3\nsrun: Job step aborted\n  {line}\nsrun: error: c2: task 0: Killed\n"
    assert memory_kill(output) == line
    assert memory_kill(output.replace("slurmstepd", "my_program")) is None
    assert memory_kill("slurmstepd-c1: error: *** STEP 43.0 ON c1 CANCELLED AT 2026-11-21T17:25:17 ***") is None


def test_names_and_comments_are_no_fields() -> None:
    _, text = said("22.05", "bad", "scontrol")
    hostile = "x JobState=COMPLETED AllocTRES=mem=9G ExitCode=0:0\n   NodeList=g1\n JobState=COMPLETED"
    text = text.replace("JobName=rs bad | x", f"JobName={hostile}").replace("Comment=a", f"Comment={hostile}")
    facts = parse_scontrol(text)
    assert facts is not None
    assert (facts.state, facts.exit_code, facts.nodes, facts.memory) == ("FAILED", 3, ("c1",), 1024 * MIB)


def test_words_and_numbers() -> None:
    assert state_word("CANCELLED by 1001") == ("CANCELLED", 1001)
    assert state_word("CANCELLED+") == ("CANCELLED", None)
    assert state_word("RUNNING") == ("RUNNING", None)
    assert state_word("a new state") == ("a new state", None)
    durations = ("00:05:00", "1-02:03:04", "02:03.500", "UNLIMITED", "Partition_Limit", "", "INVALID")
    assert [parse_duration(text) for text in durations] == [300, 93784, 123.5, None, None, None, None]
    sizes = ("309816K", "100M", "2G", "1.50G", "0", "", "?", "1000Mn")
    assert [parse_size(text) for text in sizes] == [309816 << 10, 100 << 20, 2 << 30, 3 << 29, 0, None, None, None]


@given(st.text(max_size=300), st.integers(0, 99))
def test_any_output_can_be_parsed(text: str, number: int) -> None:
    parse_scontrol(f"JobId={number} JobName=x\n   JobState={text}")
    parse_scontrol(text)
    parse_sacct(f"{number}|" + text, number)
    parse_sacct(f"{number}|" + "|".join([text.replace("|", "").replace("\n", "")] * (len(SACCT_FIELDS) - 1)), number)


class Slurm(LocalConnection):
    """Answers as Slurm's commands did."""

    def __init__(self, scontrol: Completed, sacct: Completed) -> None:
        self.answers = {"scontrol": scontrol, "sacct": sacct}
        self.commands: list[list[str]] = []

    def run(self, command: Sequence[str], stdin: bytes = b"", timeout: float | None = None, *_: Any) -> Completed:
        self.commands.append(list(command))
        return next((answer for program, answer in self.answers.items() if program in command), NOTHING)


UNKNOWN = Completed(1, b"", b"slurm_load_jobs error: Invalid job id specified\n")
DOWN = Completed(1, b"", b"slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n")
DISABLED = Completed(1, b"", b"Slurm accounting storage is disabled\n")
DBD_DOWN = Completed(1, b"", b"sacct: error: Problem talking to the database: Connection refused\n")
NOTHING = Completed(0, b"", b"")


def answer(name: str, command: str) -> Completed:
    return Completed(0, said("22.05", name, command)[1].encode(), b"")


def test_asking_the_controller_and_accounting() -> None:
    slurm = Slurm(answer("can", "scontrol"), answer("can", "sacct"))
    assert fetch_job_facts(slurm, 43) == both("22.05", "can")
    of_slurm = slurm.commands[:2]
    assert all("LC_ALL=C" in command for command in of_slurm)
    assert fetch_job_facts(Slurm(UNKNOWN, answer("can", "sacct")), 43) == accounting("22.05", "can")
    assert fetch_job_facts(Slurm(DOWN, answer("can", "sacct")), 43) == accounting("22.05", "can")
    for without in (DISABLED, DBD_DOWN, NOTHING, Completed(127, b"", b"env: sacct: No such file")):
        assert fetch_job_facts(Slurm(answer("can", "scontrol"), without), 43) == controller("22.05", "can")


def test_a_job_unknown_to_slurm_is_none_and_no_error() -> None:
    for without in (DISABLED, NOTHING, Completed(127, b"", b"env: 'sacct': No such file or directory")):
        assert fetch_job_facts(Slurm(UNKNOWN, without), 43) is None


@pytest.mark.parametrize(
    ("scontrol", "sacct", "said_by"),
    [(DOWN, NOTHING, "scontrol"), (DOWN, DISABLED, "scontrol"), (UNKNOWN, DBD_DOWN, "sacct"), (DOWN, DBD_DOWN, "scontrol")],
)
def test_a_missing_answer_does_not_make_a_job_unknown(scontrol: Completed, sacct: Completed, said_by: str) -> None:
    with pytest.raises(SlurmUnanswered, match=f"this machine: {said_by} did not answer"):
        fetch_job_facts(Slurm(scontrol, sacct), 43)
    with pytest.raises(SlurmUnanswered, match="scontrol is not on the PATH"):
        fetch_job_facts(Slurm(Completed(127, b"", b"env: scontrol: No such file"), NOTHING), 43)


def test_lists_of_nodes() -> None:
    assert expand_nodelist("c[1-2,05-07],x3,rack[1-2]n[01-02]") == [
        *("c1", "c2", "c05", "c06", "c07", "x3"),
        *("rack1n01", "rack1n02", "rack2n01", "rack2n02"),
    ]
    assert expand_nodelist("a[8-010],n[1-3]-ib") == ["a8", "a9", "a10", "n1-ib", "n2-ib", "n3-ib"]
    assert expand_nodelist("") == expand_nodelist("(null)") == expand_nodelist("None assigned") == []


@pytest.mark.parametrize(
    "text", ["a[1-2", "a]", "n[]", "n[0-3,]", "n[a-b]", "n[2-1]", "n[[1]]", "a[1-99999999]", "a[0-1023][0-1023][0-1]"]
)
def test_what_is_no_list_of_nodes_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape("is not a list of nodes")):
        expand_nodelist(text)


@given(st.lists(st.from_regex(r"[a-z][a-z0-9.-]{0,8}", fullmatch=True), max_size=20))
def test_plain_names_stay_as_they_are(names: list[str]) -> None:
    assert expand_nodelist(",".join(names)) == [name for name in names if name != "None"]
