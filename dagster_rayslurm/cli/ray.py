"""`rayslurm dashboard` shows the dashboard of a running Ray cluster; `rayslurm job` submits jobs to a running Ray cluster."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager

import click

from ..access.find import Found, NoClusterNow, choose, matching_entries
from ..access.head import ClusterEnded
from ..access.proxy import SECRET_HEADER, Proxy
from ..access.serve import serve, served
from ..backends.listing import Entry
from ..errors import INSTALL
from ..ssh.terminal import shell_status
from .common import one_sentence_errors
from .options import cluster_options
from .ps import entries

_WAIT_INTERVAL = 2.0  # Seconds between two looks for a cluster that `--wait` waits for.

target_argument = click.argument("target", metavar="TARGET")
_TARGET = (
    "TARGET is the id or key of a Dagster run, asset, session or Slurm job, the beginning of such an id or key, or the name of a "
    "run directory."
)


def find_target(target: str, wait: bool = False) -> Found:
    """Returns the running Ray cluster of the run, asset, session or job with the name `target`.

    Raises ClickException if no running Ray cluster, or more than one, has the name. If `wait` is True, and a run, session or job
    with the name has no Ray cluster yet but has not ended, the function waits and tries again.
    """
    said, there = "", list[Entry]()
    while True:
        with one_sentence_errors():
            try:
                there = entries(target)
                return choose(target, there)
            except (NoClusterNow, OSError) as error:
                # Once it waits, it also waits for Slurm or the edge node to answer again.
                if not wait or all(each.over for each in matching_entries(target, there)[0]):
                    raise
                if str(error) != said:
                    said = str(error)
                    click.echo(f"{said}; waiting", err=True)
        time.sleep(_WAIT_INTERVAL)


def say(sentence: str) -> None:
    """Prints a sentence on standard error, apart from the command's output."""
    click.echo(f"rayslurm: {sentence}", err=True)


@contextmanager
def reached(target: str) -> Iterator[str]:
    """Context manager that serves the Ray dashboard of the cluster `target` on this machine, and yields the URL.

    Raises ClickException if no running cluster, or more than one, has the name `target`, or if the cluster cannot be reached.
    """
    try:
        with served(find_target(target), say) as url:
            yield url
    except ClusterEnded as error:
        raise click.ClickException(str(error)) from None


@click.command()
@cluster_options
@target_argument
@click.option("--open", "opens", is_flag=True, help="Open it in the browser.")
@click.option("--wait", is_flag=True, help="Wait until the Ray cluster is up.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Port of this machine to listen on.  [default: any]")
def dashboard(target: str, opens: bool, wait: bool, port: int) -> None:
    """Show the Ray dashboard of a run, asset, session or Slurm job, until the Ray cluster ends or Ctrl-C.

    TARGET is the id or key of a Dagster run, asset, session or Slurm job, the beginning of such an id or key, or the name of a
    run directory.

    The URL that is printed works for a browser, curl, `ray job submit --address` and other tools alike; Ray's token is added. The
    URL works for you alone, and only as long as this command runs.
    """
    found = find_target(target, wait)
    urls: list[str] = []

    def ready(proxy: Proxy) -> None:
        urls.append(proxy.url)
        click.echo(f"{proxy.url}/")
        say(f"the Ray dashboard of {found.title}; Ctrl-C ends this")
        if opens:  # A browser in the terminal goes on until the user leaves it.
            threading.Thread(target=_open, args=[proxy.link()], name="rayslurm-browser", daemon=True).start()

    try:
        with one_sentence_errors():
            asyncio.run(serve(found, say, ready, port))
    except ClusterEnded as error:
        if not urls:
            raise click.ClickException(str(error)) from None
        say(str(error))
    except KeyboardInterrupt:
        pass


def _open(link: str) -> None:
    """Opens a link in the browser, or says that there is no browser. The link is not secret, because it works only once."""
    if not webbrowser.open(link):
        say("no browser can be opened here; copy the URL into a browser of this machine")


@click.group()
def job() -> None:
    """Submit jobs to a Ray cluster that runs, and look at them: Ray's own `ray job`, with all its options."""


def _job_command(name: str, help_text: str) -> None:
    """Adds the subcommand `rayslurm job NAME`, which runs `ray job NAME` for a Ray cluster.

    `help_text` is the beginning of the subcommand's help.
    """
    settings = {"ignore_unknown_options": True, "allow_interspersed_args": False, "help_option_names": ["--help"]}

    @job.command(name, help=f"{help_text}\n\n{_TARGET} All further arguments go to `ray job {name}`.", context_settings=settings)
    @cluster_options
    @target_argument
    @click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
    def command(target: str, arguments: tuple[str, ...]) -> None:
        with reached(target) as url:
            code = _ray_job(name, [("--follow" if name == "logs" and word == "-f" else word) for word in arguments], url)
        sys.exit(code)


for _name, _help in {
    "submit": "Submit a job: `rayslurm job submit TARGET -- python train.py`.",
    "list": "List the jobs.",
    "status": "Print the state of a job.",
    "logs": "Print the output of a job, with -f as it comes.",
    "stop": "Stop a job.",
}.items():
    _job_command(_name, _help)


def _ray_job(name: str, arguments: list[str], url: str) -> int:
    """Runs `ray job NAME` with the Ray of this machine; returns the exit code.

    `arguments` follow the subcommand `name`. `url` is the URL of the Ray dashboard at this package's HTTP proxy on this machine.
    The last part of `url` is the proxy's secret. Ray gets the secret as an HTTP header instead of a part of the address, because
    `ray job` prints the address. Raises ClickException if Ray's job client is not installed or cannot be started.
    """
    if importlib.util.find_spec("ray") is None:
        raise click.ClickException(f"Ray's job client is not installed here; {INSTALL.format(extra='ray')}")
    environ = {key: value for key, value in os.environ.items() if key not in ("RAY_ADDRESS", "RAY_AUTH_TOKEN")}
    address, _, secret = url.rpartition("/")
    environ |= {"RAY_API_SERVER_ADDRESS": address, "RAY_JOB_HEADERS": json.dumps({SECRET_HEADER: secret})}
    # Otherwise the secret would go to the proxy of a site that sets http_proxy.
    direct = os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
    environ |= dict.fromkeys(("no_proxy", "NO_PROXY"), f"{direct},127.0.0.1" if direct else "127.0.0.1")
    program = [sys.executable, "-m", "ray.scripts.scripts", "job", name, *arguments]
    try:
        process = subprocess.Popen(program, env=environ)
    except OSError as error:
        raise click.ClickException(f"Ray's job client cannot be started: {error}") from None
    while True:
        try:
            return shell_status(process.wait())
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)
