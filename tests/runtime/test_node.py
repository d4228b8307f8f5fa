"""What the runtime finds on its node: resources, ports, private directories."""

from __future__ import annotations

import errno
import json
import os
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dagster_rayslurm.runtime.node import interfaces, network, resources
from dagster_rayslurm.runtime.node.resources import footprint_error, node_footprint
from dagster_rayslurm.runtime.process import scratch
from dagster_rayslurm.runtime.protocol.spec import RaySpec, RuntimeSpec
from dagster_rayslurm.runtime.ray.node_main import lacks_tokens, refuse_version
from dagster_rayslurm.runtime.ray.ray_node import RayNode, start_arguments

from ..conftest import open_files, small_disk

HERE = resources.NodeResources("n1", num_cpus=4, num_gpus=1, memory=64 * 2**30, memory_limit=None)


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fake `nvidia-smi` that lists two GPUs, on a machine of 8 CPUs."""
    fake = tmp_path / "nvidia-smi"
    fake.write_text('#!/bin/sh\n[ "$1" = --query-gpu=name ] && printf "NVIDIA H200\\nNVIDIA H200\\n"\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    return fake


@pytest.mark.parametrize(
    ("environ", "count"),
    [
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, 2),
        *(({"CUDA_VISIBLE_DEVICES": visible, "SLURM_GPUS_ON_NODE": "4"}, 0) for visible in ("", "NoDevFiles", "-1")),
        ({"CUDA_VISIBLE_DEVICES": "GPU-8f2e, GPU-77aa"}, 2),
        ({"CUDA_VISIBLE_DEVICES": "MIG-1"}, 1),
        ({"CUDA_VISIBLE_DEVICES": "0", "ROCR_VISIBLE_DEVICES": "0,1"}, 1),
        ({"ROCR_VISIBLE_DEVICES": "0,1,2"}, 3),
        ({"HIP_VISIBLE_DEVICES": "1"}, 1),
        ({"ROCR_VISIBLE_DEVICES": "4,5,6,7", "HIP_VISIBLE_DEVICES": "0,1", "SLURM_GPUS_ON_NODE": "4"}, 2),
        ({"ROCR_VISIBLE_DEVICES": "-1", "SLURM_GPUS_ON_NODE": "4"}, 0),
        ({"ZE_AFFINITY_MASK": "0,1"}, 2),
        ({"ZE_AFFINITY_MASK": "0.0,0.1,1.0"}, 2),
        ({"SLURM_GPUS_ON_NODE": "4", "SLURM_STEP_GPUS": "0"}, 4),
        ({"SLURM_GPUS_ON_NODE": "mi250:2", "SLURM_STEP_GPUS": "0,1"}, 2),
        ({"SLURM_STEP_GPUS": "2,3,5"}, 3),
        # The driver's GPUs count where nothing restricts; a Slurm job claims no GPUs of other jobs.
        ({}, 2),
        ({"SLURM_JOB_ID": "7"}, 0),
        ({"SLURM_JOB_ID": "7", "SLURM_CPUS_ON_NODE": "2"}, 0),
        ({"SLURM_JOB_ID": "7", "SLURM_CPUS_ON_NODE": "8"}, 2),
        ({"SLURM_JOB_ID": "7", "SLURM_CPUS_ON_NODE": "2", "SLURM_GPUS_ON_NODE": "1"}, 1),
    ],
)
def test_gpus_that_are_granted(environ: dict[str, str], count: int, driver: Path) -> None:
    assert resources.detect(environ).num_gpus == count


@pytest.mark.parametrize(("script", "seconds"), [("exit 9", 20.0), ("echo NVIDIA H200\nexec sleep 30", 0.5)])
def test_a_driver_that_does_not_answer_grants_no_gpus(
    script: str, seconds: float, driver: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.write_text("#!/bin/sh\n" + script)
    monkeypatch.setattr(resources, "_LIST_TIMEOUT", seconds)
    began = time.monotonic()
    assert resources.list_gpus() == [] and time.monotonic() - began < 10


def test_cpus_are_those_of_the_affinity() -> None:
    one = sorted(os.sched_getaffinity(0))[:1]
    code = "from dagster_rayslurm.runtime.node import resources as machine; print(machine.detect().num_cpus)"
    found = subprocess.run(
        [sys.executable, "-c", f"import os; os.sched_setaffinity(0, {one}); {code}"], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "1"


def test_slurm_memory_is_the_limit() -> None:
    assert resources.detect({"SLURM_MEM_PER_NODE": "512"}).memory_limit == 512 * 2**20
    per_cpu = resources.detect({"SLURM_MEM_PER_CPU": "100"})
    assert per_cpu.memory_limit == 100 * 2**20 * per_cpu.num_cpus
    unlimited = resources.detect({"SLURM_MEM_PER_NODE": "0"}).memory_limit
    assert unlimited is None or unlimited < resources.detect({}).memory


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (RaySpec(num_cpus=5), ["num_cpus_per_node=5", "n1", "4 CPUs"]),
        (RaySpec(num_gpus=2), ["num_gpus_per_node=2", "n1", "1 GPUs"]),
        (RaySpec(object_store_memory=100 * 2**30), ["object_store_memory_gb=100", "n1", "57.6 GiB"]),
        (RaySpec(num_cpus=4, num_gpus=1, object_store_memory=50 * 2**30), None),
        (RaySpec(), None),
    ],
)
def test_a_footprint_that_is_not_granted_is_named(spec: RaySpec, words: list[str] | None) -> None:
    problem = footprint_error(node_footprint(spec), HERE)
    assert problem is None if words is None else problem is not None and all(word in problem for word in words)


def test_ray_is_told_what_was_granted() -> None:
    chosen = network.Ports(20001, 20002, ("--port=20001",))
    limited = resources.NodeResources("n1", 4, 1, 64 * 2**30, memory_limit=10 * 2**30)
    arguments = start_arguments(RaySpec(resources={"a b": 1}, labels={"x": "y"}), limited, chosen, "/tmp/r", "10.0.0.1")
    assert {"--num-cpus=4", "--num-gpus=1", "--node-ip-address=10.0.0.1", '--resources={"a b": 1}', "--labels=x=y"} <= set(
        arguments
    )
    sizes = {name: int(value) for name, _, value in (a.partition("=") for a in arguments) if name.endswith("memory")}
    assert sum(sizes.values()) <= 10 * 2**30 and set(sizes) == {"--memory", "--object-store-memory"}


def test_ports_are_free_distinct_and_outside_the_ephemeral_range() -> None:
    low, high = network.ephemeral_range()
    chosen = network.choose_ports()
    named = [int(option.partition("=")[2]) for option in chosen.options if not option.endswith("=0")]
    assert len(set(named)) == 3 and all(not low <= port <= high for port in named)
    assert all(network.is_free(port) for port in named)


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_a_listening_port_is_not_free(family: socket.AddressFamily) -> None:
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        try:
            listener.bind(("127.0.0.1" if family == socket.AF_INET else "::1", 0))
        except OSError:
            pytest.skip("no such address family on this machine")
        listener.listen()
        assert not network.is_free(listener.getsockname()[1])


def test_clusters_divide_a_port_range() -> None:
    first = network.choose_ports("20000-20199")
    second = network.choose_ports("20000-20199")
    with pytest.raises(OSError, match="20000-20199"):
        network.choose_ports("20000-20199")
    assert first.gcs // 100 != second.gcs // 100
    for chosen in (first, second):
        chosen.release()
    again = network.choose_ports("20000-20199")
    again.release()
    workers = next(option for option in again.options if option.startswith("--worker-port-list="))
    assert all(20000 <= int(port) <= 20199 for port in workers.partition("=")[2].split(","))


@pytest.mark.parametrize("text", ["", "x", "1-2-3", "80-20000", "20000-20050", "20100-20000", "1024-70000"])
def test_a_range_that_cannot_serve_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"LOW-HIGH|ports"):
        network.parse_range(text)


def test_an_interface_with_ipv6_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = tmp_path / "if_inet6"
    listed.write_text(
        "fe800000000000000042acfffe130002 1c 40 20 80     ib9\nfd000077000000000000000000000002 1c 40 00 82     ib9\n"
    )
    monkeypatch.setattr(interfaces, "_IPV6", str(listed))
    assert interfaces.address_of("ib9") == "fd00:77::2"
    with pytest.raises(OSError, match="network_interface='ib8' has no address on node"):
        interfaces.address_of("ib8")


def test_an_unknown_interface_names_those_there_are() -> None:
    assert interfaces.address_of("lo") == "127.0.0.1"
    with pytest.raises(OSError, match=r"network_interface='ib7'.*lo"):
        interfaces.address_of("ib7")


def test_a_second_attempt_of_symmetric_run_waits_for_its_own_command(scratch_base: Path) -> None:
    orders: list[dict[str, Any]] = []

    class Node(RayNode):
        def _spawn(self, argv: list[str], *_: Any, **__: Any) -> None:
            orders.append(json.loads(argv[-1]))

    loop: Any = SimpleNamespace(on_readable=lambda *_: None)
    private, spec = scratch.Scratch(), RaySpec(launch_style="symmetric-run", dashboard=False)
    ray = Node(loop, RuntimeSpec("c", spec), spec, "", HERE, private, 1, lambda _: None)
    for _ in range(2):
        ray.start()
        assert not os.path.exists(orders[-1]["entrypoint"])
        Path(orders[-1]["entrypoint"]).touch()
    ray.end()
    private.remove()


def test_scratch_is_short_private_and_goes() -> None:
    private = scratch.Scratch()
    assert stat.S_IMODE(os.stat(private.path).st_mode) == 0o700
    assert len(os.fsencode(private.ray_temp_dir)) <= scratch.MAX_RAY_TEMP_DIR_BYTES
    assert scratch.sweep() == []  # It has an owner.
    private.remove()
    assert not os.path.exists(private.path)


def test_a_full_disk_is_told_from_one_that_does_not_say(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "512k") as disk:
        assert not scratch.is_full(str(disk))
        (disk / "filled").write_bytes(bytes(400 * 1024))
        assert scratch.is_full(str(disk))
    assert not scratch.is_full(str(tmp_path / "gone"))


@pytest.mark.parametrize("fault", ["lock", "marker"])
def test_a_directory_that_cannot_be_scratch_is_not_left_behind(
    scratch_base: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """A file system without flock(2), or one that is full, cannot be had here."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK if fault == "lock" else errno.ENOSPC, "no")

    monkeypatch.setattr(*((scratch.fcntl, "flock") if fault == "lock" else (scratch, "open")), refuse, raising=False)
    before = {base: {*os.listdir(base), *open_files(Path(base))} for base in scratch._bases(short=True)}
    with pytest.raises(OSError, match="no"):
        scratch.Scratch()
    for base, names in before.items():
        assert not [name for name in set(os.listdir(base)) - names if name.startswith("rs-")]
        assert not [path for path in open_files(Path(base)) if path not in names and "/rs-" in path]


