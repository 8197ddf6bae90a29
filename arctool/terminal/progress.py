"""Progress on standard error: a bar with time left on a terminal, a line now and then in a log, nothing when asked to be quiet."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from arctool.bake.pipeline import LayerDone
from arctool.bake.pipeline import Progress as BakeProgress
from arctool.uqff.verify import Progress as VerifyProgress

LOG_SECONDS = 10.0
"""Between two lines where standard error is no terminal."""


@contextmanager
def bake_progress(console: Console, quiet: bool) -> Iterator[BakeProgress | None]:
    """Shows layer, rung, error and, on a terminal, the time left."""
    if quiet:
        yield None
    elif console.is_terminal:
        with _bar(console, "{task.description}") as progress:
            task = progress.add_task("baking", total=None)

            def show(done: LayerDone) -> None:
                progress.update(task, total=done.total, completed=done.index, description=_bake_line(done))

            yield show
    else:
        last = time.monotonic()

        def log(done: LayerDone) -> None:
            nonlocal last
            if time.monotonic() - last >= LOG_SECONDS or done.index == done.total:
                last = time.monotonic()
                console.print(f"{done.index}/{done.total} {_bake_line(done)}", highlight=False, markup=False, soft_wrap=True)

        yield log


@contextmanager
def verify_progress(console: Console, quiet: bool) -> Iterator[VerifyProgress | None]:
    """One bar a question; nothing where standard error is no terminal, since a verification is short."""
    if quiet or not console.is_terminal:
        yield None
        return
    with _bar(console, "{task.description}") as progress:
        tasks: dict[str, int] = {}

        def show(question: str, done: int, total: int) -> None:
            if question not in tasks:
                tasks[question] = int(progress.add_task(question, total=total))
            progress.update(tasks[question], completed=done)  # type: ignore[arg-type]  # TaskID is an int by another name

        yield show


def _bar(console: Console, description: str) -> Progress:
    return Progress(
        TextColumn(description),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )


def _bake_line(done: LayerDone) -> str:
    error = "" if done.relative_error is None else f" error {done.relative_error:.4f}"
    kept = " (kept)" if done.resumed else ""
    return f"{done.key} {done.rung}{error}{kept}"
