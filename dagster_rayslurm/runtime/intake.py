"""Start records and secrets, as they lie in a directory."""

from __future__ import annotations

import json
import os
import sys
from typing import Dict

from .record import RUNTIME, SECRETS
from .spec import RuntimeSpec, SpecError, from_json


def take_secrets(run_dir: str, keep: bool) -> Dict[str, str]:
    """Read the secret variables and, unless another attempt may need them, remove their file."""
    path = os.path.join(run_dir, SECRETS)
    try:
        secrets = json.loads(read_text(path))
        if not keep:
            os.unlink(path)
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise SpecError("%s is not JSON" % path) from error
    return {str(name): str(value) for name, value in secrets.items()}


def read_text(path: str) -> str:
    """All of a file."""
    with open(path, encoding="utf-8") as file:
        return file.read()


def load_spec(directory: str) -> RuntimeSpec:
    """The runtime's own start record.

    Raises:
        SystemExit: it cannot be used; the message goes to the runtime's log.
    """
    try:
        return from_json(RuntimeSpec, read_text(os.path.join(directory, RUNTIME)))
    except (OSError, SpecError) as error:
        sys.exit("rayslurm runtime: %s: %s" % (directory, error))
