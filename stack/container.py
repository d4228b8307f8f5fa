"""A container image of the stack, for payloads that run in containers."""

IMAGE = "/home/dev/image"
"""Its directory, on the file system that edge and compute nodes share, where other users see nothing of it."""

MAKE_IMAGE = """
set -e
[ ! -e "$1" ] || exit 0
new=$(mktemp -d "$1.XXXXXX")
chmod 755 "$new"
cd "$new"
mkdir -p dev proc sys tmp run home scratch opt/ray var/tmp mnt
dpkg-query --show --showformat='${Package}\\n' | grep -E 'slurm|munge|mariadb|charliecloud|squashfuse|openssh' >mnt/packages
xargs dpkg --listfiles <mnt/packages | sed -n 's,^/,,p' | while read -r path; do [ -d "/$path" ] || echo "$path"; done >mnt/files
echo etc/slurm >>mnt/files
tar -c -C / --ignore-failed-read --exclude-from=mnt/files --exclude=usr/share/doc --exclude=usr/share/locale \\
    bin sbin lib lib64 usr etc 2>/dev/null | tar -x --no-same-owner
mv -T "$new" "$1" || rm -rf "$new"
"""
"""A shell script that makes the image in the directory `$1`, once: what the nodes have, but for Slurm and other daemons.

Ray is not in it either, because a second gigabyte takes long to copy; it is mounted from the node's /opt/ray.
"""
