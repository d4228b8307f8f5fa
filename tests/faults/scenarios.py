"""Helpers for tests of faults: Dagster in a process of its own, runs that stop at a given phase, and a faulty network link.

Begin with `Dagster` and `held_in`.
"""

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from dagster_rayslurm import ComputeResource
from stack.link import Link

from ..conftest import event_log, pipes_script, wait_until
from ..connections.sshd import Sshd
from ..slurm.fixtures import ROOT, Running, Site

MODES = ("slurm", "slurm-session", "slurm-hetjob")

BEFORE, AFTER = 40, 80
"""Number of lines, and of messages, that the payload `NUMBERED` has written when it waits, and in all."""

NUMBERED = pipes_script(f"""
import os, pathlib, time
data = pathlib.Path(os.environ["RAYSLURM_DATA_DIR"])
with open(data / "ran", "a") as file:
    file.write(os.environ["SLURM_JOB_ID"] + "\\n")
for number in range({BEFORE}):
    print("line", number, flush=True)
    pipes.report_custom_message(number)
(data / "up").write_text(str(os.getpid()))
began = time.monotonic()
while not (data / "go").exists() and time.monotonic() - began < 150:
    time.sleep(0.05)
for number in range({BEFORE}, {AFTER}):
    print("line", number, flush=True)
    pipes.report_custom_message(number)
pipes.report_asset_materialization(metadata={{"job": os.environ["SLURM_JOB_ID"]}})
""")
"""Payload that writes numbered lines and messages, waits for the file `go` in the data directory, and then writes the others."""

_DEFINITIONS = """
import sys
import dagster as dg
from dagster_rayslurm import *
{first}

RETRIES = {retries}

@dg.asset(retry_policy=dg.RetryPolicy(RETRIES) if RETRIES else None)
def slow(context: dg.AssetExecutionContext, compute: ComputeResource):
    run = compute.run(context=context, payload_path={payload!r}, **{arguments!r})
    context.log.info("messages " + str(list(run.get_custom_messages())))
    return run.get_materialize_result()

job = dg.define_asset_job("job", "slow", executor_def=dg.{executor}_executor)
queue = {queue!r}
part = {{**queue, "mem": "500M"}}
components = [HetComponent(component_id=name, queue=SlurmQueueConfig(**part)) for name in ("a", "b")]
compute = ComputeResource(
    mode={mode!r},
    slurm=SlurmResource(
        ssh=SSHConnectionResource(**{ssh!r}), queue=SlurmQueueConfig(**queue), remote_base={base!r}, poll_interval=1
    ),
    components=components if {mode!r} == "slurm-hetjob" else [],
    session=SessionConfig(**{session!r}),
    pre_deployed_env_path={env_path!r},
    local_base={local_base!r},
    default_launcher={launcher},
    on_service_stop={on_service_stop!r},
)
defs = dg.Definitions([slow], jobs=[job], resources={{"compute": compute}})

def made():
    return defs.resolve_job_def("job")

if __name__ == "__main__":
    import definitions
    with dg.DagsterInstance.get() as instance:
        retried = sys.argv[1:]
        how = {{"reexecution_options": dg.ReexecutionOptions.from_failure(retried[0], instance)}} if retried else {{}}
        tags = {{"dagster/is_resume_retry": "true"}} if retried else {{}}
        result = dg.execute_job(dg.reconstructable(definitions.made), instance=instance, tags=tags, **how)
    sys.exit(0 if result.success else 1)
"""


