"""Sessions on the stack: one allocation for many payloads, in one process and in several, and what becomes of it."""

import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from dagster_rayslurm import BashLauncher, ComputeResource, RunFailure, SlurmQueueConfig, SlurmResource
from dagster_rayslurm.backends.sessions.acquire import SessionAcquisition
from dagster_rayslurm.backends.slurm_job import SlurmJob

from ..conftest import pipes_script, run_asset, small_ray, wait_until
from .fixtures import Running, Site

RAY_QUEUE = {"mem": "2500M", "cpus_per_node": 2}

WHERE = pipes_script("""
import os
pipes.report_asset_materialization(metadata={"job": os.environ["SLURM_JOB_ID"], "value": os.environ.get("VALUE", "")})
""")

ON_RAY = pipes_script("""
import os, ray
ray.init()
seen = ray.get(ray.remote(lambda: os.environ["RAYSLURM_DATA_DIR"]).remote())
pipes.report_asset_materialization(metadata={
    "job": os.environ["SLURM_JOB_ID"], "address": ray.get_runtime_context().gcs_address, "data": seen,
    "nodes": len(ray.nodes()),
})
""")

ON_EACH_NODE = pipes_script("""
import os, ray, subprocess, time
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
ray.init()
pids = [int(pid) for pid in os.environ.get("PIDS", "").split()]

@ray.remote
def leave():
    command = "env -i setsid sleep 600 </dev/null >/dev/null 2>&1 & echo $!"
    return int(subprocess.check_output(["sh", "-c", command]))

@ray.remote
def survives(pid):
    until = time.monotonic() + 30
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < until:
        time.sleep(0.1)
    return os.path.exists(f"/proc/{pid}")

nodes = sorted(node["NodeID"] for node in ray.nodes() if node["Alive"])
calls = []
for place, node in enumerate(nodes):
    there = NodeAffinitySchedulingStrategy(node, soft=False)
    calls.append(survives.options(scheduling_strategy=there).remote(pids[place]) if pids
                 else leave.options(scheduling_strategy=there).remote())
pipes.report_asset_materialization(metadata={"job": os.environ["SLURM_JOB_ID"], "answers": ray.get(calls)})
""")

Make = Callable[..., ComputeResource]


def metadata_of(failure: RunFailure) -> str:
    return str({key: value.value for key, value in failure.metadata.items()})


def test_two_assets_of_one_run_share_a_job(session_compute: Make, script: Any, site: Site) -> None:
    compute, payload = session_compute(), str(script(WHERE))

    def made(name: str, deps: list[Any]) -> Any:
        @dg.asset(name=name, deps=deps)
        def asset(context: dg.AssetExecutionContext, compute: ComputeResource) -> Any:
            return compute.run(context=context, payload_path=payload, secret_env={"VALUE": name}).get_materialize_result()

        return asset

    one = made("one", [])
    two = made("two", [one])
    result = dg.materialize([one, two], resources={"compute": compute})
    seen = [result.asset_materializations_for_node(name)[0].metadata for name in ("one", "two")]
    assert seen[0]["job"].value == seen[1]["job"].value == seen[0]["Slurm job ID"].value
    assert [each["value"].value for each in seen] == ["one", "two"]
    assert [each["Session reused"].value for each in seen] == [False, True]
    assert seen[0]["Slurm session"].value == seen[1]["Slurm session"].value and seen[0]["Slurm nodes"].value in ("c1", "c2")
    job = seen[0]["job"].value
    assert site.jobs() == [job] and "rayslurm-session-default-" in site.sh(f"squeue --me --noheader --format=%j -j {job}")
    # Nothing of a success stays but the session.
    assert site.sh('ls "$1/runs"', site.base).split() == []
    name = site.sh(f"squeue --me --noheader --format=%j -j {job}").strip()
    assert compute.cleanup_cluster("slurm-" + name.rpartition("-")[2])
    assert not compute.cleanup_cluster("slurm-" + name.rpartition("-")[2]) and not site.jobs()


BURN = 5.0
"""Seconds of CPU time on each node."""

