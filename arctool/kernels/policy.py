"""Which families of weights there are, by the kernels that they need: plain values, so that a policy's whole domain can be tested."""

from __future__ import annotations

from typing import Literal, get_args

WeightKind = Literal[
    "trellis-table",
    "trellis-sum2",
    "ggml-q2k",
    "ggml-q3k",
    "ggml-q4_0",
    "ggml-q4_1",
    "ggml-q4k",
    "ggml-q5_0",
    "ggml-q5_1",
    "ggml-q5k",
    "ggml-q6k",
    "ggml-q8_0",
    "ggml-f16",
    "fp8",
    "afq",
    "mxfp4",
    "dense-bf16",
    "dense-f32",
]
KINDS: tuple[WeightKind, ...] = get_args(WeightKind)
