"""The log of a job, from lines that srun and slurmstepd printed on real clusters."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_rayslurm.slurm.accounting import failed_tasks, relevant_lines

NO_BINDING = "srun: cluster configuration lacks support for cpu binding\n"

EXITED_22_05 = f"""{NO_BINDING}srun: error: c2: task 1: Exited with exit code 3
srun: launch/slurm: _step_signal: Terminating StepId=917.0
srun: error: c1: task 0: Exited with exit code 3
"""
EXITED_24_11 = """srun: error: c2: task 1: Exited with exit code 3
srun: Terminating StepId=1.0
srun: error: c1: task 0: Terminated
srun: Force Terminated StepId=1.0
"""
CRASHED_22_05 = f"""{NO_BINDING}srun: error: c1: task 0: Segmentation fault
srun: launch/slurm: _step_signal: Terminating StepId=919.0
srun: error: c2: task 1: Killed
srun: Force Terminated StepId=919.0
"""
CANCELLED_22_05 = f"""{NO_BINDING}srun: got SIGCONT
slurmstepd-g1: error: *** JOB 922 ON g1 CANCELLED AT 2026-11-21T18:53:52 ***
srun: forcing job termination
srun: Job step aborted: Waiting up to 32 seconds for job step to finish.
srun: error: g1: task 0: Terminated
srun: launch/slurm: _step_signal: Terminating StepId=922.0
srun: error: g2: task 1: Terminated
"""
STUBBORN_24_11 = """srun: got SIGCONT
slurmstepd-c1: error: *** JOB 7 ON c1 CANCELLED AT 2026-11-21T18:59:53 ***
srun: forcing job termination
srun: Job step aborted: Waiting up to 7 seconds for job step to finish.
srun: error: Timed out waiting for job step to complete
"""


@pytest.mark.parametrize(
    ("log", "tasks"),
    [
        (EXITED_22_05, [("c2", 1, "Exited with exit code 3"), ("c1", 0, "Exited with exit code 3")]),
        (EXITED_24_11, [("c2", 1, "Exited with exit code 3"), ("c1", 0, "Terminated")]),
        (CRASHED_22_05, [("c1", 0, "Segmentation fault"), ("c2", 1, "Killed")]),
        (CANCELLED_22_05, [("g1", 0, "Terminated"), ("g2", 1, "Terminated")]),
        (STUBBORN_24_11, []),
    ],
)
def test_tasks_that_failed_come_in_sruns_order(log: str, tasks: list[tuple[str, int, str]]) -> None:
    assert failed_tasks(log) == tasks
    assert relevant_lines(log) == [f"srun: error: {node}: task {number}: {how}" for node, number, how in tasks]


@pytest.mark.parametrize(
    ("line", "tasks"),
    [
        ("c[1-2]: tasks 0-1: Killed", [("c1", 0, "Killed"), ("c2", 1, "Killed")]),
        ("c1,g[01-02]: tasks 0,2-3: Out Of Memory", [(n, t, "Out Of Memory") for n, t in (("c1", 0), ("g01", 2), ("g02", 3))]),
        ("c1: tasks 0-1: Aborted (core dumped)", [("c1", 0, "Aborted (core dumped)"), ("c1", 1, "Aborted (core dumped)")]),
        ("c[1-2: tasks 0-1: Killed", []),
        ("c1: task 3-1: Killed", []),
        ("c1: task 0-99999999999: Killed", []),
        ("c1: task 0: ", []),
        ("Unable to create step for job 7: Invalid node", []),
    ],
)
def test_several_tasks_in_one_line(line: str, tasks: list[tuple[str, int, str]]) -> None:
    assert failed_tasks(f"x\n  srun: error: {line}\n") == tasks


@pytest.mark.parametrize(
    "line",
    [
        "slurmstepd-c1: error: *** JOB 44 ON c1 CANCELLED AT 2026-11-21T17:25:17 DUE TO TIME LIMIT ***",
        "slurmstepd: error: *** STEP 44.0 ON c1 CANCELLED AT 2026-11-21T17:25:17 DUE TO NODE FAILURE, SEE SLURMCTLD LOG ***",
        "slurmstepd-c2: error: StepId=45.0 exceeded memory limit (317251584 > 104857600), being killed",
        "slurmstepd: error: execve(): /opt/x/bin/python: No such file or directory",
        "srun: error: Unable to create step for job 7: Requested node configuration is not available",
        "my program: srun: forcing job termination",
        "OSError: disk",
    ],
)
def test_relevant_lines_are_kept(line: str) -> None:
    assert relevant_lines(f"{STUBBORN_24_11}\n \n{line}\n{EXITED_24_11}")[0] == line


def test_the_cancellation_of_a_step_is_not_relevant() -> None:
    assert relevant_lines("slurmstepd-c1: error: *** STEP 43.0 ON c1 CANCELLED AT 2026-11-21T17:25:17 ***") == []


@given(st.text(), st.text("0123456789,-", min_size=1), st.text())
def test_any_log_can_be_parsed(nodes: str, tasks: str, how: str) -> None:
    for text in (how, f"srun: error: {nodes}: tasks {tasks}: {how}"):
        assert all(isinstance(number, int) for _, number, _ in failed_tasks(text))
        relevant_lines(text)
