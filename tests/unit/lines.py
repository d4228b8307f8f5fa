"""A log for what wants one."""

from collections.abc import Callable


class Log:
    """Keeps what is said at any level."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def __getattr__(self, name: str) -> Callable[[str], None]:
        return self.lines.append
