"""`arctool verify` put together: the file's checks, this machine's kernels, the shipped tables, and the source if one is named."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from arctool.bake.checkpoint import open_checkpoint
from arctool.bake.codebook_training import PLANS, gaussian_table
from arctool.errors import ArctoolError, FormatError, UsageError
from arctool.kernels.decoders import decoders
from arctool.kernels.registry import default_registry
from arctool.quant.trellis import Geometry
from arctool.run.config import ModelConfig
from arctool.run.models import architecture
from arctool.uqff.container import open_artifact
from arctool.uqff.verify import Progress, VerifyReport, verify


def verify_artifact(path: Path, source: str | None, progress: Progress | None) -> VerifyReport:
    """All that this machine can prove of the artifact at `path`. Raises StorageError, UsageError, SourceError for `source`."""
    if not path.exists():
        raise UsageError(f"{path}: no such file or directory")
    with open_checkpoint(source) if source is not None else nullcontext() as checkpoint:
        return verify(
            path,
            source=checkpoint,
            implementations=decoders(default_registry()),
            tables=regenerate,
            expected=expected_shapes(path),
            progress=progress,
        )


def expected_shapes(path: Path) -> dict[str, tuple[int, ...]] | None:
    """Shapes by tensor name that the artifact's own config implies; None where the config cannot be read, which verify reports."""
    try:
        with open_artifact(path) as artifact:
            config = ModelConfig.from_hf(artifact.config_json, "config.json")
            specs = architecture(config.architecture, "config.json").tensors(config)
    except FormatError:
        return None
    except ArctoolError as error:
        raise UsageError(f"{path}: {error}") from error
    return {spec.name: spec.shape for spec in specs}


def regenerate(name: str) -> NDArray[np.float32] | None:
    """The table of geometry `name` from its seed, where that takes no training; the trained ones are held by their pinned hash."""
    return None if name in PLANS else gaussian_table(Geometry.parse(name), 1, 1.0)
