"""The batch script: its text, and the quoting of all values in it."""

import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dagster_rayslurm.backends.base import cancel_request_json
from dagster_rayslurm.runtime.protocol.record import CANCEL, COMPONENTS, EXIT, node_log
from dagster_rayslurm.slurm.request import LOG, escape_pattern, render_script, sbatch_quote
from dagster_rayslurm.slurm.steps import parse_exit

from ..conftest import wait_until
from ..fake_slurm import job_request

COMMAND = ["/opt/ray/bin/python", "-I", "/scratch/rt/x.pyz", "node", "/scratch/runs/1"]

TAIL = r"""code=$?
echo "$SLURM_JOB_ID ${SLURM_RESTART_COUNT:-0} $code" >>exit
# Accounting must show CANCELLED for a run that Dagster cancelled. scancel also ends the sleep.
if [ "$code" != 0 ] && cat cancel.json components/*/cancel.json 2>/dev/null | grep -q '"op": "cancel"'; then
    scancel --quiet "$SLURM_JOB_ID" && sleep 20
fi
exit "$code"
"""

EVERY_FIELD = job_request(
    job_name="rayslurm-train-0123456789ab",
    comment="dagster run r1 step train partition it's #1 \\o/",
    partition="gpu",
    account="study",
    qos="normal",
    reservation="course",
    constraint="(a100|h100)&nvlink",
    num_nodes=2,
    cpus_per_node=4,
    gpus_per_node=2,
    gpu_type="fake",
    mem="2G",
    mem_per_cpu="1G",
    time_limit="1-02:03:04",
    exclusive=True,
    nodelist="g[1-2]",
    exclude="c1",
    switches="1@00:30:00",
    requeue=True,
    extra_sbatch=("--licenses=matlab:1", "--contiguous", "--mail-user=O'Neil <o@x>"),
)

EVERY_FIELD_SCRIPT = r"""#!/bin/sh
# rayslurm: dagster run r1 step train partition it's #1 \o/
#SBATCH --job-name=rayslurm-train-0123456789ab
#SBATCH --comment='dagster run r1 step train partition it'\''s #1 \\o/'
#SBATCH --output='/scratch/a b/100%%/slurm.log'
#SBATCH --open-mode=append
#SBATCH --chdir='/scratch/a b/100%'
#SBATCH --ntasks-per-node=1
#SBATCH --partition=gpu
#SBATCH --account=study
#SBATCH --qos=normal
#SBATCH --reservation=course
#SBATCH --constraint='(a100|h100)&nvlink'
#SBATCH --nodes=2
#SBATCH --cpus-per-task=4
#SBATCH --gpus-per-node=fake:2
#SBATCH --mem=2G
#SBATCH --mem-per-cpu=1G
#SBATCH --time=1-02:03:04
#SBATCH --exclusive
#SBATCH --nodelist='g[1-2]'
#SBATCH --exclude=c1
#SBATCH --switches=1@00:30:00
#SBATCH --requeue
#SBATCH --licenses=matlab:1
#SBATCH --contiguous
#SBATCH --mail-user='O'\''Neil <o@x>'

cd '/scratch/a b/100%' || exit
RAYSLURM_CPUS=${SLURM_CPUS_PER_TASK:+,SLURM_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK}
unset SLURM_CPUS_PER_TASK SLURM_TRES_PER_TASK
export HTTPS_PROXY=http://proxy:3128
export NCCL_NOTE='it'"'"'s $HOME'
# scancel sends SIGTERM to srun and to this shell, which must live to write the exit code.
trap : TERM
srun \
    --nodes=2 --ntasks=2 --ntasks-per-node=1 --cpu-bind=none --wait=0 --kill-on-bad-exit=1 \
    --mpi=none --input=none --chdir=. --output=node-%t.log --open-mode=append --export=ALL"$RAYSLURM_CPUS" \
    /opt/ray/bin/python -I '/scratch/a b/x.pyz' node '/scratch/a b/100%'
"""

HETJOB = job_request(
    job_name="job",
    comment="why",
    partition="compute",
    exclude="c2",
    mem="1G",
    component_id="head",
    further=(
        job_request("job", "why", partition="gpu", num_nodes=2, gpus_per_node=2, mem="2G", exclusive=True, component_id="gpu"),
        job_request("job", "why", mem="3G", exclude="c1", extra_sbatch=("--licenses=it's",), component_id="third"),
        job_request("job", "why", mem="4G", component_id="last"),
    ),
)