class Dagster:
    """A Dagster instance with one asset. Each run of the asset has a process of its own, which a test can kill.

    Args:
        site: the Slurm stack.
        home: directory of the instance.
        payload: path of the payload that the asset runs.
    """

    def __init__(self, site: Site, home: Path, payload: Path) -> None:
        self.site = site
        self.home = home
        self.payload = payload
        self._processes: list[subprocess.Popen[bytes]] = []

    def define(self, mode: str, **fields: Any) -> None:
        """Write the definitions that the next run executes.

        `fields` replace the defaults below; `queue`, `ssh` and `session` are merged with theirs. `first` is code to run first.
        """
        own = {
            "first": fields.pop("first", ""),
            "mode": mode,
            "payload": str(self.payload),
            "arguments": fields.pop("arguments", {}),
            "executor": fields.pop("executor", "in_process"),
            "retries": fields.pop("retries", 0),
            "queue": {"partition": "compute", "time_limit": "00:05:00", **fields.pop("queue", {})},
            "ssh": {**self.site.ssh.model_dump(), **fields.pop("ssh", {})},
            "base": self.site.base,
            "session": {"idle_timeout": 60, **fields.pop("session", {})},
            "env_path": self.site.env_path,
            "local_base": str(self.home / "base"),
            "launcher": fields.pop("launcher", "BashLauncher(grace_period=3)"),
            "on_service_stop": fields.pop("on_service_stop", "cancel"),
        }
        assert not fields, fields
        (self.home / "definitions.py").write_text(_DEFINITIONS.format(**own))

    def start(self, retry_of: str | None = None) -> "subprocess.Popen[bytes]":
        """Start a process that executes the job, or that retries the failed run `retry_of` from its failure."""
        paths = f"{self.home}:{ROOT}"
        env = {**os.environ, "DAGSTER_HOME": str(self.home), "PYTHONPATH": paths, "DAGSTER_DISABLE_TELEMETRY": "yes"}
        command = [sys.executable, str(self.home / "definitions.py"), *([retry_of] if retry_of else [])]
        with open(self.home / "log", "ab") as log:
            process = subprocess.Popen(command, env=env, cwd=self.home, stdout=log, stderr=log, start_new_session=True)
        self._processes.append(process)
        return process

    @property
    def log(self) -> str:
        """The output of all processes of this instance so far; when a process has ended, its last lines may be missing."""
        return (self.home / "log").read_text(errors="replace")

    def said(self) -> str:
        """All messages and errors in the event logs of the runs so far."""
        with self.instance() as instance:
            return event_log(instance)

    @contextmanager
    def instance(self) -> Iterator[dg.DagsterInstance]:
        with dg.DagsterInstance.from_config(str(self.home)) as instance:
            yield instance

    def runs(self) -> list[dg.DagsterRun]:
        """The runs of this instance, the oldest first."""
        with self.instance() as instance:
            return list(instance.get_runs())[::-1]

    def events(self, run_id: str) -> list[Any]:
        with self.instance() as instance:
            return list(instance.all_logs(run_id))

    def materializations(self) -> list[str]:
        """The id of the run for each materialization of the asset."""
        with self.instance() as instance:
            found = instance.fetch_materializations(dg.AssetKey("slow"), limit=10).records
            return [record.run_id for record in found]

    def mark_failed(self) -> str:
        """Mark the last run as failed, as Dagster's run monitoring does when a process is gone; returns the id of the run."""
        with self.instance() as instance:
            run = instance.get_runs()[0]
            if not run.is_finished:
                instance.report_run_failed(run)
            return str(run.run_id)

    def output(self, run_id: str) -> list[str]:
        """The numbered lines of the payload in all compute logs of a run."""
        files = sorted((self.home / "storage" / run_id).rglob("*.out"))
        return [line for file in files for line in file.read_text().splitlines() if line.startswith("line ")]

    def shown(self) -> str:
        """The output of the payload in the compute logs of all runs so far."""
        return "".join(file.read_text() for file in (self.home / "storage").rglob("*.out"))

    def end(self) -> None:
        """Kill the processes of all runs."""
        for process in self._processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture(name="dagster")
