"""What both SSH clients need for a login: checked key files, loaded keys, the keys of the agent, and a limit on parallel logins.

The checks run before anything is sent, so both clients report a mistake in the same words.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import random
import stat
import threading
import time
from collections.abc import Iterator
from typing import Any

import paramiko
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from paramiko.pkey import UnknownKeyType

from . import errors
from .config import SSHConnectionResource
from .known_hosts import known_hosts_path
from .local import private_dir

SLOTS = 4
"""Number of logins to one SSH server that this user's processes on this machine may have in progress at once.

sshd drops connections beyond `MaxStartups` unauthenticated ones (10:30:100 by default, sshd_config(5) of OpenSSH 9.2):
of 60 simultaneous logins it refused 20.
"""
WAIT_FACTOR = 10
"""How long a login waits for a slot, as a multiple of its `connect_timeout`."""
_AGENT_TIMEOUT = 5.0
"""Seconds to wait for the agent to list its keys."""


@contextlib.contextmanager
def login_slot(target: str, connect_timeout: float) -> Iterator[None]:
    """Hold one of the `SLOTS` slots for a login to a target such as "edge:22"; wait until one is free.

    A slot is a lock file, so that all processes of the user share the limit.

    Raises:
        TimeoutError: no slot became free within `WAIT_FACTOR` times `connect_timeout` seconds.
    """
    name = hashlib.sha256(target.encode()).hexdigest()[:16]
    paths = [os.path.join(private_dir(), f"login-{name}-{index}") for index in range(SLOTS)]
    deadline = time.monotonic() + WAIT_FACTOR * connect_timeout
    while True:
        for path in random.sample(paths, SLOTS):
            with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "w") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue
                try:
                    yield
                    return
                finally:
                    fcntl.flock(lock, fcntl.LOCK_UN)  # A forked child holds the file open as well.
        if time.monotonic() > deadline:
            raise TimeoutError(f"{SLOTS} other logins to {target} have been in progress for {WAIT_FACTOR * connect_timeout:g} s")
        time.sleep(random.uniform(0.02, 0.1))


def key_path(ssh: SSHConnectionResource) -> str | None:
    """The path of the configured private key file, with `~` expanded, or None."""
    return os.path.expanduser(ssh.key_path) if ssh.key_path else None


def certificate_path(ssh: SSHConnectionResource) -> str | None:
    """The path of the configured certificate, or else of the one beside the key (KEY-cert.pub), as OpenSSH does; or None."""
    if ssh.certificate_path:
        return os.path.expanduser(ssh.certificate_path)
    key = key_path(ssh)
    beside = f"{key}-cert.pub"
    return beside if key and os.path.exists(beside) else None


def check_files(ssh: SSHConnectionResource) -> None:
    """Check that the configured key, certificate and known hosts files can be read, for the server and its jump hosts."""
    for hop in ssh.hops():
        key, certificate = key_path(hop), certificate_path(hop)
        if key:
            _check_readable(hop, key, "key_path")
            status = os.stat(key)
            # ssh(1) ignores a key that other users can read.
            if status.st_uid == os.getuid() and status.st_mode & 0o077:
                mode = stat.S_IMODE(status.st_mode)
                raise errors.failed(hop, f"others can read the key {key} (mode {mode:04o}); run: chmod 600 {key}")
        if hop.certificate_path and certificate:
            _check_readable(hop, certificate, "certificate_path")
        if hop.known_hosts_file and os.path.exists(known_hosts_path(hop)):
            _check_readable(hop, known_hosts_path(hop), "known_hosts_file")


def _check_readable(ssh: SSHConnectionResource, path: str, field: str) -> None:
    try:
        with open(path, "rb") as file:
            file.read(1)
    except FileNotFoundError:
        raise errors.failed(ssh, f"{path} does not exist; check `{field}`") from None
    except OSError as error:
        raise errors.failed(
            ssh, f"{path} cannot be read ({error.strerror}); check `{field}` and the file's owner and mode"
        ) from None


def check_keys(ssh: SSHConnectionResource) -> None:
    """Check that the keys of the server and its jump hosts can be used, because `ssh` says little about a key that cannot."""
    for hop in ssh.hops():
        path = key_path(hop)
        # A public key file only selects a key of the agent. Only ssh can use a FIDO key.
        if path and not _text(path).startswith(("ssh-", "ecdsa-", "sk-")):
            with contextlib.suppress(_UnknownKeyType):
                _load(hop, path)


def load_key(ssh: SSHConnectionResource, path: str) -> Any:
    """A private key with its certificate, as a key object of paramiko.

    For a locked key without passphrase this is the agent's key object, if the agent holds the key.
    """
    try:
        return _load(ssh, path)
    except _UnknownKeyType:
        raise errors.failed(ssh, f'the key {path} is of a kind that paramiko does not know; use client="openssh"') from None


class _UnknownKeyType(Exception):
    """Raised when paramiko does not support the type of a key. OpenSSH may support it."""


def _load(ssh: SSHConnectionResource, path: str) -> Any:
    key = _unlock(ssh, path, ssh.key_passphrase)
    certificate = certificate_path(ssh) if ssh.key_path else None
    if certificate:
        _check_certificate(ssh, path, key, certificate)
        key.load_certificate(certificate)
    return key


def agent_keys() -> list[Any]:
    """The keys of the agent that SSH_AUTH_SOCK names. The list is empty if no agent runs or the agent does not answer."""
    keys: list[Any] = []

    def list_keys() -> None:
        with contextlib.suppress(paramiko.SSHException, OSError):
            keys.extend(paramiko.Agent().get_keys())

    thread = threading.Thread(target=list_keys, daemon=True)
    thread.start()
    thread.join(_AGENT_TIMEOUT)  # A stale forwarded agent accepts requests and never answers.
    return list(keys)


def _unlock(ssh: SSHConnectionResource, path: str, passphrase: str | None) -> Any:
    """A private key as a key object of paramiko, opened with the passphrase or taken from the agent."""
    try:
        return paramiko.PKey.from_path(path, passphrase.encode() if passphrase else None)
    except TypeError:  # cryptography: a passphrase for an unlocked key, or none for a locked one.
        if passphrase:
            return _unlock(ssh, path, None)
        key = _from_agent(path)
        if key is None:
            raise errors.failed(ssh, f"the key {path} is locked; give `key_passphrase`, or add the key to an agent") from None
        return key
    except (UnsupportedAlgorithm, UnknownKeyType):
        raise _UnknownKeyType from None
    except (ValueError, paramiko.SSHException) as error:
        if passphrase and "PRIVATE KEY-----" in _text(path) and "format" not in str(error).lower():
            raise errors.failed(ssh, f"`key_passphrase` does not open the key {path}; check it") from None
        raise errors.failed(ssh, f"{path} is not a private key that can be read; check `key_path`") from None


def _from_agent(path: str) -> Any | None:
    """The agent's key that matches the public key file (PATH.pub) beside a private key file, or None."""
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
        raise errors.failed(ssh, f"{certificate} is not an OpenSSH certificate; check `certificate_path`") from None
    public = loaded.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    if public.split()[1] != key.get_base64().encode():
        raise errors.failed(ssh, f"{certificate} is not a certificate for the key {path}; check `certificate_path`")
    if loaded.valid_before < time.time():
        ended = time.strftime("%Y-%m-%d %H:%M", time.localtime(loaded.valid_before))
        raise errors.failed(ssh, f"the certificate {certificate} ended {ended}; have it renewed")


def _text(path: str) -> str:
    with open(path, errors="replace") as file:
        return file.read()
