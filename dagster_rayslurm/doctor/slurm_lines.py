"""Report lines about Slurm: programs and daemons, accounting, the partition, and a test submission. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..config import time_limit_seconds
from ..edge.slurm import BACK_OFF
from ..slurm.partition_choice import choose
from ..slurm.partitions import NODES, PARTITIONS, Node, Partition, objections, parse_partitions
from ..slurm.refusals import explain, is_temporary, with_requested_values
from ..slurm.request import SBATCH_FIELDS, JobRequest, least_memory
from . import Line, Wanted, failure, has_failure, ok, skipped, warning
from .account import ASSOCIATIONS, QOS, SHOW, Row, forbids, parse_associations, parse_qos, qos_of

_NEEDED = ("sbatch", "squeue", "scancel", "scontrol", "srun")
_OLDEST = (22, 5)  # The oldest Slurm on which this project is tested.
_SLOW = 5.0  # Seconds that an answer of slurmctld may take; several questions are asked at once.
_LEAST_JOB_AGE = 60  # Seconds for which slurmctld must remember a job that ended, if there is no accounting.
_SETTING = re.compile(r"^(\w+)\s*= (.*)$", re.MULTILINE)
_MUNGE = re.compile(r"munge|authentication (error|fail)", re.IGNORECASE)


class Answer(NamedTuple):
    """The result of a command of Slurm; `code` is None if the command took too long, and 127 if the program was not found."""

    code: int | None
    out: str
    error: str
    seconds: float

    @property
    def said(self) -> str:
        """The last line that the failed command printed, or a phrase such as "exit code 1" if the command printed nothing."""
        lines = (self.error or self.out).strip().splitlines()
        return lines[-1] if lines else "it took too long" if self.code is None else f"exit code {self.code}"


def questions(script: str, login_variables: Sequence[str]) -> dict[str, list[Any]]:
    """Returns the commands of Slurm that the edge node is to run, by name, as `edge.site.survey` takes them.

    Each value is a list of three items: the words of the command, the text for the standard input, and the names of the
    `SBATCH_*` variables that the command may see. `script` is the batch script of a job for a test submission; "" leaves the test
    submission out. `login_variables` are the names of the `SBATCH_*` variables for the test submission.
    """
    commands: dict[str, Sequence[str]] = {
        "ping": ("scontrol", "ping"),
        "config": ("scontrol", "show", "config"),
        "partitions": PARTITIONS,
        "nodes": NODES,
        "associations": ASSOCIATIONS,
        "qos": QOS,
    }
    asked: dict[str, list[Any]] = {name: [["env", "LC_ALL=C", *command], "", []] for name, command in commands.items()}
    return (
        asked if not script else asked | {"test": [["env", "LC_ALL=C", "sbatch", "--test-only"], script, list(login_variables)]}
    )


@dataclass(frozen=True)
class Slurm:
    """The answers of Slurm's programs on the edge node, and the configuration to examine."""

    facts: Mapping[str, Any]  # The result of `edge.site.survey`.
    wanted: Wanted

    def answer(self, name: str) -> Answer:
        """Returns the result of the command `name`: a name that `questions` returns, or "version" for `sbatch --version`."""
        return Answer(*self.facts["answers"][name])

    @property
    def config(self) -> dict[str, str]:
        """The settings of slurmctld by name; empty if slurmctld did not answer."""
        return dict(_SETTING.findall(self.answer("config").out))

    @property
    def partitions(self) -> list[Partition]:
        """The partitions that this user sees."""
        return parse_partitions(self.answer("partitions").out, self.answer("nodes").out)

    def value(self, field: str) -> str | None:
        """Returns the value of the field `field` of the queue's configuration.

        If the field is not set, the value comes from the field's `SBATCH_*` variable on the edge node. None if neither is set.
        """
        own = getattr(self.wanted.queue, field)
        variable = any(each.name == field and each.login_variable for each in SBATCH_FIELDS)
        return own or (self.facts["machine"]["variables"].get(f"SBATCH_{field.upper()}") if variable else None)

    def chosen(self) -> list[Partition]:
        """Returns the existing partitions that the job requests; the cluster's default partition if the job requests none."""
        named = (self.value("partition") or "").split(",")
        return [each for each in self.partitions if each.name in named or (named == [""] and each.is_default)]


