"""Start small models that share GPUs.

Ray counts the parts, and gives each actor its GPU in `CUDA_VISIBLE_DEVICES`. Ray limits nothing: that the models' memory fits
onto a GPU together is the models' affair.
"""

import os
from collections import Counter

import ray
from dagster_pipes import open_dagster_pipes


@ray.remote(num_cpus=0)
class Model:
    """A model that needs a part of a GPU."""

    def device(self) -> str:
        """The GPU that the model is on."""
        return os.environ["CUDA_VISIBLE_DEVICES"]


if __name__ == "__main__":
    with open_dagster_pipes() as pipes:
        ray.init()
        share = pipes.get_extra("share")
        models = [Model.options(num_gpus=share).remote() for _ in range(pipes.get_extra("models"))]
        on = Counter(ray.get([model.device.remote() for model in models]))
        pipes.log.info(", ".join(f"GPU {device}: {count} models" for device, count in sorted(on.items())))
        pipes.report_asset_materialization(metadata={"models on each GPU": {"type": "json", "raw_value": on}})
