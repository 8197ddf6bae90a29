"""From a source of weights to a model that runs: every tensor that the architecture declares, present, shaped and prepared.

A source is a checkpoint or an artifact; this room sees only `WeightSource` and knows no file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from arctool.errors import FormatError, GeometryError, SourceError
from arctool.kernels.registry import Prepared, Registry
from arctool.quant.tensor import DenseTensor, Weight
from arctool.run.config import ModelConfig
from arctool.run.layers.linear import Embedding, Linear
from arctool.run.layers.rmsnorm import RMSNorm
from arctool.run.models import architecture
from arctool.run.models.decoder import CausalLM
from arctool.run.models.spec import EMBEDDING_KEY, HEAD_KEY, TensorSpec


class WeightSource(Protocol):
    """Where a model comes from. `key` is a module path without ".weight"; `assets` maps file names to bytes."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def assets(self) -> Mapping[str, bytes]: ...

    def weight(self, key: str) -> Weight: ...

    def bias(self, key: str) -> NDArray[np.float32] | None: ...


def load_model(source: WeightSource, registry: Registry) -> CausalLM:
    """Read, check and prepare every tensor.

    Raises SourceError by tensor name (bias missing or unknown, wrong shape), FormatError for an embedding that no kernel reads.
    """
    found = architecture(source.config.architecture, "config.json")
    specs = {spec.name: spec for spec in found.tensors(source.config)}
    return found.build(source.config, _Loader(source, registry, specs, {}))


@dataclass(frozen=True)
class _Loader:
    """Implements `models.decoder.Parts`. `prepared`: what was prepared so far, so that a tied table is held once."""

    source: WeightSource
    registry: Registry
    specs: Mapping[str, TensorSpec]
    prepared: dict[str, Prepared]

    def linear(self, key: str) -> Linear:
        return Linear(self.registry, self._prepare(key), self._bias(key))

    def norm(self, key: str) -> RMSNorm:
        weight = self._checked(key)
        if not isinstance(weight, DenseTensor):
            raise SourceError(f"{key}.weight: a norm must be dense, found {weight.label}")
        return RMSNorm(torch.tensor(weight.dense()), self.source.config.rms_norm_eps)

    def embedding(self) -> Embedding:
        table = self._prepare(EMBEDDING_KEY)
        try:
            # Asks the kernel itself what it can read; a registry of its own, because a probe is no engagement.
            Registry(self.registry.implementations).embedding(torch.zeros(1, dtype=torch.int64), table)
        except GeometryError as error:
            raise FormatError(f"{EMBEDDING_KEY}.weight: no kernel here reads this embedding: {error}") from error
        return Embedding(self.registry, table)

    def head(self) -> Linear:
        tied = self.source.config.tie_word_embeddings
        return Linear(self.registry, self._prepare(EMBEDDING_KEY if tied else HEAD_KEY), None if tied else self._bias(HEAD_KEY))

    def _prepare(self, key: str) -> Prepared:
        if key not in self.prepared:
            self.prepared[key] = self.registry.prepare(self._checked(key))
        return self.prepared[key]

    def _checked(self, key: str) -> Weight:
        spec = self.specs[f"{key}.weight"]
        weight = self.source.weight(key)
        if weight.shape != spec.shape:
            raise SourceError(f"{spec.name}: config.json implies shape {list(spec.shape)}, found {list(weight.shape)}")
        return weight

    def _bias(self, key: str) -> torch.Tensor | None:
        spec, bias = self.specs.get(f"{key}.bias"), self.source.bias(key)
        if spec is None:
            if bias is not None:
                raise SourceError(f"{key}.bias: config.json implies no such bias; it would be dropped silently")
            return None
        if bias is None:
            raise SourceError(f"{key}.bias: missing; config.json implies a bias of shape {list(spec.shape)}")
        if bias.shape != spec.shape:
            raise SourceError(f"{key}.bias: config.json implies shape {list(spec.shape)}, found {list(bias.shape)}")
        return torch.tensor(np.asarray(bias, np.float32))
