"""`arctool serve`: parses, checks, calls."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from arctool.terminal.console import KvMemory, MaxModelLen


def serve(
    path: Annotated[str, typer.Argument(help="An artifact, or a checkpoint (directory, .gguf, hub id) to serve unquantised.")],
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 lets other machines in: set a key then.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes any that is free.")] = 8000,
    name: Annotated[str | None, typer.Option("--served-model-name", help="The model's name for clients [default: the path's].")] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(help="A key that clients must send; may be given several times. Others see your command line: prefer the two below."),
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(readable=False, help="File of keys, one a line. ARCTOOL_API_KEY in the environment works too.")
    ] = None,
    cors_origin: Annotated[
        list[str] | None, typer.Option(help="Web origin whose pages may ask, like https://example.org; * for all.")
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(help="Name in the Host header to answer to [default: this machine's, or any if --host is not local]."),
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(readable=False, help="Certificate chain (PEM): serves HTTPS.")] = None,
    tls_key: Annotated[Path | None, typer.Option(readable=False, help="Its private key (PEM).")] = None,
    public_metrics: Annotated[bool, typer.Option("--public-metrics", help="/metrics needs no key.")] = False,
    share_prefix_cache: Annotated[
        bool,
        typer.Option(
            "--share-prefix-cache",
            help="Let requests of different keys share cached prefixes: faster, but the time of an answer can tell what others asked.",
        ),
    ] = False,
    max_model_len: MaxModelLen = None,
    max_seqs: Annotated[int, typer.Option(help="Sequences that run at once.")] = 256,
    max_step_tokens: Annotated[int, typer.Option(help="Tokens computed in one step, of prompts and answers together.")] = 512,
    prefill_floor: Annotated[int, typer.Option(help="At least every so many steps waiting prompts get half of a step.")] = 4,
    kv_memory: KvMemory = None,
    no_prefix_caching: Annotated[bool, typer.Option("--no-prefix-caching", help="Compute every prompt anew.")] = False,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of the kernels [default: all cores]. Never changes a token.")] = None,
    tool_parser: Annotated[
        str, typer.Option(help="How the model writes tool calls: auto (by its template), hermes, llama3, mistral, mistral-args, none.")
    ] = "auto",
    reasoning_parser: Annotated[str, typer.Option(help="How it marks its thinking: auto, think, none.")] = "auto",
    chat_template: Annotated[
        Path | None, typer.Option(readable=False, help="Jinja file in place of the model's own chat template.")
    ] = None,
    max_queued: Annotated[int, typer.Option(help="Requests that may wait; one more is answered with 503 and Retry-After.")] = 1024,
    request_timeout: Annotated[float | None, typer.Option(help="Seconds that a request may take [default: no limit].")] = None,
    drain_timeout: Annotated[float, typer.Option(help="Seconds that running requests get to finish on SIGTERM or Ctrl-C.")] = 30.0,
    keep_alive: Annotated[float, typer.Option(help="Seconds without a token after which a stream gets a comment.")] = 15.0,
    send_timeout: Annotated[float, typer.Option(help="Seconds after which a client that takes nothing is left.")] = 60.0,
    body_timeout: Annotated[float, typer.Option(help="Seconds in which a request's body must have arrived.")] = 30.0,
    stall: Annotated[float, typer.Option(help="Seconds that a step may take before /health calls the engine stalled.")] = 60.0,
    watchdog: Annotated[float, typer.Option(help="Seconds that a step may take before the server gives up and exits.")] = 300.0,
    max_body: Annotated[int, typer.Option(help="Bytes of a request's body.")] = 8 << 20,
    access_log: Annotated[str, typer.Option(help="File for a JSON line per request; - is standard error, none is none.")] = "-",
    schedule_every: Annotated[float, typer.Option(help="Seconds between SCHED lines while there is work; 0 for none.")] = 10.0,
    otlp_endpoint: Annotated[str | None, typer.Option(help="Send traces to this OpenTelemetry collector.")] = None,
) -> None:
    """Serve a model over HTTP: OpenAI's and Anthropic's protocols, metrics, and a chat page at /.

    Examples: arctool serve SmolLM2-135M-Instruct-qtip4 --port 8000

    ARCTOOL_API_KEY=$(openssl rand -hex 16) arctool serve MODEL --host 0.0.0.0
    """
    from arctool.run.llm import EngineOptions
    from arctool.serve.settings import ServeOptions, gather_keys
    from arctool.terminal import server

    options = ServeOptions(
        model_name=name or server.default_name(path),
        host=host,
        port=port,
        api_keys=gather_keys(tuple(api_key or ()), api_key_file),
        cors_origins=tuple(cors_origin or ()),
        allowed_hosts=tuple(allowed_host or ()),
        public_metrics=public_metrics,
        max_queued=max_queued,
        request_timeout=request_timeout,
        drain_timeout=drain_timeout,
        keep_alive=keep_alive,
        send_timeout=send_timeout,
        body_timeout=body_timeout,
        stall=stall,
        watchdog=watchdog,
        max_body=max_body,
        share_prefix_cache=share_prefix_cache,
        tool_parser=tool_parser,
        reasoning_parser=reasoning_parser,
        schedule_every=schedule_every,
        tls_certificate=tls_cert,
        tls_key=tls_key,
    )
    engine = EngineOptions(
        max_model_len=max_model_len,
        max_seqs=max_seqs,
        kv_memory=kv_memory,
        max_step_tokens=max_step_tokens,
        prefill_floor=prefill_floor,
        enable_prefix_caching=not no_prefix_caching,
        resident=True,
    )
    server.run(path, options, engine, chat_template=chat_template, access_log=access_log, threads=threads, otlp_endpoint=otlp_endpoint)