def test_sweeping_takes_what_a_dead_runtime_left_and_nothing_else(scratch_base: Path) -> None:
    make = "import os; from dagster_rayslurm.runtime.process import scratch; print(scratch.Scratch().path, flush=True); "
    code = make + "os.kill(os.getpid(), 9)"
    dead = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip()
    alive = scratch.Scratch()
    mine = scratch_base / "rs-results"  # What a user calls a directory is no business of ours,
    mine.mkdir()
    alike = scratch_base / "rs-0123abcd"  # not even when it looks like ours.
    alike.mkdir()
    link = scratch_base / "rs-abcdabcd"
    link.symlink_to("/")
    for path in (mine, alike):
        (path / "thesis.csv").write_text("x")
        os.utime(path, (time.time() - 86400,) * 2)
    assert os.path.isdir(dead)
    try:
        assert scratch.sweep() == [dead]
        assert os.path.isdir(alive.path) and (mine / "thesis.csv").exists() and (alike / "thesis.csv").exists()
        os.unlink(os.path.join(alive.path, ".rayslurm-scratch"))  # A cleaner of old files came by.
        assert scratch.sweep() == [] and os.path.isdir(alive.path)
    finally:
        alive.remove()
        link.unlink()
        for path in (mine, alike):
            scratch.shutil.rmtree(path)


