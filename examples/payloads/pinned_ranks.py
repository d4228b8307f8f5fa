"""Give each GPU a rank: a placement group for each node, and an actor for each GPU.

The bundles of a placement group are in no order of GPUs. So the actors start first and say where they are, and ranks follow from
the order of nodes and GPUs. In a training script `run` would call Megatron's entry point.
"""

import os
import socket

import ray
import torch
import torch.distributed
from dagster_pipes import open_dagster_pipes
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy


@ray.remote(num_cpus=0, num_gpus=1)
class Rank:
    """One process of the training, with one GPU."""

    def place(self) -> tuple[str, str, int]:
        """Address and id of this actor's node, and the number of its GPU there."""
        return ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id(), int(ray.get_gpu_ids()[0])

    def free_port(self) -> int:
        """A port for the first rank to listen on."""
        with socket.socket() as listener:
            listener.bind(("", 0))
            return listener.getsockname()[1]

    def run(self, rank: int, local_rank: int, size: int, address: str, port: int) -> tuple[float, str]:
        """Join the other ranks; the sum of all ranks, and this rank's device."""
        names = {"RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": size, "MASTER_ADDR": address, "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in names.items()})
        # Ray shows an actor its own GPU alone, and within the process that is device 0, whatever LOCAL_RANK is.
        if torch.cuda.is_available():
            torch.cuda.set_device(0)
        torch.distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
        total = torch.tensor(float(rank), device="cuda" if torch.cuda.is_available() else "cpu")
        torch.distributed.all_reduce(total)
        torch.distributed.destroy_process_group()
        return total.item(), os.environ["CUDA_VISIBLE_DEVICES"]


if __name__ == "__main__":
    with open_dagster_pipes() as pipes:
        ray.init()
        gpus = pipes.get_extra("gpus")
        groups = [placement_group([{"GPU": 1}] * gpus, strategy="STRICT_PACK") for _ in range(pipes.get_extra("nodes"))]
        ray.get([group.ready() for group in groups], timeout=60)
        actors = [
            Rank.options(scheduling_strategy=PlacementGroupSchedulingStrategy(group, index)).remote()
            for group in groups
            for index in range(gpus)
        ]
        places = dict(zip(actors, ray.get([actor.place.remote() for actor in actors]), strict=True))
        ranks = sorted(actors, key=lambda actor: places[actor])
        address, port = places[ranks[0]][0], ray.get(ranks[0].free_port.remote())
        pipes.log.info(f"{len(ranks)} ranks meet at {address}:{port}")
        running = [actor.run.remote(rank, rank % gpus, len(ranks), address, port) for rank, actor in enumerate(ranks)]
        totals, devices = zip(*ray.get(running), strict=True)
        table = [
            {"rank": rank, "node": places[actor][1], "local_rank": rank % gpus, "device": device, "sum": total}
            for rank, (actor, device, total) in enumerate(zip(ranks, devices, totals, strict=True))
        ]
        pipes.report_asset_materialization(metadata={"ranks": {"type": "json", "raw_value": table}})
