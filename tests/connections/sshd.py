"""SSH servers in the containers of the stack, each with options of its own."""

import itertools
import random
import re
import time
from typing import Any

_BASE = """
HostKey /etc/ssh/ssh_host_ed25519_key
UsePAM yes
PasswordAuthentication no
KbdInteractiveAuthentication no
LogLevel VERBOSE
"""

_HOST_KEY = (
    "{ ls /etc/ssh/ssh_host_ed25519_key >/dev/null 2>&1 || ssh-keygen -q -t ed25519 -N '' -f /etc/ssh/ssh_host_ed25519_key; }"
)

_ports = itertools.count(random.randrange(20000, 28000))


class Sshd:
    """One sshd in a container of the stack.

    Args:
        stack: the stack.
        service: the container.
        options: lines of sshd_config(5) that come first, so that they win.
    """

    def __init__(self, stack: Any, service: str, *options: str) -> None:
        self._stack = stack
        self.service = service
        self.host = stack.ip(service)
        self.port = next(_ports)
        self._file = f"/tmp/sshd-{self.port}"
        self.configure(*options)
        self.start()

    def configure(self, *options: str) -> None:
        text = "\n".join([*options, f"Port {self.port}", f"PidFile {self._file}.pid", _BASE])
        self.shell(f"cat > {self._file}.conf <<'EOF'\n{text}\nEOF")

    def start(self) -> None:
        self.shell(f"mkdir -p /run/sshd && {_HOST_KEY} && /usr/sbin/sshd -f {self._file}.conf -E {self._file}.log")
        deadline = time.monotonic() + 10
        while not self.shell(f"ss -Hltn 'sport = :{self.port}'"):
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.05)

    def stop(self) -> None:
        """Kill the server with all its sessions, as a restart of the machine would."""
        self.shell(
            f"pid=$(cat {self._file}.pid); all=$pid; new=$pid; "
            'while [ -n "$new" ]; do new=$(for p in $new; do ps -o pid=,comm= --ppid $p; done | '
            "awk '$2 ~ /^sshd/ {print $1}'); all=\"$all $new\"; done; kill -9 $all; rm -f " + f"{self._file}.pid"
        )

    def end_agents(self) -> None:
        """Kill all agents of the container."""
        self.shell("for p in $(ps -eo pid=,args= | awk '/[z]lib.decompress/ {print $1}'); do kill -9 $p; done; true")

    def log(self) -> str:
        return str(self.shell(f"cat {self._file}.log"))

    def logins(self) -> int:
        return len(re.findall(r"Accepted \S+ for ", self.log()))

    def close(self) -> None:
        if self.shell(f"ls {self._file}.pid 2>/dev/null || true"):
            self.stop()
        self.shell(f"rm -f {self._file}.*")

    def shell(self, script: str) -> str:
        return str(self._stack.exec(self.service, ["sh", "-c", script]))
