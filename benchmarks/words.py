"""What the report says in words: who takes part, and why a promise is not met where the reason is known."""

PARTIES = {
    "`slurm`, `slurm-session`, `slurm-hetjob`, `local`": "this project in each of its modes.",
    "by hand": "for Ray, a script of somebody who knows Slurm and Ray and is in a hurry (`benchmarks/payloads/limit.sh`): Ray "
    "starts on all nodes at once, Ray is imported once on each node, nothing sleeps, and the payload starts in the moment in "
    "which all nodes are alive. It checks nothing, protects nothing and cleans up little: it is the limit. Elsewhere, what the "
    "cell says.",
    "Ray's Slurm guide": "our own rendering of the procedure that Ray's documentation describes for Slurm "
    "(`benchmarks/payloads/guide.sh`): `srun` for the head, a sleep of 10 s, an `srun` for each worker with a sleep of 5 s after "
    "it, and then the payload.",
    "`ray symmetric-run`": "Ray's own command, started on every node by one `srun` under `sbatch` "
    "(`benchmarks/payloads/symmetric.sh`).",
    "dagster-slurm": "from PyPI, in an environment of its own; a job for each asset, and a Ray cluster for each Dagster run "
    '(`allocation_scope="run"`). Its object store has 1 GB, the least that its option takes.',
}
"""Those who are compared."""

REASONS: dict[str, str] = {}
"""By what the names of figures begin with."""
