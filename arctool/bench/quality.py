"""What each part of a bake is worth, what each rate gives, and what llama.cpp gives at its sizes: the numbers of docs/quality.md.

    python -m arctool.bench.quality models/smollm2-135m --gguf FILE --out bench/results/smollm2-quality.json --plot docs/smollm2-quality.png
    python -m arctool.bench.quality --table bench/results/smollm2-quality.json

Every row reads the same windows as the unquantised checkpoint, whose own engine is the base of all. Our rows are artifacts on the disk,
made as `arctool bake` makes them and opened again; only the steps between rounding and the whole method are made in memory. llama.cpp's
rows are files of its quantiser read by its engine, where llama-cpp-python is installed: one of them is nearly lossless and must have
next to no divergence, or tokens, windows or files do not agree and no other row of llama.cpp counts.
"""

from __future__ import annotations

import argparse
import logging
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from arctool import __version__
from arctool.bake.budget.bake import ALGORITHM as BUDGET
from arctool.bake.calibration.text import AUTO
from arctool.bake.calibration.token_set import CALIB_TOKENS, CalibrationSet, choose_calibration
from arctool.bake.pipeline import calibration_ids
from arctool.bake.provenance import FEEDBACK, ROUNDING, table_digest
from arctool.bake.source.checkpoint import Checkpoint
from arctool.bench import llama_cpp, plot, study
from arctool.bench.llama_cpp import Peer
from arctool.bench.reading import plan_reading
from arctool.bench.rows import LADDER_RUNG, RATES, SEED, SLOW_RATES, Inputs, Work, our_works, peer_works
from arctool.bench.study import Row, Study
from arctool.bench.subjects import Subject, open_subject
from arctool.errors import ArctoolError, InterruptedByUser, UsageError, VerificationError
from arctool.kernels.registry import default_registry
from arctool.quant.codebooks import rung
from arctool.run.divergence import Reference, compare, reference
from arctool.run.reading import WINDOW
from arctool.run.weights import load_model
from arctool.uqff.files import hash_file

log = logging.getLogger(__name__)


def measure(work: Work, base: Reference) -> Row:
    """Make a model, let it read the windows. Whatever goes wrong becomes the row's failure, so that the other rows go on."""
    try:
        with work.make() as made:
            began = time.monotonic()
            found = compare(base, made.model, base.windows)
            took, ran = time.monotonic() - began, dict(made.ran())
        if work.most is not None and found.kl > work.most:
            raise VerificationError(
                f"its divergence is {found.kl:.4g} nats a token, expected at most {work.most:g} of so fine a file: "
                "it is another model than the checkpoint, or its tokens or windows are not the same"
            )
        row = Row(work.model, work.how, made.nbytes, made.linear_bits, seconds=made.seconds, reading_seconds=took)
        return replace(row, stored=dict(made.stored), ran=ran).measured(found)
    except InterruptedByUser:
        raise
    except ArctoolError as error:
        return Row(work.model, work.how, failure=str(error))
    except Exception as error:
        log.exception("%s", work.name)
        return Row(work.model, work.how, failure=f"{type(error).__name__}: {error}")


def run_study(begun: Study, works: Sequence[Work], wanted: Callable[[Work], bool], base: Reference, keep: Callable[[Study], None]) -> Study:
    """Measure the `wanted` rows, and those that they come after, unless `begun` has them; `keep` is called after each."""
    order = [work.name for work in works]
    needed = {work.after for work in works if wanted(work)}
    found = begun
    for work in works:
        if found.row(work.name) is not None or not (wanted(work) or work.name in needed):
            continue
        log.info("%s ...", work.name)
        if work.after is not None and found.row(work.after) is None:
            row = Row(work.model, work.how, failure=f"{work.after}: failed, so nothing of its kind can be compared")
        else:
            row = measure(work, base)
        log.info("%s", row if row.failure is None else f"{study.FAILED} {row.name}: {row.failure}")
        found = found.having(row, order)
        keep(found)
    return found


def settings(inputs: Inputs, gguf: Path | None, chosen: CalibrationSet) -> dict[str, Any]:
    """What must agree for rows to stand in one table."""
    text = inputs.reading
    return {
        "model": inputs.name,
        "fingerprint": inputs.checkpoint.fingerprint,
        "gguf": None if gguf is None else {"name": gguf.name, "sha256": hash_file(gguf)},
        "text": {
            "name": Path(text.name).name,
            "sha256": text.digest,
            "window": text.window,
            "windows": len(text.windows),
            "predicted": text.predicted,
        },
        "calibration": chosen.to_json(),
        "seed": SEED,
        "algorithms": [ROUNDING, FEEDBACK, BUDGET],
        "tables": {name: table_digest(rung(name)) for name in (LADDER_RUNG, *RATES, *SLOW_RATES)},
    }


def facts(peer: Peer | str | None) -> dict[str, Any]:
    """What made the numbers."""
    return {
        "arctool": __version__,
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "load": round(os.getloadavg()[0], 1),
        "llama.cpp": {"llama-cpp-python": peer.version, "system": peer.system} if isinstance(peer, Peer) else peer,
    }


