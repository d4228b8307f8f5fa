"""`ray start …` on one node: `limit_node.py ADDRESS NODES FIFO ARGUMENTS…` for the head, `limit_node.py ADDRESS ARGUMENTS…`.

Ray is imported once on each node, all at the same time. The head's thread beside `ray start` asks the GCS and says when
all nodes are alive; the others wait for the head to be alive before they begin: Ray 2.60 itself looks every 2 s.
"""

import socket
import sys
import threading
import time

from ray._raylet import GcsClient
from ray.scripts.scripts import main as ray_cli

_PAUSE = 0.02
_ALIVE = 0  # GcsNodeInfo.ALIVE in Ray's gcs.proto.


def wait_for_port(address: str) -> None:
    host, _, port = address.rpartition(":")
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=1.0).close()
            return
        except OSError:
            time.sleep(_PAUSE)


def wait_for_nodes(address: str, nodes: int) -> None:
    wait_for_port(address)  # The constructor retries for tens of seconds where nobody listens yet.
    client = GcsClient(address=address)
    while sum(node.state == _ALIVE for node in client.get_all_node_info(timeout=2).values()) < nodes:
        time.sleep(_PAUSE)


def watch(address: str, nodes: int, fifo: str) -> None:
    wait_for_nodes(address, nodes)
    with open(fifo, "w") as file:
        file.write("alive\n")


address, *arguments = sys.argv[1:]
if arguments[0].isdecimal():
    nodes, fifo, *arguments = arguments
    threading.Thread(target=watch, args=(address, int(nodes), fifo), daemon=True).start()
else:
    wait_for_nodes(address, 1)
sys.argv = ["ray", "start", *arguments]
ray_cli()
