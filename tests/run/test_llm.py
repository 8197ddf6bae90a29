"""The public door: text in, text out, over any source of weights."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tiny_models import DirectorySource

from arctool.errors import FormatError, RequestError, SourceError
from arctool.quant.tensor import DenseTensor
from arctool.run.engine import FinishReason
from arctool.run.llm import LLM, EngineOptions
from arctool.run.sampling.params import SamplingParams
from arctool.uqff.container import ArtifactWriter, BakeInfo, LayerDetails

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def llm(llama: DirectorySource) -> LLM:
    return LLM(llama, EngineOptions(max_seqs=2))


def test_prompts_are_answered_in_order_and_as_if_alone(llm: LLM) -> None:
    prompts = ["The quick brown fox", "Once upon a time", "A"]
    done = llm.generate(prompts, GREEDY)
    assert [c.text for c in done] == [llm.generate([p], GREEDY)[0].text for p in prompts]
    assert len({c.text for c in done}) == 3


def test_a_stream_gives_the_text_of_generate(llm: LLM) -> None:
    updates = list(llm.stream("The quick brown fox", GREEDY))
    [done] = llm.generate(["The quick brown fox"], GREEDY)
    assert "".join(u.text for u in updates) == done.text
    assert updates[-1].completion is not None
    assert updates[-1].completion.finish_reason is FinishReason.LENGTH


def test_a_chat_is_rendered_by_the_model_s_template_and_brings_its_own_special_tokens(llm: LLM) -> None:
    assert llm.tokenizer is not None
    text = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    assert llm.encode_chat(MESSAGES) == llm.tokenizer.encode(text, add_special_tokens=False)
    assert llm.chat(MESSAGES, GREEDY).prompt_ids == tuple(llm.encode_chat(MESSAGES))
    streamed = list(llm.stream_chat(MESSAGES, GREEDY))
    assert "".join(u.text for u in streamed) == llm.chat(MESSAGES, GREEDY).text


def test_token_ids_are_prompts_too(llm: LLM) -> None:
    assert llm.generate([llm.encode("Once upon")], GREEDY)[0].token_ids == llm.generate(["Once upon"], GREEDY)[0].token_ids


def test_parameters_are_one_for_all_or_one_for_each(llm: LLM) -> None:
    each = llm.generate(["a", "b"], [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (1, 3)])
    assert [len(c.token_ids) for c in each] == [1, 3]
    with pytest.raises(RequestError, match=r"^params: expected one for each of 2 prompts, found 1"):
        llm.generate(["a", "b"], [GREEDY])


def changed(llama: DirectorySource, **assets: bytes | None) -> DirectorySource:
    source = object.__new__(DirectorySource)
    source.config, source.tensors = llama.config, llama.tensors
    files = {**llama.assets, **{k.replace("__", "."): v for k, v in assets.items()}}
    source.assets = {k: v for k, v in files.items() if v is not None}
    return source


def test_end_tokens_are_those_of_config_generation_config_and_tokenizer_together(llama: DirectorySource) -> None:
    generation = json.dumps({"eos_token_id": [7, 2]}).encode()
    tokenizer = json.dumps({"eos_token": {"content": "<|endoftext|>"}}).encode()
    source = changed(llama, generation_config__json=generation, tokenizer_config__json=tokenizer)
    assert set(LLM(source).eos_token_ids) == {2, 7, 0}
    with pytest.raises(SourceError, match=r"^generation_config\.json: eos_token_id"):
        LLM(changed(llama, generation_config__json=b'{"eos_token_id": 512}'))


def test_a_model_without_a_template_says_so_and_still_completes(llama: DirectorySource) -> None:
    bare = LLM(changed(llama, tokenizer_config__json=b"{}"))
    with pytest.raises(RequestError, match="no chat template; use plain completion"):
        bare.chat(MESSAGES)
    assert bare.generate(["Once"], GREEDY)[0].text


def test_a_model_without_a_tokenizer_takes_token_ids(llama: DirectorySource) -> None:
    bare = LLM(changed(llama, tokenizer__json=None))
    assert len(bare.generate([[5, 6]], GREEDY)[0].token_ids) == 12
    with pytest.raises(RequestError, match=r"^prompt: .*tokenizer\.json"):
        bare.generate(["text"], GREEDY)


@pytest.mark.parametrize(
    ("config", "field"),
    [({"architectures": ["GPT2LMHeadModel"]}, "architectures"), ({"architectures": ["LlamaForCausalLM"]}, "hidden_size")],
)
def test_an_artifact_whose_config_describes_no_model_is_a_fault_of_its_format(tmp_path: Path, config: dict, field: str) -> None:
    with ArtifactWriter(tmp_path / "a", "q", config=config, assets={}) as writer:
        writer.add_layer("model.embed_tokens", DenseTensor(np.zeros((4, 4), np.uint16)), None, LayerDetails("bf16", "bf16", None))
        writer.add_residual("model.norm.weight", DenseTensor(np.zeros(4, np.float32)))
        writer.finish(BakeInfo("qtip2", 0))
    with pytest.raises(FormatError, match=rf"/a/config\.json: {field}: ") as caught:
        LLM(tmp_path / "a")
    assert caught.value.exit_code == 4


def test_every_architecture_loads_and_answers(tiny_checkpoint: Path) -> None:
    done = LLM(DirectorySource(tiny_checkpoint)).chat(MESSAGES, GREEDY)
    assert len(set(done.token_ids)) > 3
