"""The configuration of a Slurm cluster, and the code that submits, observes and cancels jobs with Slurm's commands.

The package handles jobs, not the processes that run in jobs; `backends` uses the package to start runtimes. Begin with `config`
for the configuration, `request` for the job script and `submit` for the submission.
"""
