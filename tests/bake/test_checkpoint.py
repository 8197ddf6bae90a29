"""A checkpoint is read exactly, one tensor at a time, or refused in one line that names the file and the tensor."""

from __future__ import annotations

import json
import os
import shutil
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file
from safetensors.torch import save_file as save_torch
from tiny_gguf import write_gguf

from arctool.bake.source.checkpoint import fingerprint, open_checkpoint
from arctool.bake.source.stored import Source, StoredTensor
from arctool.errors import SourceError, UsageError

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
Copy = Callable[[str], Path]


def refusal(source: Path | str) -> str:
    """The one-line message with which `source` is refused."""
    with pytest.raises(SourceError) as caught:
        open_checkpoint(str(source))
    message = str(caught.value)
    assert "\n" not in message
    assert caught.value.exit_code == 3
    return message


def edit_tensors(directory: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    tensors = load_file(directory / "model.safetensors")
    edit(tensors)
    save_file(tensors, directory / "model.safetensors")


def edit_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def shard(directory: Path) -> None:
    """Split model.safetensors of `directory` into two shards with an index."""
    tensors = load_file(directory / "model.safetensors")
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, keys in parts.items():
        save_file({key: tensors[key] for key in keys}, directory / file)
    weight_map = {key: file for file, keys in parts.items() for key in keys}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (directory / "model.safetensors").unlink()


# ---- reading


def test_every_tensor_of_every_architecture_is_read_exactly(tiny_checkpoint: Path) -> None:
    checkpoint = open_checkpoint(str(tiny_checkpoint))
    original = load_file(tiny_checkpoint / "model.safetensors")
    assert set(checkpoint.names()) == set(original)
    assert checkpoint.ignored == ()
    for name, values in original.items():
        np.testing.assert_array_equal(checkpoint.tensor(name), values)
        assert checkpoint.stored_dtype(name) == "F32"


def test_a_checkpoint_serves_weights_and_biases_by_module(tiny_checkpoints: dict[str, Path]) -> None:
    original = load_file(tiny_checkpoints["qwen2"] / "model.safetensors")
    with open_checkpoint(str(tiny_checkpoints["qwen2"])) as checkpoint:
        key = "model.layers.2.self_attn.v_proj"
        np.testing.assert_array_equal(checkpoint.weight(key).dense(), original[f"{key}.weight"])
        bias = checkpoint.bias(key)
        assert bias is not None
        np.testing.assert_array_equal(bias, original[f"{key}.bias"])
        assert checkpoint.bias("model.layers.2.mlp.up_proj") is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_tensors_are_widened_exactly(dtype: torch.dtype, copy_checkpoint: Copy) -> None:
    directory = copy_checkpoint("llama")
    narrow = {name: torch.from_numpy(values).to(dtype) for name, values in load_file(directory / "model.safetensors").items()}
    save_torch(narrow, directory / "model.safetensors")
    checkpoint = open_checkpoint(str(directory))
    for name, values in narrow.items():
        np.testing.assert_array_equal(checkpoint.tensor(name), values.float().numpy())


def test_a_sharded_checkpoint_reads_like_a_single_file(copy_checkpoint: Copy) -> None:
    directory = copy_checkpoint("llama")
    original = load_file(directory / "model.safetensors")
    shard(directory)
    checkpoint = open_checkpoint(str(directory))
    for name, values in original.items():
        np.testing.assert_array_equal(checkpoint.tensor(name), values)


def test_a_single_safetensors_file_of_another_name_is_found(copy_checkpoint: Copy) -> None:
    directory = copy_checkpoint("llama")
    (directory / "model.safetensors").rename(directory / "weights.safetensors")
    assert open_checkpoint(str(directory)).tensor(Q_PROJ).shape == (64, 64)


def test_opening_reads_no_tensor_and_reading_keeps_none(copy_checkpoint: Copy) -> None:
    directory = copy_checkpoint("llama")
    wide = 60_000
    edit_config(directory, vocab_size=wide)
    table = np.ones((wide, 64), np.float32)
    edit_tensors(directory, lambda t: t.update({"model.embed_tokens.weight": table, "lm_head.weight": table}))
    tracemalloc.start()
    try:
        checkpoint = open_checkpoint(str(directory))
        assert tracemalloc.get_traced_memory()[1] < table.nbytes // 2
        tracemalloc.reset_peak()
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            assert checkpoint.tensor(name).shape == (wide, 64)
        held, peak = tracemalloc.get_traced_memory()
        assert held < table.nbytes // 2
        assert peak < 2 * table.nbytes
    finally:
        tracemalloc.stop()


def test_rotary_buffers_are_tolerated_and_other_extras_are_listed(copy_checkpoint: Copy) -> None:
    directory = copy_checkpoint("llama")
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32), "vision.patch.weight": np.ones(2, np.float32)}
    edit_tensors(directory, lambda t: t.update(extra))
    assert open_checkpoint(str(directory)).ignored == ("vision.patch.weight",)


