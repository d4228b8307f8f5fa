"""What the report says in words: who takes part, and why a promise is not met where the reason is known."""

PARTIES = {
    "`slurm`, `slurm-session`, `slurm-hetjob`, `local`": "dagster-rayslurm in its four modes.",
    "by hand": "a hand-written batch script that starts each payload in a new Slurm job, and is optimized only for speed "
    "(`benchmarks/payloads/limit.sh`). The hand-written script starts Ray on all nodes at the same time, and imports Ray only "
    "once on each node. As soon as all Ray nodes are alive, the hand-written script starts the payload. The hand-written script "
    "checks nothing, does not protect Ray against other users, and removes only one temporary directory. The times of the "
    "hand-written script show roughly how fast a run can be. Some benchmarks do not use the hand-written script. In the tables "
    'of these benchmarks, a few words after each value in the column "By hand" say what was measured, for example "sftp and '
    'tar".',
    "Ray's Slurm guide": "a batch script that follows the Slurm guide in Ray's documentation (`benchmarks/payloads/guide.sh`). "
    "This script takes part only in the benchmark `cold`. The script starts the Ray head with `srun` and sleeps for 10 s, starts "
    "each worker node with another `srun` and sleeps for 5 s, and finally starts the payload.",
    "`ray symmetric-run`": "Ray's own command that starts a Ray cluster on several nodes and runs a script on it. A batch script "
    "starts `ray symmetric-run` on all nodes with one `srun` (`benchmarks/payloads/symmetric.sh`).",
    "dagster-slurm": "the package dagster-slurm from PyPI, in its own Python environment. With dagster-slurm, each asset has its "
    'own Slurm job. Where a table says `allocation_scope="run"`, all payloads of a Dagster run share one Slurm job and one Ray '
    "cluster. With dagster-slurm, Ray's object store has 1 GB, because dagster-slurm accepts no smaller size. With all "
    "other competitors, the object store has 0.1 GB.",
}
"""Those who are compared."""

_EXIT = (
    "The measured time begins in the last exit handler of the payload's Python process. After this handler, Python still "
    "releases the objects of Ray before the process ends. The hand-written script has the same delay."
)
REASONS: dict[str, str] = {
    "cold, 1 node: payload's exit to the return": _EXIT,
    "cold, 2 nodes: payload's exit to the return": _EXIT,
    "slurm.bash: total - payload's work": "Most of the measured time passes while Slurm starts and ends the job (the benchmark "
    "`phases` measures how long Slurm needs to start a job). The time that Slurm needs varies from measurement to measurement. "
    "This variation is larger than the difference between dagster-rayslurm and the hand-written script.",
}
"""By what the names of figures begin with."""
