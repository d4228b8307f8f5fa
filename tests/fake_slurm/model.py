"""A model of slurmctld: what Slurm's programs answer, and how jobs change, as functions of a state and the time.

The state is a JSON object, see `FIRST_STATE`. Nothing here reads a clock, a file or a process: `programs` keeps the state in a
file and runs jobs as processes, and the simulation keeps it in memory and runs jobs as simulated nodes. Options, output
formats and messages are those that this project uses, as Slurm 24.11 prints them. There is no scheduler: a job starts at once,
or when a test says so.
"""

import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

TERMINAL = ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT")
FIRST_STATE = {
    "next_id": 1,
    "partitions": {"compute": ["c1", "c2"], "gpu": ["g1", "g2"]},
    "cpus": 4,
    "gpus": {"gpu": 2},
    "node_states": {},  # States of nodes that sinfo shows; the others are idle.
    "starts": True,  # Whether new jobs start at once. Otherwise they are pending with `reason`.
    "reason": "Resources",
    "runs": True,  # Whether a job that starts runs its script.
    "instead": "",  # If `runs` is False: a shell command to run in the job's directory when the job starts.
    "kill_wait": 2.0,
    "min_job_age": None,  # Seconds after which slurmctld forgets a job that has ended; None: never.
    "accounting": True,
    "max_array_size": 1001,
    "energy": None,  # Joules that each running step has consumed; None if Slurm measures no energy.
    "max_submit": None,  # Most jobs of the user that are not over; None for any number.
    "faults": {},
    "jobs": {},
}

Job = dict[str, Any]
State = dict[str, Any]


class Answer(NamedTuple):
    """What a program printed, and its exit code."""

    code: int = 0
    out: str = ""
    err: str = ""


class Caller(NamedTuple):
    """Who calls a program: environment variables, working directory and user id."""

    env: Mapping[str, str]
    directory: str
    user: int


def components(state: State, job_id: int) -> list[Job]:
    """The job with an id; all components if the id is that of a heterogeneous job's first component."""
    return [job for job in state["jobs"].values() if job_id in (job["id"], job["leader"])]


def first_of(state: State, job_id: int) -> Job:
    job: Job = state["jobs"][str(job_id)]
    return job


def new_job(job_id: int, now: float, **fields: Any) -> Job:
    plain = {"id": job_id, "leader": job_id, "label": str(job_id), "name": "job", "comment": "", "partition": "compute"}
    plain |= {
        "state": "PENDING",
        "reason": "None",
        "submit": now,
        "start": None,
        "end": None,
        "num_nodes": 1,
        "nodes": [],
        "exclude": [],
    }
    plain |= {"restarts": 0, "exit_code": 0, "signal": 0, "time_limit": 3600, "mem": 0, "account": "", "requeue": False}
    plain |= {"directory": "/", "output": "/dev/null", "cancelled_by": None, "ends_as": None, "steps": [], "attempts": []}
    plain |= {"array": None, "task": None, "throttle": None, "gone": False}
    return {**plain, "group": None, "cpus": 1, "live": False, "launched": True, "script": "", **fields}


def elements(state: State, array: int) -> list[Job]:
    """The elements of a job array, in order; empty for another job."""
    return [job for job in state["jobs"].values() if job["array"] == array]


# -- how jobs change -----------------------------------------------------------------------------------------------------


def start(state: State, job_id: int, now: float) -> None:
    """Start a pending job; `launches` then returns it if the settings say that it runs its script."""
    for job in components(state, job_id):
        nodes = [each for each in state["partitions"].get(job["partition"], ["c1"]) if each not in job["exclude"]]
        nodes = nodes[: job["num_nodes"]]
        job |= {"state": "RUNNING", "reason": "None", "start": now, "nodes": nodes, "end": None, "ends_as": None}
        job |= {"live": state["runs"], "launched": False}


def start_elements(state: State, array: int | None, now: float) -> None:
    """Start pending elements of an array, as many as its limit on running ones allows; does nothing for None."""
    if array is None or not state["starts"]:
        return
    own = elements(state, array)
    running = sum(job["state"] in ("RUNNING", "COMPLETING") for job in own)
    for job in own:
        if job["state"] == "PENDING" and (job["throttle"] is None or running < job["throttle"]):
            start(state, job["id"], now)
            running += 1


