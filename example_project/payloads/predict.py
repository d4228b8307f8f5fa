"""Read the test images in batches, on a pool of actors that each load the model once."""

import time
from typing import Any

import joblib
import numpy as np
import pandas as pd
import ray
from dagster_pipes import open_dagster_pipes
from ray.util import ActorPool
from study import DATA, replacing

BATCH = 64


@ray.remote
class Reader:
    """Holds the model and reads digits with it."""

    def __init__(self, path: str) -> None:
        self._model = joblib.load(path)

    def read(self, batch: pd.DataFrame) -> pd.DataFrame:
        """The digit read in each image, and how clearly it stands out from the next best."""
        features = batch.drop(columns=["id", "label", "split"])
        scores = getattr(self._model, "decision_function", getattr(self._model, "predict_proba", None))(features)
        second, first = np.sort(scores, axis=1)[:, -2:].T
        return batch[["id", "label"]].assign(predicted=self._model.classes_[scores.argmax(axis=1)], margin=first - second)


with open_dagster_pipes() as pipes:
    ray.init()
    images = pd.read_parquet(DATA / "features.parquet", filters=[("split", "==", "test")])
    batches = [images[start : start + BATCH] for start in range(0, len(images), BATCH)]
    size = max(1, min(4, int(ray.cluster_resources().get("CPU", 1))))
    actors = [Reader.remote(str(DATA / "model.joblib")) for _ in range(size)]
    pipes.log.info(f"{len(images)} images in {len(batches)} batches for {size} actors")

    parts: list[Any] = []
    begun = time.perf_counter()
    for part in ActorPool(actors).map_unordered(lambda actor, batch: actor.read.remote(batch), batches):
        parts.append(part)
        pipes.log.info(f"batch {len(parts)}/{len(batches)}")
    seconds = time.perf_counter() - begun
    predictions = pd.concat(parts).sort_values("id", ignore_index=True)
    with replacing("predictions.parquet") as path:
        predictions.to_parquet(path, index=False)

    right = int((predictions["predicted"] == predictions["label"]).sum())
    pipes.report_asset_materialization(
        metadata={
            "summary": f"{len(predictions)} images read by {size} actors, {right} of them right",
            "rows": len(predictions),
            "right": right,
            "actors": size,
            "images per second": round(len(predictions) / seconds, 1),
        }
    )
    ray.shutdown()
