"""The exceptions for failed connections: each function returns one, whose message is a sentence that names the remedy.

Both SSH clients use these functions, so the same mistake gives the same message with either client. Arguments called `detail`,
`said`, `tried` and `offered` are text for the message and may be empty.
"""

from __future__ import annotations

import re

from .base import ConnectionFailed, ConnectionGone, ConnectionLost, ServerBusy
from .config import SSHConnectionResource


def address(ssh: SSHConnectionResource) -> str:
    return f"{ssh.user}@{ssh.host}:{ssh.port}" if ssh.user else f"{ssh.host}:{ssh.port}"


def failed(ssh: SSHConnectionResource, sentence: str, temporary: bool = False) -> ConnectionFailed:
    return ConnectionFailed(f"SSH to {address(ssh)}: {sentence}", temporary)


def unknown_host(ssh: SSHConnectionResource) -> ConnectionFailed:
    hint = "" if ssh.client == "openssh" else '; an alias of ~/.ssh/config needs client="openssh"'
    return failed(ssh, f"no host is called {ssh.host!r}; check `host` and this machine's DNS or VPN{hint}", temporary=True)


def nothing_listens(ssh: SSHConnectionResource) -> ConnectionFailed:
    return failed(ssh, "the connection is refused, nothing listens there; check `host` and `port`", temporary=True)


def no_answer(ssh: SSHConnectionResource) -> ConnectionFailed:
    return failed(
        ssh, f"no answer within {ssh.connect_timeout} s; check `host` and `port`, and the VPN or firewall between", temporary=True
    )


def unreachable(ssh: SSHConnectionResource, detail: str) -> ConnectionFailed:
    return failed(ssh, f"it cannot be reached ({detail}); check the network, the VPN and `host`", temporary=True)


def busy(ssh: SSHConnectionResource) -> ServerBusy:
    return ServerBusy(
        f"SSH to {address(ssh)}: the server closes connections before the login; it has too many logins at once "
        "(MaxStartups), is restarting, or bans this machine: try again later"
    )


def not_ssh(ssh: SSHConnectionResource) -> ConnectionFailed:
    return failed(ssh, "what answers there is not an SSH server; check `port`")


def lost(ssh: SSHConnectionResource, detail: str = "") -> ConnectionLost:
    return ConnectionLost(f"SSH to {address(ssh)}: the connection was lost{detail and f' ({detail})'}")


def gone(ssh: SSHConnectionResource, detail: str = "") -> ConnectionGone:
    return ConnectionGone(f"SSH to {address(ssh)}: the connection is gone{detail and f' ({detail})'}")


def jump_refused(ssh: SSHConnectionResource, jump: SSHConnectionResource, detail: str) -> ConnectionFailed:
    return failed(
        ssh,
        f"the jump host {address(jump)} cannot reach it ({detail}); check `host` and `port` as seen from there, and that it "
        "forwards (AllowTcpForwarding)",
        temporary=True,
    )


def host_key_unknown(ssh: SSHConnectionResource, file: str, key: str) -> ConnectionFailed:
    return failed(
        ssh,
        f'its host key is not in {file} and host_key_checking is "strict"; compare the key with what the site publishes and '
        f"add it there{key and f': {key}'}",
    )


def host_key_changed(ssh: SSHConnectionResource, file: str, key: str) -> ConnectionFailed:
    return failed(
        ssh,
        f"its host key is not the one in {file}; somebody may be listening in, so nothing was sent: ask the site, and if the "
        f"key was renewed, remove the old line{key and f' (it shows {key} now)'}",
    )


def host_key_revoked(ssh: SSHConnectionResource, file: str) -> ConnectionFailed:
    return failed(ssh, f"its host key is marked @revoked in {file}; do not use this server before the site has renewed it")


def host_key_not_pinned(ssh: SSHConnectionResource, key: str) -> ConnectionFailed:
    return failed(
        ssh,
        f"its host key is not the one in `host_key`; nothing was sent: ask the site for its key{key and f' (it shows {key})'}",
    )


def login_refused(ssh: SSHConnectionResource, tried: str, offered: str) -> ConnectionFailed:
    return failed(
        ssh,
        f"the server refused the login with {tried or 'nothing, for no key, agent or password is there'}"
        f"{offered and f'; it takes {offered}'}; check `user`, `key_path` and that the public key is in ~/.ssh/authorized_keys "
        "there, or `password`",
    )


def prompt_unanswered(ssh: SSHConnectionResource, prompt: str, command: str) -> ConnectionFailed:
    return failed(
        ssh,
        f"the server asks {prompt!r}, which nobody can answer here; log in once by hand and let this use that login: set "
        f'client="openssh" and require_existing_master=True, then type: {command}',
    )


def no_master(ssh: SSHConnectionResource, command: str) -> ConnectionFailed:
    return failed(ssh, f"no master connection is open and require_existing_master is set; type: {command}", temporary=True)


def no_sessions(ssh: SSHConnectionResource) -> ConnectionFailed:
    return failed(
        ssh,
        "the server opens no session on this connection (MaxSessions is 0, or others use them all); ask the site",
        temporary=True,
    )


def no_shell(ssh: SSHConnectionResource, said: str) -> ConnectionFailed:
    return failed(
        ssh,
        f"the login shell ended before it ran anything{said and f' and said {said!r}'}; the account needs a shell that takes "
        "`-c COMMAND` (neither a restricted shell nor a ForceCommand) and start-up files that do not exit",
    )


def not_started(ssh: SSHConnectionResource, code: int, said: str) -> ConnectionFailed:
    reason = re.search(rf".*{re.escape(ssh.python)}: .*(not found|No such file|Permission denied).*|.*nknown option.*", said)
    if reason or code in (126, 127):
        return no_python(ssh, reason[0] if reason else said or f"exit code {code}")
    return no_shell(ssh, said)


def no_python(ssh: SSHConnectionResource, said: str) -> ConnectionFailed:
    return failed(ssh, f"{ssh.python} does not run there ({said}); name a Python 3.6 or newer of the server as `python`")


def no_client(ssh: SSHConnectionResource) -> ConnectionFailed:
    return failed(ssh, 'client="openssh" needs the `ssh` program, which is not on PATH; install openssh-client')
