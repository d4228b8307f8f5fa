"""The mean image of one digit, and how much its images differ from it."""

import numpy as np
import pandas as pd
from dagster_pipes import open_dagster_pipes
from matplotlib.figure import Figure
from study import DATA, PIXELS, picture, replacing


def draw(digit: int, mean: np.ndarray, deviation: np.ndarray, images: int) -> Figure:
    """The mean image beside the deviation of each pixel."""
    figure = Figure(figsize=(4.2, 2.3))
    for axes, image, title, colours in zip(
        figure.subplots(1, 2), (mean, deviation), (f"mean of {images}", "deviation"), ("Greys", "magma"), strict=True
    ):
        axes.imshow(image.reshape(8, 8), cmap=colours, interpolation="nearest")
        axes.set_title(title, fontsize=10, color="#1f2937")
        axes.set_axis_off()
    figure.suptitle(f"Digit {digit}", x=0.13, ha="left", fontsize=12, fontweight="bold", color="#1f2937", y=1.04)
    return figure


with open_dagster_pipes() as pipes:
    digit = int(pipes.partition_key)
    images = pd.read_parquet(DATA / "raw.parquet", columns=PIXELS, filters=[("label", "==", digit)]).to_numpy() / 16.0
    mean, deviation = images.mean(axis=0), images.std(axis=0)
    with replacing(f"prototypes/{digit}.npz") as path:
        np.savez(path, mean=mean, deviation=deviation)
    variance = float((deviation**2).mean())
    pipes.log.info(f"digit {digit}: {len(images)} images, variance {variance:.4f}")
    pipes.report_asset_materialization(
        metadata={
            "summary": f"{len(images)} images, variance {variance:.4f} per pixel",
            "images": len(images),
            "variance within the digit": variance,
            "prototype": picture(draw(digit, mean, deviation, len(images)), f"prototype_{digit}"),
        }
    )
