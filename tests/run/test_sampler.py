"""Filters keep exactly the tokens that their definitions name, draws follow the distribution, and rows never meet."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from arctool.errors import RequestError
from arctool.run.sampling.constraint import Constraint
from arctool.run.sampling.noise import uniform
from arctool.run.sampling.oracle import candidates, draw
from arctool.run.sampling.params import SamplingParams
from arctool.run.sampling.sampler import SampleRow, sample

logit_lists = st.lists(st.integers(-40, 40).map(lambda i: i / 4), min_size=1, max_size=30)


def softmax(logits: list[float], temperature: float) -> list[float]:
    """Plain Python, term by term."""
    top = max(logits)
    weights = [math.exp((x - top) / temperature) for x in logits]
    return [w / math.fsum(weights) for w in weights]


def kept_by_definition(logits: list[float], params: SamplingParams) -> set[int]:
    """The surviving tokens by the words of the definitions: sets and sorted lists, no arrays."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if params.top_k > 0:
        order = order[: params.top_k]
    if params.top_p < 1:
        probabilities = softmax([logits[i] for i in order], params.temperature)
        reached, count = 0.0, 0
        while count < len(order) and reached < params.top_p:
            reached += probabilities[count]
            count += 1
        order = order[:count]
    if params.min_p > 0:
        least = params.min_p * math.exp(0)
        order = [i for i in order if math.exp((logits[i] - logits[order[0]]) / params.temperature) >= least * (1 - 1e-12)]
    return set(order)


@settings(max_examples=300)
@given(
    logit_lists,
    st.sampled_from([0.25, 1.0, 2.0]),
    st.sampled_from([-1, 0, 1, 2, 5, 29, 10**9]),
    st.sampled_from([0.1, 0.51, 0.93, 1.0]),
    st.sampled_from([0.0, 0.03, 0.4, 1.0]),
)
def test_the_filters_keep_what_their_definitions_say(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    ids, probabilities = candidates(np.array(logits, np.float32), params)
    assert set(ids.tolist()) == kept_by_definition(logits, params)
    wanted = softmax([logits[i] for i in ids], temperature)
    np.testing.assert_allclose(probabilities, wanted, rtol=1e-9)


def test_ties_at_the_cut_go_to_the_lower_token_id() -> None:
    logits = np.array([1, 3, 2, 2, 2, 3], np.float32)
    assert candidates(logits, SamplingParams(top_k=3))[0].tolist() == [1, 5, 2]
    assert candidates(logits, SamplingParams(top_p=0.1))[0].tolist() == [1]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.7, top_k=5),
        SamplingParams(temperature=1.5, top_p=0.8),
        SamplingParams(min_p=0.1),
    ],
    ids=["plain", "top-k", "top-p", "min-p"],
)
def test_draws_follow_the_filtered_distribution(params: SamplingParams) -> None:
    logits = np.array([0.3, -1.0, 2.0, 1.9, 0.0, -2.5, 1.0, 0.9], np.float32)
    count = 20_000
    rows = [SampleRow(params, seed=7, position=p) for p in range(count)]
    drawn = np.bincount([r.token for r in sample(np.tile(logits, (count, 1)), rows)], minlength=8)
    kept = sorted(kept_by_definition(logits.tolist(), params))
    wanted = softmax([float(logits[i]) for i in kept], params.temperature)
    assert drawn.sum() == drawn[kept].sum() == count
    assert stats.chisquare(drawn[kept], np.array(wanted) * count).pvalue > 1e-4
    # The test can fail: a slightly wrong temperature would not pass.
    wrong = softmax([float(logits[i]) for i in kept], params.temperature * 1.15)
    assert stats.chisquare(drawn[kept], np.array(wrong) * count).pvalue < 1e-4


def test_random_numbers_are_uniform_and_unrelated_over_seeds_positions_and_streams() -> None:
    by_position = np.array([uniform(1, p) for p in range(4000)])
    by_seed = np.array([uniform(s, 5) for s in range(4000)])
    by_stream = np.array([uniform(1, p, stream=1) for p in range(4000)])
    for numbers in (by_position, by_seed, by_stream):
        assert stats.kstest(numbers, "uniform").pvalue > 1e-4
    for a, b in [(by_position, by_seed), (by_position, by_stream), (by_position[1:], by_position[:-1])]:
        assert abs(np.corrcoef(a, b)[0, 1]) < 0.06


