"""Many requests, each served as if alone; every ending frees what it held; text and reasons are right."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import DirectorySource, Reference, random_ids

from arctool.errors import RequestError
from arctool.kernels.cpu.attention import value_pitch
from arctool.kernels.registry import Registry
from arctool.run.engine import Completion, Engine, FinishReason, Update
from arctool.run.kv.cache import plan_cache
from arctool.run.runner import ModelRunner
from arctool.run.sampling.noise import child_seed
from arctool.run.sampling.params import SamplingParams
from arctool.run.tokenizer import Tokenizer
from arctool.run.weights import load_model

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
LENGTHS = [3, 70, 1, 33, 129]


def make_engine(
    source: DirectorySource,
    registry: Registry,
    *,
    max_seqs: int = 4,
    text: bool = False,
    blocks: int | None = None,
    caching: bool = True,
) -> Engine:
    """Small blocks and chunks, and a cache full of NaN, so that boundaries and stale slots matter."""
    config = source.config
    wide = config.head_dim + value_pitch(config.head_dim)
    memory = None if blocks is None else blocks * 16 * config.num_layers * config.num_kv_heads * wide * 4
    plan = plan_cache(source.config, max_seqs=max_seqs, block_size=16, kv_memory=memory)
    runner = ModelRunner(load_model(source, registry), plan, max_tokens=32, max_seqs=max_seqs)
    for store in (*runner.cache.keys, *runner.cache.values):
        store.fill_(float("nan"))
    tokenizer = Tokenizer(source.assets, source.config.vocab_size) if text else None
    return Engine(runner, tokenizer, source.config.eos_token_ids, max_seqs=max_seqs, max_step_tokens=32, enable_prefix_caching=caching)


@pytest.fixture
def engine(llama: DirectorySource, registry: Registry) -> Iterator[Engine]:
    """An engine with text; whatever a test does, at its end nothing may be left."""
    made = make_engine(llama, registry, text=True)
    yield made
    assert_idle(made)


def assert_idle(engine: Engine) -> None:
    engine.scheduler.check()
    assert not engine.has_work()
    assert not list(engine.scheduler.live())
    assert engine.scheduler.paging.use.owned == 0


def run_to_end(engine: Engine) -> dict[int, Completion]:
    done = {}
    while engine.has_work():
        for update in engine.step():
            if update.completion is not None:
                done[update.request_id] = update.completion
        engine.scheduler.check()
    return done


def test_greedy_tokens_are_those_of_transformers(tiny: DirectorySource, expected: Reference, registry: Registry) -> None:
    prompts = [random_ids(seed, length) for seed, length in enumerate([2, 40, 100, 64])]
    wanted = [tuple(expected.greedy(prompt, 24)) for prompt in prompts]
    assert len(set(wanted)) == 4, "equal outputs would prove nothing"
    assert all(len(set(tokens)) >= 4 for tokens in wanted), "the fixture repeats itself: it would prove nothing"
    done = make_engine(tiny, registry).generate(prompts, [GREEDY] * 4)
    assert [c.token_ids for c in done] == wanted


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("threads", [1, 2], indirect=True)
@pytest.mark.usefixtures("threads")
def test_requests_together_give_exactly_the_tokens_of_each_alone(tiny: DirectorySource, registry: Registry, sampled: bool) -> None:
    prompts = [random_ids(100 + i, n) for i, n in enumerate(LENGTHS)]
    params = [
        SamplingParams(temperature=0.4 * (i + 1) * sampled, top_p=1 - 0.1 * i, top_k=20 * i, seed=i, max_tokens=16 - 2 * i, ignore_eos=True)
        for i in range(len(prompts))
    ]
    lonely = make_engine(tiny, registry, max_seqs=1)
    alone = [lonely.generate([p], [s])[0].token_ids for p, s in zip(prompts, params, strict=True)]
    assert len(set(alone)) == len(alone)
    together = make_engine(tiny, registry, max_seqs=3)
    # Staggered arrivals: prompts and decodes share steps, blocks interleave.
    ids, done = [], {}
    for prompt, one in zip(prompts, params, strict=True):
        ids.append(together.add_request(prompt, one))
        for update in [*together.step(), *together.step()]:
            if update.completion is not None:
                done[update.request_id] = update.completion
    done |= run_to_end(together)
    assert [done[i].token_ids for i in ids] == alone
    assert_idle(together)


def test_prefix_hits_and_preemptions_change_no_token(tiny: DirectorySource, registry: Registry) -> None:
    head = random_ids(7, 45)
    prompts = [[*head, *random_ids(i, n)] for i, n in enumerate([1, 3, 20, 3])]
    params = [SamplingParams(temperature=0.8, seed=i, max_tokens=40, ignore_eos=True) for i in range(4)]
    plain = make_engine(tiny, registry, max_seqs=1, caching=False)
    alone = [plain.generate([p], [s])[0].token_ids for p, s in zip(prompts, params, strict=True)]
    assert len(set(alone)) == 4
    assert plain.telemetry().total.prefix_hits == 0
    roomy, short = make_engine(tiny, registry), make_engine(tiny, registry, blocks=9)
    for engine in (roomy, short):
        assert [c.token_ids for c in engine.generate(prompts, params)] == alone
        assert [c.token_ids for c in engine.generate(prompts[::-1], params[::-1])] == alone[::-1]
        assert_idle(engine)
    assert [c.cached_tokens for c in roomy.generate(prompts, params)] == [32, 32, 64, 32]
    assert short.telemetry().total.prefix_hits > 100
    assert roomy.telemetry().total.preempted == 0
    assert short.telemetry().total.preempted > 0


def test_samples_of_one_request_are_each_what_their_seed_gives_alone(llama: DirectorySource, registry: Registry) -> None:
    prompt = random_ids(4, 21)
    asked = SamplingParams(temperature=1.5, seed=9, n=4, max_tokens=12, ignore_eos=True)
    lonely = make_engine(llama, registry, max_seqs=1)
    seeds = [child_seed(9, i) for i in range(4)]
    assert (seeds[0], len(set(seeds))) == (9, 4)
    alone = [lonely.generate([prompt], [replace(asked, seed=seed, n=1)])[0].token_ids for seed in seeds]
    assert len(set(alone)) == 4
    for engine in (make_engine(llama, registry, max_seqs=8), make_engine(llama, registry, max_seqs=2), lonely):
        before = engine.telemetry().total
        done = engine.generate([prompt, prompt[:5]], [asked, GREEDY])
        assert [(c.request_id - done[0].request_id, c.index) for c in done] == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0)]
        assert [c.token_ids for c in done[:4]] == alone
        total = engine.telemetry().total
        if engine.scheduler.limits.max_seqs == 8:
            assert total.prefill_tokens - before.prefill_tokens == 21 + 5, "the prompt is computed once"
        assert_idle(engine)


def test_updates_name_their_sample(engine: Engine) -> None:
    updates = list(engine.stream([[5, 6, 7]], [SamplingParams(temperature=1, seed=2, n=3, max_tokens=5, ignore_eos=True)]))
    for index in range(3):
        mine = [u for u in updates if u.index == index]
        [completion] = [u.completion for u in mine if u.completion is not None]
        assert completion.index == index
        assert tuple(t for u in mine for t in u.token_ids) == completion.token_ids
        assert "".join(u.text for u in mine) == completion.text
    assert len({u.request_id for u in updates}) == 1


@pytest.mark.parametrize("steps", [0, 1, 2, 6])
def test_cancelling_ends_every_sample(engine: Engine, steps: int) -> None:
    request = engine.add_request([5] * 40, SamplingParams(seed=1, n=3, max_tokens=30, ignore_eos=True))
    for _ in range(steps):
        engine.step()
    done = [u.completion for u in engine.cancel(request) if u.completion is not None]
    assert [(c.index, c.finish_reason) for c in done] == [(i, FinishReason.ABORT) for i in range(3)]
    assert all(len(c.token_ids) == max(0, steps - 1) for c in done)


def test_a_step_that_fails_ends_its_requests_by_name_and_the_engine_goes_on(llama: DirectorySource, registry: Registry) -> None:
    engine = make_engine(llama, registry, max_seqs=2)
    [wanted] = engine.generate([[9, 8, 7]], [GREEDY])
    run = engine.runner.run

    def faulty(work: list, copies: list) -> np.ndarray:
        if any(s.prompt_ids == (6,) * 9 and len(s.output_ids) == 3 for s, _ in work):
            raise MemoryError("no room for 7 bytes")
        return run(work, copies)

    engine.runner.run = faulty  # type: ignore[method-assign, assignment]
    done = engine.generate([[5] * 9, [6] * 9, [9, 8, 7]], [replace(GREEDY, n=2), GREEDY, GREEDY])
    assert [c.finish_reason for c in done] == [FinishReason.ERROR] * 3 + [FinishReason.LENGTH]
    assert [len(c.token_ids) for c in done] == [3, 1, 3, 24]
    assert {c.error for c in done[:3]} == {"the engine failed in a step of this request: MemoryError: no room for 7 bytes"}
    assert done[3].token_ids == wanted.token_ids
    assert_idle(engine)


@pytest.mark.parametrize("kind", [ValueError, BaseException], ids=["error", "panic"])
def test_a_token_that_cannot_be_accepted_ends_its_own_request_and_no_other(
    llama: DirectorySource, registry: Registry, kind: type[BaseException]
) -> None:
    prompts = [random_ids(i, 20) for i in range(3)]
    wanted = [c.token_ids for c in make_engine(llama, registry).generate(prompts, [GREEDY] * 3)]
    engine = make_engine(llama, registry)
    ids = [engine.add_request(p, GREEDY) for p in prompts]
    for _ in range(3):
        engine.step()
    state = engine._requests[ids[1]][0].sequence.state

    def broken(token: int) -> None:
        raise kind("no more")

    object.__setattr__(state, "push", broken) if hasattr(type(state), "__dataclass_fields__") else setattr(state, "push", broken)
    done = run_to_end(engine)
    assert done[ids[1]].finish_reason is FinishReason.ERROR
    assert "failed to accept a token" in str(done[ids[1]].error)
    assert [done[ids[0]].token_ids, done[ids[2]].token_ids] == [wanted[0], wanted[2]]
    assert_idle(engine)


def test_an_interrupted_step_is_computed_anew_for_those_who_stay(llama: DirectorySource, registry: Registry) -> None:
    engine = make_engine(llama, registry)
    asked = SamplingParams(temperature=1, seed=3, n=3, max_tokens=12, ignore_eos=True)
    wanted = [c.token_ids for c in engine.generate([random_ids(1, 13)], [asked])]
    run, calls = engine.runner.run, []

    def interrupted(work: list, copies: list) -> np.ndarray:
        calls.append(0)
        if len(calls) in (1, 3, 4, 9):
            raise KeyboardInterrupt
        return run(work, copies)

    engine.runner.run = interrupted  # type: ignore[method-assign, assignment]
    request = engine.add_request(random_ids(1, 13), asked)
    done = {}
    while engine.has_work():
        with contextlib.suppress(KeyboardInterrupt):
            done.update({u.index: u.completion.token_ids for u in engine.step() if u.completion is not None})
        engine.scheduler.check()
    assert [done[i] for i in range(3)] == wanted
    assert request == 1
    assert len(calls) > 9
    assert_idle(engine)


def test_a_lower_priority_number_is_served_first(llama: DirectorySource, registry: Registry) -> None:
    engine = make_engine(llama, registry, max_seqs=1)
    ids = [engine.add_request([5, 6], replace(GREEDY, priority=p, max_tokens=2)) for p in (0, 3, -2)]
    assert list(run_to_end(engine)) == [ids[2], ids[0], ids[1]]


def test_a_seed_reproduces_and_no_seed_differs(engine: Engine) -> None:
    def tokens(seed: int | None) -> tuple[int, ...]:
        return engine.generate([[5, 6, 7]], [SamplingParams(temperature=2.0, seed=seed, max_tokens=20, ignore_eos=True)])[0].token_ids

    assert tokens(11) == tokens(11)
    assert len({tokens(11), tokens(12), tokens(None), tokens(None)}) == 4


def test_a_small_cache_makes_requests_wait_and_serves_them_all(llama: DirectorySource, registry: Registry) -> None:
    small = make_engine(llama, registry, max_seqs=4, blocks=4)  # 64 tokens
    assert small.max_model_len == 64
    prompts = [random_ids(i, 20) for i in range(6)]
    done = small.generate(prompts, [GREEDY] * 6)
    roomy = make_engine(llama, registry, max_seqs=4).generate(prompts, [GREEDY] * 6)
    assert [c.token_ids for c in done] == [c.token_ids for c in roomy]
    assert_idle(small)


def test_cancelling_at_any_moment_frees_every_block_and_disturbs_nobody(llama: DirectorySource, registry: Registry) -> None:
    prompts = [random_ids(i, 50) for i in range(3)]
    wanted = make_engine(llama, registry).generate(prompts[:1], [GREEDY])[0].token_ids
    for steps in [0, 1, 2, 3, 6, 20]:
        engine = make_engine(llama, registry, max_seqs=2)
        kept, dropped, waiting = (engine.add_request(p, GREEDY) for p in prompts)
        for _ in range(steps):
            engine.step()
        for request in (dropped, waiting):
            [update] = engine.cancel(request)
            assert update.completion is not None
            assert update.completion.finish_reason is FinishReason.ABORT
            assert engine.cancel(request) == ()
        engine.scheduler.check()
        assert run_to_end(engine)[kept].token_ids == wanted
        assert_idle(engine)


def test_closing_a_stream_cancels_its_requests(engine: Engine) -> None:
    stream = engine.stream([[5, 6, 7]], [GREEDY])
    next(stream)
    stream.close()
    assert_idle(engine)


def test_streams_side_by_side_each_get_only_their_own(engine: Engine) -> None:
    wanted = [engine.generate([p], [GREEDY])[0].token_ids for p in ([5, 6], [9, 8])]
    other = engine.add_request([9, 8], GREEDY)
    got = list(engine.stream([[5, 6]], [GREEDY]))
    assert tuple(t for u in got for t in u.token_ids) == wanted[0]
    assert {u.request_id for u in got} != {other}


@pytest.mark.parametrize("max_seqs", [1, 4])
def test_interleaved_streams_each_yield_exactly_what_they_yield_alone(llama: DirectorySource, registry: Registry, max_seqs: int) -> None:
    prompts = [[[5, 6], [40] * 50], [[9, 8, 7]], [random_ids(1, 70)]]
    lonely = make_engine(llama, registry, max_seqs=max_seqs, text=True)

    def said(stream: Iterator[Update]) -> list[list]:
        """Ids, text and endings of each request of a stream, in its order."""
        by_request: dict[int, list] = {}
        for u in stream:
            ending = None if u.completion is None else (u.completion.token_ids, u.completion.text, u.completion.finish_reason)
            by_request.setdefault(u.request_id, []).append((u.token_ids, u.text, ending))
        return [by_request[i] for i in sorted(by_request)]

    alone = [said(lonely.stream(group, [GREEDY] * len(group))) for group in prompts]
    assert len({str(updates) for group in alone for updates in group}) == 4
    engine = make_engine(llama, registry, max_seqs=max_seqs, text=True)
    streams = {i: engine.stream(group, [GREEDY] * len(group)) for i, group in enumerate(prompts)}
    got: dict[int, list[Update]] = {i: [] for i in streams}
    bystander = engine.add_request([3, 4], GREEDY)
    while streams:
        for i in list(streams):
            update = next(streams[i], None)
            if update is None:
                del streams[i]
            else:
                got[i].append(update)
        engine.step()  # somebody else's step loses nothing either
    assert [said(iter(got[i])) for i in got] == alone
    engine.cancel(bystander)
    assert not engine._inboxes
    assert_idle(engine)


def test_a_request_whose_tokens_cannot_be_decoded_fails_alone(llama: DirectorySource, registry: Registry) -> None:
    engine = make_engine(llama, registry, text=True)
    [wanted, other] = engine.generate([[5, 6], [9, 8]], [GREEDY] * 2)
    assert engine.tokenizer is not None
    decode, bad = engine.tokenizer.decode, other.token_ids[3]
    assert bad not in wanted.token_ids

    def faulty(ids: list[int], shown: object = ()) -> str:
        if bad in ids:
            raise RequestError("token ids: cannot be decoded by tokenizer.json: no such byte")
        return decode(ids)

    engine.tokenizer.decode = faulty  # type: ignore[method-assign]
    good, failed = engine.generate([[5, 6], [9, 8]], [GREEDY] * 2)
    assert good.text == wanted.text
    assert (failed.finish_reason, failed.error) == (FinishReason.ERROR, "token ids: cannot be decoded by tokenizer.json: no such byte")
    assert_idle(engine)


def test_a_prompt_as_long_as_the_context_is_refused_with_both_numbers(engine: Engine) -> None:
    with pytest.raises(RequestError, match=r"prompt: 256 tokens leave no room in the context of 256"):
        engine.add_request([5] * 256, GREEDY)
    [done] = engine.generate([[5] * 255], [SamplingParams(temperature=0)])
    assert len(done.token_ids) == 1


def test_without_max_tokens_the_context_is_the_end(engine: Engine) -> None:
    [done] = engine.generate([[5] * 200], [SamplingParams(temperature=0, ignore_eos=True)])
    assert (len(done.token_ids), done.finish_reason) == (56, FinishReason.LENGTH)


@pytest.mark.parametrize("prompt", [[], [512], [-1], [True], [1.0], ["a"], [np.bool_(True)], [torch.tensor(True)], [np.float32(1)]])
def test_a_prompt_that_is_no_list_of_token_ids_is_refused(engine: Engine, prompt: list) -> None:
    with pytest.raises(RequestError, match=r"^prompt: expected"):
        engine.add_request(prompt, GREEDY)


@pytest.mark.parametrize("prompt", [np.array([5, 6, 7], np.uint16), torch.tensor([5, 6, 7]), [np.int64(5), torch.tensor(6), 7]], ids=repr)
def test_integers_of_numpy_and_torch_are_token_ids(engine: Engine, prompt: Any) -> None:
    [wanted] = engine.generate([[5, 6, 7]], [GREEDY])
    [done] = engine.generate([prompt], [GREEDY])
    assert (done.prompt_ids, done.token_ids) == ((5, 6, 7), wanted.token_ids)
    assert all(type(token) is int for token in done.prompt_ids)
    stop = SamplingParams(temperature=0, stop_token_ids=(np.int32(wanted.token_ids[2]),), max_tokens=24)  # type: ignore[arg-type]
    assert engine.generate([prompt], [stop])[0].finish_reason is FinishReason.STOP


def test_more_tokens_than_the_context_holds_are_refused(engine: Engine) -> None:
    with pytest.raises(RequestError, match=r"max_tokens: 250 prompt tokens \+ 7 new ones exceed the context of 256"):
        engine.add_request([5] * 250, SamplingParams(max_tokens=7))


def test_one_refused_prompt_among_several_leaves_nothing_behind(engine: Engine) -> None:
    with pytest.raises(RequestError):
        engine.generate([[5], []], [GREEDY, GREEDY])


def test_text_is_the_decoded_tokens_and_streams_to_the_same(engine: Engine) -> None:
    assert engine.tokenizer is not None
    updates = list(engine.stream([[5, 6, 7]], [GREEDY]))
    completion = updates[-1].completion
    assert completion is not None
    assert "".join(u.text for u in updates) == completion.text == engine.tokenizer.decode(list(completion.token_ids))
    assert tuple(t for u in updates for t in u.token_ids) == completion.token_ids
    assert len(completion.text) > 10


def test_a_stop_string_ends_the_text_before_it_whatever_tokens_it_straddles(engine: Engine) -> None:
    [whole] = engine.generate([[5, 6, 7]], [GREEDY])
    for at in range(2, len(whole.text) - 6, 5):
        stop = whole.text[at : at + 5]
        if whole.text.find(stop) != at or "\ufffd" in whole.text[: at + 5]:
            continue
        updates = list(engine.stream([[5, 6, 7]], [SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, stop=(stop,))]))
        done = updates[-1].completion
        assert done is not None
        assert done.finish_reason is FinishReason.STOP
        assert done.stopped_by == stop
        assert done.text == whole.text[:at] == "".join(u.text for u in updates)
        assert done.token_ids == whole.token_ids[: len(done.token_ids)]


def test_a_stop_token_ends_the_text_and_is_counted_but_not_shown(engine: Engine) -> None:
    [whole] = engine.generate([[5, 6, 7]], [GREEDY])
    token = whole.token_ids[5]
    first = whole.token_ids.index(token)
    [done] = engine.generate([[5, 6, 7]], [SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, stop_token_ids=(token,))])
    assert engine.tokenizer is not None
    assert (done.finish_reason, done.token_ids) == (FinishReason.STOP, whole.token_ids[: first + 1])
    assert done.text == engine.tokenizer.decode(list(whole.token_ids[:first]))
    assert done.stopped_by is None


def test_an_end_token_stops_unless_it_is_ignored(llama: DirectorySource, registry: Registry) -> None:
    plain = make_engine(llama, registry)
    [whole] = plain.generate([[5, 6, 7]], [GREEDY])
    ending = Engine(plain.runner, None, [whole.token_ids[3]], max_seqs=1)
    [stopped] = ending.generate([[5, 6, 7]], [SamplingParams(temperature=0, max_tokens=24)])
    assert stopped.finish_reason is FinishReason.STOP
    assert stopped.token_ids == whole.token_ids[: whole.token_ids.index(whole.token_ids[3]) + 1]
    [ignored] = ending.generate([[5, 6, 7]], [GREEDY])
    assert (ignored.finish_reason, ignored.token_ids) == (FinishReason.LENGTH, whole.token_ids)


def test_a_request_whose_logits_are_not_finite_fails_alone(llama: DirectorySource, registry: Registry) -> None:
    engine = make_engine(llama, registry)
    prompts = [random_ids(i, 20) for i in range(3)]
    wanted = [c.token_ids for c in engine.generate(prompts, [GREEDY] * 3)]
    run, steps = engine.runner.run, []

    def faulty(work: list, copies: list) -> np.ndarray:
        logits = run(work, copies)
        steps.append(0)
        emitting = [s for s, w in work if w.emits]
        for i, sequence in enumerate(emitting):
            if sequence.prompt_ids == tuple(prompts[1]) and len(sequence.output_ids) == 4:
                logits[i, 77] = math.nan
        return logits

    engine.runner.run = faulty  # type: ignore[method-assign]
    good, failed, also_good = engine.generate(prompts, [GREEDY] * 3)
    assert [good.token_ids, also_good.token_ids] == [wanted[0], wanted[2]]
    assert (failed.finish_reason, failed.token_ids) == (FinishReason.ERROR, wanted[1][:4])
    assert failed.error is not None
    assert "token 77" in failed.error
    assert_idle(engine)


def test_log_probabilities_come_with_every_token_and_agree_with_evaluation(engine: Engine) -> None:
    from arctool.run.evaluate import token_logprobs

    prompt = random_ids(3, 30)
    [done] = engine.generate([prompt], [SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logprobs=2)])
    wanted = token_logprobs(engine.runner.model, [*prompt, *done.token_ids])[-10:]
    assert done.logprobs is not None
    np.testing.assert_allclose([p.token for p in done.logprobs], wanted, atol=1e-4)
    assert all(p.top[0] == (t, p.token) for p, t in zip(done.logprobs, done.token_ids, strict=True))


def test_rows_beyond_the_tokenizer_are_never_chosen(llama: DirectorySource, registry: Registry) -> None:
    engine = make_engine(llama, registry, text=True)
    engine._choices = 60
    [done] = engine.generate([[5, 6, 7]], [SamplingParams(temperature=2, seed=1, max_tokens=50, ignore_eos=True)])
    assert max(done.token_ids) < 60


def test_stop_strings_need_a_tokenizer(llama: DirectorySource, registry: Registry) -> None:
    with pytest.raises(RequestError, match=r"^stop: "):
        make_engine(llama, registry).add_request([5], SamplingParams(stop=("x",)))
