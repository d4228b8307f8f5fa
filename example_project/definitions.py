"""The assets of the study, their checks, and where their payloads run."""

import os
from pathlib import Path
from typing import Any, Optional

import dagster as dg

from dagster_rayslurm import (
    BashLauncher,
    ComputeResource,
    ExecutionMode,
    HetComponent,
    InheritedEnvironment,
    RayLauncher,
    SessionConfig,
    SlurmQueueConfig,
    SlurmResource,
    SSHConnectionResource,
    UvEnvironment,
)

PAYLOADS = Path(__file__).parent / "payloads"
REQUIREMENTS = Path(__file__).parent / "requirements.txt"
"""What payloads import. On a cluster it is sent, unless `RAYSLURM_ENV_PATH` names an environment there."""
PLAIN = BashLauncher(working_dir=str(PAYLOADS))
"""For payloads that use no Ray; the others get the resource's default launcher."""

ACCURACY_FLOOR = 0.95
RECALL_FLOOR = 0.9
DIGITS = [str(digit) for digit in range(10)]


def compute_from_env(session: Optional[SessionConfig] = None) -> ComputeResource:
    """Where payloads run, from the environment: on this machine unless `RAYSLURM_MODE` says otherwise.

    Args:
        session: which warm cluster to use; the one that all runs share if None.
    """
    mode = _mode()
    # In a job of that mode, the payloads that know of no components have them all the same.
    components = _components() if mode == ExecutionMode.SLURM_HETJOB.value else []
    return _resource(mode, components=components, enable_cluster_reuse=True, session=session or SessionConfig())


def hetero_from_env() -> ComputeResource:
    """A Ray cluster of nodes with CPUs and nodes with GPUs: in one Slurm job, or simulated where there is no Slurm."""
    local = _mode() == ExecutionMode.LOCAL.value
    return _resource(ExecutionMode.LOCAL.value if local else ExecutionMode.SLURM_HETJOB.value, components=_components())


def _mode() -> str:
    return os.environ.get("RAYSLURM_MODE") or ExecutionMode.LOCAL.value


def _queue() -> SlurmQueueConfig:
    return SlurmQueueConfig(partition=os.environ.get("RAYSLURM_PARTITION"), cpus_per_node=2, mem="3G")


def _components() -> list[HetComponent]:
    partition = os.environ.get("RAYSLURM_GPU_PARTITION") or "gpu"
    gpus = SlurmQueueConfig(partition=partition, cpus_per_node=2, gpus_per_node=2, mem="3G")
    return [HetComponent(component_id="cpu", queue=_queue()), HetComponent(component_id="gpu", queue=gpus)]


def _resource(mode: str, **fields: Any) -> ComputeResource:
    on_slurm = mode != ExecutionMode.LOCAL.value
    prepared = os.environ.get("RAYSLURM_ENV_PATH") if on_slurm else None
    return ComputeResource(
        mode=mode,
        slurm=SlurmResource(ssh=SSHConnectionResource.from_env(), queue=_queue()) if on_slurm else None,
        default_launcher=RayLauncher(working_dir=str(PAYLOADS), object_store_memory_gb=0.25, dashboard=False),
        pre_deployed_env_path=prepared,
        environment=UvEnvironment(requirements=str(REQUIREMENTS)) if on_slurm and not prepared else InheritedEnvironment(),
        local_base=os.environ.get("RAYSLURM_BASE") or "~/.dagster_rayslurm",
        **fields,
    )


@dg.asset(group_name="data", kinds={"python", "parquet"})
def digits_raw(context: dg.AssetExecutionContext, compute: ComputeResource) -> dg.MaterializeResult:
    """1797 handwritten digits as scikit-learn ships them."""
    run = compute.run(context=context, payload_path=PAYLOADS / "ingest.py", launcher=PLAIN)
    return run.get_materialize_result()


@dg.asset(group_name="data", kinds={"ray", "parquet"}, deps=[digits_raw])
def digits_features(context: dg.AssetExecutionContext, compute: ComputeResource) -> dg.MaterializeResult:
    """Scaled pixels and a few features by hand, split into train and test, made with Ray Data."""
    return compute.run(context=context, payload_path=PAYLOADS / "features.py").get_materialize_result()