def philox(counter: int, key: tuple[int, int]) -> int:
    """First word of Philox-4x64-10 (Salmon et al., SC 2011), in plain integers."""
    mask = 2**64 - 1
    c = [counter, 0, 0, 0]
    k0, k1 = key
    for _ in range(10):
        high, low = divmod(0xD2E7470EE14C6C93 * c[0], 2**64)
        other_high, other_low = divmod(0xCA5A826395121157 * c[2], 2**64)
        c = [other_high ^ c[1] ^ k0, other_low, high ^ c[3] ^ k1, low]
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & mask, (k1 + 0xBB67AE8584CAA73B) & mask
    return c[0]


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (42, 7), (2**64 - 1, 10**6), (-1, 3)])
def test_random_numbers_are_philox_s_so_a_seed_means_the_same_for_ever(seed: int, position: int) -> None:
    # numpy steps the counter before it draws.
    assert uniform(seed, position) == (philox(position + 1, (seed % 2**64, 0)) >> 11) / 2**53
    assert uniform(seed, position, stream=9) == (philox(position + 1, (seed % 2**64, 9)) >> 11) / 2**53


@settings(max_examples=50)
@given(st.integers(0, 2**64 - 1), st.integers(1, 6), st.randoms(use_true_random=False))
def test_a_row_s_token_does_not_depend_on_its_neighbours(seed: int, rows: int, random: Any) -> None:
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal((rows, 37)) * 3).astype(np.float32)
    choices = [
        SamplingParams(temperature=random.choice([0.0, 0.5, 1.0, 2.0]), top_k=random.choice([0, 3]), top_p=0.9, logprobs=2)
        for _ in range(rows)
    ]
    asked = [SampleRow(p, seed + i, i * 11) for i, p in enumerate(choices)]
    together = sample(logits, asked)
    for i in range(rows):
        assert sample(logits[i : i + 1], asked[i : i + 1]) == [together[i]]
    order = list(range(rows))
    random.shuffle(order)
    assert sample(logits[order], [asked[i] for i in order]) == [together[i] for i in order]


def test_the_same_seed_and_position_give_the_same_token_and_others_do_not() -> None:
    logits = np.zeros((1, 1000), np.float32)

    def token(seed: int, position: int) -> int | None:
        return sample(logits, [SampleRow(SamplingParams(), seed, position)])[0].token

    assert token(3, 9) == token(3, 9)
    assert len({token(3, p) for p in range(50)}) > 40
    assert len({token(s, 9) for s in range(50)}) > 40


def test_greedy_takes_the_best_and_the_lower_id_of_equals() -> None:
    [result] = sample(np.array([[1, 5, 5, 0]], np.float32), [SampleRow(SamplingParams(temperature=0), 0, 0)])
    assert result.token == 1


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-9])
def test_a_temperature_near_zero_is_as_good_as_greedy(temperature: float) -> None:
    logits = np.array([[1, 5, 4.999, -300]], np.float32)
    rows = [SampleRow(SamplingParams(temperature=temperature, top_p=0.9, top_k=3, min_p=0.1), 1, 1)]
    assert sample(logits, rows)[0].token == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_a_logit_that_is_not_finite_fails_alone_and_says_where(bad: float, temperature: float) -> None:
    logits = np.array([[1, 2, 3], [1, bad, 3], [3, 2, 1]], np.float32)
    rows = [SampleRow(SamplingParams(temperature=0), 0, 4), SampleRow(SamplingParams(temperature=temperature), 0, 5)]
    good, failed, also_good = sample(logits, [*rows, rows[0]])
    assert (good.token, also_good.token) == (2, 0)
    assert failed.token is None
    assert failed.error is not None
    assert "token 1 at position 5" in failed.error


def test_log_probabilities_are_those_of_the_model_before_temperature_and_filters() -> None:
    logits = [0.5, 2.0, -1.0, 2.0, 1.0]
    params = SamplingParams(temperature=0, top_k=1, logprobs=3)
    [result] = sample(np.array([logits], np.float32), [SampleRow(params, 0, 0)])
    wanted = [math.log(p) for p in softmax(logits, 1.0)]
    assert result.logprobs is not None
    assert result.logprobs.token == pytest.approx(wanted[1], abs=1e-12)
    assert [i for i, _ in result.logprobs.top] == [1, 3, 4]
    assert [p for _, p in result.logprobs.top] == pytest.approx([wanted[1], wanted[3], wanted[4]], abs=1e-12)


