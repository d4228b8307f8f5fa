"""Submission to a real Slurm: what a login's variables and umask, an odd sbatch and a full directory make of it."""

import os
import shlex
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from dagster_rayslurm import SSHConnectionResource
from dagster_rayslurm.slurm import submit as submit_module
from dagster_rayslurm.slurm.accounting import fetch_job_facts
from dagster_rayslurm.slurm.request import render_script
from dagster_rayslurm.slurm.shared_queue import ClusterClock, fetch_queue, run_slurm
from dagster_rayslurm.slurm.steps import parse_exit
from dagster_rayslurm.slurm.submit import SubmissionRefused, SubmittedJob, submit
from dagster_rayslurm.ssh.base import Completed, Connection

from ..conftest import wait_until
from ..fake_slurm import job_request
from ..stack.access import Stack
from .fixtures import Site

pytestmark = pytest.mark.timeout(180)

HIDING = {
    "SQUEUE_PARTITION": "gpu",
    "SQUEUE_STATES": "failed",
    "SQUEUE_USERS": "root",
    "SACCT_FORMAT": "jobname",
    "SCANCEL_STATE": "suspended",
    "SLURM_CLUSTERS": "elsewhere",
    "SLURM_TIME_FORMAT": "relative",
}
"""What a user may have set for good, and what would hide the job from us."""

BREAKING = {
    "SRUN_CPUS_PER_TASK": "3",
    "SLURM_EXCLUSIVE": "1",
    "SLURM_MEM_PER_GPU": "1G",
    "SLURM_WORKING_DIR": "/tmp",
    "SLURM_REMOTE_CWD": "/tmp",
    "SLURM_LABELIO": "1",
    "SLURM_TASK_PROLOG": "/bin/false",
    "SLURM_NTASKS": "3",
    "SLURM_UMASK": "0777",
    "SBATCH_JOB_NAME": "x",
}
"""What would break our one srun, or send its output elsewhere, if it came into the job."""


class Sender:
    """Submits jobs of one test's name."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.name = f"rayslurm-sub-{os.path.basename(site.base)[2:]}"
        self.run_dir = f"{site.base}/runs/x y"
        self.warnings: list[str] = []

    def submit(self, login: Connection, script: str = "true", **fields: Any) -> SubmittedJob:
        fields = {"partition": "compute", "time_limit": "5", "extra_sbatch": ("--begin=now+1hour",), **fields}
        request = job_request(self.name, "", **fields)
        job = render_script(request, ["sh", "-c", script], self.run_dir, {}).encode()
        return submit(login, self.run_dir, {"job.sh": job}, request, ClusterClock(login), self.warnings.append)

    def jobs(self) -> list[str]:
        return self.site.sh('squeue --me --noheader --name="$1" --format=%A', self.name).split()

    def fake(self, text: str) -> str:
        """What puts an sbatch of the test's own before the real one; `$real` is that."""
        self.site.sh(
            'mkdir -p "$1/bin" && printf "%s\\n" "#!/bin/sh" "real=$(command -v sbatch)" "$2" >"$1/bin/sbatch" && '
            'chmod +x "$1/bin/sbatch"',
            self.site.base,
            text,
        )
        return f"export PATH={shlex.quote(self.site.base)}/bin:$PATH"


@pytest.fixture
def site(stack: Stack, site_ssh: SSHConnectionResource) -> Iterator[Site]:
    """The stack, on which others may have jobs of their own meanwhile."""
    place = Site(stack, site_ssh, f"/home/dev/t-{uuid.uuid4().hex[:8]}", stack.env["RAYSLURM_ENV_PATH"])
    yield place
    place.sh('chmod -R u+w -- "$1" 2>/dev/null; rm -rf -- "$1"', place.base)


@pytest.fixture
def sender(site: Site) -> Iterator[Sender]:
    made = Sender(site)
    yield made
    site.sh('scancel --quiet --me --name="$1"', made.name)
    assert wait_until(lambda: not made.jobs(), 40)


@pytest.mark.parametrize("umask", ["022", "027"])
def test_a_job_has_the_umask_of_the_login_and_our_files_are_private(umask: str, sender: Sender, site: Site) -> None:
    login = site.login(f"umask {umask}")
    sender.submit(login, "umask; umask >made", extra_sbatch=())
    path = f"{sender.run_dir}/exit"
    assert wait_until(lambda: site.connection.read(path, 0, 99), 60)
    assert site.connection.read(f"{sender.run_dir}/node-0.log", 0, 99).split() == [b"0" + umask.encode()]
    modes = site.sh('cd "$1" && stat -c "%a %n" . job.sh job_id made', sender.run_dir).splitlines()
    made = {"022": "644", "027": "640"}[umask]
    assert modes == ["700 .", "600 job.sh", "600 job_id", f"{made} made"]