def slurm_lines(facts: Mapping[str, Any], wanted: Wanted) -> list[Line]:
    """Returns the lines about Slurm. If slurmctld does not answer, the checks that need an answer are left out.

    `facts` is the result of `edge.site.survey`.
    """
    slurm = Slurm(facts, wanted)
    lines = [_programs(slurm), *_controller(slurm)]
    if has_failure(lines):
        return [*lines, skipped("partition", "not checked, because Slurm does not answer")]
    lines += [*_version(slurm), *_accounting(slurm), *_job_age(slurm), *_partition(slurm)]
    # sbatch names only one objection, which after a failure may be the same one.
    return lines if has_failure(lines) or "test" not in facts["answers"] else [*lines, _test(slurm)]


def chosen_partition(slurm: Slurm) -> str:
    """Returns the partition that a job with `partition="auto"` would get now; raises `ValueError` if no partition fits."""
    takes_jobs = [each for each in slurm.partitions if not any(_objections(each, slurm))]
    return str(choose(JobRequest("", "", slurm.wanted.queue), takes_jobs or slurm.partitions).request.queue.partition)


def _programs(slurm: Slurm) -> Line:
    """Returns a line that says whether the edge node has all of Slurm's programs that runs need."""
    name, programs = "Slurm programs", slurm.facts["programs"]
    missing = [each for each in _NEEDED if not programs[each]]
    if missing:
        what = f"{', '.join(missing)} cannot be found on the edge node, by a login shell neither"
        return failure(name, what, "add the directory of Slurm's programs to PATH there, in ~/.bashrc or ~/.profile")
    return ok(name, f"in {programs['sbatch'].rpartition('/')[0]}")


def _controller(slurm: Slurm) -> Iterator[Line]:
    """Yields a line that says whether slurmctld answers, or why not; yields nothing if scontrol is missing."""
    ping, config = slurm.answer("ping"), slurm.answer("config")
    said = ping.error + ping.out + config.error
    if config.code == 127:
        return
    if config.code == 0 and slurm.config:
        if config.seconds > _SLOW:
            what = f"it takes {config.seconds:.1f} s to answer; queues are asked less often, at {BACK_OFF:g} times that"
            yield warning("slurmctld", what, "nothing on your side; if it lasts, tell the site")
        else:
            yield ok("slurmctld", f"cluster {slurm.config.get('ClusterName', '?')}, answers in {1000 * config.seconds:.0f} ms")
    elif _MUNGE.search(said):
        what = f"Slurm's programs cannot prove on the edge node who you are ({config.said})"
        yield failure("munge", what, "munged does not run there or has another key or time; tell the site")
    else:
        remedy = "wait, or ask the site whether Slurm is down; if it is another cluster, set SLURM_CONF in ~/.bashrc there"
        yield failure("slurmctld", f"it does not answer ({config.said})", remedy)


def _version(slurm: Slurm) -> Iterator[Line]:
    """Yields a line about the version of Slurm; yields nothing if the version is unknown."""
    controller, programs = slurm.config.get("SLURM_VERSION", ""), slurm.answer("version").out.rpartition(" ")[2].strip()
    parts = [re.findall(r"\d+", text)[:2] for text in (programs, controller)]
    if [] in parts:
        return
    client, server = (tuple(map(int, part)) for part in parts)
    name = "Slurm version"
    if client != server:
        what = f"the programs are {programs} and slurmctld is {controller}"
        yield warning(name, what, "load the site's own Slurm on the edge node, or take another Slurm out of PATH")
    elif server < _OLDEST:
        what = f"Slurm {controller} is older than 22.05, the oldest version that is tested"
        yield warning(name, what, "try a run of each mode that you need")
    else:
        yield ok(name, controller)


def _accounting(slurm: Slurm) -> Iterator[Line]:
    """Yields lines about Slurm's accounting, and about the user's account and limits if Slurm enforces them."""
    name, config = "accounting", slurm.config
    answer = slurm.answer("associations")
    if not config.get("AccountingStorageType", "").endswith("slurmdbd"):
        yield warning(
            name,
            "the cluster keeps none, so that Slurm forgets why a job ended after MinJobAge "
            f"({config.get('MinJobAge', 'unknown')})",
            "nothing is needed; failures are explained as long as slurmctld knows the job",
        )
        return
    if answer.code != 0:
        what = f"slurmdbd does not answer ({answer.said}); limits are not checked, and failed jobs are explained less well"
        yield warning(name, what, "wait, or tell the site; if sacctmgr is not installed on the edge node, ask for it")
        return
    rows = parse_associations(answer.out, config.get("ClusterName", ""))
    enforced = "associations" in config.get("AccountingStorageEnforce", "")
    if not rows and enforced:
        what = f"{slurm.facts['machine']['user']} has no account on this cluster, and Slurm takes jobs only with one"
        yield failure("account", what, "ask the site to add you to an account (`sacctmgr add user`)")
        return
    yield ok(name, f"slurmdbd answers in {1000 * answer.seconds:.0f} ms")
    if enforced and rows:
        yield from _account(slurm, rows)


