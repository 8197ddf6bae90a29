"""What every subcommand shares: options of its output, and the consoles it writes to."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer
from rich.console import Console

AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON on standard output.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")]
MaxModelLen = Annotated[int | None, typer.Option(help="Context in tokens [default: the model's, as memory allows].")]
KvMemory = Annotated[str | None, typer.Option(help="Most memory for keys and values, like 512MB [default: 2GiB].")]


PIPE_COLUMNS = 200
"""Width where standard output is no terminal: whoever reads a pipe wants names whole, one row a line."""


def output_console() -> Console:
    return Console(width=None if sys.stdout.isatty() else PIPE_COLUMNS)


def error_console() -> Console:
    return Console(stderr=True)


def print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, default=str))