@dg.asset(group_name="model", kinds={"ray", "scikitlearn"}, deps=[digits_features])
def model_sweep(context: dg.AssetExecutionContext, compute: ComputeResource) -> dg.MaterializeResult:
    """Models and settings compared by cross-validation, one Ray task each."""
    return compute.run(context=context, payload_path=PAYLOADS / "sweep.py").get_materialize_result()


@dg.asset(
    group_name="model",
    kinds={"ray", "scikitlearn"},
    deps=[digits_features, model_sweep],
    check_specs=[
        dg.AssetCheckSpec(
            "accuracy_above_floor",
            asset="digit_classifier",
            description=f"More than {ACCURACY_FLOOR:.0%} of the test images right.",
        )
    ],
)
def digit_classifier(context: dg.AssetExecutionContext, compute: ComputeResource) -> dg.MaterializeResult:
    """The best model of the sweep, trained on all train images, with its learning curve."""
    extras = {"accuracy_floor": ACCURACY_FLOOR}
    return compute.run(context=context, payload_path=PAYLOADS / "train.py", extras=extras).get_materialize_result()


@dg.asset_check(asset=digit_classifier, additional_deps=[digits_features])
def recall_of_every_digit(context: dg.AssetCheckExecutionContext, compute: ComputeResource) -> dg.AssetCheckResult:
    """The classifier neglects no digit."""
    extras = {"recall_floor": RECALL_FLOOR}
    run = compute.run(context=context, payload_path=PAYLOADS / "check_recall.py", launcher=PLAIN, extras=extras)
    return run.get_asset_check_result()


@dg.asset(group_name="model", kinds={"ray", "parquet"}, deps=[digits_features, digit_classifier])
def digit_predictions(context: dg.AssetExecutionContext, compute: ComputeResource) -> dg.MaterializeResult:
    """The test images, read in batches by a pool of Ray actors."""
    return compute.run(context=context, payload_path=PAYLOADS / "predict.py").get_materialize_result()


@dg.asset(group_name="model", kinds={"ray", "scikitlearn"}, deps=[digits_features])
def digit_network(context: dg.AssetExecutionContext, hetero: ComputeResource) -> dg.MaterializeResult:
    """Small networks, one on each GPU, that learn from images made by Ray Data on nodes with CPUs."""
    return hetero.run(context=context, payload_path=PAYLOADS / "network.py").get_materialize_result()


@dg.asset(group_name="report", kinds={"python", "matplotlib"}, deps=[digit_classifier, digit_predictions])
def report(context: dg.AssetExecutionContext, compute: ComputeResource) -> dg.MaterializeResult:
    """The confusion matrix and the learning curve as pictures."""
    run = compute.run(context=context, payload_path=PAYLOADS / "report.py", launcher=PLAIN, outputs=["*.png"])
    context.add_output_metadata({path.name: dg.MetadataValue.path(path) for path in run.outputs})
    return run.get_materialize_result()


@dg.asset(
    group_name="report",
    kinds={"python", "matplotlib"},
    deps=[digits_raw],
    partitions_def=dg.StaticPartitionsDefinition(DIGITS),
)
def digit_prototypes(context: dg.AssetExecutionContext, compute: ComputeResource) -> dg.MaterializeResult:
    """For each digit, its mean image and how much its images differ from it."""
    run = compute.run(context=context, payload_path=PAYLOADS / "prototype.py", launcher=PLAIN, outputs=["*.png"])
    context.add_output_metadata({path.name: dg.MetadataValue.path(path) for path in run.outputs})
    return run.get_materialize_result()


STUDY = [digits_raw, digits_features, model_sweep, digit_classifier, digit_predictions, digit_network, report]
"""The assets without partitions, in an order that they can be made in."""

defs = dg.Definitions(
    assets=[*STUDY, digit_prototypes],
    asset_checks=[recall_of_every_digit],
    jobs=[
        dg.define_asset_job("digits_study", dg.AssetSelection.assets(*STUDY), description="Everything but the prototypes."),
        dg.define_asset_job("digits_prototypes", [digit_prototypes], description="One run for each digit."),
    ],
    resources={"compute": compute_from_env(), "hetero": hetero_from_env()},
)
