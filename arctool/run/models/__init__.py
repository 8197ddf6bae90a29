"""The architectures that we run, by the Hugging Face class name that a `config.json` gives in `architectures[0]`."""

from __future__ import annotations

from collections.abc import Mapping

from arctool.errors import SourceError
from arctool.run.models.llama import LLAMA
from arctool.run.models.mistral import MISTRAL
from arctool.run.models.mixtral import MIXTRAL
from arctool.run.models.qwen2 import QWEN2
from arctool.run.models.qwen3 import QWEN3
from arctool.run.models.qwen3_moe import QWEN3_MOE
from arctool.run.models.spec import Architecture, Role, TensorSpec

__all__ = ["ARCHITECTURES", "Architecture", "Role", "TensorSpec", "architecture"]

ARCHITECTURES: Mapping[str, Architecture] = {a.name: a for a in (LLAMA, MISTRAL, QWEN2, QWEN3, MIXTRAL, QWEN3_MOE)}


def architecture(name: str, where: str) -> Architecture:
    """The architecture called `name`. Raises SourceError that names `where` and lists the known ones."""
    if name not in ARCHITECTURES:
        raise SourceError(f"{where}: architectures: unknown architecture {name!r}; known: {', '.join(sorted(ARCHITECTURES))}")
    return ARCHITECTURES[name]
