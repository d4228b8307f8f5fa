"""Ray's private APIs against the installed Ray: these tests fail when a release moves or changes one of them."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dagster_rayslurm.runtime.protocol.spec import JOB_MARK
from dagster_rayslurm.runtime.ray import internals
from dagster_rayslurm.runtime.ray.node_main import refuse_dashboard

from ..conftest import wait_until

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.filterwarnings("ignore")
PORT = "--ray-client-server-port=23456"


# ---- Without a cluster


def test_the_installed_version_is_read_without_importing_ray() -> None:
    code = (
        "import sys; from dagster_rayslurm.runtime.ray import internals; "
        "print(internals.installed_version(), 'ray' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True, timeout=60)
    assert done.stdout.split() == [ray.__version__, "False"]


@pytest.mark.parametrize("text", ["", "version = 3\n", None])
def test_a_version_that_cannot_be_read_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None) -> None:
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "__init__.py").write_text("raise AssertionError('imported')")
    if text is not None:
        (tmp_path / "ray" / "_version.py").write_text(text)
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert internals.installed_version() is None


def test_the_raylet_has_the_options_that_are_set() -> None:
    raylet = (Path(ray.__file__).parent / "core" / "src" / "ray" / "raylet" / "raylet").read_bytes()
    for option in [*internals.RAYLET_ENVIRON, internals.PRESTART_AT_FIRST_DRIVER]:
        assert option[len("RAY_") :].encode() in raylet, option


def test_the_dashboard_tells_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    utils = importlib.import_module("ray._private.utils")
    assert callable(utils.get_dashboard_dependency_error)
    wanted = ["start", "--include-dashboard=true"]
    monkeypatch.setattr(utils, "get_dashboard_dependency_error", lambda: ImportError("No module named 'aiohttp'"))
    problem = refuse_dashboard(wanted)
    assert problem is not None and "aiohttp" in problem and "RayLauncher(dashboard=False)" in problem
    assert refuse_dashboard(["start", "--include-dashboard=false"]) is None
    monkeypatch.setattr(utils, "get_dashboard_dependency_error", lambda: None)
    assert refuse_dashboard(wanted) is None


def test_the_ray_client_server_is_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    scripts = importlib.import_module("ray.scripts.scripts")
    name = "get_ray_client_dependency_error"
    assert inspect.signature(getattr(scripts, name)).parameters == {}
    monkeypatch.setattr(scripts, name, lambda: None)
    # `ray symmetric-run` starts it in another process: it must not take the default port, which all clusters share.
    assert internals.disable_client_server(["symmetric-run", PORT]) == ["symmetric-run", PORT]
    assert internals.disable_client_server(["start", "--head", PORT]) == ["start", "--head"]
    assert getattr(scripts, name)() is not None
    monkeypatch.setattr(scripts, name, lambda: "no grpc")  # Then Ray refuses the option.
    assert internals.disable_client_server(["symmetric-run", PORT]) == ["symmetric-run"]


def test_the_dashboard_gets_a_tmpdir_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    services, constants = (importlib.import_module("ray._private." + name) for name in ("services", "ray_constants"))
    parameters = list(inspect.signature(services.start_ray_process).parameters)
    assert parameters[:2] == ["command", "process_type"] and "env_updates" in parameters
    started: list[tuple[Any, ...]] = []
    monkeypatch.setattr(services, "start_ray_process", lambda *args, **options: started.append((*args, options)))
    internals.move_dashboard_files("/tmp/r")
    services.start_ray_process(["x"], constants.PROCESS_TYPE_DASHBOARD, env_updates={"A": "1"})
    services.start_ray_process(["y"], constants.PROCESS_TYPE_RAYLET)
    assert started == [
        (["x"], constants.PROCESS_TYPE_DASHBOARD, {"env_updates": {"A": "1", "TMPDIR": "/tmp/r"}}),
        (["y"], constants.PROCESS_TYPE_RAYLET, {}),
    ]


def test_the_process_of_the_dashboard_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    node = importlib.import_module("ray._private.node").Node
    parameters = inspect.signature(node.start_api_server).parameters
    assert set(parameters) == {"self", "include_dashboard", "raise_on_failure"}
    monkeypatch.setattr(node, "start_api_server", node.start_api_server)
    internals.skip_dashboard()
    assert node.start_api_server(None, include_dashboard=False, raise_on_failure=False) is None


def test_a_worker_can_be_told_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    node = importlib.import_module("ray._private.node")
    name = "get_all_node_info_until_retrieved"
    assert name in inspect.getsource(node.Node), "Ray asks for the head by another function"
    monkeypatch.setattr(node, name, getattr(node, name))
    head = SimpleNamespace(state=0, temp_dir="/tmp/r", session_dir="/tmp/r/session")
    internals.assume_head(head)
    assert getattr(node, name)("any", timeout=1) == [head]


def test_what_preload_processes_use_of_ray() -> None:
    """They cannot import `internals`; see its docstring."""
    worker, node = (importlib.import_module("ray._private." + name) for name in ("worker", "node"))
    assert hasattr(worker, "_global_node") and callable(node.Node.get_logs_dir_path)
    assert "time.sleep(0.5)" in inspect.getsource(worker.shutdown), "the preloaded driver need not avoid Ray's sleep any more"
    for name in ("ray._common.pydantic_compat", "ray._private.arrow_serialization", "ray.dag.compiled_dag_node"):
        assert importlib.util.find_spec(name) is not None


# ---- With a small cluster

DRIVER = f"""
import os, sys, tempfile
import ray
from ray.util.placement_group import placement_group
context = ray.init(
    num_cpus=1, object_store_memory=100 * 2**20, include_dashboard=False, _temp_dir=sys.argv[1], namespace="mine",
    job_config=ray.job_config.JobConfig(metadata={{{JOB_MARK!r}: "nonce"}}),
)
@ray.remote(num_cpus=0)
class Model:
    def ready(self): return True
