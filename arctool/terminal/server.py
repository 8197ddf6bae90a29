"""What `arctool serve` does around the server: opens the model, says what happens on standard error, keeps the log."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
from pathlib import Path

import numba
import typer

import arctool
from arctool.errors import StorageError, UsageError
from arctool.run.chat import ChatTemplate
from arctool.run.llm import EngineOptions
from arctool.serve.facts import facts_of
from arctool.serve.log_writer import open_log
from arctool.serve.model_files import ModelFiles
from arctool.serve.server import EngineStuck, Loaded, serve
from arctool.serve.settings import ServeOptions
from arctool.serve.tracing import open_tracing
from arctool.terminal.sources import open_model

MOST_FILES = 1 << 16


def default_name(model: str) -> str:
    """What clients call the model: the artifact's or directory's own name, or the last part of a hub id."""
    path = Path(os.path.expanduser(model))
    if not path.exists():
        return model.split("@")[0].rstrip("/").split("/")[-1]
    path = path.resolve()
    if path.is_file() and path.suffix == ".uqff":
        path = path.parent
    return path.name.removesuffix(".gguf")


def run(
    model: str,
    options: ServeOptions,
    engine: EngineOptions,
    *,
    chat_template: Path | None,
    access_log: str,
    threads: int | None,
    otlp_endpoint: str | None,
) -> None:
    """Serve `model` until it is told to stop. Raises UsageError, StorageError, and what opening the model raises."""
    source = None if chat_template is None else _template(chat_template)
    if threads is not None:
        numba.set_num_threads(_threads(threads))

    _take_files()

    def load() -> Loaded:
        llm = open_model(model, engine)
        if source is not None:
            llm.template = ChatTemplate(source, {} if llm.tokenizer is None else llm.tokenizer.special)
        path = Path(os.path.expanduser(model))
        return Loaded(llm, facts_of(llm, path, options.model_name), ModelFiles(path))

    tracing = open_tracing(otlp_endpoint, options.model_name, arctool.__version__)
    stuck: EngineStuck | None = None
    say = open_log(None)
    log = say if access_log in ("-", "none") else open_log(Path(access_log))
    if log is not say:  # whoever rotates logs moves the file away and sends this; else it means that the terminal is gone
        signal.signal(signal.SIGHUP, lambda *_: log.reopen())
    try:
        write = (lambda _: None) if access_log == "none" else log.write
        serve(
            load, options, say=lambda line: say.write(f"arctool: {line}"), write_log=write, log_dropped=lambda: log.dropped, tracing=tracing
        )
    except EngineStuck as error:
        stuck = error
    finally:
        if tracing is not None:
            tracing.close()
        log.close()
        say.close()
    if stuck is not None:
        typer.echo(f"arctool: error: {stuck}", err=True)
        os._exit(stuck.exit_code)


def _take_files() -> None:
    """A connection is a file, and a shell hands out few unless asked."""
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if most == resource.RLIM_INFINITY else min(most, MOST_FILES)
    if files != resource.RLIM_INFINITY and files < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def _threads(count: int) -> int:
    if count > numba.config.NUMBA_NUM_THREADS:
        raise UsageError(f"--threads: this machine has {numba.config.NUMBA_NUM_THREADS}, found {count}")
    return count


def _template(path: Path) -> str:
    """The text of a template, which must compile: better said now than after a model was loaded."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StorageError(f"--chat-template: {path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    ChatTemplate(text, {})
    return text
