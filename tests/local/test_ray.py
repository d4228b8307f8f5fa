"""Local mode with a real Ray cluster: what the payload gets, what is lost and said, what is left."""

import contextlib
import os
import socket
import subprocess
import sys
import tarfile
import tempfile
import textwrap
import time
from pathlib import Path
from typing import Any

import dagster as dg
import psutil
import pytest

from dagster_rayslurm import ComputeResource, SessionConfig
from dagster_rayslurm.backends.base import Layout
from dagster_rayslurm.backends.sessions.local import list_sessions

from ..conftest import marked_processes, pipes_script, run_asset, small_ray, wait_until

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

USES_RAY = "import sys\npreloaded = 'ray' in sys.modules\n" + pipes_script("""
    import glob, json, os, psutil, ray, subprocess, sys, time, urllib.request
    ray.init(address="auto")
    @ray.remote
    def look(name):
        return os.environ.get(name)
    tokenless = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    code = "import ray; ray.init(); print('IN')"
    intruder = subprocess.run([sys.executable, "-c", code], env=tokenless, capture_output=True, text=True, timeout=60)
    listing = " ".join(word for each in psutil.process_iter(["cmdline"]) for word in each.info["cmdline"] or ())
    names = ["FOO", "TOKEN", "RAYSLURM_DATA_DIR", "RAYSLURM_RUN_DIR", "DAGSTER_PIPES_CONTEXT"]
    seen = dict(zip(names, ray.get([look.remote(name) for name in names])))
    targets, deadline = sys.argv[1] + "/*.json", time.monotonic() + 30
    while not glob.glob(targets) and time.monotonic() < deadline:
        time.sleep(0.1)
    [group] = json.load(open(glob.glob(targets)[0]))
    pages = [urllib.request.urlopen("http://%s/metrics" % each, timeout=10).read().decode() for each in group["targets"]]
    pipes.report_asset_materialization(metadata={
        "metrics": any("ray_node_cpu_count" in page for page in pages), "labels": {"raw_value": group["labels"], "type": "json"},
        "seen": {"raw_value": seen, "type": "json"}, "address": os.environ["RAY_ADDRESS"], "token": os.environ["TOKEN"],
        "cpus": ray.cluster_resources()["CPU"], "token_path": os.environ["RAY_AUTH_TOKEN_PATH"],
        "resources": {"raw_value": ray.cluster_resources(), "type": "json"},
        "intruder is in": "IN" in intruder.stdout, "intruder said": intruder.stderr[-2000:],
        "preloaded": preloaded, "token in argv": open(os.environ["RAY_AUTH_TOKEN_PATH"]).read() in listing,
    })
""")


@pytest.fixture
def ray_compute(base: Path) -> ComputeResource:
    return ComputeResource(local_base=str(base), default_launcher=small_ray())


DEEP = """
import ray
from dagster_pipes import open_dagster_pipes

@ray.remote
def inner():
    return {}["momentum"]

@ray.remote
def outer():
    return ray.get(inner.remote())

if __name__ == "__main__":
    with open_dagster_pipes():
        ray.get(outer.remote())
"""


def test_an_exception_deep_in_ray_is_told_by_its_cause(ray_compute: ComputeResource, script: Any) -> None:
    ran = run_asset(ray_compute, script(DEEP, "deep.py"))
    said = ran.failure.description
    assert said == f"the payload raised KeyError: 'momentum' (deep.py:7, in inner, on {socket.gethostname()})"
    with tarfile.open(str(ran.failure.metadata["Ray logs"].value)) as archive:
        assert any(name.startswith("ray-logs/worker-") for name in archive.getnames())
    assert "momentum" in ran.failure.metadata["Last output"].value and "\x1b" not in ran.failure.metadata["Last output"].value


