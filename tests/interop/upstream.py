"""mistral.rs as a program of its own: writes UQFF from a checkpoint, or loads one, and generates. JSON in, one line of JSON out.

Standard input: {"model": directory, "prompts": [...], "tokens": n} and "write": [path.uqff, type] or "load": [shards]; with neither a
plain checkpoint runs. A prompt that begins with "chat:" goes through the chat template. Standard output ends with {"texts": [...]}.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["MISTRALRS_CPU_KV_F32"] = "1"

from mistralrs import ChatCompletionRequest, CompletionRequest, Runner, Which

GREEDY: dict[str, Any] = {"temperature": 0.0, "top_k": 1}


def generate(runner: Any, prompt: str, tokens: int) -> str:
    """The greedy continuation."""
    if prompt.startswith("chat:"):
        messages = [{"role": "user", "content": prompt.removeprefix("chat:")}]
        asked = ChatCompletionRequest(model="default", messages=messages, max_tokens=tokens, **GREEDY)
        return str(runner.send_chat_completion_request(asked).choices[0].message.content)
    request = CompletionRequest(model="default", prompt=prompt, max_tokens=tokens, **GREEDY)
    return str(runner.send_completion_request(request).choices[0].text)


def main() -> None:
    """Do the job on standard input."""
    job = json.load(sys.stdin)
    model = job["model"]
    if "write" in job:
        path, kind = job["write"]
        runner = Runner(which=Which.Plain(model_id=model, write_uqff=path), in_situ_quant=kind, no_paged_attn=True)
    else:
        more = {"from_uqff": job["load"]} if "load" in job else {}
        runner = Runner(which=Which.Plain(model_id=model, **more), no_paged_attn=True)
    sys.stdout.write(json.dumps({"texts": [generate(runner, prompt, job["tokens"]) for prompt in job["prompts"]]}) + "\n")


if __name__ == "__main__":
    main()
