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
            "Starts a new job and a new Ray cluster for each payload, on 1, 2 and 4 nodes. The competitors run one after "
            "the other, in several rounds. In every second round, the competitors run in "
            "reverse order.",
        ),
        Benchmark(
            "container",
            "slurm.cold:container",
            COLD,
            "Starts a new job and a new Ray cluster for each payload, on 1 and 2 nodes. One run starts Ray and the payload "
            "in Charliecloud containers, and the next run starts Ray and the payload without containers.",
            usual=False,
        ),
        Benchmark(
            "hetjob",
            "slurm.hetjob:bring_up",
            COLD,
            "Starts one Ray cluster that spans two components of a heterogeneous job, and another on the same number of nodes "
            "without components.",
            usual=False,
        ),
        Benchmark(
            "environment",
            "slurm.environments:first_line",
            ENVIRONMENTS,
            "Runs Ray on one node in a Python environment that is made from a file `uv.lock`. Dagster's machine has "
            "already downloaded the files of the environment. The first run sends these files to the cluster, and the second run "
            'finds the environment on the cluster. In the benchmark `environment`, the column "By hand" shows the time of a run '
            "with a `PreDeployedEnvironment`, which is only the path of an environment on the cluster.",
            usual=False,
        ),
        Benchmark(
            "environment.second",
            "slurm.environments:second",
            ENVIRONMENTS,
            "Measures how much time a run needs to find an environment that was sent earlier. When the measurement begins, the "
            "environment is already on the cluster, and the SSH connection is open.",
            usual=False,
        ),
        Benchmark(
            "environment.wheel",
            "slurm.environments:one_wheel",
            ENVIRONMENTS,
            "Sends an environment of 100 wheels of 200 KB each, changes one of these wheels, and sends the environment again.",
            usual=False,
        ),
        Benchmark(
            "environment.race",
            "slurm.environments:race",
            ENVIRONMENTS,
            "Starts 20 processes on four simulated machines. At the same moment, all processes try to put the same new "
            "environment on the cluster.",
            usual=False,
        ),
        Benchmark(
            "environment.large",
            "slurm.environments:large",
            ENVIRONMENTS,
            "Measures the time to send an archive of 2 GB to the cluster and to unpack it there: once with `rayslurm env push` "
            "in a terminal, and once by hand with `sftp` and `tar`.",
            usual=False,
        ),
        Benchmark(
            "environment.stage",
            "slurm.environments:stage",
            ENVIRONMENTS,
            "Imports Ray from an environment on the shared file system, and from a copy of this environment on the node "
            '(`stage="node-local"`). In the benchmark `environment.stage`, the shared file system and the copy of the '
            "environment are on one disk, so the times show only how much time the copying takes. The benchmark therefore "
            "counts files on the shared file system: the files that dagster-rayslurm reads to make the copy, and the files that "
            "an import of Ray reads without a copy. From these two numbers, you can estimate how much time a copy of the "
            "environment saves on a real shared file system.",
            usual=False,
        ),
        Benchmark(
            "phases",
            "slurm.phases:phases",
            PHASES,
            "Measures how long each phase of a run takes. The run uses two nodes, a new login, a new job and a new Ray "
            "cluster. The times of the phases come from Dagster's event log, the log of sshd, the files of the run, and the "
            "start times of the processes on the nodes. The payload of the benchmark `phases` runs until the benchmark has "
            "read the start times of the processes.",
        ),
        Benchmark(
            "session.warm",
            "slurm.warm:warm",
            WARM,
            "Runs small Ray payloads one after the other on a warm Ray cluster. Each payload runs in a new Python process.",
        ),
        Benchmark(
            "session.preload",
            "slurm.warm:preload",
            WARM,
            "Runs small Ray payloads on a warm Ray cluster, with and without preloaded Ray.",
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
            "Counts payloads per second in a warm session that runs eight payloads at the same time.",
            usual=False,
        ),
        Benchmark(
            "session.race",
            "slurm.throughput:race",
            WARM,
            "Starts many processes, which request the same session at the same moment.",
            usual=False,
        ),
        Benchmark(
            "slurm.bash",
            "slurm.cold:bash",
            SMALL,
            "Runs a trivial payload without Ray in a new job. The competitors run one after the other.",
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
            "Streams lines of 50 bytes from a compute node into the output of the step, and checks that every line arrives.",
        ),
        Benchmark(
            "slurm.messages",
            "slurm.streams:messages",
            STREAMS,
            "Measures how many Pipes messages from a compute node arrive in Dagster's event log per second, and how many "
            "seconds each message takes to arrive there.",
        ),
        Benchmark(
            "slurm.logins",
            "slurm.calls:logins",
            BURDEN,
            "Counts how often one Dagster process logs in to the edge node. The count of the logins comes from the log of sshd.",
        ),
        Benchmark(
            "slurm.squeue",
            "slurm.calls:squeue",
            BURDEN,
            "Counts how often per minute one Dagster process calls `squeue` while many jobs wait and run.",
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
            "Measures the CPU usage of 100 readers of a file that does not grow, on this machine and on the edge node.",
            usual=False,
        ),
        Benchmark(
            "load",
            "slurm.load:load",
            DAGSTER,
            "Measures CPU time and memory of one Dagster process that runs 1, 10 or 50 steps at the same time. Each step "
            "runs a payload in a session, and the payload only sleeps.",
        ),
        Benchmark(
            "import", "here.imports:imports", HERE, "Measures how much time `import dagster_rayslurm` adds to `import dagster`."
        ),
        Benchmark(
            "local.bash",
            "here.local:local_bash",
            HERE,
            "Runs a trivial payload without Ray, once with dagster-rayslurm and once with Dagster's `PipesSubprocessClient`.",
        ),
        Benchmark(
            "local.first",
            "here.first:without_dashboard",
            HERE,
            "Measures how long it takes until a new Ray cluster is alive, once when a Dagster step starts the cluster, and once "
            "when `ray start` is called by hand.",
        ),
        Benchmark(
            "local.first.dashboard",
            "here.first:with_dashboard",
            HERE,
            "Measures the same as `local.first`, but with Ray's dashboard.",
            usual=False,
        ),
        Benchmark(
            "local.warm",
            "here.local:local_warm",
            HERE,
            "Runs a Ray script on a warm Ray cluster, once with dagster-rayslurm and once as a process that is started by hand.",
        ),
        Benchmark(
            "local.preload",
            "here.preload:local_preload",
            HERE,
            "Runs a Ray script on a warm Ray cluster, with and without preloaded Ray.",
            usual=False,
        ),
        Benchmark(
            "partitions",
            "here.partitions:partitions",
            HERE,
            "Runs trivial partitions in one run of a warm session, and materializes each partition.",
            usual=False,
        ),
        Benchmark(
            "waiting",
            "here.waiting:waiting",
            DAGSTER,
            "Measures what awaited payloads cost the Dagster process while their jobs wait in the queue of a fake Slurm.",
            usual=False,
        ),
        Benchmark(
            "stdout", "here.stdout:stdout", HERE, "Streams lines of a local payload into the output of the step.", usual=False
        ),
        Benchmark(
            "messages",
            "here.messages:messages",
            HERE,
            "Sends Pipes messages of a local payload into Dagster's event log.",
            usual=False,
        ),
    )
}
SECTIONS = (COLD, ENVIRONMENTS, PHASES, WARM, SMALL, TERMINAL, STREAMS, BURDEN, DAGSTER, HERE)
