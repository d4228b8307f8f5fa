"""The programs of a fake Slurm, such as sbatch and squeue: `python programs.py PROGRAM ARGUMENT...`.

The environment variable FAKE_SLURM names the directory with all state. The programs know the options and output formats that
this project uses, with the messages of Slurm 24.11. A job is an entry of `state.json`. The program `slurmd` stands for all
nodes: it runs the batch script of a job on this machine, and `srun` in the script starts every task on this machine too.
"""

import fcntl
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

TERMINAL = ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT")
FIRST_STATE = {
    "next_id": 1,
    "partitions": {"compute": ["c1", "c2"], "gpu": ["g1", "g2"]},
    "cpus": 4,
    "gpus": {"gpu": 2},
    "starts": True,  # Whether new jobs start at once. Otherwise they are pending with `reason`.
    "reason": "Resources",
    "runs": True,  # Whether a job that starts runs its script.
    "instead": "",  # If `runs` is False: a shell command to run in the job's directory when the job starts.
    "kill_wait": 2.0,
    "accounting": True,
    "faults": {},
    "jobs": {},
}
MARK = "FAKE_SLURM_JOB"

Job = dict[str, Any]


@contextmanager
def locked(base: str) -> Iterator[dict[str, Any]]:
    """The content of `state.json`, locked against other processes; changes are written back at the end."""
    with open(f"{base}/lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        content = read(base)
        yield content
        with open(f"{base}/state.json.new", "w") as file:
            json.dump(content, file, indent=1)
        os.replace(f"{base}/state.json.new", f"{base}/state.json")


def read(base: str) -> dict[str, Any]:
    with open(f"{base}/state.json") as file:
        content: dict[str, Any] = json.load(file)
        return content


def components(state: dict[str, Any], job_id: int) -> list[Job]:
    """The job with an id; all components if the id is that of a heterogeneous job's first component."""
    return [job for job in state["jobs"].values() if job_id in (job["id"], job["leader"])]


def new_job(job_id: int, **fields: Any) -> Job:
    plain = {"id": job_id, "leader": job_id, "label": str(job_id), "name": "job", "comment": "", "partition": "compute"}
    plain |= {
        "state": "PENDING",
        "reason": "None",
        "submit": time.time(),
        "start": None,
        "end": None,
        "num_nodes": 1,
        "nodes": [],
    }
    plain |= {"restarts": 0, "exit_code": 0, "signal": 0, "time_limit": 3600, "mem": 0, "account": "", "requeue": False}
    plain |= {"directory": "/", "output": "/dev/null", "cancelled_by": None, "ends_as": None, "steps": [], "attempts": []}
    return {**plain, "group": None, "cpus": 1, "live": False, **fields}


def options_of(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """The long options at the start of a command line, by name, and the words after them."""
    options: dict[str, str] = {}
    for number, word in enumerate(words):
        if not word.startswith("--"):
            return options, words[number:]
        name, _, value = word[2:].partition("=")
        options[name] = value
    return options, []


def seconds(text: str) -> int | None:
    """The seconds of a time limit as sbatch takes it, such as "00:05:00"; None for UNLIMITED."""
    if text == "UNLIMITED":
        return None
    days, _, rest = text.rpartition("-")
    numbers = [int(number) for number in rest.split(":")]
    units = (3600, 60, 1) if days or len(numbers) == 3 else (60, 1)
    return 86400 * int(days or 0) + sum(number * unit for number, unit in zip(numbers, units, strict=False))


def duration(amount: float | None) -> str:
    if amount is None:
        return "UNLIMITED"
    minutes, second = divmod(int(amount), 60)
    return f"{minutes // 60:02}:{minutes % 60:02}:{second:02}"


def complain(program: str, sentence: str, code: int = 1) -> int:
    print(f"{program}: error: {sentence}" if program else sentence, file=sys.stderr)
    return code


def sbatch(base: str, words: list[str]) -> int:
    _, rest = options_of(words)
    with open(rest[0]) if rest else sys.stdin as file:
        script = file.read()
    groups: list[dict[str, str]] = [{}]
    for line in script.splitlines():
        if line.strip() == "#SBATCH hetjob":
            groups.append({name: groups[0][name] for name in ("job-name", "comment", "output", "chdir") if name in groups[0]})
        elif line.startswith("#SBATCH "):
            groups[-1].update(options_of(shlex.split(line[8:]))[0])
    failed = "Batch job submission failed: "
    with locked(base) as state:
        first, jobs = state["next_id"], []
        for number, options in enumerate(groups):
            partition = os.environ.get("SBATCH_PARTITION") or options.get("partition") or next(iter(state["partitions"]))
            gpus = int((options.get("gpus-per-node") or "0").rpartition(":")[2])
            if partition not in state["partitions"]:
                return complain("sbatch", f"invalid partition specified: {partition}") and complain(
                    "sbatch", f"{failed}Invalid partition name specified"
                )
            cpus = int(options.get("cpus-per-task") or 1)
            if cpus > state["cpus"] or gpus > state["gpus"].get(partition, 0):
                return complain("sbatch", f"{failed}Requested node configuration is not available")
            num_nodes = int(options.get("nodes") or 1)
            too_large = num_nodes > len(state["partitions"][partition])
            jobs.append(
                new_job(
                    first + number,
                    leader=first,
                    label=f"{first}+{number}" if len(groups) > 1 else str(first),
                    group=number if len(groups) > 1 else None,
                    name=options.get("job-name", "sbatch"),
                    comment=options.get("comment", ""),
                    partition=partition,
                    reason="JobHeldUser" if "hold" in options else "PartitionNodeLimit" if too_large else state["reason"],
                    num_nodes=num_nodes,
                    cpus=cpus,
                    time_limit=seconds(options.get("time") or "01:00:00"),
                    account=options.get("account", ""),
                    requeue="requeue" in options,
                    directory=options.get("chdir", os.getcwd()),
                    output=options.get("output", f"{os.getcwd()}/slurm-{first}.out").replace("%%", "%"),
                )
            )
        state["next_id"] += len(groups)
        state["jobs"].update({str(job["id"]): job for job in jobs})
        with open(f"{base}/job-{first}.sh", "w") as file:
            file.write(script)
        os.chmod(f"{base}/job-{first}.sh", 0o700)
        starts = state["starts"] and all(job["reason"] == state["reason"] for job in jobs)
        if starts:
            start(base, state, first)
    print(first)
    return 0


def start(base: str, state: dict[str, Any], job_id: int) -> None:
    """Start a pending job, and run its script if the settings say so."""
    for job in components(state, job_id):
        nodes = state["partitions"].get(job["partition"], ["c1"])[: job["num_nodes"]]
        job |= {"state": "RUNNING", "reason": "None", "start": time.time(), "nodes": nodes, "end": None, "ends_as": None}
        job["live"] = state["runs"]
    if state["runs"]:
        subprocess.Popen(
            [sys.executable, "-IS", __file__, "slurmd", str(job_id)],
            env={**os.environ, "FAKE_SLURM": base},
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    elif state["instead"]:
        env = {**os.environ, "SLURM_JOB_ID": str(job_id)}
        subprocess.run(["sh", "-c", state["instead"]], cwd=first_of(state, job_id)["directory"], env=env, check=True)


def end(state: dict[str, Any], job_id: int, final: str, reason: str = "None", by: int | None = None) -> None:
    """End a job with the state `final`. While its script still runs, the job is COMPLETING.

    `by` is the user id that cancelled the job.
    """
    for job in components(state, job_id):
        if job["state"] in TERMINAL:
            continue
        job |= {"reason": reason, "cancelled_by": by, "ends_as": final, "state": "COMPLETING" if job["live"] else final}
        job["end"] = time.time()


def slurmd(base: str, words: list[str]) -> int:
    """Run the script of a job until the script ends or the state of the job says to end it."""
    job_id = int(words[0])
    jobs = components(read(base), job_id)
    first = jobs[0]
    env = {name: value for name, value in os.environ.items() if name != "FAKE_SLURM"}
    env |= {MARK: f"{base}:{job_id}", "SLURM_JOB_ID": str(job_id), "SLURM_JOB_NAME": first["name"], "SLURM_NODEID": "0"}
    env |= variables(first, "")
    if first["restarts"]:
        env["SLURM_RESTART_COUNT"] = str(first["restarts"])
    if len(jobs) > 1:
        env["SLURM_HET_SIZE"] = str(len(jobs))
        for job in jobs:
            env |= {"SLURM_JOB_ID_HET_GROUP_%d" % job["group"]: str(job["id"])}
            env |= variables(job, f"_HET_GROUP_{job['group']}")
    with open(first["output"], "ab") as output:
        script = subprocess.Popen(
            [f"{base}/job-{job_id}.sh"],
            env=env,
            cwd=first["directory"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    asked = None
    while script.poll() is None:
        job = read(base)["jobs"][str(job_id)]
        now = time.time()
        if job["ends_as"] is None and job["time_limit"] is not None and now > job["start"] + job["time_limit"]:
            with locked(base) as state:
                end(state, job_id, "TIMEOUT", "TimeLimit")
        elif job["ends_as"] is not None and asked is None:
            asked = now
            if job["ends_as"] in ("NODE_FAIL", "OUT_OF_MEMORY"):
                kill_job(base, job_id)
            else:
                os.killpg(script.pid, signal.SIGTERM)
        elif asked is not None and now > asked + read(base)["kill_wait"]:
            kill_job(base, job_id)
        time.sleep(0.03)
    kill_job(base, job_id)
    with locked(base) as state:
        for job in components(state, job_id):
            finish(job, script.returncode)
            if job["ends_as"] == "REQUEUED":
                job |= {"restarts": job["restarts"] + 1, "attempts": [*job["attempts"], {**job, "attempts": []}]}
                job |= {"state": "PENDING", "reason": "BeginTime", "start": None, "nodes": [], "submit": time.time()}
        if first_of(state, job_id)["state"] == "PENDING" and state["starts"]:
            start(base, state, job_id)
    return 0


def first_of(state: dict[str, Any], job_id: int) -> Job:
    job: Job = state["jobs"][str(job_id)]
    return job


def finish(job: Job, code: int) -> None:
    job["exit_code"], job["signal"] = (0, -code) if code < 0 else (code, 0)
    job["end"] = time.time()
    job["steps"], job["live"] = ["batch", "0"], False
    if job["ends_as"] is None:
        job["state"], job["reason"] = ("COMPLETED", "None") if code == 0 else ("FAILED", "NonZeroExitCode")
    elif job["ends_as"] != "REQUEUED":
        job["state"] = job["ends_as"]


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


def variables(job: Job, suffix: str) -> dict[str, str]:
    values = {"NODELIST": ",".join(job["nodes"]), "NUM_NODES": str(job["num_nodes"]), "PARTITION": job["partition"]}
    named = {f"SLURM_JOB_{name}{suffix}": value for name, value in {**values, "ACCOUNT": job["account"]}.items()}
    return {**named, f"SLURM_CPUS_ON_NODE{suffix}": str(job["cpus"])}


def srun(base: str, words: list[str]) -> int:
    options, command = options_of(words)
    job_id = int(options.get("jobid") or os.environ["SLURM_JOB_ID"])
    jobs = components(read(base), job_id)
    signal.signal(signal.SIGTERM, lambda *_: None)  # The tasks get the signal too, and end srun by their own end.
    tasks: dict[int, tuple[str, subprocess.Popen[bytes]]] = {}
    for job in jobs if "het-group" in options or "jobid" in options else jobs[:1]:
        for node in job["nodes"][: int(options.get("nodes") or job["num_nodes"])]:
            number = len(tasks)
            env = {**os.environ, **variables(job, ""), "SLURM_NODEID": str(number), "SLURM_PROCID": str(number)}
            env |= {"SLURM_JOB_ID": str(job_id), "SLURMD_NODENAME": node, "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1"}
            env |= {"SLURM_STEP_NODELIST": ",".join(each for job in jobs for each in job["nodes"]), "SLURM_LOCALID": "0"}
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
                complain("srun", f"{node}: task {number}: {how}")
                for _, other in tasks.values():
                    other.terminate()
        time.sleep(0.02)
    return worst


def scancel(base: str, words: list[str]) -> int:
    options, ids = options_of(words)
    with locked(base) as state:
        chosen = [int(word) for word in ids]
        if "name" in options:
            chosen += [job["id"] for job in state["jobs"].values() if job["name"] == options["name"]]
        for job_id in chosen:
            if not components(state, job_id) and "quiet" not in options:
                complain("scancel", f"Kill job error on job id {job_id}: Invalid job id specified")
            end(state, job_id, "CANCELLED", by=os.getuid())
    return 0


def squeue(base: str, words: list[str]) -> int:
    options, _ = options_of(words)
    state = read(base)
    wanted = options.get("jobs") or options.get("job")
    rows = list(state["jobs"].values())
    if wanted is not None:
        rows = [job for word in wanted.split(",") for job in components(state, int(word))]
        if not rows:
            return complain("", "slurm_load_jobs error: Invalid job id specified")
    now = time.time()
    for job in rows:
        if "name" in options and job["name"] not in options["name"].split(","):
            continue
        if job["state"] in TERMINAL and options.get("states") != "all":
            continue
        left = None if job["time_limit"] is None or job["start"] is None else job["time_limit"] + job["start"] - now
        columns = {"A": job["id"], "i": job["label"], "T": job["state"], "r": job["reason"], "D": job["num_nodes"]}
        columns |= {"S": int(job["start"]) if job["start"] else "N/A", "V": int(job["submit"]), "N": nodelist(job["nodes"])}
        columns |= {"P": job["partition"], "j": job["name"], "k": job["comment"], "L": duration(left), "Z": job["directory"]}
        print(re.sub(r"%([A-Za-z])", lambda match, columns=columns: str(columns[match[1]]), options["format"]))
    return 0


def nodelist(nodes: list[str]) -> str:
    if len(nodes) < 2:
        return "".join(nodes)
    return f"{nodes[0][:1]}[{','.join(node[1:] for node in nodes)}]"


def sacct(base: str, words: list[str]) -> int:
    options, _ = options_of(words)
    state = read(base)
    if not state["accounting"]:
        return complain("", "Slurm accounting storage is disabled")
    jobs = list(state["jobs"].values())
    if "jobs" in options:
        jobs = components(state, int(options["jobs"]))
    columns = options["format"].split(",")
    for job in jobs:
        if "name" in options and job["name"] != options["name"]:
            continue
        for attempt in [*job["attempts"], job] if "duplicates" in options else [job]:
            by = "" if attempt["cancelled_by"] is None else f" by {attempt['cancelled_by']}"
            elapsed = (attempt["end"] or time.time()) - attempt["start"] if attempt["start"] else 0
            limit = "UNLIMITED" if attempt["time_limit"] is None else attempt["time_limit"] // 60
            fields = {"State": attempt["state"] + by, "ExitCode": f"{attempt['exit_code']}:{attempt['signal']}"}
            fields |= {"Reason": attempt["reason"], "ElapsedRaw": int(elapsed), "TimelimitRaw": limit}
            fields |= {"NNodes": attempt["num_nodes"], "NodeList": nodelist(attempt["nodes"]) or "None assigned"}
            fields |= {"ReqMem": f"{attempt['mem']}M", "MaxRSS": ""}
            for step in ("", *(f".{step}" for step in attempt["steps"] if "allocations" not in options)):
                row = {**fields, "JobID": f"{attempt['label']}{step}", **({"Reason": "", "TimelimitRaw": ""} if step else {})}
                print("|".join(str(row[column]) for column in columns))
    return 0


def scontrol(base: str, words: list[str]) -> int:
    _, words = options_of(words)
    if words[:2] == ["show", "config"]:
        print("JobAcctGatherParams     = (null)")
        return 0
    job_id = int(words[-1])
    with locked(base) as state:
        jobs = components(state, job_id)
        if not jobs:
            return complain("", "slurm_load_jobs error: Invalid job id specified")
        if words[0] == "release":
            start(base, state, job_id)
        elif words[0] == "requeue":
            end(state, job_id, "REQUEUED")
    for job in jobs if words[0] == "show" else ():
        elapsed = (job["end"] or time.time()) - job["start"] if job["start"] else 0
        print(f"JobId={job['id']} JobName={job['name']}")
        print(f"   UserId=user({os.getuid()}) GroupId=user({os.getgid()}) MCS_label=N/A")
        print(f"   JobState={job['state']} Reason={job['reason']} Dependency=(null)")
        print(f"   Requeue={int(job['requeue'])} Restarts={job['restarts']} ExitCode={job['exit_code']}:{job['signal']}")
        print(f"   RunTime={duration(elapsed)} TimeLimit={duration(job['time_limit'])} TimeMin=N/A")
        print(f"   Partition={job['partition']} NodeList={nodelist(job['nodes']) or '(null)'}")
        print(f"   NumNodes={job['num_nodes']} NumCPUs={job['cpus']}")
        print(f"   AllocTRES=cpu={job['cpus']}" + (f",mem={job['mem']}M" if job["mem"] else ""))
        print(f"   Command=(null)\n   WorkDir={job['directory']}\n")
    return 0


def sinfo(base: str, words: list[str]) -> int:
    options, _ = options_of(words)
    if "version" in options:
        print("slurm 24.11.0")
        return 0
    for number, (name, nodes) in enumerate(read(base)["partitions"].items()):
        columns = {"R": name, "P": name + "*" * (number == 0), "D": str(len(nodes)), "l": "infinite"}
        print(re.sub(r"%([A-Za-z])", lambda match, columns=columns: columns[match[1]], options["format"]))
    return 0


def main(program: str, words: list[str]) -> int:
    base = os.environ["FAKE_SLURM"]
    fault = None
    if program != "slurmd":
        with locked(base) as state:
            with open(f"{base}/calls", "a") as calls:
                calls.write(json.dumps([program, *words]) + "\n")
            faults = state["faults"].get(program, [])
            if faults:
                fault = faults[0]
                fault["times"] -= 1
                if not fault["times"]:
                    faults.pop(0)
    if fault:
        time.sleep(fault["delay"])
        if fault["code"] is not None:
            if fault["works"]:
                with open(os.devnull, "w") as sys.stdout:
                    globals()[program](base, words)
            print(fault["stderr"], file=sys.stderr)
            return int(fault["code"])
    return int(globals()[program](base, words))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