def launches(state: State) -> list[int]:
    """The ids of the jobs that have started since the last call, and whose scripts are to run now."""
    started = [job["id"] for job in state["jobs"].values() if job["state"] == "RUNNING" and not job["launched"]]
    for job_id in started:
        first_of(state, job_id)["launched"] = True
    return [job_id for job_id in started if first_of(state, job_id)["leader"] == job_id]


def end(state: State, job_id: int, final: str, now: float, reason: str = "None", by: int | None = None) -> None:
    """End a job with the state `final`. While its script still runs, the job is COMPLETING.

    `by` is the user id that cancelled the job.
    """
    for job in components(state, job_id):
        if job["state"] in TERMINAL or job["ends_as"] is not None:
            continue
        if job["state"] != "PENDING":  # A job that never ran keeps the reason why it waited.
            job["reason"] = reason
        job |= {"cancelled_by": by, "ends_as": final, "state": "COMPLETING" if job["live"] else final}
        job["end"] = now
        if job["state"] == "REQUEUED":
            _requeue(job, now)
        if not job["live"]:
            start_elements(state, job["array"], now)


def script_ended(state: State, job_id: int, code: int, now: float) -> None:
    """The script of a job has ended with an exit code, or with minus the number of a signal; a requeued job is pending again."""
    for job in components(state, job_id):
        job["exit_code"], job["signal"] = (0, -code) if code < 0 else (code, 0)
        job |= {"end": now, "steps": ["batch", "0"], "live": False}
        if job["ends_as"] is None:
            job["state"], job["reason"] = ("COMPLETED", "None") if code == 0 else ("FAILED", "NonZeroExitCode")
        elif job["ends_as"] == "REQUEUED":
            _requeue(job, now)
        else:
            job["state"] = job["ends_as"]
    first = first_of(state, job_id)
    if first["state"] == "PENDING" and first["array"] is None and state["starts"]:
        start(state, job_id, now)
    start_elements(state, first["array"], now)


def _requeue(job: Job, now: float) -> None:
    job |= {"restarts": job["restarts"] + 1, "attempts": [*job["attempts"], {**job, "attempts": []}]}
    job |= {"state": "PENDING", "reason": "BeginTime", "start": None, "nodes": [], "submit": now, "ends_as": None}


def enforce_time_limits(state: State, now: float) -> None:
    """End the running jobs that have reached their time limits."""
    for job in list(state["jobs"].values()):
        limit = job["time_limit"]
        if job["state"] == "RUNNING" and job["ends_as"] is None and limit is not None and now > job["start"] + limit:
            end(state, job["id"], "TIMEOUT", now, "TimeLimit")


def killed_at(state: State, job: Job) -> float | None:
    """When slurmd kills what is left of a job that is COMPLETING; None for any other job."""
    if job["state"] != "COMPLETING":
        return None
    grace: float = 0.0 if job["ends_as"] in ("NODE_FAIL", "OUT_OF_MEMORY") else state["kill_wait"]
    return float(job["end"]) + grace


# -- programs ------------------------------------------------------------------------------------------------------------


