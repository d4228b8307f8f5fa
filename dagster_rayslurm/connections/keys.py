"""Private keys, their certificates and the agent: loaded as paramiko uses them, and looked at before `ssh` does."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

import paramiko
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from paramiko.pkey import UnknownKeyType

from . import failures
from .config import SSHConnectionResource
from .credentials import certificate_path, key_path

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
        raise failures.bad_file(ssh, f'the key {path} is of a kind that paramiko does not know; use client="openssh"') from None


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
            raise failures.bad_file(ssh, f"the key {path} is locked; give `key_passphrase`, or add the key to an agent") from None
        return key
    except (UnsupportedAlgorithm, UnknownKeyType):
        raise _UnknownKind from None
    except (ValueError, paramiko.SSHException) as error:
        if passphrase and "PRIVATE KEY-----" in _text(path) and "format" not in str(error).lower():
            raise failures.bad_file(ssh, f"`key_passphrase` does not open the key {path}; check it") from None
        raise failures.bad_file(ssh, f"{path} is not a private key that can be read; check `key_path`") from None


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
        raise failures.bad_file(ssh, f"{certificate} is not an OpenSSH certificate; check `certificate_path`") from None
    public = loaded.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    if public.split()[1] != key.get_base64().encode():
        raise failures.bad_file(ssh, f"{certificate} is not a certificate for the key {path}; check `certificate_path`")
    if loaded.valid_before < time.time():
        ended = time.strftime("%Y-%m-%d %H:%M", time.localtime(loaded.valid_before))
        raise failures.bad_file(ssh, f"the certificate {certificate} ended {ended}; have it renewed")


def _text(path: str) -> str:
    with open(path, errors="replace") as file:
        return file.read()
