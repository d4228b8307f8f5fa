"""Scripts under `sbatch`, submitted by `ssh`, which returns when the payload has ended: the limit, and what Ray offers."""

from __future__ import annotations

from dataclasses import dataclass

from ..steps import PAYLOADS
from .edge import ByHand, Edge
from .runs import CPUS, MARKS, Run, Shape, clocked, measured

_PATIENCE = 180
"""Seconds until a job that has not ended is cancelled."""
_SUBMIT = """\
mkdir {directory} && cd {directory} && \
job=$(env {environment} sbatch --parsable --job-name=bench-script --partition={partition} --nodes={nodes} \
--ntasks-per-node=1 --cpus-per-task={cpus} --mem={memory} --time=5 {scripts}/{script}) || exit 1
for i in $(seq {rounds}); do [ ! -e ended ] || exit "$(cat ended)"; sleep 0.05; done
scancel "$job"; cat *.out *.log >&2; exit 1
"""


@dataclass(frozen=True)
class Script:
    """A script, and what it leaves on its nodes, in which {job} is the id of its job."""

    label: str
    name: str
    leaves: str


LIMIT = Script("script by hand", "limit.sh", "/tmp/bench-{job}")
GUIDE = Script("Ray's Slurm guide", "guide.sh", "/tmp/ray")
SYMMETRIC = Script("ray symmetric-run", "symmetric.sh", "/tmp/ray")


class ByScript:
    """Runs payloads with a script.

    Args:
        edge: the stack.
        by_hand: the connection to submit over.
        directory: on the edge, for its files.
        partition: where its jobs run.
        script: which one.
    """

    def __init__(self, edge: Edge, by_hand: ByHand, directory: str, partition: str, script: Script = LIMIT) -> None:
        self.label = script.label
        self._script = script
        self._edge = edge
        self._by_hand = by_hand
        self._directory = f"{directory}/{script.name}-runs"
        self._partition = partition
        self._runs: list[Run] = []
        files = (script.name, "limit_node.py", "raw_drivers.py", "ray_driver.py", "hello.py")
        edge.upload([*(PAYLOADS / name for name in files), MARKS], f"{self._directory}/scripts")

    def run(self, shape: Shape, **variables: str) -> Run:
        """One payload with marks; its script gets more variables."""
        directory = f"{self._directory}/{len(self._runs)}"
        scripts, marks = f"{self._directory}/scripts", f"{directory}/marks.json"
        environment = {
            **shape.environment(marks),
            "BENCH_PYTHON": f"{self._edge.env['RAYSLURM_ENV_PATH']}/bin/python",
            "BENCH_SCRIPTS": scripts,
            **variables,
        }
        command = _SUBMIT.format(
            directory=directory,
            environment=" ".join(f"{name}={value}" for name, value in environment.items()),
            partition=self._partition,
            nodes=shape.nodes,
            cpus=CPUS,
            memory=shape.memory,
            scripts=scripts,
            script=self._script.name,
            rounds=_PATIENCE * 20,
        )
        self._runs.append(measured(self._edge, marks, lambda: clocked(lambda: self._by_hand.ssh(command))))
        return self._runs[-1]

    def tidy(self) -> None:
        """Remove what the scripts have left on the nodes."""
        left = {self._script.leaves.format(job=run.job) for run in self._runs}
        if left:
            self._edge.remove_on_nodes(sorted(left))
