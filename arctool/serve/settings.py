"""What an operator decides about the door: where it stands, who may come in, how much it takes and how long it waits. Plain values."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from arctool.errors import UsageError
from arctool.serve.output.families import by_name

KEYS_VARIABLE = "ARCTOOL_API_KEY"
REASONING_PARSERS = ("auto", "think", "none")
MAX_KEYS = 10_000
MIN_KEY, MAX_KEY = 8, 512
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#\s]+")
HOST = re.compile(r"[^/:\s]+|\[[0-9A-Fa-f:.]+\]")
"""What browsers send as Origin, and what is compared with the Host header; anything else would never match, without a word."""


@dataclass(frozen=True)
class ServeOptions:
    """Seconds and bytes. `model_name`: the name that clients know the model by.

    `request_timeout`: the most that a request may take, None: as long as it needs; a request may ask for less. `keep_alive`: after so
    long without a token a stream gets a comment, so that nothing on the way takes it for dead. `send_timeout`: a client that takes nothing
    for so long is given up. `stall`, `watchdog`: an engine that has not finished a step for so long is unhealthy, and is given up.
    `share_prefix_cache`: requests of different API keys may find each other's prefixes.
    """

    model_name: str
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    public_metrics: bool = False
    max_queued: int = 1024
    request_timeout: float | None = None
    drain_timeout: float = 30.0
    keep_alive: float = 15.0
    send_timeout: float = 60.0
    max_body: int = 8 << 20
    body_timeout: float = 30.0
    stall: float = 60.0
    watchdog: float = 300.0
    share_prefix_cache: bool = False
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"
    schedule_every: float = 10.0
    tls_certificate: Path | None = None
    tls_key: Path | None = None

    def __post_init__(self) -> None:
        for name, low in (
            ("drain_timeout", 0.0),
            ("keep_alive", 0.01),
            ("schedule_every", 0.0),
            ("send_timeout", 0.01),
            ("body_timeout", 0.01),
            ("stall", 0.1),
            ("watchdog", 0.1),
        ):
            value = getattr(self, name)
            if not low <= value < float("inf"):
                raise UsageError(f"--{name.replace('_', '-')}: expected at least {low:g} seconds, found {value}")
        if self.request_timeout is not None and not 0 < self.request_timeout < float("inf"):
            raise UsageError(f"--request-timeout: expected more than 0 seconds, found {self.request_timeout}")
        if not 0 <= self.port <= 65535:
            raise UsageError(f"--port: expected 0 to 65535, found {self.port}")
        if self.max_queued < 1:
            raise UsageError(f"--max-queued: expected at least 1, found {self.max_queued}")
        if self.max_body < 1024:
            raise UsageError(f"--max-body: expected at least 1024 bytes, found {self.max_body}")
        if self.tool_parser not in ("auto", "none"):
            by_name(self.tool_parser)
        if self.reasoning_parser not in REASONING_PARSERS:
            raise UsageError(f"--reasoning-parser: expected one of {', '.join(REASONING_PARSERS)}, found {self.reasoning_parser!r:.40}")
        for origin in self.cors_origins:
            if origin != "*" and not ORIGIN.fullmatch(origin):
                raise UsageError(f"--cors-origin: expected an origin like https://example.org, or *, found {origin!r:.100}")
        for name in self.allowed_hosts:
            if not HOST.fullmatch(name):
                raise UsageError(f"--allowed-host: expected a name without scheme and port, or an address, found {name!r:.100}")
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise UsageError("--tls-cert and --tls-key: expected both or neither")

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach the door."""
        return self.host in ("localhost", "::1") or self.host.startswith("127.")


def gather_keys(given: tuple[str, ...], file: Path | None, environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """API keys of the command line, of a file (one a line, # begins a comment) and of ARCTOOL_API_KEY (commas between several).

    Raises UsageError for a file that cannot be read or holds none, and for keys that are too short to be secret or cannot be sent.
    """
    keys = [*given, *filter(None, (key.strip() for key in environment.get(KEYS_VARIABLE, "").split(",")))]
    if file is not None:
        try:
            lines = [line.strip() for line in file.read_text("utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--api-key-file: {file}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
        found = [line for line in lines if line and not line.startswith("#")]
        if not found:
            raise UsageError(f"--api-key-file: {file}: holds no key; the server would be open to everybody")
        keys += found
    if len(keys) > MAX_KEYS:
        raise UsageError(f"--api-key: expected at most {MAX_KEYS} keys, found {len(keys)}")
    for number, key in enumerate(keys, 1):
        if not MIN_KEY <= len(key) <= MAX_KEY or not key.isascii() or not key.isprintable() or " " in key:
            raise UsageError(f"--api-key: key {number}: expected {MIN_KEY} to {MAX_KEY} printable ASCII characters without spaces")
    return tuple(dict.fromkeys(keys))
