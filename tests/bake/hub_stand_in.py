"""A stand-in for the Hugging Face hub: a real HTTP server on the loopback that speaks what `snapshot_download` asks for.

Serves one folder as the repository `tiny/<folder name>`: revision info, file tree, and files with the hub's headers and byte ranges.
Faults are set on the server: `gated`, `cut_after` (close the connection in the middle of a file).
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
API = re.compile(r"/api/models/(?P<repo>[^/]+/[^/]+)(?:/(?P<what>revision|tree)/(?P<revision>[^/]+))?")
RESOLVE = re.compile(r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)")


class HubStandIn:
    """Use as a context manager; `endpoint` is the value for HF_ENDPOINT. `requests` lists what was asked, in order."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.repo = f"tiny/{folder.name}"
        self.gated = False
        self.cut_after: dict[str, int] = {}
        self.requests: list[str] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> HubStandIn:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _etag(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()


def _handler(hub: HubStandIn) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def log_message(self, format: str, *args: object) -> None:
            hub.requests.append(format % args)

        def _answer(self, body: bool) -> None:
            path = unquote(urlsplit(self.path).path)
            if match := RESOLVE.fullmatch(path):
                self._file(match["repo"], match["revision"], match["file"], body)
            elif match := API.fullmatch(path):
                self._api(match["repo"], match["what"], match["revision"])
            else:
                self._error(404, "EntryNotFound")

        def _refused(self, repo: str, revision: str | None) -> bool:
            if repo != hub.repo:
                self._error(401, "RepoNotFound")
            elif hub.gated:
                self._error(401, "GatedRepo")
            elif revision not in (None, "main", COMMIT):
                self._error(404, "RevisionNotFound")
            else:
                return False
            return True

        def _api(self, repo: str, what: str | None, revision: str | None) -> None:
            if self._refused(repo, revision):
                return
            files = sorted(path for path in hub.folder.rglob("*") if path.is_file())
            names = [path.relative_to(hub.folder).as_posix() for path in files]
            if what == "tree":
                self._json(
                    [
                        {"type": "file", "path": name, "size": path.stat().st_size, "oid": _etag(path)}
                        for name, path in zip(names, files, strict=True)
                    ]
                )
            else:
                self._json({"id": repo, "modelId": repo, "sha": COMMIT, "siblings": [{"rfilename": name} for name in names]})

        def _file(self, repo: str, revision: str, name: str, body: bool) -> None:
            if self._refused(repo, revision):
                return
            path = hub.folder / name
            if not path.is_file():
                self._error(404, "EntryNotFound")
                return
            data = path.read_bytes()
            start = 0
            if wanted := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")):
                start = int(wanted[1])
            self.send_response(206 if start else 200)
            if start:
                self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
            self.send_header("ETag", f'"{_etag(path)}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("Accept-Ranges", "bytes")
            self.send_header("Content-Length", str(len(data) - start))
            self.end_headers()
            if not body:
                return
            cut = hub.cut_after.get(name)
            self.wfile.write(data[start : len(data) if cut is None else max(cut, start)])
            if cut is not None:
                self.close_connection = True

        def _json(self, value: object) -> None:
            data = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def _error(self, status: int, code: str) -> None:
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("X-Error-Message", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

    return Handler