def test_a_head_that_the_config_ties_is_not_read(copy_checkpoint: Copy) -> None:
    directory = copy_checkpoint("qwen2")
    edit_tensors(directory, lambda t: t.update({"lm_head.weight": np.ones((512, 64), np.float32)}))
    checkpoint = open_checkpoint(str(directory))
    assert "lm_head.weight" not in checkpoint.names()
    assert checkpoint.ignored == ()


def test_tokenizer_files_are_carried_byte_for_byte(tiny_llama: Path) -> None:
    assets = open_checkpoint(str(tiny_llama)).assets
    assert set(assets) == {"tokenizer.json", "tokenizer_config.json", "generation_config.json"}
    assert assets["tokenizer.json"] == (tiny_llama / "tokenizer.json").read_bytes()


@pytest.mark.parametrize(
    ("file", "text", "licence"),
    [
        ("README.md", "---\nlicense: mit\nlanguage: [en]\n---\n# Model\n", "mit"),
        ("README.md", "---\r\nlicense: apache-2.0\r\n---\r\n", "apache-2.0"),
        ("README.md", "---\nlicense: [\n---\n", None),
        ("README.md", "# no front matter\nlicense: mit\n", None),
        ("LICENSE", "some text", "LICENSE"),
    ],
)
def test_the_licence_comes_from_the_model_card_or_the_licence_file(
    file: str, text: str, licence: str | None, copy_checkpoint: Copy
) -> None:
    directory = copy_checkpoint("llama")
    (directory / file).write_bytes(text.encode())
    assert open_checkpoint(str(directory)).terms.licence == licence


# ---- the fingerprint


def test_a_copy_has_the_same_fingerprint_and_every_change_another(copy_checkpoint: Copy, tiny_llama: Path, tmp_path: Path) -> None:
    first = open_checkpoint(str(tiny_llama)).fingerprint
    directory = copy_checkpoint("llama")
    os.utime(directory / "model.safetensors", (1, 1))
    assert open_checkpoint(str(directory)).fingerprint == first

    changed = {first}
    edit_tensors(directory, lambda t: t[Q_PROJ].__setitem__((3, 3), 7.0))
    changed.add(open_checkpoint(str(directory)).fingerprint)
    edit_config(directory, rope_theta=20000.0)
    changed.add(open_checkpoint(str(directory)).fingerprint)
    (directory / "generation_config.json").write_text("{}")
    changed.add(open_checkpoint(str(directory)).fingerprint)
    assert len(changed) == 4


def test_the_fingerprint_of_a_large_file_notices_every_changed_byte_and_the_length(tmp_path: Path) -> None:
    class NoTensors:
        entries: Mapping[str, StoredTensor] = {}

        def check_readable(self, name: str) -> None: ...

        def read(self, name: str, rows: slice = slice(None)) -> NDArray[np.float32]:
            raise KeyError(name)

    path = tmp_path / "large.safetensors"
    source = Source("large", {}, NoTensors(), {}, (path,))
    data = bytearray(9 << 20)
    seen = set()
    # 65 windows of 64 KiB fit into the file, so that a sample of it could miss the third.
    for change in (None, 0, 3_000_017, len(data) - 1):
        if change is not None:
            data[change] ^= 1
        path.write_bytes(data)
        seen.add(fingerprint(source))
    path.write_bytes(data + b"0")
    seen.add(fingerprint(source))
    assert len(seen) == 5


