"""Writes the batch script that `rayslurm script --standalone` prints. The script runs `ray start` and a command.

The script does not need this package. The script runs on the first node of the allocation (sbatch(1)), which is the head node of
the Ray cluster. The functions have no side effects. Tried on Slurm 22.05, Ray 2.60.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence

from ..config import check_environment, check_line
from ..runtime.protocol.spec import RaySpec
from .config import AUTO
from .request import JobRequest, sbatch_options, sbatch_quote

_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]+")

_HEADER = """\
#!/bin/bash
# Written by `rayslurm script --standalone`. Submit it with sbatch, from the directory in which the command is to run, which all
# nodes must see. It needs Slurm, and Python with Ray in the environment that is activated below.
"""

_CLUSTER = """\

# ---- A Ray cluster: the head is this node, where the batch script runs.

# The ports are the job's own, since jobs may share nodes. They are below those that Linux gives to clients.
port=$((20000 + SLURM_JOB_ID % 3000 * 4))
ip=$(hostname --ip-address | tr ' ' '\\n' | grep -v '^127\\.' | grep -v '^::1' | head -n 1)
case $ip in *:*) address="[$ip]:$port" ;; *) address="$ip:$port" ;; esac
scratch=/tmp/ray-$SLURM_JOB_ID
{token}
pids=
finish() {{
    code=$?
    trap - EXIT TERM INT
    [ -z "$pids" ] || kill $pids 2>/dev/null
    wait
    srun --overlap --mem=0 --mpi=none --input=none --ntasks-per-node=1 rm -rf "$scratch" 2>/dev/null
    rm -rf "$scratch"{remove}
    exit "$code"
}}
trap finish EXIT
trap 'exit 143' TERM INT

ports="--node-manager-port=0 --object-manager-port=0 --min-worker-port=0 --max-worker-port=0"
ports="$ports --dashboard-agent-listen-port=0 --metrics-export-port=0"
options=({options})
# Ray's processes leave files in TMPDIR when they are killed.
mkdir -p -m 700 "$scratch" "$scratch/tmp"
TMPDIR="$scratch/tmp" ray start --head --block --node-ip-address="$ip" --port="$port" --ray-client-server-port=$((port + 1)) \\
    --dashboard-port=$((port + 2)) --include-dashboard={dashboard} --temp-dir="$scratch" \
    $ports "${{options[@]}}" >"$log-head.log" 2>&1 &
head=$!
pids=$head
until ray health-check --address "$address" >/dev/null 2>&1; do
    kill -0 "$head" 2>/dev/null || {{ echo "the Ray head has not started; see $log-head.log" >&2; exit 1; }}
    sleep 0.5
done
if [ "$SLURM_JOB_NUM_NODES" -gt 1 ]; then
    srun --overlap --mem=0 --cpu-bind=none --mpi=none --input=none --exclude="$SLURMD_NODENAME" \\
        --nodes=$((SLURM_JOB_NUM_NODES - 1)) --ntasks=$((SLURM_JOB_NUM_NODES - 1)) --ntasks-per-node=1 \\
        sh -c 'mkdir -p -m 700 "$0" "$0/tmp" && TMPDIR="$0/tmp" exec "$@"' "$scratch" \\
        ray start --block --address="$address" $ports "${{options[@]}}" >"$log-workers.log" 2>&1 &
    pids="$pids $!"
fi
export RAY_ADDRESS=$address
python - "$SLURM_JOB_NUM_NODES" <<'END' || {{ echo "not all nodes have joined; see $log-workers.log" >&2; exit 1; }}
import sys, time
import ray
ray.init(log_to_driver=False, logging_level="error")
deadline = time.monotonic() + {timeout}
while sum(node["Alive"] for node in ray.nodes()) < int(sys.argv[1]):
    if time.monotonic() > deadline:
        sys.exit(1)
    time.sleep(0.5)