HETJOB_SCRIPT = r"""#!/bin/sh
# rayslurm: why
#SBATCH --job-name=job
#SBATCH --comment=why
#SBATCH --output=/scratch/runs/1/slurm.log
#SBATCH --open-mode=append
#SBATCH --chdir=/scratch/runs/1
#SBATCH --ntasks-per-node=1
#SBATCH --partition=compute
#SBATCH --nodes=1
#SBATCH --mem=1G
#SBATCH --time=01:00:00
#SBATCH --exclude=c2
#SBATCH --no-requeue
#SBATCH hetjob
#SBATCH --exclude=
#SBATCH --ntasks-per-node=1
#SBATCH --partition=gpu
#SBATCH --nodes=2
#SBATCH --gpus-per-node=2
#SBATCH --mem=2G
#SBATCH --time=01:00:00
#SBATCH --exclusive
#SBATCH --no-requeue
#SBATCH hetjob
#SBATCH --ntasks-per-node=1
#SBATCH --nodes=1
#SBATCH --mem=3G
#SBATCH --time=01:00:00
#SBATCH --exclude=c1
#SBATCH --no-requeue
#SBATCH --licenses='it'\''s'
#SBATCH hetjob
#SBATCH --exclude=
#SBATCH --ntasks-per-node=1
#SBATCH --nodes=1
#SBATCH --mem=4G
#SBATCH --time=01:00:00
#SBATCH --no-requeue

cd /scratch/runs/1 || exit
unset CUDA_VISIBLE_DEVICES GPU_DEVICE_ORDINAL ROCR_VISIBLE_DEVICES ZE_AFFINITY_MASK \
    SLURM_NNODES SLURM_NPROCS SLURM_NTASKS SLURM_TASKS_PER_NODE SLURM_CPUS_PER_TASK SLURM_TRES_PER_TASK
# scancel sends SIGTERM to srun and to this shell, which must live to write the exit code.
trap : TERM
srun \
    --het-group=0-3 --ntasks-per-node=1 --cpu-bind=none --wait=0 --kill-on-bad-exit=1 \
    --mpi=none --input=none --chdir=. --export=ALL \
    sh -c 'exec "$@" >>"node-$SLURM_NODEID.log" 2>&1' rayslurm \
    /opt/ray/bin/python -I /scratch/rt/x.pyz node /scratch/runs/1
"""

harmless = st.text(st.characters(exclude_categories=["Cs"], exclude_characters=[chr(c) for c in (*range(32), 127)]))
SRUN = 'while [ "${1#--}" != "$1" ]; do shift; done\n'
"""Passes over srun's own options."""
SHELLS = [shell for shell in ("sh", "dash", "bash") if shutil.which(shell)]


def test_a_script_with_every_field() -> None:
    run_dir = "/scratch/a b/100%"
    command = ["/opt/ray/bin/python", "-I", "/scratch/a b/x.pyz", "node", run_dir]
    site = {"HTTPS_PROXY": "http://proxy:3128", "NCCL_NOTE": "it's $HOME"}
    assert render_script(EVERY_FIELD, command, run_dir, site) == EVERY_FIELD_SCRIPT + TAIL


def test_a_script_of_several_components() -> None:
    assert render_script(HETJOB, COMMAND, "/scratch/runs/1", {}) == HETJOB_SCRIPT + TAIL
    alone = render_script(replace(HETJOB, further_components=()), COMMAND, "/scratch/runs/1", {})
    assert "hetjob" not in alone and "--het-group" not in alone and " --nodes=1 --ntasks=1 " in alone


@given(arguments=st.lists(harmless, min_size=1, max_size=3), value=harmless)
@example(arguments=["-n", "*", "a'b\\", "$x"], value="\\' # \"")
@settings(max_examples=25, deadline=None)
def test_each_task_of_several_components_gets_every_value_as_it_is(
    tmp_path_factory: pytest.TempPathFactory, arguments: list[str], value: str
) -> None:
    run_dir = tmp_path_factory.mktemp("run")
    other = job_request("n", "c", constraint=value or None, component_id="b")
    code = "import os, sys; print(sys.argv[1:], [name in os.environ for name in ('CUDA_VISIBLE_DEVICES', 'SLURM_NNODES')])"
    command = [sys.executable, "-X", "utf8", "-c", code, *arguments]
    script = render_script(job_request("n", "c", component_id="a", further=(other,)), command, str(run_dir), {})
    assert parse_as_sbatch(script.split("#SBATCH hetjob\n")[1].split("\n")[1])[0] in (f"--constraint={value}", "--nodes=1")
    srun = f'export CUDA_VISIBLE_DEVICES=0 SLURM_NNODES=1\nsrun() {{ {SRUN}SLURM_NODEID=3 "$@"; }}'
    for shell in SHELLS:
        assert run_script(run_dir, script, shell, srun).returncode == 0
    assert (run_dir / node_log(3)).read_text(encoding="utf-8") == f"{arguments} [False, False]\n" * len(SHELLS)


