"""The public verbs that look at an artifact: verify, inspect, inspect_tensor, diff.

Joins the rooms below; shows nothing and parses no command line. What needs torch or a compiler is imported when weights are to be decoded
by kernels, so that everything else answers at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from arctool.bench import canvas, pictures
from arctool.errors import FormatError, SourceError, UsageError
from arctool.run.config import ModelConfig
from arctool.run.models import architecture
from arctool.run.models.experts import as_stored, stacked
from arctool.uqff import detail, difference, statistics
from arctool.uqff import inspect as inspection
from arctool.uqff import verify as checks
from arctool.uqff.container import open_artifact


def verify(
    path: str | Path,
    source: str | None = None,
    progress: checks.Progress | None = None,
    *,
    fast: bool = False,
    jobs: int | None = None,
) -> checks.VerifyReport:
    """All that this machine can prove of the artifact at `path`; with `source`, each layer's error against that checkpoint too.

    `fast`: only what headers and text files say. `jobs`: threads, by default the cores. An artifact that fails is a report, not an
    exception. Raises StorageError, UsageError, and SourceError for `source`.
    """
    path = Path(path)
    if fast and source is not None:
        raise UsageError("--fast reads no weight, so there is nothing to compare with --source; give one of the two")
    expected, complaint = expected_shapes(path)
    if fast:
        return checks.verify(path, expected=expected, config_error=complaint, progress=progress, fast=True, jobs=jobs)

    from arctool.bake.source.checkpoint import open_checkpoint
    from arctool.kernels.decoders import decoders
    from arctool.kernels.registry import default_registry

    with open_checkpoint(source) if source is not None else nullcontext() as checkpoint:
        return checks.verify(
            path,
            source=checkpoint,
            implementations=decoders(default_registry()),
            tables=regenerate,
            expected=expected,
            config_error=complaint,
            progress=progress,
            jobs=jobs,
        )


def inspect(path: str | Path, *, picture: str | Path | None = None) -> inspection.Inspection:
    """What the artifact at `path` holds; reads no weight. `picture`: where to draw bits and errors by layer.

    Raises StorageError, UsageError, FormatError.
    """
    where = canvas.picture_target(picture)
    found = inspection.inspect(Path(path))
    if where is not None:
        pictures.draw_layers(found, where)
    return found


def inspect_tensor(
    path: str | Path, key: str, *, picture: str | Path | None = None, progress: statistics.Progress | None = None
) -> detail.TensorDetail:
    """All about one tensor of the artifact at `path`: a layer's key, or a residual tensor's name. `picture`: where to draw its weights.

    Raises UsageError, with names that come near, for a tensor that is not there; StorageError, FormatError.
    """
    where = canvas.picture_target(picture)
    found = detail.inspect_tensor(Path(path), key, progress)
    if where is not None:
        pictures.draw_tensor(found, where)
    return found


def diff(a: str | Path, b: str | Path, *, layers: bool = True, progress: difference.Progress | None = None) -> difference.Difference:
    """In what the artifacts at `a` and `b` differ. `layers`: also how far the weights of each tensor that differs are from one another.

    Raises StorageError, UsageError, FormatError.
    """
    return difference.difference(Path(a), Path(b), decode=layers, progress=progress)


def expected_shapes(path: Path) -> tuple[Mapping[str, tuple[int, ...]] | None, str | None]:
    """(shapes by tensor name that the artifact's own config implies, None) or (None, why that config is of no use).

    An artifact that cannot be opened at all gives (None, None): `verify` says so itself.
    """
    try:
        with open_artifact(path) as artifact:
            config_json, keys = artifact.config_json, set(artifact.keys())
    except FormatError:
        return None, None
    try:
        config = ModelConfig.from_hf(config_json, "config.json")
        found = architecture(config.architecture, "config.json")
    except (SourceError, UsageError) as error:
        return None, str(error)
    return as_stored(config, found.tensors(config), stacked(config, found.experts, keys)), None


def regenerate(name: str) -> NDArray[np.float32] | None:
    """The table of geometry `name` from its seed, where that takes no training; the trained ones are held by their pinned hash."""
    from arctool.bake.search.codebook_training import PLANS, gaussian_table
    from arctool.quant.trellis import Geometry

    return None if name in PLANS else gaussian_table(Geometry.parse(name), 1, 1.0)
