"""The job of a session: requirements, key, start record and script, with and without components."""

import dataclasses
from typing import Any

import pytest

from dagster_rayslurm import BashLauncher, HetComponent, RayLauncher, SessionConfig, SlurmQueueConfig, SlurmResource
from dagster_rayslurm.backends.sessions.backend import SessionBackend
from dagster_rayslurm.backends.sessions.matching import Requirements, misfit, run_suffix
from dagster_rayslurm.components import arrange, merge_launchers
from dagster_rayslurm.environments import PreDeployedEnvironment
from dagster_rayslurm.launchers import Launcher
from dagster_rayslurm.plan import Plan, make_plan
from dagster_rayslurm.runtime.protocol.spec import RuntimeSpec, from_json, to_json


def component(name: str, head: bool = False, launcher: Any = None, **queue: Any) -> HetComponent:
    return HetComponent(component_id=name, queue=SlurmQueueConfig(**queue), launcher=launcher or RayLauncher(), head=head)


CPU = component("cpu", partition="compute", num_nodes=2, cpus_per_node=4)
GPU = component("gpu", partition="gpu", gpus_per_node=2, launcher=RayLauncher(num_gpus_per_node=1))


def setup(*components: HetComponent, **fields: Any) -> SessionBackend:
    session = SessionConfig(**fields.pop("session", {}))
    slurm = SlurmResource(queue=SlurmQueueConfig(partition="other"))
    defaults: dict[str, Any] = {"own_queue": None, "launcher": RayLauncher(), "reuse": True}
    return SessionBackend(
        **{
            **defaults,
            "slurm": slurm,
            "environment": PreDeployedEnvironment(path="/env"),
            "session": session,
            "components": components,
            **fields,
        }
    )


def plan(one: SessionBackend) -> Plan:
    """The plan of this run's payload, as the front door makes it."""
    launcher: Launcher = one.own_launcher or one.launcher
    chosen = one.components if one.own_components is None else one.own_components
    own = launcher.component_id if isinstance(launcher, RayLauncher) else None
    return make_plan(
        payload_path=["true"],
        launcher=launcher,
        nonce="n",
        max_output_bytes=1,
        max_stdio_bytes=1,
        components=merge_launchers(launcher, arrange(chosen, own)) if chosen else (),
    )


def order(required: Requirements) -> list[str]:
    return [each.component_id for each in required.components]


def problem_of(one: SessionBackend, session: Requirements | None = None) -> str | None:
    return misfit(one.required(plan(one)), (session or one.default).capacity(one.reuse))


def test_components_make_one_heterogeneous_job() -> None:
    usual = setup(CPU, GPU, session={"time_limit": "00:20:00"}).default
    request = usual.job_request("name", "comment")
    assert [part.component_id for part in request.components] == ["cpu", "gpu"]
    queues = [part.queue for part in request.components]
    assert [(each.partition, each.num_nodes, each.cpus_per_node, each.gpus_per_node) for each in queues] == [
        ("compute", 2, 4, None),
        ("gpu", 1, None, 2),
    ]
    assert {part.queue.time_limit for part in request.components} == {"00:20:00"} and {
        part.job_name for part in request.components
    } == {"name"}
    assert usual.ray is not None and [each.component_id for each in usual.ray.components] == ["cpu", "gpu"]
    assert usual.ray.components[1].num_gpus == 1


def test_job_options_of_one_component_apply_to_all() -> None:
    usual = setup(CPU, component("gpu", time_limit="00:30:00", requeue=True, signal_before_timeout="USR1@60")).default
    request = usual.job_request()
    assert {part.queue.time_limit for part in request.components} == {"00:30:00"}
    assert not any(part.queue.requeue for part in request.components)  # It would know nothing of what it had accepted.
    assert usual.queue.signal_before_timeout == "USR1@60"


def test_num_nodes_contradicts_components() -> None:
    with pytest.raises(ValueError, match=r"SessionConfig.num_nodes=3 .*num_nodes in the queue of each component"):
        setup(CPU, GPU, session={"num_nodes": 3}).default  # noqa: B018
    assert setup(session={"num_nodes": 3}).default.queue.num_nodes == 3


def test_the_head_comes_first() -> None:
    assert order(setup(CPU, GPU).default) == ["cpu", "gpu"]
    assert order(setup(CPU, component("gpu", head=True)).default) == ["gpu", "cpu"]
    # The launcher of sessions has the last word on those; what a payload wants beside decides of its own alone.
    one = setup(CPU, component("gpu", head=True), launcher=RayLauncher(component_id="cpu"))
    assert order(one.default) == ["cpu", "gpu"] and problem_of(one) is None
    assert problem_of(dataclasses.replace(one, own_launcher=BashLauncher())) is None


def test_a_payload_with_a_component_id_gets_a_session_with_its_head_there() -> None:
    one = setup(CPU, GPU, own_launcher=RayLauncher(component_id="gpu"))
    problem = problem_of(one)
    assert problem and "RayLauncher.component_id='gpu'" in problem
    own = one.own(plan(one))
    assert order(own) == ["gpu", "cpu"] and problem_of(one, own) is None
    with pytest.raises(ValueError, match="there is no component 'x'"):
        setup(CPU, GPU, own_launcher=RayLauncher(component_id="x")).required(plan(setup(CPU, GPU)))


