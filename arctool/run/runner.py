"""One step on one device: from planned work to logits. Owns the model and the cache; knows nothing of queues, sampling or text."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Ordered

import numpy as np
from numpy.typing import NDArray

from arctool.kernels.registry import TokenClass
from arctool.run.kv.cache import CachePlan, KVCache
from arctool.run.kv.paging import Copy
from arctool.run.models.decoder import CausalLM
from arctool.run.scheduler import Work
from arctool.run.sequence import Sequence
from arctool.run.step import Span, build_step


class ModelRunner:
    """Runs steps of `model` over a cache of the planned size."""

    def __init__(self, model: CausalLM, cache_plan: CachePlan) -> None:
        self.model = model
        self.plan = cache_plan
        self.cache = KVCache(model.config, cache_plan.num_blocks, cache_plan.block_size, cache_plan.dtype)
        model.rope.reserve(cache_plan.max_model_len)

    def run(self, work: Iterable[tuple[Sequence, Work]], copies: Ordered[Copy] = ()) -> NDArray[np.float32]:
        """Logits f32 [emitting work items, vocab], in the order of `work`; the keys and values of its tokens are cached.

        `copies`: blocks whose content is copied first.
        """
        self.cache.copy_blocks(copies)
        work = list(work)
        spans = [(row, span) for row, (sequence, item) in enumerate(work) for span in _spans(sequence, item)]
        spans.sort(key=lambda pair: pair[1].token_class is not TokenClass.PREFILL)
        logits = self.run_spans([span for _, span in spans])
        rows = [row for row, span in spans if span.logit_tokens]
        return logits[np.argsort(rows)]

    def run_spans(self, spans: list[Span]) -> NDArray[np.float32]:
        """The same for any spans: logits f32 [their logit tokens, vocab]."""
        logits: NDArray[np.float32] = self.model(build_step(spans, self.cache.block_size), self.cache).numpy()
        return logits


def _spans(sequence: Sequence, work: Work) -> list[Span]:
    """The piece of work as spans of one class each."""
    prompt, blocks = len(sequence.prompt_ids), sequence.table.blocks
    spans = []
    if work.first < prompt:
        last, emits = min(work.last, prompt), int(work.emits and work.last <= prompt)
        spans.append(Span(sequence.tokens(work.first, last), work.first, blocks, TokenClass.PREFILL, emits))
    if work.last > prompt:
        first = max(work.first, prompt)
        spans.append(Span(sequence.tokens(first, work.last), first, blocks, TokenClass.DECODE, int(work.emits)))
    return spans
