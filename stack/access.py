"""What lets a client in, kept in the stack's directory: keys, known_hosts, and a file of environment variables."""

from __future__ import annotations

import hashlib
import os
import secrets
import shlex
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from .errors import StackError
from .settings import Settings

USER = "dev"
CLIENT_KEY = "id_ed25519"
HOST_KEY = "ssh_host_ed25519_key"
MUNGE_KEY = "munge.key"


def keys_directory(settings: Settings) -> Path:
    """The directory that every container sees, read-only."""
    return settings.directory / "keys"


def environment_file(settings: Settings) -> Path:
    """The file to source; it is there once the stack is ready."""
    return settings.directory / "env"


def ensure_keys(settings: Settings) -> str:
    """Make the keys that are missing.

    Returns:
        A fingerprint of them all: containers that know other keys are of no use.

    Raises:
        StackError: The directory belongs to somebody else, such as an engine that has been asked to mount it before it was.
    """
    keys = keys_directory(settings)
    try:
        keys.mkdir(mode=0o700, parents=True, exist_ok=True)
        keys.chmod(0o700)
        for name in (CLIENT_KEY, HOST_KEY):
            if not ((keys / name).exists() and (keys / f"{name}.pub").exists()):
                _make_ssh_key(keys / name)
        if not (keys / MUNGE_KEY).exists():
            _write_private(keys / MUNGE_KEY, secrets.token_bytes(128))
    except PermissionError:
        raise StackError(f"{settings.directory} cannot be written: remove it, or set RAYSLURM_STACK_DIR.")
    digest = hashlib.sha256()
    for path in sorted(keys.iterdir()):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def known_hosts(settings: Settings) -> str:
    """The line of known_hosts for the edge node."""
    host = "127.0.0.1" if settings.ssh_port == 22 else f"[127.0.0.1]:{settings.ssh_port}"
    public_key = (keys_directory(settings) / f"{HOST_KEY}.pub").read_text()
    return f"{host} {public_key}"


def environment(settings: Settings) -> dict[str, str]:
    """The variables with which `SSHConnectionResource.from_env()` reaches the edge node."""
    return {
        "SLURM_EDGE_NODE_HOST": "127.0.0.1",
        "SLURM_EDGE_NODE_PORT": str(settings.ssh_port),
        "SLURM_EDGE_NODE_USER": USER,
        "SLURM_EDGE_NODE_KEY_PATH": str(keys_directory(settings) / CLIENT_KEY),
        "SLURM_EDGE_NODE_KNOWN_HOSTS_FILE": str(settings.directory / "known_hosts"),
        "SLURM_EDGE_NODE_HOST_KEY_CHECKING": "strict",
        "RAYSLURM_ENV_PATH": "/opt/ray",
    }


def write_known_hosts(settings: Settings) -> None:
    """Write the file that pins the edge node's host key."""
    _write_private(settings.directory / "known_hosts", known_hosts(settings).encode())


def write_environment(settings: Settings) -> None:
    """Write the file to source, which also tells that the stack is ready."""
    lines = [f"{name}={shlex.quote(value)}\n" for name, value in environment(settings).items()]
    _write_private(environment_file(settings), "".join(lines).encode())


def read_environment(settings: Settings) -> dict[str, str]:
    """The variables of the file to source; empty while there is none."""
    path = environment_file(settings)
    lines = path.read_text().splitlines() if path.exists() else []
    return {name: shlex.split(value)[0] for name, _, value in (line.partition("=") for line in lines)}


def _make_ssh_key(path: Path) -> None:
    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption())
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    _write_private(path, private)
    _write_private(path.with_name(f"{path.name}.pub"), public + b"\n")


def _write_private(path: Path, content: bytes) -> None:
    """Replace a file at once by one that nobody else can read."""
    temporary = path.with_name(f"{path.name}.new")
    temporary.unlink(missing_ok=True)
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
    temporary.replace(path)
