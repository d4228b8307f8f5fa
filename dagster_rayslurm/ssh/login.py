"""Parts of a login for both SSH clients: checks of key files and host keys, answers to prompts, a limit on parallel logins.

Files and keys are checked before anything is sent, so both clients report a mistake in the same words.
"""

from __future__ import annotations

import contextlib
import fnmatch
import getpass
import hashlib
import os
import re
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import paramiko
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from paramiko.pkey import UnknownKeyType

from . import errors
from .fields import SSHLogin, certificate_path, key_path, known_hosts_path
from .local import locked

# Number of logins to one SSH server that this user's processes on this machine may have in progress at once.
# sshd drops connections beyond `MaxStartups` unauthenticated ones (10:30:100 by default, sshd_config(5) of OpenSSH 9.2):
# of 60 simultaneous logins it refused 20.
SLOTS = 4
WAIT_FACTOR = 10  # How long a login waits for a slot, as a multiple of its `connect_timeout`.
_AGENT_TIMEOUT = 5.0  # Seconds to wait for the agent to list its keys.
# Matches prompts for a second factor, which may contain the word "password" too.
_ONE_TIME = re.compile(r"one.?time|\botp\b|token|passcode|verification|\bcode\b", re.IGNORECASE)


@contextlib.contextmanager
def login_slot(ssh: SSHLogin) -> Iterator[None]:
    """Inside the block, hold one of the `SLOTS` slots for logins to a server; all processes of this user share the slots.

    Raises `ConnectionFailed` if no slot is free within `WAIT_FACTOR` times the `connect_timeout`.
    """
    target, limit = f"{ssh.host}:{ssh.port}", WAIT_FACTOR * ssh.connect_timeout
    with contextlib.ExitStack() as slot:
        try:
            slot.enter_context(locked(f"login-{hashlib.sha256(target.encode()).hexdigest()[:16]}", SLOTS, limit))
        except TimeoutError:
            sentence = f"{SLOTS} other logins to {target} have been in progress for {limit} s"
            raise errors.failed(ssh, sentence, temporary=True) from None
        yield


def asks_password(prompt: str) -> bool:
    """Returns True if a prompt asks for the account's password, False if it asks for a second factor or anything else."""
    return "password" in prompt.lower() and not _ONE_TIME.search(prompt)


@dataclass
class Prompts:
    """Answers the prompts of SSH servers for passwords, and the prompts of `ssh` for passphrases, with the configured secrets.

    `servers` are the servers whose prompts may come: the server to log in to, and perhaps its jump hosts. Each secret is given
    only once, because repeated wrong secrets lock accounts. A prompt for a password gets an answer if it names one of `servers`,
    as in "dev@edge's password: " or "(dev@edge) Password: ". OpenSSH before 8.5 does not name the server in some prompts; such a
    prompt gets an answer only if `servers` has a single server. `unanswered` is the first prompt that got no answer; "" if all
    prompts got one.
    """

    servers: Sequence[SSHLogin]
    unanswered: str = ""
    _given: set[tuple[int, str]] = field(default_factory=set)  # The given secrets, each with the server's index.

    def answer(self, prompt: str) -> str | None:
        """Returns the configured secret for a prompt; None if no secret fits, or if the secret was given to an earlier prompt."""
        for number, ssh in enumerate(self.servers):
            if secret := self._secret(ssh, prompt):
                if (number, secret) not in self._given:
                    self._given.add((number, secret))
                    return secret
                break
        self.unanswered = self.unanswered or prompt.strip()
        return None

    def _secret(self, ssh: SSHLogin, prompt: str) -> str | None:
        """Returns the passphrase or password of `ssh` for which a prompt asks.

        Returns None if the prompt asks for anything else, or if the secret is not configured.
        """
        if "passphrase for" in prompt.lower():
            return ssh.key_passphrase if f"'{key_path(ssh) or ''}'" in prompt else None
        named = prompt.startswith((f"{login_name(ssh)}'s password", f"({login_name(ssh)}) "))
        clear = named or (len(self.servers) == 1 and "@" not in prompt)
        return ssh.password if clear and asks_password(prompt) else None


