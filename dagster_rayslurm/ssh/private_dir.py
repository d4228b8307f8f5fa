"""A directory of this user alone on this machine, for control sockets and locks that all of its processes share."""

from __future__ import annotations

import os
import stat

_LONGEST = 40


def private_dir() -> str:
    """The directory, made if need be. Its path is short: a control socket's may not exceed 107 bytes (unix(7)).

    Raises:
        OSError: it cannot be made, or what is there is not a directory of this user alone.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    path = f"{runtime}/rayslurm" if 0 < len(runtime) <= _LONGEST and os.path.isdir(runtime) else f"/tmp/rayslurm-{os.getuid()}"
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        found = os.lstat(path)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise OSError(f"{path} is not a directory of user {os.getuid()} alone; remove it or mend its owner and mode")
    return path
