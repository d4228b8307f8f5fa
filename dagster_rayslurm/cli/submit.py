"""`rayslurm submit` runs a command on the cluster without Dagster; `rayslurm script` prints the batch script of a command."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from typing import Any, TypeVar

import click

from ..compute import ComputeResource
from ..compute_fields import Payload
from ..config import ExecutionMode
from ..environments import (
    CommandEnvironment,
    ContainerEnvironment,
    Environment,
    InheritedEnvironment,
    PreDeployedEnvironment,
    SentEnvironment,
)
from ..execution.terminal import INTERRUPTED, NOT_THE_PAYLOAD, Detached
from ..failures import RunFailure
from ..launchers import BashLauncher, RayLauncher
from ..operations import submit as run
from ..plan import merge, parse_payload
from ..slurm.config import SlurmQueueConfig
from ..slurm.request import make_request
from ..slurm.standalone import activate_prefix, standalone_script
from .cluster import Cluster, find_cluster, the_cluster
from .common import json_option, one_sentence_errors, print_json, see_troubles, terminal_log, with_link
from .options import all_cluster_options, cluster_option
from .resource import at_base, changed

F = TypeVar("F", bound=Callable[..., Any])

_PYTHONS = ("python", "python3")
_SIGTERM = 128 + signal.SIGTERM
_MODES = (ExecutionMode.LOCAL, ExecutionMode.SLURM, ExecutionMode.SLURM_SESSION, ExecutionMode.SLURM_HETJOB)


_SEVERAL: dict[str, Any] = {"multiple": True, "default": ()}


def allocation_options(command: F) -> F:
    """Decorator that adds to a command the options for the job's allocation, and the option `--load-env`.

    `--load-env` gives a shell command that runs before the environment is activated.
    """
    options = (
        click.option("--nodes", "--num-nodes", "-n", "nodes", type=click.IntRange(1), help="Number of nodes."),
        click.option("--gpus", "--num-gpus", "gpus", type=click.IntRange(0), help="GPUs on each node."),
        click.option("--cpus", type=click.IntRange(1), help="CPUs on each node."),
        click.option("--mem", help="Memory of each node, such as 16G."),
        click.option("--time", "-t", "time_limit", help="Time limit in Slurm's format, such as 02:00:00."),
        click.option("--partition", "-p", help="Partition."),
        click.option("--account", "-A", help="Account that is charged."),
        click.option("--qos", help="Quality of service."),
        click.option("--node", "--nodelist", "-w", "nodelist", help="The nodes to use, as sinfo lists them."),
        click.option("--sbatch", metavar="OPTION", help="A further long option of sbatch; may be repeated.", **_SEVERAL),
        click.option("--load-env", metavar="COMMAND", help='Shell command before the rest, "module load cuda".', **_SEVERAL),
    )
    for option in reversed(options):
        command = option(command)
    return command


def _job_options(command: F) -> F:
    """Decorator that adds the options that `submit` and `script` share to a command.

    Some options also have the names from Ray's slurm-launch.py.
    """
    options = (
        click.option("--name", "--exp-name", help="Name of the run and the job.  [default: that of the program]"),
        click.option("--command", "text", metavar="TEXT", help="The command as one text, instead of behind `--`."),
        allocation_options,
        click.option("--env", metavar="NAME[=VALUE]", help="Variable for the command and its Ray workers.", **_SEVERAL),
        click.option("--secret-env", metavar="NAME", help="Variable of this shell for the command alone.", **_SEVERAL),
        click.option("--working-dir", metavar="DIR", help="Directory to send.  [default: this one, unless it is the home]"),
        click.option("--no-working-dir", is_flag=True, help="Send no directory, but the script alone."),
        click.option("--file", "files", metavar="PATH", help="A further file or directory to send.", **_SEVERAL),
        click.option("--no-ray", is_flag=True, help="Start no Ray cluster."),
        click.option("--mode", type=click.Choice(list(map(str, _MODES))), help="[default: the resource's; if local, slurm]"),
    )
    for option in reversed(options):
        command = option(command)
    return all_cluster_options(click.argument("words", metavar="[--] COMMAND…", nargs=-1, type=click.UNPROCESSED)(command))


@click.command(context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False})
@_job_options
@click.option("--output", "outputs", metavar="PATTERN", multiple=True, help="Files to bring back; may be repeated.")
@click.option("--detach", "-d", is_flag=True, help="Leave once the job is submitted, and say how to come back.")
@click.option("--quiet", "-q", is_flag=True, help="Print warnings and the command's own output only.")
@json_option
def submit(outputs: tuple[str, ...], detach: bool, quiet: bool, as_json: bool, **options: Any) -> None:
    """Run a command on the cluster, with a Ray cluster around it: `rayslurm submit --nodes 4 --gpus 2 -- python train.py`.

    The command's output is live, and the exit code of `submit` is the command's exit code. Ctrl-C cancels the run; a second
    Ctrl-C leaves the run no grace period. Other exit codes: 2 for wrong options, 124 after the time limit, 125 if anything but
    the command has failed, 130 after Ctrl-C, 143 after SIGTERM.

    With --json, standard output has one object, after the end; the command's output goes to standard error.
    """

    log = terminal_log(quiet)
    try:
        with one_sentence_errors(), _terminated_as_interrupted():
            cluster = find_cluster() if options["mode"] == ExecutionMode.LOCAL else the_cluster()
            job = _Job(cluster, options)
            arguments = {"outputs": list(outputs), **job.arguments}
            with redirect_stdout(sys.stderr) if as_json else nullcontext():
                done = run(job.resource, job.name, log, detach, **arguments)
    except KeyboardInterrupt as interrupt:
        sys.exit(_SIGTERM if interrupt.args else INTERRUPTED)
    except click.UsageError:
        raise
    except click.ClickException as error:
        with_link(error).show()
        sys.exit(NOT_THE_PAYLOAD)
    shown: dict[str, Any]
    if isinstance(done, Detached):
        shown = {"run": done.run, "job_id": done.job_id, "directory": done.directory, "cluster_id": done.cluster_id}
        if as_json:
            return print_json(shown)
        where = _where()
        click.echo(f"{done.run} is job {done.job_id}; come back with\n  rayslurm {where}logs -f {done.run}", err=True)
        click.echo(f"  rayslurm {where}attach {done.run}\n  rayslurm {where}cancel {done.run}", err=True)
        return click.echo(done.run)
    if as_json:
        kind = done.failure and done.failure.kind.value
        shown = {"run": done.run, "job_id": done.job_id, "exit_code": done.exit_code, "failure": kind, "outputs": done.outputs}
        shown["message"] = done.failure and done.failure.description
        print_json(shown)
    else:
        for path in done.outputs:
            log.info(f"[rayslurm] {path}")
    if done.failure is not None:
        _tell_failure(done.failure)
    sys.exit(done.exit_code)


@click.command(context_settings={"allow_interspersed_args": False})
@_job_options
@click.option("--standalone", is_flag=True, help="A script that runs without this package, by `sbatch` there.")
def script(standalone: bool, **options: Any) -> None:
    """Print the batch script of a command, as `submit` would submit it; nothing is sent or started.

    With --standalone, print a script that runs on a cluster without this package.
    """
    with one_sentence_errors():
        cluster = find_cluster() if options["mode"] == ExecutionMode.LOCAL or standalone else the_cluster()
        job = _Job(cluster, options)
        if standalone:
            return click.echo(job.standalone_script(), nl=False)
        words = ("payload_path", "launcher", "queue")
        click.echo(job.resource.job_script(**{name: job.arguments[name] for name in words}), nl=False)


class _Job:
    """What a command line of `submit` or `script` requests: the resource to use, and the arguments of `ComputeResource.run`.

    The constructor raises `ValueError` or `click.UsageError` if an option is wrong.
    """

    def __init__(self, cluster: Cluster | None, options: Mapping[str, Any]) -> None:
        words, text = list(options["words"]), options["text"]
        if bool(words) == bool(text):
            raise click.UsageError("write the command behind `--`, or as --command; one of the two")
        if text:
            parse_payload(text)  # Refuses what only a shell understands.
            words = shlex.split(text)
        self.cluster, self.words, self.load_env = cluster, words, list(options["load_env"])
        self.resource = _resource(cluster, options["mode"])
        self.name = options["name"] or _program(words)
        directory = _working_dir(options, self.resource)
        size = {"num_cpus_per_node": options["cpus"], "num_gpus_per_node": options["gpus"]}
        if options["no_ray"]:
            size = {"num_cpus": options["cpus"], "num_gpus": options["gpus"]}
        given = {name: value for name, value in {**size, "working_dir": directory}.items() if value is not None}
        ray = not options["no_ray"] and isinstance(self.resource.default_launcher, RayLauncher)
        self.launcher = RayLauncher(**given) if ray else BashLauncher(**_renamed(given))
        self.queue = queue_of(options)
        self.env = dict(map(_variable, options["env"]))
        secret = {name: _variable(name)[1] for name in options["secret_env"]}
        self.arguments: dict[str, Any] = {
            "payload_path": _payload(words, directory),
            "launcher": self.launcher,
            "queue": self.queue,
            "extra_env": self.env,
            "secret_env": secret,
            "extra_files": list(options["files"]),
            "environment": loaded(self.resource, options["load_env"]),
        }

    def standalone_script(self) -> str:
        """Returns a batch script that runs the command on a cluster where this package is not installed."""
        resource, slurm = self.resource, self.resource.slurm
        launcher = merge(resource.default_launcher, self.launcher)
        queue = SlurmQueueConfig() if slurm is None else slurm.queue
        request = make_request(merge(queue, self.queue), launcher.footprint(), job_name=self.name, comment="")
        return standalone_script(
            request,
            self.words,
            launcher.ray_spec() if isinstance(launcher, RayLauncher) else None,
            commands=_activation(resource, self.load_env),
            variables=self.env,
            site=slurm.site if slurm is not None else {},
        )


def loaded(resource: ComputeResource, commands: Sequence[str]) -> Environment | None:
    """Returns an environment that runs shell commands and then activates the resource's environment; None without `commands`.

    Raises `ValueError` in local mode, and for an environment that shell commands cannot activate, such as a `UvEnvironment`.
    """
    if not commands:
        return None
    if resource.mode == ExecutionMode.LOCAL:
        raise ValueError("--load-env: mode 'local' runs in the environment of this shell; remove it")
    there = resource.environment
    if isinstance(there, ContainerEnvironment):
        return there.model_copy(update={"commands": [*commands, *there.commands]})
    python = there.python if isinstance(there, CommandEnvironment) else None
    imports = [] if isinstance(there, InheritedEnvironment) else there.imports
    return CommandEnvironment(commands=_activation(resource, commands), python=python, imports=imports)


def _activation(resource: ComputeResource, commands: Sequence[str]) -> list[str]:
    """Returns `commands`, followed by the bash commands that activate the resource's environment on the cluster.

    Raises `ValueError` for an environment that shell commands cannot activate, such as a `UvEnvironment`.
    """
    there, path = resource.environment, resource.pre_deployed_env_path
    if path is not None or isinstance(there, PreDeployedEnvironment):
        prefix = there.path if isinstance(there, PreDeployedEnvironment) else str(path)
        return [*commands, activate_prefix(prefix)]
    if isinstance(there, CommandEnvironment):
        return [*commands, *there.commands]
    if isinstance(there, SentEnvironment):
        kind = type(there).__name__
        raise ValueError(f"environment: no commands can activate the resource's {kind}; name one on the cluster, by its path")
    return list(commands)


def queue_of(options: Mapping[str, Any]) -> SlurmQueueConfig | None:
    """Returns the queue configuration that the options about the allocation give, such as `--mem`; None without such options."""
    fields = {
        "num_nodes": options["nodes"],
        "cpus_per_node": options["cpus"],
        "gpus_per_node": options["gpus"],
        **{name: options[name] for name in ("mem", "time_limit", "partition", "account", "qos", "nodelist")},
        "extra_sbatch": list(options["sbatch"]) or None,
    }
    fields = {name: value for name, value in fields.items() if value is not None}
    return SlurmQueueConfig(**fields) if fields else None


def _resource(cluster: Cluster | None, mode: str | None) -> ComputeResource:
    """Returns the resource of `cluster` in the mode `mode`; if `cluster` is None, returns a new resource in local mode.

    If `mode` is None, the resource keeps its own mode, but a resource in local mode gets the mode slurm.
    """
    if cluster is None:
        return at_base(ComputeResource())
    own = cluster.resource.mode
    mode = mode or (ExecutionMode.SLURM.value if own == ExecutionMode.LOCAL else own)
    return cluster.resource if mode == own else changed(cluster.resource, mode=mode)


def _renamed(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments `given`, which have the names of a `RayLauncher`, under the names of a `BashLauncher`.

    The names of a `BashLauncher` lack "_per_node" at the end.
    """
    return {name.removesuffix("_per_node"): value for name, value in given.items()}