END
"""

_TOKEN = """\
# Without a token, anyone who reaches a node could run code as you (Ray 2.52 or newer).
token=$(umask 077 && mktemp -d "$PWD/.ray-$SLURM_JOB_ID-XXXXXX")
(umask 077 && od -An -N32 -tx1 /dev/urandom | tr -d ' \\n' >"$token/token")
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$token/token"
"""


def activate_prefix(prefix: str) -> str:
    """Returns a bash command that activates the Python environment in the directory `prefix` on the cluster.

    `prefix` may begin with "~/".
    """
    path = f'"$HOME"/{shlex.quote(prefix[2:])}' if prefix.startswith("~/") else shlex.quote(prefix)
    return f'if [ -e {path}/activate.sh ]; then . {path}/activate.sh; else export PATH={path}/bin:"$PATH"; fi'


def standalone_script(
    request: JobRequest,
    command: Sequence[str],
    ray: RaySpec | None,
    *,
    commands: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
    site: Mapping[str, str] | None = None,
) -> str:
    """Returns a batch script that runs `command` and needs only Slurm, bash and Ray.

    Args:
        request: the options of the job.
        command: the words of the command to run.
        ray: the settings of the Ray cluster in which the command runs; None for no Ray cluster.
        commands: shell commands that make Python and Ray available; the script ends if one of these commands fails.
        variables: environment variables for this command. A variable in `variables` replaces a variable of `site`.
        site: environment variables for every job at the site.

    Raises:
        ValueError: a value has control characters, a variable's name is invalid or reserved, the job is heterogeneous, or its
            partition is "auto".
    """
    if request.further_components:
        raise ValueError("--standalone: a heterogeneous job needs this package; leave it out")
    if request.queue.partition == AUTO:
        raise ValueError('--standalone: partition="auto" is chosen where this package submits a job; name a partition')
    name = _UNSAFE.sub("_", request.job_name) or "run"
    lines = [f"#SBATCH --job-name={sbatch_quote(name)}", f"#SBATCH --output={name}-%j.log", "#SBATCH --export=ALL"]
    lines += [f"#SBATCH {option}" for option in sbatch_options(request)]
    text = _HEADER + "\n".join(lines) + "\n\n"
    text += "".join(f"{check_line(each, 'environment')} || exit\n" for each in commands)
    given = {**check_environment(site, "SlurmResource.site"), **check_environment(variables, "--env")}
    text += "".join(f"export {each}={shlex.quote(check_line(value, each))}\n" for each, value in given.items())
    text += f"log={shlex.quote(name)}-$SLURM_JOB_ID\n"
    if ray is not None:
        text += _cluster(ray)
    return f"{text}\n{shlex.join(command)}\n"


def _cluster(ray: RaySpec) -> str:
    """Returns the part of the script that starts a Ray cluster with the settings `ray`, and waits until all nodes have joined."""
    amounts = {"num-cpus": ray.num_cpus, "num-gpus": ray.num_gpus, "object-store-memory": ray.object_store_memory}
    options = [f"--{name}={value}" for name, value in amounts.items() if value is not None]
    if ray.num_cpus is None:
        options.append("--num-cpus=$(nproc)")  # Ray 2.60 counts the machine's CPUs, not those that Slurm granted.
    if ray.resources:
        options.append(f"--resources={json.dumps(ray.resources)}")
    if ray.labels:
        options.append("--labels=" + ",".join(f"{name}={value}" for name, value in sorted(ray.labels.items())))
    words = [
        '"--num-cpus=$(nproc)"' if word == "--num-cpus=$(nproc)" else shlex.quote(word) for word in [*options, *ray.ray_args]
    ]
    token = ray.auth == "token"
    return _CLUSTER.format(
        token=_TOKEN if token else "export RAY_AUTH_MODE=disabled",
        remove=' "$token"' if token else "",
        options=" ".join([*words, "--disable-usage-stats"]),
        dashboard="true" if ray.dashboard else "false",
        timeout=f"{ray.startup_timeout:g}",
    )
