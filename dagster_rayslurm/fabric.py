"""Environment variables that select the network between the nodes, and a warning if NCCL uses slow TCP sockets.

NCCL is the library by which GPUs communicate. The warning comes from NCCL's own log, in the output of the payload.

Sources: NCCL user guide, "Environment Variables" (2.27); fi_efa(7) of libfabric 1.17 and 2.1; PyTorch's documentation of
torch.distributed for gloo; src/init.cc of NCCL 2.21 to 2.27 for the lines of its log.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

# NCCL says at level INFO which network it uses, once for each communicator; the subsystem INIT leaves the other lines out.
_TELL = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT"}
_VARIABLES: Mapping[str, Mapping[str, str]] = {
    "none": {},
    "infiniband": {"NCCL_IB_DISABLE": "0", **_TELL},
    # Ray forks processes, and memory that a parent has registered with the device must survive the fork.
    "efa": {"FI_PROVIDER": "efa", "FI_EFA_FORK_SAFE": "1", **_TELL},
    "tcp": {"NCCL_NET": "Socket", "NCCL_IB_DISABLE": "1", "FI_PROVIDER": "tcp"},
}
FABRICS = tuple(_VARIABLES)

# NCCL prints "HOST:PID:THREAD [GPU] NCCL INFO TEXT"; Ray puts a prefix before lines of its workers.
_SOCKETS = re.compile(r"NCCL INFO (Using network Socket\b|NET/OFI Selected [Pp]rovider is (tcp|sockets|udp)\b)")
_ADVICE = {
    "infiniband": "`ibstat` must show an active port on each node, /dev/infiniband must be visible in the job, `ulimit -l` must "
    "be unlimited, and NCCL_IB_HCA must name devices that exist",
    "efa": "`fi_info -p efa` must list a device on each node, and aws-ofi-nccl's libnccl-net.so must be in LD_LIBRARY_PATH",
    "none": 'RayLauncher(fabric="infiniband") or "efa" says what to look at, and "tcp" that this is meant',
}
_LONGEST = 65536  # Most characters that are kept of a line whose end has not come yet.


def fabric_variables(fabric: str, interface: str | None) -> dict[str, str]:
    """Returns the environment variables for the network preset `fabric`, one of `FABRICS`; {} for "none".

    If `interface` names a network interface, such as "ib0", and `fabric` is not "none", the result also has the variables that
    make NCCL and gloo use this interface.
    """
    variables = dict(_VARIABLES[fabric])
    if variables and interface:
        # NCCL takes a name as a prefix unless "=" stands before it.
        variables |= {"NCCL_SOCKET_IFNAME": f"={interface}", "GLOO_SOCKET_IFNAME": interface}
    return variables


@dataclass
class FabricWatch:
    """Searches a payload's output for a line in which NCCL reports TCP sockets instead of a faster network.

    `fabric` is the network preset of the payload. With the preset "tcp", nothing is searched.
    """

    fabric: str
    _line: str | None = None
    _warned: bool = False
    _partial: dict[str, str] = field(default_factory=dict)  # By stream, the beginning of a line.

    def feed(self, stream: str, text: str) -> None:
        """Search `text`, the next piece of the payload's output, for NCCL's line about sockets, and keep the line for `warning`.

        `stream` is the output stream that `text` comes from, "stdout" or "stderr".
        """
        if self._line is None and self.fabric != "tcp":
            lines = (self._partial.pop(stream, "") + text).split("\n")
            self._partial[stream] = lines.pop()[-_LONGEST:]
            self._line = next((line.strip()[-200:] for line in lines if _SOCKETS.search(line)), None)

    def warning(self, nodes: int) -> str | None:
        """Returns a warning at the first call after `feed` has found NCCL's line about sockets; otherwise None.

        `nodes` is the number of nodes of the payload. With the preset "none", the result is None for a single node.
        """
        if self._warned or self._line is None or (self.fabric == "none" and nodes < 2):  # One node alone needs no network.
            return None
        self._warned = True
        meant = "which is slow between nodes" if self.fabric == "none" else f"and fabric={self.fabric!r} is asked for"
        return f"NCCL uses TCP sockets, {meant}: {_ADVICE[self.fabric]} ({self._line})"