def dagster_on_slurm(
    site: Site, session_compute: Callable[..., ComputeResource], tmp_path: Path, script: Any
) -> Iterator[Dagster]:
    """A Dagster instance whose asset runs the payload `NUMBERED`. Sessions that it leaves are ended as a user ends them."""
    session_compute()
    home = tmp_path / "home"
    home.mkdir()
    (home / "dagster.yaml").write_text("telemetry: {enabled: false}\n")
    site.sh('mkdir -p "$1/data"', site.base)
    made = Dagster(site, home, script(NUMBERED))
    yield made
    made.end()


# ---- Files and jobs on the Slurm cluster


def let_go(site: Site) -> None:
    """Make the waiting payload continue to its end."""
    site.sh('touch "$1/data/go"', site.base)


def is_there(site: Site, name: str) -> bool:
    """Whether a file of the data directory exists and is not empty."""
    return bool(site.connection.read(f"{site.base}/data/{name}", 0, 1))


def has_ended(site: Site) -> bool:
    """Whether the run record of any payload contains its `end`."""
    return bool(site.sh("""cat "$1"/runs/*/journal.jsonl 2>/dev/null | grep -c '"type":"end"' || true""", site.base).strip("0\n"))


def submitted(site: Site) -> list[str]:
    """The ids of all jobs below the base directory, ended ones too. A heterogeneous job counts once."""
    listed = site.sh("squeue --me --states=all --noheader --format='%i %Z'").splitlines()
    return sorted({line.split()[0].partition("+")[0] for line in listed if f"{site.base}/" in line})


def run_dirs(site: Site) -> list[str]:
    return site.sh('ls "$1/runs" 2>/dev/null || true', site.base).split()


class HeldSbatch:
    """An sbatch that waits before or after it calls the real one, and an SSH server of its own whose logins get this sbatch."""

    def __init__(self, site: Site) -> None:
        self._site = site
        site.sh('mkdir -p "$1/bin" "$1/data"', site.base)
        path = f"{site.base}/bin:/usr/local/bin:/usr/bin:/bin"
        self._server = Sshd(site.stack, "edge", f"SetEnv PATH={path}")
        self.host, self.port = self._server.host, self._server.port

    def hold(self, when: str) -> None:
        """Make sbatch wait "before" or "after" the submission, until the file `submit` is in the data directory."""
        wait = f'echo x >"{self._site.base}/data/{when}"; while ! [ -e "{self._site.base}/data/submit" ]; do sleep 0.05; done'
        call = 'id=$("$real" "$@") || exit'
        steps = [wait, call] if when == "before" else [call, wait]
        text = "\n".join(["#!/bin/sh", "real=$(PATH=/usr/local/bin:/usr/bin:/bin command -v sbatch)", *steps, 'echo "$id"', ""])
        self._site.sh('printf %s "$2" >"$1/bin/sbatch" && chmod +x "$1/bin/sbatch"', self._site.base, text)

    def go(self) -> None:
        self._site.sh('touch "$1/data/submit"', self._site.base)

    def close(self) -> None:
        self._server.close()


@contextmanager
def held_sbatch(site: Site, when: str) -> Iterator[HeldSbatch]:
    sbatch = HeldSbatch(site)
    try:
        sbatch.hold(when)
        yield sbatch
    finally:
        sbatch.close()


HELD_CLUSTER = "RayLauncher(object_store_memory_gb=0.1, dashboard=False, startup_timeout=120, grace_period=2, health_check={!r})"


def health_check(site: Site) -> str:
    """A health check that delays the start of a Ray cluster until the file `healthy` is in the data directory."""
    data = f"{site.base}/data"
    return f'echo x >"{data}/starting"; while ! [ -e "{data}/healthy" ]; do sleep 0.05; done'


# ---- The network link


