"""`slurm.logins` and `slurm.squeue`: what the edge node and slurmctld have to bear."""

import contextlib
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor

import dagster as dg

from dagster_rayslurm import ComputeResource

from ..figures import Figure, Options, Sample
from ..parties.edge import Edge, Key
from ..parties.peer import peer
from ..parties.runs import Ours, Shape, quiet
from ..steps import PAYLOADS, base_dir, in_step, instance

# No annotations from the future here: Dagster wants the type of `context` itself, not its name.

_ONE_AFTER_THE_OTHER, _AT_ONCE = 4, 4
_PEER_ASSETS = 4
_SMALL = Shape(ray=False)

_ASSETS = 100
_WAIT = PAYLOADS / "wait.py"
_QUICK_ASSETS, _QUICK_WINDOW = 5, 30.0
_WINDOW = 60.0
"""Seconds to count in: some whole multiple of `poll_interval`, 30 s."""
_PEER_WINDOW = 30.0
_PATIENCE = 300.0


def logins(options: Options) -> Figure:
    """Logins of one process with many assets, in turn and at once, by sshd's log."""
    edge = Edge()
    with base_dir() as scratch, edge.directory() as directory, edge.key(scratch, "ours") as key:
        ours = Ours(edge, directory, options.partition)

        def body(context: dg.AssetExecutionContext, compute: ComputeResource) -> None:
            for _ in range(_ONE_AFTER_THE_OTHER):
                ours.run(context, compute, _SMALL)
            with ThreadPoolExecutor(_AT_ONCE) as pool:
                list(pool.map(lambda _: ours.run(context, compute, _SMALL), range(_AT_ONCE)))

        with instance() as dagster, quiet():
            in_step(ours.resource(_SMALL, key=key.path), dagster, body)
        count = edge.logins(key.fingerprint)
        others = peer_logins(edge, directory, options, scratch) if options.peer else ()
    assets = _ONE_AFTER_THE_OTHER + _AT_ONCE
    return Figure(
        name="slurm.logins",
        by_hand=Sample.of("a master by hand", [1], "logins"),
        ours=Sample.of(f"{assets} assets in one process", [count], "logins"),
        result=Sample.of("logins by sshd's log", [count], "logins"),
        bar=1,
        others=others,
    )


def peer_logins(edge: Edge, directory: str, options: Options, scratch: str) -> tuple[Sample, ...]:
    """Logins for each asset of one process, one after the other, with nobody to end what leaks."""
    each: list[float] = []
    with edge.key(scratch, "peer") as key, peer(edge, directory, options.partition, scratch, key.path) as other:
        for _ in range(_PEER_ASSETS):
            before = edge.logins(key.fingerprint)
            other.run_only(_SMALL)
            each.append(edge.logins(key.fingerprint) - before)
        per_asset = ", ".join(f"{count:g}" for count in each)
    return (Sample.of(f"{other.label}, assets one after the other: {per_asset}; in all", [sum(each)], "logins"),)


def squeue(options: Options) -> Figure:
    """Queries of the queue per minute while many assets wait, counted where the commands are called."""
    edge = Edge()
    assets, window = (_QUICK_ASSETS, _QUICK_WINDOW) if options.quick else (_ASSETS, _WINDOW)
    with base_dir() as scratch, edge.directory() as directory, edge.key(scratch, "ours", directory) as key:
        ours = Ours(edge, directory, options.partition)
        stop = f"{directory}/stop"
        rates: list[Counter[str]] = []
        busy: list[float] = []

        def body(context: dg.AssetExecutionContext, compute: ComputeResource) -> None:
            def wait(_: int) -> None:
                compute.run(context=context, payload_path=_WAIT, extra_env={"BENCH_STOP": stop}, uses_pipes=False)

            with ThreadPoolExecutor(assets) as pool:
                runs = [pool.submit(wait, number) for number in range(assets)]
                try:
                    _until_submitted(edge, options.partition, runs)
                    cpu = time.process_time()
                    rates.append(_calls_within(edge, key, window))
                    busy.append(100 * (time.process_time() - cpu) / window)
                finally:
                    edge.shell(f"touch {stop}")
                for run in runs:
                    run.result()

        with instance() as dagster, quiet():
            in_step(ours.resource(_SMALL, key=key.path, mem="100M", cpus=1), dagster, body)
        in_all = edge.calls(key)
        others = peer_squeue(edge, directory, options, scratch) if options.peer else ()
    per_minute = Sample.of(f"{assets} assets at once", [rates[0]["squeue"] * 60 / window], "calls/min")
    cpu = (Sample.of("CPU of the Dagster process meanwhile", busy, "% of a core"),)
    commands = ", ".join(f"{command} {count}" for command, count in in_all.items())
    return Figure(
        name="slurm.squeue",
        by_hand=Sample.of("one every 30 s", [2], "calls/min"),
        ours=per_minute,
        result=per_minute,
        bar=2,
        also=(Sample.of(f"from the first submission to the last end: {commands}; in all", [in_all.total()], "calls"), *cpu),
        others=others,
        problem=None if in_all["squeue"] else "no call was counted",
    )


def _until_submitted(edge: Edge, partition: str, runs: list["Future[None]"]) -> None:
    """Wait until all assets have a job."""
    deadline = time.monotonic() + _PATIENCE
    while int(edge.shell(f"squeue --noheader --me --partition={partition} | wc -l")) < len(runs):
        for run in runs:
            if run.done():
                run.result()
        if time.monotonic() > deadline:
            raise TimeoutError(f"{len(runs)} jobs were not submitted within {_PATIENCE:.0f} s")
        time.sleep(2.0)


def _calls_within(edge: Edge, key: Key, seconds: float) -> Counter[str]:
    before = edge.calls(key)
    time.sleep(seconds)
    return edge.calls(key) - before


def peer_squeue(edge: Edge, directory: str, options: Options, scratch: str) -> tuple[Sample, ...]:
    """The same for one asset: each polls for itself, and a second one would need a process of its own."""
    stop = f"{directory}/stop-peer"
    with contextlib.ExitStack() as stack:
        key = stack.enter_context(edge.key(scratch, "peer", directory))
        other = stack.enter_context(peer(edge, directory, options.partition, scratch, key.path))
        pool = stack.enter_context(ThreadPoolExecutor(1))
        run = pool.submit(other.run_unmarked, _SMALL, _WAIT, BENCH_STOP=stop)
        try:
            time.sleep(10.0)  # It begins with what it does once.
            calls = _calls_within(edge, key, _PEER_WINDOW)
        finally:
            edge.shell(f"touch {stop}")
        run.result()
    return (Sample.of(f"{other.label}, for one asset", [calls["squeue"] * 60 / _PEER_WINDOW], "calls/min"),)
