"""Take in the digits that ship with scikit-learn: 1797 images of 8 x 8 pixels with 17 shades each."""

import pandas as pd
from dagster_pipes import open_dagster_pipes
from sklearn.datasets import load_digits
from study import PIXELS, replacing, table

with open_dagster_pipes() as pipes:
    digits = load_digits()
    frame = pd.DataFrame(digits.data.astype("uint8"), columns=PIXELS)
    frame.insert(0, "id", range(len(frame)))
    frame.insert(1, "label", digits.target.astype("int8"))
    with replacing("raw.parquet") as path:
        frame.to_parquet(path, index=False)

    balance = frame.groupby("label").size().rename("images").reset_index()
    balance["share"] = (balance["images"] / len(frame)).map("{:.1%}".format)
    pipes.log.info(f"{len(frame)} images of {len(balance)} digits")
    pipes.report_asset_materialization(
        metadata={
            "summary": f"{len(frame)} images, {balance['images'].min()} to {balance['images'].max()} of each digit",
            "rows": len(frame),
            "class balance": table(balance),
        }
    )
