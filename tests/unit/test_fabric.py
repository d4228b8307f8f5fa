"""Variables for the network between the nodes, and the warning when NCCL does not use that network."""

import logging
from pathlib import Path
from typing import Any

import pytest

from dagster_rayslurm import BashLauncher, RayLauncher
from dagster_rayslurm.fabric import FabricWatch, fabric_variables
from dagster_rayslurm.follow.follower import Cadence, Follower
from dagster_rayslurm.plan import make_plan
from dagster_rayslurm.runtime.payload.environment import fabric_in_words, payload_environment
from dagster_rayslurm.runtime.protocol.record import JOURNAL, STDIO, encode
from dagster_rayslurm.runtime.protocol.spec import PayloadSpec
from dagster_rayslurm.ssh.local import LocalConnection

from ..conftest import run_asset


def nccl(*said: str) -> str:
    """Lines of NCCL's log."""
    return "".join(f"c1:101:101 [0] NCCL INFO {each}\n" for each in said)


USES_SOCKETS = nccl("Using network Socket")
LOGS = {
    "InfiniBand": nccl("NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB ib0:10.0.0.1<0>", "Using network IB"),
    "EFA": nccl("NET/OFI Selected Provider is efa (found 4 nics)", "Using network AWS Libfabric"),
    "sockets": nccl("NET/IB : No device found.", "NET/Socket : Using [0]eth0:10.0.0.1<0>") + USES_SOCKETS,
    "sockets of a Ray worker": f"(train pid=7, ip=10.0.0.2) {USES_SOCKETS}",
    "libfabric over TCP": nccl("NET/OFI Selected provider is tcp;ofi_rxm", "Using network Libfabric"),
    "something else": "Using network Socket\nINFO NET/Socket\n",
}


@pytest.mark.parametrize(
    ("fabric", "interface", "variables"),
    [
        ("none", "ib0", {}),
        ("infiniband", None, {"NCCL_IB_DISABLE": "0", "NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT"}),
        ("tcp", "eth0", {"NCCL_NET": "Socket", "NCCL_IB_DISABLE": "1", "FI_PROVIDER": "tcp"}),
        ("efa", None, {"FI_PROVIDER": "efa", "FI_EFA_FORK_SAFE": "1", "NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT"}),
    ],
)
def test_variables(fabric: str, interface: str | None, variables: dict[str, str]) -> None:
    names = {"NCCL_SOCKET_IFNAME": f"={interface}", "GLOO_SOCKET_IFNAME": interface} if interface and variables else {}
    assert fabric_variables(fabric, interface) == {**variables, **names}


def test_only_what_is_unset_is_set() -> None:
    """By the user's extra_env, or by what the payload inherits of site, activate.sh and login."""
    spec = PayloadSpec(
        ["true"], "n", env={"NCCL_DEBUG": "WARN"}, default_env=fabric_variables("infiniband", "ib0"), uses_ray=True
    )
    inherited = {"NCCL_SOCKET_IFNAME": "=bond0"}
    env = payload_environment(spec, inherited, "/env/bin/python", "/run", "/messages", {})
    assert (env["NCCL_DEBUG"], env["NCCL_SOCKET_IFNAME"], env["GLOO_SOCKET_IFNAME"]) == ("WARN", "=bond0", "ib0")
    workers = env["RAY_JOB_CONFIG_JSON_ENV_VAR"]
    assert '"GLOO_SOCKET_IFNAME": "ib0"' in workers and '"NCCL_DEBUG": "WARN"' in workers and "NCCL_SOCKET_IFNAME" not in workers
    assert fabric_in_words(spec, inherited) == (
        "sets GLOO_SOCKET_IFNAME=ib0 NCCL_DEBUG_SUBSYS=INIT NCCL_IB_DISABLE=0; leaves NCCL_DEBUG, NCCL_SOCKET_IFNAME as it is set"
    )
    assert fabric_in_words(PayloadSpec(["true"], "n"), inherited) == ""