def _working_dir(options: Mapping[str, Any], resource: ComputeResource) -> str | None:
    """Returns the directory to send with the run; None to send no directory.

    The options `--working-dir` and `--no-working-dir` decide. Without these options, the result is ".", the current directory. It
    is None if the launcher of `resource` has a working directory, or if the current directory is the home directory or /. Raises
    `click.UsageError` if both options are given.
    """
    if options["working_dir"] and options["no_working_dir"]:
        raise click.UsageError("--working-dir and --no-working-dir exclude each other; give one of them")
    if options["working_dir"] or options["no_working_dir"] or resource.default_launcher.working_dir:
        return options["working_dir"] or None
    here = os.path.realpath(os.getcwd())
    return None if here in ("/", os.path.realpath(os.path.expanduser("~"))) else "."


def _payload(words: Sequence[str], directory: str | None) -> Payload:
    """Returns the payload for the command line `words`, as `ComputeResource.run` takes it: a list of words, or a string.

    `directory` is the working directory that is sent; None if none is sent. If the command runs a Python script on this machine,
    the result is a string with the absolute path of the script, and the run then sends the script. There is one exception: if
    `directory` is "." and the command names a script below "." by a relative path, the script is sent as a part of `directory`.
    In this case, and for any other command, the result is a list of words.
    """
    python = words[0] in _PYTHONS and len(words) > 1
    script = words[1] if python else words[0]
    if not script.endswith(".py") or not os.path.isfile(script):
        return list(words)
    below = directory == "." and not os.path.isabs(script) and not os.path.normpath(script).startswith("..")
    rest = words[2:] if python else words[1:]
    return ["python", script, *rest] if below else shlex.join([os.path.abspath(script), *rest])


