"""Functions that the commands of `rayslurm` share: they print JSON and tables, shorten errors, and format durations."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from ..errors import TROUBLES, FailureKind, StartError, one_sentence
from ..ssh.base import ConnectionFailed

if TYPE_CHECKING:
    from rich.console import Console

    from ..failures import RunFailure

_WIDE = 200  # Characters of a line that goes to a file or another program.
COMMANDS = "errors-of-rayslurm"  # The section of the troubleshooting page for errors without a failure kind.

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, one object per line.")


@contextmanager
def one_sentence_errors() -> Iterator[None]:
    """Context manager that turns an expected error of the `with` block into a ClickException with a message of one sentence.

    The expected errors are ValueError, OSError, StartError and RunFailure. Click prints the message, and the command exits with
    1.
    """
    try:
        yield
    except ValueError as error:
        raise click.ClickException(one_sentence(error)) from None
    except BrokenPipeError:
        raise  # Nobody reads the output any more, so click ends the command without a message.
    except ConnectionFailed as error:
        raise _OfKind(str(error), FailureKind.CONNECTION) from None
    except OSError as error:
        raise click.ClickException(str(error)) from None
    except StartError as error:
        raise _OfKind(str(error), error.kind) from None
    except _run_failure() as error:
        raise _OfKind(error.description or str(error), error.kind) from None


class _OfKind(click.ClickException):
    """An error that has a failure kind, and so a section of its own on the troubleshooting page."""

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message)
        self.kind = kind


def with_link(error: click.ClickException) -> click.ClickException:
    """Returns a copy of a command's error; the message ends with the URL of the error's section of the troubleshooting page."""
    return click.ClickException(error.message + see_troubles(error.kind if isinstance(error, _OfKind) else COMMANDS))


def _run_failure() -> tuple[type[RunFailure], ...]:
    """Returns a tuple with the class `RunFailure`, for an `except` clause; () if the module of the class is not loaded.

    Without the module, nothing can raise a `RunFailure`.
    """
    module = sys.modules.get("dagster_rayslurm.failures")
    return () if module is None else (module.RunFailure,)


def see_troubles(section: str) -> str:
    """Returns a line break and a line with the URL of the troubleshooting page, to append to an error message.

    The URL leads to `section`, a failure kind or another anchor of the page. Returns "" if standard error is not a terminal,
    because a program that reads the message expects one line.
    """
    return f"\nSee {TROUBLES}#{section}" if os.isatty(2) else ""


def print_json(row: Mapping[str, Any]) -> None:
    """Prints one JSON object on a line."""
    click.echo(json.dumps(row, ensure_ascii=False))


def print_table(rows: Iterable[Sequence[str]], *headers: str, **options: Any) -> None:
    """Prints a table; cells appear literally, without rich's markup and emoji. `options` are options of `rich.table.Table`."""
    from rich.table import Column, Table
    from rich.text import Text

    # People copy the first column, so it is never cut; neither is anything that another program reads.
    columns = [Column(header, no_wrap=not number, overflow="fold") for number, header in enumerate(headers)]
    table = Table(*columns, **options)
    for row in rows:
        table.add_row(*map(Text, row))
    output_console().print(table)


def output_console() -> Console:
    """Returns a console for standard output, as wide as the terminal or COLUMNS, otherwise wide enough for long lines."""
    from rich.console import Console

    shown = os.isatty(1) or "COLUMNS" in os.environ
    return Console(width=None if shown else _WIDE)


def print_values(values: Mapping[str, Any]) -> None:
    """Prints names and values in two columns; values that are None or empty are left out."""
    shown = [(name.replace("_", " "), value_text(value)) for name, value in values.items() if value not in (None, [], {}, "")]
    print_table(shown, show_header=False, box=None, padding=(0, 2, 0, 0))


def value_text(value: Any) -> str:
    """Returns a value as text for a table: a list with one line per item, a mapping as names and values on one line."""
    if isinstance(value, dict):
        return "  ".join(f"{name} {item}" for name, item in value.items() if item is not None)
    return "\n".join(map(value_text, value)) if isinstance(value, list) else str(value)


def duration(seconds: float | None) -> str:
    """Returns a number of seconds as text in the form D-HH:MM:SS, H:MM:SS or M:SS; "" for None."""
    if seconds is None:
        return ""
    minutes, rest = divmod(int(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24}-{hours % 24:02}:{minutes:02}:{rest:02}"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def terminal_log(quiet: bool) -> logging.Logger:
    """Returns a logger that writes to standard error; if `quiet` is True, the logger writes only warnings and errors."""
    log = logging.getLogger("rayslurm.terminal")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    log.handlers, log.propagate = [handler], False
    log.setLevel(logging.WARNING if quiet else logging.INFO)
    return log


def listed(names: Iterable[str]) -> str:
    """Returns the names in quotes, separated by commas."""
    return ", ".join(map(repr, names))