def test_a_payload_has_its_own_cluster(ray_compute: ComputeResource, script: Any, base: Path) -> None:
    metrics = base / "for" / "prometheus"
    ran = run_asset(
        ray_compute,
        ["python", str(script(USES_RAY)), str(metrics)],
        launcher=small_ray(
            num_cpus_per_node=1,
            resources={"odd name; $x": 2.0},
            labels={"colour": "blue"},
            dashboard=True,
            preload=["ray"],
            metrics_dir=str(metrics),
        ),
        extra_env={"FOO": "bär\n'2'"},
        secret_env={"TOKEN": "s3cret"},
    )
    metadata = ran.metadata
    assert metadata["seen"] == {
        "FOO": "bär\n'2'",
        "TOKEN": None,
        "RAYSLURM_DATA_DIR": str(base / "data"),
        "RAYSLURM_RUN_DIR": None,
        "DAGSTER_PIPES_CONTEXT": None,
    }
    assert metadata["metrics"] and metadata["labels"]["ray_cluster"] == metadata["Ray cluster ID"]
    assert wait_until(lambda: not list(metrics.iterdir())), "Prometheus would go on asking a cluster that has ended"
    assert metadata["token"] == "s3cret" and metadata["cpus"] == 1 and metadata["resources"]["odd name; $x"] == 2.0
    # Another process of this user without the token is refused by the cluster.
    assert metadata["intruder is in"] is False and "uthentication" in metadata["intruder said"]
    assert metadata["token in argv"] is False
    assert metadata["preloaded"] is False, "nothing is, where nothing stays warm"
    assert wait_until(lambda: not os.path.exists(metadata["token_path"]))  # The teardown goes on after the result.
    assert not list(Path(tempfile.gettempdir()).glob("pymp-*")), "of the dashboard, which is killed"
    assert metadata["Ray version"] and metadata["Ray bring-up (s)"] > 0.5 and metadata["Ray cluster was warm"] is False
    assert metadata["Ray dashboard"] == "was there until the run ended"
    table = metadata["Nodes"] if isinstance(metadata["Nodes"], list) else metadata["Nodes"].records
    assert len(table) == 1
    assert metadata["Peak memory (MiB)"] > 50 and metadata["CPU time (s)"] > 0.5 and "svg+xml" in metadata["Usage"]


# On Slurm these two are killed in any case.
@pytest.mark.parametrize(
    "victim", ["ray-node", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("gcs_server", "raylet"))]
)
def test_a_lost_head_ends_the_payload_at_once(victim: str, ray_compute: ComputeResource, script: Any) -> None:
    payload = script(
        pipes_script(f"""
        import os, ray, signal, time
        ray.init()
        runtime = os.getppid()
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                words = open(f"/proc/{{pid}}/cmdline").read().split("\\0")
                mine = open(f"/proc/{{pid}}/environ").read()
            except OSError:
                continue
            if os.environ["RAY_AUTH_TOKEN_PATH"] in mine and any({victim!r} in word for word in words[:4]):
                with open("killed-at", "w") as file:  # Before: what follows may end this process at once.
                    file.write(str(time.time()))
                os.kill(int(pid), signal.SIGKILL)
                break
        else:
            raise LookupError("no victim")
        time.sleep(120)
        """)
    )
    failure = run_asset(ray_compute, payload).failure
    ended = time.time()
    assert failure.kind == "cluster-lost" and "was lost while the payload ran" in (failure.description or "")
    killed = float((Path(failure.metadata["Run directory"].value) / "work" / "killed-at").read_text())
    assert ended - killed < 30
    assert any(key.startswith("Log: ") for key in failure.metadata)


def test_ray_that_is_not_installed(base: Path, tmp_path: Path) -> None:
    prefix = tmp_path / "prefix"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(prefix)], check=True)
    compute = ComputeResource(local_base=str(base), pre_deployed_env_path=str(prefix), default_launcher=small_ray())
    failure = run_asset(compute, "python -V", uses_pipes=False).failure
    said = failure.description or ""
    assert failure.kind == "environment" and f"Ray cannot be imported by {prefix}/bin/python" in said
    assert f"; install it there: {prefix}/bin/python -m pip install 'ray[default]>=2.52'" in said


def test_ray_of_another_version(ray_compute: ComputeResource) -> None:
    failure = run_asset(ray_compute, "python -V", uses_pipes=False, launcher=small_ray(ray_version="2.59.9")).failure
    assert failure.kind == "environment" and "ray_version asks for 2.59.9" in (failure.description or "")


def test_ray_that_is_not_up_by_the_deadline(ray_compute: ComputeResource) -> None:
    failure = run_asset(ray_compute, "python -V", uses_pipes=False, launcher=small_ray(startup_timeout=1)).failure
    assert failure.kind == "cluster-start" and "within startup_timeout=1 s" in (failure.description or "")


