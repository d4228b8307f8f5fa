"""Error messages for misspelt fields and arguments, and for names of dagster-slurm."""

import inspect
import re
from typing import Any

import pytest
from pydantic import ValidationError

import dagster_rayslurm
from dagster_rayslurm import ComputeResource, RayLauncher, SessionConfig, SlurmQueueConfig, SlurmResource, SSHConnectionResource
from dagster_rayslurm.fields import _INSTEAD


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("default_launcher", RayLauncher, "RayLauncher is a class; write RayLauncher(…)"),
        ("default_launcher", "ray", "'ray' cannot be used; write RayLauncher(…) or BashLauncher(…)"),
        ("default_launcher", SessionConfig(), "write RayLauncher(…) or BashLauncher(…)"),
        ("environment", "/opt/ray", "'/opt/ray' cannot be used; write InheritedEnvironment(…) or PreDeployedEnvironment(…)"),
        ("slurm", SlurmResource, "SlurmResource is a class; write SlurmResource(…)"),
    ],
)
def test_a_value_of_the_wrong_class_is_one_sentence(name: str, value: Any, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"ComputeResource.{name}: ")) as caught:
        ComputeResource(**{name: value})
    assert says in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("cls", "name", "says"),
    [
        (SlurmQueueConfig, "cpu_per_node", "SlurmQueueConfig has no field 'cpu_per_node'; did you mean cpus_per_node?"),
        (SlurmQueueConfig, "timelimit", "did you mean time_limit?"),
        (SlurmQueueConfig, "cpus", "use cpus_per_node"),
        (SlurmQueueConfig, "xyz", "fields are account, constraint, cpus_per_node"),
        (SlurmResource, "status_poll_interval_seconds", "use poll_interval"),
        (SSHConnectionResource, "hosts", "did you mean host?"),
        (SSHConnectionResource, "key", "use key_path"),
        (ComputeResource, "debug_mode", 'use keep_run_dirs="all"'),
        (ComputeResource, "allocation_scope", 'session=SessionConfig(scope="run")'),
        (ComputeResource, "defalt_launcher", "did you mean default_launcher?"),
        (ComputeResource, "pack_platform", "use environment=UvEnvironment(…)"),
        (RayLauncher, "num_cpus_pernode", "did you mean num_cpus_per_node?"),
        (RayLauncher, "ray_start_args", "use ray_args"),
        (SessionConfig, "max_concurrent_jobs", "use max_concurrent_payloads"),
    ],
)
def test_an_unknown_field_is_explained(cls: Any, name: str, says: str) -> None:
    with pytest.raises(ValidationError) as caught:
        cls(**{name: 1})
    assert len(caught.value.errors()) == 1 and says in str(caught.value)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("extra_slurm_opts", "run() has no argument 'extra_slurm_opts'; use queue=SlurmQueueConfig(…)"),
        ("poll_timeout", "use ComputeResource(queue_timeout=…)"),
        ("launchr", "did you mean launcher?"),
        ("xyz", "arguments are components, context,"),
    ],
)
def test_an_unknown_argument_of_run_is_explained(name: str, says: str) -> None:
    with pytest.raises(TypeError, match=re.escape(says)):
        ComputeResource().run(context=None, payload_path="x", **{name: 1})  # type: ignore[arg-type]


def test_the_signature_of_run_stays_readable() -> None:
    parameters = inspect.signature(ComputeResource.run).parameters
    assert "payload_path" in parameters and not any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def test_classes_of_dagster_slurm_are_explained() -> None:
    theirs = type("SlurmSessionResource", (), {"__module__": "dagster_slurm.resources.session"})()
    with pytest.raises(ValueError, match=r"ComputeResource\.session: SlurmSessionResource of dagster_slurm cannot be used here"):
        ComputeResource(session=theirs)


@pytest.mark.parametrize("owner", _INSTEAD)
def test_suggested_names_exist(owner: str) -> None:
    cls: Any = getattr(dagster_rayslurm, owner, ComputeResource)
    known = set(inspect.signature(ComputeResource.run).parameters) if owner == "run()" else set(cls.model_fields)
    for names, instead in _INSTEAD[owner].items():
        assert not known.intersection(names.split()), f"{owner} has one of {names}"
        named = re.match(r"use (\w+)( |$|,)", instead)
        if named and named[1] not in dir(dagster_rayslurm):
            assert named[1] in known, instead
        for other, field in re.findall(r"(ComputeResource|SlurmResource|SessionConfig)\((\w+)=", instead):
            assert field in getattr(dagster_rayslurm, other).model_fields, instead
