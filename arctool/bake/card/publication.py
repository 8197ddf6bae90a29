"""The last steps of a bake: seal the layers, measure them, describe them in the card, let the artifact appear.

Whatever ends a bake here leaves nothing but its journal, as everywhere before. Joins the writer, the measurement and the card.
"""

from __future__ import annotations

from collections.abc import Iterable

import arctool
from arctool.bake.card.measurement import Say, measure
from arctool.bake.card.page import card
from arctool.bake.card.subject import CardLayer, Subject
from arctool.bake.plan import Task
from arctool.bake.source.checkpoint import Checkpoint
from arctool.bake.source.terms import LICENCE_FILE
from arctool.run.reading import Reading
from arctool.uqff.container import ArtifactWriter, BakeInfo, Report
from arctool.uqff.discovery import CARD_NAME
from arctool.uqff.inspect import inspect


def publish(
    writer: ArtifactWriter, checkpoint: Checkpoint, tasks: Iterable[Task], info: BakeInfo, reading: Reading | str, say: Say
) -> tuple[Report, str | None]:
    """(the report of the artifact, which is in its place now; why nothing was measured, None if something was).

    `reading`: what the artifact and its source read, or why they do not. Raises StorageError and the errors of loading both.
    """
    place = writer.seal()
    found = reading if isinstance(reading, str) else measure(checkpoint, place, reading, say)
    given = {task.spec.key: (task.choice.rung, task.spec.role.value) for task in tasks}
    layers = tuple(CardLayer(record, *given[record.module]) for record in writer.records)
    licences = tuple(sorted(name for name in checkpoint.assets if LICENCE_FILE.fullmatch(name)))
    text = card(Subject(info, layers, inspect(place), found, licences, arctool.__version__))
    writer.add_asset(CARD_NAME, text.encode())
    if isinstance(found, str):
        return writer.finish(info), found
    return writer.finish(info, found), None
