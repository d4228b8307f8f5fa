"""Work on one month, whose days are Ray tasks, and write its table into the data directory."""

import calendar
import os
from pathlib import Path

import pandas as pd
import ray
from dagster_pipes import open_dagster_pipes


@ray.remote
def day(year: int, month: int, day: int) -> dict[str, int]:
    """The figures of one day."""
    return {"day": day, "weekday": calendar.weekday(year, month, day)}


if __name__ == "__main__":
    with open_dagster_pipes() as pipes:
        ray.init()
        year, month = map(int, pipes.partition_key.split("-"))
        days = ray.get([day.remote(year, month, each + 1) for each in range(calendar.monthrange(year, month)[1])])
        path = Path(os.environ["RAYSLURM_DATA_DIR"]) / "monthly" / f"{pipes.partition_key}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".unfinished")
        pd.DataFrame(days).to_parquet(unfinished)
        unfinished.replace(path)  # A reader sees the old table or the new one, never half of one.
        working = sum(each["weekday"] < 5 for each in days)
        pipes.report_asset_materialization(
            metadata={"days": len(days), "working days": working, "table": {"type": "path", "raw_value": str(path)}}
        )
