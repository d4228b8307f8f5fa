"""Components of a heterogeneous Slurm job."""

from __future__ import annotations

from typing import Annotated, Union

from pydantic import Field

from ..config import StrictConfig, identifier
from ..launchers import BashLauncher, RayLauncher
from .config import SlurmQueueConfig


class HetComponent(StrictConfig):
    """One component of a heterogeneous job: nodes of one kind, for a Ray cluster across all components or one of its own."""

    component_id: Annotated[str, identifier] = Field(description="Name of the component; Ray nodes carry it as a label.")
    queue: SlurmQueueConfig = Field(description="What the component asks Slurm for.")
    launcher: Union[RayLauncher, BashLauncher] = Field(
        default=RayLauncher(),
        discriminator="kind",
        description='What its nodes are to the one Ray cluster (a RayLauncher); with topology "separate" what starts its own '
        "payload.",
    )
    head: bool = Field(default=False, description="Whether the Ray head sits in this component; otherwise it is the first one's.")
