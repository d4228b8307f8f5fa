"""Everything that knows Slurm's commands: the configuration of a Slurm cluster, job scripts, submission, queue, accounting.

The package handles jobs, not the processes that run in jobs; `backends` uses the package to start runtimes. Begin with `config`
for the configuration, `request` for the job script and `submit` for the submission.
"""
