"""Tests: a node has a full disk, lost a GPU or has a wrong clock. It is named and excluded, and the run goes elsewhere."""

import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dagster_rayslurm import ComputeResource, HetComponent, SlurmQueueConfig
from stack.container import IMAGE

from ..conftest import pipes_script, run_asset, small_disk, small_ray
from ..slurm.container import MOUNTS, prefix_inside
from ..slurm.fixtures import Site
from .mounts import shown
from .test_clocks import off_by

pytestmark = pytest.mark.timeout(180)

Make = Callable[..., ComputeResource]
WHERE = pipes_script("""
import os
pipes.report_asset_materialization(metadata={"node": os.environ["SLURMD_NODENAME"]})
""")
AGAIN = {"on_unhealthy": "exclude-and-retry"}
ON_GPUS = {"partition": "gpu", "gpus_per_node": 2}
SMI = """cat >/opt/ray/bin/nvidia-smi <<'E'
#!/bin/sh
case "$*" in
-L) for i in {gpus}; do echo "GPU $i: Fake (UUID: GPU-$i)"; done;;
*uncorrected*) for i in {gpus}; do echo "$i, {errors}"; done;;
*remapped*) for i in {gpus}; do echo "$i, 0"; done;;
*) exit 1;;
esac
E
chmod 755 /opt/ray/bin/nvidia-smi
ln -sf /opt/ray/bin/nvidia-smi /usr/local/bin/"""
"""Installs a program that lists GPUs, for the fake ones of the stack have no driver. Containers see it in /opt/ray."""


def remembered(site: Site) -> dict[str, str]:
    listed = site.sh('cd "$1/unhealthy" 2>/dev/null && cat * || true', site.base)
    entries = [json.loads(line) for line in listed.replace("}{", "}\n{").splitlines()]
    return {each["node"]: f"{each['check']}: {each['found']}" for each in entries}


@contextmanager
def filled(site: Site, service: str, path: Path, target: str, left: int) -> Iterator[None]:
    """Mounts a disk of 8 MiB at `target` on a node, of which only `left` bytes are free."""
    with small_disk(path, "8m") as disk:
        disk.chmod(0o1777)
        room = os.statvfs(disk)
        (disk / "filled").write_bytes(b"x" * (room.f_bavail * room.f_frsize - left))
        with shown(site.stack, service, disk, target):
            yield


@pytest.fixture
def gpus(site: Site) -> Iterator[Callable[..., None]]:
    """Sets what the driver on a node with fake GPUs says."""

    def tell(service: str, number: int = 2, errors: int = 0) -> None:
        site.stack.exec(service, ["sh", "-c", SMI.format(gpus=" ".join(map(str, range(number))), errors=errors)])

    tell("g1")
    tell("g2")
    inside = f"{IMAGE}/usr/local/bin/nvidia-smi"
    if site.in_container:  # As `ch-fromhost --nvidia` puts it there.
        site.sh('ln -sf /opt/ray/bin/nvidia-smi "$1"', inside)
    yield tell
    site.sh('rm -f "$1"', inside)
    for service in ("g1", "g2"):
        site.stack.exec(service, ["rm", "-f", "/usr/local/bin/nvidia-smi", "/opt/ray/bin/nvidia-smi"])


def test_a_full_disk(slurm_compute: Make, script: Any, site: Site, tmp_path: Path) -> None:
    """Of a path that the user names; the other node's is empty. The next run goes there at once."""
    seen = {"pre_deployed_env_path": prefix_inside(site.connection, mounts=[*MOUNTS, "/mnt"])} if site.in_container else {}
    compute = slurm_compute(default_launcher=small_ray(health_check="disk-space=/mnt:1M"), **seen, **AGAIN)
    with filled(site, "c1", tmp_path / "disk", "/mnt", 400_000):
        ran = run_asset(compute, script(WHERE))
        found = "/mnt has 388.0 KiB free, and 1.0 MiB are needed"
        assert ran.metadata["node"] == "c2" and ran.metadata["Unhealthy nodes"] == f"c1 (disk-space=/mnt:1M: {found})"
        assert remembered(site) == {"c1": f"disk-space=/mnt:1M: {found}"}
        first = int(str(ran.metadata["Slurm job ID"]))
        again = run_asset(compute, script(WHERE))
    assert again.metadata["node"] == "c2" and int(str(again.metadata["Slurm job ID"])) == first + 1
    site.sh('rm -r "$1/unhealthy"', site.base)
    job = run_asset(compute, script(WHERE)).metadata["Slurm job ID"]  # Slurm chooses either node, but not always the first.
    assert "ExcNodeList=(null)" in site.sh('scontrol show job "$1"', str(job))


