"""What the report says in words: who takes part, and why a promise is not met where the reason is known."""

PARTIES = {
    "`slurm`, `slurm-session`, `slurm-hetjob`, `local`": "dagster-rayslurm in its four modes.",
    "by hand": "for payloads in a new Slurm job, a hand-written batch script that is optimized only for speed "
    "(`benchmarks/payloads/limit.sh`). The hand-written script starts Ray on all nodes at the same time, imports Ray only once "
    "on each node, and starts the payload without fixed pauses as soon as all Ray nodes are alive. The hand-written script makes "
    "no checks, sets up no protection against other users, and cleans up little, so its times show roughly how fast runs can be. "
    'If a benchmark starts no new Slurm job, the column "By hand" says after each value what was measured instead of the '
    "hand-written script.",
    "Ray's Slurm guide": "in the benchmark `cold`, our version of the batch script that Ray's documentation describes for Slurm "
    "(`benchmarks/payloads/guide.sh`). The script of Ray's guide starts the Ray head with `srun` and sleeps for 10 s, starts "
    "each worker node with another `srun` and sleeps for 5 s, and finally starts the payload.",
    "`ray symmetric-run`": "Ray's own command that starts a Ray cluster on several nodes and runs a script on it. A batch script "
    "starts `ray symmetric-run` on all nodes with one `srun` (`benchmarks/payloads/symmetric.sh`).",
    "dagster-slurm": "the package dagster-slurm from PyPI, in its own Python environment. With dagster-slurm, each asset has its "
    'own Slurm job. Where a table says `allocation_scope="run"`, all payloads of a Dagster run share one Slurm job and one Ray '
    "cluster. For dagster-slurm, Ray's object store has 1 GB instead of 0.1 GB, because dagster-slurm accepts no smaller size.",
}
"""Those who are compared."""

_EXIT = (
    "The measured time begins in the last exit handler of the payload's Python process. After this handler, Python still "
    "releases the objects of Ray before the process ends. The hand-written script has the same delay."
)
REASONS: dict[str, str] = {
    "cold, 1 node: payload's exit to the return": _EXIT,
    "cold, 2 nodes: payload's exit to the return": _EXIT,
    "slurm.bash: total - payload's work": "Slurm needs most of the measured time to start and end the job (see the benchmark "
    "`phases`). The time that Slurm itself needs varies between measurements, and the difference between the times of "
    "dagster-rayslurm and of the hand-written script is no larger than this variation.",
}
"""By what the names of figures begin with."""