def test_opening_a_checkpoint_hashes_nothing_until_somebody_asks(copy_checkpoint: Copy) -> None:
    directory = copy_checkpoint("llama")
    checkpoint = open_checkpoint(str(directory))
    (directory / "model.safetensors").unlink()
    with pytest.raises(SourceError, match=r"model\.safetensors: cannot be read"):
        _ = checkpoint.fingerprint


def test_a_file_whose_name_is_no_text_has_a_fingerprint(copy_checkpoint: Copy) -> None:
    directory = copy_checkpoint("llama")
    (directory / "model.safetensors").rename(directory / os.fsdecode(b"caf\xe9.safetensors"))
    assert len(open_checkpoint(str(directory)).fingerprint) == 64


# ---- directories that are no usable model


def test_a_directory_without_config_is_no_model(tmp_path: Path) -> None:
    assert str(tmp_path) in (message := refusal(tmp_path))
    assert "config.json" in message


def test_a_missing_path_is_refused_and_never_taken_for_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_hub(repo: str, revision: str | None = None) -> Path:
        raise AssertionError(f"asked the hub for {repo}")

    monkeypatch.setattr("arctool.bake.source.checkpoint.fetch_snapshot", no_hub)
    for source in (tmp_path / "absent", "./absent", "../absent", "~/absent/model", "a/b/c", "absent", "models/x.gguf", "", "a/b@"):
        assert "no such file or directory" in refusal(source)


def test_a_hub_id_reaches_the_hub_with_its_revision(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def hub(repo: str, revision: str | None = None) -> Path:
        asked.append((repo, revision))
        return tiny_llama

    monkeypatch.setattr("arctool.bake.source.checkpoint.fetch_snapshot", hub)
    assert open_checkpoint("org/name-1.5").origin == "org/name-1.5"
    open_checkpoint("org/name@refs/pr/1")
    open_checkpoint("org/name", revision="v2")
    assert asked == [("org/name-1.5", None), ("org/name", "refs/pr/1"), ("org/name", "v2")]
    with pytest.raises(UsageError, match="v2"):
        open_checkpoint("org/name@v1", revision="v2")
    with pytest.raises(UsageError, match="v2"):
        open_checkpoint(str(tiny_llama), revision="v2")


def test_a_directory_with_only_pickles_is_refused_with_the_reason(copy_checkpoint: Copy) -> None:
    directory = copy_checkpoint("llama")
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    assert "pytorch_model.bin" in (message := refusal(directory))
    assert "run code" in message


@pytest.mark.parametrize("name", ["model.bin", "model.pth", "model.safetensors", "notes.txt"])
def test_a_file_that_is_no_gguf_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"\x80\x02 something")
    assert name in refusal(tmp_path / name)