def sbatch(state: State, words: list[str], script: str, caller: Caller, now: float) -> Answer:
    groups: list[dict[str, str]] = [{}]
    for line in script.splitlines():
        if line.strip() == "#SBATCH hetjob":
            groups.append({name: groups[0][name] for name in ("job-name", "comment", "output", "chdir") if name in groups[0]})
        elif line.startswith("#SBATCH "):
            groups[-1].update(options_of(shlex.split(line[8:]))[0])
    failed = "Batch job submission failed: "
    first, jobs = state["next_id"], []
    for number, options in enumerate(groups):
        partition = caller.env.get("SBATCH_PARTITION") or options.get("partition") or next(iter(state["partitions"]))
        gpus = int((options.get("gpus-per-node") or "0").rpartition(":")[2])
        if partition not in state["partitions"]:
            sentences = f"invalid partition specified: {partition}", f"{failed}Invalid partition name specified"
            return _error("sbatch", *sentences)
        cpus = int(options.get("cpus-per-task") or 1)
        if cpus > state["cpus"] or gpus > state["gpus"].get(partition, 0):
            return _error("sbatch", f"{failed}Requested node configuration is not available")
        num_nodes, exclude = int(options.get("nodes") or 1), options.get("exclude", "").split(",")
        too_large = num_nodes > len(set(state["partitions"][partition]) - set(exclude))
        jobs.append(
            new_job(
                first + number,
                now,
                leader=first,
                label=f"{first}+{number}" if len(groups) > 1 else str(first),
                group=number if len(groups) > 1 else None,
                name=options.get("job-name", "sbatch"),
                comment=options.get("comment", ""),
                partition=partition,
                reason="JobHeldUser" if "hold" in options else "PartitionNodeLimit" if too_large else state["reason"],
                num_nodes=num_nodes,
                exclude=exclude,
                cpus=cpus,
                time_limit=_seconds(options.get("time") or "01:00:00"),
                account=options.get("account", ""),
                requeue="requeue" in options,
                directory=options.get("chdir", caller.directory),
                output=options.get("output", f"{caller.directory}/slurm-{first}.out").replace("%%", "%"),
                script=script if number == 0 else "",
            )
        )
    if "array" in groups[0]:
        span, _, throttle = groups[0]["array"].partition("%")
        tasks = range(int(span.partition("-")[0]), int(span.partition("-")[2] or span) + 1)
        if tasks[-1] >= state["max_array_size"]:
            return _error("sbatch", f"{failed}Invalid job array specification")
        jobs = [_element(jobs[0], first, task, task == tasks[-1], throttle) for task in tasks]
    alive = sum(job["state"] not in TERMINAL for job in state["jobs"].values())
    if state["max_submit"] is not None and alive + len(jobs) > state["max_submit"]:
        policy = "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)"
        return _error("sbatch", "AssocMaxSubmitJobLimit", f"{failed}{policy}")
    state["next_id"] += len(jobs)
    state["jobs"].update({str(job["id"]): job for job in jobs})
    if "array" in groups[0]:
        start_elements(state, first, now)
        return Answer(out=f"{first}\n")
    if state["starts"] and all(job["reason"] == state["reason"] for job in jobs):
        start(state, first, now)
    return Answer(out=f"{first}\n")


def _element(job: Job, array: int, task: int, last: bool, throttle: str) -> Job:
    """One element of an array; the last one has the id of the array, the others get ids behind it."""
    own = array if last else array + 1 + task
    output = job["output"].replace("%a", str(task))
    fields = {"id": own, "leader": own, "label": f"{array}_{task}", "array": array, "task": task}
    return {**job, **fields, "throttle": int(throttle) if throttle else None, "output": output}


def scancel(state: State, words: list[str], caller: Caller, now: float) -> Answer:
    options, ids = options_of(words)
    chosen, error = [], ""
    for word in ids:  # The number of an array stands for all its elements, even if one of them has that number itself.
        own = [job for job in state["jobs"].values() if job["label"] == word or job["label"].startswith(f"{word}_")]
        # Those that wait first, or they would start now.
        own = [job for job in own if job["state"] == options.get("state", job["state"])]
        own.sort(key=lambda job: job["state"] != "PENDING")
        if "_" in word:
            for job in own:  # One that waits leaves all lists.
                job["gone"] = job["state"] == "PENDING"
        chosen += [job["id"] for job in own] or ([int(word)] if word.isdecimal() and "state" not in options else [])
    if "name" in options:
        chosen += [job["id"] for job in state["jobs"].values() if job["name"] == options["name"]]
    for job_id in dict.fromkeys(chosen):
        if not components(state, job_id) and "quiet" not in options:
            error += f"scancel: error: Kill job error on job id {job_id}: Invalid job id specified\n"
        end(state, job_id, "CANCELLED", now, by=caller.user)
    return Answer(err=error)


def squeue(state: State, words: list[str], caller: Caller, now: float) -> Answer:
    options, _ = options_of(words)
    wanted = options.get("jobs") or options.get("job")
    rows = [job for job in _listed(_remembered(state, now)) if not job["gone"]]
    if wanted is not None:
        ids = [int(word) for word in wanted.split(",")]
        rows = [job for job in rows if job["id"] in ids or job["leader"] in ids]
        if not rows:
            return Answer(1, err="slurm_load_jobs error: Invalid job id specified\n")
    lines = ""
    for job in rows:
        if "name" in options and job["name"] not in options["name"].split(","):
            continue
        if job["state"] in TERMINAL and options.get("states") != "all":
            continue
        left = None if job["time_limit"] is None or job["start"] is None else job["time_limit"] + job["start"] - now
        columns = {"A": job["id"], "i": job["label"], "T": job["state"], "r": job["reason"], "D": job["num_nodes"]}
        columns |= {"S": int(job["start"]) if job["start"] else "N/A", "V": int(job["submit"]), "N": _nodelist(job["nodes"])}
        columns |= {"P": job["partition"], "j": job["name"], "k": job["comment"], "L": _duration(left), "Z": job["directory"]}
        lines += re.sub(r"%([A-Za-z])", lambda match, columns=columns: str(columns[match[1]]), options["format"]) + "\n"
    return Answer(out=lines)


