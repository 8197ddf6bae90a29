"""Who may come in. Keys are kept and compared as digests, and every one of them is looked at, whoever asks."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from starlette.types import ASGIApp, Receive, Scope, Send

from arctool.serve.problems import Problem
from arctool.serve.replies import refuse

OPEN_PATHS = frozenset(("/", "/health", "/ready", "/favicon.ico"))
OPEN_PREFIXES = ("/page/",)


@dataclass(frozen=True)
class Caller:
    """Whoever sends a request. `tenant`: a name for their key that does not tell it; empty where there are no keys."""

    tenant: str = ""

    def salt(self, own: str, *, shared: bool) -> str:
        """What keeps this caller's cached prefixes from others': their key, unless told otherwise, and the salt that they chose."""
        tenant = "" if shared else self.tenant
        if not tenant and not own:
            return ""
        return hashlib.sha256(f"{len(tenant)}:{tenant}:{own}".encode()).hexdigest()


class KeyRing:
    """The keys that open the door; without any it is open."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = tuple(hashlib.sha256(key.encode()).digest() for key in keys)

    def caller(self, headers: Mapping[str, str]) -> Caller:
        """Who sends `headers` (names in lower case). Raises Problem 401 without a key that fits."""
        if not self._digests:
            return Caller()
        scheme, _, given = headers.get("authorization", "").partition(" ")
        key = given.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        digest = hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
        found = None
        for known in self._digests:
            if hmac.compare_digest(known, digest):
                found = known
        if found is None:
            what = "missing" if not key else "unknown"
            raise Problem(
                401,
                f"API key: {what}; send it as `Authorization: Bearer KEY`",
                "authentication_error",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return Caller(hashlib.sha256(b"tenant" + found).hexdigest()[:16])


class Gate:
    """ASGI: lets in who has a key, and notes who it is in `scope["state"]["caller"]`."""

    def __init__(self, app: ASGIApp, keys: KeyRing, open_paths: Iterable[str] = ()) -> None:
        self._app = app
        self._keys = keys
        self._open = OPEN_PATHS | set(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        path = scope["path"]
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        try:
            caller = self._keys.caller(headers)
        except Problem as problem:
            # A browser asks with OPTIONS, and without a key, whether it may ask. A body is read of nobody without a key, wherever it goes.
            seen = scope["method"] in ("GET", "HEAD") and (path in self._open or path.startswith(OPEN_PREFIXES))
            if not seen and scope["method"] != "OPTIONS":
                return await refuse(scope, receive, send, problem)
            caller = Caller()
        scope.setdefault("state", {})["caller"] = caller
        await self._app(scope, receive, send)
