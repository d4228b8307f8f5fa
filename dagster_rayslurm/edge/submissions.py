"""Keeps one job for each idempotency key, and lists the submitted runs. Paths are absolute.

A submitted run is a run from `ComputeResource.submit`, which does not wait for the end of the run. An idempotency key is a text
by which a repeated submission finds the job of the first submission.

Before a process submits the job of a key, the process makes a claim, so that other processes do not submit the job too. Each key
has a directory, and each claim of the key is a numbered directory there, which appears with all its files at once. Later, a
process decides whether the claim has a job, and renames a file in the claim's directory accordingly. Both steps are atomic, on
NFS too, so that all processes see the same decision.
"""

import contextlib
import os
import re
import shutil
import time

from . import files, slurm

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

HANDLE = "handle.json"  # File in a run directory: the handle, without the job id.
FETCHED = "fetched"  # File in a run directory whose outputs nobody needs any more.
REPORTER = "reporter"  # File in a run directory; renamed to `reporter.SENSOR` for the sensor that reports the end of the run.
UNDECIDED, SUBMITTED, ABANDONED = "undecided", "submitted", "abandoned"
_TEXT = "claim.json"
_MOST_BYTES = 1024 * 1024


def claim(directory: str, after: int, text: str) -> "tuple[int, str, str, float]":
    """Return the number, the state, the text, and the age in seconds of the newest claim of an idempotency key.

    `directory` is the directory of the key; a missing directory is created. `after` is the number of the last claim that the
    caller knows to be abandoned, or 0. If there is no claim with a higher number, the function first creates one, with the text
    `text`, which describes the caller and the caller's run. The state is `UNDECIDED`, `SUBMITTED` or `ABANDONED`. Raises OSError
    if no claim can be created.
    """
    files.make_dir(directory)
    while True:
        number = max([after, *(int(name) for name in os.listdir(directory) if re.fullmatch("[1-9][0-9]{0,8}", name))])
        path = os.path.join(directory, str(number))
        if number > after:
            age = abs(time.time() - os.stat(os.path.join(path, _TEXT)).st_mtime)
            return number, _state(path), files.read(os.path.join(path, _TEXT), 0, _MOST_BYTES).decode("utf-8", "replace"), age
        new = files.temporary_name(path)
        os.mkdir(new, 0o700)
        try:
            files.write(os.path.join(new, _TEXT), text.encode("utf-8"), 0o600)
            files.write(os.path.join(new, UNDECIDED), b"", 0o600)
            with contextlib.suppress(OSError):  # Another process may have been faster: a directory with files is never replaced.
                os.rename(new, os.path.join(directory, str(number + 1)))
        finally:
            shutil.rmtree(new, ignore_errors=True)
        if not os.path.isdir(os.path.join(directory, str(number + 1))):
            raise OSError("%s: the claim cannot be made" % directory)


def decide(path: str, state: str) -> str:
    """Set the state of the claim in the directory `path` to `state`, unless a state was set before; return the claim's state.

    `state` is `SUBMITTED` or `ABANDONED`.
    """
    with contextlib.suppress(FileNotFoundError):
        os.rename(os.path.join(path, UNDECIDED), os.path.join(path, state))
    return _state(path)


def _state(path: str) -> str:
    """Return the state of the claim in the directory `path`."""
    names = os.listdir(path)
    return next((each for each in (SUBMITTED, ABANDONED) if each in names), UNDECIDED)


def listing(base: str, squeue: "Sequence[str]", timeout: float, known: "Sequence[str]") -> "dict[str, Any]":
    """List the submitted runs below the base directory `base`, and run the squeue command `squeue`.

    `known` has the names of the runs about which the caller needs no facts. The command may take `timeout` seconds. Returns a
    dict with two keys:
        runs: a dict for each run. For a run in `known`, the dict has only the `name`, and `known`, which is True. For another
            run, `known` is False, and the dict also has these keys: `handle`, the content of the run's file `HANDLE`; `age`, the
            age of this file in seconds; `job_id`, which is "" if the id is not stored; and `reporter`, the name of the sensor
            that reports the end of the run, which is "" if no sensor was chosen.
        queue: the exit code, the output and the error output of the command. If all runs are in `known`, the command is not run,
            and the exit code is 0.
    """
    runs, skip = [], set(known)
    directory = os.path.join(base, "runs")
    for name in sorted(os.listdir(directory)) if os.path.isdir(directory) else []:
        path = os.path.join(directory, name)
        text = files.read(os.path.join(path, HANDLE), 0, _MOST_BYTES) if os.path.isdir(path) else b""
        if not text:
            continue
        found = {"name": name, "known": name in skip}  # type: dict[str, Any]
        with contextlib.suppress(FileNotFoundError):  # A sweep has just removed the run directory.
            if name not in skip:
                found["handle"] = text.decode("utf-8", "replace")
                found["job_id"] = files.read(os.path.join(path, "job_id"), 0, 64).decode("utf-8", "replace").strip()
                found["age"] = abs(time.time() - os.stat(os.path.join(path, HANDLE)).st_mtime)
                reporters = [each for each in os.listdir(path) if each.startswith(REPORTER + ".")]
                found["reporter"] = reporters[0][len(REPORTER) + 1 :] if reporters else ""
            runs.append(found)
    if not any(not each["known"] for each in runs):
        return {"runs": runs, "queue": [0, "", ""]}  # There is no run to look for in the queue.
    code, out, error = slurm.run(list(squeue), b"", timeout, [])
    return {"runs": runs, "queue": [code, out.decode("utf-8", "replace"), error.decode("utf-8", "replace")]}


def take_report(run_dir: str, sensor: str) -> str:
    """Choose the sensor called `sensor` to report the end of a run, unless a sensor is chosen already; return the chosen name.

    The choice renames the file `REPORTER` in the run directory `run_dir`. Returns "" if there was never such a file, because then
    no sensor is to report the end of the run.
    """
    with contextlib.suppress(FileNotFoundError):  # The file that is renamed exists once, so that one sensor alone succeeds.
        os.rename(os.path.join(run_dir, REPORTER), os.path.join(run_dir, REPORTER + "." + sensor))
    names = [each for each in os.listdir(run_dir) if each.startswith(REPORTER + ".")]
    return names[0][len(REPORTER) + 1 :] if names else ""
