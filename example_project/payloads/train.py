"""Train the best model of the sweep, and see what more images would bring: the learning curve, as Ray tasks."""

import json
from pydoc import locate
from typing import Any

import joblib
import pandas as pd
import ray
from dagster_pipes import open_dagster_pipes
from study import DATA, load_features, replacing, table

SHARES = (0.05, 0.1, 0.2, 0.4, 0.7, 1.0)
REPEATS = 4


@ray.remote
def point(model: Any, features: pd.DataFrame, labels: Any, share: float, seed: int) -> tuple[int, float]:
    """Accuracy on a fifth of the images, after training on a share of the others."""
    from sklearn.model_selection import train_test_split

    seen, unseen, seen_labels, unseen_labels = train_test_split(
        features, labels, test_size=0.2, stratify=labels, random_state=seed
    )
    images = int(share * len(seen))
    return images, model.fit(seen[:images], seen_labels[:images]).score(unseen, unseen_labels)


with open_dagster_pipes() as pipes:
    ray.init()
    best = json.loads((DATA / "best.json").read_text())
    estimator: Any = locate(best["estimator"])
    model = estimator(**best["params"])
    features, labels = load_features("train")

    # The test images take no part in the curve: they are for the final figure alone.
    stored = [ray.put(part) for part in (features, labels)]
    running = [point.remote(model, *stored, share, seed) for share in SHARES for seed in range(REPEATS)]
    points: list[tuple[int, float]] = []
    while running:
        finished, running = ray.wait(running, num_returns=min(REPEATS, len(running)))
        points += ray.get(finished)
        pipes.log.info(f"learning curve: {len(points)}/{len(SHARES) * REPEATS} points")
    curve = pd.DataFrame(points, columns=["images", "accuracy"]).groupby("images")["accuracy"].agg(["mean", "min", "max"])
    curve = curve.reset_index()
    with replacing("learning_curve.parquet") as path:
        curve.to_parquet(path, index=False)

    model.fit(features, labels)
    with replacing("model.joblib") as path:
        joblib.dump(model, path)

    test_features, test_labels = load_features("test")
    accuracy = float(model.score(test_features, test_labels))
    mistakes = round((1 - accuracy) * len(test_labels))
    floor = pipes.get_extra("accuracy_floor")
    pipes.log.info(f"accuracy on {len(test_labels)} test images: {accuracy:.4f}")
    pipes.report_asset_materialization(
        metadata={
            "summary": f"{accuracy:.2%} of the test images right, {mistakes} of {len(test_labels)} wrong",
            "accuracy": accuracy,
            "mistakes": mistakes,
            "model": str(model),
            "learning curve": table(curve.round(4)),
        }
    )
    pipes.report_asset_check(
        check_name="accuracy_above_floor",
        passed=accuracy > floor,
        metadata={"accuracy": accuracy, "floor": floor},
    )
    ray.shutdown()
