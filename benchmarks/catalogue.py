"""All benchmarks: what each of them measures, and where it stands in the report."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from .figures import Figure, Options

COLD, ENVIRONMENTS, PHASES, WARM, SMALL, TERMINAL, STREAMS, BURDEN, DAGSTER, HERE = (
    "Ray from nothing",
    "Environments that are sent",
    "Where the time of a cold run goes",
    "A step that finds its session warm",
    "Without Ray",
    "From a terminal",
    "Output and messages",
    "What the edge node and slurmctld bear",
    "What Dagster's side bears",
    "On one machine, without Slurm",
)


@dataclass(frozen=True)
class Benchmark:
    """Something that can be measured by itself.

    Attributes:
        name: what it is asked for by.
        function: where it is, as "module:function" below this package.
        section: of the report.
        about: what it measures, and how.
        usual: whether it belongs to a run that names none.
    """

    name: str
    function: str
    section: str
    about: str
    usual: bool = True

    @property
    def on_stack(self) -> bool:
        """Whether it needs the Slurm stack."""
        return self.function.startswith("slurm.")

    def measure(self, options: Options) -> list[Figure]:
        """The figures; what they need is imported only now."""
        found = self.load()(options)
        return found if isinstance(found, list) else [found]

    def load(self) -> Callable[[Options], Figure | list[Figure]]:
        """The function that measures."""
        module, _, name = self.function.partition(":")
        function: Callable[[Options], Figure | list[Figure]] = getattr(importlib.import_module(f"{__package__}.{module}"), name)
        return function


BENCHMARKS = {
    benchmark.name: benchmark
    for benchmark in (
        Benchmark(
            "cold",
            "slurm.cold:cold",
            COLD,
            "Runs a payload in a new job with a new Ray cluster on 1, 2 and 4 nodes. The competitors run in turn, in changing "
            "order.",
        ),
        Benchmark(
            "container",
            "slurm.cold:container",
            COLD,
            "Runs a payload in a new job with a new Ray cluster on 1 and 2 nodes, alternately inside and outside Charliecloud "
            "containers.",
            usual=False,
        ),
        Benchmark(
            "hetjob",
            "slurm.hetjob:bring_up",
            COLD,
            "Compares one Ray cluster over two components of a heterogeneous job with one over the same number of equal nodes.",
            usual=False,
        ),
        Benchmark(
            "environment",
            "slurm.environments:first_line",
            ENVIRONMENTS,
            "Runs Ray on one node with an environment from a `uv.lock`. The files are already downloaded, but the cluster has "
            "none of them. The second run finds the environment on the cluster. Both are compared with an existing environment.",
            usual=False,
        ),
        Benchmark(
            "environment.second",
            "slurm.environments:second",
            ENVIRONMENTS,
            "Measures how much time an unchanged environment adds to its second run, over an existing connection.",
            usual=False,
        ),
        Benchmark(
            "environment.wheel",
            "slurm.environments:one_wheel",
            ENVIRONMENTS,
            "Changes one wheel in a lock file of 100 wheels of 200 KB each.",
            usual=False,
        ),
        Benchmark(
            "environment.race",
            "slurm.environments:race",
            ENVIRONMENTS,
            "Lets the processes of four simulated machines request a new environment at the same moment.",
            usual=False,
        ),
        Benchmark(
            "environment.large",
            "slurm.environments:large",
            ENVIRONMENTS,
            "The time to send an archive of 2 GB to the cluster and unpack the archive there: with `rayslurm env push` in a "
            "terminal, and by hand with `sftp` and `tar`.",
            usual=False,
        ),
        Benchmark(
            "environment.stage",
            "slurm.environments:stage",
            ENVIRONMENTS,
            'Compares Ray on the shared file system with a copy on the node (`stage="node-local"`). In this test both are on one '
            "disk: the times show the cost of a copy, and the number of files shows the savings on a real shared file system.",
            usual=False,
        ),
        Benchmark(
            "phases",
            "slurm.phases:phases",
            PHASES,
            "Measures each phase of a run with a new login, job and Ray cluster on two nodes. The times come from Dagster's "
            "event log, the record, and files and processes on the nodes. The payload waits until its nodes are checked.",
        ),
        Benchmark(
            "session.warm",
            "slurm.warm:warm",
            WARM,
            "Runs small Ray payloads one after the other on a warm Ray cluster, each in its own interpreter.",
        ),
        Benchmark(
            "session.preload",
            "slurm.warm:preload",
            WARM,
            "Runs the same payloads with Ray imported beforehand.",
            usual=False,
        ),
        Benchmark(
            "session.bash",
            "slurm.warm:bash",
            WARM,
            "Runs a payload without Ray in a warm session.",
        ),
        Benchmark(
            "session.throughput",
            "slurm.throughput:throughput",
            WARM,
            "Counts payloads per second, with eight at the same time.",
            usual=False,
        ),
        Benchmark(
            "session.race",
            "slurm.throughput:race",
            WARM,
            "Lets many processes request a session at the same moment.",
            usual=False,
        ),
        Benchmark(
            "slurm.bash",
            "slurm.cold:bash",
            SMALL,
            "Runs a trivial payload in a new job. The competitors run in turn.",
        ),
        Benchmark(
            "terminal.ps",
            "slurm.terminal:ps",
            TERMINAL,
            "Compares `rayslurm ps --all` for 200 runs with `ssh`, `squeue` and `cat`, each with a new login.",
            usual=False,
        ),
        Benchmark(
            "terminal.dashboard",
            "slurm.terminal:dashboard",
            TERMINAL,
            "Measures the time from the start of `rayslurm dashboard` for a session to its URL.",
            usual=False,
        ),
        Benchmark(
            "terminal.submit",
            "slurm.terminal:submit",
            TERMINAL,
            'Compares `rayslurm submit` without Ray with an asset that runs the same command in mode "slurm".',
            usual=False,
        ),
        Benchmark(
            "slurm.stdout",
            "slurm.streams:stdout",
            STREAMS,
            "Streams lines of 50 bytes from a compute node into the output of the step, and compares every line.",
        ),
        Benchmark(
            "slurm.messages",
            "slurm.streams:messages",
            STREAMS,
            "Sends Pipes messages from a compute node into Dagster's event log, and measures their delay.",
        ),
        Benchmark(
            "slurm.logins",
            "slurm.calls:logins",
            BURDEN,
            "Counts the SSH logins of one Dagster process in sshd's log.",
        ),
        Benchmark(
            "slurm.squeue",
            "slurm.calls:squeue",
            BURDEN,
            "Counts calls of `squeue` per minute while many jobs wait and run.",
        ),
        Benchmark(
            "connections",
            "slurm.connections:connections",
            BURDEN,
            "Compares commands, reads and writes over each kind of connection with `ssh` and `sftp` by hand.",
            usual=False,
        ),
        Benchmark(
            "connections.idle",
            "slurm.connections:idle_readers",
            BURDEN,
            "Measures the CPU usage of 100 idle followers.",
            usual=False,
        ),
        Benchmark(
            "load",
            "slurm.load:load",
            DAGSTER,
            "Measures CPU time and memory of one Dagster process with 1, 10 and 50 concurrent steps. Their payloads sleep in a "
            "session.",
        ),
        Benchmark(
            "import", "here.imports:imports", HERE, "Measures the time that `import dagster_rayslurm` adds to importing Dagster."
        ),
        Benchmark(
            "local.bash", "here.local:local_bash", HERE, "Compares a trivial payload with Dagster's `PipesSubprocessClient`."
        ),
        Benchmark(
            "local.first",
            "here.first:without_dashboard",
            HERE,
            "Compares the start of a Ray cluster in a first step with `ray start` by hand.",
        ),
        Benchmark(
            "local.first.dashboard",
            "here.first:with_dashboard",
            HERE,
            "Compares the same starts, both with a dashboard.",
            usual=False,
        ),
        Benchmark(
            "local.warm",
            "here.local:local_warm",
            HERE,
            "Runs one Ray script on a warm Ray cluster: with dagster-rayslurm, and as a plain process started by hand.",
        ),
        Benchmark("local.preload", "here.preload:local_preload", HERE, "The same with Ray imported beforehand.", usual=False),
        Benchmark(
            "partitions", "here.partitions:partitions", HERE, "Trivial partitions of one run in a warm session.", usual=False
        ),
        Benchmark(
            "waiting", "here.waiting:waiting", DAGSTER, "Awaited payloads that wait in the queue of a fake Slurm.", usual=False
        ),
        Benchmark("stdout", "here.stdout:stdout", HERE, "Lines of a payload through a step.", usual=False),
        Benchmark("messages", "here.messages:messages", HERE, "Pipes messages of a payload into the event log.", usual=False),
    )
}
SECTIONS = (COLD, ENVIRONMENTS, PHASES, WARM, SMALL, TERMINAL, STREAMS, BURDEN, DAGSTER, HERE)
