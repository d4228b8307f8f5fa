"""What every launcher has in common, and what a launcher of your own overrides."""

from __future__ import annotations

from typing import Annotated, Optional

from pydantic import Field

from ..config import StrictConfig, at_least, plain_text
from ..runtime.node.resources import Footprint
from ..runtime.protocol.spec import RaySpec


class Launcher(StrictConfig):
    """Turns a payload into a command and says what it needs around it.

    Derive from this class for a launcher of your own and hand it to `ComputeResource.run(launcher=…)`; in
    `default_launcher` Dagster would silently drop what a subclass adds, so only the launchers of this package stand
    there.
    """

    working_dir: Annotated[Optional[str], plain_text] = Field(
        default=None,
        description="Directory of this machine whose entries the payload finds in its own working directory, as links: new files "
        "stay apart, but here writing to an existing one changes the original; a cluster has a read-only copy. None for an empty "
        "directory.",
    )
    grace_period: Annotated[int, at_least(0, "seconds")] = Field(
        default=10, description="Seconds between SIGTERM and SIGKILL when the payload is cancelled."
    )

    def command(self, argv: list[str]) -> list[str]:
        """The command that is run for a payload's own; the same one unless a launcher wraps it.

        Args:
            argv: the payload's command. `python` as the first word of it, or of what is returned, is the environment's.
        """
        return argv

    def ray_spec(self) -> RaySpec | None:
        """The Ray cluster that must be alive before the payload starts, or None."""
        return None

    def footprint(self) -> Footprint:
        """What the payload needs of each node."""
        return ()


def forbid_subclassing(cls: type, base: type) -> None:
    """Refuse a subclass that Dagster would replace by its base when it reads configuration."""
    raise TypeError(
        f"{cls.__name__} cannot derive from {base.__name__}: as `default_launcher` Dagster would silently turn it into a "
        f"{base.__name__}; derive from Launcher and pass an instance to run(launcher=…)"
    )
