"""Options of ssh(1), OpenSSH 9.2, rendered from a connection's configuration. Pure.

What the configuration leaves open is left to the user's own ssh_config: an alias, a ProxyJump, GSSAPI, a smart card.
"""

from __future__ import annotations

import hashlib
import os
import shlex

from .config import SSHConnectionResource
from .login_files import certificate_path, key_path
from .private_dir import private_dir


def login_options(ssh: SSHConnectionResource, pinned_keys: str | None = None) -> list[str]:
    """Everything that decides how a login to one server is made, but for the jump host and the server's name.

    Args:
        ssh: the server.
        pinned_keys: a file that holds `host_key` and nothing else.
    """
    options = {
        "ConnectTimeout": str(ssh.connect_timeout),
        "ServerAliveInterval": str(ssh.keepalive),
        # One that is not answered within the interval is enough: a new login is cheap, hanging is not.
        "ServerAliveCountMax": "1",
        "StrictHostKeyChecking": {"accept-new": "accept-new", "strict": "yes", "off": "no"}[ssh.host_key_checking],
        "HashKnownHosts": "no",
        "UpdateHostKeys": "no",
        "NumberOfPasswordPrompts": "1",
        "ForwardAgent": "no",
        "ForwardX11": "no",
        "PermitLocalCommand": "no",
        "ClearAllForwardings": "yes",
        "RequestTTY": "no",
        "RemoteCommand": "none",
        "VerifyHostKeyDNS": "no",
        "NoHostAuthenticationForLocalhost": "no",
        "LogLevel": "INFO",
    }
    if ssh.port != 22:
        options["Port"] = str(ssh.port)
    if ssh.user:
        options["User"] = ssh.user
    key, certificate = key_path(ssh), certificate_path(ssh)
    if key:
        options["IdentityFile"] = _file(key)
        options["IdentitiesOnly"] = "yes"  # Or an agent full of keys uses up the server's MaxAuthTries.
    if certificate:
        options["CertificateFile"] = _file(certificate)
    if pinned_keys:
        options |= {"UserKnownHostsFile": _file(pinned_keys), "GlobalKnownHostsFile": "/dev/null", "StrictHostKeyChecking": "yes"}
        options |= {"IgnoreUnknown": "KnownHostsCommand", "KnownHostsCommand": "none"}  # OpenSSH 8.5.
    elif ssh.host_key_checking == "off":
        options |= {"UserKnownHostsFile": "/dev/null", "GlobalKnownHostsFile": "/dev/null"}
    elif ssh.known_hosts_file:
        options["UserKnownHostsFile"] = _file(os.path.expanduser(ssh.known_hosts_file))
    if ssh.key_passphrase is None and ssh.password is None:
        options["BatchMode"] = "yes"
    return [word for name, value in options.items() for word in ("-o", f"{name}={value}")]


def jump_options(ssh: SSHConnectionResource, pinned_keys: dict[int, str], log: str = "/dev/null") -> list[str]:
    """How to get to a server through its jump hosts: an `ssh -W` as its ProxyCommand, which may have one itself.

    Args:
        ssh: the server.
        pinned_keys: files of pinned host keys, by the number of jump hosts still ahead.
        log: where the jump hosts' ssh complains: with ControlPersist, ssh silences its ProxyCommand.
    """
    jump = ssh.jump_host
    if jump is None:
        return []
    words = [
        "ssh",
        *login_options(jump, pinned_keys.get(len(jump.hops()) - 1)),
        *jump_options(jump, pinned_keys, log),
        *("-o", "ControlMaster=no", "-o", "ControlPath=none"),
    ]
    command = f"{_plain(shlex.join(words))} -W '[%h]:%p' -- {_plain(shlex.quote(jump.host))} 2>> {_plain(shlex.quote(log))}"
    return ["-o", f"ProxyCommand={command}"]


def control_path(ssh: SSHConnectionResource, number: int = 0) -> str:
    """The control socket of a master connection; processes with the same configuration share it.

    Args:
        ssh: the server.
        number: of several masters, when one has no session left.
    """
    # Not how long things may take: tuning that must not cost a login that a person made.
    fields = ("host", "port", "user", "key_path", "certificate_path", "host_key", "host_key_checking", "known_hosts_file")
    identity = repr([[getattr(hop, field) for field in fields] for hop in ssh.hops()])
    return os.path.join(private_dir(), f"{hashlib.sha256(identity.encode()).hexdigest()[:16]}-{number}")


def multiplexed(path: str, *words: str) -> list[str]:
    """An `ssh` that uses the master at `path` or fails: it could not even make a connection of its own."""
    guard = ["-o", "ControlMaster=no", "-o", "ProxyCommand=false", "-o", "BatchMode=yes", "-o", "LogLevel=ERROR"]
    return ["ssh", "-F", "none", "-S", path, *guard, *words]


def master_command(ssh: SSHConnectionResource) -> str:
    """What a person types to open a master connection that `require_existing_master` uses."""
    alive = ["-o", f"ServerAliveInterval={ssh.keepalive}", "-o", "ServerAliveCountMax=1"]
    return shlex.join(["ssh", "-M", "-S", control_path(ssh), "-fN", *alive, *_short(ssh), "--", ssh.host])


def _short(ssh: SSHConnectionResource) -> list[str]:
    """The options that a person would give."""
    words = ["-p", str(ssh.port)] if ssh.port != 22 else []
    if ssh.user:
        words += ["-l", ssh.user]
    key, certificate, jump = key_path(ssh), certificate_path(ssh), ssh.jump_host
    words += ["-o", f"IdentityFile={_file(key)}"] if key else []
    words += ["-o", f"CertificateFile={_file(certificate)}"] if certificate else []
    if ssh.known_hosts_file:
        words += ["-o", f"UserKnownHostsFile={_file(os.path.expanduser(ssh.known_hosts_file))}"]
    if jump:
        through = _plain(shlex.join(["ssh", *_short(jump)]))
        words += ["-o", f"ProxyCommand={through} -W '[%h]:%p' -- {_plain(shlex.quote(jump.host))}"]
    return words


def _plain(text: str) -> str:
    """Text in which ssh expands nothing: of the percent signs in a ProxyCommand only the target's are meant."""
    return text.replace("%", "%%")


def _file(path: str) -> str:
    """A file name as an option's value: quoted, for ssh splits at spaces, and without tokens to expand."""
    return '"' + path.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%") + '"'
