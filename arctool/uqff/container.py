"""The door of this room: what other rooms use to write and to read an artifact. The parts lie in files of their own."""

from __future__ import annotations

from arctool.uqff.reader import Artifact, open_artifact
from arctool.uqff.report import BakeInfo, Hashes, LayerDetails, LayerRecord, Output, Quality, Report
from arctool.uqff.staging import recover
from arctool.uqff.writer import SHARD_BYTES, ArtifactWriter

__all__ = [
    "SHARD_BYTES",
    "Artifact",
    "ArtifactWriter",
    "BakeInfo",
    "Hashes",
    "LayerDetails",
    "LayerRecord",
    "Output",
    "Quality",
    "Report",
    "open_artifact",
    "recover",
]
