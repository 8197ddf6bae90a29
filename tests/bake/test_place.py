"""What is asked of an output's place before work begins: is this bake there already and sound, may it be replaced, is there room."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from arctool.bake import calibrated, pipeline, place, provenance
from arctool.bake.calibrated import disk_bytes
from arctool.bake.calibration import stream as calibration
from arctool.bake.calibration.token_set import choose_calibration
from arctool.bake.pipeline import BakeResult, bake
from arctool.bake.place import check_room, peak_bytes
from arctool.bake.recipe import Recipe, load_recipe
from arctool.bake.source.checkpoint import open_checkpoint
from arctool.errors import SourceError, StorageError
from arctool.quant.codebooks import SHIPPED_TABLES, SUM2_CONSTANTS, SUM2_SHA256
from arctool.uqff.verify import verify

QTIP4 = Recipe.uniform("qtip4")


def baked(model: Path, output: Path, recipe: Recipe = QTIP4, *, overwrite: bool = False) -> BakeResult:
    with open_checkpoint(os.fsdecode(model)) as checkpoint:
        return bake(checkpoint, output, recipe, overwrite=overwrite)


def tree(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize("name", ["qtip4-0.uqff", "residual.safetensors", "config.json", "tokenizer.json"])
def test_a_damaged_artifact_is_not_called_finished_and_force_bakes_it_anew(tiny_llama: Path, tmp_path: Path, name: str) -> None:
    baked(tiny_llama, tmp_path / "a")
    whole = tree(tmp_path / "a")
    path = tmp_path / "a" / name
    path.write_bytes(whole[name][:-40] + bytes([whole[name][-40] ^ 1]) + whole[name][-39:])
    with pytest.raises(StorageError, match=r"/a: exists but is damaged: .*(arctool verify|not valid JSON).*--force"):
        baked(tiny_llama, tmp_path / "a")
    baked(tiny_llama, tmp_path / "a", overwrite=True)
    assert tree(tmp_path / "a") == whole


def test_an_artifact_whose_report_is_damaged_is_neither_finished_nor_replaced(tiny_llama: Path, tmp_path: Path) -> None:
    baked(tiny_llama, tmp_path / "a")
    (tmp_path / "a" / "uqff_report.json").write_text("{")
    before = tree(tmp_path / "a")
    with pytest.raises(StorageError, match=r"/a: exists but is damaged: .*uqff_report\.json"):
        baked(tiny_llama, tmp_path / "a")
    with pytest.raises(StorageError, match=r"no artifact that says which files are its own .*uqff_report\.json"):
        baked(tiny_llama, tmp_path / "a", overwrite=True)
    assert tree(tmp_path / "a") == before


def test_another_algorithm_is_another_bake(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = baked(tiny_llama, tmp_path / "a").report
    assert verify(tmp_path / "a").container.passed
    assert json.loads((tmp_path / "a" / "uqff_report.json").read_text())["arctool"]["algorithm"] == provenance.ROUNDING
    assert baked(tiny_llama, tmp_path / "a").report == report
    monkeypatch.setattr(provenance, "ROUNDING", "round-rows-0")
    with pytest.raises(StorageError, match="already exists and is not this bake's"):
        baked(tiny_llama, tmp_path / "a")


def test_another_table_is_another_bake(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    baked(tiny_llama, tmp_path / "a", Recipe.uniform("qtip4b"))
    monkeypatch.setitem(SUM2_CONSTANTS, 8, SUM2_CONSTANTS[4])
    with pytest.raises(StorageError, match="already exists and is not this bake's"):
        baked(tiny_llama, tmp_path / "a", Recipe.uniform("qtip4b"))


def test_the_report_names_the_tables_that_were_used(tiny_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("0: {isq: qtip2}\n")
    baked(tiny_llama, tmp_path / "a", load_recipe(tmp_path / "r.yaml", "qtip4b"))
    tables = json.loads((tmp_path / "a" / "uqff_report.json").read_text())["arctool"]["tables"]
    assert tables == {"qtip2": SHIPPED_TABLES["K4V2L16"].sha256, "qtip4b": SUM2_SHA256["K8V2L16"]}


def test_the_name_of_the_recipe_file_moves_no_byte(tiny_llama: Path, tmp_path: Path) -> None:
    text = "0: {isq: qtip2-v4}\nrules: [{match: '*.v_proj', isq: qtip3}]\n"
    found = []
    for name in ("one.yaml", "fallback.yaml"):
        (tmp_path / name).write_text(text)
        baked(tiny_llama, tmp_path / name[:3], load_recipe(tmp_path / name, "qtip4"))
        found.append(tree(tmp_path / name[:3]))
    assert found[0] == found[1]
    assert json.loads(found[0]["uqff_report.json"])["outputs"][0]["fallback_count"] == 0
    assert baked(tiny_llama, tmp_path / "one", load_recipe(tmp_path / "fallback.yaml", "qtip4")).resumed == 21


@pytest.mark.parametrize("name", ["notes.txt", "thesis.json", "extra.safetensors", "older-0.uqff"])
def test_a_file_that_the_old_report_does_not_account_for_is_never_removed(tiny_llama: Path, tmp_path: Path, name: str) -> None:
    baked(tiny_llama, tmp_path / "a")
    (tmp_path / "a" / name).write_text("precious")
    before = tree(tmp_path / "a")
    with pytest.raises(StorageError, match=rf"/a/{name}: belongs to no artifact"):
        baked(tiny_llama, tmp_path / "a", overwrite=True)
    assert tree(tmp_path / "a") == before


def test_a_folder_of_shards_without_a_report_is_not_replaced(tiny_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "qtip4-0.uqff").write_text("precious")
    with pytest.raises(StorageError, match=r"qtip4-0\.uqff and is no artifact"):
        baked(tiny_llama, tmp_path / "a", overwrite=True)
    assert os.listdir(tmp_path / "a") == ["qtip4-0.uqff"]


def test_an_old_artifact_whose_replacement_died_half_way_is_brought_back_first(tiny_llama: Path, tmp_path: Path) -> None:
    baked(tiny_llama, tmp_path / "a")
    whole = tree(tmp_path / "a")
    (tmp_path / "a").rename(tmp_path / ".a.arctool-old-00000000")
    assert baked(tiny_llama, tmp_path / "a").resumed == 21
    assert tree(tmp_path / "a") == whole
    assert os.listdir(tmp_path) == ["a"]


def test_a_model_folder_whose_name_is_no_text_bakes_under_a_printable_one(copy_checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    folder = Path(os.fsdecode(bytes(tmp_path / "caf") + b"\xe9\x1b[31m"))
    copy_checkpoint("llama").rename(folder)
    assert baked(folder, tmp_path / "a").report.base_model == "caf\ufffd\ufffd[31m"
    assert baked(folder, tmp_path / "a").resumed == 21


def test_the_peak_on_the_disk_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    assert peak_bytes([]) == 0
    assert peak_bytes([(100, False), (30, True), (20, True)]) == 50 + 2 * 150
    monkeypatch.setattr(place, "SHARD_BYTES", 100)
    # The first shard of 90 is sealed beside a journal of 90; the second of 60 beside a journal of 150 and the first.
    assert peak_bytes([(60, True), (30, True), (60, True)]) == max(90 + 180, 150 + 90 + 120)
    assert peak_bytes([(90, True), (20, True)]) == max(90 + 180, 110 + 90 + 40)
    assert peak_bytes([(300, False), (5, True)]) == 600


def test_a_disk_that_is_clearly_too_small_is_named_before_the_first_layer(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def free(blocks: int) -> None:
        monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bfree=blocks, f_frsize=1, f_blocks=1 << 40))

    monkeypatch.setattr(calibrated, "round_layer", None)
    # Two layers of seven matrices, 4 bits a weight and a scale a row, three times; embedding and head in blocks of 34 bytes, twice.
    shapes = [(64, 64), (32, 64), (32, 64), (64, 64), (96, 64), (96, 64), (64, 96)]
    quantised = 2 * sum(rows * (columns // 2 + 4) for rows, columns in shapes)
    need = 3 * quantised + 2 * (2 * 512 * 2 * 34)
    free(need - 1)
    with pytest.raises(StorageError, match=rf"/a: cannot write: No space left on device.* {need} bytes .* {need - 1} are free"):
        baked(tiny_llama, tmp_path / "a")
    assert os.listdir(tmp_path) == []
    free(need)
    with pytest.raises(TypeError, match="NoneType"):
        baked(tiny_llama, tmp_path / "a")


def test_what_calibration_needs_on_the_disk_counts(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two streams of 64 wide states, one of them twice; where nothing may stay in memory, also states and down's inputs, 96 wide."""
    with open_checkpoint(str(tiny_llama)) as checkpoint:
        assert disk_bytes(checkpoint.config, 1000) == 3 * 4 * 1000 * 64
        monkeypatch.setattr(calibration, "IN_MEMORY", 4 * 1000 * 64)
        assert disk_bytes(checkpoint.config, 1000) == 3 * 4 * 1000 * 64 + 2 * 4 * 1000 * 96
        monkeypatch.setattr(calibration, "IN_MEMORY", 0)
        assert disk_bytes(checkpoint.config, 1000) == 3 * 4 * 1000 * 64 + 2 * 4 * 1000 * (64 + 96)
        asked = []
        monkeypatch.setattr(pipeline, "check_room", lambda output, layers, kept, beside: asked.append(beside))
        (tmp_path / "text.txt").write_text("It is a truth universally acknowledged. " * 40)
        chosen = choose_calibration(checkpoint, str(tmp_path / "text.txt"), 256)
        bake(checkpoint, tmp_path / "a", QTIP4, calibration=chosen)
        bake(checkpoint, tmp_path / "b", QTIP4)
        assert asked == [disk_bytes(checkpoint.config, chosen.tokens), 0]
    system = SimpleNamespace(f_bfree=599, f_frsize=1, f_blocks=1 << 40)
    monkeypatch.setattr(os, "statvfs", lambda path: system)
    with pytest.raises(StorageError, match=r"needs 600 bytes .* 300 for calibration"):
        check_room(tmp_path / "c", [(150, False)], 0, 300)
    system.f_bfree = 600
    check_room(tmp_path / "c", [(150, False)], 0, 300)


