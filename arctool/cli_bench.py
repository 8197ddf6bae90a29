"""The measurements of the command line: one short function each that parses, calls and prints."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from arctool.errors import UsageError
from arctool.terminal.console import AsJson, Quiet, error_console, output_console, print_json


class ModelUnlessNamed(TyperGroup):
    """`arctool bench PATH` is `arctool bench model PATH`, unless PATH is the name of another measurement."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        return super().resolve_command(ctx, args if args[0] in self.commands else ["model", *args])

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        # Options may come first; the group itself has none but --help.
        named = args[:1] and (args[0] in self.commands or args[0] in ("-h", "--help"))
        return super().parse_args(ctx, args if named or not args else ["model", *args])


bench_app = typer.Typer(
    cls=ModelUnlessNamed,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Measure how fast a model answers on this machine: `arctool bench PATH`; or what a bake's searches cost: `arctool bench bake`.",
)


@bench_app.command("model")
def bench_model(
    path: Annotated[str, typer.Argument(help="An artifact, or a checkpoint (directory, .gguf, hub id) to run unquantised.")],
    batches: Annotated[str, typer.Option(help="How many sequences at once, with commas between them.")] = "1,2,4,8,16,32,64",
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 128,
    new_tokens: Annotated[int, typer.Option(help="Tokens that each sequence generates.")] = 32,
    kv_memory: Annotated[str | None, typer.Option(help="Memory of the cache, like 2GiB [default: 2GiB at most].")] = None,
    rounds: Annotated[int, typer.Option(help="Rounds over all sizes; the table has medians.")] = 3,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Tokens a second of a model on this machine, reading prompts and generating, for 1 to 64 sequences at once.

    Exit code 1 if a row is no measurement. Example: arctool bench SmolLM2-135M-Instruct-qtip4
    """
    from arctool.bench import throughput
    from arctool.run.llm import EngineOptions
    from arctool.terminal import progress, sources
    from arctool.terminal.throughput import throughput as shown

    plan = throughput.Plan(parse_numbers(batches, "--batches"), prompt_tokens, new_tokens, rounds)
    llm = sources.open_model(path, EngineOptions(max_model_len=prompt_tokens + new_tokens, max_seqs=max(plan.batches), kv_memory=kv_memory))
    with progress.count_progress(error_console(), quiet, "measuring") as show:
        found = throughput.measure(llm, path, plan, show)
    if as_json:
        print_json(found.to_json())
    else:
        output_console().print(shown(found))
    if found.failed:
        raise typer.Exit(1)


def parse_numbers(text: str, option: str) -> tuple[int, ...]:
    """Whole numbers with commas between them. Raises UsageError by option."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise UsageError(f"{option}: expected whole numbers with commas between them, found {text!r:.60}") from error


@bench_app.command("bake")
def bench_bake(
    rungs: Annotated[str | None, typer.Option(help="Rungs to measure, with commas between them [default: all].")] = None,
    rows: Annotated[int, typer.Option(help="Gaussian rows of 1024 weights to search.")] = 32,
    curve: Annotated[bool, typer.Option("--curve", help="How long a decision should wait: time and error by delay.")] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Speed of a bake's searches on this machine, one thread, and the error of deciding before the end of a row.

    Example: arctool bench bake --rungs qtip2,qtip2-v4
    """
    from arctool.bench import search
    from arctool.terminal import progress, speeds

    names = () if rungs is None else search.parse_rungs(rungs)
    with progress.count_progress(error_console(), quiet, "searching") as show:
        if curve:
            found = search.measure_windows(names or search.CURVE_RUNGS, rows, progress=show)
        else:
            found = search.measure_speeds(names, rows, progress=show)
    if as_json:
        print_json(found.to_json())
    else:
        output_console().print(speeds.speeds(found))
