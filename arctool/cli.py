"""The command line: one short function a subcommand that parses, calls and prints. No logic lives here."""

from __future__ import annotations

import _thread
import io
import os
import sys
import threading
from pathlib import Path
from typing import Annotated, NoReturn

import typer

import arctool
from arctool.cli_bench import bench_app
from arctool.cli_serve import serve
from arctool.errors import ArctoolError, InterruptedByUser, StorageError, UsageError, VerificationError
from arctool.terminal.console import AsJson, KvMemory, MaxModelLen, Quiet, error_console, output_console, print_json

# Rooms are imported by the subcommand that needs them: torch alone takes seconds, and `--help` must answer at once.

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Bake a language model to 2-4 bits a weight, prove the artifact bit by bit, and run it.",
)


app.add_typer(bench_app, name="bench")
app.command()(serve)
RUNG_HELP = (
    "Format of the linear layers. Searched: qtip2, qtip2b, qtip2-v4 (2 bits), qtip2.25-v4, qtip3, qtip3b, qtip4, qtip4b. "
    "For mistral.rs too: q2k to q6k, q4_0, q4_1, q5_0, q5_1, q8_0, fp8. With any of them embedding and head get q8_0 (a recipe may say "
    "otherwise). Not quantised, embedding and head included: bf16, f16, f32, or as-is, which copies each tensor, blocks of a GGUF too."
)
BPW_HELP = (
    "In place of --isq: stored bits a weight of the linear layers, at most, spent on the layers that feel them; measured and checked "
    "on held-out text, which takes some three bakes' time. Layers that a --recipe names are left to it."
)

Model = Annotated[str, typer.Argument(help="A Hugging Face directory, a .gguf file, or a hub id like org/name[@revision].")]
Artifact = Annotated[Path, typer.Argument(readable=False, help="An artifact: its directory, or a .uqff file in it.")]


