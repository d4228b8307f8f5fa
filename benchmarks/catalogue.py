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
            "A job of its own with Ray on 1, 2 and 4 nodes, all parties by turns, in changing order.",
        ),
        Benchmark(
            "container",
            "slurm.cold:container",
            COLD,
            "A job of its own with Ray on 1 and 2 nodes, inside containers of Charliecloud and outside by turns.",
            usual=False,
        ),
        Benchmark(
            "hetjob",
            "slurm.hetjob:bring_up",
            COLD,
            "One Ray cluster over two components of a heterogeneous job, beside one over as many nodes of one kind.",
            usual=False,
        ),
        Benchmark(
            "environment",
            "slurm.environments:first_line",
            ENVIRONMENTS,
            "Ray on one node from a `uv.lock`, its files fetched before, to a cluster that has none of them, and again; beside "
            "the same environment as one that is there.",
            usual=False,
        ),
        Benchmark(
            "environment.second",
            "slurm.environments:second",
            ENVIRONMENTS,
            "What the second use of an unchanged environment adds to a run, on a connection that is up.",
            usual=False,
        ),
        Benchmark(
            "environment.wheel",
            "slurm.environments:one_wheel",
            ENVIRONMENTS,
            "A lock of 100 wheels of 200 KB, of which one changes.",
            usual=False,
        ),
        Benchmark(
            "environment.race",
            "slurm.environments:race",
            ENVIRONMENTS,
            "Processes, as of four machines, that ask for an environment at the same moment, of which the cluster has nothing.",
            usual=False,
        ),
        Benchmark(
            "environment.large",
            "slurm.environments:large",
            ENVIRONMENTS,
            "`rayslurm env push` of an archive of 2 GB in a terminal, and a run that sends another one, beside `sftp` and `tar`.",
            usual=False,
        ),
        Benchmark(
            "environment.stage",
            "slurm.environments:stage",
            ENVIRONMENTS,
            'Ray from the file system that nodes share and, with `stage="node-local"`, from a copy on the node. Here both are on '
            "one disk, so that seconds show what a copy costs, and the number of files what it saves elsewhere.",
            usual=False,
        ),
        Benchmark(
            "phases",
            "slurm.phases:phases",
            PHASES,
            "A cold run on two nodes with a login of its own, by the stamps of Dagster's event log, of the record, of files and "
            "of processes on the nodes. The payload is held until its nodes have been looked at.",
        ),
        Benchmark(
            "session.warm",
            "slurm.warm:warm",
            WARM,
            "Small Ray payloads one after the other on a cluster that is up, each in an interpreter of its own.",
        ),
        Benchmark(
            "session.preload",
            "slurm.warm:preload",
            WARM,
            "The same with Ray imported beforehand.",
            usual=False,
        ),
        Benchmark(
            "session.bash",
            "slurm.warm:bash",
            WARM,
            "A payload without Ray in a warm session.",
        ),
        Benchmark(
            "session.throughput",
            "slurm.throughput:throughput",
            WARM,
            "Payloads per second, eight at once.",
            usual=False,
        ),
        Benchmark(
            "session.race",
            "slurm.throughput:race",
            WARM,
            "Many processes that ask for a session at the same moment.",
            usual=False,
        ),
        Benchmark(
            "slurm.bash",
            "slurm.cold:bash",
            SMALL,
            "A job of its own for a trivial payload, all parties by turns.",
        ),
        Benchmark(
            "terminal.ps",
            "slurm.terminal:ps",
            TERMINAL,
            "`rayslurm ps --all` over 200 runs, beside `ssh` with `squeue` and `cat`; each with a login of its own.",
            usual=False,
        ),
        Benchmark(
            "terminal.dashboard",
            "slurm.terminal:dashboard",
            TERMINAL,
            "From the start of `rayslurm dashboard` for a session to its URL.",
            usual=False,
        ),
        Benchmark(
            "terminal.submit",
            "slurm.terminal:submit",
            TERMINAL,
            'A process of `rayslurm submit` without Ray, beside one that materializes an asset in mode "slurm" with its command.',
            usual=False,
        ),
        Benchmark(
            "slurm.stdout",
            "slurm.streams:stdout",
            STREAMS,
            "Lines of 50 bytes from a compute node into the output of the step, all of them compared.",
        ),
        Benchmark(
            "slurm.messages",
            "slurm.streams:messages",
            STREAMS,
            "Pipes messages from a compute node into Dagster's event log, and how late they are there.",
        ),
        Benchmark(
            "slurm.logins",
            "slurm.calls:logins",
            BURDEN,
            "SSH logins of one Dagster process, by sshd's log.",
        ),
        Benchmark(
            "slurm.squeue",
            "slurm.calls:squeue",
            BURDEN,
            "Queries of the queue per minute while many jobs wait and run, counted where the commands are called.",
        ),
        Benchmark(
            "connections",
            "slurm.connections:connections",
            BURDEN,
            "Commands, reads and writes over each kind of connection, beside `ssh` and `sftp` by hand.",
            usual=False,
        ),
        Benchmark(
            "connections.idle",
            "slurm.connections:idle_readers",
            BURDEN,
            "CPU that 100 followers cost while nothing happens.",
            usual=False,
        ),
        Benchmark(
            "load",
            "slurm.load:load",
            DAGSTER,
            "CPU time and memory of one Dagster process with 1, 10 and 50 steps at once, whose payloads sleep in a session.",
        ),
        Benchmark("import", "here.imports:imports", HERE, "What `import dagster_rayslurm` costs beyond importing Dagster."),
        Benchmark("local.bash", "here.local:local_bash", HERE, "A trivial payload, beside Dagster's client for subprocesses."),
        Benchmark(
            "local.first",
            "here.first:without_dashboard",
            HERE,
            "How long until the Ray cluster of a first step is alive, beside `ray start` by hand.",
        ),
        Benchmark(
            "local.first.dashboard",
            "here.first:with_dashboard",
            HERE,
            "The same with a dashboard on both sides.",
            usual=False,
        ),
        Benchmark("local.warm", "here.local:local_warm", HERE, "A Ray payload on a warm cluster, beside its driver by hand."),
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
