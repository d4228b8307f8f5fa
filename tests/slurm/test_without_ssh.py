"""Dagster on the edge node itself, or inside of a job: `SlurmResource(ssh=None)` and the environment that runs Dagster."""

import io
import json
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import dagster_rayslurm

from ..conftest import pipes_script
from .fixtures import Site

pytestmark = pytest.mark.timeout(300)

PYTHON = "/opt/ray/bin/python"

RAYSLURM = f"{PYTHON} -m dagster_rayslurm.cli"
TOML = """
[clusters.here]
pre_deployed_env_path = "/opt/ray"
default_launcher = { kind = "ray", object_store_memory_gb = 0.1 }
slurm.queue = { partition = "compute", mem = "2500M", cpus_per_node = 2, time_limit = "00:05:00" }
"""

DEFINITIONS = """
import json, sys
import dagster as dg
from dagster_rayslurm import BashLauncher, ComputeResource, RayLauncher, RunFailure, SlurmQueueConfig, SlurmResource

failures, runs = [], []

def run(context, compute, payload, **arguments):
    try:
        completed = compute.run(context=context, payload_path=payload, **arguments)
    except RunFailure as failure:
        failures.append({"kind": failure.kind, "sentence": failure.description})
        raise
    runs.append(completed)
    return completed.get_materialize_result()

"""
REPORT = """
assets = [value for value in dict(globals()).values() if isinstance(value, dg.AssetsDefinition)]
result = dg.materialize(assets, resources={"compute": compute}, raise_on_error=False)
told = {
    event.asset_key.to_user_string(): {name: value.value for name, value in event.materialization.metadata.items()
                                       if isinstance(value.value, (str, int, float))}
    for event in result.all_events if event.is_step_materialization
}
outputs = [str(path) for completed in runs for path in completed.outputs]
print("\\nREPORT", json.dumps({"metadata": told, "failures": failures, "outputs": outputs}))
"""


@dataclass
class Report:
    """What a process of Dagster's own said of its assets, and all that it printed."""

    metadata: dict[str, dict[str, Any]]
    failures: list[dict[str, str]]
    outputs: list[str]
    stdout: str


class Host:
    """A place of the stack where Dagster runs, with this checkout's package and a home directory of its own."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.home = f"{site.base}/home"
        self.code = f"{site.base}/code"
        site.sh('mkdir -p "$1" "$2"', self.home, self.code)
        self._send(package())

    def materialize(
        self, assets: str, payloads: dict[str, str], env: dict[str, str] | None = None, python: str = PYTHON, *wrapper: str
    ) -> Report:
        """Run assets in a process there.

        Args:
            assets: Python that defines assets and `compute`; `run` is there for them.
            payloads: scripts beside it.
            env: variables of the process.
            python: what runs it.
            wrapper: a command before that.
        """
        files = {**payloads, "definitions.py": DEFINITIONS + assets + REPORT}
        self._send(archive({name: text.encode() for name, text in files.items()}))
        variables = {
            "HOME": self.home,
            "PYTHONPATH": self.code,
            "PYTHONDONTWRITEBYTECODE": "1",
            "DAGSTER_DISABLE_TELEMETRY": "yes",
            "DAGSTER_TOKEN": "t0ken-of-dagster",
            "DATABASE_PASSWORD": "pa55word-of-dagster",
            **(env or {}),
        }
        settings = [word for name, value in variables.items() for word in ("--env", f"{name}={value}")]
        command = ["docker", "exec", "--user", "dev", "--workdir", self.code, *settings, self.site.stack.container("edge")]
        done = subprocess.run([*command, *wrapper, python, "definitions.py"], capture_output=True, text=True)
        said, mark, report = done.stdout.partition("\nREPORT ")
        assert done.returncode == 0 and mark, done.stdout + done.stderr
        print(done.stderr)  # Shown if the test fails.
        return Report(**json.loads(report), stdout=said)

    def rayslurm(self, script: str) -> str:
        """What a shell script prints there, in a directory with a `rayslurm.toml` for the Slurm of that machine.

        `$R` is the command `rayslurm`.
        """
        self._send(archive({"rayslurm.toml": TOML.encode()}))
        variables = {"HOME": self.home, "PYTHONPATH": self.code, "PYTHONDONTWRITEBYTECODE": "1", "R": RAYSLURM}
        settings = [word for name, value in variables.items() for word in ("--env", f"{name}={value}")]
        command = ["docker", "exec", "--user", "dev", "--workdir", self.code, *settings, self.site.stack.container("edge")]
        done = subprocess.run([*command, "bash", "-ec", script], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def handed_over(self, job_id: str) -> dict[str, str]:
        """The environment that sbatch gave to slurmctld."""
        show = 'cat /var/lib/slurm/slurmctld/hash.*/job."$1"/environment | tr "\\000" "\\n"'
        lines = self.site.stack.exec("slurmctld", ["sh", "-c", show, "sh", job_id]).splitlines()
        return {name: value for name, equals, value in (line.partition("=") for line in lines) if equals}

    def _send(self, tar: bytes) -> None:
        container = self.site.stack.container("edge")
        command = ["docker", "exec", "--interactive", "--user", "dev", container, "tar", "-x", "-C", self.code]
        subprocess.run(command, input=tar, check=True, capture_output=True)


def package() -> bytes:
    """A tar of the package as it is here."""
    source = Path(dagster_rayslurm.__file__).parent
    files = sorted(path for path in source.rglob("*") if path.suffix in (".py", ".typed", ".sh"))
    return archive({str(path.relative_to(source.parent)): path.read_bytes() for path in files})


def archive(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(content), 0o644
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


@pytest.fixture
def host(site: Site) -> Host:
    return Host(site)


PLAIN = """
@dg.asset
def plain(context: dg.AssetExecutionContext, compute: ComputeResource):
    return run(context, compute, "plain.py", extra_env={"VALUE": "a b"}, secret_env={"SECRET": "s3cret-value"}, outputs=["*.txt"])

