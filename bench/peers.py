"""Our CPU engine beside its peers on one model, in interleaved rounds: `python bench/peers.py --gguf Q4_1.gguf --ours qtip4 DIR ...`.

Every measurement is a process of its own, so that no program's threads or memory meet another's, and rounds go over all programs in turn, so
that a busy neighbour meets all alike. Figures are medians; each comes from tokens that the program really returned. Peers that are not
installed are named as missing. Give each its own directory on PYTHONPATH: `--site llama_cpp=/tmp/lcp`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

PROMPT_TOKENS, NEW_TOKENS, BATCH = 256, 48, 16
THREADS = 2

OURS = """
import json, sys
from arctool.bench.throughput import Plan, measure
from arctool.run.llm import EngineOptions
from arctool.terminal.sources import open_model
prompt, new, batch, path = *map(int, sys.argv[1:4]), sys.argv[4]
llm = open_model(path, EngineOptions(max_model_len=prompt + new, max_seqs=batch))
rows = {}
for size in (1, batch):
    found = measure(llm, path, Plan((size,), prompt, new, 1))
    assert not found.failed, found
    rows[size] = found.rows[0]
print(json.dumps({"prefill": rows[1].prefill, "decode": rows[1].decode, "batch": rows[batch].decode, "engaged": found.engaged}))
"""

LLAMA = """
import json, sys, time
import llama_cpp
import numpy as np
prompt, new, batch, path = *map(int, sys.argv[1:4]), sys.argv[4]
threads = int(sys.argv[5])
model = llama_cpp.Llama(path, n_ctx=2048, n_threads=threads, n_threads_batch=threads, n_batch=512, verbose=False)
random = np.random.default_rng(0)
tokens = [int(t) for t in random.integers(0, model.n_vocab(), prompt)]
model.eval(tokens)  # warm
times = []
for _ in range(3):
    model.reset()
    began = time.perf_counter(); model.eval(tokens); middle = time.perf_counter()
    token, got = int(np.argmax(model.eval_logits[-1])) if model.eval_logits else 1, 0
    began_decode = time.perf_counter()
    for _ in range(new):
        model.eval([token]); got += 1
        token = model.sample(temp=0.0)
    times.append((prompt / (middle - began), got / (time.perf_counter() - began_decode)))
print(json.dumps({"prefill": sorted(t[0] for t in times)[1], "decode": sorted(t[1] for t in times)[1], "system": llama_cpp.llama_print_system_info().decode()}))
"""

SERVER = """
import json, sys, threading, time
import xllamacpp
prompt, new, batch, path = *map(int, sys.argv[1:4]), sys.argv[4]
threads = int(sys.argv[5])
p = xllamacpp.CommonParams()
p.model.path, p.n_ctx, p.n_parallel, p.n_batch, p.n_ubatch, p.verbosity = path, 1024 * batch, batch, 2048, 512, -1
p.cpuparams.n_threads = p.cpuparams_batch.n_threads = threads
server = xllamacpp.Server(p)
def ask(seed, count, length):
    ids = [(seed * 7919 + i * 104729) % 48000 + 100 for i in range(length)]
    found = server.handle_completions({"prompt": ids, "n_predict": count, "temperature": 0, "ignore_eos": True, "cache_prompt": False})
    found = json.loads(found) if isinstance(found, (str, bytes)) else found
    return found["timings"]
ask(1, 4, 32)
single = [ask(10 + i, new, prompt) for i in range(3)]
out = [None] * batch
def work(i):
    out[i] = ask(100 + i, new, 8)
crowd = [threading.Thread(target=work, args=(i,)) for i in range(batch)]
[t.start() for t in crowd]; [t.join() for t in crowd]
# The server's own clock: what each slot saw while it generated, added up: kinder than the wall clock.
print(json.dumps({"prefill": sorted(t["prompt_per_second"] for t in single)[1], "decode": sorted(t["predicted_per_second"] for t in single)[1],
    "batch": sum(t["predicted_per_second"] for t in out), "system": xllamacpp.get_system_info()}))