@pytest.mark.thorough
def test_agents_that_are_slower_than_ray_allows(
    ray_compute: ComputeResource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a file system that reads Ray's files for the first time: a raylet gives its agents 15 s."""
    (tmp_path / "sitecustomize.py").write_text(
        textwrap.dedent(f"""
            import os, sys, time
            if any(word.endswith("dashboard/agent.py") for word in sys.orig_argv):
                try:
                    os.mkdir({str(tmp_path / "slow")!r})
                except FileExistsError:
                    pass
                else:
                    time.sleep(40)
        """)
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with dg.instance_for_test(temp_dir=str(tmp_path)) as instance:
        ran = run_asset(ray_compute, "python -V", uses_pipes=False, instance=instance)
        messages = [entry.user_message for entry in instance.all_logs(ran.result.run_id)]
    # On a busy machine they may be slow by themselves, too.
    assert not ran.failures and 1 <= sum("or Ray's agents were slow; trying Ray on node" in message for message in messages) <= 2


def test_ray_that_refuses_its_arguments(ray_compute: ComputeResource) -> None:
    failure = run_asset(ray_compute, "python -V", uses_pipes=False, launcher=small_ray(ray_args=["--no-such-option"])).failure
    said = "ended with exit code 2 before Ray was up: Error: No such option '--no-such-option'."
    assert failure.kind == "cluster-start" and said in (failure.description or "")
    assert "no-such-option" in failure.metadata["Log: ray start"].value


def test_a_failed_health_check_names_the_node(ray_compute: ComputeResource) -> None:
    launcher = small_ray(health_check="echo 'no scratch disk' && exit 7")
    failure = run_asset(ray_compute, "python -V", uses_pipes=False, launcher=launcher).failure
    assert failure.kind == "cluster-start" and "exit code 7" in (failure.description or "")
    assert "no scratch disk" in (failure.description or "") and os.uname().nodename in (failure.description or "")


def warm(base: Path, **session: Any) -> ComputeResource:
    config = SessionConfig(**{"idle_timeout": 300, **session})
    return ComputeResource(local_base=str(base), default_launcher=small_ray(), enable_cluster_reuse=True, session=config)


WHICH = pipes_script("""
    import os, ray
    ray.init()
    @ray.remote
    def look():
        return os.environ.get("FOO"), os.environ.get("BAR")
    pipes.report_asset_materialization(metadata={"address": os.environ["RAY_ADDRESS"], "seen": list(ray.get(look.remote()))})
""")


def test_a_warm_cluster_serves_its_runs_and_ends_when_told(base: Path, script: Any) -> None:
    compute = warm(base)
    first = run_asset(compute, script(WHICH), extra_env={"FOO": "1"})
    second = run_asset(compute, script(WHICH), extra_env={"BAR": "2"})
    assert first.metadata["address"] == second.metadata["address"]
    assert (first.metadata["seen"], second.metadata["seen"]) == (["1", None], [None, "2"])
    assert second.metadata["Ray cluster was warm"] and first.metadata["Ray cluster was warm"] is False
    cluster_id = second.completed[0].cluster_id
    assert cluster_id == first.completed[0].cluster_id

    crash = script("import ray, os; ray.init(); os.kill(os.getpid(), 9)", "crash.py")
    assert "SIGKILL" in (run_asset(compute, crash).failure.description or "")
    third = run_asset(compute, script(WHICH))
    assert third.completed[0].cluster_id == cluster_id and third.metadata["Ray cluster was warm"]
    assert compute.cleanup_cluster("local-no-such") is False
    assert compute.cleanup_cluster(cluster_id) is True


@pytest.mark.thorough
def test_two_warm_clusters_on_one_node(base: Path, script: Any) -> None:
    """No session harms the other. One that died is replaced."""
    compute, other = warm(base / "one"), warm(base / "two")
    first, beside = run_asset(compute, script(WHICH)), run_asset(other, script(WHICH))
    cluster_id = first.completed[0].cluster_id
    assert beside.metadata["address"] != first.metadata["address"]
    assert compute.cleanup_cluster(str(cluster_id)) is True
    again = run_asset(other, script(WHICH))
    assert again.metadata["address"] == beside.metadata["address"] and again.metadata["Ray cluster was warm"]
    for process in marked_processes(os.environ["PYTEST_OF_RAYSLURM"]):
        with contextlib.suppress(psutil.NoSuchProcess):  # It may end with one of the others.
            process.kill()
    replaced = run_asset(other, script(WHICH)).completed[0].cluster_id
    assert len({cluster_id, again.completed[0].cluster_id, replaced}) == 3 and other.cleanup_cluster(replaced)


def test_a_warm_cluster_is_shared_between_processes_and_ends_itself_when_idle(base: Path, script: Any, tmp_path: Path) -> None:
    """Three processes ask at once; one cluster is started; all payloads run, one after the other."""
    payload = script(WHICH)
    program = script(
        f"""
        import dagster as dg
        from dagster_rayslurm import ComputeResource, RayLauncher, SessionConfig

        @dg.asset
        def one(context: dg.AssetExecutionContext, compute: ComputeResource):
            return compute.run(context=context, payload_path={str(payload)!r}).get_materialize_result()

        compute = ComputeResource(
            local_base={str(base)!r}, enable_cluster_reuse=True, session=SessionConfig(idle_timeout=6),
            default_launcher=RayLauncher(object_store_memory_gb=0.1, dashboard=False))
        result = dg.materialize([one], resources={{"compute": compute}})
        metadata = result.asset_materializations_for_node("one")[0].metadata
        print("CLUSTER", metadata["Ray cluster ID"].value, metadata["address"].value)
        """,
        "program.py",
    )
    errors = [tmp_path / f"stderr.{number}" for number in range(3)]
    started = []
    for place in errors:
        with place.open("w") as stderr:
            started.append(subprocess.Popen([sys.executable, str(program)], stdout=subprocess.PIPE, stderr=stderr, text=True))
    said = {line for process in started for line in process.communicate()[0].splitlines() if line.startswith("CLUSTER")}
    for process, place in zip(started, errors, strict=True):
        assert process.returncode == 0, place.read_text()
    assert len(said) == 1, said
    mark = os.environ["PYTEST_OF_RAYSLURM"]
    assert marked_processes(mark)  # It is still warm,
    assert wait_until(lambda: not marked_processes(mark))  # until it was idle.
    assert list_sessions(Layout(base)) == []


@pytest.mark.thorough
def test_another_footprint_gets_another_session_or_an_error(base: Path, script: Any) -> None:
    compute = warm(base, name="shared")
    first = run_asset(compute, script(WHICH))
    smaller = run_asset(compute, script(WHICH), launcher=small_ray(num_cpus_per_node=1))
    other = run_asset(compute, script(WHICH), launcher=small_ray(resources={"x": 1}))
    assert first.completed[0].cluster_id == smaller.completed[0].cluster_id != other.completed[0].cluster_id
    strict = warm(base, name="shared", on_misfit="error")
    failure = run_asset(strict, script(WHICH), launcher=small_ray(resources={"x": 2})).failure
    assert failure.kind == "configuration" and "RayLauncher.resources={'x': 2.0} is not what" in (failure.description or "")
    # A resource with another launcher shares the session of that name, as far as its payloads fit.
    changed = ComputeResource(**{**dict(strict), "default_launcher": small_ray(labels={"a": "b"})})
    failure = run_asset(changed, script(WHICH)).failure
    assert failure.kind == "configuration" and "RayLauncher.labels={'a': 'b'} is not what" in (failure.description or "")
    for ran in (first, other):
        assert compute.cleanup_cluster(ran.completed[0].cluster_id)


def test_a_payload_fails_that_would_wait_forever(base: Path) -> None:
    compute = ComputeResource(local_base=str(base), default_launcher=small_ray(), on_infeasible="fail")
    body = (
        "import ray; ray.init(); task = ray.remote(resources={'disk': 1})(lambda: 1); ray.get([task.remote() for _ in range(3)])"
    )
    failure = run_asset(compute, ["python", "-c", body], uses_pipes=False).failure
    assert failure.kind == "configuration" and not failure.allow_retries
    said = "the payload waits for what its Ray cluster can never grant: 3 tasks or actors wait for CPU: 1, disk: 1 each"
    assert str(failure.description).startswith(f"{said}, and the cluster has no disk (")