compute = ComputeResource(
    mode="slurm",
    slurm=SlurmResource(ssh=None, queue=SlurmQueueConfig(partition="compute", cpus_per_node=1, time_limit="5"), poll_interval=1),
    default_launcher=BashLauncher(grace_period=3),
)
"""
PLAIN_PAYLOAD = pipes_script("""
import os, sys, pathlib, shutil
print("on stdout é", os.uname().nodename)
pathlib.Path("made.txt").write_text("made")
pipes.report_asset_materialization(metadata={
    "job": os.environ["SLURM_JOB_ID"], "tasks": os.environ["SLURM_NTASKS"], "python": sys.executable,
    "value": os.environ["VALUE"], "secret": os.environ["SECRET"][::-1], "data": os.environ["RAYSLURM_DATA_DIR"],
    "srun": shutil.which("srun"), "names": " ".join(sorted(os.environ)),
})
""")


def is_clean(environment: dict[str, str]) -> bool:
    """Whether nothing of Dagster's own environment is in that of a job, but what says who and where its user is."""
    secrets = ("s3cret", "t0ken", "pa55word")
    return not [name for name in environment if name.startswith(("DAGSTER", "PYTHON", "DATABASE", "RAYSLURM"))] and not any(
        secret in value for secret in secrets for value in environment.values()
    )


def test_payloads_of_both_launchers(host: Host) -> None:
    """With one base directory for what is on the cluster and what is here, as the defaults have it."""
    ray = """
@dg.asset(deps=[plain])
def spread(context: dg.AssetExecutionContext, compute: ComputeResource):
    queue = SlurmQueueConfig(partition="compute", num_nodes=2, mem="2500M", cpus_per_node=2, time_limit="00:05:00")
    launcher = RayLauncher(dashboard=False, object_store_memory_gb=0.1, startup_timeout=120)
    return run(context, compute, "spread.py", queue=queue, launcher=launcher)
"""
    payload = pipes_script("""
    import ray, socket
    ray.init()
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On

    @ray.remote(num_cpus=1)
    def look():
        return socket.gethostname()

    seen = ray.get([look.options(scheduling_strategy=On(node["NodeID"], soft=False)).remote() for node in ray.nodes()])
    pipes.report_asset_materialization(metadata={"seen": " ".join(sorted(seen)), "CPUs": ray.cluster_resources()["CPU"]})
    """)
    report = host.materialize(PLAIN + ray, {"plain.py": PLAIN_PAYLOAD, "spread.py": payload})
    assert not report.failures
    plain, spread = report.metadata["plain"], report.metadata["spread"]
    base = f"{host.home}/.dagster_rayslurm"
    assert plain["python"] == PYTHON and plain["value"] == "a b" and plain["secret"] == "eulav-terc3s"
    assert plain["job"] == plain["Slurm job ID"] and plain["Slurm partition"] == "compute" and plain["data"] == f"{base}/data"
    assert f"on stdout é {plain['Slurm nodes']}" in report.stdout.splitlines()
    assert [host.site.sh('cat "$1"', path) for path in report.outputs] == ["made"]
    assert spread["seen"] == "c1 c2" and spread["CPUs"] == 4 and spread["Slurm nodes"] == "c1, c2"
    for metadata in (plain, spread):
        environment = host.handed_over(str(metadata["Slurm job ID"]))
        assert is_clean(environment) and environment["HOME"] == host.home, environment
    assert not [name for name in plain["names"].split() if name in ("DAGSTER_TOKEN", "DATABASE_PASSWORD")]
    assert host.site.sh('ls "$1/runs"', base) == ""


