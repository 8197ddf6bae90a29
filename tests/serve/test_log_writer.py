"""A log that cannot be written costs lines, never the server: full disks, pipes that nobody reads or that break, files that move away."""

from __future__ import annotations

import contextlib
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from arctool.errors import StorageError
from arctool.serve.log_writer import LogWriter, open_log


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def open_in(folder: Path) -> int:
    """How many descriptors of this process are open on files in `folder`."""
    count = 0
    for entry in os.listdir("/proc/self/fd"):
        try:
            count += os.readlink(f"/proc/self/fd/{entry}").startswith(f"{folder}/")
        except FileNotFoundError:  # the listing's own
            continue
    return count


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    read, write = os.pipe()
    yield read, write
    for end in (read, write):
        with contextlib.suppress(OSError):  # the test has closed it
            os.close(end)


def test_lines_of_many_threads_arrive_whole_each_threads_in_order(tmp_path: Path) -> None:
    log = open_log(tmp_path / "log")
    threads = [threading.Thread(target=lambda i=i: [log.write(f"{i} {j} ü" + "x" * 200) for j in range(200)]) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log.close()
    lines = (tmp_path / "log").read_text(encoding="utf-8").splitlines()
    assert log.dropped == 0
    assert len(lines) == 800
    for i in range(4):
        assert [line for line in lines if line.startswith(f"{i} ")] == [f"{i} {j} ü" + "x" * 200 for j in range(200)]


def test_a_log_goes_on_where_it_ended(tmp_path: Path) -> None:
    for text in ("first", "second"):
        log = open_log(tmp_path / "log")
        log.write(text)
        log.close()
    assert (tmp_path / "log").read_text() == "first\nsecond\n"


def test_a_line_stays_one_line_whatever_is_in_it(tmp_path: Path) -> None:
    log = open_log(tmp_path / "log")
    log.write("a\nb\ud800c")
    log.close()
    assert (tmp_path / "log").read_bytes() == b"a\\nb\\ud800c\n"


def test_a_full_disk_costs_lines_and_nothing_else() -> None:
    log = open_log(Path("/dev/full"))
    for i in range(10):
        log.write(f"line {i}")
    until(lambda: log.dropped == 10)
    log.write("another")
    log.close()
    assert log.dropped == 11


def test_a_disk_that_has_room_again_gets_whole_lines_again(tmp_path: Path) -> None:
    """The limit is far behind what else this process writes, and the file begins there."""
    path, start = tmp_path / "log", 1 << 30
    with path.open("wb") as file:
        file.truncate(start)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    log = open_log(path)
    resource.setrlimit(resource.RLIMIT_FSIZE, (start + 10, hard))
    try:
        for text in ("first", "second one is cut", "third"):
            log.write(text)
        until(lambda: log.dropped == 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    log.write("fourth")
    log.write("fifth")
    log.close()
    assert log.dropped == 2
    with path.open("rb") as file:
        file.seek(start)
        assert file.read() == b"first\nseco\nfourth\nfifth\n"


def test_a_pipe_that_nobody_reads_never_makes_a_caller_wait(pipe: tuple[int, int]) -> None:
    read, write = pipe
    log = LogWriter(write, capacity=50)
    slowest = 0.0
    for i in range(3000):
        began = time.perf_counter()
        log.write(f"{i:5} " + "x" * 10_000)
        slowest = max(slowest, time.perf_counter() - began)
    assert slowest < 0.5
    assert log.dropped > 2000
    began = time.perf_counter()
    log.close(timeout=0.05)
    assert time.perf_counter() - began < 5
    assert log._thread.is_alive(), "it waits for a reader"
    lines = 0
    os.set_blocking(read, False)
    while log._thread.is_alive() or lines + log.dropped < 3000:  # once somebody reads, it ends
        try:
            lines += os.read(read, 1 << 20).count(b"\n")
        except BlockingIOError:
            time.sleep(0.001)
    assert lines + log.dropped == 3000
    assert lines > 1


def test_a_pipe_that_is_read_slowly_gets_every_line(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    read = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    log = open_log(tmp_path / "pipe")
    for _ in range(40):
        log.write("x" * 9_999)  # more than a pipe holds
    found = 0
    while found < 400_000:
        try:
            found += len(os.read(read, 5_000))
        except BlockingIOError:
            time.sleep(0.001)
    log.close()
    os.close(read)
    assert log.dropped == 0


def test_a_reader_that_dies_costs_lines_and_nothing_else(pipe: tuple[int, int]) -> None:
    read, write = pipe
    log = LogWriter(write)
    log.write("heard")
    assert os.read(read, 100) == b"heard\n"
    os.close(read)
    log.write("unheard")
    until(lambda: log.dropped == 1)
    log.close()


def test_a_named_pipe_without_a_reader_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StorageError, match=r"pipe: cannot write the log there: "):
        open_log(tmp_path / "pipe")


@pytest.mark.parametrize("path", ["missing/log", "."])
def test_a_place_where_no_file_can_be_is_refused_by_name(tmp_path: Path, path: str) -> None:
    with pytest.raises(StorageError, match=r"^.+: cannot write the log there: (No such file|Is a directory)"):
        open_log(tmp_path / path)


def test_a_log_that_was_moved_away_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = open_log(path)
    log.write("old")
    until(lambda: path.exists() and path.read_text() == "old\n")
    path.rename(tmp_path / "log.1")
    log.write("old too")
    until(lambda: (tmp_path / "log.1").read_text() == "old\nold too\n")
    assert open_in(tmp_path) == 1
    log.reopen()
    log.write("new")
    until(lambda: path.exists() and path.read_text() == "new\n")
    assert open_in(tmp_path) == 1
    log.close()
    assert open_in(tmp_path) == 0
    assert path.read_text() == "new\n"
    assert (tmp_path / "log.1").read_text() == "old\nold too\n"


def test_a_log_that_cannot_begin_anew_goes_on_in_the_old_file(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    log = open_log(folder / "log")
    folder.rename(tmp_path / "away")
    log.reopen()
    log.write("still here")
    log.close()
    assert (tmp_path / "away" / "log").read_text() == "still here\n"
    assert log.dropped == 0


def test_standard_error_is_never_closed_nor_reopened(capfd: pytest.CaptureFixture[str]) -> None:
    log = open_log(None)
    log.reopen()
    log.write("to the terminal")
    log.close()
    os.write(2, b"after\n")
    assert capfd.readouterr().err == "to the terminal\nafter\n"


def test_closing_ends_the_thread_and_the_file_and_what_comes_later_is_dropped(tmp_path: Path) -> None:
    log = open_log(tmp_path / "log")
    log.write("before")
    log.close()
    log.close()
    log.write("after")
    assert not log._thread.is_alive()
    assert log.dropped == 1
    assert open_in(tmp_path) == 0
    assert (tmp_path / "log").read_text() == "before\n"
