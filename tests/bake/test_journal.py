"""What a killed bake left: kept layers come back exactly, anything else is done anew, and only one process holds the journal."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from arctool.bake.journal import Journal
from arctool.bake.rounding import RoundedLayer, RungTools, round_layer
from arctool.errors import StorageError
from arctool.quant.codebooks import rung

SHAPE = (8, 32)


@pytest.fixture(scope="module")
def tools() -> RungTools:
    return RungTools.of(rung("qtip4"))


@pytest.fixture(scope="module")
def layer(tools: RungTools) -> RoundedLayer:
    weight = np.random.default_rng(7).standard_normal(SHAPE).astype(np.float32)
    with ThreadPoolExecutor(1) as pool:
        return round_layer(weight, "a.b", tools, 3, pool)


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with Journal(tmp_path / "out", {"bake": 1}) as opened:
        yield opened


def load(journal: Journal, tools: RungTools, index: int = 4) -> RoundedLayer | None:
    return journal.load(index, "a.b", SHAPE, tools, 3)


def test_a_kept_layer_comes_back_bit_for_bit(journal: Journal, tools: RungTools, layer: RoundedLayer) -> None:
    assert load(journal, tools) is None
    journal.store(4, layer)
    assert journal.finished() == 1
    found = load(journal, tools)
    assert found is not None
    assert found.relative_error == layer.relative_error
    assert found.tensor.packed.tobytes() == layer.tensor.packed.tobytes()
    assert found.tensor.scales.tobytes() == layer.tensor.scales.tobytes()
    assert found.tensor.decode().tobytes() == layer.tensor.decode().tobytes()
    assert load(journal, tools, 5) is None


def test_any_changed_byte_and_any_shorter_file_is_done_anew(journal: Journal, tools: RungTools, layer: RoundedLayer) -> None:
    journal.store(4, layer)
    (path,) = journal.directory.glob("*.layer")
    data = path.read_bytes()
    for at in range(0, len(data), 7):
        path.write_bytes(data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :])
        assert load(journal, tools) is None, at
        path.write_bytes(data[:at])
        assert load(journal, tools) is None, at
    path.write_bytes(data + b"\0")
    assert load(journal, tools) is None
    path.write_bytes(data)
    assert load(journal, tools) is not None


def test_a_layer_of_another_place_or_bake_does_not_fit(tmp_path: Path, journal: Journal, tools: RungTools, layer: RoundedLayer) -> None:
    journal.store(4, layer)
    (path,) = journal.directory.glob("*.layer")
    path.with_name("00005.layer").write_bytes(path.read_bytes())
    assert load(journal, tools, 5) is None
    with Journal(tmp_path / "other", {"bake": 2}) as other:
        (other.directory / path.name).write_bytes(path.read_bytes())
        assert load(other, tools) is None


def test_the_same_bake_finds_its_layers_and_another_finds_none(tmp_path: Path, tools: RungTools, layer: RoundedLayer) -> None:
    for identity, kept in (({"seed": 1}, 0), ({"seed": 1}, 1), ({"seed": 2}, 0), ({"seed": 1}, 0)):
        with Journal(tmp_path / "out", identity) as journal:
            assert journal.finished() == kept
            journal.store(4, layer)
    assert os.listdir(tmp_path) == [".out.arctool-journal"]


def test_only_one_process_holds_it_and_its_layers_survive_the_other(tmp_path: Path, journal: Journal, layer: RoundedLayer) -> None:
    journal.store(4, layer)
    with (
        pytest.raises(StorageError, match=r"\.out\.arctool-journal: another bake to the same output is running"),
        Journal(tmp_path / "out", {}),
    ):
        pass
    Journal(tmp_path / "out", {}).discard()
    assert journal.finished() == 1


def test_a_journal_without_a_finished_layer_goes_and_one_with_stays(tmp_path: Path, layer: RoundedLayer) -> None:
    with pytest.raises(ZeroDivisionError), Journal(tmp_path / "out", {}):
        raise ZeroDivisionError
    assert os.listdir(tmp_path) == []
    with Journal(tmp_path / "out", {}) as journal:
        journal.store(0, layer)
    assert os.listdir(tmp_path) == [".out.arctool-journal"]
    Journal(tmp_path / "out", {}).discard()
    assert os.listdir(tmp_path) == []
    Journal(tmp_path / "out", {}).discard()


@pytest.mark.parametrize("call", ["fsync", "replace", "mkdir"])
def test_a_refusing_disk_is_one_error_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, call, refuse)
    with pytest.raises(StorageError, match=f"{tmp_path}.*No space left on device"), Journal(tmp_path / "out", {}):
        pass
    monkeypatch.undo()
    assert os.listdir(tmp_path) == []


def test_a_layer_that_the_disk_refuses_leaves_the_others(
    journal: Journal, monkeypatch: pytest.MonkeyPatch, tools: RungTools, layer: RoundedLayer
) -> None:
    journal.store(4, layer)

    def refuse(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(StorageError, match=r"00005\.layer: cannot write: No space left on device"):
        journal.store(5, layer)
    monkeypatch.undo()
    assert sorted(path.name for path in journal.directory.iterdir()) == ["00004.layer", "bake.json"]
    assert load(journal, tools) is not None


def test_a_parent_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=rf"^{tmp_path}/file: cannot write"), Journal(tmp_path / "file" / "out", {}):
        pass
