"""Draw the confusion matrix and the learning curve."""

import numpy as np
import pandas as pd
from dagster_pipes import open_dagster_pipes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from sklearn.metrics import confusion_matrix
from study import DATA, picture

INK, QUIET, ACCENT = "#1f2937", "#6b7280", "#2563eb"


def draw_confusion(predictions: pd.DataFrame) -> Figure:
    """Which digit was taken for which: mistakes stand out, zeros stay empty."""
    counts = confusion_matrix(predictions["label"], predictions["predicted"], labels=range(10))
    right = counts.trace()
    figure = Figure(figsize=(5.6, 5.4))
    axes = figure.subplots()
    # Right answers outnumber mistakes by fifty to one; one scale for both would show the mistakes as white.
    hits = np.ma.masked_where(~np.eye(10, dtype=bool), counts)
    misses = np.ma.masked_where(np.eye(10, dtype=bool) | (counts == 0), counts)
    axes.imshow(hits, cmap="Blues", vmin=0, vmax=1.3 * counts.max())
    axes.imshow(misses, cmap="Reds", vmin=0, vmax=2 * max(1, misses.max() if misses.count() else 1))
    for (row, column), count in np.ndenumerate(counts):
        if count:
            white = row == column and count > 0.6 * counts.max()
            axes.text(column, row, str(count), ha="center", va="center", fontsize=10, color="white" if white else INK)
    axes.set_xticks(range(10))
    axes.set_yticks(range(10))
    axes.set_xticks(np.arange(0.5, 9), minor=True)
    axes.set_yticks(np.arange(0.5, 9), minor=True)
    axes.grid(which="minor", color="#e5e7eb", linewidth=0.8)
    axes.tick_params(which="both", length=0, labelcolor=INK)
    axes.spines[:].set_color("#e5e7eb")
    axes.set_xlabel("digit that was read", color=INK)
    axes.set_ylabel("digit that was written", color=INK)
    axes.set_title("Which digit was taken for which", color=INK, fontsize=13, fontweight="bold", loc="left", pad=24)
    axes.text(0, 1.025, f"{right} of {counts.sum()} test images right", transform=axes.transAxes, color=QUIET, fontsize=10)
    return figure


def draw_learning_curve(curve: pd.DataFrame) -> Figure:
    """Accuracy over the number of images, with the range of the repeats."""
    figure = Figure(figsize=(6.4, 4.2))
    axes = figure.subplots()
    axes.fill_between(curve["images"], curve["min"], curve["max"], color=ACCENT, alpha=0.15, linewidth=0, label="range")
    axes.plot(curve["images"], curve["mean"], color=ACCENT, marker="o", markersize=5, linewidth=2, label="mean")
    last = curve.iloc[-1]
    axes.annotate(
        f"{last['mean']:.1%}",
        (last["images"], last["mean"]),
        xytext=(0, -16),
        textcoords="offset points",
        ha="center",
        color=ACCENT,
        fontweight="bold",
    )
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_ylim(top=1.005)
    axes.set_xlim(left=0)
    axes.grid(axis="y", color="#e5e7eb", linewidth=0.8)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color("#9ca3af")
    axes.tick_params(length=0, labelcolor=INK)
    axes.set_xlabel("images to train on", color=INK)
    axes.set_title("What more images bring", color=INK, fontsize=13, fontweight="bold", loc="left", pad=24)
    axes.text(0, 1.03, "accuracy on images not trained on", transform=axes.transAxes, color=QUIET, fontsize=10)
    axes.legend(loc="lower right", frameon=False, labelcolor=INK)
    return figure


with open_dagster_pipes() as pipes:
    predictions = pd.read_parquet(DATA / "predictions.parquet")
    curve = pd.read_parquet(DATA / "learning_curve.parquet")
    pipes.log.info("drawing")
    wrong = predictions[predictions["predicted"] != predictions["label"]]
    confused = wrong.groupby(["label", "predicted"]).size().sort_values(ascending=False)
    mostly = "none was misread" if wrong.empty else "{} was read as {} most often".format(*confused.index[0])
    pipes.report_asset_materialization(
        metadata={
            "summary": f"2 pictures; {mostly}",
            "confusion matrix": picture(draw_confusion(predictions), "confusion_matrix"),
            "learning curve": picture(draw_learning_curve(curve), "learning_curve"),
        }
    )
