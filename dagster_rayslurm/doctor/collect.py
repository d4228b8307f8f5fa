"""Examines a cluster: collects facts, turns the facts into report lines, and leaves out checks that a failure makes pointless."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from ..backends.layout import Layout, absolute
from ..edge import site
from ..environments import InheritedEnvironment, SentEnvironment
from ..environments.check import facts_of
from ..errors import StartError
from ..launchers import RayLauncher
from ..slurm.config import AUTO
from ..slurm.partitions import Partition
from ..slurm.request import make_request, render_script
from ..ssh.base import Connection
from . import Line, Wanted, failed, failure, has_failure, ok, skipped
from .login import log_in
from .machine_lines import edge_lines
from .probe import run_probe
from .resource import resource_text
from .slurm_lines import Slurm, chosen_partition, questions, slurm_lines

_TIMEOUT = 30.0  # Seconds for each of Slurm's programs.
_MARGIN = 120.0  # Further seconds for the whole call on the edge node, for the start-up files of shells.


@dataclass
class Report:
    """The result of an examination: report lines, the partitions for a table, and Python code to paste into definitions.

    The code `resource` constructs a `SlurmResource` for the cluster; it is "" if Slurm showed no partitions.
    """

    lines: list[Line] = field(default_factory=list)
    partitions: list[Partition] = field(default_factory=list)
    resource: str = ""


def examine(wanted: Wanted, probe_nodes: int, patience: float, say: Callable[[str], None]) -> Report:
    """Examines the cluster `wanted` and returns the report.

    If `probe_nodes` is not 0, a job examines `probe_nodes` compute nodes as well, unless the report has a failure already. The
    job may wait `patience` seconds in the queue; after that, the job is cancelled, and the report has a warning. `say` is called
    with a sentence about why the job waits. If the connection is lost, or a call on the edge node fails, the report ends with a
    failure that names the error.
    """
    report = Report()
    try:
        _examine(report, wanted, probe_nodes, patience, say)
    except OSError as error:
        report.lines.append(failed("edge node", error, "try again"))
    return report


def _examine(report: Report, wanted: Wanted, probe_nodes: int, patience: float, say: Callable[[str], None]) -> None:
    """Examines the cluster as `examine` does, and adds each line to `report` at once; raises OSError if a call fails."""
    login = log_in(wanted.slurm.ssh)
    if isinstance(login, list):
        report.lines += login
        return
    report.lines += login.lines
    connection = login.connection
    base = absolute(connection, wanted.slurm.remote_base)
    asked = _questions(wanted)
    facts = connection.call(site.survey, base, asked, _TIMEOUT, repeat=True, timeout=_TIMEOUT + _MARGIN)
    slurm = Slurm(facts, wanted)
    report.lines += edge_lines(facts, login.skew, login.margin)
    report.partitions = slurm.partitions
    if wanted.queue.partition == AUTO and slurm.partitions:
        try:
            queue = wanted.queue.having(partition=chosen_partition(slurm))
        except ValueError as error:
            report.lines.append(failure("partition", str(error), "ask for less, or name a partition"))
            return
        wanted = replace(wanted, slurm=wanted.slurm.model_copy(update={"queue": queue}))
        slurm = Slurm(facts, wanted)
    report.lines += slurm_lines(facts, wanted)
    if slurm.partitions:
        report.resource = resource_text(wanted, slurm)
    interpreter = _environment(connection, wanted, base, report.lines)
    if not probe_nodes:
        report.lines.append(skipped("compute nodes", "not looked at; `--probe` runs a job of a minute on one"))
    elif has_failure(report.lines):
        report.lines.append(skipped("compute nodes", "not looked at, because the job would fail"))
    else:
        report.lines += run_probe(connection, base, wanted, interpreter, probe_nodes, patience, say)


def _questions(wanted: Wanted) -> dict[str, list[Any]]:
    """Returns the commands of Slurm for the edge node to run, by name, as `slurm_lines.questions` describes them."""
    request = make_request(wanted.queue, RayLauncher().footprint(), job_name="rayslurm-doctor", comment="rayslurm doctor")
    # Which partition "auto" means is known only from the answers.
    script = "" if wanted.queue.partition == AUTO else render_script(request, ["true"], "/tmp", {})
    return questions(script, request.login_variables)


def _environment(connection: Connection, wanted: Wanted, base: str, lines: list[Line]) -> list[str] | None:
    """Adds a line about the environment to `lines`, and returns the command that starts the Python of the environment.

    Returns None if the environment cannot be used or was not checked. `base` is the path of the base directory.
    """
    name, environment = "environment", wanted.environment
    if isinstance(environment, SentEnvironment):
        lines.append(skipped(name, f"{type(environment).__name__} is made by the first run; `rayslurm env check` looks at it"))
        return None
    if isinstance(environment, InheritedEnvironment) and wanted.slurm.ssh is not None:
        lines.append(skipped(name, "none is named; name one with --env, or RAYSLURM_ENV_PATH"))
        return None
    if any(line.name in ("base directory", "disk space") for line in lines if has_failure([line])):
        lines.append(skipped(name, "not checked, because the base directory cannot be used"))
        return None
    try:
        cache = f"{base}/{Layout.here('/').environments.name}"
        path, facts = facts_of(connection, environment, wanted.launcher.ray_spec(), True, cache)
    except StartError as error:
        lines.append(failed(name, str(error).removeprefix("environment: "), "mend it, or name another environment"))
        return None
    ray = f", Ray {facts.ray}" if facts.ray else ""
    lines.append(ok(name, f"{path} has Python {'.'.join(map(str, facts.python))}{ray} and Dagster Pipes"))
    return facts.interpreter.start()
