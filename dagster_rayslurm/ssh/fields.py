"""The fields of an SSH connection, and functions that validate these fields or read them from environment variables.

This module does not import Dagster.
"""

from __future__ import annotations

import base64
import os
import re
import warnings
from collections.abc import Callable
from functools import cache
from typing import Annotated, Any, Optional

from pydantic import ConfigDict, Field

from ..fields import StrictModel, at_least, check_text, checked, choice, plain_text

_INTEGERS = ("port", "connect_timeout", "keepalive")  # Fields whose variables hold an integer.


def check_port(value: object) -> int:
    """Returns `value` if it is a TCP port, a number from 1 to 65535; raises ValueError for another value."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 65536:
        raise ValueError(f"{value!r} is not a port; write a number from 1 to 65535")
    return value


def check_name(value: object) -> str:
    """Returns `value` if it can be the name of a host or user: one word that does not begin with "-". Else raises ValueError.

    A program would take a word that begins with "-" for an option.
    """
    text = check_text(value)
    if not text or text.startswith("-") or len(text.split()) != 1 or text != text.strip():
        raise ValueError(f"{text!r} is not a name of a host or user; write one word that does not begin with '-'")
    return text


def check_host(value: object) -> str:
    """Returns `value` if it is a host name or address without a user or port; raises ValueError for another value."""
    text = check_name(value)
    if re.search(r"[@/[]|^[^:]*:\d+$", text):
        raise ValueError(f"{text!r} is more than a host; write the host alone, and `user` and `port` in fields of their own")
    return text


def check_host_key(value: object) -> str:
    """Returns the public host key in the text `value`, without a comment.

    Raises ValueError if `value` is not a key in the format of a .pub file: type, key in base64, and perhaps a comment.
    """
    fields = check_text(value).split()
    try:
        if len(fields) < 2 or fields[0].encode() not in base64.b64decode(fields[1], validate=True)[:64]:
            raise ValueError
    except ValueError:
        raise ValueError(
            'this is not a public host key; write it as "ssh-ed25519 AAAA…", as `ssh-keyscan` prints it after the host'
        )
    return " ".join(fields[:2])


def check_python(value: object) -> str:
    """Returns `value` if it can be the name or path of a Python interpreter; raises ValueError for another value.

    The name or path may have only characters that any login shell reads as part of one word.
    """
    text = check_text(value)
    if not re.fullmatch(r"[\w~./+][\w~./+-]*", text, re.ASCII):
        raise ValueError(f"{text!r} is not a name or path of Python; write one such as python3 or /opt/python/bin/python3")
    return text


class SSHLogin(StrictModel):
    """An SSH server and how to log in. This base class of `SSHConnectionResource` has all fields, but does not need Dagster."""

    model_config = ConfigDict(frozen=True, title="SSHConnectionResource")

    host: Annotated[str, checked(check_host)]
    """Name or address of the edge (login) node."""
    port: Annotated[int, checked(check_port)] = 22
    """Port of the SSH server there."""
    user: Annotated[Optional[str], checked(check_name)] = None
    """User to log in as; None for the user that runs Dagster, or with client="openssh" the user in OpenSSH's configuration."""
    key_path: Annotated[Optional[str], plain_text] = None
    """Private key file, or the public key file of a key in the agent; None for any key of the agent and the default keys."""
    key_passphrase: Optional[str] = Field(default=None, repr=False)
    """Passphrase of the private key; give it as an EnvVar."""
    password: Optional[str] = Field(default=None, repr=False)
    """Password; give it as an EnvVar. Keys are the better choice."""
    certificate_path: Annotated[Optional[str], plain_text] = None
    """OpenSSH user certificate that goes with the key."""
    jump_host: Optional[SSHLogin] = None
    """Host to go through, itself an SSH connection, which may have a jump host of its own."""
    host_key_checking: Annotated[str, choice("accept-new", "strict", "off")] = "accept-new"
    """"accept-new" accepts and stores the key of an unknown host and refuses a changed key, "strict" refuses unknown hosts too,
    "off" checks nothing."""
    host_key: Annotated[Optional[str], checked(check_host_key)] = None
    """The only host key to accept, as "ssh-ed25519 AAAA…"; then no file of host keys is read."""
    known_hosts_file: Annotated[Optional[str], plain_text] = None
    """File of known host keys; None for the files of OpenSSH: `~/.ssh/known_hosts`, `/etc/ssh/ssh_known_hosts`."""
    client: Annotated[str, choice("paramiko", "openssh")] = "paramiko"
    """SSH implementation: "paramiko", or "openssh" for the `ssh` program with its own configuration."""
    require_existing_master: bool = False
    """Only use an OpenSSH master connection that a person opened (two-factor sites); never log in."""
    connect_timeout: Annotated[int, at_least(1, "seconds")] = 30
    """Seconds after which a login that hangs counts as failed, at each host on the way."""
    keepalive: Annotated[int, at_least(0, "seconds")] = 15
    """Seconds between keepalive messages; 0 for none."""

    python: Annotated[str, checked(check_python)] = "python3"
    """Python 3.6 or newer on the server: a name on the PATH of a login there, or a path."""

    def hops(self) -> list[SSHLogin]:
        """Returns all servers to log in to, in order: the jump hosts first, the server of this resource last."""
        return [*(self.jump_host.hops() if self.jump_host else []), self]


