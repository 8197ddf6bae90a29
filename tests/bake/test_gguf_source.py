"""A GGUF file gives the tensors, config and tokenizer of the Hugging Face checkpoint it was made from, or is refused by name."""

from __future__ import annotations

import json
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize, quantize
from safetensors.numpy import load_file
from tiny_gguf import write_gguf
from tokenizers import Tokenizer

from arctool.bake.source.checkpoint import open_checkpoint
from arctool.bake.source.gguf_file import GgufArray, read_gguf
from arctool.bake.source.gguf_source import deinterleave, frequency_factors
from arctool.bake.source.terms import Terms
from arctool.errors import SourceError

TEXTS = (
    "It was a moment of absolute horror.",
    "In 1814, 23 of them didn't;   she'll come\n\n\tat 7.5!",
    "naïve café — 東京 🙂",
    "<|im_start|>user\nhello<|im_end|>\n",
)


ARCHS = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "mixtral": "llama", "qwen3_moe": "qwen3moe"}
"""Tiny checkpoint → what GGUF calls its architecture."""


@pytest.mark.parametrize("name", ARCHS)
def test_a_gguf_file_gives_the_tensors_of_the_checkpoint_it_was_made_from(
    name: str, tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    source = tiny_checkpoints[name]
    checkpoint = open_checkpoint(str(write_gguf(source, tmp_path / "m.gguf", ARCHS[name])))
    original = load_file(source / "model.safetensors")
    assert set(checkpoint.names()) == set(original)
    for tensor, values in original.items():
        np.testing.assert_array_equal(checkpoint.tensor(tensor), values, err_msg=tensor)


@pytest.mark.parametrize("name", ARCHS)
def test_a_gguf_file_gives_the_same_model_config_as_the_checkpoint(name: str, tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(write_gguf(tiny_checkpoints[name], tmp_path / "m.gguf", ARCHS[name])))
    assert checkpoint.config == open_checkpoint(str(tiny_checkpoints[name])).config
    assert checkpoint.terms.licence == "apache-2.0"
    assert json.loads(checkpoint.assets["generation_config.json"]) == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}


def test_rows_are_put_back_in_hugging_face_order_by_hand() -> None:
    interleaved = np.array([[0], [2], [1], [3], [10], [12], [11], [13]], np.float32)
    assert deinterleave(interleaved, 2).ravel().tolist() == [0, 1, 2, 3, 10, 11, 12, 13]


@pytest.mark.parametrize("kind", ["BF16", "F16", "Q8_0", "Q4_0", "Q4_1", "Q5_1"])
def test_quantised_blocks_are_dequantised_as_the_gguf_library_does(kind: str, tiny_llama: Path, tmp_path: Path) -> None:
    tensor_type = GGMLQuantizationType[kind]
    checkpoint = open_checkpoint(str(write_gguf(tiny_llama, tmp_path / "m.gguf", "llama", tensor_type=tensor_type)))
    name = "model.layers.1.mlp.down_proj.weight"
    original = load_file(tiny_llama / "model.safetensors")[name]
    np.testing.assert_array_equal(checkpoint.tensor(name), dequantize(quantize(original, tensor_type), tensor_type))
    assert checkpoint.stored_dtype(name) == kind


