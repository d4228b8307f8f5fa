"""Components of a heterogeneous job: their order, shared and inherited fields, and one sentence for each mistake."""

from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_rayslurm import (
    BashLauncher,
    ComputeResource,
    HetComponent,
    Launcher,
    RayLauncher,
    RunFailure,
    SlurmQueueConfig,
    SlurmResource,
)
from dagster_rayslurm.components import arrange, component_specs, merge_launchers, on_one_machine, ray_across, request_for
from dagster_rayslurm.runtime.protocol.spec import ComponentSpec, NodeSpec, RaySpec

PLAIN = RayLauncher()


def het(name: str, launcher: Any = PLAIN, head: bool = False, **queue: Any) -> HetComponent:
    return HetComponent(component_id=name, queue=SlurmQueueConfig(**queue), launcher=launcher, head=head)


def refusal(*components: HetComponent, launcher: Launcher = PLAIN, payload_in: str | None = None) -> str:
    with pytest.raises(ValueError) as caught:
        settled = merge_launchers(launcher, arrange(components, payload_in))
        ray_across(launcher, settled)
        request_for(settled, job_name="job", comment="why")
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---- Order


@given(st.permutations(["a", "b", "c", "d"]), st.sampled_from(["a", "b", "c", "d"]))
def test_the_head_comes_first_and_the_others_keep_their_order(names: list[str], head: str) -> None:
    rest = [name for name in names if name != head]
    marked = arrange([het(name, head=name == head) for name in names])
    chosen = arrange([het(name, head=name == rest[0]) for name in names], payload_in=head)
    assert [each.component_id for each in marked] == [each.component_id for each in chosen] == [head, *rest]
    assert [each.component_id for each in arrange([het(name) for name in names])] == names


def test_fields_of_the_whole_job_are_shared() -> None:
    queues = [
        each.queue
        for each in arrange([het("a", time_limit="2:00:00"), het("b", requeue=True), het("c", signal_before_timeout="USR1@60")])
    ]
    assert {(queue.time_limit, queue.requeue, queue.signal_before_timeout) for queue in queues} == {("2:00:00", True, "USR1@60")}


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        ({"time_limit": "120"}, {"time_limit": "02:00:00"}, "120"),
        ({"signal_before_timeout": "SIGUSR1@300"}, {"signal_before_timeout": "USR1@300"}, "SIGUSR1@300"),
        ({"signal_before_timeout": "300"}, {"signal_before_timeout": "TERM@300"}, "300"),
        # A default says nothing, however it is written.
        ({"time_limit": "60"}, {"time_limit": "02:00:00"}, "02:00:00"),
    ],
)
def test_equal_values_in_other_spelling_do_not_contradict(first: dict[str, Any], second: dict[str, Any], said: str) -> None:
    queues = [each.queue.model_dump() for each in arrange([het("a", **first), het("b", **second)])]
    assert {queue[field] for queue in queues for field in first} == {said}