def test_a_scratch_disk_that_is_nearly_full(slurm_compute: Make, script: Any, site: Site, tmp_path: Path) -> None:
    """Ray's directory would be there, and Ray writes to no disk that is more than 95 % full."""
    compute = slurm_compute(default_launcher=small_ray(health_check="disk-space"), queue={"nodelist": "c1"})
    with filled(site, "c1", tmp_path / "disk", "/tmp", 350_000):
        failure = run_asset(compute, script(WHERE)).failure
    said = failure.description or ""
    assert failure.kind == "cluster-start" and "node c1 failed its health check disk-space: /tmp/rs-" in said, said
    assert "(5 %) are needed" in said and list(remembered(site)) == ["c1"]


@pytest.mark.parametrize(
    ("check", "ill", "found"),
    [
        ("gpu-count", {"number": 1}, "1 of 2 GPUs are there"),
        ("gpu-ecc", {"errors": 4}, "GPU 0 has 4 uncorrected memory errors; GPU 1 has 4 uncorrected memory errors"),
    ],
)
def test_gpus(
    check: str, ill: dict[str, int], found: str, gpus: Callable[..., None], slurm_compute: Make, script: Any, site: Site
) -> None:
    gpus("g1", **ill)
    compute = slurm_compute(queue=ON_GPUS, default_launcher=small_ray(health_check=[check, "true"]), **AGAIN)
    ran = run_asset(compute, script(WHERE))
    assert ran.metadata["node"] == "g2" and ran.metadata["Unhealthy nodes"] == f"g1 ({check}: {found})"


def test_both_nodes_are_needed(gpus: Callable[..., None], slurm_compute: Make, script: Any, site: Site) -> None:
    """Both lost a GPU, and neither can be spared."""
    gpus("g1", 1)
    gpus("g2", 1)
    launcher = small_ray(health_check="gpu-count")
    failure = run_asset(
        slurm_compute(queue={**ON_GPUS, "num_nodes": 2}, default_launcher=launcher, **AGAIN), script(WHERE)
    ).failure
    assert failure.kind == "cluster-start" and "g1 failed its health check gpu-count: 1 of 2 GPUs" in (failure.description or "")
    why = "g1 is not excluded, because partition gpu would have 1 usable node left, and the job needs 2"
    assert (failure.description or "").endswith(f"; the run is not started again: {why}")
    assert "g1" in remembered(site) and not site.jobs()


def test_all_workers_that_fail_are_named(slurm_compute: Make, script: Any, site: Site) -> None:
    launcher = small_ray(health_check='case $(uname -n) in g*) echo "no driver"; exit 3;; esac')
    compute = slurm_compute(queue={"partition": "all", "num_nodes": 4}, default_launcher=launcher)
    failure = run_asset(compute, script(WHERE)).failure
    said = failure.description or ""
    assert failure.kind == "cluster-start" and re.search(r"exit code 3 on node g([12]): no driver \(and so did g[12]\)$", said), (
        said
    )
    assert remembered(site) == dict.fromkeys(("g1", "g2"), "command: exit code 3: no driver")


def test_a_cluster_that_may_do_without(gpus: Callable[..., None], slurm_compute: Make, script: Any, site: Site) -> None:
    """`min_nodes=1`: the worker that fails is left out, and remembered all the same."""
    gpus("g2", 1)
    launcher = small_ray(health_check="gpu-count", min_nodes=1)
    ran = run_asset(slurm_compute(queue={**ON_GPUS, "num_nodes": 2}, default_launcher=launcher, **AGAIN), script(WHERE))
    assert ran.metadata["node"] == "g1" and ran.metadata["Unhealthy nodes"] == "g2 (gpu-count: 1 of 2 GPUs are there)"
    assert remembered(site) == {"g2": "gpu-count: 1 of 2 GPUs are there"}


