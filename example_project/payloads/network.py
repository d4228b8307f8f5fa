"""Train small networks: Ray Data makes their images on nodes with CPUs, and each of them learns on a GPU of its own.

Both kinds of nodes are in one Ray cluster; the label `component` says which is which. Scikit-learn leaves the GPUs idle,
so that this runs everywhere; with a library that uses them, nothing but `Network` would change.
"""

import socket
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import ray
from dagster_pipes import open_dagster_pipes
from study import DATA, PIXELS, table

ON_CPUS, ON_GPUS = {"component": "cpu"}, {"component": "gpu"}
SHIFTS = [(0, 0), (0, 1), (0, -1), (1, 0), (-1, 0)]
"""Rows and columns that a copy of an image is moved by."""
WIDTH, RATES = 128, (0.01, 0.005)
ROUNDS, EPOCHS = 4, 5

Batch = dict[str, np.ndarray[Any, Any]]


def here() -> str:
    """The component and the node that this runs on."""
    return f"{ray.get_runtime_context().get_node_labels()['component']}: {socket.gethostname()}"


def augment(batch: Batch) -> Batch:
    """Images to learn from come five times, moved a little; those that networks are judged by come as they are."""
    image = np.stack([batch[name] for name in PIXELS], axis=1).reshape(-1, 8, 8)
    # Every fifth image to train on is kept back: what is best is chosen by these, and the test images judge the choice.
    part = np.where((batch["split"] == "train") & (batch["id"] % 5 == 0), "choose", batch["split"])
    learn = part == "train"
    framed = np.pad(image[learn], ((0, 0), (1, 1), (1, 1)))
    moved = [framed[:, 1 + down : 9 + down, 1 + right : 9 + right] for down, right in SHIFTS]
    flat = np.concatenate([image[~learn], *moved]).reshape(-1, 64)

    def repeated(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return np.concatenate([values[~learn], np.tile(values[learn], len(SHIFTS))])

    return {
        "part": repeated(part),
        "label": repeated(batch["label"]),
        "made": np.full(len(flat), here()),
        **{name: flat[:, index] for index, name in enumerate(PIXELS)},
    }


@ray.remote(num_gpus=1, label_selector=ON_GPUS)
class Network:
    """A network that learns on one GPU."""

    def __init__(self, blocks: list[Any], rate: float, seed: int) -> None:
        from sklearn.neural_network import MLPClassifier

        images = pa.concat_tables(ray.get(blocks)).to_pandas()
        self._made = images.groupby("made").size().to_dict()
        self._parts = {part: (rows[PIXELS].to_numpy(), rows["label"].to_numpy()) for part, rows in images.groupby("part")}
        self._random = np.random.default_rng(seed)
        self._model = MLPClassifier((WIDTH,), learning_rate_init=rate, random_state=seed)

    def learn(self) -> float:
        """Go through the images a few times; the accuracy on those that were kept back."""
        images, labels = self._parts["train"]
        for _ in range(EPOCHS):
            order = self._random.permutation(len(images))
            self._model.partial_fit(images[order], labels[order], classes=range(10))
        return self.accuracy("choose")

    def accuracy(self, part: str) -> float:
        """The share of a part's images that it gets right."""
        return float(self._model.score(*self._parts[part]))

    def places(self) -> tuple[dict[str, int], str, list[str]]:
        """Where how many images were made, where it is itself, and the GPUs that it has."""
        return self._made, here(), ray.get_runtime_context().get_accelerator_ids()["GPU"]


with open_dagster_pipes() as pipes:
    ray.init()
    ray.data.DataContext.get_current().enable_progress_bars = False
    digits = ray.data.read_parquet(str(DATA / "features.parquet"), label_selector=ON_CPUS)
    digits = digits.select_columns(["id", "label", "split", *PIXELS])
    # They stay where they were made; the networks get references, and fetch them from there.
    blocks = digits.map_batches(augment, batch_size=256, label_selector=ON_CPUS).to_arrow_refs()
    settings = [(RATES[seed % len(RATES)], seed) for seed in range(int(ray.cluster_resources()["GPU"]))]
    networks = [Network.remote(blocks, *chosen) for chosen in settings]
    (made, *_), places, gpus = zip(*ray.get([network.places.remote() for network in networks]), strict=True)
    pipes.log.info("images made on " + ", ".join(f"{place} ({images})" for place, images in made.items()))
    pipes.log.info("networks learn on " + ", ".join(f"{at} (GPU {' '.join(ids)})" for at, ids in zip(places, gpus, strict=True)))
    for done in range(1, ROUNDS + 1):
        scores = ray.get([network.learn.remote() for network in networks])
        pipes.log.info(f"{done * EPOCHS} epochs: " + ", ".join(f"{score:.4f}" for score in scores))
    best = int(np.argmax(scores))
    accuracy = ray.get(networks[best].accuracy.remote("test"))

    population = pd.DataFrame(settings, columns=["learning rate", "seed"])
    population = population.assign(accuracy=scores, place=places, GPU=[" ".join(ids) for ids in gpus])
    images = pd.DataFrame(made.items(), columns=["place", "images"])
    pipes.report_asset_materialization(
        metadata={
            "summary": f"{accuracy:.2%} of the test images right, by the best of {len(networks)} networks on GPUs",
            "accuracy": accuracy,
            "networks": table(population.round({"accuracy": 4})),
            "images made": table(images),
        }
    )
    ray.shutdown()
