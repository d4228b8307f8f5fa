"""The batch script of a job: what sbatch is asked for, and one srun of the runtime on all nodes of all components. Pure.

How sbatch and srun read what stands in the script was tried on Slurm 22.05 and 24.11.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence

from ..config import check_environment, check_line, check_text
from ..runtime.protocol.record import CANCEL, COMPONENTS, EXIT
from .request import JobRequest

LOG = "slurm.log"
"""What the batch script itself and Slurm print."""

_EXIT = re.compile(rb"([0-9]+) ([0-9]+) ([0-9]+)")

_PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./-]+")

_TASK = 'exec "$@" >>"node-$SLURM_NODEID.log" 2>&1'
_OF_THE_BATCH_SCRIPT = """\
CUDA_VISIBLE_DEVICES GPU_DEVICE_ORDINAL ROCR_VISIBLE_DEVICES ZE_AFFINITY_MASK \\
    SLURM_NNODES SLURM_NPROCS SLURM_NTASKS SLURM_TASKS_PER_NODE"""

_END = """\
# scancel sends SIGTERM to this shell too, which must live to write the exit code; srun gets it as ever.
trap : TERM
{srun}
code=$?
echo "$SLURM_JOB_ID ${{SLURM_RESTART_COUNT:-0}} $code" >>{exit}
# Slurm's accounting shall call a run CANCELLED that Dagster cancelled. scancel ends this shell's sleep as well.
if [ "$code" != 0 ] && cat {cancel} {components}/*/{cancel} 2>/dev/null | grep -q '"op": "cancel"'; then
    scancel --quiet "$SLURM_JOB_ID" && sleep 20
fi
exit "$code"
"""


def sbatch_quote(text: str) -> str:
    """Quote a value for an #SBATCH line.

    sbatch's parser takes a backslash as an escape everywhere, also within single quotes, and a `#` outside quotes as the
    beginning of a comment.

    Raises:
        ValueError: it contains a control character; a newline would end the line.
    """
    if _PLAIN.fullmatch(check_text(text)):
        return text
    return "'" + text.replace("\\", r"\\").replace("'", r"'\''") + "'"


def escape_pattern(path: str) -> str:
    """A path as `--output` takes it, so that nothing in it is replaced (sbatch(1), "filename pattern").

    A backslash anywhere turns replacement off, and is then taken away unless it is doubled.
    """
    return path.replace("\\", r"\\") if "\\" in path else path.replace("%", "%%")


def render_script(request: JobRequest, command: Sequence[str], run_dir: str, site: Mapping[str, str]) -> str:
    """The script that is handed to sbatch.

    It appends the exit code of the runtime to the file `exit` in the run directory (see `parse_exit`), what Slurm itself has
    to say goes to `slurm.log` there, and what the runtime of each node writes to `node-<number>.log`. All of them are
    appended to, as a job that is requeued runs the script again.

    Args:
        request: what to ask Slurm for.
        command: the runtime, as it is started once on each node.
        run_dir: absolute path of the run directory, on a file system that the nodes share.
        site: environment variables that every job gets.

    Raises:
        ValueError: a value contains a control character, or a variable cannot be set.
    """
    lines = ["#!/bin/sh", f"# rayslurm: {check_text(request.comment)}"]
    lines += [f"#SBATCH {option}" for option in (*_job_options(request, run_dir), *_options(request))]
    excluding = request.exclude is not None
    for component in request.others:
        lines.append("#SBATCH hetjob")
        if excluding and component.exclude is None:
            lines.append("#SBATCH --exclude=")  # Else it would be handed on.
        lines += [f"#SBATCH {option}" for option in _options(component)]
        excluding = component.exclude is not None
    lines += ["", f"cd {shlex.quote(check_text(run_dir))} || exit"]
    for name, value in check_environment(site, "SlurmResource.site").items():
        lines.append(f"export {name}={shlex.quote(check_line(value, f'SlurmResource.site[{name!r}]'))}")
    srun = _srun_across(len(request.parts), command) if request.others else _srun(request.num_nodes, command)
    lines.append(_END.format(srun=srun, exit=EXIT, cancel=CANCEL, components=COMPONENTS))
    return "\n".join(lines)


def parse_exit(data: bytes, job_id: int) -> int | None:
    """How srun ended in the last attempt of a job.

    Args:
        data: what stands in the file `exit`: lines of job id, restart count and exit code, one of each attempt.
        job_id: the job; another one, submitted twice because an answer was lost, may have left lines too.

    Returns:
        None if there is no line of it yet. One without its newline is still being written.
    """
    lines = map(_EXIT.fullmatch, data.split(b"\n")[:-1])
    ends = [(int(line[2]), int(line[3])) for line in lines if line and int(line[1]) == job_id]
    last = max((restart for restart, _ in ends), default=0)
    return next((code for restart, code in reversed(ends) if restart == last), None)


def _job_options(request: JobRequest, run_dir: str) -> Iterator[str]:
    """What is the whole job's: sbatch hands it on from one component to the next."""
    yield from _assignments(
        {
            "job-name": request.job_name,
            "comment": request.comment,
            "output": escape_pattern(f"{run_dir}/{LOG}"),
            "open-mode": "append",
            "chdir": run_dir,
        }
    )


def _options(request: JobRequest) -> Iterator[str]:
    """What is asked for a job, or one of its components. Each has all of it: sbatch forgets most of it from one to the next."""
    gpus = request.gpus_per_node
    yield from _assignments(
        {
            "partition": request.partition,
            "account": request.account,
            "qos": request.qos,
            "reservation": request.reservation,
            "constraint": request.constraint,
            "nodes": request.num_nodes,
            "ntasks-per-node": 1,
            "cpus-per-task": request.cpus_per_node,
            "gpus-per-node": f"{request.gpu_type}:{gpus}" if request.gpu_type else gpus,
            "mem": request.mem,
            "mem-per-cpu": request.mem_per_cpu,
            "time": request.time_limit,
            "nodelist": request.nodelist,
            "exclude": request.exclude,
            "switches": request.switches,
        }
    )
    if request.exclusive:
        yield "--exclusive"
    yield "--requeue" if request.requeue else "--no-requeue"
    for option in request.extra_sbatch:
        name, equals, value = option.partition("=")
        yield name + equals + (sbatch_quote(value) if equals else "")


def _assignments(values: Mapping[str, object]) -> Iterator[str]:
    return (f"--{name}={sbatch_quote(str(value))}" for name, value in values.items() if value is not None)


def _srun(num_nodes: int, command: Sequence[str]) -> str:
    # The output is relative, as srun replaces patterns in an absolute path, and there is no escape that all versions know.
    # No --cpus-per-task: with it the step gets that many CPUs, and not all of the job's (22.05 and later, --exact).
    options = (
        f"--nodes={num_nodes} --ntasks={num_nodes} --ntasks-per-node=1 --cpu-bind=none --wait=0 --kill-on-bad-exit=1",
        "--mpi=none --input=none --chdir=. --output=node-%t.log --open-mode=append --export=ALL",
        shlex.join(check_text(word) for word in command),
    )
    return " \\\n    ".join(("srun", *options))


def _srun_across(components: int, command: Sequence[str]) -> str:
    """One step of all components, whose tasks are numbered from the first component's first node on.

    `--output` counts tasks anew in each component on 22.05, so the shell finds the log by what Slurm tells each task. What
    the batch script's own environment says of devices and tasks is the first component's: srun sets it anew where it holds,
    and would hand it on elsewhere, or reckon with it (24.11).
    """
    options = (
        f"--het-group=0-{components - 1} --ntasks-per-node=1 --cpu-bind=none --wait=0 --kill-on-bad-exit=1",
        "--mpi=none --input=none --chdir=. --export=ALL",
        f"sh -c {shlex.quote(_TASK)} rayslurm",
        shlex.join(check_text(word) for word in command),
    )
    return f"unset {_OF_THE_BATCH_SCRIPT}\n" + " \\\n    ".join(("srun", *options))