class Wire:
    """A TCP proxy on this machine in front of a server, which can be slow, stop passing data, or break its connections.

    Data that the proxy holds back arrives later, as TCP repeats lost packets.

    Args:
        host: host of the server.
        port: port of the server.
        rate: bytes per second towards the server; None for no limit.
    """

    def __init__(self, host: str, port: int, rate: float | None = None) -> None:
        self.rate = rate
        self.sent = 0
        """Number of bytes passed to the server so far."""
        self.accepted = 0
        """Number of connections accepted so far."""
        self._target = (host, port)
        self._speaks = threading.Event()
        self._speaks.set()
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def silence(self) -> None:
        """Hold back all data, in both directions."""
        self._speaks.clear()

    def speak(self) -> None:
        """Pass on data again, first the data that was held back."""
        self._speaks.set()

    def reset(self) -> None:
        """Break all connections. New connections are still accepted."""
        with self._lock:
            for each in self._open:
                with suppress(OSError):
                    each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                    each.shutdown(socket.SHUT_RDWR)
            self._open.clear()

    def close(self) -> None:
        self._listener.close()
        self.speak()
        self.reset()

    def __enter__(self) -> "Wire":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            self.accepted += 1
            threading.Thread(target=self._connect, args=(near,), daemon=True).start()

    def _connect(self, near: socket.socket) -> None:
        self._speaks.wait()
        try:
            far = socket.create_connection(self._target)
        except OSError:
            near.close()
            return
        with self._lock:
            self._open |= {near, far}
        threading.Thread(target=self._pass, args=(near, far, True), daemon=True).start()
        self._pass(far, near, False)

    def _pass(self, source: socket.socket, target: socket.socket, up: bool) -> None:
        with suppress(OSError):
            while data := source.recv(16384):
                self._speaks.wait()
                target.sendall(data)
                if up:
                    self.sent += len(data)
                    if self.rate is not None:
                        time.sleep(len(data) / self.rate)
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self._open -= {source, target}


# ---- Phases of a run

PHASES = ("connecting", "uploading", "submitting", "unrecorded", "pending", "cluster-start", "running", "ending")

_USUAL = {"slurm": PHASES, "slurm-session": PHASES[3:], "slurm-hetjob": ("cluster-start", "running")}
"""Phases that each mode is tested in by default. The modes do not differ until sbatch has been called."""

CASES = [
    pytest.param(mode, phase, marks=[] if phase in _USUAL[mode] else [pytest.mark.thorough]) for mode in MODES for phase in PHASES
]
"""All pairs of mode and phase; those that repeat another mode are marked `thorough`."""


class Held:
    """A Dagster run that is held in a phase.

    Attributes:
        process: the process of the run.
        phase: one of `PHASES`.
        let_on: lets the run continue.
        fields: arguments of `Dagster.define` for the run, without `ssh`.
        link: the network link of the run to the edge node.
    """

    def __init__(
        self, phase: str, process: "subprocess.Popen[bytes]", let_on: Callable[[], Any], fields: Any, link: Link
    ) -> None:
        self.phase = phase
        self.process = process
        self.let_on = let_on
        self.fields = fields
        self.link = link


