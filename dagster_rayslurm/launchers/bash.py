"""A payload without a cluster: one process on the first node."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Optional

from pydantic import Field

from ..config import at_least
from ..runtime.node.resources import Footprint, Requirement
from .base import Launcher, forbid_subclassing


class BashLauncher(Launcher):
    """Runs the payload as a plain process."""

    kind: Literal["bash"] = Field(default="bash", description="Tells the launchers apart in configuration.")
    num_cpus: Annotated[Optional[int], at_least(1)] = Field(
        default=None, description="CPUs the payload needs; None for what is granted."
    )
    num_gpus: Annotated[Optional[int], at_least(0)] = Field(
        default=None, description="GPUs the payload needs; None for what is granted."
    )

    def footprint(self) -> Footprint:
        return (
            Requirement("BashLauncher.num_cpus", self.num_cpus, "CPUs"),
            Requirement("BashLauncher.num_gpus", self.num_gpus, "GPUs"),
        )

    def __init_subclass__(cls, **kwargs: Any) -> None:
        forbid_subclassing(cls, BashLauncher)
