"""Predict batches of rows with a pool of actors, each of which loads the model once."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import ray
from dagster_pipes import open_dagster_pipes

Batch = dict[str, np.ndarray[Any, Any]]


class Predictor:
    """Holds the model, so that it is loaded once for many batches."""

    def __init__(self) -> None:
        self._weights = np.arange(1.0, 5.0)  # Here a model would be loaded, onto this actor's GPU.
        self._actor = ray.get_runtime_context().get_actor_id()

    def __call__(self, batch: Batch) -> Batch:
        """The predictions for one batch."""
        return {
            "id": batch["id"],
            "prediction": batch["features"] @ self._weights,
            "actor": np.full(len(batch["id"]), self._actor),
        }


def features(batch: Batch) -> Batch:
    """What a row would bring along."""
    return {"id": batch["id"], "features": batch["id"][:, None] % np.array([2, 3, 5, 7])}


if __name__ == "__main__":
    with open_dagster_pipes() as pipes:
        ray.init()
        ray.data.DataContext.get_current().enable_progress_bars = False
        into = Path(os.environ["RAYSLURM_DATA_DIR"]) / "predictions" / pipes.run_id
        rows = ray.data.range(pipes.get_extra("rows"), override_num_blocks=8).map_batches(features)
        predicted = rows.map_batches(
            Predictor,
            batch_size=500,
            compute=ray.data.ActorPoolStrategy(size=pipes.get_extra("actors")),
            num_cpus=0.5,  # On GPUs num_gpus=1, or a part of one.
        )
        predicted.write_parquet(str(into))
        table = pyarrow.parquet.read_table(into)
        pipes.report_asset_materialization(
            metadata={
                "rows": table.num_rows,
                "actors": len(table["actor"].unique()),
                "mean prediction": float(np.mean(table["prediction"])),
                "files": {"type": "path", "raw_value": str(into)},
            }
        )