@pytest.mark.parametrize("reuse", [False, True], ids=["fresh", "warm"])
def test_a_session(reuse: bool, gpus: Callable[..., None], session_compute: Make, script: Any, site: Site) -> None:
    """The session with the node ends, and the next one is elsewhere and serves the next payload, too."""
    gpus("g1", 1)
    launcher = small_ray(health_check="gpu-count")
    compute = session_compute(queue=ON_GPUS, default_launcher=launcher, enable_cluster_reuse=reuse, **AGAIN)
    ran = run_asset(compute, script(WHERE))
    assert ran.metadata["node"] == "g2" and ran.metadata["Unhealthy nodes"] == "g1 (gpu-count: 1 of 2 GPUs are there)"
    again = run_asset(compute, script(WHERE))
    assert again.metadata["Session reused"] and again.metadata["Slurm job ID"] == ran.metadata["Slurm job ID"]


@pytest.mark.parametrize("topology", ["spanning", "separate"])
def test_a_heterogeneous_job(topology: str, gpus: Callable[..., None], slurm_compute: Make, script: Any, site: Site) -> None:
    gpus("g1", 1)
    sick, well = small_ray(health_check="gpu-count"), small_ray()
    queues = {"cpu": {"partition": "compute", "mem": "1500M"}, "gpu": {**ON_GPUS, "mem": "1500M"}}
    components = [
        HetComponent(component_id=name, queue=SlurmQueueConfig(time_limit="00:05:00", **queue), launcher=launcher)
        for (name, queue), launcher in zip(queues.items(), (well, sick), strict=True)
    ]
    launcher = {} if topology == "separate" else {"default_launcher": well}
    fields: dict[str, Any] = {"mode": "slurm-hetjob", "components": components, "topology": topology, **launcher, **AGAIN}
    if topology == "separate":
        fields["default_launcher"] = type(well)()
    ran = run_asset(slurm_compute(**fields), script("print('here')"), uses_pipes=False)
    assert not ran.failures and "g2" in str(ran.completed[0].metadata), ran.completed[0].metadata
    assert ran.completed[0].metadata["Unhealthy nodes"].value == "g1 (gpu-count: 1 of 2 GPUs are there)"


def test_a_wrong_clock(slurm_compute: Make, script: Any, site: Site) -> None:
    variables = " ".join(f"{name}={value}" for name, value in off_by(site.stack, 3).items())
    path = site.env_after(f'if [ "$(uname -n)" = c1 ]; then export {variables}; fi')
    environment = {"pre_deployed_env_path": path}
    ran = run_asset(slurm_compute(default_launcher=small_ray(health_check="clock"), **environment, **AGAIN), script(WHERE))
    assert ran.metadata["node"] == "c2"
    assert "c1 (clock: its clock is 180." in str(ran.metadata["Unhealthy nodes"]) and " s ahead of" in str(
        ran.metadata["Unhealthy nodes"]
    )


def test_no_node_is_healthy(slurm_compute: Make, script: Any, site: Site) -> None:
    compute = slurm_compute(default_launcher=small_ray(health_check=["interface=lo", "interface=ib9"]), **AGAIN)
    failure = run_asset(compute, script(WHERE)).failure
    said = failure.description or ""
    assert failure.kind == "cluster-start" and "node c2 failed its health check interface=ib9: there is no interface ib9" in said
    assert set(remembered(site)) == {"c1", "c2"}


def test_the_policy_is_to_fail(gpus: Callable[..., None], slurm_compute: Make, script: Any, site: Site) -> None:
    gpus("g1", 0)
    failure = run_asset(slurm_compute(queue=ON_GPUS, default_launcher=small_ray(health_check="gpu-count")), script(WHERE)).failure
    assert failure.kind == "cluster-start" and failure.allow_retries
    assert "node g1 failed its health check gpu-count: 0 of 2 GPUs are there" in (failure.description or "")
    assert [(each.node, each.check) for each in failure.unhealthy] == [("g1", "gpu-count")]