def test_the_cumulative_distribution_is_inverted_at_its_ends() -> None:
    ids, probabilities = np.array([4, 7, 9]), np.array([0.0, 0.5, 0.5])
    assert draw(ids, probabilities, 0.0) == 7  # never a token of probability zero
    assert draw(ids, probabilities, 0.5) == 9
    assert draw(ids, probabilities, math.nextafter(1.0, 0.0)) == 9


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", [-0.1, 2.1, 100, math.nan, math.inf, "1", None, True, 10**400]),
        ("top_p", [0, -0.5, 1.1, math.nan, "0.5", None]),
        ("top_k", [-2, 1.5, "4", True, None, 2**70]),
        ("min_p", [-0.1, 2, math.nan, None]),
        ("typical_p", [0, -0.1, 1.01, math.nan, "0.5", None, True]),
        ("repetition_penalty", [0, -1, 2.1, math.nan, math.inf, "1", None, True]),
        ("presence_penalty", [-2.1, 3, math.nan, "0", None, False]),
        ("frequency_penalty", [-2.1, 3, math.nan, "0", None, False]),
        ("logit_bias", [{1: 101}, {1: -101}, {1: math.nan}, {1: "2"}, {1: True}, {-1: 1}, {"1": 1}, {1.5: 1}, {True: 1}, {2**31: 1}]),
        ("logit_bias", [None, 3, "ab", [1], [(1, 2, 3)], [(1, 1), (1, 2)], ["ab"]]),
        ("seed", [2**70, -(2**63) - 1, 1.0, "1", True]),
        ("n", [0, -1, 129, 100_000, 1.5, "2", None, True]),
        ("min_tokens", [-1, 2**31, 1.5, "4", None, True]),
        ("include_stop_str_in_output", [1, "yes", None]),
        ("constraint", ["json", {}, 3]),
        ("priority", [2**31, -(2**31) - 1, 1.5, "1", None, True]),
        ("cache_salt", [None, 3, b"a", "a" * 257, "\ud800"]),
        ("max_tokens", [0, -1, 1.5, "4", True, 2**40]),
        ("stop", ["abc", [""], [3], ["a"] * 17, None]),
        ("stop_token_ids", [[-1], ["a"], [1.0], 3, None]),
        ("ignore_eos", [1, "yes", None]),
        ("logprobs", [-1, 21, 1.5, True]),
    ],
)
def test_every_bad_parameter_is_refused_by_name(field: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(RequestError, match=f"^{field}: expected") as caught:
            SamplingParams(**{field: value})
        assert len(str(caught.value)) < 200


def test_the_edges_of_every_parameter_are_accepted() -> None:
    SamplingParams(temperature=2, top_p=1, top_k=-1, min_p=1, seed=-(2**63), max_tokens=1, stop=["a"] * 16, logprobs=20)
    SamplingParams(typical_p=1, repetition_penalty=2, presence_penalty=2, frequency_penalty=2, n=128, min_tokens=7, max_tokens=7)
    SamplingParams(typical_p=1e-9, repetition_penalty=1e-9, presence_penalty=-2, frequency_penalty=-2, n=1, min_tokens=2**31 - 1)
    SamplingParams(priority=-(2**31), cache_salt="é" * 256, constraint=Constraint("json_object"), include_stop_str_in_output=True)
    SamplingParams(temperature=0, top_p=1e-9, top_k=10**9, min_p=0, seed=2**64 - 1, stop_token_ids=(0, 5), logprobs=0)


def test_min_tokens_may_not_exceed_max_tokens() -> None:
    with pytest.raises(RequestError, match=r"^min_tokens: expected an integer from 0 to 3, found 4"):
        SamplingParams(min_tokens=4, max_tokens=3)


def test_biases_of_every_form_are_the_same_and_leave_the_parameters_hashable() -> None:
    forms: list[Any] = [{7: 1, 2: -3.5}, [(7, 1), [2, -3.5]], ((np.int64(2), -3.5), (7, 1.0)), {np.int32(7): 1, 2: -3.5}]
    made = {SamplingParams(logit_bias=form) for form in forms}
    assert len(made) == 1
    assert made.pop().logit_bias == ((2, -3.5), (7, 1.0))
    SamplingParams(logit_bias=dict.fromkeys(range(50000), 1.0))