# -- environment variables ----------------------------------------------------------------------------------------------


def read_variables(prefix: str, read: Callable[[str, str, bool], Any]) -> dict[str, Any]:
    """Returns the fields of an SSH connection for which environment variables are set, as a dictionary with their values.

    If the variable of the jump host's `host` is set, the field `jump_host` is a dictionary with the fields of the jump host.

    Args:
        prefix: the first part of the variables' names; its last underscore may be missing.
        read: a function `read(variable, field, integer)` that returns the value of the field `field`. `variable` is the full name
            of the environment variable, and `integer` is True if this variable must hold an integer. `read` is called for each
            variable that is set. For `host`, `read` is called in any case.
    """
    stem = prefix.rstrip("_") + "_"
    jump = f"{stem}JUMP_"
    _warn_of_unknown(stem, tuple(name for name in sorted(os.environ) if name.startswith(stem)))
    fields = _read(stem, read)
    return fields | ({"jump_host": _read(jump, read)} if f"{jump}HOST" in os.environ else {})


def _read(stem: str, read: Callable[[str, str, bool], Any]) -> dict[str, Any]:
    """Returns the fields of one server from the variables whose names begin with `stem`; for `read` see `read_variables`."""
    return {
        name: read(stem + variable, name, name in _INTEGERS)
        for variable, name in _variables().items()
        if stem + variable in os.environ or name == "host"
    }


def _variables() -> dict[str, str]:
    """Returns the name of the field for each environment variable, by the variable's name without prefix, such as "KEY_PATH"."""
    names = [name for name in SSHLogin.model_fields if name not in ("jump_host", "require_existing_master")]
    return {"KEY": "key_path"} | {name.upper(): name for name in names}  # dagster-slurm says KEY.


@cache
def _warn_of_unknown(stem: str, variables: tuple[str, ...]) -> None:
    """Warn about the variables in `variables` that belong to no field; a second call with the same arguments does not warn again.

    `variables` are the names of all environment variables that begin with `stem`, the prefix with its last underscore.
    """
    unknown = [name for name in variables if name.removeprefix(stem).removeprefix("JUMP_") not in _variables()]
    if unknown:
        known = ", ".join(stem + name for name in _variables() if name != "KEY")
        what = f"no such variable is read; there are {known}, and the same with {stem}JUMP_ for a jump host"
        warnings.warn(f"{', '.join(unknown)}: {what}", stacklevel=4)


# -- the files of a configuration, with `~` expanded ---------------------------------------------------------------------


def key_path(ssh: SSHLogin) -> str | None:
    """Returns the path of the configured file with a private or public key; None if no key is configured."""
    return os.path.expanduser(ssh.key_path) if ssh.key_path else None


def certificate_path(ssh: SSHLogin) -> str | None:
    """Returns the path of the certificate for the configured key; None if there is none.

    The path is the configured path or, if no path is configured, the path KEY-cert.pub beside the key, if this file exists.
    OpenSSH chooses in the same way.
    """
    if ssh.certificate_path:
        return os.path.expanduser(ssh.certificate_path)
    beside = f"{key_path(ssh)}-cert.pub"
    return beside if ssh.key_path and os.path.exists(beside) else None


def known_hosts_path(ssh: SSHLogin) -> str:
    """Returns the path of the file of known host keys, to which a connection adds the key of a new host."""
    return os.path.expanduser(ssh.known_hosts_file or "~/.ssh/known_hosts")
