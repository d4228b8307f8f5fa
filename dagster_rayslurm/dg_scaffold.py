"""The files that `dg scaffold defs` writes for the components in `dg_components`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import dagster as dg
from pydantic import BaseModel, Field

_RESOURCE_YAML = """\
type: dagster_rayslurm.ComputeResourceComponent

attributes:
  resource_key: compute
  resource:
    # RAYSLURM_MODE=slurm runs payloads on the cluster; then name it, and an environment there, as below.
    mode: "{{ env('RAYSLURM_MODE', 'local') }}"
    # slurm:
    #   ssh: {host: login.example.org, user: me}
    #   queue: {partition: compute, time_limit: "01:00:00"}
    # pre_deployed_env_path: ~/envs/study
"""
_RESOURCE_PYTHON = """\
import dagster as dg
from dagster_rayslurm import ComputeResourceComponent


@dg.component_instance
def load(context: dg.ComponentLoadContext) -> ComputeResourceComponent:
    return ComputeResourceComponent(resource_key="compute", resource={"mode": "local"})
"""
_SCRIPT_YAML = """\
type: dagster_rayslurm.RaySlurmScriptComponent

attributes:
  script: SCRIPT
  assets:
    - key: KEY
  # Fields of the launcher and the queue, over those of the resource:
  # launcher: {num_cpus_per_node: 8}
  # queue: {num_nodes: 2, mem: 16G}
"""
_SCRIPT_PYTHON = """\
import dagster as dg
from dagster_rayslurm import RaySlurmScriptComponent


@dg.component_instance
def load(context: dg.ComponentLoadContext) -> RaySlurmScriptComponent:
    return RaySlurmScriptComponent(script="SCRIPT", assets=[dg.AssetSpec(dg.AssetKey.from_user_string("KEY"))])
"""
# If the component is written in Python, Dagster imports this payload, too, when definitions load.
_PAYLOAD = '''\
"""Makes the asset KEY, with a Ray cluster of its own, on this machine or in a Slurm job."""

import ray
from dagster_pipes import PipesContext, open_dagster_pipes


@ray.remote
def square(number: int) -> int:
    return number * number


def main(pipes: PipesContext) -> None:
    ray.init()
    total = sum(ray.get([square.remote(number) for number in range(100)]))
    pipes.log.info(f"the sum of 100 squares is {total}")
    pipes.report_asset_materialization(metadata={"total": total})


if __name__ == "__main__":
    with open_dagster_pipes() as context:
        main(context)
'''


class ScriptParams(BaseModel):
    """Options of `dg scaffold defs dagster_rayslurm.RaySlurmScriptComponent`."""

    asset_key: str | None = Field(default=None, description="Key of the asset; by default the name of the new directory.")


class ScriptScaffolder(dg.Scaffolder[ScriptParams]):
    """Writes a component with one asset, and the payload of the asset.

    If the project has no `ComputeResource`, the class also writes a resource in local mode.
    """

    @classmethod
    def get_scaffold_params(cls) -> type[ScriptParams]:
        """Returns the class that has the options of `dg scaffold defs`."""
        return ScriptParams

    def scaffold(self, request: dg.ScaffoldRequest[ScriptParams]) -> None:
        """Write the component and the payload into the directory of the request.

        If the project has no `ComputeResource`, also write a component with a resource into the directory of definitions.
        """
        directory = request.target_path
        key = request.params.asset_key or re.sub(r"\W", "_", directory.name)
        script = re.sub(r"\W", "_", key) + ".py"
        name, text = ("defs.yaml", _SCRIPT_YAML) if request.scaffold_format == "yaml" else ("component.py", _SCRIPT_PYTHON)
        (directory / name).write_text(text.replace("KEY", key).replace("SCRIPT", script))
        (directory / script).write_text(_PAYLOAD.replace("KEY", key))
        defs = next((each for each in directory.parents if each.name == "defs"), directory.parent)
        if not _has_resource(defs):
            resource = defs / "compute_resource"
            resource.mkdir(exist_ok=True)
            (resource / "defs.yaml").write_text(_RESOURCE_YAML)


class ResourceScaffolder(dg.Scaffolder[Any]):
    """Writes a component with a `ComputeResource` in local mode; in YAML, comments show the fields of a Slurm cluster."""

    def scaffold(self, request: dg.ScaffoldRequest[Any]) -> None:
        """Write the file of the component into the directory of the request."""
        yaml = request.scaffold_format == "yaml"
        name, text = ("defs.yaml", _RESOURCE_YAML) if yaml else ("component.py", _RESOURCE_PYTHON)
        (request.target_path / name).write_text(text)


def _has_resource(defs: Path) -> bool:
    """Returns whether a file below `defs`, the project's directory of definitions, contains the word `ComputeResource`."""
    files = (path for path in defs.rglob("*") if path.suffix in (".py", ".yaml", ".yml") and path.is_file())
    return any("ComputeResource" in path.read_text(encoding="utf-8", errors="replace") for path in files)
