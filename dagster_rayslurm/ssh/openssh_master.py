"""Master connections of the `ssh` program: opened once for all processes, or by a person; and why one cannot be had."""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

from ..runtime.process.scratch import Scratch, sweep
from . import errors, openssh_askpass
from .config import SSHConnectionResource
from .login_files import key_path, known_hosts_path
from .login_slots import login_slot
from .openssh_options import control_path, jump_options, login_options, master_command, multiplexed

_PERSIST = 60
"""Seconds that a master stays after its last session, so that the next process finds it."""
_CHECK = 10.0
_CONFIGURATION = 30.0
"""Seconds in which ssh reads its configuration; a `Match exec` in there runs commands of the user's."""
_FIRST_SLICE = 5.0
"""Seconds after which a TCP connection is tried anew: the kernel waits ever longer between its own tries."""


def existing_master(ssh: SSHConnectionResource) -> str:
    """The control socket of the master that a person opened: where our command puts it, or their own configuration.

    Raises:
        ConnectionFailed: there is none.
    """
    login = [*(["-l", ssh.user] if ssh.user else []), *(["-p", str(ssh.port)] if ssh.port != 22 else [])]
    words = ["ssh", "-G", *login, "--", ssh.host]
    try:
        asked = subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=_CONFIGURATION)
    except subprocess.TimeoutExpired:
        raise errors.other(
            ssh,
            f"`{shlex.join(words)}` took over {_CONFIGURATION:.0f} s; see what its configuration runs (`Match exec`)",
            temporary=True,
        ) from None
    own = re.search(r"^controlpath (?!none$)(.+)$", asked.stdout, re.MULTILINE)
    for path in [control_path(ssh), *([own[1]] if own else [])]:
        if _master_runs(path):
            return path
    raise errors.no_master(ssh, master_command(ssh))


def _master_runs(path: str) -> bool:
    """Whether a master answers at a control socket."""
    if not os.path.exists(path):
        return False
    try:
        return subprocess.run(multiplexed(path, "-O", "check", "--", "host"), capture_output=True, timeout=_CHECK).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def ensure_master(ssh: SSHConnectionResource, path: str) -> None:
    """Open a master at a control socket unless one is there; one process does it, others wait.

    Raises:
        ConnectionFailed: the login does not work out.
    """
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            if not _master_runs(path):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
                _open_master(ssh, path)
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)  # A child that was forked meanwhile holds the file open as well.


def _open_master(ssh: SSHConnectionResource, path: str) -> None:
    deadline, timeout = time.monotonic() + ssh.connect_timeout * len(ssh.hops()), _FIRST_SLICE
    while True:
        remaining = deadline - time.monotonic()
        try:
            with login_slot(f"{ssh.host}:{ssh.port}", ssh.connect_timeout), _scratch(ssh) as scratch:
                return _try_to_open(ssh, path, scratch, remaining, int(max(1, min(timeout, remaining))))
        except TimeoutError as error:
            raise errors.other(ssh, str(error), temporary=True) from None
        except _NoAnswer as error:
            if time.monotonic() >= deadline - 1:
                raise errors.no_answer(error.ssh) from None
            timeout *= 2  # The server may also be slow to greet.


class _NoAnswer(Exception):
    def __init__(self, ssh: SSHConnectionResource) -> None:
        self.ssh = ssh


@contextlib.contextmanager
def _scratch(ssh: SSHConnectionResource) -> Iterator[str]:
    """A directory for one login: the askpass program with its answers, pinned host keys, what ssh says."""
    sweep()  # A login that was killed may have left secrets.
    directory = Scratch()
    scratch = directory.path
    try:
        answers = []
        for number, hop in enumerate(ssh.hops()):
            if hop.host_key:
                _write(os.path.join(scratch, f"pinned-{number}"), f"* {hop.host_key}\n")
            if hop.key_passphrase is not None:
                answers.append({"kind": "passphrase", "for": key_path(hop) or "", "secret": hop.key_passphrase})
            if hop.password is not None:
                who = f"{hop.user or getpass.getuser()}@{hop.host}"
                answers.append(
                    {"kind": "password", "for": who, "secret": hop.password, "alone": "yes" if len(ssh.hops()) == 1 else ""}
                )
        _write(os.path.join(scratch, openssh_askpass.ANSWERS), json.dumps(answers))
        program = shlex.join([sys.executable, "-I", openssh_askpass.__file__, scratch])
        _write(os.path.join(scratch, "askpass"), f'#!/bin/sh\nexec {program} "$1"\n', 0o700)
        yield scratch
    finally:
        directory.remove()


def _write(path: str, text: str, mode: int = 0o600) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
        file.write(text)