def login_name(ssh: SSHLogin) -> str:
    """Returns the user and host of a login in the form of ssh(1), such as "dev@edge"."""
    return f"{ssh.user or getpass.getuser()}@{ssh.host}"


# -- keys ----------------------------------------------------------------------------------------------------------------


def check_files(ssh: SSHLogin) -> None:
    """Check that the configured key, certificate and known hosts files can be read, for the server and its jump hosts.

    Raises `ConnectionFailed` if a file cannot be read, or if other users can read a private key. A known hosts file may be
    missing.
    """
    for hop in ssh.hops():
        key, known_hosts = key_path(hop), known_hosts_path(hop)
        if key:
            _check_readable(hop, key, "key_path")
            status = os.stat(key)
            # ssh(1) ignores a private key that other users can read.
            if status.st_uid == os.getuid() and status.st_mode & 0o077 and _public_key(key) is None:
                mode = stat.S_IMODE(status.st_mode)
                raise errors.failed(
                    hop, f"others can read the key {key} (mode {mode:04o}); run: chmod 600 {key}", subject="authentication"
                )
        if hop.certificate_path:
            _check_readable(hop, str(certificate_path(hop)), "certificate_path")
        if hop.known_hosts_file and os.path.exists(known_hosts):
            _check_readable(hop, known_hosts, "known_hosts_file")


def _check_readable(ssh: SSHLogin, path: str, name: str) -> None:
    """Raise `ConnectionFailed` if the file `path` cannot be read; `name` is the field of `ssh` with the path, for the message."""
    subject = "host key" if name == "known_hosts_file" else "authentication"
    try:
        _text(path, 1)
    except FileNotFoundError:
        raise errors.failed(ssh, f"{path} does not exist; check `{name}`", subject=subject) from None
    except OSError as error:
        raise errors.failed(
            ssh, f"{path} cannot be read ({error.strerror}); check `{name}` and the file's owner and mode", subject=subject
        ) from None


def _text(path: str, size: int = -1) -> str:
    """Returns the first `size` characters of a text file, or by default the whole text."""
    with open(path, errors="replace") as file:
        return file.read(size)


def _public_key(path: str) -> str | None:
    """Returns the public key in the file `path`, in base64; None if the file has no public key or cannot be read."""
    words: list[str] = []
    with contextlib.suppress(OSError):
        words = _text(path).split()
    return words[1] if len(words) > 1 and words[0].startswith(("ssh-", "ecdsa-", "sk-")) else None


def load_key(ssh: SSHLogin, path: str) -> Any | None:
    """Returns the private key in the file `path` as a key object of paramiko; None if paramiko does not know this kind of key.

    If there is a certificate for the configured key, the key object contains the certificate. If the file is a public key, or if
    the key is locked and no passphrase is configured, the function takes the key from ssh-agent. Raises `ConnectionFailed` if
    ssh-agent lacks this key, if the passphrase is wrong, if the file cannot be read or is no key, or if the certificate cannot be
    used.
    """
    key = _unlock(ssh, path, ssh.key_passphrase)
    certificate = certificate_path(ssh) if ssh.key_path else None
    if key is not None and certificate:
        try:
            loaded = serialization.load_ssh_public_identity(_text(certificate).encode())
            if not isinstance(loaded, serialization.SSHCertificate):
                raise ValueError
            key.load_certificate(certificate)
        except (ValueError, UnsupportedAlgorithm):
            raise errors.failed(
                ssh, f"{certificate} is not a certificate for the key {path}; check `certificate_path`", subject="authentication"
            ) from None
        if loaded.valid_before < time.time():
            ended = time.strftime("%Y-%m-%d %H:%M", time.localtime(loaded.valid_before))
            raise errors.failed(ssh, f"the certificate {certificate} ended {ended}; have it renewed", subject="authentication")
    return key


