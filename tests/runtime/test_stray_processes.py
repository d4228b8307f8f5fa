"""Stray processes of payloads are killed once no running payload can own them."""

from __future__ import annotations

import json
import subprocess
import sys

PROGRAM = """
import json, os, subprocess, sys, time
from dagster_rayslurm.runtime.process import processes
from dagster_rayslurm.runtime.process.loop import Loop

processes.become_subreaper()
loop, said, pids = Loop(), {}, {}
strays = processes.StrayProcesses(loop)
own = loop.spawn(["sleep", "600"], lambda *_: None)
LEAVE = ["sh", "-c", "env -i setsid sleep 600 </dev/null >/dev/null 2>&1 & echo $!"]

def leave(name):
    time.sleep(0.2)  # The kernel counts the starts of processes in hundredths of a second.
    pids[name] = int(subprocess.check_output(LEAVE))
    time.sleep(0.2)

def living():
    loop.reap()
    below = {process.pid for process in processes.descendants(os.getpid())}
    return sorted(name for name, pid in pids.items() if pid in below)

def when_gone(name, call, until):
    if name in living() and loop.now() < until:
        return loop.call_later(0.05, lambda: when_gone(name, call, until))
    said["after " + name] = living()
    call()

def late():
    leave("late")  # As by a worker of Ray that ends a little later than its driver.
    when_gone("late", loop.stop, loop.now() + 20)

def two():
    strays.end("two")
    when_gone("two", late, loop.now() + 20)

try:
    strays.begin("one"); leave("one")
    strays.begin("two"); leave("two")
    strays.end("one")
    when_gone("one", two, loop.now() + 20)
    loop.run()
    said["own"] = own in {process.pid for process in processes.descendants(os.getpid())}
finally:
    processes.kill_descendants(os.getpid(), collect=loop.reap)
print(json.dumps(said))
"""


def test_strays_are_killed_once_no_running_payload_can_own_them() -> None:
    said = json.loads(subprocess.check_output([sys.executable, "-c", PROGRAM], timeout=100))
    assert said == {"after one": ["two"], "after two": [], "after late": [], "own": True}
