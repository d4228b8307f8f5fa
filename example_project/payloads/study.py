"""What the scripts of this study share: where its files are, and how tables and pictures reach Dagster."""

from __future__ import annotations

import base64
import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

DATA = Path(os.environ["RAYSLURM_DATA_DIR"]) / "digits"
"""The directory through which the assets hand data to each other; on a cluster it is on the shared file system."""

PIXELS = [f"pixel_{index:02d}" for index in range(64)]

MetadataValue = dict[str, Any]


@contextmanager
def replacing(name: str) -> Iterator[Path]:
    """A path to write to, which takes the place of the file `name` once the block ends well.

    Another asset may be reading the file: it sees the old one or the new one, never half of one.
    """
    target = DATA / name
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f".{secrets.token_hex(4)}-{target.name}")
    try:
        yield unfinished
        os.replace(unfinished, target)
    finally:
        unfinished.unlink(missing_ok=True)


def load_features(split: str) -> tuple[pd.DataFrame, np.ndarray[Any, Any]]:
    """Features and labels of the "train" or the "test" images, in the order of their ids."""
    frame = pd.read_parquet(DATA / "features.parquet", filters=[("split", "==", split)])
    return frame.drop(columns=["id", "label", "split"]), frame["label"].to_numpy()


def table(frame: pd.DataFrame) -> MetadataValue:
    """A data frame as a table in Dagster."""

    def line(cells: Iterable[Any]) -> str:
        return "| " + " | ".join(str(cell) for cell in cells) + " |"

    lines = [line(frame.columns), line("---" for _ in frame.columns), *map(line, frame.itertuples(index=False))]
    return {"raw_value": "\n".join(lines), "type": "md"}


def picture(figure: Figure, name: str) -> MetadataValue:
    """Save a figure as `<name>.png` in the working directory, for `outputs=` to bring back, and show it in Dagster."""
    path = Path(f"{name}.png")
    figure.savefig(path, dpi=110, bbox_inches="tight", facecolor="white")
    data = base64.b64encode(path.read_bytes()).decode()
    return {"raw_value": f"![{name}](data:image/png;base64,{data})", "type": "md"}