def _unlock(ssh: SSHLogin, path: str, passphrase: str | None) -> Any | None:
    """Returns the private key in the file `path` as `load_key` does, but without a certificate.

    `passphrase` is the configured passphrase of the key; None if none is configured.
    """
    if _public_key(path) is not None:
        if (held := _agent_key(path)) is None:
            why = f"{path} is a public key, and no agent has its private key; run ssh-add, or set `key_path` to the private key"
            raise errors.failed(ssh, why, subject="authentication")
        return held
    try:
        return paramiko.PKey.from_path(path, passphrase.encode() if passphrase else None)
    except TypeError:  # cryptography: a passphrase for an unlocked key, or none for a locked one.
        if passphrase:
            return _unlock(ssh, path, None)
        if (held := _agent_key(f"{path}.pub")) is not None:
            return held
        raise errors.failed(
            ssh, f"the key {path} is locked; give `key_passphrase`, or add the key to an agent", subject="authentication"
        ) from None
    except (UnsupportedAlgorithm, UnknownKeyType):
        return None
    except OSError as error:  # Of the key, or of the certificate beside it.
        why = f"{error.filename or path} cannot be read ({error.strerror or error}); check `key_path` and the permissions"
        raise errors.failed(ssh, why, subject="authentication") from None
    except (ValueError, paramiko.SSHException) as error:
        if passphrase and "PRIVATE KEY-----" in _text(path) and "format" not in str(error).lower():
            raise errors.failed(
                ssh, f"`key_passphrase` does not open the key {path}; check it", subject="authentication"
            ) from None
        raise errors.failed(
            ssh, f"{path} is not a private key that can be read; check `key_path`", subject="authentication"
        ) from None


def check_keys(ssh: SSHLogin) -> None:
    """Raise `ConnectionFailed` if the private key for the server or for a jump host cannot be used.

    The message says more about the cause than the message of the `ssh` program.
    """
    for hop in ssh.hops():
        path = key_path(hop)
        if path and _public_key(path) is None:  # A public key file selects a key of the agent.
            load_key(hop, path)


def _agent_key(public_path: str) -> Any | None:
    """Returns the key of ssh-agent whose public key is in the file `public_path`; None if there is no such file or key."""
    public = _public_key(public_path)
    return next((key for key in agent_keys() if key.get_base64() == public), None) if public is not None else None


def agent_keys() -> list[Any]:
    """Returns the keys of ssh-agent as key objects of paramiko; an empty list if SSH_AUTH_SOCK names no agent that answers."""
    keys: list[Any] = []

    def list_keys() -> None:
        with contextlib.suppress(paramiko.SSHException, OSError):
            keys.extend(paramiko.Agent().get_keys())

    thread = threading.Thread(target=list_keys, daemon=True)
    thread.start()
    thread.join(_AGENT_TIMEOUT)  # A stale forwarded agent accepts requests and never answers.
    return list(keys)


# -- host keys: only the paramiko client checks them here ------------------------------------------------------------------

# The format of the files is that of sshd(8), OpenSSH 9.2, "SSH_KNOWN_HOSTS FILE FORMAT". paramiko's own reader ignores wildcards
# and the @revoked marker, and its writer drops comments and markers.


@dataclass(frozen=True)
class KnownKey:
    """A host key from a file of known hosts: the type, and the key in base64. A @revoked key must never be accepted."""

    key_type: str
    key: str
    revoked: bool = False


class Trust(Enum):
    """The result of comparing the key that a host shows with the known keys of the host."""

    KNOWN = "known"  # The key is one of the known keys.
    NEW = "new"  # No key of the host is known.
    CHANGED = "changed"  # Only other keys of the host are known.
    REVOKED = "revoked"  # The key is marked @revoked.


def _host_name(host: str, port: int) -> str:
    """Returns the name of a server in a known hosts file: "edge" for port 22, "[edge]:2222" for another port."""
    return host if port == 22 else f"[{host}]:{port}"


def known_keys(text: str, host: str, port: int) -> list[KnownKey]:
    """Returns the keys of a host in the text of a known hosts file, without the keys of certificate authorities."""
    name, keys = _host_name(host, port).lower(), []
    for line in text.splitlines():
        fields = line.split()
        revoked = bool(fields) and fields[0] == "@revoked"
        if revoked:
            fields = fields[1:]
        if len(fields) >= 3 and not fields[0].startswith(("#", "@")) and _matches(fields[0], name):
            keys.append(KnownKey(fields[1], fields[2], revoked))
    return keys