@pytest.mark.parametrize(
    ("components", "says"),
    [
        ([], "components: there is none"),
        ([het("a"), het("b"), het("a")], "two are called 'a'"),
        ([het("a", head=True), het("b", head=True)], "'a' and 'b' are both marked head"),
        ([het(f"c{number}") for number in range(129)], "at most 128 components"),
        ([het("a", time_limit="1:00"), het("b", time_limit="2:00")], "time_limit is '1:00' in 'a', '2:00' in 'b'"),
        ([het("a", mem="1G"), het("b")], "'b' says no SlurmQueueConfig.mem"),
        ([het("a", mem="1G"), het("b", mem_per_cpu="1G")], "'b' has mem_per_cpu and 'a' before it has mem='1G'"),
        ([het("a", account="x"), het("b")], "'b' says no SlurmQueueConfig.account"),
        ([het("a"), het("b", qos="x"), het("c")], "'c' says no SlurmQueueConfig.qos"),
        ([het("a", reservation="x"), het("b")], "'b' says no SlurmQueueConfig.reservation"),
        (
            [het("a", extra_sbatch=["--mail-type=END", "--nice=7"]), het("b")],
            "'b' has no --nice in SlurmQueueConfig.extra_sbatch, so sbatch would give it '--nice=7' of 'a'",
        ),
        ([het("a", extra_sbatch=["--hold"]), het("b", extra_sbatch=["--hold"]), het("c")], "'c' has no --hold"),
        ([het("a"), het("b", head=True, extra_sbatch=["--nice=7"])], "'a' has no --nice"),
        ([het("a", extra_sbatch=["--depend=singleton"]), het("b")], "'b' has no --dependency"),
        ([het("a", mem="1G", mem_per_cpu="1G")], "component 'a': SlurmQueueConfig.mem='1G' and mem_per_cpu"),
        ([het("a"), het("b", gpu_type="x")], "component 'b': SlurmQueueConfig.gpu_type='x' is given"),
        ([het("a"), het("b", extra_sbatch=["--array=1-2"])], "component 'b': SlurmQueueConfig.extra_sbatch: --array"),
        (
            [het("a", cpus_per_node=1, launcher=RayLauncher(num_cpus_per_node=2))],
            "component 'a': RayLauncher.num_cpus_per_node=2 is more than SlurmQueueConfig.cpus_per_node=1 grants",
        ),
        ([het("a"), het("b", launcher=RayLauncher(component_id="a"))], "the launcher of 'b' has component_id='a'"),
        ([het("a"), het("b", launcher=BashLauncher())], "the launcher of 'b' has no Ray"),
        (
            [het("a"), het("b", launcher=RayLauncher(dashboard=False))],
            "dashboard in the launcher of 'b' is for the whole cluster",
        ),
        ([het("a"), het("b", launcher=RayLauncher(preload=["ray"]))], "preload in the launcher of 'b'"),
        ([het("a", launcher=RayLauncher(labels={"component": "x"}))], "the launcher of 'a' has a label 'component'"),
        ([het("a", launcher=RayLauncher(resources={"component:a": 1}))], "a resource that begins with 'component:'"),
    ],
)
def test_contradicting_components_are_refused(components: list[HetComponent], says: str) -> None:
    assert says in refusal(*components)


def test_an_unknown_component_is_refused() -> None:
    assert "there is no component 'x'; there are 'a', 'b'" in refusal(het("a"), het("b"), payload_in="x")


def test_later_components_may_set_more_options() -> None:
    """Later components inherit options; earlier ones do not."""
    assert len(arrange([het("a"), het("b", mem="1G", account="x", qos="y", extra_sbatch=["--nice=7"])])) == 2


def test_options_that_are_not_inherited_or_are_repeated() -> None:
    reset = ["--mail-type=END", "--gres=lustre:1", "--threads-per-core=1", "--exclusive=user", "--cpu-freq=high"]
    own = [het("a", extra_sbatch=["--nice=7", *reset]), het("b", extra_sbatch=["--nice=0"])]
    assert [each.queue.extra_sbatch[0] for each in arrange(own)] == ["--nice=7", "--nice=0"]


# ---- What each node has


def test_a_components_launcher_sets_node_fields_and_the_payloads_launcher_the_rest() -> None:
    launcher = RayLauncher(num_cpus_per_node=2, labels={"tier": "any"}, dashboard=False, startup_timeout=7)
    own = RayLauncher(num_gpus_per_node=1, labels={"tier": "fast"}, network_interface="ib0", dashboard=False)
    components = arrange([het("a"), het("b", launcher=own, num_nodes=3)])
    spec = ray_across(launcher, components)
    assert spec is not None and spec == ray_across(launcher, merge_launchers(launcher, components))
    assert (spec.dashboard, spec.startup_timeout, spec.num_cpus) == (False, 7, 2)
    assert spec.components == [
        NodeSpec("a", num_cpus=2, labels={"tier": "any"}),
        NodeSpec("b", num_cpus=2, num_gpus=1, labels={"tier": "fast"}, network_interface="ib0"),
    ]
    request = request_for(merge_launchers(launcher, components), job_name="job", comment="why")
    assert component_specs(request) == [ComponentSpec("a", 1, 2, None), ComponentSpec("b", 3, 2, 1)]
    assert [part.component_id for part in request.components] == [
        "a",
        "b",
    ] and request.further_components[0].further_components == ()