def test_own_components_of_a_run() -> None:
    more = component("gpu", partition="gpu", gpus_per_node=4, time_limit="02:00:00")
    one = setup(CPU, GPU, own_components=(more,), session={"time_limit": "03:00:00"})
    assert "component 'gpu': SlurmQueueConfig.gpus_per_node=4" in (problem_of(one) or "")
    own = one.own(plan(one))
    assert order(own) == ["gpu"] and problem_of(one, own) is None
    assert own.queue.time_limit == "03:00:00"  # It lives no shorter than the usual one.
    less = setup(CPU, GPU, own_components=(component("gpu", gpus_per_node=1),))
    assert problem_of(less) is None
    marked = setup(CPU, GPU, own_components=(component("cpu"), component("gpu", head=True)))
    assert "component_id='gpu'" in (problem_of(marked) or "") and order(marked.own(plan(marked))) == ["gpu", "cpu"]
    beside = setup(own_components=(CPU, GPU))
    assert "the session has none" in (problem_of(beside) or "") and problem_of(beside, beside.own(plan(beside))) is None


def test_own_components_replace_impossible_default_ones() -> None:
    one = setup(CPU, launcher=RayLauncher(component_id="z"), own_components=(component("z", time_limit="00:05:00"),))
    assert "there is no component 'z'" in (one.misfit(plan(one)) or "")
    own = one.own(plan(one))
    assert order(own) == ["z"] and own.queue.time_limit == "00:05:00" and problem_of(one, own) is None
    with pytest.raises(ValueError, match="there is no component 'z'"):
        dataclasses.replace(one, own_components=None).misfit(plan(one))
    with pytest.raises(ValueError, match=r"SessionConfig\.num_nodes=3"):
        dataclasses.replace(one, session=SessionConfig(num_nodes=3)).misfit(plan(one))


def test_a_payload_without_ray() -> None:
    one = setup(CPU, GPU, own_launcher=BashLauncher(num_cpus=3))
    assert problem_of(one) is None
    more = setup(CPU, GPU, own_launcher=BashLauncher(num_cpus=9))
    assert "BashLauncher.num_cpus=9" in (misfit(more.required(plan(one)), more.default.capacity(True)) or "")
    with pytest.raises(ValueError, match=r"component 'cpu': BashLauncher\.num_cpus=9 is more than"):
        more.own(plan(one)).capacity(True)
    at_gpu = setup(CPU, GPU, launcher=RayLauncher(component_id="gpu"), own_launcher=BashLauncher(num_gpus=1))
    assert problem_of(at_gpu) is None and order(at_gpu.own(plan(at_gpu))) == ["gpu", "cpu"]
    assert setup(CPU, GPU, launcher=BashLauncher()).default.ray is None


def key(one: SessionBackend, apart: bool = False) -> str:
    choice = one.choice(plan(one), "run", "/base", "/data")
    return (choice.own if apart else choice.target).key


def test_the_key_tells_sessions_apart() -> None:
    one = setup(CPU, GPU)
    assert key(one) == key(setup(CPU, GPU))
    others = [
        setup(),
        setup(CPU),
        setup(CPU, component("gpu", partition="gpu", gpus_per_node=1)),
        setup(CPU, component("gpu2", partition="gpu", gpus_per_node=2)),
        setup(CPU, component("gpu", launcher=RayLauncher(labels={"a": "b"}), partition="gpu", gpus_per_node=2)),
        setup(CPU, GPU, session={"time_limit": "5"}),
        setup(CPU, GPU, launcher=RayLauncher(component_id="gpu")),
        setup(CPU, GPU, launcher=BashLauncher()),
        setup(CPU, GPU, launcher=BashLauncher(num_cpus=2)),
    ]
    assert len({key(one), *map(key, others)}) == 1 + len(others)
    assert key(setup(GPU, CPU)) == key(others[6])  # The same job.
    run = dataclasses.replace(one, session=SessionConfig(scope="run"))
    assert key(run).startswith(f"{key(one)}-") and key(run).endswith(run_suffix("run"))
    # A name stands for whatever it has; those beside it are told apart.
    named = [dataclasses.replace(each, session=SessionConfig(name="n")) for each in (one, *others)]
    assert len(set(map(key, named))) == 1
    assert len({key(each, apart=True) for each in named}) == 9  # The time limit stood in the session's configuration.


def test_the_start_record_of_the_runtime() -> None:
    one = setup(CPU, GPU)
    usual = one.default
    spec = one.runtime_spec("slurm-1", usual, usual.job_request(), plan(one))
    assert [(each.component_id, each.num_nodes, each.asked_cpus, each.asked_gpus) for each in spec.components] == [
        ("cpu", 2, 4, None),
        ("gpu", 1, None, 2),
    ]
    assert spec.asked_cpus is None and spec.ray == usual.ray and from_json(RuntimeSpec, to_json(spec)) == spec
    fresh = dataclasses.replace(one, reuse=False)
    assert fresh.runtime_spec("slurm-1", usual, usual.job_request(), plan(one)).ray is None
    plain = setup(launcher=RayLauncher(num_cpus_per_node=2))
    spec = plain.runtime_spec("slurm-1", plain.default, plain.default.job_request(), plan(plain))
    assert spec.components == [] and spec.asked_cpus == 2


def test_the_batch_script() -> None:
    one = setup(CPU, GPU)
    script = one.example(plan(one))
    first, _, second = script.partition("#SBATCH hetjob")
    assert "--partition=compute" in first and "--partition=gpu" in second and second.count(" session ") == 1
