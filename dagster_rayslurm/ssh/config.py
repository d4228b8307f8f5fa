"""`SSHConnectionResource`: the Dagster resource of an SSH connection to an edge node (login node)."""

from __future__ import annotations

from typing import Any, Optional

import dagster as dg

from ..config import StrictResource
from .fields import SSHLogin, read_variables


class SSHConnectionResource(SSHLogin, StrictResource):
    """An SSH server and how to log in: by key, agent, certificate or password, directly or through jump hosts."""

    jump_host: Optional[SSHConnectionResource] = None
    """Host to go through, itself an SSH connection, which may have a jump host of its own."""

    @classmethod
    def from_env(cls, prefix: str = "SLURM_EDGE_NODE_") -> SSHConnectionResource:
        """Returns an SSH connection that environment variables configure: the fields are `EnvVar` references.

        The name of a variable is `prefix`, followed by `HOST`, `PORT`, `USER`, `KEY_PATH`, `KEY_PASSPHRASE`, `PASSWORD`,
        `CERTIFICATE_PATH`, `HOST_KEY`, `HOST_KEY_CHECKING`, `KNOWN_HOSTS_FILE`, `CLIENT`, `CONNECT_TIMEOUT`, `KEEPALIVE` or
        `PYTHON`. For one jump host, `JUMP_` stands before these words, as in `SLURM_EDGE_NODE_JUMP_HOST`. `KEY` is another name
        of `KEY_PATH`. Other variables with the prefix are ignored with a warning. The last underscore of the prefix may be left
        out. A missing host raises an error at the first use of the resource, not at import.

        Example:
            ```python
            ssh = SSHConnectionResource.from_env()
            ```
        """
        fields = read_variables(prefix, _reference)
        if "jump_host" in fields:
            fields["jump_host"] = cls(**fields["jump_host"])
        return cls(**fields)


def _reference(variable: str, _: str, integer: bool) -> Any:
    """Returns an `EnvVar` reference to the environment variable `variable`; `integer` is True if the value must be an integer.

    The second argument, the name of the field, is not used. If the variable is missing, the first use of the reference raises an
    error that names the variable.
    """
    return dg.EnvVar.int(variable) if integer else dg.EnvVar(variable)


SSHConnectionResource.model_rebuild()