def test_min_nodes_above_the_number_of_nodes_is_refused() -> None:
    said = refusal(het("a"), het("b", num_nodes=2), launcher=RayLauncher(min_nodes=4))
    assert "RayLauncher.min_nodes=4 is more than the cluster will have: 3 nodes" in said


@pytest.mark.parametrize("components", [[het("a")], [het("a"), het("b", num_nodes=2)]])
def test_a_cluster_has_all_nodes_of_its_components(components: list[HetComponent]) -> None:
    """Fewer would be those of the first components, and tasks that ask for the last ones would wait for ever."""
    said = refusal(*components, launcher=RayLauncher(max_workers=1, min_nodes=1))
    assert "RayLauncher.max_workers=1" in said and "each component's SlurmQueueConfig.num_nodes says" in said


def test_a_payload_without_ray_needs_its_first_component_alone() -> None:
    launcher = BashLauncher(num_cpus=3, num_gpus=1)
    components = merge_launchers(launcher, arrange([het("a"), het("b", head=True, launcher=BashLauncher())]))
    assert ray_across(launcher, components) is None
    assert component_specs(request_for(components, job_name="job", comment="why")) == [
        ComponentSpec("b", 1, 3, 1),
        ComponentSpec("a", 1, None, None),
    ]
    said = refusal(het("a", cpus_per_node=2), het("b", cpus_per_node=8), launcher=launcher)
    assert "component 'a': BashLauncher.num_cpus=3 is more than SlurmQueueConfig.cpus_per_node=2 grants" in said


def test_a_launcher_of_ones_own() -> None:
    class Mine(Launcher):
        def ray_spec(self) -> RaySpec:
            return RaySpec(num_cpus=5, dashboard=False)

    spec = ray_across(Mine(), arrange([het("a", launcher=RayLauncher(num_cpus_per_node=1)), het("b")]))
    assert spec is not None and not spec.dashboard and [node.num_cpus for node in spec.components] == [1, None]


# ---- What a resource refuses


def said_by(mode: str = "slurm-hetjob", arguments: dict[str, Any] | None = None, **fields: Any) -> str:
    compute = ComputeResource(mode=mode, slurm=SlurmResource(remote_base="/base"), **fields)
    with pytest.raises(RunFailure) as caught:
        compute.job_script(**{"payload_path": ["true"], **(arguments or {})})
    assert caught.value.kind == "configuration" and "\n" not in (caught.value.description or "")
    return caught.value.description or ""


TWO = [het("a"), het("b")]


@pytest.mark.parametrize(
    ("fields", "arguments", "says"),
    [
        ({}, {}, "components: mode 'slurm-hetjob' needs them"),
        ({"components": TWO}, {"components": []}, "components: mode 'slurm-hetjob' needs them"),
        ({"mode": "slurm", "components": TWO}, {}, "components: a job of mode 'slurm' has none"),
        ({"mode": "slurm"}, {"components": TWO}, "components: a job of mode 'slurm' has none"),
        ({"components": TWO}, {"queue": SlurmQueueConfig()}, "queue: each component has its own queue"),
        ({"mode": "local", "components": TWO}, {"queue": SlurmQueueConfig()}, "queue: each component has its own queue"),
        ({"components": TWO}, {"launcher": RayLauncher(component_id="x")}, "there is no component 'x'"),
        ({"mode": "local", "components": TWO}, {"launcher": RayLauncher(component_id="x")}, "there is no component 'x'"),
        ({"mode": "slurm", "default_launcher": RayLauncher(component_id="x")}, {}, "launcher.component_id"),
        ({"mode": "local", "default_launcher": RayLauncher(component_id="x")}, {}, "launcher.component_id"),
        ({"mode": "local", "components": [het("a", mem="1G"), het("b")]}, {}, "'b' says no SlurmQueueConfig.mem"),
        ({"mode": "slurm-session", "components": TWO, "topology": "separate"}, {}, "topology: a session has one cluster"),
        ({"mode": "local", "topology": "separate"}, {}, "topology: 'separate' needs components"),
        ({"components": TWO}, {"payload_path": {"a": "true", "b": "true"}}, "payload_path: one payload for each component"),
        ({"components": TWO, "topology": "separate"}, {"launcher": RayLauncher()}, "launcher: with topology='separate'"),
        ({}, {"components": "ab"}, "components: 'ab' is not a list of HetComponent"),
        ({}, {"components": [{"component_id": "a"}]}, "is not a list of HetComponent"),
        ({}, {"components": [het("a", partition=dg.EnvVar("RS_NOT_SET"))]}, "components[0].queue.partition"),
    ],
)
def test_calls_that_a_mode_does_not_support_are_refused(fields: dict[str, Any], arguments: dict[str, Any], says: str) -> None:
    assert says in said_by(arguments=arguments, **fields)


