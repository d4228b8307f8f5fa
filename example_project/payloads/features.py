"""Scale the pixels, add a few features by hand and split the images, with Ray Data."""

from typing import Any

import numpy as np
import ray
from dagster_pipes import open_dagster_pipes
from study import DATA, PIXELS, replacing, table

TEST_SHARE = 0.25

Batch = dict[str, np.ndarray[Any, Any]]


def engineer(batch: Batch) -> Batch:
    """Scaled pixels and what a person would say about a digit: how much ink, where, how wide, how symmetric."""
    image = np.stack([batch[name] for name in PIXELS], axis=1).reshape(-1, 8, 8) / 16.0
    ink = image.sum(axis=(1, 2))
    place = np.arange(8) / 7.0
    across, down = image.sum(axis=1) / ink[:, None], image.sum(axis=2) / ink[:, None]
    centre_x, centre_y = across @ place, down @ place
    flat = image.reshape(-1, 64).astype("float32")
    return {
        "id": batch["id"],
        "label": batch["label"],
        "split": split(batch["id"]),
        **{name: flat[:, index] for index, name in enumerate(PIXELS)},
        "ink": ink / 64.0,
        "centre_x": centre_x,
        "centre_y": centre_y,
        "width": np.sqrt(across @ place**2 - centre_x**2),
        "height": np.sqrt(down @ place**2 - centre_y**2),
        "symmetry_x": 1.0 - np.abs(image - image[:, :, ::-1]).mean(axis=(1, 2)),
        "symmetry_y": 1.0 - np.abs(image - image[:, ::-1, :]).mean(axis=(1, 2)),
    }


def split(ids: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """ "train" or "test" by a hash of the id alone: however Ray cuts the data into blocks, the split is the same."""
    # Knuth's multiplicative hash spreads consecutive ids evenly over 32 bits.
    return np.where(ids.astype("uint64") * 2654435761 % 2**32 < TEST_SHARE * 2**32, "test", "train")


with open_dagster_pipes() as pipes:
    ray.init()
    ray.data.DataContext.get_current().enable_progress_bars = False
    pipes.log.info("reading, scaling and splitting with Ray Data")
    digits = ray.data.read_parquet(str(DATA / "raw.parquet")).map_batches(engineer, batch_size=256)
    # 1797 rows fit into one file of a known order; a larger study would have the workers write many.
    frame = digits.to_pandas().sort_values("id", ignore_index=True)
    with replacing("features.parquet") as path:
        frame.to_parquet(path, index=False)

    rows = frame["split"].value_counts()
    features = frame.drop(columns=["id", "label", "split"])
    by_hand = features.drop(columns=PIXELS)
    by_digit = by_hand.groupby(frame["label"]).mean().round(2).reset_index()
    pipes.report_asset_materialization(
        metadata={
            "summary": f"{features.shape[1]} features, {rows['train']} images to train on, {rows['test']} to test",
            "train rows": int(rows["train"]),
            "test rows": int(rows["test"]),
            "features": features.shape[1],
            "means by digit": table(by_digit),
        }
    )
    ray.shutdown()