def _account(slurm: Slurm, rows: Sequence[Row]) -> Iterator[Line]:
    """Yields lines that say whether the user may charge the account and use the QOS, and whether a job stays within the limits.

    `rows` are the associations of the user.
    """
    account, qos, name = slurm.value("account"), slurm.value("qos"), "account"
    accounts = sorted({row["account"] for row in rows})
    mine = [row for row in rows if row["account"] == account] if account else rows
    if not mine:
        remedy = f"set SlurmQueueConfig.account to one of them; {SHOW}"
        yield failure(name, f"you are not in the account {account!r}, but in {', '.join(accounts)}", remedy)
        return
    yield ok(name, f"{account or ', '.join(accounts)}")
    allowed = sorted({each for row in mine for each in qos_of(row)})
    if qos and qos not in allowed:
        remedy = f"set SlurmQueueConfig.qos to one of them; {SHOW}"
        yield failure("QOS", f"your account does not allow the QOS {qos!r}, but {', '.join(allowed) or 'none'}", remedy)
        return
    if allowed:
        yield ok("QOS", f"{qos or ', '.join(allowed)}")
    used = qos or next((row["defaultqos"] for row in mine if row["defaultqos"]), allowed[0] if len(allowed) == 1 else None)
    limits = [row for row in parse_qos(slurm.answer("qos").out) if row["name"] == used]
    seconds = time_limit_seconds(slurm.wanted.queue.time_limit)
    # Of several accounts, one that allows the job is enough.
    own = [[f"{row.what}: {each}" for each in forbids(row, slurm.wanted.queue, seconds)] for row in mine]
    found = [f"{row.what}: {each}" for row in limits for each in forbids(row, slurm.wanted.queue, seconds)]
    found += [] if [] in own else own[0]
    if found:
        yield failure("limits", "; ".join(found), f"ask for less, or set SlurmQueueConfig.account or qos to others; {SHOW}")
    else:
        yield ok("limits", "account and QOS allow a job of this size")


def _job_age(slurm: Slurm) -> Iterator[Line]:
    """Yields a warning if slurmctld forgets ended jobs early; yields nothing otherwise."""
    age = re.match(r"\d+", slurm.config.get("MinJobAge", ""))
    if age and 0 < int(age[0]) < _LEAST_JOB_AGE:
        what = f"slurmctld forgets a job {age[0]} s after its end (MinJobAge)"
        yield warning("job age", what, "failed jobs may be explained less well; ask the site for MinJobAge=300, the default")


def _partition(slurm: Slurm) -> Iterator[Line]:
    """Yields lines that say whether the partition exists, takes this user's jobs, allows the time limit, and has nodes."""
    name, named = "partition", slurm.value("partition")
    everything = slurm.partitions
    available = ", ".join(each.name for each in everything) or "none"
    set_one = f"set SlurmQueueConfig.partition to one of: {available}"
    missing = [each for each in named.split(",") if each not in {one.name for one in everything}] if named else []
    if missing:
        yield failure(name, f"there is no partition {', '.join(missing)}", set_one)
        return
    chosen = slurm.chosen()
    if not chosen:
        yield failure(name, "no partition is named, and the cluster has no default one", set_one)
        return
    objections = {each.name: list(_objections(each, slurm)) for each in chosen}
    if all(objections.values()):
        texts = (f"{partition}: {'; '.join(found)}" for partition, found in objections.items())
        yield failure(name, " / ".join(texts), f"{set_one}, or ask the site")
        return
    yield ok(name, ", ".join(each.name for each in chosen))
    seconds = time_limit_seconds(slurm.wanted.queue.time_limit)
    limits = [each.limit("MaxTime") for each in chosen]
    if all(most is not None and (seconds is None or seconds > most) for most in limits):
        longest = " / ".join(f"{each.name} allows {each.settings['MaxTime']}" for each in chosen)
        what = f"time_limit={slurm.wanted.queue.time_limit} is too long: {longest}"
        yield failure("time limit", what, "lower SlurmQueueConfig.time_limit, or choose another partition")
    else:
        yield ok("time limit", slurm.wanted.queue.time_limit)
    yield from _nodes(slurm, [node for each in chosen for node in each.nodes])


