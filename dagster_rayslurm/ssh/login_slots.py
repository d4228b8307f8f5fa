"""How many logins to one SSH server this user starts at once.

sshd drops connections beyond `MaxStartups` unauthenticated ones (10:30:100 by default, sshd_config(5) of OpenSSH 9.2):
of 60 simultaneous logins 20 were refused. Slots are lock files, so they hold between processes and go with them.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import random
import time
from collections.abc import Iterator

from .private_dir import private_dir

SLOTS = 4
WAIT_FACTOR = 10
"""A login waits for its turn this many times as long as it may take itself."""


@contextlib.contextmanager
def login_slot(target: str, connect_timeout: float) -> Iterator[None]:
    """Hold one of the slots for a target such as "edge:22".

    Raises:
        TimeoutError: no slot came free.
    """
    name = hashlib.sha256(target.encode()).hexdigest()[:16]
    paths = [os.path.join(private_dir(), f"login-{name}-{index}") for index in range(SLOTS)]
    deadline = time.monotonic() + WAIT_FACTOR * connect_timeout
    while True:
        for path in random.sample(paths, SLOTS):
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                continue
            try:
                yield
                return
            finally:
                fcntl.flock(fd, fcntl.LOCK_UN)  # A child that was forked meanwhile holds the file open as well.
                os.close(fd)
        if time.monotonic() > deadline:
            raise TimeoutError(f"{SLOTS} other logins to {target} have been in progress for {WAIT_FACTOR * connect_timeout:g} s")
        time.sleep(random.uniform(0.02, 0.1))
