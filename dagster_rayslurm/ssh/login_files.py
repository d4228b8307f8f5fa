"""Private keys, certificates and the agent: found, loaded and checked before a login.

The files that a login needs, looked at before anything is sent: both SSH clients then complain in the same words.

Private keys, their certificates and the agent: loaded as paramiko uses them, and looked at before `ssh` does.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
import time
from typing import Any

import paramiko
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from paramiko.pkey import UnknownKeyType

from . import errors
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
                raise errors.bad_file(hop, f"others can read the key {key} (mode {mode:04o}); run: chmod 600 {key}")
        if hop.certificate_path and certificate:
            _check_readable(hop, certificate, "certificate_path")
        if hop.known_hosts_file and os.path.exists(known_hosts_path(hop)):
            _check_readable(hop, known_hosts_path(hop), "known_hosts_file")


def _check_readable(ssh: SSHConnectionResource, path: str, field: str) -> None:
    try:
        with open(path, "rb") as file:
            file.read(1)
    except FileNotFoundError:
        raise errors.bad_file(ssh, f"{path} does not exist; check `{field}`") from None
    except OSError as error:
        raise errors.bad_file(
            ssh, f"{path} cannot be read ({error.strerror}); check `{field}` and the file's owner and mode"
        ) from None


_AGENT_TIMEOUT = 5.0


def check_keys(ssh: SSHConnectionResource) -> None:
    """Look at the keys of every hop, for `ssh` says little about one that it cannot use.

    Raises:
        ConnectionFailed: one is locked, damaged, or its certificate is another key's or has expired.
    """
    for hop in ssh.hops():
        path = key_path(hop)
        # A public half stands for the agent's key, and a FIDO key only ssh can use.
        if path and not _text(path).startswith(("ssh-", "ecdsa-", "sk-")):
            with contextlib.suppress(_UnknownKind):
                _load(hop, path)


def load_key(ssh: SSHConnectionResource, path: str) -> Any:
    """A private key with its certificate; one that is locked and in the agent is used there.

    Raises:
        ConnectionFailed: it cannot be used.
    """
    try:
        return _load(ssh, path)
    except _UnknownKind:
        raise errors.bad_file(ssh, f'the key {path} is of a kind that paramiko does not know; use client="openssh"') from None


class _UnknownKind(Exception):
    """A key that may be good, but not for paramiko."""


def _load(ssh: SSHConnectionResource, path: str) -> Any:
    key = _unlock(ssh, path)
    certificate = certificate_path(ssh) if ssh.key_path else None
    if certificate:
        _check_certificate(ssh, path, key, certificate)
        key.load_certificate(certificate)
    return key


def agent_keys() -> list[Any]:
    """The keys of the agent that SSH_AUTH_SOCK names; none if there is none."""
    keys: list[Any] = []

    def ask() -> None:
        with contextlib.suppress(paramiko.SSHException, OSError):
            keys.extend(paramiko.Agent().get_keys())

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(_AGENT_TIMEOUT)  # A forwarded agent that has gone stale takes questions and never answers.
    return list(keys)


def _unlock(ssh: SSHConnectionResource, path: str) -> Any:
    passphrase = ssh.key_passphrase
    try:
        return paramiko.PKey.from_path(path, passphrase.encode() if passphrase else None)
    except TypeError:  # cryptography: a passphrase for a key without, or none for a locked one.
        if passphrase:
            return _unlock(ssh.model_copy(update={"key_passphrase": None}), path)
        key = _from_agent(path)
        if key is None:
            raise errors.bad_file(ssh, f"the key {path} is locked; give `key_passphrase`, or add the key to an agent") from None
        return key
    except (UnsupportedAlgorithm, UnknownKeyType):
        raise _UnknownKind from None
    except (ValueError, paramiko.SSHException) as error:
        if passphrase and "PRIVATE KEY-----" in _text(path) and "format" not in str(error).lower():
            raise errors.bad_file(ssh, f"`key_passphrase` does not open the key {path}; check it") from None
        raise errors.bad_file(ssh, f"{path} is not a private key that can be read; check `key_path`") from None


def _from_agent(path: str) -> Any | None:
    """The agent's key whose public half lies beside a private key file."""
    with contextlib.suppress(OSError, IndexError):
        public = _text(f"{path}.pub").split()[1]
        return next((key for key in agent_keys() if key.get_base64() == public), None)
    return None


def _check_certificate(ssh: SSHConnectionResource, path: str, key: Any, certificate: str) -> None:
    try:
        loaded = serialization.load_ssh_public_identity(_text(certificate).encode())
        if not isinstance(loaded, serialization.SSHCertificate):
            raise ValueError
    except (ValueError, UnsupportedAlgorithm):
        raise errors.bad_file(ssh, f"{certificate} is not an OpenSSH certificate; check `certificate_path`") from None
    public = loaded.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    if public.split()[1] != key.get_base64().encode():
        raise errors.bad_file(ssh, f"{certificate} is not a certificate for the key {path}; check `certificate_path`")
    if loaded.valid_before < time.time():
        ended = time.strftime("%Y-%m-%d %H:%M", time.localtime(loaded.valid_before))
        raise errors.bad_file(ssh, f"the certificate {certificate} ended {ended}; have it renewed")


def _text(path: str) -> str:
    with open(path, errors="replace") as file:
        return file.read()