def test_variables_of_slurm_neither_hide_the_job_nor_come_into_it(sender: Sender, site: Site) -> None:
    """On two nodes, each of whose four CPUs the step must get in spite of --cpus-per-task=2."""
    login = site.login(**HIDING, **BREAKING)
    names = "(SRUN_CPUS|SQUEUE|SACCT|SCANCEL)_|SLURM_(EXCLUSIVE|LABELIO|TASK_PROLOG|CLUSTERS|MEM_PER_GPU|WORKING_DIR)"
    script = f'pwd; scontrol show step "$SLURM_JOB_ID.$SLURM_STEP_ID" | grep TRES=; env | grep -E "^({names})"; true'
    sent = sender.submit(login, script, extra_sbatch=(), num_nodes=2, cpus_per_node=2, mem="300M", exclusive=True)
    path = f"{sender.run_dir}/exit"
    assert wait_until(lambda: site.connection.read(path, 0, 99), 60)
    log = site.connection.read(f"{sender.run_dir}/slurm.log", 0, 9999).decode()
    assert parse_exit(site.connection.read(path, 0, 99), int(sent.job_id)) == 0, log
    for node in (0, 1):
        said = site.connection.read(f"{sender.run_dir}/node-{node}.log", 0, 9999).decode()
        assert said.splitlines() == [sender.run_dir, "   TRES=cpu=8,mem=600M,node=2"]
    # The exit code is in its file a moment before Slurm has ended the job.
    facts = wait_until(lambda: (found := fetch_job_facts(login, int(sent.job_id))) and found.is_final and found)
    assert facts and facts.state == "COMPLETED", facts
    row = fetch_queue(login).job(int(sent.job_id))
    assert row is not None and row.name == sender.name


def test_a_job_is_found_and_cancelled_whatever_hides_it(sender: Sender, site: Site) -> None:
    login = site.login(sender.fake('"$real" "$@" >/dev/null'), **HIDING)
    sent = sender.submit(login)
    assert sender.jobs() == [sent.job_id] and len(sender.warnings) == 1
    assert run_slurm(login, ["scancel", sent.job_id]).returncode == 0
    assert wait_until(lambda: not sender.jobs())


@pytest.mark.parametrize(
    ("sbatch", "looked"),
    [
        ('"$real" "$@" >/dev/null', True),
        ('"$real" "$@" | tr 0-9 a-j', True),
        ('"$real" "$@"; echo "Thank you"', True),
        ('"$real" "$@"; kill -9 $$', True),
        ('"$real" "$@"; exit 3', True),
        ('echo "Welcome;"; "$real" "$@"', False),
        ('echo "$("$real" "$@");cluster"', False),
    ],
)
def test_an_sbatch_that_leaves_it_open_whether_there_is_a_job(sbatch: str, looked: bool, sender: Sender, site: Site) -> None:
    sent = sender.submit(site.login(sender.fake(sbatch)))
    assert sender.jobs() == [sent.job_id]
    assert len(sender.warnings) == looked


def test_a_job_id_that_cannot_be_written_does_no_harm(sender: Sender, site: Site) -> None:
    sent = sender.submit(site.login(sender.fake('"$real" "$@"; chmod a-w .')))
    assert sender.jobs() == [sent.job_id] and not sender.warnings


def test_what_never_became_a_job_is_refused(sender: Sender, site: Site) -> None:
    with pytest.raises(SubmissionRefused, match="printed 'later' where the id"):
        sender.submit(site.login(sender.fake("echo later")))
    assert "given up" in sender.warnings[0] and sender.jobs() == []
    site.sh('rm "$1/job_id"', sender.run_dir)
    with pytest.raises(SubmissionRefused, match="ended by signal 9") as caught:
        sender.submit(site.login(sender.fake("kill -9 $$")))
    assert caught.value.retry and sender.jobs() == []


def test_an_sbatch_that_does_not_come_back(sender: Sender, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has submitted is found; what it has not is refused in one sentence."""
    monkeypatch.setattr(submit_module, "_TIMEOUT", 3.0)
    with pytest.raises(SubmissionRefused, match=r"^submitting from .* took over 3 s and was ended") as caught:
        sender.submit(site.login(sender.fake("exec sleep 60")))
    assert caught.value.retry and "given up" in sender.warnings[0] and sender.jobs() == []
    sent = sender.submit(site.login(sender.fake('"$real" "$@"; exec sleep 60')))
    assert sender.jobs() == [sent.job_id] and "took over 3 s" in sender.warnings[1]


def test_a_refused_heterogeneous_job_is_named_with_the_values_of_all_components(sender: Sender, site: Site) -> None:
    further = job_request(sender.name, "", "b", gpus_per_node=64)
    request = job_request(sender.name, "", "a", (further,), gpus_per_node=1)
    login = site.login(SBATCH_PARTITION="gpu")
    job = render_script(request, ["true"], sender.run_dir, {}).encode()
    with pytest.raises(SubmissionRefused, match=r"^Slurm refused the job .*gpus_per_node=64 of 'b'\)$"):
        submit(login, sender.run_dir, {"job.sh": job}, request, ClusterClock(login), sender.warnings.append)
    assert not sender.warnings


def test_a_job_that_comes_late_is_cancelled(sender: Sender, site: Site) -> None:
    """It is there when sbatch was given up, and not when it was looked for."""
    login = site.login(sender.fake("echo later"))
    run, looks = login.run, 0

    def late(command: Any, *more: Any) -> Completed:
        nonlocal looks
        done = run(command, *more)
        if any("sacct" in word for word in command) and not any("sbatch" in word for word in command):
            looks += 1
            if looks == 2:
                site.sh('sbatch --parsable --output=/dev/null --job-name="$1" --begin=now+1hour --wrap=true', sender.name)
        return done

    login.run = late  # type: ignore[method-assign]
    with pytest.raises(SubmissionRefused):
        sender.submit(login)
    assert looks == 2 and wait_until(lambda: not sender.jobs())
