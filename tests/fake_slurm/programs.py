"""The programs of a fake Slurm, such as sbatch and squeue: `python programs.py PROGRAM ARGUMENT...`.

The environment variable FAKE_SLURM names the directory with all state; `model` decides what the programs answer. The program
`slurmd` stands for all nodes: it runs the batch script of a job on this machine, and `srun` in the script starts every task on
this machine too.
"""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

if __package__:
    from . import model
else:  # Run as a program, which does not know the package `tests`.
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import model

MARK = "FAKE_SLURM_JOB"


@contextmanager
def locked(base: str) -> Iterator[model.State]:
    """The content of `state.json`, locked against other processes; changes are written back, and started jobs launched."""
    with open(f"{base}/lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        content = read(base)
        yield content
        launched = model.launches(content)
        with open(f"{base}/state.json.new", "w") as file:
            json.dump(content, file, indent=1)
        os.replace(f"{base}/state.json.new", f"{base}/state.json")
        for job_id in launched:  # Only now: a job that starts reads the state without the lock.
            _launch(base, content, job_id)


def read(base: str) -> model.State:
    with open(f"{base}/state.json") as file:
        content: model.State = json.load(file)
        return content


def _launch(base: str, state: model.State, job_id: int) -> None:
    """Run the script of a job that has started, or what the settings say instead."""
    job = model.first_of(state, job_id)
    if state["runs"]:
        with open(f"{base}/job-{job_id}.sh", "w") as file:
            file.write(job["script"])
        os.chmod(f"{base}/job-{job_id}.sh", 0o700)
        subprocess.Popen(
            [sys.executable, "-IS", os.path.abspath(__file__), "slurmd", str(job_id)],
            env={**os.environ, "FAKE_SLURM": base},
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    elif state["instead"]:
        env = {**os.environ, "SLURM_JOB_ID": str(job_id)}
        subprocess.run(["sh", "-c", state["instead"]], cwd=job["directory"], env=env, check=True)


def slurmd(base: str, words: list[str]) -> int:
    """Run the script of a job until the script ends or the state of the job says to end it."""
    job_id = int(words[0])
    jobs = model.components(read(base), job_id)
    first = jobs[0]
    env = {name: value for name, value in os.environ.items() if name != "FAKE_SLURM"}
    env |= {MARK: f"{base}:{job_id}", "SLURM_JOB_ID": str(job_id), "SLURM_JOB_NAME": first["name"], "SLURM_NODEID": "0"}
    env |= _variables(first, "")
    if first["array"] is not None:
        env |= {"SLURM_ARRAY_JOB_ID": str(first["array"]), "SLURM_ARRAY_TASK_ID": str(first["task"])}
    if first["restarts"]:
        env["SLURM_RESTART_COUNT"] = str(first["restarts"])
    if len(jobs) > 1:
        env["SLURM_HET_SIZE"] = str(len(jobs))
        for job in jobs:
            env |= {"SLURM_JOB_ID_HET_GROUP_%d" % job["group"]: str(job["id"])}
            env |= _variables(job, f"_HET_GROUP_{job['group']}")
    with open(os.path.join(first["directory"], first["output"]), "ab") as output:
        script = subprocess.Popen(
            [f"{base}/job-{job_id}.sh"],
            env=env,
            cwd=first["directory"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    signalled = False
    while script.poll() is None:
        state = read(base)
        job, now = model.first_of(state, job_id), time.time()
        kill_at = model.killed_at(state, job)
        if job["time_limit"] is not None and job["ends_as"] is None and now > job["start"] + job["time_limit"]:
            with locked(base) as state:
                model.enforce_time_limits(state, now)
        elif kill_at is not None and now > kill_at:
            kill_job(base, job_id)
        elif kill_at is not None and not signalled:
            signalled = True
            os.killpg(script.pid, signal.SIGTERM)
        time.sleep(0.03)
    kill_job(base, job_id)
    with locked(base) as state:
        model.script_ended(state, job_id, script.returncode, time.time())
    return 0


def processes(base: str, job_id: int) -> list[int]:
    """The ids of the processes of a job, including detached ones."""
    found, mark = [], f"{MARK}={base}:{job_id}".encode()
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:
            found += [int(name)] if mark in file.read().split(b"\0") else []
    return found


def kill_job(base: str, job_id: int) -> None:
    """Kill all processes of a job, as the job's cgroup does on a real node."""
    for pid in processes(base, job_id):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _variables(job: model.Job, suffix: str) -> dict[str, str]:
    values = {"NODELIST": ",".join(job["nodes"]), "NUM_NODES": str(job["num_nodes"]), "PARTITION": job["partition"]}
    named = {f"SLURM_JOB_{name}{suffix}": value for name, value in {**values, "ACCOUNT": job["account"]}.items()}
    return {**named, f"SLURM_CPUS_ON_NODE{suffix}": str(job["cpus"])}


def srun(base: str, words: list[str]) -> int:
    options, command = model.options_of(words)
    if "jobid" not in options and "SLURM_JOB_ID" not in os.environ:
        return subprocess.run(command, check=False).returncode  # An allocation of its own, for one task.
    job_id = int(options.get("jobid") or os.environ["SLURM_JOB_ID"])
    jobs = model.components(read(base), job_id)
    signal.signal(signal.SIGTERM, lambda *_: None)  # The tasks get the signal too, and end srun by their own end.
    tasks: dict[int, tuple[str, subprocess.Popen[bytes]]] = {}
    for job in jobs if "het-group" in options or "jobid" in options else jobs[:1]:
        for node in job["nodes"][: int(options.get("nodes") or job["num_nodes"])]:
            number = len(tasks)
            env = {**os.environ, **_variables(job, ""), "SLURM_NODEID": str(number), "SLURM_PROCID": str(number)}
            env |= {"SLURM_JOB_ID": str(job_id), "SLURMD_NODENAME": node, "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1"}
            env |= {"SLURM_STEP_NODELIST": ",".join(each for job in jobs for each in job["nodes"]), "SLURM_LOCALID": "0"}
            env["SLURM_STEP_ID"] = "0"
            target = options.get("output", "").replace("%t", str(number))
            output = open(target, "ab") if target else None
            tasks[number] = node, subprocess.Popen(command, env=env, stdout=output, stderr=output)
    worst, ended = 0, set()
    while len(ended) < len(tasks):
        for number, (node, task) in tasks.items():
            code = task.poll()
            if code is None or number in ended:
                continue
            ended.add(number)
            worst = max(worst, code if code >= 0 else 128 - code)
            if code:
                how = (
                    f"Exited with exit code {code}" if code > 0 else {9: "Killed", 15: "Terminated"}.get(-code, f"signal {-code}")
                )
                print(f"srun: error: {node}: task {number}: {how}", file=sys.stderr)
                for _, other in tasks.values():
                    other.terminate()
        time.sleep(0.02)
    return worst


def ask(base: str, program: str, words: list[str]) -> model.Answer:
    """The answer of a program of slurmctld's clients."""
    caller = model.Caller(os.environ, os.getcwd(), os.getuid())
    script = ""
    if program == "sbatch":
        _, files = model.options_of(words)
        with open(files[0]) if files else sys.stdin as file:
            script = file.read()
    with locked(base) as state:
        if program == "sbatch":
            return model.sbatch(state, words, script, caller, time.time())
        return model.PROGRAMS[program](state, words, caller, time.time())


def next_fault(base: str, program: str, words: list[str]) -> dict[str, Any] | None:
    """Record the call of a program; returns the fault that a test has ordered for the call, if any."""
    with locked(base) as state:
        with open(f"{base}/calls", "a") as calls:
            calls.write(json.dumps([program, *words]) + "\n")
        faults: list[dict[str, Any]] = state["faults"].get(program, [])
        if not faults:
            return None
        faults[0]["times"] -= 1
        return faults[0] if faults[0]["times"] else faults.pop(0)


def main(program: str, words: list[str]) -> int:
    base = os.environ["FAKE_SLURM"]
    if program == "slurmd":
        return slurmd(base, words)
    fault = next_fault(base, program, words)
    if fault:
        time.sleep(fault["delay"])
    if fault and fault["code"] is not None and not fault["works"]:
        answer = model.Answer(fault["code"], err=fault["stderr"] + "\n")
    elif program == "srun":
        return srun(base, words)
    else:
        answer = ask(base, program, words)
        if fault and fault["code"] is not None:
            answer = model.Answer(fault["code"], err=fault["stderr"] + "\n")
    sys.stdout.write(answer.out)
    sys.stderr.write(answer.err)
    return answer.code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
