"""The limit: a script written by hand for the stack, submitted by `ssh`, which returns when the payload has ended."""

from __future__ import annotations

from .edge import ByHand, Edge
from .slurm_runs import CPUS, MARKS, Run, Shape, clocked, measured
from .steps import PAYLOADS

_PATIENCE = 120
"""Seconds until a job that has not ended is cancelled."""
_SUBMIT = """\
mkdir {directory} && cd {directory} && \
job=$(env {environment} sbatch --parsable --job-name=bench-limit --partition={partition} --nodes={nodes} \
--ntasks-per-node=1 --cpus-per-task={cpus} --mem={memory} --time=5 {scripts}/limit.sh) || exit 1
for i in $(seq {rounds}); do [ ! -e ended ] || exit "$(cat ended)"; sleep 0.05; done
scancel "$job"; cat *.out *.log >&2; exit 1
"""


class Limit:
    """Runs payloads as a person would who knows Slurm and Ray, and is in a hurry."""

    label = "script by hand"

    def __init__(self, edge: Edge, by_hand: ByHand, directory: str, partition: str) -> None:
        self._edge = edge
        self._by_hand = by_hand
        self._directory = directory
        self._partition = partition
        self._runs: list[Run] = []
        scripts = ("limit.sh", "limit_node.py", "raw_drivers.py", "ray_driver.py", "hello.py")
        edge.upload([*(PAYLOADS / name for name in scripts), MARKS], f"{directory}/scripts")

    def run(self, shape: Shape, **variables: str) -> Run:
        """One payload with marks; its script gets more variables."""
        directory = f"{self._directory}/limit-{len(self._runs)}"
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
            rounds=_PATIENCE * 20,
        )
        self._runs.append(measured(self._edge, marks, lambda: clocked(lambda: self._by_hand.ssh(command))))
        return self._runs[-1]

    def tidy(self) -> None:
        """Remove what the scripts have left on the nodes."""
        self._edge.remove_on_nodes([f"/tmp/bench-{run.job}" for run in self._runs])