def test_our_reader_agrees_with_the_gguf_library_on_metadata_and_tensor_places(tiny_llama: Path, tmp_path: Path) -> None:
    path = write_gguf(tiny_llama, tmp_path / "m.gguf", "llama", metadata={"x.flags": [True, False], "x.reals": [0.5, 1.5]})
    ours, theirs = read_gguf(path), GGUFReader(path)
    fields = {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    listed = {key: ours.array(key) if isinstance(value, GgufArray) else value for key, value in ours.metadata.items()}
    assert listed == fields
    assert sum(isinstance(value, GgufArray) for value in ours.metadata.values()) == 5
    assert {name: t.offset for name, t in ours.tensors.items()} == {t.name: t.data_offset for t in theirs.tensors}


def test_the_tokenizer_gives_the_ids_of_the_original(tiny_llama: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(write_gguf(tiny_llama, tmp_path / "m.gguf", "llama", pre="smollm")))
    rebuilt = Tokenizer.from_str(checkpoint.assets["tokenizer.json"].decode())
    original = Tokenizer.from_file(str(tiny_llama / "tokenizer.json"))
    ids = [original.encode(text).ids for text in TEXTS]
    assert len({tuple(i) for i in ids}) == len(TEXTS)
    assert [rebuilt.encode(text).ids for text in TEXTS] == ids
    assert [rebuilt.decode(i, skip_special_tokens=False) for i in ids] == list(TEXTS)
    config = json.loads(checkpoint.assets["tokenizer_config.json"])
    assert (config["bos_token"], config["eos_token"]) == ("<|im_start|>", "<|im_end|>")
    assert config["chat_template"] == json.loads((tiny_llama / "tokenizer_config.json").read_text())["chat_template"]


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("smollm", ["I", "'ll", " pay", " ", "1", "2", "3", "4", ",", " OK", "?", "\n\n", " x"]),
        ("gpt-2", ["I", "'ll", " pay", " 1234", ",", " OK", "?", "\n\n", " x"]),
        ("qwen2", ["I", "'ll", " pay", " ", "1", "2", "3", "4", ",", " OK", "?\n\n", " x"]),
        ("llama-bpe", ["I", "'ll", " pay", " ", "123", "4", ",", " OK", "?\n\n", " x"]),
        ("default", ["I", "'", "ll", " pay", " ", "123", "4", ",", " OK", "?", "\n\n", " x"]),
    ],
)
def test_each_pre_tokenizer_splits_as_its_name_says(pre: str, pieces: list[str], tiny_llama: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(write_gguf(tiny_llama, tmp_path / "m.gguf", "llama", pre=pre)))
    tokenizer = Tokenizer.from_str(checkpoint.assets["tokenizer.json"].decode())
    found = tokenizer.pre_tokenizer.pre_tokenize_str("I'll pay 1234, OK?\n\n x")
    assert [piece.replace("Ġ", " ").replace("Ċ", "\n") for piece, _ in found] == pieces


def test_llama_3_vocabularies_start_with_the_bos_token(tiny_llama: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(write_gguf(tiny_llama, tmp_path / "m.gguf", "llama", pre="llama-bpe")))
    assert Tokenizer.from_str(checkpoint.assets["tokenizer.json"].decode()).encode("she").ids[0] == 1
    silent = {"tokenizer.ggml.add_bos_token": False}
    checkpoint = open_checkpoint(str(write_gguf(tiny_llama, tmp_path / "n.gguf", "llama", pre="llama-bpe", metadata=silent)))
    assert Tokenizer.from_str(checkpoint.assets["tokenizer.json"].decode()).encode("she").ids[0] != 1


