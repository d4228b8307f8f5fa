"""Check that the classifier neglects no digit: a good accuracy can hide one that it hardly ever finds."""

import joblib
import pandas as pd
from dagster_pipes import open_dagster_pipes
from sklearn.metrics import recall_score
from study import DATA, load_features, table

with open_dagster_pipes() as pipes:
    model = joblib.load(DATA / "model.joblib")
    features, labels = load_features("test")
    recall = recall_score(labels, model.predict(features), average=None)
    worst = int(recall.argmin())
    floor = pipes.get_extra("recall_floor")
    pipes.log.info(f"lowest recall: {recall[worst]:.3f}, of digit {worst}")
    pipes.report_asset_check(
        asset_key="digit_classifier",
        check_name="recall_of_every_digit",
        passed=bool(recall[worst] > floor),
        metadata={
            "lowest recall": float(recall[worst]),
            "of digit": worst,
            "floor": floor,
            "recall by digit": table(pd.DataFrame({"digit": range(10), "recall": recall.round(4)})),
        },
    )
