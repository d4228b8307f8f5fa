"""Improve a policy: send its weights to the rollouts, and learn from the rewards that come back."""

import json
import os
from multiprocessing.connection import Listener

import numpy as np
from dagster_pipes import open_dagster_pipes

if __name__ == "__main__":
    with open_dagster_pipes() as pipes:
        host = json.loads(os.environ["RAYSLURM_COMPONENTS"])["learner"]["address"]
        weights, mean = np.zeros(4), 0.0
        address = (host, pipes.get_extra("port"))
        with Listener(address, authkey=os.environ["ROLLOUTS_KEY"].encode()) as listener, listener.accept() as rollouts:
            for step in range(pipes.get_extra("steps")):
                rollouts.send(weights)
                actions, rewards = rollouts.recv()
                chances = np.exp(weights) / np.exp(weights).sum()
                # REINFORCE: what was better than the mean becomes likelier.
                mean = rewards.mean()
                for action, reward in zip(actions, rewards, strict=True):
                    weights += 0.05 * (reward - mean) * (np.eye(4)[action] - chances)
                if step % 5 == 0:
                    pipes.log.info(f"step {step}: mean reward {mean:.3f}")
            rollouts.send(None)
        pipes.report_asset_materialization(metadata={"best action": int(weights.argmax()), "mean reward": float(mean)})