def picture(found: Study, path: Path) -> None:
    """Draw size against divergence. Raises UsageError where no row has both."""
    marks = study.points(found)
    if not marks:
        raise UsageError(f"--plot: {path}: no row has both a size and a divergence")
    text = found.settings["text"]
    note = f"{text['predicted']:,} predicted tokens of {text['name']}, windows of {text['window']}"
    plot.save(plot.figure(marks, f"Divergence from {found.settings['model']} by size", note), path)


def parser() -> argparse.ArgumentParser:
    """The options."""
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("model", nargs="?", help="the unquantised checkpoint")
    found.add_argument("--gguf", type=Path, help="the same model as GGUF file, for the rows of llama.cpp")
    found.add_argument("--out", type=Path, help="JSON, written after every row")
    found.add_argument("--resume", action="store_true", help="go on with --out")
    found.add_argument("--plot", type=Path, help="picture to draw at the end")
    found.add_argument("--table", type=Path, metavar="JSON", help="print the table of a study, measure nothing")
    found.add_argument("--text", type=Path, help="what is read [the text that ships]")
    found.add_argument("--window", type=int, help=f"tokens of a window [{WINDOW}, or the context]")
    found.add_argument("--windows", type=int, default=8)
    found.add_argument("--calib-tokens", type=int, default=CALIB_TOKENS)
    found.add_argument("--self", dest="own_text", action="store_true", help="calibrate with text that the model samples too")
    found.add_argument("--bpw", type=float, nargs="*", default=[], help="mixed budgets")
    found.add_argument("--slow", action="store_true", help=f"{', '.join(SLOW_RATES)} too")
    found.add_argument("--only", nargs="*", default=["*"], metavar="GLOB", help="rows by name, such as 'qtip3*' or '*, llama.cpp*'")
    found.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="threads")
    found.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()), help="folder for what is made and thrown away")
    return found


def run(options: argparse.Namespace) -> Study:
    """Measure what the options ask for. Raises UsageError, SourceError, StorageError, InterruptedByUser."""
    if options.model is None:
        raise UsageError("expected a model, or --table JSON")
    if options.out is not None and options.out.exists() and not options.resume:
        raise UsageError(f"--out: {options.out}: is there; --resume goes on with it, or remove it to begin anew")
    peer = None if options.gguf is None else llama_cpp.find_peer(options.jobs)
    with open_subject(options.model) as subject:
        if not isinstance(subject.source, Checkpoint):
            raise UsageError(f"{options.model}: is an artifact; expected the checkpoint that others are held against")
        inputs, chosen = gather(options, subject, subject.source)
        begun = Study(settings(inputs, options.gguf, chosen), facts(peer))

        def keep(found: Study) -> None:
            if options.out is not None:
                study.save(found, options.out)

        if options.out is not None and options.resume:
            begun = study.resumed(options.out, begun)
        keep(begun)
        works = our_works(inputs, options.slow, options.bpw)
        if isinstance(peer, Peer):
            works += peer_works(inputs, peer, options.gguf)
        elif peer is not None:
            log.warning("llama.cpp is not measured: %s", peer)
        base = reference(load_model(inputs.checkpoint, default_registry()), inputs.reading.windows)
        found = run_study(begun, works, lambda work: any(fnmatchcase(work.name, only) for only in options.only), base, keep)
    return found


def gather(options: argparse.Namespace, subject: Subject, checkpoint: Checkpoint) -> tuple[Inputs, CalibrationSet]:
    """(what all rows share, the calibration as it was chosen). The windows that the model writes itself are written once, here."""
    window = options.window or min(WINDOW, checkpoint.config.max_position_embeddings)
    reading = plan_reading([subject], options.text, window, window * options.windows)
    chosen = choose_calibration(checkpoint, AUTO, options.calib_tokens)
    if not options.own_text:
        chosen = replace(chosen, sampled=0)
    ids = calibration_ids(checkpoint, chosen, SEED, None, log.info)
    fixed = replace(chosen, text=replace(chosen.text, ids=ids), sampled=0)
    return Inputs(subject.facts.name, subject, checkpoint, fixed, reading, options.jobs, options.work), chosen


def main() -> None:
    """Measure or read a study, print its table, draw it. The exit code is that of a failed verification where a row failed."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    options = parser().parse_args()
    try:
        if options.plot is not None:
            plot.check_target(options.plot)
        found = run(options) if options.table is None else study.load(options.table)
        sys.stdout.write("" if options.table is None else study.marker(options.table))
        sys.stdout.write(study.table(found))
        for row in found.failed:
            log.error("%s %s: %s", study.FAILED, row.name, row.failure)
        if options.plot is not None:
            picture(found, options.plot)
    except ArctoolError as error:
        log.error("error: %s", error)
        raise SystemExit(error.exit_code) from error
    except KeyboardInterrupt as stopped:
        log.error("interrupted; --resume goes on with the rows that are in --out")
        raise SystemExit(InterruptedByUser.exit_code) from stopped
    if found.failed:
        raise SystemExit(VerificationError.exit_code)


if __name__ == "__main__":
    main()