def test_a_directory_whose_removal_was_cut_short_is_swept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm may kill the runtime, and its keeper, while they remove the directory."""
    private = scratch.Scratch()
    os.makedirs(private.join("r", "logs"))
    for name in ("a", "z"):
        Path(private.join(name)).write_text("x")
    with monkeypatch.context() as patch:
        patch.setattr(scratch.shutil, "rmtree", lambda *_, **__: None)
        private.remove()
    assert sorted(os.listdir(private.path)) == [".rayslurm-scratch", "r"]
    assert scratch.sweep() == [private.path]


def test_a_long_tmpdir_is_passed_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / ("long" * 20)))
    private = scratch.Scratch()
    try:
        assert len(os.fsencode(private.ray_temp_dir)) <= scratch.MAX_RAY_TEMP_DIR_BYTES
    finally:
        private.remove()


def test_versions_of_ray() -> None:
    assert [lacks_tokens(version) for version in ("2.60.0rc1", "2.52", "2.51.1", "1.13", "main")] == [
        False,
        False,
        True,
        True,
        False,
    ]
    assert refuse_version("2.60.0", None, token=True) is None
    assert "ray_version asks for 2.59.0" in (refuse_version("2.60.0", "2.59.0", token=True) or "")
    assert 'auth="disabled"' in (refuse_version("2.9.3", None, token=True) or "")
    assert refuse_version("2.9.3", None, token=False) is None
