"""Checks a server's host key against files of known hosts, and adds new keys to them. Only the paramiko client uses this check.

The format of the files is that of sshd(8), OpenSSH 9.2, "SSH_KNOWN_HOSTS FILE FORMAT". paramiko's own reader ignores wildcards
and the @revoked marker, and its writer drops comments and markers.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import fnmatch
import hashlib
import hmac
import os
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from . import errors
from .config import SSHConnectionResource

_GLOBAL_KNOWN_HOSTS = "/etc/ssh/ssh_known_hosts"


@dataclass(frozen=True)
class KnownKey:
    """A host key from a file of known hosts: its type, and the key in base64. A @revoked key must never be accepted."""

    key_type: str
    key: str
    revoked: bool = False


class Trust(Enum):
    """The result of comparing the key that a host shows with the known keys of that host."""

    KNOWN = "known"
    NEW = "new"
    CHANGED = "changed"
    REVOKED = "revoked"


def host_name(host: str, port: int) -> str:
    """The name of a host and port in a file of known hosts: "edge", or "[edge]:2222"."""
    return host if port == 22 else f"[{host}]:{port}"


def known_keys(text: str, host: str, port: int) -> list[KnownKey]:
    """The keys of a host in the text of a file of known hosts, without those of certificate authorities."""
    name, keys = host_name(host, port).lower(), []
    for line in text.splitlines():
        fields = line.split()
        revoked = bool(fields) and fields[0] == "@revoked"
        if revoked:
            fields = fields[1:]
        if len(fields) >= 3 and not fields[0].startswith(("#", "@")) and _matches(fields[0], name):
            keys.append(KnownKey(fields[1], fields[2], revoked))
    return keys


def judge(keys: Sequence[KnownKey], key_type: str, key: str) -> Trust:
    """Whether the key that a host shows is known, new, changed or revoked, by the known keys of that host.

    If all known keys are of other types, the key counts as changed. Otherwise an attacker in the middle would only need to show
    a key of a new type.
    """
    same = [known for known in keys if (known.key_type, known.key) == (key_type, key)]
    if any(known.revoked for known in same):
        return Trust.REVOKED
    if same:
        return Trust.KNOWN
    return Trust.CHANGED if any(not known.revoked for known in keys) else Trust.NEW


def add_key(path: str, host: str, port: int, key_type: str, key: str) -> Trust:
    """Add a host's key to a file of known hosts if the file has no key of that host yet.

    Returns how the file judges the key afterwards: known, changed or revoked. Several processes may call this at once.
    """
    directory = os.path.dirname(path)
    if directory:
        os.makedirs(directory, mode=0o700, exist_ok=True)
    with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600), "r+", errors="replace") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            text = file.read()
            trust = judge(known_keys(text, host, port), key_type, key)
            if trust is not Trust.NEW:
                return trust
            newline = "" if not text or text.endswith("\n") else "\n"
            file.write(f"{newline}{host_name(host, port)} {key_type} {key}\n")
            file.flush()
            return Trust.KNOWN
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # A forked child holds the file open as well.


def _read_text(path: str) -> str:
    """The text of a file; "" if the file does not exist."""
    with contextlib.suppress(FileNotFoundError), open(path, errors="replace") as file:
        return file.read()
    return ""


def _matches(patterns: str, name: str) -> bool:
    """Whether the first field of a line in a file of known hosts (a list of patterns, or a hash) covers a host name."""
    if patterns.startswith("|1|"):
        return _matches_hash(patterns, name)
    matched = False
    for pattern in patterns.lower().split(","):
        # Brackets are part of a name, as in "[edge]:2222", and never a set of characters.
        plain = pattern.removeprefix("!").replace("[", "[[]")
        if fnmatch.fnmatchcase(name, plain):
            if pattern.startswith("!"):
                return False
            matched = True
    return matched


def _matches_hash(hashed: str, name: str) -> bool:
    try:
        _, _, salt, digest = hashed.split("|")
        expected = hmac.new(base64.b64decode(salt), name.encode(), hashlib.sha1).digest()
        return hmac.compare_digest(expected, base64.b64decode(digest))
    except ValueError:
        return False


# -- the keys of a configured server -------------------------------------------------------------------------------------


def known_hosts_path(ssh: SSHConnectionResource) -> str:
    """The path of the file of known hosts that a connection reads and adds to, with `~` expanded."""
    return os.path.expanduser(ssh.known_hosts_file or "~/.ssh/known_hosts")


def expected_keys(ssh: SSHConnectionResource) -> list[KnownKey]:
    """The host keys to expect of a server: its configured `host_key`, or else its keys in the files of known hosts."""
    if ssh.host_key:
        key_type, key = ssh.host_key.split()
        return [KnownKey(key_type, key)]
    try:
        text = _read_text(known_hosts_path(ssh)) + "\n" + _read_text(_GLOBAL_KNOWN_HOSTS)
        return known_keys(text, ssh.host, ssh.port)
    except OSError as error:
        raise errors.failed(ssh, f"the known hosts cannot be read ({error}); check `known_hosts_file`") from None


def check_host_key(ssh: SSHConnectionResource, expected: Sequence[KnownKey], key_type: str, key: str) -> None:
    """Refuse a host key that the configuration does not trust. With "accept-new" a new key is added to the known hosts."""
    shown, file = f"{key_type} {key}", known_hosts_path(ssh)
    trust = judge(expected, key_type, key)
    if trust is Trust.KNOWN:
        return
    if ssh.host_key:
        raise errors.host_key_not_pinned(ssh, shown)
    if ssh.host_key_checking == "off":
        return
    if trust is Trust.REVOKED:
        raise errors.host_key_revoked(ssh, file)
    if trust is Trust.CHANGED:
        raise errors.host_key_changed(ssh, file, shown)
    if ssh.host_key_checking == "strict":
        raise errors.host_key_unknown(ssh, file, shown)
    try:
        trust = add_key(file, ssh.host, ssh.port, key_type, key)
    except OSError as error:
        raise errors.failed(
            ssh, f"its new host key cannot be kept ({error}); make that file writable, or name another as `known_hosts_file`"
        ) from None
    if trust is not Trust.KNOWN:  # Another process has just learned another key.
        raise errors.host_key_changed(ssh, file, shown)
