"""How an environment is named in configuration."""

from __future__ import annotations

from typing import Annotated, Literal, Union

from pydantic import Field

from ..config import StrictConfig, plain_text


class InheritedEnvironment(StrictConfig):
    """The Python that runs Dagster: in local mode, or where Dagster runs on the cluster's shared file system."""

    kind: Literal["inherited"] = Field(default="inherited", description="Tells the environments apart in configuration.")


class PreDeployedEnvironment(StrictConfig):
    """An environment that is already where the payload runs."""

    kind: Literal["pre-deployed"] = Field(default="pre-deployed", description="Tells the environments apart in configuration.")
    path: Annotated[str, plain_text] = Field(
        description="A prefix with `bin/python` (conda, venv), or a directory with an `activate.sh` to source."
    )


Environment = Union[InheritedEnvironment, PreDeployedEnvironment]
