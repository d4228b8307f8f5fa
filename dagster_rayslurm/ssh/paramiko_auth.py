"""What happens between paramiko's key exchange and an authenticated transport: host keys, keys, agent, prompts."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import paramiko

from . import errors
from .base import ConnectionFailed
from .config import SSHConnectionResource
from .known_hosts import KnownKey, Trust, add_key, judge, known_keys, read_text
from .login_files import agent_keys, key_path, known_hosts_path, load_key
from .openssh_askpass import asks_password
from .openssh_options import master_command

_GLOBAL_KNOWN_HOSTS = "/etc/ssh/ssh_known_hosts"
_DEFAULT_KEYS = ("~/.ssh/id_ed25519", "~/.ssh/id_ecdsa", "~/.ssh/id_rsa")
_MOST_TRIES = 4
"""Of the agent's keys: sshd hangs up after six failures (`MaxAuthTries`, sshd_config(5) of OpenSSH 9.2)."""
_SIGNATURES = {"ssh-rsa": ("rsa-sha2-512", "rsa-sha2-256")}


def keys_known(ssh: SSHConnectionResource) -> list[KnownKey]:
    """The host keys that a server may show.

    Raises:
        ConnectionFailed: a file of host keys cannot be read.
    """
    if ssh.host_key:
        key_type, key = ssh.host_key.split()
        return [KnownKey(key_type, key)]
    try:
        text = read_text(known_hosts_path(ssh)) + "\n" + read_text(_GLOBAL_KNOWN_HOSTS)
        return known_keys(text, ssh.host, ssh.port)
    except OSError as error:
        raise errors.bad_file(ssh, f"the known hosts cannot be read ({error}); check `known_hosts_file`") from None


def prefer_types(transport: Any, known: list[KnownKey]) -> None:
    """Ask for a host key of a type that is known, so that a host with several keys is not taken for a changed one."""
    wanted = [name for key in known if not key.revoked for name in _SIGNATURES.get(key.key_type, (key.key_type,))]
    options = transport.get_security_options()
    first = [name for name in options.key_types if name in wanted]
    options.key_types = (*first, *(name for name in options.key_types if name not in first))


def check_host_key(transport: Any, ssh: SSHConnectionResource, known: list[KnownKey]) -> None:
    """Judge the key that the server has proved to hold, and learn a new one if that is the policy.

    Raises:
        ConnectionFailed: it is not to be trusted.
    """
    shown = transport.get_remote_server_key()
    key_type, key = shown.get_name(), shown.get_base64()
    spelled, file = f"{key_type} {key}", known_hosts_path(ssh)
    trust = judge(known, key_type, key)
    if trust is Trust.KNOWN:
        return
    if ssh.host_key:
        raise errors.host_key_not_pinned(ssh, spelled)
    if ssh.host_key_checking == "off":
        return
    if trust is Trust.REVOKED:
        raise errors.host_key_revoked(ssh, file)
    if trust is Trust.CHANGED:
        raise errors.host_key_changed(ssh, file, spelled)
    if ssh.host_key_checking == "strict":
        raise errors.host_key_unknown(ssh, file, spelled)
    try:
        trust = add_key(file, ssh.host, ssh.port, key_type, key)
    except OSError as error:
        raise errors.bad_file(
            ssh, f"its new host key cannot be kept ({error}); make that file writable, or name another as `known_hosts_file`"
        ) from None
    if trust is not Trust.KNOWN:  # Another process has just learned another key.
        raise errors.host_key_changed(ssh, file, spelled)


class _Prompts:
    """Answers the prompts of keyboard-interactive: the password once, anything else is remembered as unanswered."""

    def __init__(self, password: str | None) -> None:
        self._password = password
        self.unanswered: str | None = None

    def __call__(self, title: str, instructions: str, fields: list[tuple[str, bool]]) -> list[str]:  # noqa: ARG002
        return [self._answer(prompt) for prompt, _ in fields]

    def _answer(self, prompt: str) -> str:
        if self._password is not None and asks_password(prompt):
            password, self._password = self._password, None  # Asked again, it was wrong: more tries only lock accounts.
            return password
        self.unanswered = self.unanswered or prompt.strip()
        return ""


def authenticate(transport: Any, ssh: SSHConnectionResource, user: str) -> None:
    """Log in with what there is, in the order of OpenSSH: keys, then the password; several factors if the server wants them.

    Raises:
        ConnectionFailed: the server takes none of it.
    """
    tried: list[str] = []
    offered: list[str] = []
    for what, key in _keys(ssh):
        tried.append(what)
        try:
            offered = transport.auth_publickey(user, key)
        except paramiko.BadAuthenticationType as error:
            offered = error.allowed_types
            break
        except paramiko.AuthenticationException:
            _still_there(transport, ssh)
            continue
        if not offered:
            return
        break  # A first factor; what else the server wants is in `offered`.
    prompts = _Prompts(ssh.password)
    if ssh.password is not None or "keyboard-interactive" in offered:
        if ssh.password is not None:
            tried.append("the password")
        for method in ("keyboard-interactive", "password"):
            try:
                if method == "keyboard-interactive":
                    offered = transport.auth_interactive(user, prompts)
                elif ssh.password is not None:
                    offered = transport.auth_password(user, ssh.password, fallback=False)
                else:
                    continue
            except paramiko.BadAuthenticationType as error:
                offered = error.allowed_types
            except paramiko.AuthenticationException:
                break
            else:
                if not offered:
                    return
    _still_there(transport, ssh)
    if prompts.unanswered and not asks_password(prompts.unanswered):
        raise errors.prompt_unanswered(ssh, prompts.unanswered, master_command(ssh))
    raise errors.login_refused(ssh, " and ".join(tried), ", ".join(offered or _offered(transport, user)))


def _still_there(transport: Any, ssh: SSHConnectionResource) -> None:
    if not transport.is_active():
        raise errors.login_refused(ssh, "all that was tried so far (it hung up)", "")


def _offered(transport: Any, user: str) -> list[str]:
    try:
        transport.auth_none(user)
    except paramiko.BadAuthenticationType as error:
        return list(error.allowed_types)
    except (paramiko.SSHException, EOFError, OSError):
        return []
    return []


def _keys(ssh: SSHConnectionResource) -> Iterator[tuple[str, Any]]:
    """The keys to try, each with what messages call it."""
    path = key_path(ssh)
    if path:
        yield f"the key {path}", load_key(ssh, path)
        return
    for key in agent_keys()[:_MOST_TRIES]:
        yield f"the agent's key {key.comment or key.fingerprint}", key
    for default in map(os.path.expanduser, _DEFAULT_KEYS):
        if os.path.exists(default):
            with contextlib.suppress(ConnectionFailed):  # Nobody named this one.
                yield f"the key {default}", load_key(ssh, default)