@app.command()
def bake(
    model: Model,
    isq: Annotated[str | None, typer.Option("--isq", help=RUNG_HELP)] = None,
    bpw: Annotated[float | None, typer.Option("--bpw", help=BPW_HELP)] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Directory to make [default: ./MODEL-RUNG].")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Threads of the search [default: all cores]. Never changes a byte.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the rotation's signs, 0 to 2^64-1.")] = 0,
    recipe: Annotated[Path | None, typer.Option(readable=False, help="YAML file that says which layer gets what.")] = None,
    calib: Annotated[
        str, typer.Option(help="Calibration text: a file, a folder of .txt, .md and .jsonl, auto (built in), or none (round only).")
    ] = "auto",
    calib_tokens: Annotated[int, typer.Option(help="Tokens of calibration text; more is slower and better.")] = 32768,
    measure: Annotated[
        bool | None,
        typer.Option(
            "--measure/--no-measure",
            help="Tell in the model card how far the result is from its source [default: if calibrated, up to 1 billion weights].",
        ),
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing artifact.")] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Quantise MODEL into an artifact. Interrupt it whenever you like: the same command goes on where it was.

    Examples: arctool bake HuggingFaceTB/SmolLM2-135M-Instruct --isq qtip4

    arctool bake HuggingFaceTB/SmolLM2-135M-Instruct --bpw 2.5
    """
    from arctool.api import bake_model
    from arctool.bake.account import parse_account
    from arctool.terminal import budget, progress, sources, tables
    from arctool.uqff.inspect import inspect as look

    target = output or sources.default_output(model, isq, bpw, recipe)
    with progress.bake_progress(error_console(), quiet) as (show, say):
        result = bake_model(
            model,
            target,
            isq,
            bpw=bpw,
            recipe=recipe,
            seed=seed,
            jobs=jobs,
            revision=revision,
            overwrite=force,
            calib=None if calib == "none" else calib,
            calib_tokens=calib_tokens,
            measure=measure,
            progress=show,
            status=say,
        )
    if (shortage := tables.shortage(result, calib_tokens)) is not None:
        typer.echo(f"note: {shortage}", err=True)
    for name in result.ignored:
        typer.echo(f"note: {name} is in the source and belongs to no part of this model; it was left out", err=True)
    found = look(result.path)
    if as_json:
        print_json(tables.baked_json(result, found))
    else:
        typer.echo(tables.baked(result, found))
        if result.report.bake is not None and result.report.bake.budget is not None:
            output_console().print(budget.spent(parse_account(result.report.bake.budget, str(result.path))))


@app.command()
def verify(
    path: Artifact,
    source: Annotated[str | None, typer.Option(help="The checkpoint that it was baked from: adds the error of every layer.")] = None,
    fast: Annotated[bool, typer.Option("--fast", help="Headers, names, shapes and text files only: a second for any size.")] = False,
    jobs: Annotated[int | None, typer.Option(min=1, help="Threads [default: all cores]. Never changes a verdict.")] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Prove an artifact: container, every decoder against the oracle bit by bit, tables, and the error against --source.

    Works on mistral.rs's UQFF too, and needs a few hundred MB whatever its size. Exit code 0 only if everything that was asked holds.

    Example: arctool verify SmolLM2-135M-Instruct-qtip4 --source HuggingFaceTB/SmolLM2-135M-Instruct
    """
    from arctool.artifacts import verify as prove
    from arctool.terminal import progress, tables

    with progress.verify_progress(error_console(), quiet) as show:
        report = prove(path, source, show, fast=fast, jobs=jobs)
    if as_json:
        print_json(report.to_json())
    else:
        output_console().print(tables.verification(report))
    if not report.passed:
        raise typer.Exit(VerificationError.exit_code)


@app.command("eval")
def evaluate(
    paths: Annotated[list[str], typer.Argument(help="Artifacts or checkpoints (directory, .gguf, hub id); a row of the table each.")],
    against: Annotated[str | None, typer.Option(help="What they were made from: adds divergence and the error of every layer.")] = None,
    text: Annotated[Path | None, typer.Option(readable=False, help="UTF-8 text to read [default: one that ships with arctool].")] = None,
    window: Annotated[int | None, typer.Option(help="Tokens read at a time [default: 1024, or the context].")] = None,
    tokens: Annotated[int, typer.Option(help="Tokens to read in all.")] = 8192,
    plot: Annotated[Path | None, typer.Option(readable=False, help="Picture of size and divergence to write: .png, .svg, .pdf.")] = None,
    layers: Annotated[bool, typer.Option("--layers/--no-layers", help="The error of every quantised layer.")] = True,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Measure models: size, perplexity, and how far they are from the one that they were made from.

    Example: arctool eval SmolLM2-qtip2 SmolLM2-qtip4 --against HuggingFaceTB/SmolLM2-135M-Instruct --plot quality.png
    """
    from arctool.api import evaluate as measure
    from arctool.terminal import evaluation, progress

    with progress.eval_progress(error_console(), quiet) as show:
        found = measure(paths, against, text=text, window=window, tokens=tokens, layers=layers, picture=plot, progress=show)
    if as_json:
        print_json(found.to_json())
    else:
        output_console().print(evaluation.quality(found))
    if found.failure is not None:
        raise typer.Exit(found.failure.exit_code)


@app.command()
def inspect(
    path: Artifact,
    tensor: Annotated[str | None, typer.Option("--tensor", metavar="KEY", help="Only this layer or tensor, with its statistics.")] = None,
    plot: Annotated[
        Path | None,
        typer.Option(readable=False, help="Picture to write (.png, .svg, .pdf): bits and error by layer, or the tensor's weights."),
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Show what is inside an artifact: layers, formats, bits per weight, sizes; with --tensor all about one of them.

    Examples: arctool inspect SmolLM2-qtip2 --plot layers.png

    arctool inspect SmolLM2-qtip2 --tensor model.layers.3.mlp.down_proj --plot weights.png
    """
    from arctool import artifacts
    from arctool.terminal import inspection, progress, tables

    console = output_console()
    if tensor is None:
        found = artifacts.inspect(path, picture=plot)
        shown, value = tables.contents(found, console), found.to_json()
    else:
        with progress.count_progress(error_console(), quiet, "reading twice") as show:
            detail = artifacts.inspect_tensor(path, tensor, picture=plot, progress=show)
        shown, value = inspection.tensor(detail), detail.to_json()
    if as_json:
        print_json(value)
    else:
        console.print(shown)


@app.command()
def diff(
    a: Annotated[Path, typer.Argument(metavar="A", readable=False, help="An artifact: its directory, or a .uqff file in it.")],
    b: Annotated[Path, typer.Argument(metavar="B", readable=False, help="The one to compare it with.")],
    layers: Annotated[
        bool, typer.Option("--layers/--no-layers", help="List tensors that differ and measure how far apart they are.")
    ] = True,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Compare two artifacts: config, files, and tensor by tensor how they are stored and how far their weights are apart.

    Exit code 0 if nothing differs, 1 if something does. Example: arctool diff SmolLM2-qtip2 SmolLM2-mixed
    """
    from arctool.artifacts import diff as compare
    from arctool.terminal import inspection, progress

    with progress.count_progress(error_console(), quiet, "comparing") as show:
        found = compare(a, b, layers=layers, progress=show)
    if as_json:
        print_json(found.to_json())
    else:
        output_console().print(inspection.difference(found, layers))
    if not found.same:
        raise typer.Exit(1)


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
    typical_p: Annotated[float, typer.Option(help="Keep the tokens of the most typical surprise up to this mass.")] = 1.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1: what was said already, the prompt included, is less likely.")] = 1.0,
    presence_penalty: Annotated[float, typer.Option(help="Taken from the logits of tokens that the answer has.")] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(help="The same, once for every time that it has them.")] = 0.0,
    json_schema: Annotated[Path | None, typer.Option(help="Answer with JSON of the schema in this file.")] = None,
    regex: Annotated[str | None, typer.Option(help="Answer with text that this expression matches in full.")] = None,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    max_model_len: MaxModelLen = None,
    kv_memory: KvMemory = None,
    as_json: AsJson = False,
) -> None:
    """Chat with a model in the terminal, or answer one --prompt.

    Example: arctool run SmolLM2-135M-Instruct-qtip4 --prompt "What is the capital of France?"
    """
    from arctool.run.llm import EngineOptions
    from arctool.run.sampling.params import SamplingParams
    from arctool.terminal import chat, sources

    params = SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        typical_p=typical_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        seed=seed,
        max_tokens=max_tokens,
        constraint=chat.constraint(json_schema, regex),
    )
    if prompt is None and (as_json or raw):
        raise UsageError("--json and --raw need a --prompt")
    llm = sources.open_model(path, EngineOptions(max_model_len=max_model_len, kv_memory=kv_memory))
    if prompt is None:
        chat.loop(llm, output_console(), params, system)
        return
    text = chat.piped_prompt() if prompt == "-" else prompt
    completion = chat.show(chat.answer(llm, text, system, params, raw), (lambda _: None) if as_json else _write)
    if completion is None:
        raise typer.Exit(InterruptedByUser.exit_code)
    if as_json:
        print_json(chat.as_json(completion))
    else:
        typer.echo()
        typer.echo(chat.speed(completion), err=True)


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Show what this machine can do: kernels, rungs, packages, and what is missing."""
    from arctool.terminal.doctor import diagnose, diagnosis

    found = diagnose()
    if as_json:
        print_json(found.to_json())
    else:
        output_console().print(diagnosis(found))
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


SOON = 0.05
"""Seconds; a compiler's callback takes microseconds."""


def _heed_interrupts() -> None:
    """A Ctrl-C that arrives while a compiler calls back into Python cannot leave that call, and would be lost: raise it again behind it."""
    usual = sys.unraisablehook

    def hook(unraisable: sys.UnraisableHookArgs) -> None:
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            again = threading.Timer(SOON, _thread.interrupt_main)
            again.daemon = True
            again.start()
        else:
            usual(unraisable)

    sys.unraisablehook = hook


def main() -> None:
    """Entry point: a user's error is one line on standard error and its class's exit code; Ctrl-C is 130; a closed pipe is quiet."""
    _prepare_streams()
    _heed_interrupts()
    try:
        os.getcwd()
        app(standalone_mode=True)
    except SystemExit as leaving:
        if leaving.code == InterruptedByUser.exit_code:
            typer.echo("arctool: interrupted", err=True)
        raise
    except KeyboardInterrupt:
        typer.echo("arctool: interrupted", err=True)
        raise SystemExit(InterruptedByUser.exit_code) from None
    except ArctoolError as error:
        _fail(error)
    except OSError as error:
        # The machine refused something that no room foresaw: a full disk behind standard output, a name too long to look up.
        _fail(StorageError(": ".join(filter(None, (_named(error), error.strerror or str(error))))))


def _named(error: OSError) -> str:
    return "" if error.filename is None else os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else ""


if __name__ == "__main__":
    main()
