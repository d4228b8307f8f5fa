"""What the report says in words: who takes part, and why a promise is not met where the reason is known."""

PARTIES = {
    "`slurm`, `slurm-session`, `slurm-hetjob`, `local`": "the modes of dagster-rayslurm.",
    "by hand": "for Ray, a hand-written script that is optimized for speed only (`benchmarks/payloads/limit.sh`). Ray starts on "
    "all nodes at once, each node imports Ray once, nothing sleeps, and the payload starts as soon as all nodes are alive. "
    "The script checks nothing, protects nothing and cleans up little, so it marks the limit of what is possible. For other "
    "benchmarks, the table cell names the method.",
    "Ray's Slurm guide": "our version of the procedure in Ray's documentation for Slurm (`benchmarks/payloads/guide.sh`): `srun` "
    "for the head, a sleep of 10 s, an `srun` and a sleep of 5 s for each worker, and then the payload.",
    "`ray symmetric-run`": "Ray's own command, started on every node by one `srun` under `sbatch` "
    "(`benchmarks/payloads/symmetric.sh`).",
    "dagster-slurm": "the package from PyPI, in its own environment, with a job for each asset and one Ray cluster for each "
    'Dagster run (`allocation_scope="run"`). Its object store has 1 GB, the smallest size that its option accepts.',
}
"""Those who are compared."""

_EXIT = (
    "The measurement begins with Python's last exit handler, and Python still has to release Ray afterwards. Even the script by "
    "hand takes more than 0.2 s for this."
)
REASONS: dict[str, str] = {
    "cold, 1 node: payload's exit to the return": _EXIT,
    "cold, 2 nodes: payload's exit to the return": _EXIT,
    "slurm.bash: total - payload's work": "Most of this time is Slurm's start and end of the job (see the phases). Slurm's time "
    "varies between measurements as much as dagster-rayslurm and the script by hand differ.",
}
"""By what the names of figures begin with."""
