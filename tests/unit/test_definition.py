"""Unusable resources are refused when definitions load, except for what an `EnvVar` or the launchpad decides."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from dagster_rayslurm import (
    ComputeResource,
    HetComponent,
    PreDeployedEnvironment,
    SessionConfig,
    SlurmQueueConfig,
    SlurmResource,
    SSHConnectionResource,
)

EDGE = SSHConnectionResource(host="edge")
BOTH = SlurmQueueConfig(mem="1G", mem_per_cpu="1G")
PART = HetComponent(component_id="cpu", queue=SlurmQueueConfig())


@dg.asset
def seen(compute: ComputeResource) -> str:
    return compute.mode


def definitions(compute: Any) -> dg.Definitions:
    return dg.Definitions(assets=[seen], resources={"compute": compute})


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"mode": "slurm"}, r"slurm: mode 'slurm' needs a Slurm cluster; set slurm=SlurmResource\(…\)"),
        ({"mode": "slurm", "slurm": SlurmResource(), "components": [PART]}, "components: a job of mode 'slurm' has none"),
        ({"mode": "slurm", "slurm": SlurmResource(ssh=EDGE)}, 'name the environment there: pre_deployed_env_path="/path/to/env"'),
        ({"mode": "slurm", "slurm": SlurmResource(ssh=EDGE), "pre_deployed_env_path": "study"}, "'study' does not say where"),
        (
            {"mode": "slurm", "slurm": SlurmResource(ssh=EDGE), "pre_deployed_env_path": "$HOME/env"},
            r"environment: '\$HOME/env': variables such as \$HOME are not expanded; write the value, or begin with \"~/\"",
        ),
        ({"mode": "slurm", "slurm": SlurmResource(queue=BOTH)}, "mem='1G' and mem_per_cpu='1G' exclude each other"),
        ({"mode": dg.EnvVar("MODE"), "slurm": SlurmResource(queue=BOTH)}, "exclude each other"),
        (
            {"mode": "slurm-hetjob", "slurm": SlurmResource(), "components": [HetComponent(component_id="a", queue=BOTH)]},
            "exclude each other",
        ),
        (
            {"mode": "slurm", "slurm": SlurmResource(queue=SlurmQueueConfig(extra_sbatch=["--mem=3G"]))},
            "--mem has a field of its own; use mem",
        ),
        (
            {
                "mode": "slurm-session",
                "slurm": SlurmResource(queue=SlurmQueueConfig(signal_before_timeout="USR1@900")),
                "session": SessionConfig(time_limit="00:10:00"),
            },
            "signal_before_timeout='USR1@900' is not within time_limit='00:10:00'",
        ),
        (
            {"mode": "slurm-session", "slurm": SlurmResource(), "components": [PART], "session": SessionConfig(num_nodes=3)},
            "SessionConfig.num_nodes=3 says nothing of which component",
        ),
    ],
)
def test_unusable_resources_are_refused_when_definitions_load(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        dg.Definitions.validate_loadable(definitions(ComputeResource(**fields)))


@pytest.mark.parametrize(
    "fields",
    [
        {"mode": "local", "slurm": SlurmResource(ssh=EDGE, queue=BOTH), "pre_deployed_env_path": "study"},
        {"mode": dg.EnvVar("MODE")},
        {"mode": dg.EnvVar("MODE"), "slurm": SlurmResource(ssh=EDGE)},
        {"mode": "slurm", "slurm": SlurmResource(ssh=EDGE), "pre_deployed_env_path": dg.EnvVar("ENV_PATH")},
        {"mode": "slurm", "slurm": SlurmResource(ssh=EDGE), "environment": PreDeployedEnvironment(path=dg.EnvVar("ENV_PATH"))},
        {"mode": "slurm", "slurm": SlurmResource(queue=SlurmQueueConfig(mem=dg.EnvVar("MEM"), mem_per_cpu="1G"))},
        {"mode": "slurm", "slurm": SlurmResource()},
        # `run(components=…)` may name them.
        {"mode": "slurm-hetjob", "slurm": SlurmResource()},
    ],
)
def test_resources_that_a_run_may_use_load(fields: dict[str, Any]) -> None:
    dg.Definitions.validate_loadable(definitions(ComputeResource(**fields)))


def test_the_launchpad_configures_a_resource() -> None:
    config = {"resources": {"compute": {"config": {"mode": "slurm-session"}}}}
    compute = ComputeResource(mode="slurm", slurm=SlurmResource())
    result = dg.materialize([seen], resources={"compute": compute}, run_config=config)
    assert result.output_for_node("seen") == "slurm-session"
    at_launch = dg.materialize(
        [seen], resources={"compute": ComputeResource.configure_at_launch()}, run_config={**config, **LAUNCHED}
    )
    assert at_launch.output_for_node("seen") == "slurm"


LAUNCHED = {"resources": {"compute": {"config": {"mode": "slurm", "pre_deployed_env_path": "/env"}}}}


def test_dagster_validates_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "definitions.py").write_text(
        "import dagster as dg\n"
        "from dagster_rayslurm import ComputeResource\n"
        'defs = dg.Definitions(resources={"compute": ComputeResource(mode="slurm")})\n'
    )
    command = [sys.executable, "-m", "dagster", "definitions", "validate", "-f", "definitions.py"]
    env = {**os.environ, "DAGSTER_HOME": str(tmp_path)}
    said = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert said.returncode != 0
    assert "ValueError: slurm: mode 'slurm' needs a Slurm cluster; set slurm=SlurmResource(…)" in said.stdout + said.stderr