FIGURES = pipes_script("""
import ray, time
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On
ray.init()

@ray.remote(num_cpus=0.5)
def work(burn):
    began = time.process_time()
    while time.process_time() - began < burn:
        pass
    time.sleep(0 if burn else 8)

nodes = [node["NodeID"] for node in ray.nodes()]
ray.get([work.options(scheduling_strategy=On(node, soft=False)).remote(%g) for node in nodes])
pipes.report_asset_materialization()
""")


def test_figures_in_a_warm_cluster_are_each_payloads_own(session_compute: Make, script: Any) -> None:
    """On both nodes: the first one tells the other whose Ray jobs are whose."""
    compute = session_compute(
        enable_cluster_reuse=True,
        default_launcher=small_ray(grace_period=3),
        queue={**RAY_QUEUE, "num_nodes": 2},
        session={"idle_timeout": 30, "max_concurrent_payloads": 2},
    )
    payloads = [script(FIGURES % 0.0, "sleep.py"), script(FIGURES % BURN, "burn.py")]
    with ThreadPoolExecutor() as pool:
        sleeper, burner = pool.map(lambda payload: run_asset(compute, payload).metadata, payloads)
    told = [{row.data["node"]: row.data["CPU time (s)"] for row in each["Nodes"].records} for each in (sleeper, burner)]
    assert all(told[1][node] > 0.75 * BURN and told[0][node] < 0.6 * BURN for node in ("c1", "c2")), told
    assert burner["CPU time (s)"] < 2 * BURN + 8 and sleeper["CPU time (s)"] < 0.5 * burner["CPU time (s)"]
    assert all(each["Shared memory (MiB)"] > 200 for each in (sleeper, burner))


def test_a_warm_cluster_for_all(session_compute: Make, script: Any, site: Site) -> None:
    """Two nodes; payloads with Ray and without; by TCP and by steps in the allocation."""
    launcher = small_ray(grace_period=3)
    queue = {**RAY_QUEUE, "num_nodes": 2}
    fields: dict[str, Any] = {"enable_cluster_reuse": True, "default_launcher": launcher, "queue": queue}
    by_tcp = session_compute(session={"carrier": "direct", "name": "both"}, **fields)
    by_step = session_compute(session={"carrier": "srun", "name": "both"}, **fields)
    seen = [run_asset(compute, script(ON_RAY)).metadata for compute in (by_tcp, by_tcp, by_step)]
    assert len({each["job"] for each in seen}) == 1 and len({each["address"] for each in seen}) == 1
    assert [each["Session reused"] for each in seen] == [False, True, True]
    assert {each["data"] for each in seen} == {f"{site.base}/data"} and {each["nodes"] for each in seen} == {2}
    assert seen[2]["Ray cluster was warm"] and "ssh -N -L" not in str(seen[2].get("Ray dashboard"))
    plain = run_asset(by_step, script(WHERE), launcher=BashLauncher(), extra_env={"VALUE": "plain"}).metadata
    assert plain["job"] == seen[0]["job"] and plain["value"] == "plain"
    assert by_tcp.cleanup_cluster(seen[0]["Ray cluster ID"])
    assert not site.jobs()


def test_daemons_of_ray_tasks_end_with_their_payload_on_every_node(session_compute: Make, script: Any) -> None:
    queue = {**RAY_QUEUE, "num_nodes": 2}
    compute = session_compute(enable_cluster_reuse=True, default_launcher=small_ray(grace_period=3), queue=queue)
    left = run_asset(compute, script(ON_EACH_NODE)).metadata
    pids = " ".join(map(str, left["answers"]))
    later = run_asset(compute, script(ON_EACH_NODE), extra_env={"PIDS": pids}).metadata
    assert len(left["answers"]) == 2 and later["answers"] == [False, False] and later["job"] == left["job"]


def test_a_cluster_of_symmetric_run_stays_warm(session_compute: Make, script: Any) -> None:
    """Its daemons are orphans on the head, and no strays of the payload before."""
    launcher = small_ray(launch_style="symmetric-run", startup_timeout=120, grace_period=3)
    queue = {**RAY_QUEUE, "num_nodes": 2}
    compute = session_compute(enable_cluster_reuse=True, default_launcher=launcher, queue=queue)
    one, two = (run_asset(compute, script(ON_RAY)).metadata for _ in range(2))
    assert one["job"] == two["job"] and one["address"] == two["address"]


