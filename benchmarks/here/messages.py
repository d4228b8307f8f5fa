"""`messages`: Pipes messages into the event log, beside Dagster's own reader of a file of messages."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import dagster as dg

from dagster_rayslurm import BashLauncher, ComputeResource

from ..figures import Figure, Options, Sample
from ..steps import PAYLOADS, alternate, base_dir, in_step, instance, timed

_BAR = 0.8
_PAYLOAD = PAYLOADS / "messages.py"


def messages(options: Options) -> Figure:
    """Messages per second of `run()`, all of them in Dagster's event log when it returns."""
    client = dg.PipesSubprocessClient(message_reader=dg.PipesTempFileMessageReader())
    command = [sys.executable, str(_PAYLOAD), str(options.messages)]
    by_hand: list[float] = []
    ours: list[float] = []
    problems: list[str] = []

    def run_client(context: dg.AssetExecutionContext, _: ComputeResource) -> float:
        return timed(lambda: client.run(context=context, command=command))[0]

    def run_compute(context: dg.AssetExecutionContext, compute: ComputeResource) -> tuple[str, float]:
        return context.run_id, timed(lambda: compute.run(context=context, payload_path=command))[0]

    def by_hand_once() -> None:
        by_hand.append(options.messages / in_step(compute, dagster, run_client))

    def ours_once() -> None:
        run_id, seconds = in_step(compute, dagster, run_compute)
        ours.append(options.messages / seconds)
        problems.extend(differences(dagster, run_id, options.messages))

    with base_dir() as base, instance() as dagster:
        compute = ComputeResource(local_base=base, default_launcher=BashLauncher())
        alternate(options.repeat(2), by_hand_once, ours_once)
    hand = Sample.of("PipesSubprocessClient", by_hand, "/s")
    our = Sample.of("run()", ours, "/s")
    ratio = Sample.of("ratio", [our.median / hand.median], "x")
    return Figure("messages", hand, our, ratio, _BAR, at_least=True, problem=next(iter(problems), None))


def differences(dagster: dg.DagsterInstance, run_id: str, count: int) -> Iterator[str]:
    """What is wrong with the messages in the event log."""
    found = [entry.user_message for entry in dagster.all_logs(run_id) if entry.user_message.startswith("message ")]
    if found != [f"message {number}" for number in range(count)]:
        yield f"{len(found)} of {count} messages are in the event log, or they are out of order"