@pytest.mark.parametrize(
    ("said", "code"),
    [
        (b"", None),
        (b"7 0 3\n", 3),
        (b"7 0 3", None),
        (b"7 0 3\n7 1 0\n", 0),
        (b"7 0 3\n7 1 13", 3),
        (b"7 1 0\n7 0 143\n", 0),
        (b"7 10 4\n7 9 5\n", 4),
        (b"6 3 1\n7 0 2\n77 9 1\n", 2),
        (b"6 3 1\n", None),
        (b"143\n", None),
        (b" 0 143\n7  3\n7 0 -1\n7 0 x\n\xff\n", None),
    ],
)
def test_the_exit_code_is_that_of_the_jobs_last_attempt(said: bytes, code: int | None) -> None:
    assert parse_exit(said, 7) == code


@given(st.binary(max_size=100))
def test_any_exit_file_can_be_parsed(data: bytes) -> None:
    parse_exit(data, 7)


@pytest.mark.parametrize("control", ["\n", "\r", "\t", "\0", "\x1b", "\x7f"])
def test_control_characters_are_refused_wherever_they_stand(control: str) -> None:
    bad = f"a{control}b"
    for field in ("job_name", "comment"):
        with pytest.raises(ValueError, match="control character"):
            render_script(job_request(**{"job_name": "n", "comment": "c", field: bad}), COMMAND, "/r", {})
    request = job_request("n", "c")
    for arguments in (
        (request, [*COMMAND, bad], "/r", {}),
        (request, COMMAND, f"/{bad}", {}),
        (request, COMMAND, "/r", {"A": bad}),
    ):
        with pytest.raises(ValueError, match=r"control character|NUL"):
            render_script(*arguments)


@pytest.mark.parametrize("name", ["A B", "1A", "A;true", "", "RAYSLURM_DATA_DIR"])
def test_site_variables_have_names_that_may_be_set(name: str) -> None:
    with pytest.raises(ValueError, match=r"SlurmResource\.site"):
        render_script(job_request("n", "c"), COMMAND, "/r", {name: "x"})


def parse_as_sbatch(line: str) -> list[str]:
    """The words of an #SBATCH line as sbatch 22.05 takes them; tests/slurm ask sbatch itself."""
    words, word, quote, escaped = [], None, "", False
    for char in line.removeprefix("#SBATCH"):
        if escaped:
            word, escaped = (word or "") + char, False
        elif char == "\\":
            escaped = True
        elif quote:
            quote, word = ("", word) if char == quote else (quote, (word or "") + char)
        elif char in "'\"":
            quote, word = char, word or ""
        elif char == "#":
            break
        elif char == " ":
            words, word = (words, None) if word is None else ([*words, word], None)
        else:
            word = (word or "") + char
    return words if word is None else [*words, word]


@given(value=harmless, other=harmless)
@example(value="\\", other="'")
@example(value="# a", other="\\'\\")
def test_a_value_stays_one_word_of_its_line(value: str, other: str) -> None:
    line = f"#SBATCH --comment={sbatch_quote(value)} --job-name={sbatch_quote(other)}"
    assert parse_as_sbatch(line) == [f"--comment={value}", f"--job-name={other}"]


def expand(pattern: str) -> str:
    """A file name pattern as Slurm 22.05 and 24.11 take it, for job 7."""
    if "\\" in pattern:
        return re.sub(r"\\(.?)", r"\1", pattern)
    return re.sub("%(.)", lambda match: "%" if match[1] == "%" else "7", pattern)


@given(path=harmless.filter(lambda path: not path.endswith("%")))
@example(path="/p%j%%t")
@example(path="/b\\%j\\\\")
def test_nothing_in_a_path_is_replaced(path: str) -> None:
    assert expand(escape_pattern(path)) == path


@given(
    site=st.dictionaries(st.from_regex(r"X_[A-Z]{1,5}", fullmatch=True), harmless, max_size=3),
    arguments=st.lists(harmless, min_size=1, max_size=3),
    comment=harmless,
    name=harmless.filter(lambda text: 0 < len(text.encode()) < 200 and "/" not in text and text not in (".", "..")),
)
@example(site={"X_A": "'\"$(exit 3)`x`\\"}, arguments=["-n", "*", "a'b\\"], comment="$(exit 3)", name="-a 'b' $x`%\\")
@settings(max_examples=25, deadline=None)
def test_the_shell_gets_every_value_as_it_is(
    tmp_path_factory: pytest.TempPathFactory, site: dict[str, str], arguments: list[str], comment: str, name: str
) -> None:
    base = tmp_path_factory.mktemp("run")
    run_dir = base / name
    run_dir.mkdir()
    code = "import os,sys; print([os.getcwd(), *sys.argv[1:]], sorted(v for v in os.environ.items() if v[0][:2] == 'X_'))"
    command = [sys.executable, "-X", "utf8", "-c", code, *arguments]
    script = render_script(job_request("n", comment), command, str(run_dir), site)
    for shell in SHELLS:
        done = run_script(base, script, shell, f'srun() {{ {SRUN}"$@"; }}')
        assert (done.stdout, done.stderr, done.returncode) == (f"{[str(run_dir), *arguments]} {sorted(site.items())}\n", "", 0)
    assert (run_dir / EXIT).read_text() == "7 0 0\n" * len(SHELLS)