def test_a_cluster_of_each_payloads_own(session_compute: Make, script: Any, site: Site) -> None:
    compute = session_compute(default_launcher=small_ray(grace_period=3), queue=RAY_QUEUE)
    one = run_asset(compute, script(ON_RAY)).metadata
    two = run_asset(compute, script(ON_RAY), launcher=small_ray(labels={"x": "y"})).metadata
    assert one["job"] == two["job"] and one["address"] != two["address"] and not two["Ray cluster was warm"]


HOG = pipes_script("""
import ray, time
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
ray.init(log_to_driver=False)
here = ray.get_runtime_context().get_node_id()
(there,) = [node for node in ray.nodes() if node["NodeID"] != here]

@ray.remote(max_retries=0, scheduling_strategy=NodeAffinitySchedulingStrategy(there["NodeID"], soft=False))
def hog():
    held = []
    while True:
        held.append(b"x" * (20 << 20))
        time.sleep(0.05)

try:
    ray.get(hog.remote())
except ray.exceptions.RayError as error:
    seen = type(error).__name__
pipes.report_asset_materialization(metadata={"seen": seen, "node": there["NodeManagerHostname"]})
""")


def test_a_task_that_grows_too_large_is_killed_before_the_session(session_compute: Make, script: Any, site: Site) -> None:
    """The log names its node, which is not the head's; the payload sees an exception, and the next one has the same session."""
    queue = {**RAY_QUEUE, "num_nodes": 2}
    compute = session_compute(enable_cluster_reuse=True, default_launcher=small_ray(grace_period=3), queue=queue)
    instance = dg.DagsterInstance.ephemeral()
    ran = run_asset(compute, script(HOG), instance=instance)
    assert ran.metadata["seen"] in ("WorkerCrashedError", "OutOfMemoryError")
    assert ran.metadata["Ray workers killed for memory"] == 1
    (said,) = [
        each.user_message
        for each in instance.all_logs(ran.result.run_id)
        if each.level == logging.WARNING and "killed the largest Ray worker" in each.user_message
    ]
    assert f"memory: {ran.metadata['node']} uses 9" in said and "% of 2500 MiB" in said and "ray::hog, pid " in said
    after = run_asset(compute, script(ON_RAY)).metadata
    assert after["Session reused"] and after["nodes"] == 2 and "Ray workers killed for memory" not in after


def test_what_does_not_fit(session_compute: Make, script: Any, site: Site) -> None:
    """Another session, or an error before anything starts; by what is known beforehand, and by what the nodes grant."""
    compute = session_compute(queue={"cpus_per_node": 1})
    first = run_asset(compute, script(WHERE)).metadata
    larger = SlurmQueueConfig(partition="compute", cpus_per_node=2, time_limit="00:05:00")
    second = run_asset(compute, script(WHERE), queue=larger, launcher=BashLauncher(num_cpus=2)).metadata
    again = run_asset(compute, script(WHERE), queue=larger, launcher=BashLauncher(num_cpus=2)).metadata
    assert first["job"] != second["job"] == again["job"]
    shorter = SlurmQueueConfig(partition="compute", time_limit="00:04:00")
    assert run_asset(compute, script(WHERE), queue=shorter).metadata["job"] == first["job"]
    strict = session_compute(queue={"cpus_per_node": 1}, session={"on_misfit": "error"})
    failure = run_asset(strict, script(WHERE), launcher=BashLauncher(num_cpus=2)).failure
    assert failure.kind == "configuration"
    assert "BashLauncher.num_cpus=2 is more than the session was given on each node: 1 CPUs" in (failure.description or "")
    assert sorted(site.jobs()) == sorted([first["job"], second["job"]])


def test_what_only_the_nodes_know(session_compute: Make, script: Any, site: Site) -> None:
    """Slurm was asked for no number of CPUs, so what it gave is for the session to say."""
    compute = session_compute()
    first = run_asset(compute, script(WHERE)).metadata
    second = run_asset(compute, script(WHERE), launcher=BashLauncher(num_cpus=2)).metadata
    assert first["job"] != second["job"] and sorted(site.jobs()) == sorted([first["job"], second["job"]])
    failure = run_asset(session_compute(session={"on_misfit": "error"}), script(WHERE), launcher=BashLauncher(num_cpus=2)).failure
    assert failure.kind == "configuration" and "new-session" in (failure.description or ""), failure.description


