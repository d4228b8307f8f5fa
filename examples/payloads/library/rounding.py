"""A module for tasks, which Ray sends them with `working_dir`."""


def to_thousands(size: int) -> int:
    """A size without its last three digits, or as it is if it has no more."""
    return size // 1000 * 1000 or size
