"""`arctool serve` beside llama.cpp's server under the same client: `python bench/serve_peers.py --ours qtip4 DIR --gguf Q4_1 FILE --site DIR`.

Every server is a process of its own and alone on the machine: started, waited for, measured by `arctool bench serve` at each number of
clients, stopped. Rounds go over all servers in turn, so that a busy neighbour meets all alike; within a round all meet the same prompts
(random token ids, greedy, every answer at its whole length), and no round repeats another's. Figures are medians over rounds; a row that
failed in any round has none. llama.cpp's server comes from the xllamacpp wheel: name its directory with `--site`.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

LLAMA = """
import sys, threading
import xllamacpp
path, port, threads, clients, context = sys.argv[1], *map(int, sys.argv[2:6])
p = xllamacpp.CommonParams()
p.model.path, p.hostnames, p.port, p.verbosity = path, ["127.0.0.1"], port, -1
p.n_parallel, p.n_ctx, p.n_batch, p.n_ubatch = clients, clients * context, 2048, 512
p.n_threads_http = clients + 8
p.cpuparams.n_threads = p.cpuparams_batch.n_threads = threads
server = xllamacpp.Server(p)
threading.Event().wait()
"""

PATIENCE = 600
"""Seconds for a server to be ready."""

SPARE = 64
"""Tokens of a slot beyond prompt and answer."""

MEDIANS = (
    *("achieved_concurrency", "request_throughput", "output_throughput", "total_token_throughput"),
    *(f"{how}_{name}_ms" for name in ("ttft", "tpot", "itl", "e2el") for how in ("mean", "median", "p99")),
)

COLUMNS = {
    "tok/s": "output_throughput",
    "in flight": "achieved_concurrency",
    "TTFT": "median_ttft_ms",
    "TTFT P99": "p99_ttft_ms",
    "TPOT": "median_tpot_ms",
    "TPOT P99": "p99_tpot_ms",
    "E2EL": "median_e2el_ms",
}


@dataclass(frozen=True)
class Program:
    """A server: its name, its command without the port, and the path that answers 200 once it is ready."""

    name: str
    argv: tuple[str, ...]
    ready: str

    def command(self, port: int) -> list[str]:
        return [part.replace("{port}", str(port)) for part in self.argv]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ours", nargs=2, action="append", default=[], metavar=("NAME", "ARTIFACT"))
    parser.add_argument("--gguf", nargs=2, action="append", default=[], metavar=("NAME", "FILE"))
    parser.add_argument("--site", action="append", default=[], help="A directory with peers' packages.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--concurrency", default="1,4,16")
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--num-prompts", type=int, default=64)
    parser.add_argument("--vocab-size", type=int, default=49152, help="Of the model [default: SmolLM2's].")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="Of each server.")
    parser.add_argument("--pin", action="store_true", help="Servers on the first cores, the client on those that are left.")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "serve-peers.json")
    options = parser.parse_args()
    programs = programs_of(options)
    found: dict[str, list[dict[str, Any]]] = {program.name: [] for program in programs}
    loads = [os.getloadavg()[0]]
    for number in range(options.rounds):
        seed = secrets.randbits(32)
        for program in programs:
            found[program.name].append(measured(program, options, seed))
            loads.append(os.getloadavg()[0])
            print(f"round {number + 1}/{options.rounds}: {program.name}: {said(found[program.name][-1])}", file=sys.stderr, flush=True)
    wanted = {name: getattr(options, name) for name in ("rounds", "input_len", "output_len", "num_prompts", "threads", "pin")}
    result = {
        **wanted,
        "processor": processor(),
        "cores": os.cpu_count(),
        "load": loads,
        "programs": {program.name: summary(found[program.name]) for program in programs},
    }
    show(result)
    options.out.write_text(json.dumps(result, indent=1) + "\n")


def programs_of(options: argparse.Namespace) -> list[Program]:
    most = max(int(part) for part in options.concurrency.split(","))
    context = options.input_len + options.output_len + SPARE
    ours = [
        Program(f"arctool {name}", (sys.executable, "-m", "arctool.cli", "serve", path, "--port", "{port}"), "/ready")
        for name, path in options.ours
    ]
    llama = [
        Program(
            f"llama.cpp {name}",
            (sys.executable, "-c", LLAMA, path, "{port}", str(options.threads), str(most), str(context)),
            "/health",
        )
        for name, path in options.gguf
    ]
    return ours + llama


def measured(program: Program, options: argparse.Namespace, seed: int) -> dict[str, Any]:
    """One server started, measured and stopped: what the client found, or `failure`; seconds to be ready, most resident memory."""
    try:
        with running(program, options) as (url, seconds, pid):
            found = client(url, options, seed)
            return {**found, "ready_seconds": seconds, "peak_rss_bytes": peak_rss(pid)}
    except Failure as failure:
        return {"failure": str(failure)}


class Failure(Exception):
    """Why a round of a program has no figures."""


@contextmanager
def running(program: Program, options: argparse.Namespace) -> Iterator[tuple[str, float, int]]:
    """(address, seconds until it was ready, process id) of a server while it runs."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    threads = {name: str(options.threads) for name in ("NUMBA_NUM_THREADS", "OMP_NUM_THREADS")}
    environment = os.environ | threads | {"PYTHONPATH": os.pathsep.join([str(ROOT), *options.site])}
    with tempfile.TemporaryFile() as words:
        began = time.perf_counter()
        process = subprocess.Popen(
            program.command(port), stdout=words, stderr=words, env=environment, preexec_fn=pinned(options, server=True)
        )
        try:
            wait(process, f"http://127.0.0.1:{port}{program.ready}", words)
            yield f"http://127.0.0.1:{port}", time.perf_counter() - began, process.pid
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def wait(process: subprocess.Popen[bytes], url: str, words: Any) -> None:
    """Until the server is ready. Raises Failure."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    until = time.perf_counter() + PATIENCE
    while time.perf_counter() < until:
        if process.poll() is not None:
            words.seek(0)
            lines = words.read().decode("utf-8", "replace").strip().splitlines()
            raise Failure(f"left with {process.returncode}: {(lines or ['no output'])[-1]}")
        try:
            if opener.open(url, timeout=5).status == 200:
                return
        except (urllib.error.URLError, OSError):
            pass
        time.sleep(0.1)
    raise Failure(f"{url} was not ready within {PATIENCE} s")


def client(url: str, options: argparse.Namespace, seed: int) -> dict[str, Any]:
    """What `arctool bench serve` found. Raises Failure where it found nothing; rows may have failures of their own."""
    argv = [sys.executable, "-m", "arctool.cli", "bench", "serve", "--base-url", url, "--json", "--quiet", "--seed", str(seed)]
    for name in ("concurrency", "input_len", "output_len", "num_prompts", "vocab_size"):
        argv += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(argv, capture_output=True, text=True, check=False, env=environment, preexec_fn=pinned(options, server=False))
    try:
        found: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        raise Failure((done.stderr.strip().splitlines() or ["the client said nothing"])[-1]) from None
    return found


def pinned(options: argparse.Namespace, *, server: bool) -> Any:
    """What a child does first: keep to its cores."""
    cores = sorted(os.sched_getaffinity(0))
    own = cores[: options.threads] if server else cores[options.threads :]
    return (lambda: os.sched_setaffinity(0, own)) if options.pin and own else None


def peak_rss(pid: int) -> int | None:
    """Most resident memory of a process so far, in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM")), None)


