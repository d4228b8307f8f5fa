"""Make one placement group after the other, and see where its workers are."""

import ray
from dagster_pipes import open_dagster_pipes
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy


@ray.remote(num_cpus=1)
def node() -> str:
    """The Ray node that this runs on."""
    return ray.get_runtime_context().get_node_id()


if __name__ == "__main__":
    with open_dagster_pipes() as pipes:
        ray.init()
        metadata = {}
        for strategy, bundles in pipes.get_extra("groups").items():
            group = placement_group(bundles, strategy=strategy)
            ray.get(group.ready(), timeout=60)
            workers = [
                node.options(scheduling_strategy=PlacementGroupSchedulingStrategy(group, index)).remote()
                for index in range(len(bundles))
            ]
            nodes = set(ray.get(workers))
            pipes.log.info(f"{strategy}: {len(bundles)} workers on {len(nodes)} nodes")
            metadata[strategy] = {"type": "json", "raw_value": {"workers": len(bundles), "nodes": len(nodes)}}
            remove_placement_group(group)  # Frees its CPUs for the next one.
        pipes.report_asset_materialization(metadata=metadata)