"""

TRANSFORMERS = """
import json, sys, time
import torch, transformers
prompt, new, batch, path = *map(int, sys.argv[1:4]), sys.argv[4]
torch.set_num_threads(int(sys.argv[5]))
model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
def run(rows):
    ids = torch.randint(0, model.config.vocab_size, (rows, prompt))
    with torch.no_grad():
        began = time.perf_counter()
        out = model(ids, use_cache=True, logits_to_keep=1)
        middle = time.perf_counter()
        token, got = out.logits[:, -1:].argmax(-1), 0
        for _ in range(new):
            out = model(token, past_key_values=out.past_key_values, use_cache=True)
            token, got = out.logits[:, -1:].argmax(-1), got + rows
    return rows * prompt / (middle - began), got / (time.perf_counter() - middle)
run(1)
prefill, decode = run(1)
print(json.dumps({"prefill": prefill, "decode": decode, "batch": run(batch)[1]}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ours", nargs=2, action="append", default=[], metavar=("NAME", "ARTIFACT"))
    parser.add_argument("--gguf", nargs=2, action="append", default=[], metavar=("NAME", "FILE"))
    parser.add_argument("--checkpoint", help="Hugging Face directory for transformers.")
    parser.add_argument("--site", action="append", default=[], help="A directory with peers' packages.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    jobs: list[tuple[str, str, list[str]]] = [(f"arctool {name}", OURS, [path]) for name, path in options.ours]
    jobs += [(f"llama-cpp-python {name}", LLAMA, [path, str(THREADS)]) for name, path in options.gguf]
    jobs += [(f"xllamacpp server {name}", SERVER, [path, str(THREADS)]) for name, path in options.gguf]
    if options.checkpoint:
        jobs.append(("transformers f32", TRANSFORMERS, [options.checkpoint, str(THREADS)]))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *options.site])}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name, _, _ in jobs}
    failed: dict[str, str] = {}
    loads = [os.getloadavg()[0]]
    for _ in range(options.rounds):
        for name, script, arguments in jobs:
            argv = [sys.executable, "-c", script, str(PROMPT_TOKENS), str(NEW_TOKENS), str(BATCH), *arguments]
            done = subprocess.run(argv, capture_output=True, text=True, check=False, env=environment)
            if done.returncode:
                failed[name] = (done.stderr.strip().splitlines() or ["no output"])[-1]
            else:
                found[name].append(json.loads(done.stdout.strip().splitlines()[-1]))
            loads.append(os.getloadavg()[0])
    result = {
        "prompt_tokens": PROMPT_TOKENS, "new_tokens": NEW_TOKENS, "batch": BATCH, "threads": THREADS, "rounds": options.rounds,
        "load": loads, "rows": {name: summary(rounds, failed.get(name)) for name, rounds in found.items()},
    }  # fmt: skip
    print(f"{'':32}{'prefill':>10}{'decode':>10}{'batch ' + str(BATCH):>10}")
    for name, row in result["rows"].items():
        cells = "".join(f"{'-' if row.get(key) is None else format(row[key], '.0f'):>10}" for key in ("prefill", "decode", "batch"))
        print(f"{name:32}{cells}" if "failure" not in row else f"{name:32}  FAILED: {row['failure']}")
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


def summary(rounds: list[dict[str, Any]], failure: str | None) -> dict[str, Any]:
    """Medians of a program's rounds; why there are none if one failed."""
    if failure is not None or not rounds:
        return {"failure": failure or "no round"}
    row: dict[str, Any] = {"each": [{k: v for k, v in one.items() if k != "system"} for one in rounds], "system": rounds[-1].get("system")}
    for key in ("prefill", "decode", "batch"):
        values = [one[key] for one in rounds if one.get(key)]
        row[key] = statistics.median(values) if values else None
    return row


if __name__ == "__main__":
    main()