@contextmanager
def held_in(phase: str, dagster: Dagster, mode: str, **fields: Any) -> Iterator[Held]:
    """Start a run that stops in a phase, and wait until it is there. `fields` are arguments of `Dagster.define`."""
    site = dagster.site
    with ExitStack() as stack:
        host, port = site.ssh.host, site.ssh.port
        if phase in ("submitting", "unrecorded"):
            sbatch = stack.enter_context(held_sbatch(site, "before" if phase == "submitting" else "after"))
            host, port = sbatch.host, sbatch.port
        wire = stack.enter_context(Wire(host, port, rate=200_000 if phase == "uploading" else None))
        link = stack.enter_context(Link("127.0.0.1", wire.port))
        ssh = {"host": "127.0.0.1", "port": link.port, "host_key_checking": "off", "keepalive": 1, **fields.pop("ssh", {})}
        if phase == "uploading":
            fields["arguments"] = {"extra_files": [str(big_file(dagster.home / "big", 4_000_000))]}
        if phase == "pending":
            fields["queue"] = {"extra_sbatch": ["--hold"]}
        if phase == "cluster-start":
            fields.update(queue={"mem": "2500M"}, launcher=HELD_CLUSTER.format(health_check(site)))
        if phase == "connecting":
            wire.silence()
        dagster.define(mode, **{**fields, "ssh": ssh})
        process = dagster.start()

        def reach(there: Callable[[], Any]) -> None:
            assert wait_until(lambda: process.poll() is not None or there(), 90) and process.poll() is None, dagster.log[-5000:]

        def release() -> None:
            site.sh('for job in $(squeue --me --noheader --states=PENDING --format=%A); do scontrol release "$job" || true; done')

        let_on: Callable[[], Any] = partial(let_go, site)
        if phase == "connecting":
            reach(lambda: wire.accepted)
            let_on = wire.speak
        elif phase == "uploading":
            reach(lambda: wire.sent > 600_000)
            let_on = partial(setattr, wire, "rate", None)
        elif phase in ("submitting", "unrecorded"):
            reach(lambda: is_there(site, "before" if phase == "submitting" else "after"))
            let_on = sbatch.go
        elif phase == "pending":
            reach(lambda: "submitted Slurm job" in dagster.log and site.jobs())
            let_on = release
        elif phase == "cluster-start":
            reach(lambda: is_there(site, "starting"))
            let_on = partial(site.sh, 'touch "$1/data/healthy"', site.base)
        else:
            reach(lambda: is_there(site, "up") and f"line {BEFORE - 1}" in dagster.shown())
        if phase == "ending":
            link.cut()
            let_go(site)
            reach(lambda: has_ended(site))
            let_on = link.mend
        yield Held(phase, process, let_on, fields, link)


HOLDER = pipes_script("""
import os, pathlib, time
data = pathlib.Path(os.environ["RAYSLURM_DATA_DIR"])
(data / "held").write_text("x")
while not (data / "way").exists():
    time.sleep(0.05)
pipes.report_asset_materialization(metadata={"job": os.environ["SLURM_JOB_ID"]})
""")
"""Payload that keeps a session busy until the file `way` is in the data directory."""


CARRIERS = pytest.mark.parametrize("carrier", ["auto", pytest.param("srun", marks=pytest.mark.thorough)])
"""Values of `SessionConfig.carrier`, which says how requests reach a session."""


class Queued:
    """A run whose payload waits in the queue of a warm session, because the payload of another run keeps the session busy.

    Attributes:
        process: the process of the waiting run.
        job_id: the Slurm job of the session.
    """

    def __init__(self, dagster: Dagster, holder: Running, job_id: str) -> None:
        self.process = dagster.start()
        self.job_id = job_id
        self._site = dagster.site
        self._holder = holder
        assert wait_until(lambda: len(run_dirs(self._site)) == 2 or self.process.poll() is not None, 60)
        assert self.process.poll() is None and not is_there(self._site, "ran"), dagster.log[-4000:]

    def give_way(self) -> None:
        """Make the other payload end, and check that it succeeds."""
        self._site.sh('touch "$1/data/way"', self._site.base)
        assert self._holder.result(60).metadata["job"] == self.job_id


@pytest.fixture(name="queued")
def queued_in_a_session(
    dagster: Dagster, site: Site, session_compute: Callable[..., ComputeResource], start: Callable[..., Running], script: Any
) -> Callable[[str], Queued]:
    """A function that starts a queued run and the run that it waits for, both with a given carrier."""

    def begin(carrier: str) -> Queued:
        session = {"carrier": carrier}
        holder = start(session_compute(session=session), script(HOLDER, "holder.py"))
        job_id = holder.up("held")
        dagster.define("slurm-session", session=session)
        return Queued(dagster, holder, job_id)

    return begin


def big_file(path: Path, size: int) -> Path:
    """A new file with random content, which no compression makes smaller."""
    path.write_bytes(random.Random(size).randbytes(size))
    return path


def numbers(text: str) -> list[int]:
    """The numbers of the payload's numbered lines in an output."""
    return [int(line.split()[1]) for line in text.splitlines() if line.startswith("line ")]
