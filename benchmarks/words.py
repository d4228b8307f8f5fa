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

_EXIT = (
    "It is measured from the last thing that Python does at exit, and Python still has to let go of Ray then: the script by "
    "hand, which adds next to nothing, takes over 0.2 s from there."
)
REASONS: dict[str, str] = {
    "cold, 1 node: payload's exit to the return": _EXIT,
    "cold, 2 nodes: payload's exit to the return": _EXIT,
    "slurm.bash: total - payload's work": "most of it is what Slurm takes to start a job and to end it (see the phases), which "
    "differs from one moment to the next as much as this project and the script by hand do.",
}
"""By what the names of figures begin with."""
