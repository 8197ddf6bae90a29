"""The plan of a bake: every tensor in file order and what it gets. Knows checkpoints' specs and recipes, no weights."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from arctool.bake.choices import ALIASES, AS_IS, CHOICES, searched, stored_bytes
from arctool.bake.recipe import Choice, Recipe
from arctool.bake.source.checkpoint import Checkpoint
from arctool.errors import UsageError
from arctool.quant.hadamard import Rotation
from arctool.run.models.spec import Role, TensorSpec


@dataclass(frozen=True)
class Task:
    """One tensor of the plan and what it gets."""

    index: int
    spec: TensorSpec
    choice: Choice


def plan(checkpoint: Checkpoint, recipe: Recipe) -> tuple[Task, ...]:
    """Every tensor but the biases (they travel with their layer), in file order. Raises UsageError for a recipe that misfits."""
    recipe.check(checkpoint.specs)
    specs = [spec for spec in checkpoint.specs if spec.role is not Role.BIAS]
    layers = checkpoint.config.num_layers
    return tuple(Task(index, spec, _settled(recipe.choose(spec, layers), checkpoint, spec)) for index, spec in enumerate(specs))


def _settled(choice: Choice, checkpoint: Checkpoint, spec: TensorSpec) -> Choice:
    """The choice with `as-is` replaced by the type that the source has. Raises UsageError for one that an artifact cannot hold."""
    if choice.rung != AS_IS:
        return choice
    stored = checkpoint.stored_dtype(spec.name)
    name = stored.lower()
    name = ALIASES.get(name, name)
    if name not in CHOICES:
        raise UsageError(
            f"{checkpoint.file(spec.name)}: {spec.name} is stored as {stored}, which no artifact can hold {AS_IS}; "
            f"choose another type, such as --isq q8_0"
        )
    return replace(choice, rung=name, reason=f"{AS_IS}: {choice.reason}")


def bake_rotation(spec: TensorSpec, seed: int) -> Rotation:
    """The rotation of a trellis tensor. An embedding is read row by row, so its rows are not mixed."""
    return Rotation.seeded(seed, spec.key, *spec.shape, mix_rows=spec.role is not Role.EMBEDDING)


def layer_sizes(tasks: Iterable[Task]) -> list[tuple[int, bool]]:
    """(bytes of the weights in the shards, whether the journal keeps them too) of every layer."""
    layers = (task for task in tasks if task.spec.role is not Role.NORM)
    return [(stored_bytes(task.choice.rung, task.spec.shape), searched(task.choice.rung)) for task in layers]