def test_a_payloads_own_time(session_compute: Make, script: Any) -> None:
    queue = SlurmQueueConfig(partition="compute", time_limit="00:00:03")
    failure = run_asset(session_compute(), script("import time; time.sleep(60)"), queue=queue, uses_pipes=False).failure
    assert failure.kind == "allocation" and not failure.allow_retries
    assert "ran out of time" in (failure.description or ""), failure.description


def test_a_failed_payload_leaves_the_session(session_compute: Make, script: Any, site: Site) -> None:
    compute = session_compute()
    failure = run_asset(compute, script("import sys; print('last words'); sys.exit(7)")).failure
    assert failure.kind == "payload" and "exit code 7" in (failure.description or "")
    assert "last words" in metadata_of(failure) and "Slurm session" in failure.metadata
    ran = run_asset(compute, script(WHERE))
    assert ran.metadata["job"] == failure.metadata["Slurm job ID"].value


def test_files_that_are_gone_are_sent_again(session_compute: Make, script: Any, site: Site, tmp_path: Path) -> None:
    compute, payload = session_compute(), script(WHERE)
    first = run_asset(compute, payload).metadata
    site.sh('cd "$1" && chmod -R u+w bundles && rm -rf bundles/*', site.base)
    assert run_asset(compute, payload).metadata["job"] == first["job"]


def test_a_session_that_is_gone_is_followed_by_another(session_compute: Make, script: Any, site: Site) -> None:
    compute = session_compute()
    first = run_asset(compute, script(WHERE)).metadata
    site.sh('scancel "$1"', first["job"])
    second = run_asset(compute, script(WHERE)).metadata
    assert second["job"] != first["job"] and not second["Session reused"]
    assert second["Slurm session"] == first["Slurm session"].rpartition("/")[0] + "/2"


def test_its_announcement_is_lost(session_compute: Make, script: Any, site: Site) -> None:
    compute = session_compute()
    first = run_asset(compute, script(WHERE)).metadata
    for damage in ('rm "$1"', 'printf "{" >"$1"'):
        site.sh(damage, f"{site.base}/sessions/{first['Slurm session']}/session.json")
        assert run_asset(compute, script(WHERE)).metadata["job"] == first["job"]


