"""Mixtures of experts as architectures declare them: names and tensors of router and experts, and their assembly.

A checkpoint has each expert's matrices by themselves, under names of its own; here is also what mistral.rs and transformers call their
stacks of them, so that whoever finds a stack can take it apart. No torch and no files.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from arctool.run.config import ModelConfig
from arctool.run.models.spec import ExpertNames, TensorSpec, linear, router

if TYPE_CHECKING:
    from arctool.run.layers.moe import SparseMoe
    from arctool.run.models.decoder import Parts


MIXTRAL_NAMES = ExpertNames("block_sparse_moe", "w1", "w3", "w2")
QWEN3_NAMES = ExpertNames("mlp", "gate_proj", "up_proj", "down_proj")


def expert_tensors(c: ModelConfig, names: ExpertNames, at: str, layer: int) -> Iterator[TensorSpec]:
    """The tensors of the mixture of one decoder layer, whose module path is `at`."""
    moe = c.sparse(layer)
    assert moe is not None
    yield router(names.router(at), moe.num_experts, c.hidden_size, layer)
    for expert in range(moe.num_experts):
        gate, up, down = names.expert(at, expert)
        yield from linear(gate, moe.intermediate_size, c.hidden_size, layer)
        yield from linear(up, moe.intermediate_size, c.hidden_size, layer)
        yield from linear(down, c.hidden_size, moe.intermediate_size, layer)


def mixture(c: ModelConfig, parts: Parts, names: ExpertNames, layer: int) -> SparseMoe | None:
    """The mixture of a decoder layer, None where the layer is dense."""
    from arctool.run.layers.moe import SparseMoe
    from arctool.run.models.llama import swiglu

    moe = c.sparse(layer)
    if moe is None:
        return None
    at = f"model.layers.{layer}"
    experts = tuple(swiglu(parts, *names.expert(at, expert)) for expert in range(moe.num_experts))
    return SparseMoe(parts.linear(names.router(at)), experts, moe.top_k, moe.normalised)


@dataclass(frozen=True)
class Slice:
    """Where an expert's matrix lies in a stack: rows [first, first + rows) of the `expert`-th of the matrices of the tensor at `stack`."""

    stack: str
    expert: int
    first: int
    rows: int

    @property
    def alone(self) -> bool:
        """Whether the stack holds one matrix an expert and no two."""
        return not self.stack.endswith(".gate_up_proj")


def expert_slices(c: ModelConfig, names: ExpertNames) -> Iterator[tuple[str, tuple[Slice, ...]]]:
    """Key of every expert's matrix → where it may lie instead of by itself.

    `<block>.experts.gate_proj`, `up_proj`, `down_proj`, each [experts, out, in], are mistral.rs's; transformers calls every block `mlp` if
    it writes its own names, and puts gate and up one above the other into `gate_up_proj`.
    """
    for layer in range(c.num_layers):
        moe = c.sparse(layer)
        if moe is None:
            continue
        at, width = f"model.layers.{layer}", moe.intermediate_size
        stacks = [f"{at}.{block}.experts" for block in dict.fromkeys((names.block, "mlp"))]
        for expert in range(moe.num_experts):
            gate, up, down = names.expert(at, expert)
            for key, part, first, rows in (
                (gate, "gate_proj", 0, width),
                (up, "up_proj", width, width),
                (down, "down_proj", 0, c.hidden_size),
            ):
                alone = tuple(Slice(f"{stack}.{part}", expert, 0, rows) for stack in stacks)
                both = () if key == down else tuple(Slice(f"{stack}.gate_up_proj", expert, first, rows) for stack in stacks)
                yield key, alone + both


def stack_shape(c: ModelConfig, stack: str) -> tuple[int, int, int]:
    """The shape of a stack of `expert_slices`."""
    assert c.moe is not None
    width, part = c.moe.intermediate_size, stack.rpartition(".")[2]
    rows, columns = {"gate_up_proj": (2 * width, c.hidden_size), "down_proj": (c.hidden_size, width)}.get(part, (width, c.hidden_size))
    return c.moe.num_experts, rows, columns


def stacked(c: ModelConfig, names: ExpertNames | None, keys: Collection[str]) -> Mapping[str, Slice]:
    """Expert's key → its place, for the experts that are in a stack among `keys` and not by themselves."""
    found = {}
    for key, places in () if names is None else expert_slices(c, names):
        place = None if key in keys else next((place for place in places if place.stack in keys), None)
        if place is not None:
            found[key] = place
    return found


def as_stored(c: ModelConfig, specs: Iterable[TensorSpec], places: Mapping[str, Slice]) -> dict[str, tuple[int, ...]]:
    """Shapes by tensor name with the stacks of `places` in place of the experts in them."""
    shapes: dict[str, tuple[int, ...]] = {}
    for spec in specs:
        place = places.get(spec.key)
        shapes |= {spec.name: spec.shape} if place is None else {f"{place.stack}.weight": stack_shape(c, place.stack)}
    return shapes
