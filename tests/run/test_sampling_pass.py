"""One pass over rows of any mix gives, row by row, what the definition gives, whoever shares the batch and however many threads work."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from arctool.kernels.cpu import sampling as kernel
from arctool.run.sampling import oracle, sampler
from arctool.run.sampling.constraint import Constraint
from arctool.run.sampling.history import History
from arctool.run.sampling.noise import CHILD_STREAM, child_seed, philox, uniform
from arctool.run.sampling.params import SamplingParams
from arctool.run.sampling.sampler import Sampled, SampleRow, sample

VOCAB = 1031  # no multiple of anything
ENDS = (2, 17)


@dataclasses.dataclass(frozen=True)
class Case:
    """One row and everything that its token may depend on."""

    logits: NDArray[np.float32]
    params: SamplingParams
    seed: int
    position: int
    prompt: tuple[int, ...]
    output: tuple[int, ...]

    def row(self) -> SampleRow:
        history = History(self.prompt)
        for token in self.output:
            history.push(token)
        return SampleRow(self.params, self.seed, self.position, len(self.output), ENDS, history if self.params.penalised else None)

    def expected(self) -> int | None:
        banned = (*ENDS, *self.params.stop_token_ids) if len(self.output) < self.params.min_tokens else ()
        return oracle.choose(self.logits, self.params, self.seed, self.position, prompt=self.prompt, output=self.output, banned=banned)


def random_case(rng: np.random.Generator, vocab: int = VOCAB) -> Case:
    def some(off: Any, *values: Any) -> Any:
        return off if rng.random() < 0.5 else values[rng.integers(len(values))]

    logits = rng.standard_normal(vocab) * rng.choice([0.0, 0.3, 2.0, 8.0])
    logits = np.round(logits * 4) / 4 if rng.random() < 0.3 else logits  # many equals
    params = SamplingParams(
        temperature=some(1.0, 0.0, 0.01, 0.4, 1.7),
        top_k=some(0, 1, 2, 40, vocab - 1, vocab, 10**12, -1),
        top_p=some(1.0, 1e-6, 0.3, 0.7, 0.95, 0.9999),
        min_p=some(0.0, 0.01, 0.2, 1.0),
        typical_p=some(1.0, 0.05, 0.5, 0.9),
        repetition_penalty=some(1.0, 0.7, 1.3, 2.0),
        presence_penalty=some(0.0, -2, 0.6, 2),
        frequency_penalty=some(0.0, -1.1, 0.3, 2.0),
        logit_bias=some({}, {5: -100.0, 9: 4.5}, {int(t): 1.0 for t in rng.permutation(vocab)[: vocab // 2]}),
        min_tokens=some(0, 3, 100),
        stop_token_ids=some((), (1, 2, 40)),
        logprobs=some(None, 0, 3, 20),
    )
    prompt, output = (tuple(rng.integers(0, vocab, n).tolist()) for n in (rng.integers(1, 60), rng.integers(0, 9)))
    return Case(logits.astype(np.float32), params, int(rng.integers(0, 2**63)), int(rng.integers(0, 10**6)), prompt, output)


def run(cases: list[Case]) -> list[Sampled]:
    return sample(np.stack([case.logits for case in cases]), [case.row() for case in cases])


@pytest.mark.parametrize("threads", [1, 2], indirect=True)
@pytest.mark.usefixtures("threads")
def test_every_row_gets_the_token_and_the_log_probabilities_of_the_definition() -> None:
    rng = np.random.default_rng(11)
    different = set()
    for _ in range(40):
        cases = [random_case(rng) for _ in range(32)]
        for case, found in zip(cases, run(cases), strict=True):
            assert found.token == case.expected(), case.params
            different.add(found.token)
            if case.params.logprobs is not None:
                assert found.logprobs is not None
                assert found.token is not None
                token, top = oracle.logprobs(case.logits, found.token, case.params.logprobs)
                assert found.logprobs.token == pytest.approx(token, abs=1e-12)
                assert [i for i, _ in found.logprobs.top] == [i for i, _ in top]
                assert [p for _, p in found.logprobs.top] == pytest.approx([p for _, p in top], abs=1e-12)
            else:
                assert found.logprobs is None
    assert len(different) > 400, "tokens that hardly differ would prove nothing"


def test_the_definition_holds_in_a_vocabulary_of_real_size() -> None:
    rng = np.random.default_rng(3)
    cases = [random_case(rng, 49152) for _ in range(24)]
    assert [found.token for found in run(cases)] == [case.expected() for case in cases]


@pytest.mark.parametrize("vocab", [1, 2, 31, 33, 64])
def test_the_definition_holds_in_the_smallest_vocabularies(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    for _ in range(30):
        params = SamplingParams(
            temperature=rng.choice([0.0, 0.5, 2.0]), top_k=int(rng.integers(-1, 40)), top_p=0.8, typical_p=0.9, logprobs=20
        )
        case = Case(rng.standard_normal(vocab).astype(np.float32), params, int(rng.integers(99)), 7, (), ())
        [found] = run([case])
        assert found.token == case.expected()
        assert found.logprobs is not None
        assert len(found.logprobs.top) == min(20, vocab)


@settings(max_examples=25)
@given(st.integers(0, 2**32 - 1), st.integers(2, 24))
def test_a_row_s_bits_do_not_depend_on_its_neighbours_their_order_or_the_threads(seed: int, count: int) -> None:
    import numba

    rng = np.random.default_rng(seed)
    cases = [random_case(rng, 257) for _ in range(count)]
    together = run(cases)
    order = rng.permutation(count)
    assert run([cases[i] for i in order]) == [together[i] for i in order]
    alone = [run([case])[0] for case in cases]
    assert alone == together
    before = numba.get_num_threads()
    numba.set_num_threads(min(2, numba.config.NUMBA_NUM_THREADS))
    try:
        assert run(cases) == together
    finally:
        numba.set_num_threads(before)


def test_columns_that_mean_no_token_are_never_chosen_nor_looked_at() -> None:
    rng = np.random.default_rng(0)
    cases = [random_case(rng) for _ in range(20)]
    wide = np.full((20, VOCAB + 9), np.nan, np.float32)
    wide[:, VOCAB - 1] = 50
    wide[:, : VOCAB - 1] = [case.logits[: VOCAB - 1] for case in cases]
    rows = [dataclasses.replace(case, params=dataclasses.replace(case.params, logit_bias=())).row() for case in cases]
    narrow = sample(np.ascontiguousarray(wide[:, : VOCAB - 1]), rows)
    assert sample(wide, rows, VOCAB - 1) == narrow
    assert all(found.token != VOCAB - 1 for found in narrow)


def warped(logits: NDArray[np.float32], params: SamplingParams, prompt: tuple[int, ...], output: tuple[int, ...]) -> NDArray[np.float64]:
    """Probabilities [vocab] as transformers' own processors give them, in our order. Presence and frequency: OpenAI's formula, by hand."""
    ids = torch.tensor([[*prompt, *output]])
    scores = torch.tensor(logits, dtype=torch.float64)[None]
    for token, addition in dict(params.logit_bias).items():
        scores[0, token] += addition
    scores = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(ids, scores)
    for token in set(output):
        scores[0, token] -= params.presence_penalty + params.frequency_penalty * output.count(token)
    chain: list[Any] = [TemperatureLogitsWarper(float(params.temperature))]
    chain += [TopKLogitsWarper(params.top_k)] if params.top_k > 0 else []
    chain += [TypicalLogitsWarper(params.typical_p)] if params.typical_p < 1 else []
    chain += [TopPLogitsWarper(params.top_p)] if params.top_p < 1 else []
    chain += [MinPLogitsWarper(params.min_p)] if params.min_p > 0 else []
    for warper in chain:
        scores = warper(ids, scores)
    return np.asarray(torch.softmax(scores, -1)[0])


FILTERS = [
    {"top_k": 9},
    {"top_p": 0.6},
    {"min_p": 0.3},
    {"typical_p": 0.4},
    {"repetition_penalty": 1.8},
    {"repetition_penalty": 0.5, "presence_penalty": 1.2, "frequency_penalty": -0.7},
    {"temperature": 0.6, "top_k": 25, "typical_p": 0.9, "top_p": 0.8, "min_p": 0.1},
    {"temperature": 1.8, "top_k": 30, "typical_p": 0.7, "top_p": 0.9, "repetition_penalty": 1.5, "logit_bias": {3: 4.0, 8: -100}},
]


@pytest.mark.parametrize("fields", FILTERS, ids=lambda fields: " ".join(fields))
def test_the_definition_gives_the_probabilities_of_transformers_processors(fields: dict[str, Any]) -> None:
    rng = np.random.default_rng(5)
    params = SamplingParams(**fields)
    for _ in range(20):
        logits = (rng.standard_normal(60) * 2).astype(np.float32)
        prompt, output = tuple(rng.integers(0, 60, 20).tolist()), tuple(rng.integers(0, 60, 20).tolist())
        ids, probabilities = oracle.candidates(oracle.adjusted(logits, params, prompt=prompt, output=output), params)
        found = np.zeros(60)
        found[ids] = probabilities
        wanted = warped(logits, params, prompt, output)
        plain = np.asarray(torch.softmax(torch.tensor(logits, dtype=torch.float64), -1))
        assert abs(wanted - plain).max() > 1e-3, "processors that change nothing would prove nothing"
        np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=0)


@pytest.mark.parametrize("fields", FILTERS, ids=lambda fields: " ".join(fields))
def test_tokens_are_drawn_with_the_probabilities_of_transformers_processors(fields: dict[str, Any]) -> None:
    rng = np.random.default_rng(6)
    count = 4000
    logits = (rng.standard_normal(60) * 1.5).astype(np.float32)
    prompt, output = (1, 2, 3, 4, 5), (3, 4, 4, 10, 11, 11, 11)
    cases = [Case(logits, SamplingParams(**fields), 7, position, prompt, output) for position in range(count)]
    drawn = np.bincount([found.token for found in run(cases)], minlength=60)
    wanted = warped(logits, cases[0].params, prompt, output)
    assert drawn[wanted == 0].sum() == 0
    kept = wanted * count >= 5
    assert (
        stats.chisquare([*drawn[kept], drawn[~kept].sum() + 1e-9], [*wanted[kept] * count, wanted[~kept].sum() * count + 1e-9]).pvalue
        > 1e-4
    )


@settings(max_examples=200)
@given(
    st.lists(
        st.tuples(st.sampled_from([0.0, 5e-324, 1e-9, 0.25, 0.5, 1.0, 7.5, 1e300, math.inf]), st.integers(0, 4)), min_size=1, max_size=120
    ),
    st.integers(1, 300),
    st.booleans(),
)
def test_the_place_where_a_mass_is_reached_is_that_of_a_full_sort(pairs: list[tuple[float, int]], limit: int, strict: bool) -> None:
    """Whole weights make every sum exact, so the place must be, whatever the order of the additions."""
    costs, weights = np.array([c for c, _ in pairs]), np.array([float(w) for _, w in pairs])
    order = np.argsort(costs, kind="stable")
    reached = np.cumsum(weights[order])
    at = int(np.searchsorted(reached, limit, side="right" if strict else "left"))
    if weights.sum() == 0:
        return
    wanted = order[at] if at < len(order) else order[np.flatnonzero(weights[order])[-1]]
    assert kernel._place(costs, weights, float(limit), strict) == wanted


def test_many_equals_are_cut_at_the_lower_ids() -> None:
    logits = np.zeros(VOCAB, np.float32)
    for fields, kept in ({"top_k": 100}, 100), ({"top_p": 0.25}, 258), ({"typical_p": 0.25}, 258):
        cases = [Case(logits, SamplingParams(**fields), 1, p, (), ()) for p in range(3000)]
        drawn = {found.token for found in run(cases)}
        assert max(token for token in drawn if token is not None) == kept - 1
        assert len(drawn) > kept * 0.95


def test_the_kernel_s_random_numbers_are_those_of_the_definition() -> None:
    edges = [(0, 0), (2**64 - 1, 2**63), (2**32 - 1, 2**32), (1 << 63, 1)]
    rng = np.random.default_rng(1)
    pairs = [*edges, *((int(s), int(p)) for s, p in rng.integers(0, 2**63, (200, 2)))]
    for seed, position in pairs:
        assert kernel._uniform(np.uint64(seed), np.uint64(position)) == uniform(seed, position)


def test_the_kernel_reads_the_columns_that_the_parameters_write() -> None:
    values = {"temperature": 0.5, "top_k": 7, "top_p": 0.6, "min_p": 0.1, "typical_p": 0.8}
    values |= {"repetition_penalty": 1.5, "presence_penalty": 0.2, "frequency_penalty": 0.3}
    params = SamplingParams(**values)  # type: ignore[arg-type]
    assert dict(zip(kernel.SETTINGS, params.settings.tolist(), strict=True)) == values


def test_log_probabilities_are_of_the_raw_logits_whatever_is_done_to_them() -> None:
    rng = np.random.default_rng(2)
    logits = rng.standard_normal(VOCAB).astype(np.float32)
    plain = run([Case(logits, SamplingParams(logprobs=5), 1, 1, (), ())])[0].logprobs
    heavy = SamplingParams(
        temperature=0.3, logit_bias={0: 100}, repetition_penalty=2, presence_penalty=2, top_k=1, min_tokens=9, logprobs=5
    )
    [found] = run([Case(logits, heavy, 1, 1, (int(logits.argmax()),), (1,))])
    assert found.token == 0
    assert plain is not None
    assert found.logprobs is not None
    assert found.logprobs.top == plain.top
    assert found.logprobs.token == pytest.approx(float(torch.log_softmax(torch.tensor(logits, dtype=torch.float64), 0)[0]), abs=1e-12)


@pytest.mark.parametrize("greedy", [True, False])
def test_no_end_token_comes_before_min_tokens_and_ignored_ones_are_not_banned(greedy: bool) -> None:
    logits = np.array([0, 1, 90, 3, 80, 2], np.float32)
    params = SamplingParams(temperature=0 if greedy else 1, min_tokens=2, stop_token_ids=(4,))

    def tokens(params: SamplingParams) -> list[int | None]:
        return [sample(logits[None], [SampleRow(params, 1, g, g, ENDS)])[0].token for g in range(4)]

    found = tokens(params)
    assert not {2, 4} & set(found[:2])
    assert found[2:] == [2, 2]
    assert tokens(dataclasses.replace(params, ignore_eos=True)) == [2, 2, 2, 2]


def test_a_row_that_may_choose_nothing_fails_alone_and_says_so() -> None:
    logits = np.array([[1, 2], [1, 2], [1, 2]], np.float32)
    params = SamplingParams(temperature=0)
    nothing = SampleRow(SamplingParams(min_tokens=1, stop_token_ids=(0, 1)), 0, 5)
    first, failed, last = sample(logits, [SampleRow(params, 0, 0), nothing, SampleRow(params, 0, 0)])
    assert (first.token, failed.token, last.token) == (1, None, 1)
    assert failed.error is not None
    assert "no token is left to choose at position 5" in failed.error


@pytest.mark.parametrize("repetition", [5e-324, 1e-300, 2.0])
def test_extreme_penalties_and_biases_keep_the_row_whole(repetition: float) -> None:
    logits = np.array([3.4e38, -3.4e38, 0, -0.0], np.float32)
    params = SamplingParams(
        temperature=5e-324, repetition_penalty=repetition, logit_bias={2: 100}, frequency_penalty=2, top_p=0.5, min_p=0.1
    )
    case = Case(logits, params, 1, 1, (0, 1, 2, 3), (1, 3))
    [found] = run([case])
    assert found.token == case.expected() == 0


def test_minus_zero_is_as_good_as_zero() -> None:
    logits = np.array([[-1, -0.0, 0.0], [-1, 0.0, -0.0]], np.float32)
    assert [found.token for found in sample(logits, [SampleRow(SamplingParams(temperature=0), 0, 0)] * 2)] == [1, 1]


@given(st.lists(st.integers(0, 50), max_size=80), st.lists(st.integers(0, 50), max_size=80), st.data())
def test_a_history_counts_what_joined_and_did_not_leave(prompt: list[int], output: list[int], data: Any) -> None:
    history = History(prompt)
    for token in output:
        history.push(token)
    stay = data.draw(st.integers(0, len(output)))
    for token in reversed(output[stay:]):
        history.pop(token)
    ids, counts, in_prompt = history.arrays()
    found = {int(i): (int(c), bool(p)) for i, c, p in zip(ids, counts, in_prompt, strict=True)}
    assert len(found) == len(ids)
    kept = output[:stay]
    assert {i: v for i, v in found.items() if v != (0, False)} == {i: (kept.count(i), i in prompt) for i in {*prompt, *kept}}


def test_a_history_gives_back_only_what_it_has() -> None:
    history = History([1])
    with pytest.raises(ValueError, match="token 1 is not in the output"):
        history.pop(1)


def test_the_samples_of_one_request_have_seeds_of_their_own() -> None:
    seeds = [child_seed(s, i) for s in (0, 1, -1, 2**64 - 1) for i in range(128)]
    assert child_seed(7, 0) == 7
    assert child_seed(7, 3) == philox(7, 3, CHILD_STREAM)
    assert len({s % 2**64 for s in seeds}) == 3 * 128  # −1 and 2⁶⁴ − 1 are one seed
    assert all(0 <= s < 2**64 for s in (child_seed(5, i) for i in range(1, 128)))
    assert {child_seed(9, i) for i in range(4)} < {child_seed(9, i) for i in range(8)}


@pytest.mark.parametrize("change", [None, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, 500, VOCAB - 1, VOCAB])
def test_a_few_plain_rows_get_what_the_pass_gives_them(change: float | None, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ties, zeros of both signs, logits that are none, and columns that are no tokens: looked through or passed over, the same."""
    logits = np.random.default_rng(at).integers(-5, 3, (2, VOCAB + 9)).astype(np.float32)
    logits[0, :40] = -0.0
    if change is not None:
        logits[1, at] = change
    greedy = SamplingParams(temperature=0)
    rows = [SampleRow(greedy, 1, 9), SampleRow(dataclasses.replace(greedy, min_tokens=3), 1, 9, 3, ENDS)]
    assert all(row.plain for row in rows)
    quick = sample(logits, rows, VOCAB)
    monkeypatch.setattr(sampler, "FEW", 0)
    assert quick == sample(logits, rows, VOCAB)
    assert (quick[1].token is None) == (change is not None and at < VOCAB)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.5}, {"logprobs": 0}, {"logit_bias": {3: 1.0}}, {"repetition_penalty": 1.1}, {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1}, {"min_tokens": 5}, {"constraint": Constraint("regex", "a+")},
    ],
    ids=str,
)  # fmt: skip
def test_a_row_with_anything_else_to_look_at_is_not_plain(params: dict[str, Any]) -> None:
    assert not SampleRow(SamplingParams(**{"temperature": 0, **params}), 1, 9, 0, ENDS).plain