def test_an_idle_session_makes_way_for_a_job_of_the_same_user(
    session_compute: Make, slurm_compute: Make, script: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """The session holds all nodes of the partition, and would for ten minutes more."""
    everything = {"num_nodes": 2, "exclusive": True}
    warm = session_compute(queue=everything, session={"idle_timeout": 600})
    key = run_asset(warm, script(WHERE)).metadata["Slurm session"].rpartition("/")[0]
    began = time.monotonic()
    assert run_asset(slurm_compute(queue=everything), script(pipes_script("pass"))).result.success
    assert time.monotonic() - began < 100
    assert f"session {key} was idle and held c[1-2]: it ends, so that this job can start" in capfd.readouterr().err


def block(site: Site) -> str:
    """Take all of a partition's nodes, so that whatever is submitted has to wait."""
    return site.sh(
        "sbatch --parsable --partition=compute --exclusive --nodes=2 --time=3 --output=/dev/null --wrap='sleep 120'"
    ).strip()


def test_a_session_that_waits_for_too_long(session_compute: Make, script: Any, site: Site) -> None:
    blocker = block(site)
    compute = session_compute(queue_timeout=4)
    failure = run_asset(compute, script(WHERE)).failure
    assert failure.kind == "allocation" and "queue_timeout=4 s" in (failure.description or "")
    assert site.jobs() == [blocker]  # Nobody waits for it any more.
    site.sh('scancel "$1"', blocker)
    ran = run_asset(compute, script(WHERE))
    assert ran.metadata["Slurm session"].endswith("/2")


def test_others_wait_for_it_still(
    session_compute: Make, script: Any, site: Site, start: Callable[..., Running], capfd: Any
) -> None:
    """Whoever asked first gives up; the session comes up for those who have not."""
    blocker = block(site)
    patient = start(session_compute(), script(WHERE))
    assert wait_until(lambda: len(site.jobs()) == 2)
    failure = run_asset(session_compute(queue_timeout=3), script(WHERE)).failure
    assert failure.kind == "allocation" and len(site.jobs()) == 2
    site.sh('scancel "$1"', blocker)
    ran = patient.result()
    assert ran.metadata["Slurm session"].endswith("/1") and ran.metadata["Queue wait (s)"] > 3
    assert " is waiting" in capfd.readouterr().err


def test_an_environment_that_cannot_start(session_compute: Make, script: Any, site: Site) -> None:
    text = '[ "$(uname -n)" = edge ] || { echo no licence here >&2; exit 3; }\nexport PATH=/opt/ray/bin:$PATH\n'
    site.sh('mkdir -p "$1/env" && printf %s "$2" >"$1/env/activate.sh"', site.base, text)
    failure = run_asset(session_compute(pre_deployed_env_path=f"{site.base}/env"), script(WHERE)).failure
    assert failure.kind == "runtime" and "the session did not come up" in (failure.description or "")
    assert "no licence here" in metadata_of(failure)


def test_one_that_ends_at_once_is_one_failure(session_compute: Make, script: Any, site: Site) -> None:
    """It came up, and its nodes grant less than was asked for: the next one would have no more."""
    # The first variable counts for srun of 22.05, the second for srun of 24.11.
    site_variables = {"SRUN_CPUS_PER_TASK": "1", "SLURM_CPUS_PER_TASK": "1"}
    compute = session_compute(queue={"cpus_per_node": 2}, slurm={"site": site_variables})
    failure = run_asset(compute, script(WHERE)).failure
    assert failure.kind == "cluster-start" and failure.allow_retries, failure.description
    assert "the session did not come up" in (failure.description or "") and "cpus_per_node=2" in (failure.description or "")
    assert len(site.submitted()) == 1


def test_an_interrupt_just_after_the_submission(session_compute: Make, script: Any, site: Site, monkeypatch: Any) -> None:
    """Its job must not start for nobody, whatever the moment in which the step went."""
    blocker = block(site)
    seen: list[str] = []

    def interrupted(self: Any, number: int, job: SlurmJob, created: bool) -> None:
        seen.append(job.job_id)
        raise KeyboardInterrupt

    monkeypatch.setattr(SessionAcquisition, "_wait", interrupted)
    with pytest.raises(AssertionError, match="Execution was interrupted"):
        run_asset(session_compute(), script(WHERE))
    assert len(seen) == 1 and site.jobs() == [blocker]
    site.sh('scancel "$1"', blocker)


DEFINITIONS = """
import dagster as dg
from dagster_rayslurm import *

def made(name):
    @dg.asset(name=name)
    def asset(context: dg.AssetExecutionContext, compute: ComputeResource):
        return compute.run(context=context, payload_path={payload!r}).get_materialize_result()
    return asset

assets = [made(f"asset_{{number}}") for number in range(4)]
slurm = SlurmResource(ssh=SSHConnectionResource(**{ssh!r}), remote_base={base!r}, queue=SlurmQueueConfig(partition="compute"))
compute = ComputeResource(mode="slurm-session", slurm=slurm, pre_deployed_env_path={env!r}, local_base={local!r},
    default_launcher=BashLauncher(), session=SessionConfig(idle_timeout=30, max_concurrent_payloads=2))
job = dg.define_asset_job("job", assets, executor_def=dg.multiprocess_executor)
defs = dg.Definitions(assets, jobs=[job], resources={{"compute": compute}})
"""


def test_steps_in_processes_of_their_own(session_compute: Make, script: Any, site: Site, tmp_path: Path) -> None:
    """All of them come at once, and one makes the session."""
    payload = script(WHERE)
    definitions = tmp_path / "definitions.py"
    definitions.write_text(
        DEFINITIONS.format(
            payload=str(payload), ssh=site.ssh.model_dump(), base=site.base, env=site.env_path, local=str(tmp_path / "base")
        )
    )
    env = {**os.environ, "DAGSTER_HOME": str(tmp_path), "DAGSTER_DISABLE_TELEMETRY": "yes"}
    command = [sys.executable, "-m", "dagster", "job", "execute", "-f", str(definitions), "-j", "job"]
    said = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=170)
    assert said.returncode == 0, said.stderr[-3000:]
    with dg.DagsterInstance.from_config(str(tmp_path)) as instance:
        jobs = set()
        for number in range(4):
            event = instance.get_latest_materialization_event(dg.AssetKey(f"asset_{number}"))
            assert event is not None and event.asset_materialization is not None
            jobs.add(event.asset_materialization.metadata["Slurm job ID"].value)
    assert len(jobs) == 1 and site.jobs() == [*jobs]


