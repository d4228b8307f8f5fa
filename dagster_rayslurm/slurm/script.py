"""The batch script of a job: its #SBATCH lines, and one srun that starts the runtime on all nodes. Pure.

How sbatch and srun read the script was tried on Slurm 22.05 and 24.11.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence

from ..config import check_environment, check_line, check_text
from ..runtime.protocol.record import CANCEL, COMPONENTS, EXIT
from .request import SBATCH_FIELDS, Inheritance, JobRequest

LOG = "slurm.log"  # File in the run directory with the output of the batch script and of Slurm.

_EXIT = re.compile(rb"([0-9]+) ([0-9]+) ([0-9]+)")  # A line of the file `exit`: job id, restart count and exit code of srun.

_PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./-]+")

_TASK = 'exec "$@" >>"node-$SLURM_NODEID.log" 2>&1'  # Shell command of each task of a heterogeneous job, see `_srun`.
# Variables of the batch script that are true of the first component only, see `_srun`.
_FIRST_COMPONENT_VARIABLES = """\
CUDA_VISIBLE_DEVICES GPU_DEVICE_ORDINAL ROCR_VISIBLE_DEVICES ZE_AFFINITY_MASK \\
    SLURM_NNODES SLURM_NPROCS SLURM_NTASKS SLURM_TASKS_PER_NODE"""

_END = """\
# scancel sends SIGTERM to srun and to this shell, which must live to write the exit code.
trap : TERM
{srun}
code=$?
echo "$SLURM_JOB_ID ${{SLURM_RESTART_COUNT:-0}} $code" >>{exit}
# Accounting must show CANCELLED for a run that Dagster cancelled. scancel also ends the sleep.
if [ "$code" != 0 ] && cat {cancel} {components}/*/{cancel} 2>/dev/null | grep -q '"op": "cancel"'; then
    scancel --quiet "$SLURM_JOB_ID" && sleep 20
fi
exit "$code"
"""


def sbatch_quote(text: str) -> str:
    """Quote a value for an #SBATCH line; raises ValueError if it has a control character, as a newline would end the line.

    sbatch takes a backslash as an escape everywhere, also within single quotes, and a `#` outside quotes as the beginning of
    a comment.
    """
    if _PLAIN.fullmatch(check_text(text)):
        return text
    return "'" + text.replace("\\", r"\\").replace("'", r"'\''") + "'"


def escape_pattern(path: str) -> str:
    """A path for `--output` in which sbatch replaces nothing (sbatch(1), "filename pattern").

    A backslash anywhere turns replacement off, and disappears unless it is doubled.
    """
    return path.replace("\\", r"\\") if "\\" in path else path.replace("%", "%%")


def render_script(request: JobRequest, command: Sequence[str], run_dir: str, site: Mapping[str, str]) -> str:
    """The text of the batch script of a job.

    The script appends the exit code of srun to the file `exit` in the run directory (see `parse_exit`). Messages of Slurm go
    to `slurm.log` there, and the output of each node's runtime to `node-<number>.log`. A requeued job runs the script again
    and appends to the same files.

    `command` is the runtime, started once on each node, and `site` are environment variables. Raises ValueError if a value
    contains a control character, or a variable cannot be set.
    """
    job_options = {
        "job-name": request.job_name,
        "comment": request.comment,
        "output": escape_pattern(f"{run_dir}/{LOG}"),
        "open-mode": "append",
        "chdir": run_dir,
    }
    lines = ["#!/bin/sh", f"# rayslurm: {check_text(request.comment)}"]
    lines += [f"#SBATCH --{name}={sbatch_quote(value)}" for name, value in job_options.items()]
    for number, component in enumerate(request.components):
        lines += ["#SBATCH hetjob"] if number else []
        resets = _resets(component, request.components[number - 1]) if number else ()
        lines += [f"#SBATCH {option}" for option in (*resets, *_component_options(component))]
    lines += ["", f"cd {shlex.quote(check_text(run_dir))} || exit"]
    for name, value in check_environment(site, "SlurmResource.site").items():
        lines.append(f"export {name}={shlex.quote(check_line(value, f'SlurmResource.site[{name!r}]'))}")
    lines.append(_END.format(srun=_srun(request, command), exit=EXIT, cancel=CANCEL, components=COMPONENTS))
    return "\n".join(lines)


def parse_exit(data: bytes, job_id: int) -> int | None:
    """The exit code of srun since the last requeue of a job, from the file `exit` that the batch script writes, or None.

    Another job may have left lines too, if a submission was repeated because its answer was lost.
    """
    lines = map(_EXIT.fullmatch, data.split(b"\n")[:-1])
    ends = [(int(line[2]), int(line[3])) for line in lines if line and int(line[1]) == job_id]
    last = max((restart for restart, _ in ends), default=0)
    return next((code for restart, code in reversed(ends) if restart == last), None)


def _component_options(request: JobRequest) -> Iterator[str]:
    """The options of a job or of one component; each component repeats all of them, as sbatch forgets most of them."""
    yield "--ntasks-per-node=1"
    for field in SBATCH_FIELDS:
        value = getattr(request.queue, field.name)
        if isinstance(value, bool):
            option = field.option if value else field.negation
            if option is not None:
                yield f"--{option}"
        elif field.option is not None and value is not None:
            text = f"{request.queue.gpu_type}:{value}" if field.name == "gpus_per_node" and request.queue.gpu_type else str(value)
            yield f"--{field.option}={sbatch_quote(text)}"
    for option in request.queue.extra_sbatch:
        name, equals, value = option.partition("=")
        yield name + equals + (sbatch_quote(value) if equals else "")


def _resets(request: JobRequest, before: JobRequest) -> Iterator[str]:
    """Options that keep a component from inheriting the value of the component before it."""
    for field in SBATCH_FIELDS:
        inherits = getattr(before.queue, field.name) is not None and getattr(request.queue, field.name) is None
        if field.inheritance is Inheritance.RESETTABLE and inherits:
            yield f"--{field.option}="


def _srun(request: JobRequest, command: Sequence[str]) -> str:
    """One step on all nodes, whose tasks are numbered from the first node on.

    The output is relative, as srun replaces patterns in an absolute path, and there is no escape that all versions know. With
    components `--output` counts tasks anew in each (22.05), so the shell chooses the log by the task's own SLURM_NODEID. Without
    --cpus-per-task the step gets all of the job's CPUs (22.05 and later, --exact). The batch script's variables for devices and
    tasks are those of the first component; srun would pass them to the other components, or compute with them (24.11).
    """
    words, number, nodes = shlex.join(check_text(word) for word in command), len(request.components), request.queue.num_nodes
    before, which, output = "", f"--nodes={nodes} --ntasks={nodes}", " --output=node-%t.log --open-mode=append"
    if number > 1:
        before, which, output = f"unset {_FIRST_COMPONENT_VARIABLES}\n", f"--het-group=0-{number - 1}", ""
        words = f"sh -c {shlex.quote(_TASK)} rayslurm \\\n    {words}"
    options = (
        f"{which} --ntasks-per-node=1 --cpu-bind=none --wait=0 --kill-on-bad-exit=1",
        f"--mpi=none --input=none --chdir=.{output} --export=ALL",
    )
    return before + " \\\n    ".join(("srun", *options, words))
