"""Bundles a payload's files, names each bundle by a hash of the bundle's content, and sends the bundles to the cluster."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..errors import FailureKind, StartError
from ..plan import Plan
from ..ssh.base import Connection
from ..upload.bundle import Bundle, bundle_directory, bundle_files
from ..upload.deliver import install, log_progress, place_of, runtime_place


@dataclass(frozen=True)
class PayloadFiles:
    """The files of a plan's payload, packed on this machine into bundles named "working_dir", "extra_files" and "script".

    A bundle that the payload does not need is left out.
    """

    plan: Plan  # The plan with the files' paths on the cluster.
    bundles: Mapping[str, Bundle]

    def places(self, base: str) -> list[str]:
        """Returns the paths of the bundles on the cluster, below the base directory `base`."""
        return [place_of(base, bundle) for bundle in self.bundles.values()]


def pack(plan: Plan, base: str, data_dir: str) -> PayloadFiles:
    """Pack the files of a plan into bundles on this machine. Sends nothing; see `deliver`.

    The result has the bundles, and a copy of the plan with the paths that the files will have on the cluster. `base` is the base
    directory, and `data_dir` the payload's data directory, both as absolute paths on the cluster. Raises StartError if a file
    cannot be read or packed.
    """
    payload = plan.payload
    bundles: dict[str, Bundle] = {}
    try:
        if payload.working_dir:
            bundles["working_dir"] = bundle_directory(payload.working_dir)
        if payload.extra_files:
            bundles["extra_files"] = bundle_files({os.path.basename(path): path for path in payload.extra_files})
        inside = plan.script and "working_dir" in bundles and bundles["working_dir"].name_of(plan.script)
        if plan.script and not inside:
            bundles["script"] = bundle_files({os.path.basename(plan.script): plan.script}, argument="payload_path")
    except ValueError as error:
        raise StartError(FailureKind.CONFIGURATION, str(error)) from None
    except OSError as error:
        raise StartError(FailureKind.CONFIGURATION, f"a file of the payload cannot be read on this machine: {error}") from None
    places = {what: place_of(base, bundle) for what, bundle in bundles.items()}
    argv = payload.argv
    if plan.script:
        there = (places["working_dir"], inside) if inside else (places["script"], os.path.basename(plan.script))
        argv = [os.path.join(*there) if word == plan.script else word for word in argv]
    extra_files = [os.path.join(places["extra_files"], os.path.basename(path)) for path in payload.extra_files]
    working_dir = places.get("working_dir")
    moved = replace(payload, argv=argv, working_dir=working_dir, extra_files=extra_files, data_dir=data_dir)
    return PayloadFiles(replace(plan, payload=moved), bundles)


def deliver(connection: Connection, base: str, files: PayloadFiles, log: Any) -> str:
    """Send the bundles in `files` and the runtime to the cluster, unless they are there; returns the runtime's path.

    `base` is the base directory on the cluster. `log` is the Dagster log, which gets the progress and warnings.

    Raises:
        StartError: a file changed after it was packed.
        OSError: a file cannot be read, sent or written.
    """

    def warn(sentence: str) -> None:
        log.warning(f"[rayslurm] remote_base: {sentence}")

    try:
        install(connection, base, list(files.bundles.values()), log_progress(log), warn)
    except ValueError as error:
        raise StartError(FailureKind.CONFIGURATION, str(error)) from None
    return runtime_place(base)