def test_dagster_runs_in_a_job_itself(host: Host) -> None:
    """What Slurm tells that job is nothing to the jobs that it submits, though srun would take it for options."""
    outer = ["--partition=gpu", "--ntasks=1", "--cpus-per-task=3", "--gpus-per-node=1", "--mem=1500M", "--chdir", host.code]
    # As sites have it: a directory that is there for this job alone.
    env = {"TMPDIR": "/tmp/of-that-job"}
    report = host.materialize(PLAIN, {"plain.py": PLAIN_PAYLOAD}, env, PYTHON, "srun", "--quiet", *outer)
    assert not report.failures
    plain = report.metadata["plain"]
    assert plain["job"] == plain["Slurm job ID"] and plain["Slurm nodes"] in ("c1", "c2") and plain["tasks"] == "1"
    environment = host.handed_over(plain["job"])
    assert is_clean(environment) and "TMPDIR" not in environment
    assert environment["SLURM_CPUS_PER_TASK"] == "1" and environment["SLURM_NTASKS_PER_NODE"] == "1"
    outside = (
        "SLURM_JOB_ID",
        "SLURM_STEP_ID",
        "SLURM_PROCID",
        "SLURM_JOB_PARTITION",
        "SLURM_MEM_PER_NODE",
        "CUDA_VISIBLE_DEVICES",
    )
    assert not [name for name in outside if name in environment], environment


def test_slurm_where_a_login_shell_finds_it(host: Host) -> None:
    """Slurm's programs are on no PATH but that of the user's `.profile`, which prints something as well."""
    bare, slurm = f"{host.site.base}/bare", f"{host.site.base}/slurm's"
    host.site.sh(
        """
        mkdir "$1" "$2" && ln -s /usr/bin/* "$1"
        for name in sbatch squeue scancel scontrol sinfo sacct srun; do mv "$1/$name" "$2/"; done
        printf '%s\\n' "echo welcome to /usr/bin/sbatch" "export PATH=\\"$1:$2\\"" >"$3/.profile"
        """,
        bare,
        slurm,
        host.home,
    )
    report = host.materialize(PLAIN, {"plain.py": PLAIN_PAYLOAD}, {"PATH": bare})
    assert not report.failures
    plain = report.metadata["plain"]
    assert host.handed_over(plain["job"])["PATH"] == f"{bare}:{slurm}" and plain["srun"] == f"{slurm}/srun"
    host.site.sh('rm "$1/.profile"; printf "PATH=%s\\n" "$2" >"$1/.profile"', host.home, bare)
    report = host.materialize(PLAIN, {"plain.py": PLAIN_PAYLOAD}, {"PATH": bare})
    assert report.failures[0]["kind"] == "submission"
    assert "sbatch is not found on this machine" in report.failures[0]["sentence"]


def test_an_environment_that_the_nodes_do_not_see(host: Host) -> None:
    """The Python that runs Dagster is on a disk of the edge's own."""
    prefix = f"/tmp/{Path(host.site.base).name}"
    host.site.sh(
        'mkdir -p "$1/bin" && cp /opt/ray/pyvenv.cfg "$1/" && ln -s /opt/ray/lib "$1/lib" && ln -s "$2" "$1/bin/python"',
        prefix,
        PYTHON,
    )
    try:
        report = host.materialize(PLAIN, {"plain.py": PLAIN_PAYLOAD}, python=f"{prefix}/bin/python")
    finally:
        host.site.sh('rm -r -- "$1"', prefix)
    (failure,) = report.failures
    assert failure["kind"] == "environment"
    assert f"cannot start {prefix}/bin/python" in failure["sentence"] and "the compute nodes see" in failure["sentence"]


TERMINAL = """
$R session start --name work --json
$R attach work -- python -c "import ray; ray.init(logging_level='error'); print('NODES', len(ray.nodes()))"
$R dashboard work >url 2>said & pid=$!
for _ in $(seq 100); do [ -s url ] && break; sleep 0.1; done
python3 -c "import urllib.request; print('VERSION', urllib.request.urlopen(open('url').read().strip() + 'api/version').read())"
$R session stop work
wait $pid; echo "DASHBOARD $? $(grep -c 'has ended' said)"
$R doctor --json >doctor.json; echo DOCTOR $?
"""


def test_the_terminal_of_the_edge_node(host: Host) -> None:
    """A session is a job of Slurm there too: it is stopped as one, entered by srun, and its dashboard is served."""
    said = host.rayslurm(TERMINAL)
    assert "NODES 1" in said and "ray_version" in said and "DASHBOARD 0 1" in said and "DOCTOR 0" in said, said
    assert "ended the session work-" in said and not host.site.jobs(), said