@pytest.mark.parametrize("topology", ["spanning", "separate"])
def test_job_script_refuses_what_run_refuses(topology: str) -> None:
    more = RayLauncher(min_nodes=3)
    separate = topology == "separate"
    components = [het("a", launcher=more if separate else PLAIN), het("b")]
    fields = {"components": components, "topology": topology}
    said = said_by(**fields, **({} if separate else {"default_launcher": more}))  # type: ignore[arg-type]
    assert "RayLauncher.min_nodes=3 is more than" in said
    assert "RayLauncher.min_nodes=3 is more than" in said_by(mode="slurm", default_launcher=more)
    assert "data_dir: 'x' is relative" in said_by(mode="slurm-session", data_dir="x")
    said = said_by(mode="slurm-session", data_dir="/scratch/${USER}/x")
    assert "data_dir: '/scratch/${USER}/x': variables such as ${USER} are not expanded" in said


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("mode", ["local", "slurm-session"])
def test_components_of_a_call_replace_those_of_the_resource(mode: str, reuse: bool, tmp_path: Path) -> None:
    compute = ComputeResource(
        mode=mode,
        slurm=SlurmResource(remote_base="/base"),
        local_base=str(tmp_path),
        components=[het("a")],
        default_launcher=RayLauncher(component_id="z"),
        enable_cluster_reuse=reuse,
    )
    assert "z" in compute.job_script(payload_path=["true"], components=[het("z", num_nodes=2)])
    with pytest.raises(RunFailure, match="there is no component 'z'"):
        compute.job_script(payload_path=["true"])


def test_variables_in_components_of_a_call_are_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RS_PARTITION", "big")
    monkeypatch.setenv("RS_NODES", "3")
    compute = ComputeResource(mode="slurm-hetjob", slurm=SlurmResource(remote_base="/base"), components=TWO)
    own = [het("a"), het("b", partition=dg.EnvVar("RS_PARTITION"), num_nodes=dg.EnvVar.int("RS_NODES"))]
    text = compute.job_script(payload_path=["true"], components=own)
    first, second = text.split("#SBATCH hetjob\n")
    assert "--partition" not in first and "--partition=big\n#SBATCH --nodes=3\n" in second


def test_an_unknown_topology_is_refused() -> None:
    with pytest.raises(ValueError, match="'star' is not one of 'spanning', 'separate'"):
        ComputeResource(topology="star")


def test_simulated_nodes_have_what_launcher_or_queue_asks_for() -> None:
    nodes = [NodeSpec("launcher", num_cpus=3, num_gpus=1), NodeSpec("queue"), NodeSpec("large"), NodeSpec("nothing")]
    requested = [
        ComponentSpec("launcher", asked_cpus=1),
        ComponentSpec("queue", asked_cpus=2, asked_gpus=4),
        ComponentSpec("large", asked_cpus=64),
        ComponentSpec("nothing"),
    ]
    found = on_one_machine(RaySpec(components=nodes), requested, cpus=8).components
    assert [(each.num_cpus, each.num_gpus) for each in found] == [(3, 1), (2, 4), (8, 0), (8, 0)]
