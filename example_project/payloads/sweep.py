"""Try models and settings by cross-validation, each one a Ray task."""

import json
import time
from pydoc import locate
from typing import Any

import pandas as pd
import ray
from dagster_pipes import open_dagster_pipes
from study import load_features, replacing, table

FOLDS = 4

Settings = dict[str, Any]

TRIALS: list[tuple[str, Settings]] = [
    *(("sklearn.svm.SVC", {"C": c, "gamma": gamma}) for c in (1, 10, 100) for gamma in ("scale", 0.01, 0.1)),
    *(("sklearn.ensemble.RandomForestClassifier", {"n_estimators": n, "random_state": 0}) for n in (50, 150)),
    *(("sklearn.linear_model.LogisticRegression", {"C": c, "max_iter": 500}) for c in (0.1, 1, 10)),
    *(("sklearn.neighbors.KNeighborsClassifier", {"n_neighbors": k}) for k in (1, 3)),
]


@ray.remote
def trial(estimator: str, settings: Settings, features: pd.DataFrame, labels: Any) -> dict[str, float]:
    """Cross-validate one model."""
    from sklearn.model_selection import cross_val_score

    begun = time.perf_counter()
    model: Any = locate(estimator)
    scores = cross_val_score(model(**settings), features, labels, cv=FOLDS)
    return {"accuracy": scores.mean(), "spread": scores.std(), "seconds": time.perf_counter() - begun}


with open_dagster_pipes() as pipes:
    ray.init()
    # In the object store once, not with each task.
    features, labels = (ray.put(part) for part in load_features("train"))
    running = {trial.remote(*chosen, features, labels): chosen for chosen in TRIALS}
    results: list[dict[str, Any]] = []
    while running:
        (finished,), _ = ray.wait(list(running), num_returns=1)
        estimator, settings = running.pop(finished)
        shown = ", ".join(f"{name}={value}" for name, value in settings.items() if name not in ("random_state", "max_iter"))
        result = {"model": estimator.rpartition(".")[2], "settings": shown, **ray.get(finished)}
        results.append({**result, "estimator": estimator, "params": settings})
        best = max(results, key=lambda each: each["accuracy"])
        trial = f"{result['model']}({shown}) {result['accuracy']:.4f}"
        pipes.log.info(f"trial {len(results)}/{len(TRIALS)}: {trial}, best {best['accuracy']:.4f}")
    with replacing("best.json") as path:
        path.write_text(json.dumps({name: best[name] for name in ("estimator", "params", "accuracy")}, indent=2))

    ranking = pd.DataFrame(results).sort_values("accuracy", ascending=False).drop(columns=["estimator", "params"])
    pipes.report_asset_materialization(
        metadata={
            "summary": f"{best['model']}({best['settings']}) is best of {len(results)}: {best['accuracy']:.2%} cross-validated",
            "trials": len(results),
            "best model": best["model"],
            "best settings": best["settings"],
            "best cross-validated accuracy": float(best["accuracy"]),
            "ranking": table(ranking.round({"accuracy": 4, "spread": 4, "seconds": 2})),
        }
    )
    ray.shutdown()
