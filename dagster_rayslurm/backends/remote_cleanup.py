"""Sweep the base directory on a cluster: one shell command removes what was not used for long, by names of our own form."""

from __future__ import annotations

import os
import secrets
import time

from ..runtime.protocol.record import EXIT, SESSION
from ..slurm.commands import CLEAN
from ..slurm.submit import JOB_ID
from ..ssh.base import Connection

_SWEPT = ".swept"
"""File in the base directory that each sweep touches, so that its age tells when the last sweep was."""
_DAY = 1440
"""Minutes of a day; a file or directory with a temporary name that is older was left by a killed process."""
_CLAIM = 15
"""Minutes after which a lock directory `.sweeping` was left by a killed process, so that another process may sweep."""

# Only names of harmless characters match. A directory that other processes may look for is renamed before it is removed, so
# that no process sees half of it; if it was marked as in use meanwhile (see `upload.deliver`), it gets its name back. The
# part in parentheses ignores signals, and the shell handles its own signals only after that part.
_SWEEP = """\
export LC_ALL=C
age=$2 every=$3 leftover=$4 grave=.rs-$5.gone claim=$6
cd -- "$1" 2>/dev/null || exit 0
if [ "$every" -gt 0 ] && [ -n "$(find @SWEPT@ -mmin "-$every" 2>/dev/null)" ]; then exit; fi
umask 077
trap 'exit 143' HUP INT TERM
if [ "$every" -gt 0 ]; then
    if [ -d .sweeping ] && [ -z "$(find .sweeping -maxdepth 0 -mmin "-$claim")" ]; then rmdir .sweeping; fi
    mkdir .sweeping 2>/dev/null || { if [ -d .sweeping ]; then exit 0; else mkdir .sweeping; exit; fi; }
    trap 'rmdir .sweeping 2>/dev/null' EXIT
fi
list() {
    where=$1 form=$2
    shift 2
    find -H "$where" -mindepth 1 -maxdepth 1 -uid "$(id -u)" -regextype posix-extended -regex "$where/($form)" "$@" \
        -printf '%f\\n' 2>/dev/null
}
remove() { rm -rf -- "$1" 2>/dev/null || { chmod -R u+w -- "$1" && rm -rf -- "$1"; }; }
recent() { [ -n "$(find "$@" -mmin "-$age" -print -quit 2>/dev/null)" ]; }
retire() {
    (
        trap '' HUP INT TERM
        mv -T -- "$1/$2" "$1/$grave" || exit
        if recent "$1/$grave" -maxdepth 0 && mv -T -- "$1/$grave" "$1/$2"; then exit 1; fi
    ) || return
    remove "$1/$grave" && echo "$1/$2"
}
for name in $(list runs '[A-Za-z0-9_.-]+-[0-9a-f]{12}' -type d -mmin "+$age"); do
    recent "runs/$name" -maxdepth 1 -name '*.json*' || { remove "runs/$name" && echo "runs/$name"; }
done
in_queue() {
    kept_variables=
@CLEAN@
    squeue --me --all --noheader --states=all --format=%A
}
queue=
over() {
    if [ -s "$1/@EXIT@" ]; then return; fi
    job=$(head -n 1 -- "$1/@JOB_ID@" 2>/dev/null)
    if [ -z "$job" ]; then job=$(sed -nE 's/.*"job_id": *"?([0-9]+).*/\\1/p' "$1/@SESSION@" 2>/dev/null); fi
    if [ -z "$job" ]; then return; fi
    if [ -z "$queue" ]; then queue=$(in_queue 2>/dev/null) && queue=" $(echo $queue) " || queue=unknown; fi
    case $queue in unknown|*" $job "*) return 1 ;; esac
}
keys='[A-Za-z0-9_.-]+-[0-9a-f]{12}'
for name in $(list sessions "$keys" -type d); do
    newest=0 old= all=yes
    for number in $(list "sessions/$name" '[1-9][0-9]{0,8}' -type d); do
        if [ "$number" -gt "$newest" ]; then newest=$number; fi
        where=sessions/$name/$number
        if recent "$where" -maxdepth 2 || ! over "$where"; then all=no; else old="$old $number"; fi
    done
    # Numbers begin anew only when nobody has looked for a session of this name for as long.
    if [ "$newest" -gt 0 ] && [ "$all" = yes ] && ! recent "sessions/$name" -maxdepth 1; then
        retire sessions "$name"
        continue
    fi
    for number in $old; do
        if [ "$number" -lt "$newest" ] && mv -T -- "sessions/$name/$number" "sessions/$name/$grave"; then
            remove "sessions/$name/$grave" && echo "sessions/$name/$number"
        fi
    done
done
used=unknown
for place in bundles runtime; do
    case $place in
    bundles) form='[0-9a-f]{32}' ;;
    runtime) form='runtime-[0-9a-f]{16}-[A-Za-z0-9_-]+\\.pyz' ;;
    esac
    for name in $(list "$place" "$form" -mmin "+$age"); do
        if [ "$used" = unknown ]; then
            used=$(for each in 2:runs 3:sessions; do
                depth=${each%%:*}
                find -H "${each#?:}" -mindepth "$depth" -maxdepth "$depth" -type f '(' -name '*.json' -o -name '*.sh' ')' \
                    -exec grep -ohE '(bundles|runtime)/[A-Za-z0-9_.-]+' -- {} + 2>/dev/null
            done)
        fi
        case $used in
        *"$place/$name"*) ;;
        *) retire "$place" "$name" ;;
        esac
    done
done
for name in $(list environments '[0-9a-f]{32}' -type f -mmin "+$age"); do rm -f -- "environments/$name"; done
for place in bundles runtime environments queue runs sessions $(list sessions "$keys" -type d -printf 'sessions/'); do
    for name in $(list "$place" '\\.rs-[0-9a-f]{16}\\.[a-z]+' -cmin "+$leftover"); do
        remove "$place/$name" && echo "$place/$name"
    done
done
for name in $(list queue 'claim-[0-9]+' -type d -cmin "+$leftover"); do rmdir -- "queue/$name"; done
: >@SWEPT@
"""
for _word, _text in (("@CLEAN@", CLEAN), ("@EXIT@", EXIT), ("@JOB_ID@", JOB_ID), ("@SESSION@", SESSION), ("@SWEPT@", _SWEPT)):
    _SWEEP = _SWEEP.replace(_word, _text)


