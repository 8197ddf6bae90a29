"""mistral.rs at the other end, in a child process, and our engine beside it: the same prompts to both."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from arctool import SamplingParams
from arctool.run.llm import EngineOptions
from arctool.terminal.sources import open_model
from arctool.uqff.container import Artifact

HERE = Path(__file__).parent

RAW = "The capital of France is"
CHAT = "chat:What is the capital of France?"

SURE = (RAW, "1, 2, 3, 4, 5,", "A, B, C, D,")
SURE_TEXTS = [" Paris.\n\n", " 6, ", " E, F,"]
"""Prompts whose next tokens are far ahead of all others, and the first four of them."""


def upstream(job: dict[str, object], prompts: Sequence[str] = (RAW,), tokens: int = 16) -> list[str]:
    """What mistral.rs generates; its failure is the test's, with what it said."""
    text = json.dumps({**job, "prompts": list(prompts), "tokens": tokens})
    done = subprocess.run([sys.executable, HERE / "upstream.py"], input=text, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"{done.stdout[-2000:]}{done.stderr[-2000:]}"
    found: list[str] = json.loads(done.stdout.splitlines()[-1])["texts"]
    return found


def load(directory: Path, prompts: Sequence[str] = (RAW,), tokens: int = 16) -> list[str]:
    """What mistral.rs generates from an artifact."""
    shards = sorted(path.name for path in directory.glob("*.uqff"))
    return upstream({"model": str(directory), "load": shards}, prompts, tokens)


def ours(directory: Path, prompts: Sequence[str] = (RAW,), tokens: int = 16) -> list[str]:
    """What our engine generates from an artifact or a checkpoint."""
    llm, params = open_model(str(directory), EngineOptions()), SamplingParams(temperature=0, max_tokens=tokens)
    texts = []
    for prompt in prompts:
        if prompt.startswith("chat:"):
            texts.append(llm.chat([{"role": "user", "content": prompt.removeprefix("chat:")}], params).text)
        else:
            texts.append(llm.generate([prompt], params)[0].text)
    return texts


def stored_types(artifact: Artifact) -> set[str]:
    """How the layers of an open artifact are stored."""
    return {artifact.form(key).label for key in tuple(artifact.keys())}
