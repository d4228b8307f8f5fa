"""Functions that return the exceptions for failed SSH connections. The messages name the remedy.

Both SSH clients use these functions, so the same mistake gives the same message with either client. The functions that `_failure`
creates have the arguments `ssh`, the server, and `detail`, further text for the message, which may be empty.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from .base import ConnectionFailed, ConnectionGone, ConnectionLost, ServerBusy
from .fields import SSHLogin, known_hosts_path


def address(ssh: SSHLogin) -> str:
    """Returns the user, host and port of a server for messages, such as "dev@edge:22"; without the user if none is configured."""
    return f"{ssh.user}@{ssh.host}:{ssh.port}" if ssh.user else f"{ssh.host}:{ssh.port}"


def failed(ssh: SSHLogin, sentence: str, temporary: bool = False, subject: str = "network") -> ConnectionFailed:
    """Returns the exception for the server `ssh` with the message "SSH to USER@HOST:PORT: SENTENCE".

    `temporary` and `subject` are attributes of the exception, see `ConnectionFailed`.
    """
    return ConnectionFailed(f"SSH to {address(ssh)}: {sentence}", temporary, subject)


def _failure(
    sentence: str, temporary: bool = False, kind: type[ConnectionFailed] = ConnectionFailed, subject: str = "network"
) -> Callable[..., ConnectionFailed]:
    """Returns a function that creates an exception of the class `kind`, with `sentence` as its message, for an SSH server.

    The returned function has the arguments `ssh` (the server), `detail` (a text, which may be empty) and further texts. The
    function puts these values in place of the names in braces in `sentence`. Three more names may stand in braces: `said` is
    `detail` in parentheses, `file` is the path of the known hosts file, and `jump` is the address of the jump host. `temporary`
    and `subject` are attributes of the exception, see `ConnectionFailed`.
    """

    def make(ssh: SSHLogin, detail: str = "", **more: str) -> ConnectionFailed:
        jump = address(ssh.jump_host or ssh)
        said = detail and f" ({detail})"
        text = sentence.format(ssh=ssh, detail=detail, said=said, file=known_hosts_path(ssh), jump=jump, **more)
        return kind(f"SSH to {address(ssh)}: {text}", temporary, subject)

    return make


nothing_listens = _failure("the connection is refused, nothing listens there; check `host` and `port`", temporary=True)
no_answer = _failure(
    "no answer within {ssh.connect_timeout} s; check `host` and `port`, and the VPN or firewall between", temporary=True
)
unreachable = _failure("it cannot be reached{said}; check the network, the VPN and `host`", temporary=True)
busy = _failure(
    "the server closes connections before the login; it has too many logins at once (MaxStartups), is restarting, or bans this "
    "machine: try again later",
    temporary=True,
    kind=ServerBusy,
)
not_ssh = _failure("what answers there is not an SSH server; check `port`")
lost = _failure("the connection was lost{said}", temporary=True, kind=ConnectionLost)
gone = _failure("the connection is gone{said}", temporary=True, kind=ConnectionGone)
jump_refused = _failure(
    "the jump host {jump} cannot reach it{said}; check `host` and `port` as seen from there, and that it forwards "
    "(AllowTcpForwarding)",
    temporary=True,
)
host_key_unknown = _failure(
    'its host key is not in {file} and host_key_checking is "strict"; compare the key with what the site publishes and add it '
    "there{said}",
    subject="host key",
)
host_key_changed = _failure(
    "its host key is not the one in {file}; somebody may be listening in, so nothing was sent: ask the site, and if the key was "
    "renewed, remove the old line{said}",
    subject="host key",
)
host_key_revoked = _failure(
    "its host key is marked @revoked in {file}; do not use this server before the site has renewed it", subject="host key"
)
host_key_not_pinned = _failure(
    "its host key is not the one in `host_key`; nothing was sent: ask the site for its key{said}", subject="host key"
)
login_refused = _failure(
    "the server refused the login with {detail}{offered}; check `user`, `key_path` and that the public key is in "
    "~/.ssh/authorized_keys there, or `password`",
    subject="authentication",
)
prompt_unanswered = _failure(
    "the server asks {detail!r}, which nobody can answer here; log in once by hand and let this use that login: set "
    'client="openssh" and require_existing_master=True, then type: {command}',
    subject="authentication",
)
no_master = _failure(
    "no master connection is open and require_existing_master is set; type: {detail}", temporary=True, subject="authentication"
)
no_sessions = _failure(
    "the server opens no session on this connection (MaxSessions is 0, or others use them all); ask the site",
    temporary=True,
    subject="login shell",
)
no_shell = _failure(
    "the login shell ended before it ran anything{detail}; the account needs a shell that takes `-c COMMAND` (neither a "
    "restricted shell nor a ForceCommand) and start-up files that do not exit",
    subject="login shell",
)
no_python = _failure(
    "{ssh.python} does not run there{said}; name a Python 3.6 or newer of the server as `python`", subject="login shell"
)
no_client = _failure('client="openssh" needs the `ssh` program, which is not on PATH; install openssh-client')


def unknown_host(ssh: SSHLogin, detail: str = "") -> ConnectionFailed:  # noqa: ARG001
    """Returns the exception for a host name that cannot be resolved; `detail` is not used."""
    hint = "" if ssh.client == "openssh" else '; an alias of ~/.ssh/config needs client="openssh"'
    return failed(ssh, f"no host is called {ssh.host!r}; check `host` and this machine's DNS or VPN{hint}", temporary=True)


def not_started(ssh: SSHLogin, code: int, said: str) -> ConnectionFailed:
    """Returns the exception for a login shell that ended before the agent, the program of `edge` on the server, began to run.

    `code` is the exit code of the login shell, and `said` is its output.
    """
    reason = re.search(rf".*{re.escape(ssh.python)}: .*(not found|No such file|Permission denied).*|.*nknown option.*", said)
    if reason or code in (126, 127):
        return no_python(ssh, reason[0] if reason else said or f"exit code {code}")
    return no_shell(ssh, said and f" and said {said!r}")