def _matches(patterns: str, name: str) -> bool:
    """Returns True if `patterns`, the host field of a line in a known hosts file, includes the host `name`.

    The host field has patterns, separated by commas, or a hash. `name` is in lower case, as "edge" or "[edge]:2222".
    """
    if patterns.startswith("|1|"):
        with contextlib.suppress(ValueError, AssertionError):
            return bool(paramiko.HostKeys.hash_host(name, patterns) == patterns)
        return False
    # Brackets are part of a name, as in "[edge]:2222", and never a set of characters.
    matching = [each for each in patterns.lower().split(",") if fnmatch.fnmatchcase(name, each.lstrip("!").replace("[", "[[]"))]
    return bool(matching) and not any(each.startswith("!") for each in matching)


def judge(keys: Sequence[KnownKey], key_type: str, key: str) -> Trust:
    """Compares the key `key` that a host shows with `keys`, the known keys of the host; returns the result.

    `key` is in base64, and `key_type` is a type such as "ssh-ed25519". If no key is known, the key counts as new. If all known
    keys are of other types, the key counts as changed. If such a key counted as new, an attacker in the middle would only need to
    show a key of a new type.
    """
    same = [known.revoked for known in keys if (known.key_type, known.key) == (key_type, key)]
    if same:
        return Trust.REVOKED if any(same) else Trust.KNOWN
    return Trust.CHANGED if any(not known.revoked for known in keys) else Trust.NEW


def expected_keys(ssh: SSHLogin) -> list[KnownKey]:
    """Returns the known host keys of a server: the configured `host_key`, or else the server's keys in the files of known hosts.

    The list is empty if there is no known key. Raises `ConnectionFailed` if a file of known hosts cannot be read.
    """
    if ssh.host_key:
        key_type, key = ssh.host_key.split()
        return [KnownKey(key_type, key)]
    keys = []
    for path in (known_hosts_path(ssh), "/etc/ssh/ssh_known_hosts"):
        try:
            keys += known_keys(_text(path), ssh.host, ssh.port)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise errors.failed(
                ssh, f"the known hosts cannot be read ({error}); check `known_hosts_file`", subject="host key"
            ) from None
    return keys


def check_host_key(ssh: SSHLogin, key_type: str, key: str) -> None:
    """Check the key that a server shows; raises `ConnectionFailed` if the configuration does not trust the key.

    `key` is in base64, and `key_type` is a type such as "ssh-ed25519". With host_key_checking "accept-new", the key of an unknown
    host is added to the file of known hosts.
    """
    shown = f"{key_type} {key}"
    with locked("known-hosts"):  # Another process may be about to add this key.
        trust = judge(expected_keys(ssh), key_type, key)
        if trust is Trust.NEW and ssh.host_key_checking == "accept-new" and not ssh.host_key:
            return _learn(ssh, shown)
    if trust is Trust.KNOWN or (ssh.host_key_checking == "off" and not ssh.host_key):
        return
    if ssh.host_key:
        raise errors.host_key_not_pinned(ssh, f"it shows {shown}")
    if trust is Trust.REVOKED:
        raise errors.host_key_revoked(ssh)
    if trust is Trust.CHANGED:
        raise errors.host_key_changed(ssh, f"it shows {shown} now")
    raise errors.host_key_unknown(ssh, f": {shown}")


def _learn(ssh: SSHLogin, shown: str) -> None:
    """Add the host key `shown` of the server `ssh` to the file of known hosts; `shown` has the form "TYPE BASE64".

    Raises `ConnectionFailed` if the file cannot be written.
    """
    path = known_hosts_path(ssh)
    try:
        os.makedirs(os.path.dirname(path) or ".", mode=0o700, exist_ok=True)
        with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600), "a+b") as file:
            if file.tell() and (file.seek(-1, os.SEEK_END), file.read())[1] != b"\n":
                file.write(b"\n")
            file.write(f"{_host_name(ssh.host, ssh.port)} {shown}\n".encode())
    except OSError as error:
        raise errors.failed(
            ssh,
            f"its new host key cannot be kept ({error}); make that file writable, or name another as `known_hosts_file`",
            subject="host key",
        ) from None
