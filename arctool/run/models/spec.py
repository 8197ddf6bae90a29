"""What an architecture declares: its tensors (names, shapes, roles) and how its layers are put together.

Bake, the container and the loader all read the same list, so a model has one definition. No torch and no files here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from arctool.run.config import ModelConfig

if TYPE_CHECKING:
    from arctool.run.models.decoder import CausalLM, Parts

EMBEDDING_KEY = "model.embed_tokens"
FINAL_NORM_KEY = "model.norm"
HEAD_KEY = "lm_head"


class Role(Enum):
    """What a tensor is for; only LINEAR is a bake's to quantise without being asked by name.

    ROUTER: the matrix [experts, hidden] that picks a token's experts: small, and an error in it sends a token elsewhere.
    """

    LINEAR = "linear"
    EMBEDDING = "embedding"
    HEAD = "head"
    ROUTER = "router"
    NORM = "norm"
    BIAS = "bias"


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a checkpoint: full Hugging Face name, shape, role, and the decoder layer it belongs to (None: outside).

    `biased`: a weight whose module has a bias too.
    """

    name: str
    shape: tuple[int, ...]
    role: Role
    layer: int | None = None
    biased: bool = False

    @property
    def key(self) -> str:
        """Module path: the name without ".weight" or ".bias"."""
        return self.name.removesuffix(".weight").removesuffix(".bias")


@dataclass(frozen=True)
class ExpertNames:
    """What an architecture calls its mixture: the block in a decoder layer, and an expert's gate, up and down in it."""

    block: str
    gate: str
    up: str
    down: str

    def router(self, at: str) -> str:
        """Key of the router of the decoder layer at `at`."""
        return f"{at}.{self.block}.gate"

    def expert(self, at: str, expert: int) -> tuple[str, str, str]:
        """Keys of gate, up and down of one expert."""
        gate, up, down = (f"{at}.{self.block}.experts.{expert}.{part}" for part in (self.gate, self.up, self.down))
        return gate, up, down


@dataclass(frozen=True)
class Architecture:
    """One model family: the Hugging Face class name, its tensors in file order, and its assembly from `run.layers`.

    `experts`: what its mixtures of experts are called, None for a dense one.
    """

    name: str
    tensors: Callable[[ModelConfig], tuple[TensorSpec, ...]]
    build: Callable[[ModelConfig, Parts], CausalLM]
    experts: ExpertNames | None = None


def linear(key: str, out_features: int, in_features: int, layer: int, bias: bool = False) -> tuple[TensorSpec, ...]:
    """A linear layer: weight [out, in] and, if `bias`, bias [out]."""
    weight = TensorSpec(f"{key}.weight", (out_features, in_features), Role.LINEAR, layer, bias)
    return (weight, TensorSpec(f"{key}.bias", (out_features,), Role.BIAS, layer)) if bias else (weight,)


def router(key: str, experts: int, hidden: int, layer: int) -> TensorSpec:
    """The weight [experts, hidden] whose products say which experts a token goes to."""
    return TensorSpec(f"{key}.weight", (experts, hidden), Role.ROUTER, layer)


def norm(key: str, width: int, layer: int | None = None) -> TensorSpec:
    """The gain [width] of an RMS norm."""
    return TensorSpec(f"{key}.weight", (width,), Role.NORM, layer)


def decoder(config: ModelConfig, layer_tensors: Callable[[ModelConfig, str, int], Iterable[TensorSpec]]) -> tuple[TensorSpec, ...]:
    """Embedding, every layer's tensors under `model.layers.<i>`, final norm, and a head unless it is the embedding itself."""
    table = (config.vocab_size, config.hidden_size)
    layers = (spec for i in range(config.num_layers) for spec in layer_tensors(config, f"model.layers.{i}", i))
    head = () if config.tie_word_embeddings else (TensorSpec(f"{HEAD_KEY}.weight", table, Role.HEAD),)
    return (
        TensorSpec(f"{EMBEDDING_KEY}.weight", table, Role.EMBEDDING),
        *layers,
        norm(FINAL_NORM_KEY, config.hidden_size),
        *head,
    )
