"""Two bakes that meet at the end of one of them: whoever holds a lock holds the directory that is there now."""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path

import pytest

from arctool.bake import journal as journals
from arctool.bake.journal import Journal
from arctool.errors import StorageError
from arctool.uqff.locks import is_at, try_lock


@pytest.mark.parametrize("made_anew", [True, False])
def test_a_lock_on_a_directory_that_was_removed_while_waiting_is_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made_anew: bool
) -> None:
    place = tmp_path / "d"
    place.mkdir()
    flock = fcntl.flock

    def late(handle: int, how: int) -> None:
        shutil.rmtree(place)
        if made_anew:
            place.mkdir()
        flock(handle, how)

    monkeypatch.setattr(fcntl, "flock", late)
    before = len(os.listdir("/proc/self/fd"))
    assert try_lock(place) is None
    assert place.exists() == made_anew
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_bake_that_opens_the_journal_as_another_removes_it_gets_a_journal_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, gone = journals.try_lock, []

    def late(directory: Path) -> int | None:
        if not gone:
            gone.append(directory)
            shutil.rmtree(directory)
        return real(directory)

    monkeypatch.setattr(journals, "try_lock", late)
    with Journal(tmp_path / "out", {}) as journal:
        assert journal.directory.is_dir()
        with pytest.raises(StorageError, match="another bake"), Journal(tmp_path / "out", {}):
            pass
    assert len(gone) == 1


def test_a_bake_that_has_removed_its_journal_leaves_the_next_ones_alone(tmp_path: Path) -> None:
    with Journal(tmp_path / "out", {}) as first:
        first.remove()
        second = Journal(tmp_path / "out", {})
        second.__enter__()
    assert second.directory.is_dir()
    handle = os.open(second.directory, os.O_RDONLY)
    assert is_at(handle, second.directory)
    os.close(handle)
    second.__exit__(None, None, None)
    assert os.listdir(tmp_path) == []