def _objections(partition: Partition, slurm: Slurm) -> Iterator[str]:
    """Yields each reason why a partition takes no jobs of this user; yields nothing if the partition takes such jobs."""
    given = {name: slurm.value(name) for name in ("account", "qos", "reservation")}
    yield from objections(partition, slurm.wanted.queue.having(**given))
    groups, submitters = partition.names("AllowGroups"), partition.names("AllocNodes")
    if groups and not set(groups) & set(slurm.facts["groups"]):
        yield f"it is for the groups {', '.join(groups)}, and you are in none of them"
    if submitters and slurm.facts["machine"]["host"].partition(".")[0] not in submitters and "[" not in ",".join(submitters):
        yield f"it takes jobs from {', '.join(submitters)} only, and this edge node is {slurm.facts['machine']['host']}"


def _nodes(slurm: Slurm, nodes: Sequence[Node]) -> Iterator[Line]:
    """Yields lines that say whether enough of `nodes`, the nodes of the job's partitions, work and are as large as requested."""
    name, queue, config = "nodes", slurm.wanted.queue, slurm.config
    if not nodes:
        hidden = "nodes" in config.get("PrivateData", "")
        why = "Slurm hides them (PrivateData=nodes)" if hidden else f"sinfo shows none ({slurm.answer('nodes').said})"
        yield warning(name, f"{why}, so that sizes, GPUs and what is idle are not checked", "ask the site for the sizes of nodes")
        return
    unique = {node.name: node for node in nodes}
    usable = [node for node in unique.values() if node.usable]
    if (gpus := _gpus(slurm, list(unique.values()))) is not None:
        yield gpus
    large = [node for node in unique.values() if _fits(node, slurm)]
    if not large:
        cpus, memory = max(node.cpus for node in nodes), max(node.memory for node in nodes)
        what = f"no node is as large as asked for: they have up to {cpus} CPUs and {memory} MiB"
        yield failure("node size", what, "lower SlurmQueueConfig.cpus_per_node, mem or mem_per_cpu, or choose another partition")
    text = f"{len(usable)} of {len(unique)} take jobs, {sum(node.idle for node in usable)} are idle"
    states = ", ".join(sorted(f"{node.name} is {node.state}" for node in unique.values() if not node.usable)[:5])
    if len(usable) < queue.num_nodes:
        what = f"{text}; a job needs {queue.num_nodes} ({states or 'there are no more'})"
        yield failure(name, what, "`sinfo -R` tells why nodes are down; lower num_nodes, or choose another partition")
    elif 2 * len(usable) <= len(unique):
        yield warning(name, f"{text} ({states})", "`sinfo -R` tells why; expect to wait longer")
    else:
        yield ok(name, text)


def _fits(node: Node, slurm: Slurm) -> bool:
    """Returns True if a node has as many CPUs and as much memory as the job requests on each node."""
    queue = slurm.wanted.queue
    return (queue.cpus_per_node or 1) <= node.cpus and least_memory(queue) <= node.memory


def _gpus(slurm: Slurm, nodes: Sequence[Node]) -> Line | None:
    """Returns a line that says whether enough of `nodes` have the requested GPUs; None if the job requests no GPUs."""
    queue = slurm.wanted.queue
    if not queue.gpus_per_node:
        return None
    kind = queue.gpu_type
    fitting = [n for n in nodes if (n.gpus[kind] if kind else n.gpus.total()) >= queue.gpus_per_node]
    wanted = f"{queue.gpus_per_node} GPUs" + (f" of type {kind}" if kind else "")
    if len(fitting) >= queue.num_nodes:
        return ok("GPUs", f"{len(fitting)} nodes have {wanted}")
    elsewhere = [each.name for each in slurm.partitions if sum(bool(node.gpus) for node in each.nodes)]
    what = f"{len(fitting)} nodes of the partition have {wanted}, and {queue.num_nodes} are needed"
    where = f"partitions with GPUs: {', '.join(elsewhere) or 'none'}"
    return failure("GPUs", what, f"choose another SlurmQueueConfig.partition, gpus_per_node or gpu_type ({where})")


def _test(slurm: Slurm) -> Line:
    """Returns a line about the answer of `sbatch --test-only`: ok if Slurm would take the job, or the reason for a refusal.

    If sbatch gave no answer in time, or refused for a temporary reason, the line is a warning; otherwise a refusal is a failure.
    """
    name, test = "test submission", slurm.answer("test")
    if test.code == 0:
        line = next((line for line in test.error.splitlines() if "to start at" in line), "sbatch would take the job")
        return ok(name, line.removeprefix("sbatch: "))
    said = with_requested_values(explain(test.error), JobRequest("", "", slurm.wanted.queue))
    if test.code is None or is_temporary(test.error):
        return warning(name, said, "try again later")
    reason, _, remedy = said.partition("): ")
    return failure(name, f"{reason})", remedy or said)