def test_room_that_the_journal_has_taken_already_counts(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(pipeline, "check_room", lambda output, layers, kept, beside: asked.append(kept))

    def stop(done: pipeline.LayerDone) -> None:
        if done.index == 6:
            raise KeyboardInterrupt

    with open_checkpoint(str(tiny_llama)) as checkpoint:
        with pytest.raises(Exception, match="interrupted"):
            bake(checkpoint, tmp_path / "a", QTIP4, progress=stop)
        kept = sum(path.stat().st_size for path in tmp_path.glob(".a.arctool-journal/*.layer"))
        bake(checkpoint, tmp_path / "a", QTIP4)
    assert asked == [0, kept]
    assert kept > 0


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight"])
def test_a_value_that_bf16_cannot_hold_is_refused_by_tensor(copy_checkpoint: Callable[[str], Path], tmp_path: Path, name: str) -> None:
    model = copy_checkpoint("llama")
    weights = load_file(model / "model.safetensors")
    weights[name][3, 5] = -np.finfo(np.float32).max
    save_file(weights, model / "model.safetensors")
    with pytest.raises(SourceError, match=rf"model\.safetensors: {name}: the value -3\.4\d*e\+38 at \[3, 5\] is larger than bf16"):
        baked(model, tmp_path / "a", Recipe.uniform("bf16"))


@pytest.mark.filterwarnings("error")
def test_a_layer_that_f32_cannot_rotate_is_refused_by_file_and_tensor_and_not_kept(
    copy_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    model = copy_checkpoint("llama")
    weights = load_file(model / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    weights[name][:] = np.float32(3e38)
    save_file(weights, model / "model.safetensors")
    with pytest.raises(SourceError, match=rf"model\.safetensors: {name}: holds values up to 3e\+38"):
        baked(model, tmp_path / "a")
    assert not list(tmp_path.glob("*/00001.layer"))
