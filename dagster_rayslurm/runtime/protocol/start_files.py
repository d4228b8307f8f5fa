"""Reading the start records and the secrets that Dagster's side put into a run directory."""

from __future__ import annotations

import json
import os
import sys
from typing import Dict

from .record import RUNTIME, SECRETS
from .spec import RuntimeSpec, SpecError, from_json, is_passable


def take_secrets(run_dir: str, keep: bool) -> Dict[str, str]:
    """Read the payload's secret environment variables, and delete their file.

    Args:
        run_dir: the run directory.
        keep: whether to leave the file for another attempt, because Slurm may run the job again.

    Returns:
        The variables by name; none if there is no file.

    Raises:
        SpecError: the file is invalid, and is not deleted.
        OSError: the file cannot be read or deleted.
    """
    path = os.path.join(run_dir, SECRETS)
    try:
        secrets = json.loads(read_text(path))
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError) as error:
        raise SpecError("%s is not JSON" % path) from error
    if not isinstance(secrets, dict):
        raise SpecError("%s is not a JSON object" % path)
    if not all(isinstance(value, str) and is_passable(name) and is_passable(value) for name, value in secrets.items()):
        raise SpecError("%s has a variable whose value is no text that a process can have" % path)
    if not keep:
        os.unlink(path)
    return secrets


def read_text(path: str) -> str:
    """The content of a UTF-8 file."""
    with open(path, encoding="utf-8") as file:
        return file.read()


def load_spec(directory: str) -> RuntimeSpec:
    """Read the start record of the runtime from its run directory or session directory.

    Raises:
        SystemExit: the record is missing or invalid; the message goes to the runtime's log.
    """
    try:
        return from_json(RuntimeSpec, read_text(os.path.join(directory, RUNTIME)))
    except (OSError, SpecError) as error:
        sys.exit("rayslurm runtime: %s: %s" % (directory, error))
