"""What an artifact holds beyond its model: layers, biases and residual tensors that a loader would leave out in silence."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import Final

from arctool.uqff.discovery import CONFIG_NAME, RESIDUAL_NAME
from arctool.uqff.reader import Artifact

TOLERATED: Final = re.compile(r".*\.rotary_emb\.inv_freq")
"""Buffers that old checkpoints carry and that follow from the config."""


def strange_layers(artifact: Artifact, expected: Collection[str]) -> tuple[str, ...]:
    """Keys of the layers that are no part of the model whose tensors, by full name, are `expected`."""
    known = {name.removesuffix(".weight").removesuffix(".bias") for name in expected}
    return tuple(sorted(set(artifact.keys()) - known))


def strangers(artifact: Artifact, expected: Collection[str]) -> Iterator[str]:
    """A sentence for everything that the artifact holds and its model, whose tensors are `expected`, does not have."""
    strange = strange_layers(artifact, expected)
    for key in strange:
        yield f"{artifact.directory}: layer {key} is no part of the model that {CONFIG_NAME} describes"
    for key in sorted(set(artifact.keys()) - set(strange)):
        if f"{key}.bias" not in expected and f"{key}.bias" in artifact.entries(key):
            yield f"{artifact.directory}: {key}.bias: {CONFIG_NAME} implies no such bias; the model would be another one"
    for name in artifact.residual_names():
        if name not in expected and not TOLERATED.fullmatch(name):
            yield f"{artifact.directory / RESIDUAL_NAME}: {name} is no part of the model that {CONFIG_NAME} describes"
