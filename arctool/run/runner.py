"""One step on one device: from planned work to logits. Owns the model and the cache; knows nothing of queues, sampling or text."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Ordered

import numpy as np
from numpy.typing import NDArray

from arctool.run.compiled.model import CompiledModel, StepLimits
from arctool.run.kv.cache import CachePlan, KVCache
from arctool.run.kv.paging import Copy
from arctool.run.models.decoder import CausalLM
from arctool.run.scheduler import Work
from arctool.run.sequence import Sequence
from arctool.run.step import Span, build_step


class ModelRunner:
    """Runs steps of `model` over a cache of the planned size."""

    def __init__(self, model: CausalLM, cache_plan: CachePlan, *, max_tokens: int, max_seqs: int) -> None:
        """`max_tokens`, `max_seqs`: of one step."""
        self.model = model
        self.plan = cache_plan
        self.cache = KVCache(model.config, cache_plan.num_blocks, cache_plan.block_size, cache_plan.dtype)
        limits = StepLimits(max_tokens, max_seqs, max_seqs, cache_plan.max_model_len)
        self.compiled = CompiledModel(model, self.cache, limits)

    def run(self, work: Iterable[tuple[Sequence, Work]], copies: Ordered[Copy] = ()) -> NDArray[np.float32]:
        """Logits f32 [emitting work items, vocab], in the order of `work`; the keys and values of its tokens are cached.

        `copies`: blocks whose content is copied first.
        """
        self.cache.copy_blocks(copies)
        return self.run_spans([_span(sequence, item) for sequence, item in work])

    def run_spans(self, spans: list[Span]) -> NDArray[np.float32]:
        """The same for any spans: logits f32 [their logit tokens, vocab]."""
        return self.compiled.run(build_step(spans, self.cache.block_size))


def _span(sequence: Sequence, work: Work) -> Span:
    return Span(sequence.tokens(work.first, work.last), work.first, sequence.table.blocks, int(work.emits))
