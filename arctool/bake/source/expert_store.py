"""A store whose experts lie in stacks, as one that has each expert's matrices by themselves, under the names that the architecture gives.

Stacks are what transformers writes under its own names (`mlp.experts.gate_up_proj`) and what GGUF files have (`gguf_source` calls theirs as
mistral.rs would). Nothing is read before it is asked for, and then one expert's matrix at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from arctool.bake.source.stored import ALL_ROWS, Source, StoredTensor, TensorStore
from arctool.errors import SourceError
from arctool.run.config import ModelConfig
from arctool.run.models.experts import Slice, expert_slices, stack_shape
from arctool.run.models.spec import ExpertNames


def unstacked(source: Source, config: ModelConfig, names: ExpertNames | None) -> Source:
    """`source` with every expert by itself. Raises SourceError for a stack of another shape, or beside experts by themselves."""
    store = source.store
    if names is None:
        return source
    stored = {name.removesuffix(".weight"): name for name, entry in store.entries.items() if len(entry.shape) == 3}
    slices: dict[str, Slice] = {}
    for key, places in expert_slices(config, names):
        found = [replace(place, stack=stored[place.stack]) for place in places if place.stack in stored]
        for place in found[:1]:
            entry, shape = store.entries[place.stack], stack_shape(config, place.stack.removesuffix(".weight"))
            if entry.shape != shape:
                raise SourceError(f"{entry.file}: {place.stack}: expected shape {list(shape)} by config.json, found {list(entry.shape)}")
            if len(found) > 1 or f"{key}.weight" in store.entries:
                other = found[1].stack if len(found) > 1 else f"{key}.weight"
                raise SourceError(f"{entry.file}: {place.stack} and {other} both hold {key}; keep one of them")
            slices[f"{key}.weight"] = place
    moved = {}
    for layer in range(config.num_layers):
        wanted, other = (f"{key}.weight" for key in (names.router(f"model.layers.{layer}"), f"model.layers.{layer}.mlp.gate"))
        if config.sparse(layer) is not None and wanted not in store.entries and other in store.entries:
            moved[wanted] = other
    return replace(source, store=ExpertStore(store, slices, moved)) if slices or moved else source


class ExpertStore:
    """Implements `TensorStore`. `slices`: name → place of what is in stacks; `moved`: name → name in `store`."""

    def __init__(self, store: TensorStore, slices: Mapping[str, Slice], moved: Mapping[str, str]) -> None:
        self._store, self._slices, self._moved = store, slices, moved
        gone = {place.stack for place in slices.values()} | set(moved.values())
        self.entries: dict[str, StoredTensor] = {name: entry for name, entry in store.entries.items() if name not in gone}
        for name, place in slices.items():
            stack = store.entries[place.stack]
            self.entries[name] = replace(stack, name=name, shape=(place.rows, stack.shape[-1]))
        self.entries |= {name: replace(store.entries[other], name=name) for name, other in moved.items()}

    def check_readable(self, name: str) -> None:
        """Raise SourceError where the storage type of tensor `name` is not one that `read` understands."""
        place = self._slices.get(name)
        self._store.check_readable(self._moved.get(name, name) if place is None else place.stack)

    def blocks(self, name: str, rows: slice = ALL_ROWS) -> NDArray[np.uint8] | None:
        """As the store beneath, of one expert where the tensor is in a stack."""
        place = self._slices.get(name)
        if place is None:
            return self._store.blocks(self._moved.get(name, name), rows)
        stack = self._store.blocks(place.stack, slice(place.expert, place.expert + 1))
        return None if stack is None else stack[0, place.first : place.first + place.rows][rows]

    def read(self, name: str, rows: slice = ALL_ROWS) -> NDArray[np.float32]:
        """As the store beneath, of one expert where the tensor is in a stack."""
        place = self._slices.get(name)
        if place is None:
            return self._store.read(self._moved.get(name, name), rows)
        stack = self._store.read(place.stack, slice(place.expert, place.expert + 1))
        return np.ascontiguousarray(stack[0, place.first : place.first + place.rows][rows])
