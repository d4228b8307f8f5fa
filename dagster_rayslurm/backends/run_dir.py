"""Run directories: the files that they have before a runtime starts, and the removal of old directories on this machine."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dagster_pipes import PipesContextData

from ..follow import Evidence
from ..plan import Plan
from ..runtime.protocol.record import CANCEL, CONTEXT, EXIT, JOURNAL, PAYLOAD, RUNTIME, SECRETS, SESSION, STDIO
from ..runtime.protocol.spec import RuntimeSpec, to_json
from ..slurm.commands import run_slurm
from ..slurm.submit import JOB_ID
from ..ssh.base import Connection

WATCH_LOG = ".watch.log"
"""Suffix of the log of the process that waits for the end of a Dagster run, to end the session of that run."""

BOOKMARK = ".followed"
"""Suffix of the file that notes how much of a payload's output on the cluster was shown in Dagster."""


class _Below:
    """A directory below the base directory of a `Layout`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, layout: Layout, owner: object) -> Path:
        return layout.base / self._name


@dataclass(frozen=True)
class Layout:
    """Names of the directories below the base directory, the same on this machine and on a cluster."""

    base: Path

    runs = _Below("runs")
    sessions = _Below("sessions")
    runtimes = _Below("runtime")
    outputs = _Below("outputs")
    data = _Below("data")
    queue = _Below("queue")
    environments = _Below("environments")


def run_files(plan: Plan, context: PipesContextData) -> dict[str, bytes]:
    """Returns the files that a run directory has before its runtime starts, by name.

    Empty files for the record are among them: on NFS, a file that was once looked for in vain stays missing for a minute.
    """
    files = {
        PAYLOAD: to_json(plan.payload),
        CONTEXT: json.dumps(context),
        JOURNAL: "",
        STDIO: "",
    }
    if plan.secret_env:
        files[SECRETS] = json.dumps(plan.secret_env)
    return {name: content.encode("utf-8") for name, content in files.items()}


def write_run_dir(connection: Connection, run_dir: str, files: Mapping[str, bytes]) -> None:
    """Create a run directory with the given files; raises OSError if a file cannot be written."""
    connection.make_dir(run_dir)
    for name, content in files.items():
        connection.write(os.path.join(run_dir, name), content)


def write_runtime_spec(connection: Connection, directory: str, spec: RuntimeSpec) -> None:
    """Write `runtime.json`, with which a runtime starts; raises OSError if the file cannot be written."""
    connection.make_dir(directory)
    connection.write(os.path.join(directory, RUNTIME), to_json(spec).encode("utf-8"))


def sweep_old(layout: Layout, retention_days: float) -> list[Path]:
    """Remove old run directories, outputs and ended sessions from this machine; returns their paths.

    Old is what was not touched for `retention_days`. A runtime touches the directories of its payloads every few minutes. A
    session that its file announces stays. If a cluster has the same base directory, its sessions have numbered directories,
    which only `sweep_remote` removes.
    """
    oldest = time.time() - retention_days * 86400
    removed = []
    for entry in [*layout.runs.glob("*"), *layout.outputs.glob("*"), *layout.sessions.glob("*")]:
        try:
            newest = max(path.stat().st_mtime for path in (entry, *entry.glob("*.json*")))
            if newest >= oldest or (entry / SESSION).exists() or (entry.parent == layout.sessions and _is_numbered(entry)):
                continue
            if entry.is_dir():
                shutil.rmtree(entry, ignore_errors=True)
            elif entry.name.endswith((WATCH_LOG, BOOKMARK)):
                entry.unlink()
            else:
                continue
            removed.append(entry)
        except OSError:
            continue  # Another process removed the entry, or the entry belongs to another user.
    return removed


def _is_numbered(directory: Path) -> bool:
    """Whether a session's directory has numbered directories, as only sessions in Slurm jobs have."""
    return any(path.name.isdecimal() for path in directory.glob("*"))


_INTERVAL = 1.0  # Seconds between two attempts to deliver a request.


def cancel_path(run_dir: str) -> str:
    """Returns the path of the file in which a runtime looks for a cancel request."""
    return os.path.join(run_dir, CANCEL)


def cancel_request_json(now: bool) -> str:
    """Returns the content of a cancel request's file; `now` leaves the payload no grace period."""
    return json.dumps({"op": "cancel", "now": now})


def write_cancel_request(connection: Connection, run_dir: str, now: bool) -> None:
    """Ask the runtime of a run directory to end its payload, at once or after its grace period.

    Raises:
        OSError: the file cannot be written.
    """
    connection.write(cancel_path(run_dir), cancel_request_json(now).encode())


@dataclass
class CancelRequest:
    """The cancel request for one payload: made by `send`, and repeated by `resend` until it is delivered."""

    deliver: Callable[[bool], Any]  # Called with `now` to deliver the request; raises OSError on failure.
    log: Any
    now: bool | None = None  # Whether the request leaves the payload no grace period; None before `send`.
    delivered: bool = False
    error: OSError | None = None  # Why the last delivery failed; None if it worked.
    sent_at: float = 0.0  # Time of the last try to deliver the request, by this machine's monotonic clock.
    _warned: bool = False

    def send(self, now: bool) -> None:
        """Send a request, unless an equal one was sent; a request without a grace period replaces one with a grace period."""
        if self.now is None or now > self.now:
            self.now, self.delivered = now, False
            self._try(now)

    def resend(self) -> None:
        """Repeat a request that was not delivered, at most once a second."""
        if self.now is not None and not self.delivered and time.monotonic() - self.sent_at >= _INTERVAL:
            self._try(self.now)

    def resend_for(self, evidence: Evidence) -> None:
        """Resend the request; mark the payload unreachable in the evidence if a request without grace period cannot arrive."""
        self.resend()
        if self.now and self.error is not None:
            evidence.unreachable = str(self.error)

    def _try(self, now: bool) -> None:
        try:
            self.deliver(now)
            self.delivered, self.error = True, None
        except OSError as error:
            self.error = error
            if not self._warned:
                self._warned = True
                self.log.warning(f"[rayslurm] the payload cannot be told to end, which is tried again: {error}")
        self.sent_at = time.monotonic()


_SWEPT = ".swept"  # File in the base directory that each sweep touches, so that its age tells when the last sweep was.
_DAY = 1440  # Minutes of a day; a file or directory with a temporary name that is older was left by a killed process.
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
for _word, _text in (("@EXIT@", EXIT), ("@JOB_ID@", JOB_ID), ("@SESSION@", SESSION), ("@SWEPT@", _SWEPT)):
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
    done = run_slurm(connection, command, timeout=timeout)
    if done.returncode:
        raise OSError(f"{connection.place}: {base} cannot be swept: {done.stderr.decode('utf-8', 'replace')[-500:].strip()}")
    return [os.fsdecode(line) for line in done.stdout.splitlines()]