def test_a_plan_has_the_fabric_of_its_launcher() -> None:
    def plan(launcher: Any) -> Any:
        return make_plan(payload_path=["true"], launcher=launcher, nonce="n", max_output_bytes=1, max_stdio_bytes=1)

    own = plan(RayLauncher(fabric="tcp", network_interface="eth0"))
    assert own.fabric == "tcp" and own.payload.default_env == fabric_variables("tcp", "eth0")
    assert plan(BashLauncher()).fabric == "none" and plan(BashLauncher()).payload.default_env == {}
    with pytest.raises(ValueError, match="'ib' is not one of 'none', 'infiniband', 'efa', 'tcp'"):
        RayLauncher(fabric="ib")


@pytest.mark.parametrize(
    ("log", "fabric", "nodes", "warns"),
    [
        ("InfiniBand", "infiniband", 2, False),
        ("EFA", "efa", 2, False),
        ("sockets", "infiniband", 1, True),
        ("sockets", "efa", 2, True),
        ("sockets", "tcp", 2, False),
        ("sockets", "none", 1, False),
        ("sockets", "none", 2, True),
        ("sockets of a Ray worker", "infiniband", 2, True),
        ("libfabric over TCP", "efa", 2, True),
        ("something else", "infiniband", 2, False),
    ],
)
def test_what_nccl_says(log: str, fabric: str, nodes: int, warns: bool) -> None:
    for size in (1, 7, 10_000):  # However the output is cut.
        watch, text = FabricWatch(fabric), LOGS[log]
        for start in range(0, len(text), size):
            watch.feed("stdout", text[start : start + size])
            watch.feed("stderr", "x")
        warning = watch.warning(nodes)
        assert (warning is not None) == warns
        assert warning is None or ("NCCL uses TCP sockets" in warning and "NCCL INFO" in warning)
        watch.feed("stdout", text)
        assert watch.warning(nodes) is None, "it is said once"


def test_a_warning_waits_until_the_nodes_are_known() -> None:
    watch = FabricWatch("none")
    watch.feed("stdout", USES_SOCKETS)
    assert watch.warning(0) is None and "which is slow between nodes" in (watch.warning(2) or "")


def test_the_warning_is_in_the_event_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / STDIO).write_bytes(encode({"s": "stdout", "d": "hello\n" + USES_SOCKETS}))
    (tmp_path / JOURNAL).write_bytes(b"")
    log = logging.getLogger("test")
    follower = Follower(LocalConnection(), str(tmp_path), "n", None, log, Cadence(0, 0, 0), fabric="infiniband")
    follower.read_once()
    (record,) = [each for each in caplog.records if "NCCL" in each.getMessage()]
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith(
        "[rayslurm] NCCL uses TCP sockets, and fabric='infiniband' is asked for: `ibstat` must show"
    )


@pytest.mark.ray
def test_a_run_shows_what_is_set_and_what_nccl_says(
    base: Path, script: Any, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's workers get the variables, too, and a line that a worker prints is found."""
    from dagster_rayslurm import ComputeResource

    from ..conftest import pipes_script, small_ray

    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    payload = script(
        pipes_script(f"""
        import os, ray
        ray.init()
        @ray.remote
        def train():
            print({USES_SOCKETS.strip()!r}, flush=True)
            return {{name: os.environ.get(name) for name in ("NCCL_DEBUG", "NCCL_IB_DISABLE", "GLOO_SOCKET_IFNAME")}}
        pipes.report_asset_materialization(metadata=ray.get(train.remote()))
        """)
    )
    compute = ComputeResource(local_base=str(base), default_launcher=small_ray(fabric="infiniband", network_interface="lo"))
    ran, said = run_asset(compute, payload), capfd.readouterr().err
    metadata = {name: ran.metadata[name] for name in ("NCCL_DEBUG", "NCCL_IB_DISABLE", "GLOO_SOCKET_IFNAME")}
    assert metadata == {"NCCL_DEBUG": "WARN", "NCCL_IB_DISABLE": "0", "GLOO_SOCKET_IFNAME": "lo"}
    variables = "GLOO_SOCKET_IFNAME=lo NCCL_DEBUG_SUBSYS=INIT NCCL_IB_DISABLE=0 NCCL_SOCKET_IFNAME==lo"
    assert f"fabric: sets {variables}; leaves NCCL_DEBUG as it is set" in said
    assert "WARNING" in said and "NCCL uses TCP sockets, and fabric='infiniband' is asked for" in said
