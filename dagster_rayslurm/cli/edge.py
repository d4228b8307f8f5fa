"""The edge node that the environment names, and what is wrong with it in one sentence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import click

from ..config import resolve_variables
from ..errors import StartError, one_sentence
from ..ssh.config import SSHConnectionResource

prefix_option = click.option(
    "--prefix", default="SLURM_EDGE_NODE_", show_default=True, help="What the variables of the edge node begin with."
)


def edge_node(prefix: str) -> SSHConnectionResource:
    """The edge node of the variables that begin with a prefix.

    Raises:
        ValueError: they cannot be used.
    """
    return resolve_variables(SSHConnectionResource.from_env(prefix), "SSHConnectionResource")


@contextmanager
def sentences() -> Iterator[None]:
    """Whatever is wrong with the environment, the edge node or a session is one sentence."""
    try:
        yield
    except ValueError as error:
        raise click.ClickException(one_sentence(error)) from None
    except (OSError, StartError) as error:
        raise click.ClickException(str(error)) from None
