"""The measurements of the command line: one short function each that parses, calls and prints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from arctool.errors import InterruptedByUser, UsageError
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
    help=(
        "Measure how fast a model answers on this machine: `arctool bench PATH`; a server, ours or another: `arctool bench serve`; "
        "or what a bake's searches cost: `arctool bench bake`."
    ),
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


@bench_app.command("serve")
def bench_serve(
    base_url: Annotated[str, typer.Option(help="Address of the server, like http://127.0.0.1:8000; any that speaks OpenAI's protocol.")],
    model: Annotated[str | None, typer.Option(help="Name of the model [default: the one that the server has].")] = None,
    endpoint: Annotated[Literal["completions", "chat"], typer.Option(help="Where requests go; JSON ones always to chat.")] = "completions",
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="Sent as a bearer token.")] = None,
    workload: Annotated[
        Literal["random", "shared-prefix", "multi-turn", "json", "cancel", "mixed"],
        typer.Option(help="What is asked; mixed is 70 % random, 20 % json, 10 % cancel."),
    ] = "random",
    input_len: Annotated[int, typer.Option(help="Tokens of each prompt; of what each turn adds, or each suffix.")] = 128,
    output_len: Annotated[int, typer.Option(help="Tokens of each answer; the most, for JSON and with --natural-lengths.")] = 64,
    num_prompts: Annotated[int, typer.Option(help="Requests of each load.")] = 64,
    concurrency: Annotated[str | None, typer.Option(help="Closed loop of so many clients; commas make a sweep [default: 1,4,16].")] = None,
    request_rate: Annotated[
        str | None, typer.Option(help="Open loop of so many requests a second (inf: all at once); commas make a sweep.")
    ] = None,
    burstiness: Annotated[float, typer.Option(help="Of the open loop: 1 is Poisson, less comes in bursts, more is even.")] = 1.0,
    max_concurrency: Annotated[int | None, typer.Option(help="Of the open loop: most requests at once [default: any].")] = None,
    num_warmups: Annotated[int, typer.Option(help="Requests before each load that nobody counts.")] = 1,
    seed: Annotated[
        int | None, typer.Option(help="Makes prompts and times repeatable; a server's cache may know them then [default: random].")
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 always takes the likeliest token.")] = 0.0,
    natural_lengths: Annotated[bool, typer.Option("--natural-lengths", help="Let the model end its answers itself.")] = False,
    tokenizer: Annotated[
        Path | None, typer.Option(readable=False, help="tokenizer.json of the model, or its directory: prompts of exact lengths.")
    ] = None,
    vocab_size: Annotated[int | None, typer.Option(help="Prompts of random token ids below this, for /v1/completions.")] = None,
    prefixes: Annotated[int, typer.Option(help="Of shared-prefix: how many different ones.")] = 4,
    prefix_len: Annotated[int, typer.Option(help="Of shared-prefix: tokens of each.")] = 256,
    turns: Annotated[int, typer.Option(help="Of multi-turn: requests of each conversation.")] = 4,
    cancel_share: Annotated[float, typer.Option(help="Of cancel: share of the requests that are dropped.")] = 0.1,
    cancel_after: Annotated[int, typer.Option(help="Of cancel and mixed: chunks of an answer after which it is dropped.")] = 8,
    goodput: Annotated[str, typer.Option(help="Milliseconds that a good request may take, like 'ttft:200 tpot:50 e2el:5000'.")] = "",
    percentiles: Annotated[str, typer.Option(help="Of each latency, with commas between them.")] = "50,90,99",
    max_failed: Annotated[float, typer.Option(help="Share of failed requests up to which a load still has figures.")] = 0.0,
    count_chunks: Annotated[bool, typer.Option("--count-chunks", help="Take a chunk for a token where the server tells no usage.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds of one request.")] = 600.0,
    plot: Annotated[Path | None, typer.Option(readable=False, help="Latency-throughput curve to write: .png, .svg, .pdf.")] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Latency and throughput of a running server, ours or any other of OpenAI's protocol, under vLLM's metric names.

    Exit code 1 if a load is no measurement.

    Examples: arctool bench serve --base-url http://127.0.0.1:8000 --concurrency 1,4,16 --plot curve.png

    arctool bench serve --base-url http://127.0.0.1:8000 --request-rate 2 --goodput "ttft:500 tpot:50"
    """
    from arctool.bench.canvas import picture_target
    from arctool.bench.serving import picture, plan, session
    from arctool.bench.serving.client import Server
    from arctool.bench.serving.exchange import Endpoint
    from arctool.terminal import progress
    from arctool.terminal.serving import serving

    wanted = plan.Plan(
        loads=plan.parse_loads(concurrency, request_rate, burstiness, max_concurrency),
        workload=plan.Workload(workload),
        endpoint=Endpoint(endpoint),
        input_len=input_len,
        output_len=output_len,
        requests=num_prompts,
        warmups=num_warmups,
        temperature=temperature,
        natural=natural_lengths,
        prefixes=prefixes,
        prefix_len=prefix_len,
        turns=turns,
        cancel_share=cancel_share,
        cancel_after=cancel_after,
        goodput=plan.parse_goodput(goodput),
        percentiles=plan.parse_floats(percentiles, "--percentiles"),
        max_failed=max_failed,
        count_chunks=count_chunks,
    )
    server, target = Server.at(base_url, timeout, api_key), picture_target(plot)
    with progress.count_progress(error_console(), quiet, "measuring") as show:
        found = session.measure(server, wanted, session.Voicing(model, vocab_size, tokenizer), seed, show)
    if as_json:
        print_json(found.to_json())
    else:
        output_console().print(serving(found))
    if target is not None and any(row.figures is not None for row in found.rows):
        picture.draw(found, target)
    if found.interrupted or found.failed:
        raise typer.Exit(InterruptedByUser.exit_code if found.interrupted else 1)
