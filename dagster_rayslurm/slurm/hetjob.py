"""Components of a heterogeneous Slurm job."""

from __future__ import annotations

from typing import Annotated, Union

from pydantic import Field

from ..config import StrictConfig, identifier
from ..launchers import BashLauncher, RayLauncher
from .config import SlurmQueueConfig


class HetComponent(StrictConfig):
    """One component of a heterogeneous job: a footprint of its own within one Ray cluster."""

    component_id: Annotated[str, identifier] = Field(description="Name of the component; Ray nodes carry it as a label.")
    queue: SlurmQueueConfig = Field(description="Footprint of the component.")
    launcher: Union[RayLauncher, BashLauncher] = Field(
        default=RayLauncher(), discriminator="kind", description="What runs on the component's nodes."
    )
    head: bool = Field(default=False, description="Whether the Ray head sits in this component; otherwise it is the first one's.")
