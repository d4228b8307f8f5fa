"""What to do about messages that do not say it themselves, for `scripts/messages.py`.

The keys are messages as the page of messages shows them. A remedy names the next step of the user, or what happens without one.
"""

from dagster_rayslurm.errors import INSTALL

REPORT = "this should not happen: report it with the whole message"
SHARED = 'do nothing: the node uses the shared environment; remove `stage="node-local"` if this is always so'
RUNTIME = "let all processes use one version of dagster-rayslurm, and run again"
KEPT = "do nothing: dagster-rayslurm finds out whether the payload has started"
NO_WHEELS = "use an environment that is on the cluster, or a [container](../containers.md)"
LESS = "lower `min_nodes`, or raise the number of nodes"
COLON = "correct what stands after the colon, and run again"
NAMED = "use a name that the message lists"
LISTED = "choose a name in `rayslurm ps --all`"
ROOM = "make room in `remote_base`: check `quota` and `df` there, and retry the step"
RAY_LOGS = "read the logs of Ray in the metadata of the failed step, and retry the step"
NODE_LOG = "retry the step; the log of this node is in the metadata of the failed step"
KIND = "do what the section of the failure's [kind](../troubleshooting.md) says"
AT_THE_END = "do what the message says at its end"
NEXT_SESSION = "retry the step: the payload then runs in the next session"
RERUN = "run the step again when Dagster is back"
START_LATE = "raise `runtime_start_timeout`; check that the compute nodes see `remote_base`"
DATA = "list data in .rayignore, and keep it on the cluster, in the directory that payloads find in `RAYSLURM_DATA_DIR`"
READS_ON = "do nothing: reading goes on when the edge node answers, for up to `connection_loss_timeout`"

