"""What a payload needs of this machine: packed here under names made of its content, and brought to the cluster."""

from __future__ import annotations

import ast
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import FailureKind, StartError
from ..plan import Plan, relocate
from ..slurm.submit import RequiredFiles
from ..ssh.base import Connection, ConnectionFailed, Progress
from ..upload import Bundle, bundle_directory, bundle_files, install
from ..upload.deliver import place_of, runtime_place

_TELL_INTERVAL = 5.0


@dataclass(frozen=True)
class PayloadFiles:
    """The files of a plan.

    Attributes:
        plan: the plan with the places that they have on the cluster, whether they are there already or not.
        bundles: what has to be there, by what it is to the payload.
        left: modules beside the script that it imports, and that stay here.
    """

    plan: Plan
    bundles: Mapping[str, Bundle]
    left: tuple[str, ...] = ()

    def places(self, base: str) -> list[str]:
        """Where the bundles are on the cluster."""
        return [place_of(base, bundle) for bundle in self.bundles.values()]

    def warn(self, log: Any) -> None:
        """Tell the log of what the payload will not find there, though it would here."""
        if self.left:
            log.warning(
                f"[rayslurm] {os.path.basename(self.plan.script or '')} imports {', '.join(self.left)} from beside "
                "it, which is not sent: name that directory in the launcher's working_dir, unless the environment there has it"
            )


def pack(plan: Plan, base: str, data_dir: str) -> PayloadFiles:
    """Bundle the files of a plan. Nothing is sent, and the cluster is not asked.

    Args:
        plan: what to run.
        base: the base directory on the cluster, absolute.
        data_dir: the payload's data directory there.

    Raises:
        StartError: a file cannot be used, or cannot be read.
    """
    payload = plan.payload
    bundles: dict[str, Bundle] = {}
    left: list[str] = []
    try:
        if payload.working_dir:
            bundles["working_dir"] = bundle_directory(payload.working_dir)
        if payload.extra_files:
            bundles["extra_files"] = bundle_files({os.path.basename(path): path for path in payload.extra_files})
        inside = plan.script and "working_dir" in bundles and bundles["working_dir"].name_of(plan.script)
        if plan.script and not inside:
            bundles["script"] = bundle_files({os.path.basename(plan.script): plan.script}, argument="payload_path")
            left = modules_beside(plan.script)
    except ValueError as error:
        raise StartError(FailureKind.CONFIGURATION, str(error)) from None
    except OSError as error:
        raise StartError(FailureKind.CONFIGURATION, f"a file of the payload cannot be read on this machine: {error}") from None
    places = {what: place_of(base, bundle) for what, bundle in bundles.items()}
    script = None
    if plan.script:
        script = (
            os.path.join(places["working_dir"], inside)
            if inside
            else os.path.join(places["script"], os.path.basename(plan.script))
        )
    extra_files = [os.path.join(places["extra_files"], os.path.basename(path)) for path in payload.extra_files]
    return PayloadFiles(relocate(plan, script, places.get("working_dir"), extra_files, data_dir), bundles, tuple(left))


def modules_beside(script: str) -> list[str]:
    """The modules that a script imports from its own directory, where Python looks first; none if it cannot be parsed."""
    try:
        tree = ast.parse(Path(script).read_bytes())
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # The last two for what is nested too deeply.
        return []
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    here = Path(script).parent
    return sorted(name for name in names if any((here / path).is_file() for path in (f"{name}.py", f"{name}/__init__.py")))


def deliver(connection: Connection, base: str, cargo: PayloadFiles, log: Any, afresh: bool = False) -> str:
    """Bring the files of a plan to the cluster, unless they are there.

    Args:
        connection: how to reach it.
        base: the base directory there, absolute.
        cargo: the files.
        log: the step's log.
        afresh: whether what this process knows to be there is looked for all the same.

    Returns:
        Where the runtime is there.

    Raises:
        StartError: a file changed meanwhile.
        OSError: something cannot be read, sent or written.
    """

    def warn(sentence: str) -> None:
        log.warning(f"[rayslurm] remote_base: {sentence}")

    try:
        installed = install(connection, base, list(cargo.bundles.values()), _progress(log), afresh, warn)
    except ValueError as error:
        raise StartError(FailureKind.CONFIGURATION, str(error)) from None
    log.debug(f"[rayslurm] delivered {', '.join(cargo.bundles) or 'nothing'} to {connection.place}")
    return installed.runtime


def required_files(connection: Connection, base: str, cargos: Sequence[PayloadFiles], log: Any) -> RequiredFiles:
    """What a job looks for that runs these plans, and how it is brought there again.

    Args:
        connection: how to reach the cluster.
        base: the base directory there, absolute.
        cargos: the files of its plans.
        log: the step's log.
    """

    def restore() -> None:
        log.warning(f"[rayslurm] files that were sent to {base} on {connection.place} are gone; sending them again")
        with remote_base_errors(base):
            for cargo in cargos:
                deliver(connection, base, cargo, log, afresh=True)

    return RequiredFiles([runtime_place(base), *(place for cargo in cargos for place in cargo.places(base))], restore)


@contextmanager
def remote_base_errors(base: object) -> Iterator[None]:
    """Turn a base directory that cannot be used into one sentence."""
    try:
        yield
    except ConnectionFailed:
        raise
    except OSError as error:
        raise StartError(
            FailureKind.CONFIGURATION,
            f"remote_base: {base} cannot be used: {error}; choose a directory of your own that the edge and the "
            "compute nodes share",
        ) from None


def _progress(log: Any) -> Progress:
    """Tells the log of uploads that take their time."""
    told = time.monotonic()

    def tell(done: int, size: int) -> None:
        nonlocal told
        if done < size and time.monotonic() - told > _TELL_INTERVAL:
            told = time.monotonic()
            log.info(f"[rayslurm] uploading: {done / 2**20:.0f} of {size / 2**20:.0f} MiB")

    return tell