def _try_to_open(ssh: SSHConnectionResource, path: str, scratch: str, remaining: float, tcp_timeout: int) -> None:
    pinned = {number: os.path.join(scratch, f"pinned-{number}") for number, hop in enumerate(ssh.hops()) if hop.host_key}
    said_path = os.path.join(scratch, "said")
    words = [
        *("ssh", "-o", f"ConnectTimeout={tcp_timeout}", "-M", "-S", path, "-o", f"ControlPersist={_PERSIST}", "-fN"),
        *login_options(ssh, pinned.get(len(ssh.hops()) - 1)),
        *jump_options(ssh, pinned, said_path),
        *("--", ssh.host),
    ]
    environ = {
        **os.environ,
        "LC_ALL": "C",
        "SHELL": "/bin/sh",  # Runs the ProxyCommand; a service user's is often nologin.
        "SSH_ASKPASS": os.path.join(scratch, "askpass"),
        "SSH_ASKPASS_REQUIRE": "force",  # OpenSSH 8.4; older ones want a display and no terminal.
        "DISPLAY": os.environ.get("DISPLAY", ":0"),
    }
    with open(said_path, "ab") as said:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=said, stderr=said, env=environ, start_new_session=True, close_fds=True
        )
        try:
            code = process.wait(max(1.0, remaining))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise errors.no_answer(ssh) from None
    if code:
        with open(said_path, errors="replace") as file:
            text = file.read()
        with contextlib.suppress(FileNotFoundError), open(os.path.join(scratch, openssh_askpass.UNANSWERED)) as file:
            prompt = file.readline().strip()
            if not openssh_askpass.asks_password(prompt):
                raise errors.prompt_unanswered(ssh, prompt, master_command(ssh))
        raise explain(ssh, text)


def explain(ssh: SSHConnectionResource, said: str) -> Exception:
    """What ssh(1) means by what it says when a login fails. Pure.

    Args:
        ssh: the server that was to be reached.
        said: its words, in the C locale.
    """
    hops = ssh.hops()
    # The hop that is spoken of: the innermost ssh complains first, and names its host.
    at = next((hop for hop in hops if re.search(rf"(?<![\w.-]){re.escape(hop.host)}(?![\w-]).*?\b{hop.port}\b", said)), None)
    at = at or next((hop for hop in hops if hop.host in said), ssh)
    file = known_hosts_path(at)
    if re.search(r"REVOKED HOST KEY|is marked as revoked", said, re.IGNORECASE):
        return errors.host_key_revoked(at, file)
    if "HOST IDENTIFICATION HAS CHANGED" in said or "No matching host key" in said:
        return errors.host_key_not_pinned(at, "") if at.host_key else errors.host_key_changed(at, file, "")
    if "Host key verification failed" in said:
        return errors.host_key_not_pinned(at, "") if at.host_key else errors.host_key_unknown(at, file, "")
    if "Could not resolve hostname" in said:
        return errors.unknown_host(at)
    if refused := re.search(r"open failed: (?:connect failed|administratively prohibited): (.*)", said):
        return errors.jump_refused(ssh, ssh.jump_host or ssh, refused[1].strip())
    if "Connection refused" in said:
        return errors.nothing_listens(at)
    if re.search(r"Connection timed out|Operation timed out|Connection to \S+ port \d+ timed out", said):
        return _NoAnswer(at)
    if routed := re.search(r"No route to host|Network is unreachable|Host is down", said):
        return errors.unreachable(at, routed[0])
    if locked := re.search(r'Load key "?(.+?)"?: incorrect passphrase', said):
        return errors.bad_file(at, f"`key_passphrase` does not open the key {locked[1]}, or it is missing; check it")
    if invalid := re.search(r'Load key "?(.+?)"?: (.+)', said):
        return errors.bad_file(at, f"{invalid[1]} is not a private key that can be read ({invalid[2].strip()}); check `key_path`")
    if denied := re.search(r"Permission denied \(([^)]*)\)", said):
        return errors.login_refused(at, _credentials(at), denied[1].replace(",", ", "))
    if "Too many authentication failures" in said:
        return errors.login_refused(at, "more keys than it allows", "")
    if re.search(
        r"kex_exchange_identification: (read: )?Connection (closed|reset)|banner exchange.*(closed|reset)", said, re.IGNORECASE
    ):
        return errors.busy(at)
    if re.search(
        r"kex_exchange_identification: (banner line|client sent)|Bad remote protocol|invalid format", said, re.IGNORECASE
    ):
        return errors.not_ssh(at)
    words = " / ".join(line.strip() for line in said.splitlines() if line.strip())[-300:]
    return errors.other(ssh, f"ssh failed: {words or 'it said nothing'}", temporary=True)


def _credentials(ssh: SSHConnectionResource) -> str:
    key = key_path(ssh)
    parts = [f"the key {key}" if key else "the keys that ssh finds", *(["the password"] if ssh.password is not None else [])]
    return " and ".join(parts)
