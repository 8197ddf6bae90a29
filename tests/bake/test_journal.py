"""What a killed bake left: kept layers come back exactly, anything else is done anew, and only one process holds the journal."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from arctool.bake import journal as journal_room
from arctool.bake.journal import Journal
from arctool.bake.search.rounding import RoundedLayer, RungTools, round_layer
from arctool.errors import StorageError
from arctool.quant.codebooks import rung
from arctool.quant.hadamard import Rotation

SHAPE = (8, 32)
ROTATION = Rotation.seeded(3, "a.b", *SHAPE)


@pytest.fixture(scope="module")
def tools() -> RungTools:
    return RungTools.of(rung("qtip4"))


@pytest.fixture(scope="module")
def layer(tools: RungTools) -> RoundedLayer:
    weight = np.random.default_rng(7).standard_normal(SHAPE).astype(np.float32)
    with ThreadPoolExecutor(1) as pool:
        return round_layer(weight, "a.b", tools, ROTATION, pool)


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with Journal(tmp_path / "out", {"bake": 1}) as opened:
        yield opened


def load(journal: Journal, tools: RungTools, index: int = 4) -> RoundedLayer | None:
    return journal.load(index, SHAPE, tools, ROTATION)


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


def test_what_feedback_did_to_a_layer_is_kept_with_it(journal: Journal, tools: RungTools, layer: RoundedLayer) -> None:
    assert (layer.proxy_error, layer.note, layer.dropped) == (None, None, 0)
    fed = replace(layer, proxy_error=0.125, note="rounded without feedback: × 2", dropped=17)
    for index, kept in ((4, layer), (5, fed)):
        journal.store(index, kept)
        found = load(journal, tools, index)
        assert found is not None
        assert (found.proxy_error, found.note, found.dropped) == (kept.proxy_error, kept.note, kept.dropped)


ARRAY = np.random.default_rng(1).standard_normal((3, 5, 4)).astype(np.float32)


def array_of(journal: Journal, name: str = "states") -> tuple[int | None, NDArray[np.float32]]:
    """The index under which an array like ARRAY is kept, and what became of a buffer of ones that it was to fill."""
    into = np.ones_like(ARRAY)
    return journal.load_array(name, into), into


def test_a_kept_array_comes_back_with_its_index_and_the_next_one_replaces_it(tmp_path: Path, journal: Journal) -> None:
    assert array_of(journal)[0] is None
    for index, values in ((0, ARRAY), (7, -ARRAY), (8, np.asfortranarray(ARRAY * 2))):
        journal.store_array("states", index, values)
        found, into = array_of(journal)
        assert found == index
        np.testing.assert_array_equal(into, values)
    assert sorted(path.name for path in journal.directory.iterdir()) == ["bake.json", "states.array"]
    assert (journal.finished(), journal.stored_bytes()) == (0, 32 + 8 + ARRAY.nbytes)
    ids = np.arange(6, dtype=np.int32).reshape(2, 3)
    journal.store_array("ids", 0, ids)
    into = np.zeros_like(ids)
    assert journal.load_array("ids", into) == 0
    np.testing.assert_array_equal(into, ids)


def test_a_large_array_may_lie_in_a_file(tmp_path: Path, journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_room, "READ_BYTES", 7)
    mapped = np.memmap(tmp_path / "mapped", np.float32, "w+", shape=ARRAY.shape)
    mapped[:] = ARRAY
    journal.store_array("states", 2, mapped)
    mapped[:] = 0
    assert journal.load_array("states", mapped) == 2
    np.testing.assert_array_equal(mapped, ARRAY)


def test_an_array_with_any_changed_byte_or_of_another_size_name_or_bake_is_not_there(tmp_path: Path, journal: Journal) -> None:
    journal.store_array("states", 3, ARRAY)
    path = journal.directory / "states.array"
    data = path.read_bytes()
    hurt = [data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] for at in range(len(data))]
    for wrong in (*hurt, *(data[:size] for size in range(0, len(data), 9)), data + b"\0", b""):
        path.write_bytes(wrong)
        found, into = array_of(journal)
        assert found is None
        assert (into == 1).all()
    path.write_bytes(data)
    assert array_of(journal)[0] == 3
    for shape in ((3, 5, 3), (3, 5, 5), (0,)):
        assert journal.load_array("states", np.zeros(shape, np.float32)) is None
    (journal.directory / "truth.array").write_bytes(data)
    assert array_of(journal, "truth")[0] is None
    with Journal(tmp_path / "other", {"bake": 2}) as other:
        (other.directory / path.name).write_bytes(data)
        assert array_of(other)[0] is None


def test_another_bakes_array_goes_with_its_layers(tmp_path: Path, layer: RoundedLayer) -> None:
    for identity, kept in (({"seed": 1}, None), ({"seed": 1}, 6), ({"seed": 2}, None)):
        with Journal(tmp_path / "out", identity) as opened:
            assert array_of(opened)[0] == kept
            opened.store(4, layer)
            opened.store_array("states", 6, ARRAY)


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