def sacct(state: State, words: list[str], caller: Caller, now: float) -> Answer:
    options, _ = options_of(words)
    if not state["accounting"]:
        return Answer(1, err="Slurm accounting storage is disabled\n")
    jobs = list(state["jobs"].values())
    if "jobs" in options:
        named = options["jobs"].split(",")
        jobs = [job for job in jobs if {str(job["id"]), str(job["leader"]), str(job["array"]), job["label"]} & set(named)]
    lines = ""
    for job in _listed(jobs):
        if job["gone"] or ("name" in options and job["name"] != options["name"]):
            continue
        for attempt in [*job["attempts"], job] if "duplicates" in options else [job]:
            by = "" if attempt["cancelled_by"] is None else f" by {attempt['cancelled_by']}"
            elapsed = (attempt["end"] or now) - attempt["start"] if attempt["start"] else 0
            limit = "UNLIMITED" if attempt["time_limit"] is None else attempt["time_limit"] // 60
            fields = {"State": attempt["state"] + by, "ExitCode": f"{attempt['exit_code']}:{attempt['signal']}"}
            fields |= {"Reason": attempt["reason"], "ElapsedRaw": int(elapsed), "TimelimitRaw": limit}
            fields |= {"NNodes": attempt["num_nodes"], "NodeList": _nodelist(attempt["nodes"]) or "None assigned"}
            fields |= {"ReqMem": f"{attempt['mem']}M", "MaxRSS": ""}
            for step in ("", *(f".{step}" for step in attempt["steps"] if "allocations" not in options)):
                row = {**fields, "JobID": f"{attempt['label']}{step}", **({"Reason": "", "TimelimitRaw": ""} if step else {})}
                lines += "|".join(str(row[column]) for column in options["format"].split(",")) + "\n"
    return Answer(out=lines)


def scontrol(state: State, words: list[str], caller: Caller, now: float) -> Answer:
    _, words = options_of(words)
    if words[:2] == ["show", "config"]:
        size, energy = state["max_array_size"], "(null)" if state["energy"] is None else "acct_gather_energy/rapl"
        lines = f"AcctGatherEnergyType    = {energy}\nJobAcctGatherParams     = (null)\nMaxArraySize            = {size}\n"
        return Answer(out=lines)
    if words[:2] == ["show", "partition"]:
        default = next(iter(state["partitions"]))
        names = ((name, "YES" if name == default else "NO") for name in state["partitions"])
        return Answer(out="".join(f"PartitionName={name} Default={flag} MaxTime=UNLIMITED State=UP\n" for name, flag in names))
    job_id = int(words[-1])
    jobs = [job for job in _remembered(state, now) if job_id in (job["id"], job["leader"])]
    if not jobs:
        return Answer(1, err="slurm_load_jobs error: Invalid job id specified\n")
    if words[0] == "release":
        start(state, job_id, now)
    elif words[0] == "hold":
        for job in jobs:
            job["reason"] = "JobHeldUser" if job["state"] == "PENDING" else job["reason"]
    elif words[0] == "requeue":
        end(state, job_id, "REQUEUED", now)
    lines = ""
    for job in jobs if words[0] == "show" else ():
        elapsed = (job["end"] or now) - job["start"] if job["start"] else 0
        memory = f",mem={job['mem']}M" if job["mem"] else ""
        lines += f"JobId={job['id']} JobName={job['name']}\n"
        lines += f"   UserId=user({caller.user}) GroupId=user({caller.user}) MCS_label=N/A\n"
        lines += f"   JobState={job['state']} Reason={job['reason']} Dependency=(null)\n"
        lines += f"   Requeue={int(job['requeue'])} Restarts={job['restarts']} ExitCode={job['exit_code']}:{job['signal']}\n"
        lines += f"   RunTime={_duration(elapsed)} TimeLimit={_duration(job['time_limit'])} TimeMin=N/A\n"
        lines += f"   Partition={job['partition']} NodeList={_nodelist(job['nodes']) or '(null)'}\n"
        lines += f"   NumNodes={job['num_nodes']} NumCPUs={job['cpus']}\n"
        lines += f"   AllocTRES=cpu={job['cpus']}{memory}\n   Command=(null)\n   WorkDir={job['directory']}\n\n"
    return Answer(out=lines)


