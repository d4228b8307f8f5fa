"""What the environment says about the stack."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .errors import StackError

ROOT = Path(__file__).resolve().parent.parent

DEBIANS = {"bookworm": "22.05", "trixie": "24.11"}
"""Debian releases that the image can be built from, with their Slurm."""

COMPUTE_NODES = ("c1", "c2", "g1", "g2")
ACCOUNTING_SERVICES = ("database", "slurmdbd")


@dataclass(frozen=True)
class Settings:
    """One stack: which Slurm, where it is reached, and what its parts are called."""

    debian: str = "bookworm"
    accounting: bool = True
    ssh_port: int = 22022
    project: str = "rayslurm"
    directory: Path = ROOT / ".stack"
    tag: str = ""
    """The tag under which the image is built; empty for the Debian release."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Settings:
        """Read the variables RAYSLURM_STACK_*.

        Raises:
            StackError: A value is not one of those that are possible.
        """
        debian = environ.get("RAYSLURM_STACK_DEBIAN") or cls.debian
        if debian not in DEBIANS:
            choices = " or ".join(f"{name} (Slurm {slurm})" for name, slurm in DEBIANS.items())
            raise StackError(f"RAYSLURM_STACK_DEBIAN={debian} is unknown: set it to {choices}.")
        accounting = environ.get("RAYSLURM_STACK_ACCOUNTING") or "on"
        if accounting not in ("on", "off"):
            raise StackError(f"RAYSLURM_STACK_ACCOUNTING={accounting} is unknown: set it to on or off.")
        port = environ.get("RAYSLURM_STACK_SSH_PORT") or str(cls.ssh_port)
        if not port.isdecimal() or not 0 < int(port) < 65536:
            raise StackError(f"RAYSLURM_STACK_SSH_PORT={port} is no port: set it to a number from 1 to 65535.")
        project = environ.get("RAYSLURM_STACK_PROJECT") or cls.project
        if not re.fullmatch("[a-z0-9][a-z0-9_-]*", project):
            raise StackError(
                f"RAYSLURM_STACK_PROJECT={project} is no name for a Compose project: use lower-case letters, digits, - and _."
            )
        # Relative to the repository, wherever the tool is called from.
        directory = ROOT / (environ.get("RAYSLURM_STACK_DIR") or cls.directory)
        return cls(debian, accounting == "on", int(port), project, directory, environ.get("RAYSLURM_STACK_TAG") or "")

    @property
    def image(self) -> str:
        """The image of all services."""
        return f"rayslurm-stack:{self.tag or self.debian}"

    @property
    def services(self) -> tuple[str, ...]:
        """The services that this stack has."""
        return (*(ACCOUNTING_SERVICES if self.accounting else ()), "slurmctld", "edge", *COMPUTE_NODES)