def summary(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of a program's rounds, a row for each number of clients; why there are none if any round failed."""
    failure = next((one["failure"] for one in rounds if "failure" in one), None) or (None if rounds else "no round")
    if failure is not None:
        return {"failure": failure, "rows": [], "rounds": rounds}
    rows = []
    for at, first in enumerate(rounds[0]["rows"]):
        each = [one["rows"][at] for one in rounds]
        failed = next((row["failure"] for row in each if row["failure"] is not None), None)
        row = {"clients": first["max_concurrency"], "failure": failed}
        if failed is None:
            row |= {name: statistics.median(one[name] for one in each) for name in MEDIANS if all(name in one for one in each)}
        rows.append(row)
    told = {name: statistics.median(one[name] for one in rounds) for name in ("ready_seconds", "peak_rss_bytes")}
    return {"failure": None, **told, "rows": rows, "rounds": rounds}


def said(found: dict[str, Any]) -> str:
    if "failure" in found:
        return f"FAILED: {found['failure']}"
    return ", ".join(
        f"{row['max_concurrency']}: " + (f"{row['output_throughput']:.0f} tok/s" if row["failure"] is None else f"FAILED: {row['failure']}")
        for row in found["rows"]
    )


def show(result: dict[str, Any]) -> None:
    print(f"medians of {result['rounds']} rounds, {result['input_len']} tokens in, {result['output_len']} out, milliseconds")
    print(f"{'':28}{'clients':>8}" + "".join(f"{name:>11}" for name in COLUMNS))
    for name, program in result["programs"].items():
        if program["failure"] is not None:
            print(f"{name:28}  FAILED: {program['failure']}")
        for row in program["rows"]:
            head = f"{name:28}{row['clients']:>8}"
            if row["failure"] is not None:
                print(f"{head}  FAILED: {row['failure']}")
            else:
                print(head + "".join(f"{row[key]:>11.2f}" if key in row else f"{'-':>11}" for key in COLUMNS.values()))


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


if __name__ == "__main__":
    main()