INTERRUPTED = """
import sys
import dagster as dg
from dagster_rayslurm import *

@dg.asset
def asset(context: dg.AssetExecutionContext, compute: ComputeResource):
    return compute.run(context=context, payload_path={payload!r}, uses_pipes=False).get_materialize_result()

slurm = SlurmResource(ssh=SSHConnectionResource(**{ssh!r}), remote_base={base!r}, queue=SlurmQueueConfig(partition="compute"))
compute = ComputeResource(mode="slurm-session", slurm=slurm, pre_deployed_env_path={env!r}, local_base={local!r},
    default_launcher=BashLauncher(grace_period=2), session=SessionConfig(idle_timeout=30))
dg.materialize([asset], resources={{"compute": compute}}, instance=dg.DagsterInstance.ephemeral())
"""


def interrupted(script: Any, site: Site, tmp_path: Path, payload: str) -> "subprocess.Popen[bytes]":
    text = INTERRUPTED.format(
        payload=str(script(payload, "interrupted.py")),
        ssh=site.ssh.model_dump(),
        base=site.base,
        env=site.env_path,
        local=str(tmp_path / "base"),
    )
    program = script(text, "program.py")
    return subprocess.Popen(
        [sys.executable, str(program)], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
    )


def test_an_interrupt_while_it_waits(session_compute: Make, script: Any, site: Site, tmp_path: Path) -> None:
    blocker = block(site)
    process = interrupted(script, site, tmp_path, "pass")
    assert wait_until(lambda: len(site.jobs()) == 2, 40)
    time.sleep(1.5)
    process.send_signal(2)
    _, said = process.communicate(timeout=60)
    assert b"no step waits for the session any more" in said, said.decode()[-2000:]
    assert site.jobs() == [blocker]
    site.sh('scancel "$1"', blocker)


def test_an_interrupt_ends_its_payload_alone(session_compute: Make, script: Any, site: Site, tmp_path: Path) -> None:
    up = 'import os, pathlib, time; pathlib.Path(os.environ["RAYSLURM_DATA_DIR"], "up").write_text("x"); time.sleep(60)'
    process = interrupted(script, site, tmp_path, up)
    assert wait_until(lambda: site.connection.read(f"{site.base}/data/up", 0, 1), 60)
    process.send_signal(2)
    began = time.monotonic()
    _, said = process.communicate(timeout=60)
    assert time.monotonic() - began < 15 and b"cancelled" in said, said.decode()[-2000:]
    assert len(site.jobs()) == 1
    for node in ("c1", "c2"):
        assert not [line for line in site.processes(node) if "interrupted.py" in line]


def test_what_would_be_submitted(session_compute: Make, script: Any) -> None:
    compute = session_compute(session={"name": "mine", "num_nodes": 2, "time_limit": "01:00:00"}, queue={"requeue": True})
    text = compute.job_script(payload_path=script(WHERE))
    assert "--job-name=rayslurm-session-mine-NONCE" in text and "--nodes=2" in text and "--time=01:00:00" in text
    assert "--no-requeue" in text and " session " in text and "/sessions/mine-FINGERPRINT/GENERATION" in text


def test_slurm_without_ssh_is_another_matter(tmp_path: Path, script: Any) -> None:
    """What is wrong with the request is said before anything is asked for."""
    compute = ComputeResource(
        mode="slurm-session",
        slurm=SlurmResource(remote_base="relative"),
        local_base=str(tmp_path),
        default_launcher=BashLauncher(),
    )
    failure = run_asset(compute, script("pass")).failure
    assert failure.kind == "configuration" and "remote_base: 'relative' is relative" in (failure.description or "")
