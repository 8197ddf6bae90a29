"""What llama.cpp calls an importance matrix: the mean square of every input channel of every linear layer over calibration windows.

Taken where our own bakes take theirs, from the stream of `bake.calibration` (the diagonal of its moments), but through the unquantised
model, as llama.cpp's tool does it: so both sides learn from the same tokens. Rows of q and k lie in another order in a GGUF file, their
inputs do not.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from arctool.bake.calibration.stream import Calibration, Stage, one_thread_per_call
from arctool.bake.source.checkpoint import Checkpoint
from arctool.bench.llama_cpp import gguf_name
from arctool.errors import VerificationError
from arctool.run.models.spec import EMBEDDING_KEY, Role


def importance(checkpoint: Checkpoint, ids: NDArray[np.int32], jobs: int | None = None) -> dict[str, NDArray[np.float32]]:
    """E[x²] f32 [in] by the tensor's name in a GGUF file, over windows `ids` i32 [windows, tokens]; the head has none, as in llama.cpp.

    Raises VerificationError where too few rows of a layer's input are finite.
    """
    found: dict[str, NDArray[np.float32]] = {}
    norms = {spec.key: checkpoint.tensor(spec.name) for spec in checkpoint.specs if spec.role is Role.NORM}
    with ThreadPoolExecutor(jobs or os.cpu_count() or 1) as pool, one_thread_per_call():
        stream = Calibration(checkpoint.config, norms, checkpoint.weight(EMBEDDING_KEY), ids, pool)
        stream.embed()
        for layer in range(stream.layers):
            for stage in stream.stages(layer):
                found |= _stage(stream, stage, checkpoint)
            stream.release(layer)
    return found


def _stage(stream: Calibration, stage: Stage, checkpoint: Checkpoint) -> dict[str, NDArray[np.float32]]:
    """Measure a stage's input, then let it go on through the layers as they are."""
    seen, inputs, _ = stream.measure(stage, True)
    assert seen is not None
    if seen.doubt is not None:
        raise VerificationError(f"{stage.linears[0].key}: {seen.doubt}; no importance can be measured")
    for linear in stage.linears:
        stream.install(linear.key, checkpoint.weight(linear.key), checkpoint.bias(linear.key))
    stream.advance(stage, inputs)
    power = np.ascontiguousarray(np.diagonal(seen.hessian))
    return {gguf_name(linear.key): power for linear in stage.linears}
