"""Writes Python code of a `SlurmResource` for the examined cluster, to paste into Dagster definitions. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..config import StrictConfig, StrictResource
from ..slurm.config import SlurmQueueConfig
from . import Wanted
from .slurm_lines import Slurm

_SECRETS = ("password", "key_passphrase")


def resource_text(wanted: Wanted, slurm: Slurm) -> str:
    """Returns Python code that constructs the examined `SlurmResource` with the partition, account and QOS that a job would get.

    `slurm` has the answers of Slurm. If the requested partitions do not exist, the code has an existing partition instead.
    """
    partitions = slurm.chosen()
    if not partitions:
        partitions = sorted(slurm.partitions, key=lambda each: (not each.is_default, not each.usable))[:1]
    names = ",".join(each.name for each in partitions)
    queue = wanted.queue.having(partition=names or None, account=slurm.value("account"), qos=slurm.value("qos"))
    fields = {name: getattr(wanted.slurm, name) for name in type(wanted.slurm).model_fields}
    return "\n".join(_made(type(wanted.slurm)(**{**fields, "queue": queue}))).removesuffix(",")


def _made(config: StrictConfig | StrictResource, prefix: str = "SLURM_EDGE_NODE_") -> Iterator[str]:
    """Yields the lines of a Python expression that constructs a configuration object; the last line ends with a comma.

    The expression has the fields that differ from the defaults, and always the time limit of a queue. In the expression, a
    secret is read from an environment variable whose name begins with `prefix`.
    """
    yield f"{type(config).__name__}("
    for name, field in type(config).model_fields.items():
        value: Any = getattr(config, name)
        shown = isinstance(config, SlurmQueueConfig) and name == "time_limit"
        if name == "kind" or (value == field.default and not shown):
            continue
        if isinstance(value, (StrictConfig, StrictResource)):
            lines = list(_made(value, f"{prefix}JUMP_" if name == "jump_host" else prefix))
            yield f"    {name}={lines[0]}"
            yield from (f"    {line}" for line in lines[1:])
        elif name in _SECRETS:
            yield f'    {name}=dg.EnvVar("{prefix}{name.upper()}"),'
        else:
            yield f"    {name}={value!r},"
    yield "),"