def run_script(directory: Path, script: str, shell: str, srun: str) -> "subprocess.CompletedProcess[str]":
    """Run a job script with a function in the place of srun."""
    path = directory / "job.sh"
    path.write_text(script.replace("\ncd ", f"\n{srun}\ncd ", 1), encoding="utf-8")
    environment = {**os.environ, "LC_ALL": "C.UTF-8", "SLURM_JOB_ID": "7"}
    return subprocess.run([shell, path], capture_output=True, text=True, encoding="utf-8", env=environment, timeout=30)


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("code", [0, 1, 137])
def test_the_exit_code_is_appended_and_passed_on(tmp_path: Path, shell: str, code: int) -> None:
    (tmp_path / EXIT).write_text("7 0 143\n")
    script = render_script(job_request("n", "c"), COMMAND, str(tmp_path), {})
    requeued = f"export SLURM_RESTART_COUNT=1\nsrun() {{ return {code}; }}"
    assert run_script(tmp_path, script, shell, requeued).returncode == code
    assert (tmp_path / EXIT).read_text() == f"7 0 143\n7 1 {code}\n"
    assert parse_exit((tmp_path / EXIT).read_bytes(), 7) == code


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("directory", ["", f"{COMPONENTS}/gpu"])
@pytest.mark.parametrize(
    ("order", "code", "cancels"), [(cancel_request_json(False), 1, True), (cancel_request_json(True), 0, False), ("", 1, False)]
)
def test_a_cancelled_run_has_slurm_cancel_its_job(
    tmp_path: Path, shell: str, directory: str, order: str, code: int, cancels: bool
) -> None:
    """Else Slurm's accounting calls it FAILED. The payload's end comes first, in which it may save what it has."""
    (tmp_path / directory).mkdir(parents=True, exist_ok=True)
    (tmp_path / directory / CANCEL).write_text(order)
    script = render_script(job_request("n", "c"), COMMAND, str(tmp_path), {})
    programs = f'srun() {{ return {code}; }}\nscancel() {{ echo "scancel $*"; }}\nsleep() {{ :; }}'
    done = run_script(tmp_path, script, shell, programs)
    assert done.stdout == ("scancel --quiet 7\n" if cancels else "") and done.returncode == code
    assert (tmp_path / EXIT).read_text() == f"7 0 {code}\n"


@pytest.mark.parametrize("shell", SHELLS)
def test_a_run_directory_that_is_gone_starts_nothing(tmp_path: Path, shell: str) -> None:
    script = render_script(job_request("n", "c"), COMMAND, str(tmp_path / "gone"), {})
    done = run_script(tmp_path, script, shell, "srun() { echo started; }")
    assert done.returncode != 0
    assert "gone" in done.stderr
    assert done.stdout == ""
    assert not (tmp_path / EXIT).exists()


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("patient", [True, False], ids=["task ends by itself", "task dies of it"])
def test_sigterm_to_all_processes_leaves_the_exit_code(tmp_path: Path, shell: str, patient: bool) -> None:
    """As scancel does it: the shell and what it started get the signal at the same moment."""
    task = "import signal,sys,time;"
    if patient:
        task += "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.5), sys.exit(7)));"
    task += "print('ready', flush=True); time.sleep(60)"
    script = render_script(job_request("n", "c"), [sys.executable, "-c", task], str(tmp_path), {})
    program = tmp_path / "bin" / "srun"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\n{SRUN}exec "$@"\n')
    program.chmod(0o755)
    path = tmp_path / "job.sh"
    path.write_text(script)
    environment = {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    with (tmp_path / LOG).open("w") as log:
        batch = subprocess.Popen([shell, path], stdout=log, env=environment, start_new_session=True)
    try:
        wait_until(lambda: "ready" in (tmp_path / LOG).read_text())
        os.killpg(batch.pid, signal.SIGTERM)
        expected = 7 if patient else 128 + signal.SIGTERM
        assert batch.wait(30) == expected
        assert (tmp_path / EXIT).read_text() == f"7 0 {expected}\n"
    finally:
        if batch.poll() is None:
            os.killpg(batch.pid, signal.SIGKILL)
            batch.wait()
