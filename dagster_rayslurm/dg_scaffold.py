"""What `dg scaffold defs` writes for the components of `dg_components`: YAML, a payload, and a resource if there is none."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import dagster as dg
from dagster.components import scaffold_component
from pydantic import BaseModel, Field

_RESOURCE = "dagster_rayslurm.ComputeResourceComponent"
_RESOURCE_YAML = f"""\
type: {_RESOURCE}

attributes:
  resource_key: compute
  resource:
    # RAYSLURM_MODE=slurm runs payloads on the cluster; then name it, and an environment there, as below.
    mode: "{{{{ env('RAYSLURM_MODE', 'local') }}}}"
    # slurm:
    #   ssh: {{host: login.example.org, user: me}}
    #   queue: {{partition: compute, time_limit: "01:00:00"}}
    # pre_deployed_env_path: ~/envs/study
"""
_SCRIPT_YAML = """\
type: TYPE

attributes:
  script: SCRIPT
  assets:
    - key: KEY
  # Fields of the launcher and the queue, over those of the resource:
  # launcher: {num_cpus_per_node: 8}
  # queue: {num_nodes: 2, mem: 16G}
"""
_PAYLOAD = '''\
"""Makes the asset KEY, with a Ray cluster of its own, on this machine or in a Slurm job."""

import ray
from dagster_pipes import open_dagster_pipes


@ray.remote
def square(number: int) -> int:
    return number * number


with open_dagster_pipes() as pipes:
    ray.init()
    total = sum(ray.get([square.remote(number) for number in range(100)]))
    pipes.log.info(f"the sum of 100 squares is {total}")
    pipes.report_asset_materialization(metadata={"total": total})
'''


class ScriptParams(BaseModel):
    """Options of `dg scaffold defs dagster_rayslurm.RaySlurmScriptComponent`."""

    asset_key: str | None = Field(default=None, description="Key of the asset; by default the name of the new directory.")


class ScriptScaffolder(dg.Scaffolder[ScriptParams]):
    """Writes a component with one asset, its payload, and a resource in local mode if the project has no `ComputeResource`."""

    @classmethod
    def get_scaffold_params(cls) -> type[ScriptParams]:
        """Returns the class with the options."""
        return ScriptParams

    def scaffold(self, request: dg.ScaffoldRequest[ScriptParams]) -> None:
        """Write the files into the directory of the request."""
        target = request.target_path
        directory = target.parent if request.append else target
        key = request.params.asset_key or re.sub(r"\W", "_", directory.name)
        script = directory / (re.sub(r"\W", "_", key) + ".py")
        if script.exists():
            raise ValueError(f"{script} exists already; name another asset with --asset-key")
        if request.append or request.scaffold_format == "python":
            scaffold_component(request, {"script": script.name, "assets": [{"key": key}]})
        else:
            text = _SCRIPT_YAML.replace("TYPE", request.type_name).replace("SCRIPT", script.name).replace("KEY", key)
            (target / "defs.yaml").write_text(text)
        script.write_text(_PAYLOAD.replace("KEY", key))
        defs = next((each for each in directory.parents if each.name == "defs"), directory.parent)
        if not _has_resource(defs):
            resource = defs / "compute_resource"
            resource.mkdir(exist_ok=True)
            (resource / "defs.yaml").write_text(_RESOURCE_YAML)


class ResourceScaffolder(dg.Scaffolder[Any]):
    """Writes a resource in local mode, with a Slurm cluster to fill in."""

    def scaffold(self, request: dg.ScaffoldRequest[Any]) -> None:
        """Write the file into the directory of the request."""
        if request.append or request.scaffold_format == "python":
            scaffold_component(request, {"resource_key": "compute", "resource": {"mode": "local"}})
        else:
            (request.target_path / "defs.yaml").write_text(_RESOURCE_YAML)


def _has_resource(defs: Path) -> bool:
    """Returns whether a file in the project's directory of definitions names a `ComputeResource`."""
    files = (path for path in defs.rglob("*") if path.suffix in (".py", ".yaml", ".yml") and path.is_file())
    return any("ComputeResource" in path.read_text(encoding="utf-8", errors="replace") for path in files)
