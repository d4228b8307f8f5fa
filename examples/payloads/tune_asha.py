"""Search for the best learning rate with Ray Tune and ASHA."""

import os
import time
from pathlib import Path
from typing import Any

import ray
from dagster_pipes import PipesContext, open_dagster_pipes
from ray import tune
from ray.tune.schedulers import ASHAScheduler


def trial(config: dict[str, Any]) -> None:
    """Gradient descent on x²: slow with a small rate, and with one near 1 it jumps to and fro."""
    x = 10.0
    for _ in range(config["iterations"]):
        time.sleep(0.1)  # So long would an epoch take.
        x -= config["rate"] * 2 * x
        tune.report({"loss": x * x})


class Live(tune.Callback):
    """Tune calls it in the payload's process, so that it can tell Dagster of each result."""

    def on_trial_result(self, *_: Any, trial: Any, result: dict[str, Any], **__: Any) -> None:
        """Log one result."""
        log = PipesContext.get().log
        log.info(f"rate {trial.config['rate']:.4f} after {result['training_iteration']} iterations: loss {result['loss']:.3g}")


if __name__ == "__main__":
    with open_dagster_pipes() as pipes:
        ray.init()
        trials, iterations = pipes.get_extra("trials"), pipes.get_extra("iterations")
        tuner = tune.Tuner(
            trial,
            param_space={"rate": tune.loguniform(1e-3, 0.99), "iterations": iterations},
            tune_config=tune.TuneConfig(
                metric="loss",
                mode="min",
                num_samples=trials,
                scheduler=ASHAScheduler(max_t=iterations, grace_period=1, reduction_factor=3),
            ),
            run_config=tune.RunConfig(
                name=pipes.run_id, storage_path=str(Path(os.environ["RAYSLURM_DATA_DIR"]) / "tune"), callbacks=[Live()], verbose=0
            ),
        )
        results = tuner.fit()
        best = results.get_best_result()
        done = [int(result.metrics["training_iteration"]) for result in results]
        pipes.report_asset_materialization(
            metadata={
                "best rate": best.config["rate"],
                "best loss": best.metrics["loss"],
                "trials": len(done),
                "stopped early": sum(each < iterations for each in done),
                "iterations": sum(done),
            }
        )
