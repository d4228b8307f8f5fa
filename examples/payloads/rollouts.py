"""Play with the learner's newest weights, on all CPUs of this component's Ray cluster."""

import json
import os
import time
from multiprocessing.connection import Client, Connection

import numpy as np
import ray
from dagster_pipes import open_dagster_pipes

REWARDS = np.array([0.1, 0.3, 0.9, 0.5])


@ray.remote(num_cpus=1)
class Player:
    """Plays in its own environment: four levers that pay with different chances."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)

    def play(self, weights: np.ndarray, rounds: int) -> tuple[np.ndarray, np.ndarray]:
        """The actions of some rounds, and their rewards."""
        actions = self._random.choice(4, size=rounds, p=np.exp(weights) / np.exp(weights).sum())
        return actions, (self._random.random(rounds) < REWARDS[actions]).astype(float)


def connect(host: str, port: int, key: bytes) -> Connection:
    """A connection to the learner, which may need a moment longer to start."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return Client((host, port), authkey=key)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


if __name__ == "__main__":
    with open_dagster_pipes() as pipes:
        ray.init()
        players = [Player.remote(seed) for seed in range(int(ray.cluster_resources()["CPU"]))]
        host = json.loads(os.environ["RAYSLURM_COMPONENTS"])["learner"]["address"]
        rounds = 0
        with connect(host, pipes.get_extra("port"), os.environ["ROLLOUTS_KEY"].encode()) as learner:
            while (weights := learner.recv()) is not None:
                actions, rewards = zip(*ray.get([player.play.remote(weights, 50) for player in players]), strict=True)
                learner.send((np.concatenate(actions), np.concatenate(rewards)))
                rounds += 50 * len(players)
        pipes.report_asset_materialization(metadata={"players": len(players), "rounds": rounds})
