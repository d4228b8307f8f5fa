"""What of a login's variables Slurm's programs get to see.

Users and sites set variables that stand for options (squeue(1), sbatch(1) and so on, "ENVIRONMENT VARIABLES", Slurm
22.05). Some hide jobs or turn to another cluster, and what `sbatch` sees it hands on to the job, where `srun` takes such
variables for options as well (tried on 22.05: SRUN_CPUS_PER_TASK, SLURM_WORKING_DIR, SLURM_TASK_PROLOG, SLURM_EXCLUSIVE).
"""

from __future__ import annotations

from collections.abc import Sequence

CLEAN = r"""
for name in $(env | sed -nE 's/^((SLURM|SRUN|SBATCH|SQUEUE|SACCT|SCANCEL|SCONTROL|SINFO)_[A-Za-z0-9_]*)=.*/\1/p'); do
    case " $kept_variables SLURM_CONF SLURM_CONF_SERVER SLURM_JWT " in *" $name "*) ;; *) unset "$name" ;; esac
done
"""
"""Shell text that unsets those variables, but for how Slurm is reached, and the names in `$kept_variables`."""


def cleaned(command: Sequence[str]) -> list[str]:
    """A command that does not see those variables.

    Args:
        command: a program of Slurm and its arguments, or `env` with what it shall see.
    """
    return ["sh", "-c", f'kept_variables=\n{CLEAN}exec "$@"', "sh", *command]
