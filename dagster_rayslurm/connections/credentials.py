"""The files that a login needs, looked at before anything is sent: both SSH clients then complain in the same words."""

from __future__ import annotations

import os
import stat

from . import failures
from .config import SSHConnectionResource


def key_path(ssh: SSHConnectionResource) -> str | None:
    """The private key file, with `~` resolved."""
    return os.path.expanduser(ssh.key_path) if ssh.key_path else None


def certificate_path(ssh: SSHConnectionResource) -> str | None:
    """The certificate that goes with the key: the one that is named, or the one beside the key as OpenSSH finds it."""
    if ssh.certificate_path:
        return os.path.expanduser(ssh.certificate_path)
    key = key_path(ssh)
    beside = f"{key}-cert.pub"
    return beside if key and os.path.exists(beside) else None


def known_hosts_path(ssh: SSHConnectionResource) -> str:
    """The file of known host keys."""
    return os.path.expanduser(ssh.known_hosts_file or "~/.ssh/known_hosts")


def check_files(ssh: SSHConnectionResource) -> None:
    """Look at the key, the certificate and the known hosts of every hop.

    Raises:
        ConnectionFailed: a file is missing, cannot be read, or is not private.
    """
    for hop in ssh.hops():
        key, certificate = key_path(hop), certificate_path(hop)
        if key:
            _check_readable(hop, key, "key_path")
            found = os.stat(key)
            # ssh(1) ignores such keys, and a key that others could copy is no longer a secret.
            if found.st_uid == os.getuid() and found.st_mode & 0o077:
                mode = stat.S_IMODE(found.st_mode)
                raise failures.bad_file(hop, f"others can read the key {key} (mode {mode:04o}); run: chmod 600 {key}")
        if hop.certificate_path and certificate:
            _check_readable(hop, certificate, "certificate_path")
        if hop.known_hosts_file and os.path.exists(known_hosts_path(hop)):
            _check_readable(hop, known_hosts_path(hop), "known_hosts_file")


def _check_readable(ssh: SSHConnectionResource, path: str, field: str) -> None:
    try:
        with open(path, "rb") as file:
            file.read(1)
    except FileNotFoundError:
        raise failures.bad_file(ssh, f"{path} does not exist; check `{field}`") from None
    except OSError as error:
        raise failures.bad_file(
            ssh, f"{path} cannot be read ({error.strerror}); check `{field}` and the file's owner and mode"
        ) from None
