"""What is wrong with a resource whatever a run asks for: found when definitions load, not in a run.

Fields with an `EnvVar` have no value yet, and are checked in the run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import modes
from .config import has_variables
from .environments import PreDeployedEnvironment
from .environments.resolve import path_on_cluster
from .overrides import session_queue
from .slurm.config import SlurmQueueConfig
from .slurm.request import check_queue

if TYPE_CHECKING:
    from .compute import ComputeResource


def check_definition(resource: ComputeResource) -> None:
    """Refuse a resource that no run can use.

    Raises:
        ValueError: the sentence names the field, and what to do.
    """
    mode = resource.mode
    if mode == modes.LOCAL:
        return  # It ignores what only a cluster needs.
    for each in resource.components:
        _check_queue(each.queue)
    slurm = resource.slurm
    queue = None if slurm is None else slurm.queue
    if mode == modes.SESSION and queue is not None and not has_variables((queue, resource.session)):
        queue = session_queue(queue, resource.session)
    if queue is not None and not resource.components:
        _check_queue(queue)
    if has_variables(mode):
        return
    modes.check_cluster(mode, slurm is not None, resource.components)
    if mode == modes.SESSION and not has_variables(resource.session):
        modes.check_session(resource.session, resource.components)
    if slurm is not None:
        _check_environment(resource, over_ssh=slurm.ssh is not None)


def _check_queue(queue: SlurmQueueConfig) -> None:
    if not has_variables(queue):
        check_queue(queue)


def _check_environment(resource: ComputeResource, over_ssh: bool) -> None:
    path, environment = resource.pre_deployed_env_path, resource.environment
    if path is None and not has_variables(environment):
        path_on_cluster(environment, over_ssh)
    elif path is not None and not has_variables(path):
        path_on_cluster(PreDeployedEnvironment(path=path), over_ssh)