def sstat(state: State, words: list[str], caller: Caller, now: float) -> Answer:
    options, _ = options_of(words)
    job_id, _, step = options["jobs"].partition(".")
    job = state["jobs"].get(job_id)
    if job is None or job["state"] != "RUNNING" or step != "0":
        return Answer(1, err=f"sstat: error: couldn't get steps for job {options['jobs']}\n")
    return Answer(out=f"{state['energy'] or 0}\n")


def sinfo(state: State, words: list[str], caller: Caller, now: float) -> Answer:
    options, _ = options_of(words)
    if "version" in options:
        return Answer(out="slurm 24.11.0\n")
    lines = ""
    for number, (name, nodes) in enumerate(state["partitions"].items()):
        columns = {"R": name, "P": name + "*" * (number == 0), "D": str(len(nodes)), "l": "infinite"}
        cpus, gpus = state["cpus"], state["gpus"].get(name, 0)
        columns |= {"C": f"0/{cpus}/0/{cpus}", "m": "4096", "G": f"gpu:{gpus}" if gpus else "(null)", "f": "(null)"}
        if "Node" in options:
            for node in nodes:
                word = state["node_states"].get(node, "idle")
                own = {**columns, "N": node, "T": word, "t": word}
                lines += re.sub(r"%([A-Za-z])", lambda match, own=own: own[match[1]], options["format"]) + "\n"
            continue
        lines += re.sub(r"%([A-Za-z])", lambda match, columns=columns: columns[match[1]], options["format"]) + "\n"
    return Answer(out=lines)


PROGRAMS: dict[str, Callable[[State, list[str], Caller, float], Answer]] = {
    "squeue": squeue,
    "scancel": scancel,
    "sacct": sacct,
    "scontrol": scontrol,
    "sinfo": sinfo,
    "sstat": sstat,
}
"""The programs of slurmctld's clients, by name, except sbatch, which also takes the text of a script."""


def _listed(jobs: Iterable[Job]) -> Iterator[Job]:
    """The jobs as they are listed: one row for all elements of an array that wait, or were cancelled while they waited."""
    waiting: dict[tuple[int, str], list[Job]] = {}
    for job in jobs:
        if job["array"] is None or job["start"] is not None or job["gone"]:
            yield job
        else:
            waiting.setdefault((job["array"], job["state"]), []).append(job)
    for (array, _), own in waiting.items():
        throttle = "" if own[0]["throttle"] is None else f"%{own[0]['throttle']}"
        tasks = ",".join(str(job["task"]) for job in own)
        yield {**own[0], "id": array, "leader": array, "label": f"{array}_[{tasks}{throttle}]"}


def _remembered(state: State, now: float) -> Iterator[Job]:
    """The jobs that slurmctld still knows."""
    age = state["min_job_age"]
    return (job for job in state["jobs"].values() if age is None or job["state"] not in TERMINAL or now < job["end"] + age)


def options_of(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """The long options at the start of a command line, by name, and the words after them."""
    options: dict[str, str] = {}
    for number, word in enumerate(words):
        if not word.startswith("--"):
            return options, words[number:]
        name, _, value = word[2:].partition("=")
        options[name] = value
    return options, []


def _seconds(text: str) -> int | None:
    """The seconds of a time limit as sbatch takes it, such as "00:05:00"; None for UNLIMITED."""
    if text == "UNLIMITED":
        return None
    days, _, rest = text.rpartition("-")
    numbers = [int(number) for number in rest.split(":")]
    units = (3600, 60, 1) if days or len(numbers) == 3 else (60, 1)
    return 86400 * int(days or 0) + sum(number * unit for number, unit in zip(numbers, units, strict=False))


def _duration(amount: float | None) -> str:
    if amount is None:
        return "UNLIMITED"
    minutes, second = divmod(int(amount), 60)
    return f"{minutes // 60:02}:{minutes % 60:02}:{second:02}"


def _nodelist(nodes: list[str]) -> str:
    if len(nodes) < 2:
        return "".join(nodes)
    return f"{nodes[0][:1]}[{','.join(node[1:] for node in nodes)}]"


def _error(program: str, *sentences: str) -> Answer:
    return Answer(1, err="".join(f"{program}: error: {sentence}\n" for sentence in sentences))