def test_linear_scaling_survives(tiny_llama: Path, tmp_path: Path) -> None:
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    checkpoint = open_checkpoint(str(write_gguf(tiny_llama, tmp_path / "l.gguf", "llama", metadata=linear)))
    assert checkpoint.config_json["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}


def test_a_scaling_factor_without_a_type_is_linear_as_llama_cpp_takes_it(tiny_llama: Path, tmp_path: Path) -> None:
    path = write_gguf(tiny_llama, tmp_path / "l.gguf", "llama", metadata={"llama.rope.scaling.factor": 4.0})
    assert open_checkpoint(str(path)).config_json["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}


def test_fields_that_change_nothing_are_no_reason_to_refuse(tiny_llama: Path, tmp_path: Path) -> None:
    neutral: dict[str, Any] = {"vocab_size": 512, "rope.dimension_count": 16, "attention.causal": True, "expert_count": 0}
    neutral |= {"rope.scaling.finetuned": False, "attention.clamp_kqv": 0.0, "rope.scaling.attn_factor": 1.0}
    path = write_gguf(tiny_llama, tmp_path / "m.gguf", "llama", metadata={f"llama.{key}": value for key, value in neutral.items()})
    assert open_checkpoint(str(path)).config == open_checkpoint(str(tiny_llama)).config


def test_a_large_list_of_numbers_that_nobody_reads_costs_no_memory(tiny_llama: Path, tmp_path: Path) -> None:
    path = write_gguf(tiny_llama, tmp_path / "m.gguf", "llama")
    whole = path.read_bytes()
    count = 4 << 20
    pair = struct.pack("<Q8sIIQ", 8, b"somebody", 9, 0, count) + bytes(count)
    pairs = struct.unpack_from("<Q", whole, 16)[0]
    path.write_bytes(whole[:16] + struct.pack("<Q", pairs + 1) + pair + whole[24:])
    tracemalloc.start()
    try:
        file = read_gguf(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert file.metadata["somebody"].count == count
    assert file.array("tokenizer.ggml.token_type")[:5] == [3, 3, 3, 1, 1]


def test_llama_3_scaling_is_recognised_from_its_frequency_factors(tiny_llama: Path, tmp_path: Path) -> None:
    theta = 500000.0
    factors = {"rope_freqs.weight": _transformers_llama3_factors(theta, 16, 32.0).astype(np.float32)}
    path = write_gguf(tiny_llama, tmp_path / "m.gguf", "llama", metadata={"llama.rope.freq_base": theta}, tensors=factors)
    scaling = open_checkpoint(str(path)).config_json["rope_scaling"]
    assert (scaling["rope_type"], scaling["factor"], scaling["original_max_position_embeddings"]) == ("llama3", 32.0, 8192)
    np.testing.assert_allclose(frequency_factors(theta, 16, scaling), _transformers_llama3_factors(theta, 16, 32.0), 1e-5)


def _transformers_llama3_factors(theta: float, head_dim: int, factor: float) -> np.ndarray:
    """The factors as the ratio of transformers' plain and scaled rotary frequencies."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {"rope_type": "llama3", "rope_theta": theta, "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope["original_max_position_embeddings"] = 8192
    config = LlamaConfig(
        hidden_size=head_dim, num_attention_heads=1, head_dim=head_dim, max_position_embeddings=131072, rope_parameters=rope
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, None)
    plain = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    return plain / scaled.double().numpy()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("metadata", "culprit"),
    [
        ({"llama.attention.head_count": [4, 4]}, "llama.attention.head_count"),
        ({"llama.attention.head_count": None}, "llama.attention.head_count"),
        ({"llama.feed_forward_length": "wide"}, "llama.feed_forward_length"),
        ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count"),
        ({"llama.expert_count": 8}, "llama.expert_used_count"),
        ({"llama.rope.scaling.type": "longrope"}, "llama.rope.scaling.type"),
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}, "llama.rope.scaling.type"),
        ({"llama.rope.scaling.attn_factor": 1.2}, "llama.rope.scaling.attn_factor"),
        ({"llama.rope.scale_linear": 4.0}, "llama.rope.scale_linear"),
        ({"llama.rope.freq_base": np.float64(1e300)}, "llama.rope.freq_base"),
        ({"llama.final_logit_softcapping": 30.0}, "llama.final_logit_softcapping"),
        ({"llama.embedding_scale": 12.0}, "llama.embedding_scale"),
        ({"llama.attention.causal": False}, "llama.attention.causal"),
        ({"llama.attention.clamp_kqv": 8.0}, "llama.attention.clamp_kqv"),
        ({"llama.attention.temperature_scale": 0.1}, "llama.attention.temperature_scale"),
        ({"llama.attention.key_length_swa": 16}, "llama.attention.key_length_swa"),
        ({"llama.attention.sliding_window": 8}, "llama.attention.sliding_window"),
        ({"llama.a_field_of_tomorrow": 0}, "llama.a_field_of_tomorrow"),
        ({"tokenizer.ggml.pre": "tekken"}, "tekken"),
        ({"tokenizer.ggml.model": "t5"}, "tokenizer.ggml.model"),
        ({"tokenizer.ggml.tokens": ["a", "a"]}, "tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.merges": ["abc"]}, "tokenizer.ggml.merges"),
        ({"tokenizer.ggml.merges": [1, 2]}, "tokenizer.ggml.merges"),
        ({"tokenizer.ggml.token_type": [1] * 513}, "tokenizer.ggml.token_type"),
        ({"tokenizer.ggml.bos_token_id": 70000}, "tokenizer.ggml.bos_token_id"),
        ({"general.alignment": 3}, "general.alignment"),
    ],
)
def test_metadata_that_we_cannot_honour_is_refused_by_key(metadata: dict[str, Any], culprit: str, tiny_llama: Path, tmp_path: Path) -> None:
    path = write_gguf(tiny_llama, tmp_path / "m.gguf", "llama", metadata=metadata)
    with pytest.raises(SourceError, match=culprit.replace(".", r"\.")) as caught:
        open_checkpoint(str(path))
    assert "m.gguf" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["blk.0.ffn_gate_exps.weight", "blk.0.attn_q.bias", "v.patch_embd.weight", "blk.0.attn_q_norm.weight"])
def test_a_tensor_that_the_model_has_no_place_for_is_refused(name: str, tiny_llama: Path, tmp_path: Path) -> None:
    path = write_gguf(tiny_llama, tmp_path / "m.gguf", "llama", tensors={name: np.ones(64, np.float32)})
    with pytest.raises(SourceError, match=r"m\.gguf.*(ffn_gate_exps|q_proj\.bias|v\.patch_embd|q_norm)"):
        open_checkpoint(str(path))


def test_rotary_factors_that_are_not_llama_3s_are_refused(tiny_llama: Path, tmp_path: Path) -> None:
    path = write_gguf(tiny_llama, tmp_path / "m.gguf", "llama", tensors={"rope_freqs.weight": np.arange(1, 9, dtype=np.float32)})
    with pytest.raises(SourceError, match=r"rope_freqs\.weight"):
        open_checkpoint(str(path))


def test_an_unknown_architecture_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"general\.architecture: 'mamba'.*llama, qwen2, qwen3"):
        open_checkpoint(str(write_gguf(tiny_llama, tmp_path / "m.gguf", "mamba")))


def test_a_file_without_the_magic_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(SourceError, match="no GGUF magic"):
        open_checkpoint(str(tmp_path / "m.gguf"))


def test_an_empty_file_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"")
    with pytest.raises(SourceError, match=r"m\.gguf"):
        open_checkpoint(str(tmp_path / "m.gguf"))


def test_every_truncation_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    whole = write_gguf(tiny_llama, tmp_path / "m.gguf", "llama").read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in [*range(4, 400, 7), 5_000, 20_000, 100_000, len(whole) - 40]:
        cut.write_bytes(whole[:size])
        with pytest.raises(SourceError, match=r"cut\.gguf"):
            open_checkpoint(str(cut))


@pytest.mark.parametrize(
    ("front", "message"),
    [
        (struct.pack("<IQQ", 3, 0, 2**60), "claims 1152921504606846976 metadata"),
        (struct.pack("<IQQ", 3, 2**60, 0), "1152921504606846976 tensors"),
        (struct.pack("<IQQQ", 3, 0, 1, 2**62), "metadata key 0.*truncated"),
        (struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 4, 2**62), "k: claims"),
        (struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 9, 1), "unknown metadata type 9"),
        (struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"k", 77), "unknown metadata type 77"),
        (struct.pack("<IQQQ1sIQ", 3, 1, 0, 1, b"t", 4, 2**40) + struct.pack("<QQQIQ", 2**40, 2**40, 2**40, 0, 0), "truncated"),
        (struct.pack("<IQQQ1sI", 3, 1, 0, 1, b"t", 99), "dimensions"),
        (struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"t", 1, 32, 4242, 0), "unknown block type 4242"),
        (struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"t", 1, 33, 8, 0), "multiple of 32"),
        (struct.pack("<I", 1), "version 1"),
        (struct.pack(">I", 3), "big-endian"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_lying_counts_lengths_and_types_are_refused_without_allocating(front: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "lie.gguf"
    path.write_bytes(b"GGUF" + front + bytes(64))
    with pytest.raises(SourceError, match=message):
        open_checkpoint(str(path))


@pytest.mark.real
def test_smollm2_from_gguf_has_the_published_tokenizer(smollm2_gguf: Path, smollm2_dir: Path) -> None:
    checkpoint = open_checkpoint(str(smollm2_gguf))
    tokenizer = Tokenizer.from_str(checkpoint.assets["tokenizer.json"].decode())
    assert tokenizer.encode("The capital of France is Paris.<|im_end|>").ids == [504, 3575, 282, 4649, 314, 7042, 30, 2]
    assert tokenizer.decode([504, 3575, 282, 4649, 314, 7042, 30, 2], skip_special_tokens=True) == "The capital of France is Paris."
    directory = open_checkpoint(str(smollm2_dir))
    assert directory.config == checkpoint.config
    assert checkpoint.terms == directory.terms == Terms("apache-2.0")
    name = "model.layers.29.self_attn.k_proj.weight"
    difference = np.abs(directory.tensor(name) - checkpoint.tensor(name))
    assert difference.max() <= np.abs(checkpoint.tensor(name)).max() / 256
    assert directory.tensor(name).shape == (192, 576)


def test_tensors_that_lie_within_each_other_are_refused(tiny_llama: Path, tmp_path: Path) -> None:
    gguf = write_gguf(tiny_llama, tmp_path / "a.gguf", "llama")
    data = bytearray(gguf.read_bytes())
    name = b"blk.1.ffn_up.weight"
    at = data.index(name) + len(name) + 4 + 2 * 8 + 4  # behind the name: rank, two dimensions, type, then the offset
    offset = int.from_bytes(data[at : at + 8], "little")
    data[at : at + 8] = (offset - 32).to_bytes(8, "little")
    gguf.write_bytes(data)
    with pytest.raises(SourceError, match=r"a\.gguf: tensor blk\..*: begins at byte \d+, within blk\."):
        open_checkpoint(str(gguf))
