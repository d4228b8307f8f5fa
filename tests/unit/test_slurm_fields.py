"""The declaration of the fields of `SlurmQueueConfig`: complete, and used by every part of the package that treats fields."""

from typing import Any

import pytest

from dagster_rayslurm import SlurmQueueConfig
from dagster_rayslurm.backends.sessions.matching import Requirements, misfit
from dagster_rayslurm.plan import merge
from dagster_rayslurm.slurm.request import (
    FIELD_OF_OPTION,
    INHERITED_OPTIONS,
    RESERVED_OPTIONS,
    SBATCH_FIELDS,
    SbatchField,
    make_request,
    render_script,
)

VALUES: dict[str, tuple[Any, Any]] = {
    "partition": ("gpu", "cpu"),
    "account": ("study", "other"),
    "qos": ("normal", "high"),
    "reservation": ("course", "exam"),
    "constraint": ("a100", "h100"),
    "num_nodes": (2, 1),
    "cpus_per_node": (4, 2),
    "gpus_per_node": (2, 1),
    "gpu_type": ("a100", "h100"),
    "mem": ("2G", "1G"),
    "mem_per_cpu": ("2G", "1G"),
    "time_limit": ("02:00:00", "00:30:00"),
    "exclusive": (True, False),
    "nodelist": ("c1", "c2"),
    "exclude": ("c1", "c2"),
    "switches": ("1", "2"),
    "requeue": (True, False),
    "signal_before_timeout": ("USR1@10", "USR2@10"),
    "extra_sbatch": (["--nice=1"], []),
}
"""For each field a value, and one with which a session cannot run a payload that wants the first."""

NEVER_COMPARED = {"requeue"}
"""Fields that say nothing about what a session has."""


def by_name(field: SbatchField) -> str:
    return field.name


def queue(name: str, value: Any) -> SlurmQueueConfig:
    return SlurmQueueConfig(**{**({"gpus_per_node": 1} if name == "gpu_type" else {}), name: value})


def test_every_field_is_declared_once() -> None:
    assert [field.name for field in SBATCH_FIELDS] == list(SlurmQueueConfig.model_fields)
    assert VALUES.keys() == SlurmQueueConfig.model_fields.keys(), "a new field needs an example here"
    assert {field.name for field in SBATCH_FIELDS if field.granted is None} == NEVER_COMPARED


@pytest.mark.parametrize("field", SBATCH_FIELDS, ids=by_name)
def test_a_field_is_compared_with_what_a_session_has(field: SbatchField) -> None:
    wanted, less = VALUES[field.name]
    for value, fits in ((wanted, True), (less, field.name in NEVER_COMPARED)):
        capacity = Requirements(None, (), queue(field.name, value)).capacity(reuse=True)
        problem = misfit(Requirements(None, (), queue(field.name, wanted), time_limited=True), capacity)
        assert (problem is None) == fits, (value, problem)
        assert fits or f"SlurmQueueConfig.{field.name}=" in (problem or "")


@pytest.mark.parametrize("field", SBATCH_FIELDS, ids=by_name)
def test_a_field_reaches_the_job_script_and_is_documented_by_its_option(field: SbatchField) -> None:
    value, _ = VALUES[field.name]
    request = make_request(queue(field.name, value), (), job_name="job", comment="")
    script = render_script(request, ["true"], "/run", {})
    if field.option is not None:
        assert f"#SBATCH --{field.option}" in script
        assert f"`--{field.option}" in (SlurmQueueConfig.model_fields[field.name].description or "")
    elif field.name != "signal_before_timeout":
        assert str(value[0] if isinstance(value, list) else value) in script


CONTRADICTIONS = [(field.name, other) for field in SBATCH_FIELDS for other in field.excludes]


@pytest.mark.parametrize(("name", "other"), CONTRADICTIONS)
def test_fields_that_exclude_each_other_are_refused_together_and_replaced_by_a_later_one(name: str, other: str) -> None:
    assert (other, name) in CONTRADICTIONS
    values = {each: VALUES[each][0] for each in (name, other)}
    with pytest.raises(ValueError, match="exclude each other") as caught:
        make_request(SlurmQueueConfig(**values), (), job_name="job", comment="")
    assert all(f"{each}={value!r}" in str(caught.value) for each, value in values.items())
    assert merge(queue(other, values[other]), queue(name, values[name])) == queue(name, values[name])


def test_no_option_has_two_meanings() -> None:
    assert not FIELD_OF_OPTION.keys() & RESERVED_OPTIONS.keys()
    assert not set(INHERITED_OPTIONS) & {*FIELD_OF_OPTION, *RESERVED_OPTIONS}