def test_a_directory_with_only_a_gguf_file_says_how_to_use_it(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    assert str(tmp_path / "m.gguf") in refusal(tmp_path)


def test_an_artifact_is_not_a_source(copy_checkpoint: Copy) -> None:
    directory = copy_checkpoint("llama")
    (directory / "qtip4-0.uqff").write_bytes(b"")
    assert "artifact" in refusal(directory)


def test_a_directory_without_weights_or_with_too_many_is_refused(copy_checkpoint: Copy) -> None:
    directory = copy_checkpoint("llama")
    (directory / "model.safetensors").rename(directory / "a.safetensors")
    shutil.copy(directory / "a.safetensors", directory / "b.safetensors")
    assert "model.safetensors.index.json" in refusal(directory)
    (directory / "a.safetensors").unlink()
    (directory / "b.safetensors").unlink()
    assert "no *.safetensors" in refusal(directory)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize("text", ["{", "[1]", "\xff", "[" * 100_000], ids=["cut", "list", "latin-1", "deep"])
def test_a_file_that_is_not_a_json_object_is_named(name: str, text: str, copy_checkpoint: Copy) -> None:
    directory = copy_checkpoint("llama")
    (directory / name).write_bytes(text.encode("latin-1"))
    assert name in refusal(directory)


def test_a_model_without_a_fast_tokenizer_is_refused(copy_checkpoint: Copy) -> None:
    directory = copy_checkpoint("llama")
    (directory / "tokenizer.json").unlink()
    assert "tokenizer.json" in refusal(directory)


@pytest.mark.parametrize(
    ("changes", "culprit"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
        ({"architectures": None}, "architectures"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": -1}, "num_hidden_layers"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
    ],
)
def test_a_config_that_we_cannot_run_is_refused_by_field(changes: dict[str, Any], culprit: str, copy_checkpoint: Copy) -> None:
    directory = copy_checkpoint("llama")
    edit_config(directory, **changes)
    assert culprit in (message := refusal(directory))
    assert "config.json" in message


# ---- tensors


def test_a_missing_tensor_is_named(copy_checkpoint: Copy) -> None:
    directory = copy_checkpoint("llama")
    edit_tensors(directory, lambda t: t.pop(Q_PROJ))
    assert Q_PROJ in refusal(directory)


def test_a_missing_head_of_an_untied_model_is_named(copy_checkpoint: Copy) -> None:
    directory = copy_checkpoint("llama")
    edit_tensors(directory, lambda t: t.pop("lm_head.weight"))
    assert "lm_head.weight" in refusal(directory)


def test_a_wrong_shape_is_named_with_both_shapes(copy_checkpoint: Copy) -> None:
    directory = copy_checkpoint("llama")
    edit_tensors(directory, lambda t: t.update({Q_PROJ: np.ones((64, 32), np.float32)}))
    message = refusal(directory)
    assert all(part in message for part in ("model.safetensors", Q_PROJ, "[64, 64]", "[64, 32]"))


def test_layers_beyond_the_count_of_the_config_are_refused_and_not_dropped(copy_checkpoint: Copy) -> None:
    directory = copy_checkpoint("llama")
    edit_config(directory, num_hidden_layers=1)
    message = refusal(directory)
    assert "model.layers.1." in message
    assert "num_hidden_layers" in message


@pytest.mark.parametrize("name", ["model.layers.99999999999999999999.mlp.up_proj.weight", "model.layers.01.mlp.up_proj.weight"])
def test_a_layer_of_a_strange_number_is_refused(name: str, copy_checkpoint: Copy) -> None:
    directory = copy_checkpoint("llama")
    edit_tensors(directory, lambda t: t.update({name: np.ones((96, 64), np.float32)}))
    assert name in refusal(directory)


@pytest.mark.parametrize("name", ["model.layers.0.mlp.up_proj.bias", "model.layers.1.self_attn.q_norm.weight", "model.norm.bias"])
def test_a_tensor_whose_loss_would_change_the_model_is_refused(name: str, copy_checkpoint: Copy) -> None:
    directory = copy_checkpoint("llama")
    edit_tensors(directory, lambda t: t.update({name: np.ones(64, np.float32)}))
    assert name in refusal(directory)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.float64])
def test_other_storage_types_are_refused_by_name(dtype: torch.dtype, copy_checkpoint: Copy) -> None:
    directory = copy_checkpoint("llama")
    tensors = {name: torch.from_numpy(values) for name, values in load_file(directory / "model.safetensors").items()}
    tensors[Q_PROJ] = tensors[Q_PROJ].to(dtype)
    save_torch(tensors, directory / "model.safetensors")
    message = refusal(directory)
    assert Q_PROJ in message
    assert "this version reads F32, F16, BF16" in message


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_tensor_with_values_that_are_not_finite_is_refused_when_read(value: float, copy_checkpoint: Copy) -> None:
    directory = copy_checkpoint("llama")
    edit_tensors(directory, lambda t: t[Q_PROJ].__setitem__((5, 6), value))
    checkpoint = open_checkpoint(str(directory))
    with pytest.raises(SourceError, match=r"q_proj\.weight: 1 values are NaN or infinite, the first at \[5, 6\]"):
        checkpoint.tensor(Q_PROJ)


