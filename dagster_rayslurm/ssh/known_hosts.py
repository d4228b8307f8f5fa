"""The file of known host keys, as sshd(8) of OpenSSH 9.2 describes it in "SSH_KNOWN_HOSTS FILE FORMAT".

paramiko's own reader passes over wildcards and the @revoked marker, and its writer drops comments and markers.
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


@dataclass(frozen=True)
class KnownKey:
    """One line that is about a host.

    Attributes:
        key_type: such as "ssh-ed25519".
        key: the public key, base64.
        revoked: whether the line says that this key must not be accepted.
    """

    key_type: str
    key: str
    revoked: bool = False


class Trust(Enum):
    """What the known keys say of a key that a host shows."""

    KNOWN = "known"
    NEW = "new"
    CHANGED = "changed"
    REVOKED = "revoked"


def host_name(host: str, port: int) -> str:
    """How the file spells a host on a port."""
    return host if port == 22 else f"[{host}]:{port}"


def known_keys(text: str, host: str, port: int) -> list[KnownKey]:
    """The keys that a file's text gives for a host; certificate authorities are not among them."""
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
    """Whether a key that a host shows is the one that is known.

    A host that is known by keys of other types only counts as changed: someone in the middle would otherwise only need
    to show a key of a new type.
    """
    same = [known for known in keys if (known.key_type, known.key) == (key_type, key)]
    if any(known.revoked for known in same):
        return Trust.REVOKED
    if same:
        return Trust.KNOWN
    return Trust.CHANGED if any(not known.revoked for known in keys) else Trust.NEW


def add_key(path: str, host: str, port: int, key_type: str, key: str) -> Trust:
    """Append a key, once, whoever else does so at the same time; what the file then says of it.

    Raises:
        OSError: the file cannot be written.
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
            fcntl.flock(file, fcntl.LOCK_UN)  # A child that was forked meanwhile holds the file open as well.


def read_text(path: str) -> str:
    """The file's text; "" if there is none.

    Raises:
        OSError: it is there and cannot be read.
    """
    with contextlib.suppress(FileNotFoundError), open(path, errors="replace") as file:
        return file.read()
    return ""


def _matches(patterns: str, name: str) -> bool:
    if patterns.startswith("|1|"):
        return _matches_hash(patterns, name)
    matched = False
    for pattern in patterns.lower().split(","):
        # Brackets are part of a name here, never a set of characters.
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
