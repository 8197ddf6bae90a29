"""What a request asks of the sampler, through the engine: it reaches its own row, for as long as the row lives, and nobody else's."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_engine import assert_idle, make_engine
from tiny_models import DirectorySource, random_ids, reference

from arctool.errors import RequestError
from arctool.kernels.registry import Registry
from arctool.run.engine import Completion, Engine, FinishReason
from arctool.run.sampling import oracle
from arctool.run.sampling.constraint import Constraint
from arctool.run.sampling.params import SamplingParams

PROMPT = [5, 6, 7]


@pytest.fixture
def engine(llama: DirectorySource, registry: Registry) -> Engine:
    return make_engine(llama, registry, text=True)


def one(engine: Engine, **fields: Any) -> Completion:
    [done] = engine.generate([PROMPT], [SamplingParams(**{"max_tokens": 24, "temperature": 0, **fields})])
    assert_idle(engine)
    return done


MIXED: list[dict[str, Any]] = [
    {"temperature": 0, "repetition_penalty": 1.8},
    {"temperature": 1, "presence_penalty": 2, "frequency_penalty": 1, "seed": 3},
    {"temperature": 1.5, "top_k": 9, "typical_p": 0.7, "seed": 4, "logit_bias": {40: 3}},
    {"temperature": 2, "seed": 5, "constraint": Constraint("regex", "[a-z ]{5,60}")},
    {"temperature": 0, "min_tokens": 9},
]


def test_requests_of_every_kind_together_give_the_tokens_of_each_alone(llama: DirectorySource, registry: Registry) -> None:
    prompts = [random_ids(seed, length) for seed, length in enumerate([3, 40, 7, 20, 60])]
    params = [SamplingParams(max_tokens=20, ignore_eos=True, **fields) for fields in MIXED]
    alone = [make_engine(llama, registry, text=True).generate([p], [s])[0].token_ids for p, s in zip(prompts, params, strict=True)]
    assert len(set(alone)) == len(MIXED)
    together = make_engine(llama, registry, text=True, max_seqs=3).generate(prompts, params)
    assert [done.token_ids for done in together] == alone


def test_penalties_follow_the_prompt_and_the_growing_output(engine: Engine, tiny_llama: Path) -> None:
    fields: dict[str, Any] = {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.8}
    params, model = SamplingParams(**fields), reference(tiny_llama)
    found = one(engine, ignore_eos=True, **fields).token_ids
    output: list[int] = []
    for _ in range(24):
        logits = model.logits([*PROMPT, *output])[-1]
        output.append(int(oracle.adjusted(np.asarray(logits, np.float32), params, prompt=tuple(PROMPT), output=tuple(output)).argmax()))
    assert found == tuple(output)
    assert found != one(engine, ignore_eos=True).token_ids


@pytest.mark.parametrize("temperature", [0, 2.0])
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_constrained_text_is_whole_and_ends_by_itself(engine: Engine, temperature: float, ignore_eos: bool) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "yz"]}}, "required": ["a"], "additionalProperties": False}
    for seed in range(6):
        fields = {"temperature": temperature, "seed": seed, "max_tokens": 200, "ignore_eos": ignore_eos}
        done = one(engine, constraint=Constraint("regex", "[a-z]{2,5}-[0-9]{2}"), **fields)
        assert done.finish_reason is FinishReason.STOP
        assert re.fullmatch("[a-z]{2,5}-[0-9]{2}", done.text)
        done = one(engine, constraint=Constraint("json_schema", json.dumps(schema)), **fields)
        if done.finish_reason is FinishReason.STOP:  # a schema allows white space without end
            assert json.loads(done.text)["a"] in ("x", "yz")


def test_a_constraint_that_cannot_go_on_ends_its_own_request_with_an_error(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("arctool.run.sampling.grammar.TRIAL_STEPS", 0)  # a trial that goes some steps refuses it at the door
    bomb = SamplingParams(temperature=0, constraint=Constraint("regex", "a" + "{2}" * 200))
    lost, good = engine.generate([PROMPT, PROMPT], [bomb, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)])
    assert lost.finish_reason is FinishReason.ERROR
    assert "the constraint cannot be followed further" in str(lost.error)
    assert set(lost.text) <= {"a"}
    assert len(good.token_ids) == 8
    assert_idle(engine)


def test_min_tokens_holds_back_end_tokens_and_stop_strings(engine: Engine) -> None:
    plain = one(engine, ignore_eos=True)
    token = plain.token_ids[3]
    first = plain.token_ids.index(token)
    assert len(one(engine, ignore_eos=True, stop_token_ids=(token,)).token_ids) == first + 1
    longer = one(engine, ignore_eos=True, stop_token_ids=(token,), min_tokens=10)
    assert len(longer.token_ids) > 10
    assert token not in longer.token_ids[:10]
    eager = one(engine, ignore_eos=True, stop_token_ids=(token,), min_tokens=10, logit_bias={token: 100.0})
    assert (len(eager.token_ids), eager.token_ids[-1]) == (11, token), "once there are enough it may come"
    stop = plain.text[2:4]
    early = one(engine, ignore_eos=True, stop=(stop,))
    assert len(early.token_ids) < 10
    late = one(engine, ignore_eos=True, stop=(stop,), min_tokens=10)
    assert late.token_ids == plain.token_ids[: len(late.token_ids)]
    assert len(late.token_ids) >= 10
    assert late.text.startswith(early.text + stop)


def test_a_stop_string_is_part_of_the_text_where_that_was_asked_for(engine: Engine) -> None:
    plain = one(engine, ignore_eos=True)
    stop = plain.text[5:9]
    cut = plain.text.find(stop)
    without = one(engine, ignore_eos=True, stop=(stop,))
    within = one(engine, ignore_eos=True, stop=(stop,), include_stop_str_in_output=True)
    assert (without.text, within.text) == (plain.text[:cut], plain.text[: cut + len(stop)])
    assert within.finish_reason is FinishReason.STOP
    assert (plain.stopped_by, without.stopped_by, within.stopped_by) == (None, stop, stop)


def test_a_special_token_is_part_of_the_text_where_that_was_asked_for(engine: Engine) -> None:
    bias = {1: 100.0}
    assert one(engine, ignore_eos=True, logit_bias=bias, max_tokens=3).text == ""
    assert one(engine, ignore_eos=True, logit_bias=bias, max_tokens=3, shown_token_ids=[1]).text == "<|im_start|>" * 3
    ended = one(engine, logit_bias={2: 100.0}, shown_token_ids=(2,))
    assert (ended.token_ids, ended.text) == ((2,), ""), "a token that ends the text is no part of it"
    with pytest.raises(RequestError, match=r"^shown_token_ids: expected a list of token ids, found '1'"):
        SamplingParams(shown_token_ids="1")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("letter", "shown", "stop"), [("a", "a", ("a\u0000",)), ("é", "\ufffd", ())], ids=["the head of a stop string", "half a character"]
)
def test_a_cancelled_text_has_what_was_held_back(engine: Engine, letter: str, shown: str, stop: tuple[str, ...]) -> None:
    assert engine.tokenizer is not None
    token = engine.tokenizer.encode(letter, add_special_tokens=False)[0]
    request = engine.add_request(PROMPT, SamplingParams(temperature=0, max_tokens=30, logit_bias={token: 100.0}, stop=stop))
    before = "".join(update.text for _ in range(3) for update in engine.step())
    [last] = engine.cancel(request)
    assert last.completion is not None
    assert last.completion.finish_reason is FinishReason.ABORT
    assert last.text != ""
    assert before + last.text == last.completion.text == shown * len(last.completion.token_ids)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"logit_bias": {512: 1}}, "logit_bias: expected token ids from 0 to 511, found 512"),
        ({"min_tokens": 254}, "min_tokens: expected at most the 253 tokens that may follow this prompt, found 254"),
        ({"constraint": Constraint("regex", "[a")}, "regex: "),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_this_model_cannot_do_is_refused_at_the_door(engine: Engine, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=f"^{message}"):
        engine.add_request(PROMPT, SamplingParams(**fields))
    assert_idle(engine)


def test_a_bias_decides_and_a_request_without_a_tokenizer_has_no_constraint(llama: DirectorySource, registry: Registry) -> None:
    engine = make_engine(llama, registry)
    assert set(one(engine, ignore_eos=True, logit_bias={77: 100.0}).token_ids) == {77}
    with pytest.raises(RequestError, match=r"^regex: a constraint needs a tokenizer"):
        engine.add_request(PROMPT, SamplingParams(constraint=Constraint("regex", "a")))
