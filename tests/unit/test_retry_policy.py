"""`retry_policy_for`: which failures a step is tried again after."""

from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from dagster_rayslurm import BashLauncher, ComputeResource, RunFailure, retry_policy_for
from dagster_rayslurm.errors import FailureKind
from dagster_rayslurm.failures import apply_retry_policy


@pytest.mark.parametrize(
    ("kind", "retry", "kinds", "allowed"),
    [
        (FailureKind.CLUSTER_LOST, None, ["cluster-lost"], True),
        (FailureKind.CLUSTER_LOST, None, ["allocation", "payload"], False),
        (FailureKind.ALLOCATION, None, ["allocation"], True),
        (FailureKind.ALLOCATION, False, ["allocation"], False),  # A time limit, say.
        (FailureKind.SUBMISSION, None, ["submission"], True),
        (FailureKind.SUBMISSION, True, ["allocation"], False),
    ],
)
def test_a_kind_is_retried_if_it_is_named(kind: FailureKind, retry: bool | None, kinds: list[str], allowed: bool) -> None:
    failure = RunFailure(kind, "x", retry=retry)
    apply_retry_policy(failure, retry_policy_for(*kinds))
    assert failure.allow_retries is allowed


def test_other_policies_change_nothing() -> None:
    failure = RunFailure(FailureKind.PAYLOAD, "x")
    for policy in (None, dg.RetryPolicy()):
        apply_retry_policy(failure, policy)
        assert failure.allow_retries


def test_the_rest_of_the_policy_is_dagsters() -> None:
    policy = retry_policy_for("payload", max_retries=3, delay=2, backoff=dg.Backoff.LINEAR)
    assert (policy.max_retries, policy.calculate_delay(3)) == (3, 6)


@pytest.mark.parametrize(
    ("kinds", "says"),
    [
        (["alocation"], "'alocation' is no kind of failure that can be retried; did you mean 'allocation'"),
        (["cancelled"], "'cancelled' is no kind"),
        ([], "name at least one kind of failure"),
    ],
)
def test_wrong_kinds_are_refused(kinds: list[str], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        retry_policy_for(*kinds)


@pytest.mark.parametrize(("kinds", "attempts"), [(["payload"], 3), (["allocation", "cluster-lost"], 1)])
@pytest.mark.parametrize("where", ["asset", "job"])
def test_steps_are_tried_again(kinds: list[str], attempts: int, where: str, tmp_path: Path) -> None:
    policy: Any = retry_policy_for(*kinds, max_retries=2)
    tries: list[int] = []

    @dg.op(retry_policy=policy if where == "asset" else None)
    def fails(context: dg.OpExecutionContext, compute: ComputeResource) -> None:
        tries.append(context.retry_number)
        compute.run(context=context, payload_path=["false"], uses_pipes=False)

    @dg.job(op_retry_policy=None if where == "asset" else policy)
    def job() -> None:
        fails()

    compute = ComputeResource(local_base=str(tmp_path), default_launcher=BashLauncher())
    assert not job.execute_in_process(resources={"compute": compute}, raise_on_error=False).success
    assert tries == list(range(attempts))
