"""The command line: one short function a subcommand that parses, calls and prints. No logic lives here."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

import arctool
from arctool.errors import ArctoolError, InterruptedByUser, StorageError, UsageError, VerificationError

# Rooms are imported by the subcommand that needs them: torch alone takes seconds, and `--help` must answer at once.

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Bake a language model to 2-4 bits a weight, prove the artifact bit by bit, and run it.",
)
RUNG_HELP = "Format of the linear layers: qtip2, qtip2b, qtip2-v4 (2 bits), qtip2.25-v4, qtip3, qtip3b, qtip4, qtip4b, or bf16."

Model = Annotated[str, typer.Argument(help="A Hugging Face directory, a .gguf file, or a hub id like org/name[@revision].")]
Artifact = Annotated[Path, typer.Argument(readable=False, help="An artifact: its directory, or a .uqff file in it.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON on standard output.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")]


PIPE_COLUMNS = 200
"""Width where standard output is no terminal: whoever reads a pipe wants names whole, one row a line."""


def _output() -> Console:
    return Console(width=None if sys.stdout.isatty() else PIPE_COLUMNS)


def _errors() -> Console:
    return Console(stderr=True)


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, default=str))


@app.command()
def bake(
    model: Model,
    isq: Annotated[str, typer.Option("--isq", help=RUNG_HELP)],
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Directory to make [default: ./MODEL-RUNG].")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Threads of the search [default: all cores]. Never changes a byte.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the rotation's signs, 0 to 2^64-1.")] = 0,
    recipe: Annotated[Path | None, typer.Option(readable=False, help="YAML file that says which layer gets what.")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing artifact.")] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Quantise MODEL into an artifact. Interrupt it whenever you like: the same command goes on where it was.

    Example: arctool bake HuggingFaceTB/SmolLM2-135M-Instruct --isq qtip4
    """
    from arctool.api import bake_model
    from arctool.terminal import progress, sources, tables
    from arctool.uqff.inspect import inspect as look

    target = output or sources.default_output(model, isq)
    with progress.bake_progress(_errors(), quiet) as show:
        result = bake_model(model, target, isq, recipe=recipe, seed=seed, jobs=jobs, revision=revision, overwrite=force, progress=show)
    for name in result.ignored:
        typer.echo(f"note: {name} is in the source and belongs to no part of this model; it was left out", err=True)
    found = look(result.path)
    if as_json:
        _print_json({"path": str(result.path), "seconds": result.seconds, "resumed": result.resumed, **found.to_json()["totals"]})
    else:
        typer.echo(tables.baked(result, found))


@app.command()
def verify(
    path: Artifact,
    source: Annotated[str | None, typer.Option(help="The checkpoint that it was baked from: adds the error of every layer.")] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Prove an artifact: container, every decoder against the oracle bit by bit, tables, and the error against --source.

    Exit code 0 only if everything that was asked holds.
    """
    from arctool.api import verify as prove
    from arctool.terminal import progress, tables

    with progress.verify_progress(_errors(), quiet) as show:
        report = prove(path, source, show)
    if as_json:
        _print_json(report.to_json())
    else:
        _output().print(tables.verification(report))
    if not report.passed:
        raise typer.Exit(VerificationError.exit_code)


@app.command()
def inspect(path: Artifact, as_json: AsJson = False) -> None:
    """Show what is inside an artifact: layers, formats, bits per weight, sizes."""
    from arctool.terminal import tables
    from arctool.uqff.inspect import inspect as look

    found = look(path)
    if as_json:
        _print_json(found.to_json())
    else:
        console = _output()
        console.print(tables.contents(found, console))


@app.command()
def run(
    path: Annotated[str, typer.Argument(help="An artifact, or a checkpoint (directory, .gguf, hub id) to run unquantised.")],
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="Answer this once and leave; - reads standard input.")] = None,
    system: Annotated[str, typer.Option(help="System prompt.")] = "",
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt as plain text, without the chat template.")] = False,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens of an answer [default: what the context holds].")] = None,
    temperature: Annotated[float, typer.Option(help="0 always takes the likeliest token.")] = 0.7,
    top_p: Annotated[float, typer.Option(help="Keep the likeliest tokens up to this mass.")] = 0.95,
    top_k: Annotated[int, typer.Option(help="Keep this many of the likeliest tokens; 0 keeps all.")] = 0,
    min_p: Annotated[float, typer.Option(help="Drop tokens below this share of the likeliest one's probability.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Context in tokens [default: the model's, as memory allows].")] = None,
    as_json: AsJson = False,
) -> None:
    """Chat with a model in the terminal, or answer one --prompt.

    Example: arctool run SmolLM2-135M-Instruct-qtip4 --prompt "What is the capital of France?"
    """
    from arctool.run.llm import EngineOptions
    from arctool.run.sampling_params import SamplingParams
    from arctool.terminal import chat, sources

    params = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed, max_tokens=max_tokens)
    if prompt is None and (as_json or raw):
        raise UsageError("--json and --raw need a --prompt")
    llm = sources.open_model(path, EngineOptions(max_model_len=max_model_len))
    if prompt is None:
        chat.loop(llm, _output(), params, system)
        return
    text = chat.piped_prompt() if prompt == "-" else prompt
    completion = chat.show(chat.answer(llm, text, system, params, raw), (lambda _: None) if as_json else _write)
    if completion is None:
        raise typer.Exit(InterruptedByUser.exit_code)
    if as_json:
        _print_json(chat.as_json(completion))
    else:
        typer.echo()
        typer.echo(chat.speed(completion), err=True)


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Show what this machine can do: kernels, rungs, packages, and what is missing."""
    from arctool.terminal.doctor import diagnose, diagnosis

    found = diagnose()
    if as_json:
        _print_json(found.to_json())
    else:
        _output().print(diagnosis(found))
    if not found.healthy:
        raise typer.Exit(1)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _version(value: bool) -> None:
    if value:
        typer.echo(f"arctool {arctool.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """Options before the subcommand."""


def _fail(error: ArctoolError) -> NoReturn:
    """The one line of an error. What a file or a name brought into it must neither break the line nor steer the terminal."""
    text = "".join(c if c.isprintable() else " " if c.isspace() else ascii(c)[1:-1] for c in str(error))
    typer.echo(f"arctool: error: {text}", err=True)
    raise SystemExit(error.exit_code)


def _prepare_streams() -> None:
    """A stream that was closed before we started swallows; one that cannot spell a character writes a question mark in its place."""
    sys.stdin = sys.stdin or open(os.devnull)  # noqa: SIM115  # lives as long as the process
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name) or open(os.devnull, "w")  # noqa: SIM115
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
        setattr(sys, name, stream)


def main() -> None:
    """Entry point: a user's error is one line on standard error and its class's exit code; Ctrl-C is 130; a closed pipe is quiet."""
    _prepare_streams()
    try:
        os.getcwd()
        app(standalone_mode=True)
    except SystemExit as leaving:
        if leaving.code == InterruptedByUser.exit_code:
            typer.echo("arctool: interrupted", err=True)
        raise
    except ArctoolError as error:
        _fail(error)
    except OSError as error:
        # The machine refused something that no room foresaw: a full disk behind standard output, a name too long to look up.
        _fail(StorageError(": ".join(filter(None, (_named(error), error.strerror or str(error))))))


def _named(error: OSError) -> str:
    return "" if error.filename is None else os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else ""


if __name__ == "__main__":
    main()
