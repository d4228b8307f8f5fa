"""Prints the time at which the head of a Ray cluster is alive in its GCS; a program of its own, started beforehand."""

import socket
import sys
import time

from ray._raylet import GcsClient  # type: ignore[attr-defined]

_PAUSE = 0.02
_ALIVE = 0  # GcsNodeInfo.ALIVE in Ray's gcs.proto.


def wait_for_port(host: str, port: int) -> None:
    """Wait until somebody listens: the constructor of a client retries for tens of seconds otherwise."""
    while True:
        try:
            socket.create_connection((host, port), timeout=1.0).close()
            return
        except OSError:
            time.sleep(_PAUSE)


def main() -> None:
    address = sys.argv[1]
    print("ready", flush=True)
    host, _, port = address.rpartition(":")
    wait_for_port(host, int(port))
    client = GcsClient(address=address)
    while not any(node.state == _ALIVE and node.is_head_node for node in client.get_all_node_info(timeout=2).values()):
        time.sleep(_PAUSE)
    print(time.time(), flush=True)


if __name__ == "__main__":
    main()
