"""What a model card is about: plain data, gathered when an artifact is sealed."""

from __future__ import annotations

from dataclasses import dataclass

from arctool.uqff.container import BakeInfo, LayerRecord, Quality
from arctool.uqff.inspect import Inspection


@dataclass(frozen=True)
class CardLayer:
    """A stored layer. `rung`: what it got, a rung, a block type or bf16; `role`: what it is to the model, linear, embedding or head."""

    record: LayerRecord
    rung: str
    role: str


@dataclass(frozen=True)
class Subject:
    """All that a card tells of. `contents`: of the sealed artifact, without report and card; `quality`: what was measured, or why
    nothing was; `licence_files`: names of those in the artifact; `arctool`: the version that baked."""

    info: BakeInfo
    layers: tuple[CardLayer, ...]
    contents: Inspection
    quality: Quality | str
    licence_files: tuple[str, ...]
    arctool: str