ray.get(Model.options(name="model", lifetime="detached").remote().ready.remote())
ray.get(placement_group([{{"CPU": 0.5}}], lifetime="detached", name="shelf").ready())
pending = ray.remote(lambda: None).options(resources={{"disk": 2}}).remote()
print(context.address_info["gcs_address"], flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def gcs() -> Iterator[str]:
    """The GCS of a cluster with a detached actor, a placement group and a task that no node can run."""
    directory = tempfile.mkdtemp(prefix="rs-")  # Ray's socket paths are short.
    env = {**os.environ, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    command = [sys.executable, "-c", DRIVER, directory]
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None and driver.stdin is not None
        try:
            yield driver.stdout.readline().strip()
        finally:
            driver.stdin.close()
            driver.wait(60)
            shutil.rmtree(directory, ignore_errors=True)


@pytest.mark.ray
def test_the_node_table(gcs: str) -> None:
    [node] = internals.node_table(internals.connect_gcs(gcs)).values()
    assert (node["alive"], node["head"], node["resources"]["CPU"], node["component"]) == (True, True, 1.0, None)
    assert node["address"] == gcs.rpartition(":")[0] and node["hostname"]


@pytest.mark.ray
def test_the_head_is_published_through_the_gcs(gcs: str) -> None:
    client = internals.connect_gcs(gcs)
    assert internals.published_head(client) is None
    internals.publish_head(client, "/tmp/elsewhere", dashboard=True)
    head = internals.published_head(client)
    assert head is not None and head.temp_dir == "/tmp/elsewhere" and head.session_dir.startswith("/tmp/elsewhere/session_")
    constants = importlib.import_module("ray._private.ray_constants")
    internals.publish_head(client, "/tmp/elsewhere", dashboard=False)
    key, namespace = constants.DASHBOARD_ADDRESS.encode(), constants.KV_NAMESPACE_DASHBOARD
    assert client.internal_kv_get(key, namespace) is not None  # It is not overwritten.


@pytest.mark.ray
def test_demand_that_no_node_can_grant(gcs: str) -> None:
    client = internals.connect_gcs(gcs)
    [node] = internals.node_table(client).values()
    said = wait_until(lambda: internals.unschedulable(client), 60)
    [sentence] = said.values()
    assert f"waits for CPU: 1, disk: 2, and the cluster has no disk ({node['hostname']} has CPU: 1, GPU: 0, disk: 0)" in sentence


@pytest.mark.ray
def test_living_things(gcs: str) -> None:
    tables = internals.living_things(internals.connect_state(gcs))
    [(job, nonce)] = tables["jobs"].items()
    assert nonce == "nonce" and tables["total"]["CPU"] == 1.0 and tables["available"]["CPU"] == 0.5
    actor, group = tables["living"]
    assert [actor[name] for name in ("kind", "job", "name", "namespace", "class")] == ["actor", job, "model", "mine", "Model"]
    assert (group["kind"], group["job"], group["title"]) == ("group", job, "'shelf' (namespace 'mine')")


@pytest.mark.ray
def test_workers_can_be_started(gcs: str) -> None:
    assert internals.can_start_workers()
    internals.start_workers(internals.connect_raylet(gcs), 1)
