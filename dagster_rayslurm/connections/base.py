"""What the rest of the project needs of the place where the runtime works."""

from __future__ import annotations

from typing import Protocol


class Connection(Protocol):
    """Reaches the files of the place where the runtime works. Every path is absolute there."""

    def read(self, path: str, offset: int, limit: int) -> bytes:
        """At most `limit` bytes of a file from `offset` on; b"" at its end, or if it is not there yet."""
        ...

    def write(self, path: str, data: bytes, mode: int = 0o600) -> None:
        """Replace a file in one step.

        Raises:
            OSError: it cannot be written.
        """
        ...

    def make_dir(self, path: str) -> None:
        """Make a directory of this user alone, and its parents.

        Raises:
            OSError: it cannot be made.
        """
        ...

    def download(self, path: str, local_path: str) -> None:
        """Copy a file from there to this machine, making the directories it needs.

        Raises:
            OSError: it cannot be read there or written here.
        """
        ...

    def remove(self, path: str) -> None:
        """Remove a file or a directory with all in it; one that is not there is no error."""
        ...
