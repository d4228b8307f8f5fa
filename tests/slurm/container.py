"""A container image on the stack, and the environment that runs in it."""

import logging

from dagster_rayslurm import ContainerEnvironment, PreDeployedEnvironment
from dagster_rayslurm.environments.send import send_environment
from dagster_rayslurm.ssh.base import Connection

IMAGE = "/scratch/image"
BASE = "/home/dev/inside"
"""Base directory of the environment; those of the tests are others."""

_MAKE_IMAGE = """
[ ! -e "$1" ] || exit 0
new=$(mktemp -d "$1.XXXXXX")
chmod 755 "$new" && cd "$new" && mkdir -p dev proc sys tmp run home scratch opt/ray var/tmp mnt
dpkg-query --show --showformat='${Package}\\n' | grep -E 'slurm|munge|mariadb|charliecloud|squashfuse|openssh' >mnt/packages
xargs dpkg --listfiles <mnt/packages | sed -n 's,^/,,p' | while read -r path; do [ -d "/$path" ] || echo "$path"; done >mnt/files
skipped="--exclude-from=mnt/files --exclude=usr/share/doc --exclude=usr/share/locale --exclude=etc/slurm"
tar -c -C / --ignore-failed-read $skipped \\
    bin sbin lib lib64 usr etc 2>/dev/null | tar -x --no-same-owner
mv -T "$new" "$1" || rm -rf "$new"
"""
"""What the nodes have, but for Ray, which is mounted, and for Slurm and other daemons."""


def charliecloud(**fields: object) -> ContainerEnvironment:
    """The environment in the image."""
    defaults = {"image": IMAGE, "runtime": "charliecloud", "mounts": ["/opt/ray"], "python": "/opt/ray/bin/python"}
    return ContainerEnvironment(**{**defaults, **fields})


def make_image(connection: Connection) -> None:
    """Make the image, once for each stack."""
    done = connection.run(["sh", "-c", _MAKE_IMAGE, "sh", IMAGE])
    assert done.returncode == 0, done.stderr.decode()


def prefix_inside(connection: Connection) -> str:
    """The prefix whose Python runs in a container."""
    make_image(connection)
    sent = send_environment(connection, charliecloud(), BASE, logging.getLogger(__name__))
    assert isinstance(sent, PreDeployedEnvironment)
    return sent.path
