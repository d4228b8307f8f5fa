"""Helpers of all `rayslurm` commands: the edge node from environment variables, one-sentence errors, and tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import click

from ..config import resolve_variables
from ..errors import StartError, one_sentence
from ..ssh.config import SSHConnectionResource

prefix_option = click.option(
    "--prefix", default="SLURM_EDGE_NODE_", show_default=True, help="What the variables of the edge node begin with."
)


def edge_node(prefix: str) -> SSHConnectionResource:
    """The login to the edge node, from the environment variables that begin with a prefix; raises `ValueError` as they do."""
    return resolve_variables(SSHConnectionResource.from_env(prefix), "SSHConnectionResource")


@contextmanager
def one_sentence_errors() -> Iterator[None]:
    """Turn a `ValueError`, `OSError` or `StartError` inside the block into a one-sentence error of the command, which exits."""
    try:
        yield
    except ValueError as error:
        raise click.ClickException(one_sentence(error)) from None
    except (OSError, StartError) as error:
        raise click.ClickException(str(error)) from None


def print_table(rows: Iterable[Sequence[str]], *headers: str, **options: Any) -> None:
    """Print a table; cells appear literally, without rich's markup. `options` are those of `rich.table.Table`."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(*headers, **options)
    for row in rows:
        table.add_row(*map(escape, row))
    Console().print(table)