REMEDIES = {
    # Commands
    "…: … cannot be read: No such file or directory": "wait until the payload has started; if it has ended, its directory is "
    "removed, see `keep_run_dirs`",
    "--from …: … is neither a ComputeResource nor Definitions": "name a `ComputeResource` or `Definitions` of the module",
    "--from: there is no file …": "correct the path, which is relative to the current directory",
    "--from: the definitions cannot be loaded: …: …": "correct what the error names; `dg check defs` shows the whole error",
    "--from: … cannot be imported: …: …": "correct the module; `python -c 'import MODULE'` shows the whole error",
    "… has ended already": "do nothing; `rayslurm show` tells how it ended",
    "… has no cluster …; there are …": "use a name that the message lists, or add a table to the file",
    "… has no Ray cluster now: …": "try again when it runs, or choose another one in `rayslurm ps`",
    "… has no Ray cluster, through which JupyterLab would be reached; it is …": "try again when `rayslurm ps` shows that it runs",
    "… is a …, and only the output of a run can be printed and followed": "name a run, or leave out `-f` for a session's log",
    "… is not TOML: …": "correct the line that the message names",
    "…: … is unknown; the file has `default` and tables [clusters.NAME]": "correct the name, or move it into a table of a "
    "cluster",
    "… is …, so there is nothing to enter; `rayslurm ps` shows when it runs": "try again when `rayslurm ps` shows that it runs",
    "it says no address": "do nothing: `rayslurm` then reaches the head node by srun",
    "no run, asset, session or Slurm job is called …; none runs there": LISTED,
    "no run, asset, session or Slurm job is called …; running there: …": NAMED,
    "nothing on this machine is called … (`rayslurm ps --all` lists what is there), and …": "correct the name, or name the "
    "cluster with --cluster or --from",
    "Ray's job client cannot be started: …": "check that `python -m ray.scripts.scripts job --help` works in this environment",
    "Ray's job client is not installed here; …": INSTALL.format(extra="ray"),
    "srun did not start a relay: …": "check with `rayslurm ps` that the job still runs, and try again",
    "the dashboard does not answer: …": "try again; if it does not help, look into Ray's logs with `rayslurm attach`",
    "the dashboard's answer about … has another form: …: …": "use a version of Ray that "
    "[Compatibility](../decide/compatibility.md) names",
    "the head node … cannot be reached: …": "check the network to the cluster, and with `rayslurm ps` that the job still runs",
    "the Ray cluster of … has ended (its runtime was killed)": "run the asset again; `rayslurm show` tells what killed it",
    "the Ray cluster of … has ended…": "run the asset again, or start a session with `rayslurm session start`",
    "the Ray cluster of … has no dashboard: RayLauncher(dashboard=False)": "remove `dashboard=False`, and run again",
    "the session … had ended already": "do nothing: it holds no nodes",
    "there is no session …; `rayslurm session list` lists them": "choose a name in `rayslurm session list`",
    "there is no … in … or above, nor in …, to name cluster …": "write the file, or name a `ComputeResource` with --from",
    "…: … was asked to end and has not within … s": "ask again with `rayslurm cancel --now`, or end the session with "
    "`rayslurm session stop`",
    # Configuration
    "allocation: … is neither … nor …": "write one of the two",
    "component …: …": "correct what stands after the colon, for this component",
    "components: Slurm takes at most … components in a job, and these are …": "merge components that request the same nodes",
    "components: SlurmQueueConfig.… is …; a heterogeneous job begins and ends as one, so say one": "set one value in all "
    "components",
    "components: … are both marked head; a cluster has one head": "mark only one component with `head=True`",
    "… contains a comma or an equals sign, which a label of Ray cannot have": "write the label without these characters",
    "extra_files: there is no file …": "correct the path, which is relative to the directory in which Dagster runs the step",
    "extra_files: two files are called …; they would stand in the same directory": "rename one of them",
    "extra_files: write a list, such as […]": "put the path into a list",
    "handle: … is not the name of a run directory": "pass the text that `handle.to_json()` returned",
    "handle: … is not the text of a RunHandle: …": "pass the text that `handle.to_json()` returned",
    "… in …: launcher.kind=… is neither 'ray' nor 'bash'": "write one of the two",
    "… is no built-in check; did you mean …?": "use the name that the message suggests; see [Checks](../node_health.md#checks)",
    "…: … is not a name of an environment variable": "use letters, digits and underscores; do not begin with a digit",
    "… is not a name: use up to 63 letters, digits, '-', '_' and '.'": "begin and end the name with a letter or a digit",
    "… is not a number of at least …": "write such a number, without quotes",
    "… is not a string": "write the value in quotes",
    "… is not one of …": "write one of the values in the message",
    '… is not the name of a module, such as "torch" or "torch.nn"': "write the name that an `import` statement uses",
    "….kind: … is not one of …": "write one of the kinds in the message",
    "launcher.component_id: there is no component …; there are …": NAMED,
    "module … has no attribute …": "correct the name; see [Python](python.md), [Configuration](../configuration.md)",
    "outputs: write a list, such as […]": "put the pattern into a list",
    "outputs: … is not a pattern": "write a text such as `*.csv`",
    "payload_path: there is no file … (looked in …)…": 'use an absolute path, or `Path(__file__).with_name("train.py")`',
    "RayLauncher.min_nodes=… is more than the cluster will have: … nodes by SlurmQueueConfig.num_nodes of all components": LESS,
    "RaySlurmScriptComponent: give either script or module": "set one of the two, and remove the other",
    "RaySlurmScriptComponent: script: there is no Python script …": "correct the path, which is relative to the component's YAML "
    "file; the name ends with .py",
    "requires[…]: … fits on no node: …": "request larger nodes in `SlurmQueueConfig`, or smaller bundles; see "
    "[What can never start](../feasibility.md)",
    "retry_policy_for: name at least one kind of failure, of …": "pass a [kind](failures.md), such as `allocation`",
    "secret_env: … is in extra_env too; Ray workers would see it there": "remove it from `extra_env`",
    "submitted runs need mode '…' or '…', and a cluster": "use the `ComputeResource` that submitted the run",
    "…: the environment variable … is not set": "set it for the process that runs Dagster's step",
    "…: the environment variable … is …, not an integer": "set it to an integer",
    "…: the value is not JSON: …": "write JSON, with double quotes around names and texts",
    "…: there is no component …; there are …": NAMED,
    "uses_pipes: … is neither True nor False": "write one of the two",
    "working_dir: there is no directory …": "correct the path, which is relative to the directory in which Dagster runs the step",
    "write a list of …": "put the value into a list",
    # Remedies that stand in a variable
    "… is set by the launcher itself; …": "use the field that the message names",
    "…: … is …, which cannot be copied; …": "do what the message says: remove the file, or leave it out",
    "packaging here is too old to read lock files; …": INSTALL.format(extra="uv"),
    "retry_policy_for: … is no kind of failure that can be retried; …": "use a kind that the message names",
    "SlurmQueueConfig.extra_sbatch: --… cannot be chosen; …": "remove the option; the message says what takes its place",
    "this machine lacks what reads lock files of pixi; …": INSTALL.format(extra="pixi"),
    "uv is not installed on this machine; …": INSTALL.format(extra="uv"),
    # Connection
    "a command needs a word at least, and no NUL character": "pass a command without empty lists and NUL characters",
    "belongs to …, who could change what runs there": "choose a `remote_base` or `local_base` that belongs to you",
    "…:… cannot be reached from there (…)": "check that the server forwards connections (`AllowTcpForwarding`)",
    "it is Python ….…": 'set `SSHConnectionResource(python="/path/to/python3")` to Python 3.6 or newer on the server',
    "it shows … now": "ask your administrators whether they renewed the host key",
    "its host key is not the one in `host_key`; nothing was sent: ask the site for its key…": "ask your administrators for the "
    "key of the host, and set it as `host_key`",
    "its host key is not the one in …; somebody may be listening in, so nothing was sent: ask the site, and if the key was "
    "renewed, remove the old line…": "ask your administrators; if they renewed the key, remove the old line from the file",
    "no answer within … s": "check `host` and `port` as seen from the jump host",
    "no cipher or key exchange in common (…); the server is too old or too new": 'use `client="openssh"`, or ask your '
    "administrators to update the server",
    "no master connection is open and require_existing_master is set; type: …": "run the command in the message, and log in",
    "… on the edge node: …": REPORT,
    "… other logins to … have been in progress for … s": "let fewer processes log in at the same time, or raise "
    "`connect_timeout`",
    "ssh failed: …": "correct what stands after the colon; `ssh -v` with this host shows more",
    "…: the claim cannot be made": "check that `remote_base` is writable and not full, and submit again",
    "the connection is gone…": "try again; a run connects again by itself",
    "the connection was lost during the login": "try again; if it returns, check the network and the VPN",
    "the connection was lost…": "try again; a run connects again by itself, and its job goes on",
    "the login broke off (…)": "try again; if it returns, check the network, and `host` and `port`",
    "…: the login has no HOME; the account needs a home directory": "ask your administrators for a home directory",
    "the login shell ended before it ran anything…; the account needs a shell that takes `-c COMMAND` (neither a restricted "
    "shell nor a ForceCommand) and start-up files that do not exit": "remove `exit` from the start-up files of the account, or "
    "ask your administrators for an ordinary shell",
    "the server closes connections before the login; it has too many logins at once (MaxStartups), is restarting, or bans this "
    "machine: try again later": "try again later; if it returns, let fewer processes log in at the same time",
    "the server opens no session (…)": "try again; if it returns, ask your administrators about limits of sshd",
    "…: … took over … s and was ended": "check the load of the edge node, and try again",
    # Environments
    "… cannot be fetched: …": "check the network of this machine and the index in the lock file, and try again",
    "… cannot be read: …": "restore the file: lock again with `pixi lock`, or remove the damaged package from the cache",
    "… cannot be resolved to wheels for …: …": "correct what uv says after the colon: lock versions that have wheels for this "
    "platform",
    "each command is a line of text": "write each command as a text that is not empty",
    "environment: it cannot be made in … on …: …": "correct what stands after the colon; if the disk is full, make room, or "
    "choose another `remote_base`",
    "environment: on … …": "do what the message says at its end",
    "environment: …": "do what the message says at its end",
    "glibc on … is older than 2.17, for which there are no wheels": NO_WHEELS,
    "… has another C library than glibc, for which no wheels are fetched": NO_WHEELS,
    "… has another C library than glibc, which conda packages for Linux need": NO_WHEELS,
    "… has no wheel and cannot be built on this machine: …": "lock a version with a wheel, or install what the build needs here",
    "… is a PEX file, and … has no Python on its PATH to start it": "pack with conda-pack or pixi-pack, which bring a Python",
    "… is not the file in the lock: its SHA-256 is …": "lock again, and find out why the index has another file",
    "… lacks …, its PATH has …, and uv cannot bring one: …": "name a Python that is on the cluster, as "
    '`python="/path/to/python"`',
    "mounts: … is not SOURCE, SOURCE:TARGET or SOURCE:TARGET:OPTIONS with absolute paths": "write one of these three forms",
    "the activation script … cannot be read: …": "correct `activation.scripts` in the manifest, or make the file readable",
    "the image … cannot be read on this machine: …": "correct the path; without `./` in front, it is a path on the cluster",
    "the manifest has no environment …; it has …": NAMED,
    "the platform of the edge node … cannot be found: …": "check with `rayslurm doctor` what does not run there",
    "there is no requirements file …": "correct the path, which is relative to the directory in which Dagster runs the step",
    "there is no wheel of … for …; what this machine builds of it, …, does not run there": "lock a version that has a wheel for "
    "this platform",
    "uv refuses the lock of …: …": "correct what uv names, and run there: uv lock",
    "uv … took over … s and was ended": "check the network of this machine, and try again",
    # On the nodes
    "a cluster needs … ports on each node, … has …": "widen `RayLauncher.port_range`",
    "… before the payload's turn came": NEXT_SESSION,
    "cancelled from Dagster": "do nothing: somebody terminated the run, or used `rayslurm cancel`",
    "… cannot be run: …": "install the program on the nodes, or remove the check from `health_check`",
    "… cannot be written: …": ROOM,
    "… clusters are in … already": "end other Ray clusters of yours on this node, or wait for their end",
    "… does not answer within … s": "let Dagster use other nodes, see [Health of nodes](../node_health.md); tell your "
    "administrators about the node",
    "… ended with exit code …: …": "tell your administrators about the node; a retry can avoid it, see "
    "[Health of nodes](../node_health.md)",
    "every block of … ports in … is taken on this node": "widen `RayLauncher.port_range`, or run fewer Ray clusters on a node",
    'expected "LOW-HIGH" with 1024 <= LOW <= HIGH <= 65535, got …': "write `RayLauncher.port_range` so",
    "… has unknown keys: …": RUNTIME,
    "… has … elements, and no element …": REPORT,
    "… is incomplete: …": RUNTIME,
    "… is not a JSON object": RUNTIME,
    "… is not a list of nodes: […] is no range": "write it as Slurm does, such as `node[1-4,7]`",
    "… is not a list of nodes: a bracket is left over in …": "write it as Slurm does, such as `node[1-4,7]`",
    "… is not a list of nodes: it names more than …": "name fewer nodes",
    "… is not JSON": "run again; the file on the cluster is damaged, so check the disk of `remote_base`",
    "it has been silent for … s": "do nothing: the runtime connects again; if a run ends for this reason, check the network "
    "between the nodes",
    "it is mounted with noexec": SHARED,
    "it was idle for … s": "do nothing: the next payload starts a new session; raise `SessionConfig.idle_timeout` to keep one "
    "longer",
    "it was idle, and another job of its user waits for its nodes": "do nothing: the next payload starts a new session; "
    "`SessionConfig(yield_when_idle=False)` keeps an idle one",
    "its connection ended": "do nothing: the runtime connects again; if a run ends for this reason, check the node that the "
    "message names",
    "its connection ended: …": "do nothing: something else called this port, or the programs have different versions",
    "its proof is wrong": "do nothing: a process without the key of the session called, and was refused",
    "its session was stopped, by `rayslurm session stop` or `cleanup_cluster`": "run the asset again: the next run starts a "
    "session",
    '…: labels=… is no dictionary of texts, such as {"component": "gpu"}': "write `labels` so",
    "… must be …, not …": RUNTIME,
    "network_interface=… has no address on node … (…); it has: …": "set `RayLauncher.network_interface` to one that the message "
    "lists",
    "no directory for its cluster: …": "free space in /tmp on the node, or set TMPDIR to a short path that is writable",
    "no free ports outside the ephemeral range …-…": "set `RayLauncher.port_range`, or run fewer programs on this node",
    "no private directory can be made (…)": "free space in /tmp on the node, or set TMPDIR to a short path that is writable",
    "no session answers there: …": "do nothing: the payload goes to the session by srun, or to another one",
    "node … was lost while the cluster started": "retry the step; if it returns, tell your administrators about the node",
    "node …: Ray cannot be started: …": "correct what stands after the colon, such as a full disk on the node",
    "… of … GiB are free": SHARED,
    "… on node … ended with … before Ray was up…": RAY_LOGS,
    "Permission denied": "make `metrics_dir` writable; the run goes on without the file for Prometheus",
    "Ray on node … ended with …": RAY_LOGS,
    "`ray symmetric-run` did not start its command within startup_timeout=… s": "raise `RayLauncher.startup_timeout`, or use "
    "another `launch_style`",
    "Ray was not up on node … …": "set `RayLauncher.network_interface` or `port_range`; for a slow file system, raise "
    "`startup_timeout`",
    "the connection ended": KEPT,
    "the connection was reset": "do nothing: the command connects again while the cluster lives",
    "the Dagster process that asked for the run is gone": "run the asset again",
    "the GCS on node … is gone": RAY_LOGS,
    "the GCS reports the head node as dead": "retry the step; see [Memory](../memory.md) if memory of the head node ran out",
    "the head cannot listen on any of the ports …: …": "run again; if it fails again, free these ports on the head node",
    "the health check did not end on node … …": "shorten the commands of `RayLauncher.health_check`, or raise `startup_timeout`",
    "the line is longer than … bytes": "do nothing: this connection is closed, and others go on",
    "the message is not a JSON object": "do nothing: something else called this port, and was refused",
    "the other components have ended without this one": "retry the step: the network between the nodes broke, or this component "
    "was late",
    "the other components have given this one up: …": "correct what stands after the colon; a lost node is worth a retry",
    "the payload never started: …": COLON,
    "the payload took longer than its time limit of … s": "raise `SlurmQueueConfig.time_limit` of the payload",
    "the run cannot be laid out: …": ROOM,
    "the runtime received …": "find out who sent the signal: Slurm (`sacct`), a user, or a clean-up script of the node; retry "
    "the step",
    "the session gives the payload back unstarted: …": NEXT_SESSION,
    "the session was asked, but its answer is lost: …": KEPT,
    "the session's allocation came to its time limit": "raise `SessionConfig.time_limit`, or retry the step in a new session",
    "the start record has … components (…), and Slurm's step …": REPORT,
    "the start record is not JSON: …": "run again; the file on the cluster is damaged, so check the disk of `remote_base`",
    "the start record speaks protocol version … and this runtime version …": "let all processes use one version of "
    "dagster-rayslurm; end old sessions with `rayslurm session stop`",
    "the start record's argv names no command": "name a script or a command as `payload_path`",
    "there is a record already": "do nothing: the first runtime of this run goes on",
    "… took over … s": SHARED,
    # Runs
    "a file of the payload cannot be read on this machine: …": "make the file readable, or list it in .rayignore",
    "a partition cannot report an asset check": "report the check in an asset of its own, or use `run()`",
    "an earlier attempt may still have a job array …, which could not be cancelled": "run `scancel --name=…` with the name in "
    "the message, and retry the step",
    "…, and Slurm ended those of all nodes": NODE_LOG,
    "another process took the submission with the key … for dead and has submitted the job itself": "call `submit()` again: it "
    "returns the handle of the other job",
    '…; ask for less, or set ComputeResource(local_resources="simulate")': "ask for less than this machine has, or set "
    '`ComputeResource(local_resources="simulate")`',
    "…, before the payload's end was recorded": NODE_LOG,
    "…: … belongs to …, who could change what runs there": "choose a `remote_base` that belongs to you",
    "…: … cannot be made: …": "check with `quota` and `df` that `remote_base` has room, and that you may write there",
    "… cannot be reached by srun: …": "run again; if the session has ended, the next run starts a new one",
    "… cannot be written before it goes to …: …": "free space in the temporary directory of this machine, or set TMPDIR",
    "…: … did not answer (exit code …): …": "do nothing: dagster-rayslurm asks again; if it stays, tell your administrators",
    "… does not see …": "check that edge and compute nodes share `remote_base`",
    "…: … ended before it could write into its run directory…; SlurmResource.remote_base must be on a file system that the edge "
    "and the compute nodes share": "choose a `remote_base` on a file system that the edge and the compute nodes share",
    "…: … has a pattern that means nothing: …": "correct the line of this .gitignore or .rayignore",
    "… has gone on with this payload, because this attempt was taken for dead: its result counts, and this attempt has neither "
    "ended nor judged the payload": "do nothing: the later attempt reports the result",
    "…: … is not the name of a file in a bundle": "pass files with ordinary names",
    "it announces no host": "end the session with `rayslurm session stop`; the next run starts a new one",
    "its method is …": "report through the functions of Dagster Pipes; the run fails with the kind `pipes`",
    "job array … of an earlier attempt is cancelled, and Slurm has not confirmed its end": "retry the step when `squeue` no "
    "longer shows the array",
    "… lines of the record are damaged, so results may be missing": "tell your administrators: the file system of `remote_base` "
    "returned wrong data; run again",
    "… may have been asked by srun: …": KEPT,
    "no run, session or job is called …, or begins so; `rayslurm ps --all` lists them": LISTED,
    "…: others take the payload over at the same time": "run the step again, but only once",
    'partition="auto": no partition fits (…)': "request less, or name a partition; the parentheses say what each one lacks",
    "RayLauncher.min_nodes=… is more than the cluster will have: … nodes by SlurmQueueConfig.num_nodes=… and max_workers=…": LESS,
    "sbatch was ended by signal … on …": "retry the step; if it returns, ask your administrators what ends programs on the edge "
    "node",
    "scontrol or sinfo": "do nothing: it is part of the message that Slurm did not answer; a retry asks again",
    "Slurm job … can never start: …": "change the fields of `SlurmQueueConfig` that the message names",
    "Slurm job … of an earlier attempt is cancelled, and Slurm has not confirmed its end": "retry the step when `squeue` no "
    "longer shows the job",
    "Slurm job … was still waiting after queue_timeout=… s: …": "see [My job waits](../how-to/waiting.md), or raise "
    "`queue_timeout`",
    "Slurm took no job array for queue_timeout=… s: …": "retry the step when others of your jobs have ended, or raise "
    "`queue_timeout`",
    "SlurmQueueConfig.extra_sbatch: … is not written as --NAME or --NAME=VALUE": "write it as `--licenses=matlab`",
    "…: squeue did not answer (exit code …): …": "do nothing: dagster-rayslurm asks again; if it stays, tell your administrators",
    "squeue printed … where a job was expected": "check that `squeue` on the edge node is Slurm's own, not a wrapper",
    "squeue printed … where jobs were expected": "check that `squeue` on the edge node is Slurm's own, not a wrapper",
    "submitting from … on … took over … s and was ended: sbatch, or the file system there, does "
    "not answer": "retry the step; if it returns, check on the edge node whether `sinfo` and `ls` of the directory answer",
    "the job was ended from outside, and Slurm does not say yet by whom: … is …; `sacct -j …` may tell more "
    "by now": "look with `sacct` who ended the job, and run again",
    "the payload ended with exit code 0 but never opened Dagster Pipes: call dagster_pipes.open_dagster_pipes() in it, or run "
    "it with uses_pipes=False": AT_THE_END,
    "the payload ended with exit code 0 without closing Dagster Pipes, so its last results may be missing: use `with "
    "open_dagster_pipes() as pipes:`, and do not leave by os._exit()": AT_THE_END,
    "the payload has ended, but how is not in its record, so it may have succeeded: …": "look into the run directory that the "
    "message names, and run again if the results are missing",
    "the payload of an earlier attempt was told to end, and its record in … shows no end": "retry the step; if it returns, end "
    "the session with `rayslurm session stop`",
    "the payload raised …": "correct the code at the file and line that the message names",
    "the payload succeeded, but Dagster refused a Pipes message: …": "correct the value that the message names, such as a wrong "
    "asset key",
    "the payload succeeded, but …": "copy the output files from the run directory, whose path is in the metadata of the failed "
    "step",
    "the payload was killed by …": "see [Memory](../memory.md) if it was signal 9; otherwise look at `Last output` in the "
    "metadata",
    "the record has no end and nothing is known of the runtime": REPORT,
    "the record names …, which leaves the directory of outputs": "nothing is fetched; find out who changed the record",
    "the record of the run was out of reach for too long, and the run may go on: …": "restore the connection, and look with "
    "`rayslurm ps` whether the job still runs before you retry the step",
    "the records were out of reach for too long, and the job arrays may go on: …": "restore the connection, and look with "
    "`rayslurm ps` which arrays still run before you retry the step",
    "the run cannot be started: …": "correct what stands after the colon; a lost connection or Slurm's silence is retried",
    "the run directory was removed while the job arrays ran: …": "run the missing partitions again; do not remove files of "
    "`remote_base`",
    "the run was cancelled, and the runtime was killed before it could say how": "do nothing: `squeue` tells whether the job is "
    "gone",
    "…the runtime did not start within runtime_start_timeout=… s…": START_LATE,
    "the runtime ended (…) before the payload's end was recorded": "retry the step; `Runtime log` in the metadata may give the "
    "reason",
    "the runtime ended (…) before the payload's end was recorded: …": "retry the step, if the end of the message gives no other "
    "remedy",
    "the runtime got a signal from outside, and Slurm does not say why: … is …; `sacct -j …` may tell more "
    "by now": "look with `sacct` who ended the job, and retry the step",
    "the runtime got a signal from outside, though Slurm cancelled nothing: … is …; the runtime of another node died, or "
    "somebody signalled it (see the nodes' logs)": "read the logs of the nodes in the metadata of the failed step, and retry "
    "the step",
    "the session did not come up, it ended before it took anything: …": COLON,
    "the session did not come up, it ended before it took anything: …; …": COLON,
    "the session did not come up: …": COLON,
    "the session in job … on … cannot be reached by TCP: …": 'use `SessionConfig(carrier="auto")`, which uses srun then',
    "the session in … does not say where it is": "end it with `rayslurm session stop`; the next run starts a new session",
    "the session in … refuses the payload: …": "correct what stands after the colon, or stop the session",
    "the session's runtime did not start within runtime_start_timeout=… s…": START_LATE,
    "there is no Slurm job … on …": "call `submit()` again: the process that submitted the run died before Slurm had the job",
    "… was asked by srun, and its answer is lost: …": KEPT,
    "… was cancelled…": "do nothing if you cancelled the job; otherwise ask the user or administrator with the id in the message",
    "…: … took over … s and was ended; the file system of … does not answer: try again later, or choose another "
    "remote_base": "try again later, or choose another `remote_base`",
    "…: … would be more than … files and directories, most of them in …; …, and keep data on the cluster, in the directory that "
    "payloads find in RAYSLURM_DATA_DIR": DATA,
    "…: … would be …, more than …; the largest are …; …, and keep data on the cluster, in the directory that payloads find in "
    "RAYSLURM_DATA_DIR": DATA,
    "…: … would stand in …, which is a file or directory of its own": "rename or leave out one of the two",
    # Warnings
    "the run directory … keeps the files that were left out for … days": "copy the files from its subdirectory `work`; correct "
    "`outputs`, or raise `max_outputs_mb`",
    "a session may have accepted the payload, which may run now: see …": "look into the run directory, and end the session with "
    "`rayslurm session stop` if the payload must not run",
    "…; asking again": "do nothing: dagster-rayslurm asks the session again",
    "… bytes of the recorded output never came into sight": "read the file in the run directory; tell your administrators if "
    "the file system loses data",
    "ending Slurm job array …: …": "do nothing: the run was interrupted, or has failed",
    "ending the payload…: …": "do nothing: the run was interrupted",
    "environment: it is made for the platform of the edge node, as that of … is not known: …; auto_detect_platform=False does "
    "not look at it": "do nothing if compute and edge nodes are alike, and set `auto_detect_platform=False`; otherwise correct "
    "what stands after the colon",
    "… failed a health check and is not excluded: …": "tell your administrators about the node; the end of the message says why "
    "the job may still get it",
    "… failed: …": KIND,
    "job array … still runs with the settings of an earlier attempt, which have changed since; see … on …, where `scancel "
    "--name=…` ends the array": "run the `scancel` command of the message if you do not need the old array",
    "no node is excluded for a failed health check: …": "do nothing: this job may get the node again, because Slurm did not "
    "answer",
    "no partition is materialized before the cluster says whether another attempt has taken over: "
    "…": "do nothing: the step waits for the connection, for up to `connection_loss_timeout`",
    "…: no such variable is read; there are …, and the same with …JUMP_ for a jump host": "correct the name of the variable to "
    "one that the message lists, or unset it",
    "nodes that failed a health check cannot be noted: …": "make room in `remote_base`; until then later jobs may get these "
    "nodes again",
    "partition … failed: …": KIND,
    "reattached to …, a payload that an earlier attempt did not follow to its end; its output is shown from byte … on; at most "
    "the last batch is shown twice": "do nothing: this attempt follows the payload to its end",
    "reattached to …, a payload that an earlier attempt did not follow to its end; its output is shown from "
    "its beginning": "do nothing: this attempt follows the payload to its end",
    "session … is idle and holds …, while this job waits; `rayslurm session stop …` ends it.…": "run the command of the message "
    "if you do not need the session",
    "Slurm has requeued the job: attempt … begins…": "do nothing: the payload runs again from its beginning",
    "Slurm job … still runs with the settings of an earlier attempt, which have changed since; see … on …, where `scancel …` "
    "ends the job": "run the `scancel` command of the message if you do not need the old job",
    "…, so that no further one is submitted": "run the asset again for the missing partitions, if you did not mean to cancel "
    "them",
    "the job goes on, but its state cannot be asked for: …": "do nothing: dagster-rayslurm asks Slurm again",
    "…; the job is looked for before it is given up": "do nothing: dagster-rayslurm follows the job if Slurm has it; otherwise "
    "the run fails with this message",
    "…; the job is looked for before it is submitted again": "do nothing: no job is submitted twice",
    "the next job array waits until others of your jobs have ended: …": "do nothing, or end jobs that you do not need",
    "the payload cannot be told to end, which is tried again: …": "do nothing: dagster-rayslurm tries again until the payload "
    "has ended",
    "the payload left on the session's cluster: …": "let the payload remove its detached actors, placement groups and Ray jobs; "
    "they stay until the [session](../sessions.md) ends",
    "the payload's output cannot be shown: …": "correct what stands after the colon, such as a full disk; `rayslurm logs` "
    "prints the whole output",
    "the record cannot be read, the run goes on: …": READS_ON,
    "the records cannot be read, the job arrays go on: …": READS_ON,
    "the run has no tag for Slurm job …: …": "do nothing: the payload runs; Dagster's storage refused the tag for the reason "
    "after the colon",
    "…; the run is started once more without …": "tell your administrators about the nodes; see [Health of "
    "nodes](../node_health.md)",
    "the session of the run ends after its idle_timeout: …": "do nothing, or end it now with `rayslurm session stop`",
    "the submission of … died before there was a job: it is submitted anew": "do nothing: there is only one job",
    "this Dagster process is stopped, and Slurm job array … goes on: the next attempt at this step takes it over, if it asks "
    "for the same": RERUN,
    "this Dagster process is stopped, and Slurm job … goes on: the next attempt at this step takes it over, if it asks for the "
    "same": RERUN,
    "trying again for up to … s: …": "do nothing: dagster-rayslurm tries until the time in the message is over",
}
