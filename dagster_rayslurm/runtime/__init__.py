"""The part that runs where the payload runs: standard library only, Python 3.8 or newer.

It is sent to the allocated nodes as one zipapp and started with the environment's own Python. It starts Ray,
runs the payload, writes the record of the run and tears everything down. Nothing in here imports the rest of
the project, so that the same files work on a laptop and on a compute node where Dagster is not installed.

Where to look, from the top down:

* The process: `__main__` (its roles), `keeper` (its parent), `loop`, `timers`, `processes`, `program`, `aside`, `scratch`.
* A runtime and its payloads: `supervisor`, whose parts are `lifetime` (until when), `node_group` (of which nodes), `roster`,
  `queueing` and `admission` (who waits, whose turn it is, who fits), `dispatch` (who starts, and where), `installed`.
* Who hands payloads over: `intake` (their records), `control` (a parent, a file, a local session), `requests` and `asking`
  (a session in an allocation), `time_limit` (the warning ahead of Slurm's).
* One payload: `payload`, whose parts are `setting`, `workspace`, `payload_process`, `streams`, `messages`, `measurement` and
  `usage` with `gauges`, `gpus` and `ray_jobs`, `outputs`, `end`; what is kept of it: `payload_record` on `record`.
  Forked ones: `templates`, `template_process`, and in that process `template`, `forkable`, `as_main`, `leave_ray`.
* Ray: `clusters` (which one serves whom), `cluster` and `joining` (one of them), `ray_start` (on one node), `ray_node` (in its
  process), `ray_arguments`, `ports`, `addresses`, `cluster_key`, `corner`; `nodes` (its table of nodes), `audit` and
  `leftovers`, `prestart`; `components`.
* Several nodes: `allocation` (what Slurm says), `team` (the head's view of the others), `worker` and `follower` (theirs), and
  `siblings` (those that are simulated), by way of `channel`, `door`, `listener`, `dialler`, `presence`.
* Components that run a payload each: `attendance`, `meeting`, `meeting_host`, `meeting_guest`, `gathering`.
* What both sides know: `spec` (the start record), `record`, `machine`, `footprint`, `nodelist`, `duration`.
"""
