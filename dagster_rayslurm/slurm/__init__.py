"""Everything that knows Slurm's commands: the configuration of a Slurm cluster, job scripts, submission, queue, accounting.

It handles jobs, not what runs in them; `backends` uses it to start runtimes. Begin with `config` for the
configuration, `request` for the job script and `submit` for the submission.
"""