def _program(words: Sequence[str]) -> str:
    """Returns a name for a run of the command `words`: the name of the script or module, or else the name of the program."""
    script = next((word for word in words if word.endswith(".py")), None)
    module = words[words.index("-m") + 1] if "-m" in words[:-1] else None
    return os.path.splitext(os.path.basename(script or module or words[0]))[0] or "run"


def _variable(text: str) -> tuple[str, str]:
    """Returns the name and the value of the environment variable `text`: NAME=VALUE, or NAME for a variable of this shell.

    Raises `ValueError` if this shell has no such variable.
    """
    name, equals, value = text.partition("=")
    if not equals and name not in os.environ:
        raise ValueError(f"{name}: this shell has no such variable; write {name}=VALUE, or export it")
    return name, value if equals else os.environ[name]


def _where() -> str:
    """Returns the options that name this command's cluster, as text to insert after `rayslurm`; "" if no such option is given."""
    names = {"--cluster": "cluster", "--from": "source", "--prefix": "prefix", "--remote-base": "remote_base"}
    given = [(word, cluster_option(name)) for word, name in names.items()]
    return "".join(f"{word} {shlex.quote(value)} " for word, value in given if value)


def _tell_failure(failure: RunFailure) -> None:
    """Prints the description and the run directory of a failed run on standard error."""
    click.echo(f"Error: {failure.description}{see_troubles(failure.kind)}", err=True)
    directory = failure.metadata.get("Run directory")
    if directory is not None:
        click.echo(f"[rayslurm] run directory: {directory.value}", err=True)


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Context manager that turns SIGTERM into KeyboardInterrupt, which cancels the run as Ctrl-C does.

    SIGHUP is not changed: when the terminal closes, the job goes on.
    """

    def interrupt(signum: int, _: object) -> None:
        raise KeyboardInterrupt(signum)

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
