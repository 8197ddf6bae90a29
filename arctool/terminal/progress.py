"""Progress on standard error: a bar with time left on a terminal, a line now and then in a log, nothing when asked to be quiet."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from arctool.terminal.tables import printable
from arctool.uqff.verify import Progress as VerifyProgress

if TYPE_CHECKING:  # only their names are needed, and torch would come with them
    from arctool.bake.pipeline import LayerDone
    from arctool.bake.pipeline import Progress as BakeProgress
    from arctool.bake.pipeline import Status as BakeStatus
    from arctool.bench.evaluation import Progress as EvalProgress

LOG_SECONDS = 10.0
"""Between two lines where standard error is no terminal."""


@contextmanager
def bake_progress(console: Console, quiet: bool) -> Iterator[tuple[BakeProgress | None, BakeStatus | None]]:
    """Two callbacks, for tensors and for what goes on between them; shows layer, rung, error and, on a terminal, the time left."""
    if quiet:
        yield None, None
    elif console.is_terminal:
        with _bar(console, "{task.description}") as progress:
            task = progress.add_task("baking", total=None)

            def show(done: LayerDone) -> None:
                progress.update(task, total=done.total, completed=done.index, description=_bake_line(done))

            def say(what: str) -> None:
                progress.update(task, description=printable(what))

            yield show, say
    else:
        log = _log(console)
        yield (
            lambda done: log(f"{done.index}/{done.total} {_bake_line(done)}", done.index == done.total),
            lambda what: log(printable(what), False),
        )


@contextmanager
def verify_progress(console: Console, quiet: bool) -> Iterator[VerifyProgress | None]:
    """One bar a question; a line now and then where standard error is no terminal."""
    if quiet:
        yield None
    elif console.is_terminal:
        with _bar(console, "{task.description}") as progress:
            tasks: dict[str, int] = {}

            def show(question: str, done: int, total: int) -> None:
                if question not in tasks:
                    tasks[question] = int(progress.add_task(question, total=total))
                progress.update(tasks[question], completed=done)  # type: ignore[arg-type]  # TaskID is an int by another name

            yield show
    else:
        log = _log(console)
        yield lambda question, done, total: log(f"{question} {done}/{total}", False)


@contextmanager
def eval_progress(console: Console, quiet: bool) -> Iterator[EvalProgress | None]:
    """One bar over all models, with what is being read and the time left; a line now and then where standard error is no terminal."""
    if quiet:
        yield None
    elif console.is_terminal:
        with _bar(console, "{task.description}") as progress:
            task = progress.add_task("opening", total=None)

            def show(what: str, done: int, total: int) -> None:
                progress.update(task, total=total, completed=done, description=printable(what))

            yield show
    else:
        log = _log(console)
        yield lambda what, done, total: log(f"{done}/{total} {printable(what)}", False)


@contextmanager
def count_progress(console: Console, quiet: bool, what: str) -> Iterator[Callable[[int, int], None] | None]:
    """A bar for something that is counted; nothing where standard error is no terminal."""
    if quiet or not console.is_terminal:
        yield None
        return
    with _bar(console, "{task.description}") as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, total=total, completed=done)


def _log(console: Console) -> Callable[[str, bool], None]:
    """log(line, always): prints the line if `LOG_SECONDS` have passed since the last one, or `always`."""
    last = time.monotonic()

    def log(line: str, always: bool) -> None:
        nonlocal last
        if always or time.monotonic() - last >= LOG_SECONDS:
            last = time.monotonic()
            console.print(line, highlight=False, markup=False, soft_wrap=True)

    return log


def _bar(console: Console, description: str) -> Progress:
    return Progress(
        TextColumn(description, markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )


def _bake_line(done: LayerDone) -> str:
    error = "" if done.relative_error is None else f" error {done.relative_error:.4f}"
    if done.proxy_error is not None:
        error = f" output error {done.proxy_error:.4f}"
    kept = " (kept)" if done.resumed else ""
    return f"{done.key} {done.rung}{error}{kept}"
