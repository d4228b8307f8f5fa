"""How an environment is named in configuration."""

from __future__ import annotations

import os
from typing import Annotated, Literal, Union

from pydantic import Field

from ..config import StrictConfig, check_text, checked


def _check_prefix(value: object) -> str:
    text = check_text(value)
    directory, name = os.path.split(text)
    if os.path.basename(directory) == "bin" and name.startswith("python"):
        raise ValueError(f"{text!r} is an interpreter; name the prefix of its environment, {os.path.dirname(directory)!r}")
    return text


prefix = checked(_check_prefix)
"""A directory of an environment, not the interpreter in it."""


class InheritedEnvironment(StrictConfig):
    """The Python that runs Dagster: in local mode, or where Dagster runs on the cluster's shared file system."""

    kind: Literal["inherited"] = Field(default="inherited", description="Tells the environments apart in configuration.")


class PreDeployedEnvironment(StrictConfig):
    """An environment that is already where the payload runs."""

    kind: Literal["pre-deployed"] = Field(default="pre-deployed", description="Tells the environments apart in configuration.")
    path: Annotated[str, prefix] = Field(
        description="A prefix with `bin/python` (conda, venv), or a directory with an `activate.sh` to source."
    )


Environment = Union[InheritedEnvironment, PreDeployedEnvironment]
