"""What the report says in words: who takes part, and why a promise is not met where the reason is known."""

PARTIES = {
    "`slurm`, `slurm-session`, `slurm-hetjob`, `local`": "dagster-rayslurm in its four modes.",
    "by hand": "for payloads in a new Slurm job, a hand-written batch script that is optimized only for speed "
    "(`benchmarks/payloads/limit.sh`). The script starts Ray on all nodes at the same time, and each node imports Ray only once. "
    "The script starts the payload as soon as all Ray nodes are alive, without fixed pauses. The script checks nothing, protects "
    "nothing and cleans up little. Its times therefore show about how fast a run can be. In all other benchmarks, the table cell "
    "names what was done by hand.",
    "Ray's Slurm guide": "our version of the batch script that Ray's documentation describes for Slurm "
    "(`benchmarks/payloads/guide.sh`). The script starts the Ray head with `srun` and sleeps for 10 s. For each worker node, the "
    "script runs a further `srun` and sleeps for 5 s. Then the script starts the payload.",
    "`ray symmetric-run`": "Ray's own command for a script on several nodes. One `srun` in a batch script starts this command on "
    "every node (`benchmarks/payloads/symmetric.sh`).",
    "dagster-slurm": "the package dagster-slurm from PyPI, in its own Python environment. Each asset has its own Slurm job. "
    'Where the table cell says `allocation_scope="run"`, all payloads of a Dagster run share one Slurm job and one Ray cluster. '
    "Ray's object store has 1 GB, the smallest size that dagster-slurm accepts.",
}
"""Those who are compared."""

_EXIT = (
    "The measured time begins in the last exit handler of the payload's Python. After this handler, Python still releases the "
    "objects of Ray before the process ends. The script by hand has the same delay."
)
REASONS: dict[str, str] = {
    "cold, 1 node: payload's exit to the return": _EXIT,
    "cold, 2 nodes: payload's exit to the return": _EXIT,
    "slurm.bash: total - payload's work": "Slurm needs most of this time to start and end the job (see the benchmark `phases`). "
    "This time varies from one measurement to the next, by at least the difference between the medians of dagster-rayslurm and "
    "of the hand-written script.",
}
"""By what the names of figures begin with."""