def test_an_unknown_name_is_refused_when_read(tiny_llama: Path) -> None:
    with pytest.raises(SourceError, match=r"no tensor model\.nothing"):
        open_checkpoint(str(tiny_llama)).weight("model.nothing")


# ---- damaged files


@pytest.mark.parametrize("size", [0, 4, 8, 100, 2000, 100_000, -1])
def test_a_truncated_file_is_refused(size: int, copy_checkpoint: Copy) -> None:
    directory = copy_checkpoint("llama")
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    assert "model.safetensors" in refusal(directory)


@pytest.mark.parametrize(
    "header",
    [
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [2**62, 4], "data_offsets": [0, 8]}},
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 2**60]}},
        {"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}},
        {"a": {"dtype": "X9", "shape": [2], "data_offsets": [0, 8]}},
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}},
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "b": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}},
        {"a": 3},
        [],
    ],
    ids=str,
)
def test_a_lying_header_is_refused(header: Any, copy_checkpoint: Copy) -> None:
    directory = copy_checkpoint("llama")
    text = json.dumps(header).encode()
    (directory / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    assert "model.safetensors" in refusal(directory)


def test_a_header_length_beyond_the_file_is_refused(copy_checkpoint: Copy) -> None:
    directory = copy_checkpoint("llama")
    (directory / "model.safetensors").write_bytes((2**63 - 1).to_bytes(8, "little") + bytes(8))
    assert "model.safetensors" in refusal(directory)


def test_an_absent_shard_is_named_with_a_tensor_it_should_hold(copy_checkpoint: Copy) -> None:
    directory = copy_checkpoint("llama")
    shard(directory)
    (directory / "model-00002-of-00002.safetensors").unlink()
    assert "model-00002-of-00002.safetensors (for " in refusal(directory)


@pytest.mark.parametrize("weight_map", [None, {}, [], {"a": 3}, {"a": "../../etc/passwd"}, {"a": "/etc/passwd"}], ids=str)
def test_an_index_that_is_none_is_refused(weight_map: Any, copy_checkpoint: Copy) -> None:
    directory = copy_checkpoint("llama")
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert "model.safetensors.index.json" in refusal(directory)


def test_a_tensor_in_two_shards_is_refused(copy_checkpoint: Copy) -> None:
    directory = copy_checkpoint("llama")
    shard(directory)
    both = load_file(directory / "model-00002-of-00002.safetensors")
    both.update({Q_PROJ: np.zeros((64, 64), np.float32), "lm_head.weight": np.zeros((512, 64), np.float32)})
    save_file(both, directory / "model-00002-of-00002.safetensors")
    assert "is also in" in refusal(directory)


def test_a_file_cut_short_after_opening_is_refused_when_read(copy_checkpoint: Copy) -> None:
    directory = copy_checkpoint("llama")
    checkpoint = open_checkpoint(str(directory))
    os.truncate(directory / "model.safetensors", 3000)
    with pytest.raises(SourceError, match=r"model\.safetensors: model\.norm\.weight"):
        checkpoint.tensor("model.norm.weight")


@pytest.mark.parametrize("key", ["model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj", "model.embed_tokens", "model.norm"])
@pytest.mark.parametrize("kind", ["directory", "gguf"])
def test_rows_that_are_read_by_themselves_are_those_of_the_whole(kind: str, key: str, tiny_llama: Path, tmp_path: Path) -> None:
    source = tiny_llama if kind == "directory" else write_gguf(tiny_llama, tmp_path / "tiny.gguf", "llama")
    with open_checkpoint(str(source)) as checkpoint:
        whole, lazy = checkpoint.tensor(f"{key}.weight"), checkpoint.lazily(key)
        assert lazy.shape == whole.shape
        for part in (slice(None), slice(0, 1), slice(3, 17), slice(whole.shape[0] - 2, whole.shape[0]), slice(5, 5)):
            rows = lazy.rows(part)
            assert rows.shape == whole[part].shape
            assert rows.dense().tobytes() == whole[part].tobytes()
        with pytest.raises(SourceError, match="no tensor nothing"):
            checkpoint.lazily("nothing")
