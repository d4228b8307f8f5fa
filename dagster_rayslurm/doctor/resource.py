"""Python code of a `SlurmResource` for the cluster that was examined, to paste into Dagster definitions. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..config import StrictConfig, StrictResource
from ..slurm.config import SlurmQueueConfig
from . import Wanted
from .slurm_lines import Slurm

_SECRETS = ("password", "key_passphrase")


def resource_text(wanted: Wanted, slurm: Slurm) -> str:
    """Returns Python code that constructs the examined resource, with an existing partition in place of a missing one."""
    resource = wanted.slurm
    known = [each.name for each in slurm.partitions]
    partition = ",".join(each.name for each in slurm.chosen())
    if not partition:
        partition = next((each.name for each in slurm.partitions if each.is_default or len(each.usable) > 0), known[0])
    queue = wanted.queue.having(partition=partition, account=slurm.value("account"), qos=slurm.value("qos"))
    lines = ["SlurmResource("]
    if resource.ssh is not None:
        lines += [f"    ssh={line}" if number == 0 else f"    {line}" for number, line in enumerate(_made(resource.ssh))]
    lines += [f"    queue={line}" if number == 0 else f"    {line}" for number, line in enumerate(_made(queue))]
    if resource.remote_base != type(resource)().remote_base:
        lines.append(f"    remote_base={resource.remote_base!r},")
    return "\n".join([*lines, ")"])


def _made(config: StrictConfig | StrictResource) -> Iterator[str]:
    """Yields the lines of the Python expression that constructs a configuration object, with a comma at the end.

    Only fields that differ from their defaults appear, and the time limit of a queue. Secrets are environment variables, whose
    names begin with `prefix`.
    """
    yield f"{type(config).__name__}("
    for name, field in type(config).model_fields.items():
        value: Any = getattr(config, name)
        shown = isinstance(config, SlurmQueueConfig) and name == "time_limit"
        if name == "kind" or (value == field.default and not shown):
            continue
        if isinstance(value, (StrictConfig, StrictResource)):
            lines = list(_made(value))
            yield f"    {name}={lines[0]}"
            yield from (f"    {line}" for line in lines[1:])
        elif name in _SECRETS:
            yield f'    {name}=dg.EnvVar("SLURM_EDGE_NODE_{name.upper()}"),'
        else:
            yield f"    {name}={value!r},"
    yield "),"