def _swept_lately(connection: Connection, base: str, seconds: float) -> bool:
    """Whether the last sweep was less than `seconds` ago. If the clocks differ, a sweep starts in vain, or later."""
    found = connection.stat(os.path.join(base, _SWEPT))
    return found is not None and abs(time.time() - found.modified) < seconds


def sweep_remote(
    connection: Connection, base: str, retention_days: float, *, every_minutes: int = 60, timeout: float = 600.0
) -> list[str]:
    """Remove run directories, sessions, bundles and runtimes not used for `retention_days`, and leftovers of killed processes.

    A session's directory stays while its job may live. The newest directory of a session's name stays as long as anybody
    looks for that session, because its number determines the next number. A bundle or runtime stays while a run or session
    names it. Only one process sweeps at a time, on any machine.

    Args:
        base: the absolute path of the base directory on the cluster.
        retention_days: age at which files are removed; leftovers with temporary names are removed after a day.
        every_minutes: least time between two sweeps of one base directory; 0 sweeps at once.
        timeout: seconds for this sweep; the next sweep removes the rest.

    Returns:
        The removed paths, relative to the base directory.

    Raises:
        OSError: the cluster cannot be reached, the base directory cannot be written, or the timeout is over.
    """
    if every_minutes and _swept_lately(connection, base, 60.0 * every_minutes):
        return []
    age, token = max(1, round(retention_days * _DAY)), secrets.token_hex(8)
    command = ["sh", "-c", _SWEEP, "sh", base, str(age), str(every_minutes), str(_DAY), token, str(_CLAIM)]
    done = connection.run(command, timeout=timeout)
    if done.returncode:
        raise OSError(f"{connection.place}: {base} cannot be swept: {done.stderr.decode('utf-8', 'replace')[-500:].strip()}")
    return [os.fsdecode(line) for line in done.stdout.splitlines()]
