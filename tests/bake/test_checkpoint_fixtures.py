"""The committed tiny checkpoints are what the script makes, and are models that can tell two engines apart."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from locations import load_script
from tiny_gguf import write_gguf

from arctool.bake.source.checkpoint import open_checkpoint
from arctool.quant.bf16 import to_bf16


def test_the_script_makes_the_committed_bytes_again(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    made = load_script("make_checkpoints").make_all(tmp_path)
    assert sorted(path.name for path in made) == sorted(tiny_checkpoints)
    for name, committed in tiny_checkpoints.items():
        files = {path.name: path.read_bytes() for path in committed.iterdir()}
        assert {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} == files
        assert sum(map(len, files.values())) < 1_000_000


def test_each_tiny_model_says_different_things_to_different_prompts(tiny_checkpoint: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint)
    completions = set()
    for prompt in ("Hello there", "In 1814 she", "What is?", "She said", "Yes, my dear"):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        out = model.generate(ids, max_new_tokens=24, do_sample=False, eos_token_id=None)[0, ids.shape[1] :].tolist()
        assert len(set(out)) >= 4
        completions.add(tuple(out))
    assert len(completions) >= 4


def test_the_configs_hold_what_engines_get_wrong(tiny_checkpoints: dict[str, Path]) -> None:
    configs = {name: json.loads((path / "config.json").read_text()) for name, path in tiny_checkpoints.items()}
    assert configs["qwen2"]["use_sliding_window"] is False
    assert configs["qwen2"]["sliding_window"] == 8
    assert configs["mistral"]["sliding_window"] == 8
    assert configs["qwen3"]["head_dim"] != configs["qwen3"]["hidden_size"] // configs["qwen3"]["num_attention_heads"]
    assert configs["qwen3_moe"]["mlp_only_layers"] == [0]
    assert configs["mixtral"]["num_local_experts"] == 4
    assert [name for name, config in configs.items() if config["tie_word_embeddings"]] == ["qwen2"]


def test_the_real_model_s_directory_is_made_from_a_gguf_file_and_carries_its_licence(
    tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    gguf = write_gguf(tiny_checkpoints["llama"], tmp_path / "tiny.gguf", "llama", metadata={"general.license": "apache-2.0"})
    with open_checkpoint(str(gguf)) as source:
        load_script("make_smollm2").write_hf_directory(source, tmp_path / "made")
        expected = {name: to_bf16(source.tensor(name)) for name in source.names()}
    with open_checkpoint(str(tmp_path / "made")) as made:
        assert made.terms.licence == "apache-2.0"
        assert sorted(made.names()) == sorted(expected)
        assert all(np.array_equal(to_bf16(made.tensor(name)), expected[name]) for name in expected)
