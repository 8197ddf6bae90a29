"""The chat page at `/`: hands out the files of `page/` as they lie in the package. Knows nothing of what the page asks the server for.

All files are read once, so that a request can name nothing but one of them. The page loads from this server only, runs no inline
script, and can be framed by no other page, whatever a model writes into it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

DIRECTORY = Path(__file__).with_name("page")
INDEX = "index.html"

CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
"""What is served; licences and notes that lie beside are not."""

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)

HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # A browser would look up the hosts of links that a model wrote before anybody follows them.
    "X-DNS-Prefetch-Control": "off",
    # Asked for each time and answered with 304: after an upgrade no browser mixes old files with new ones.
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True)
class PageFile:
    """A file as it is sent, and the tag by which a browser asks whether it still has it."""

    body: bytes
    content_type: str
    etag: str


def page_files(directory: Path = DIRECTORY) -> Mapping[str, PageFile]:
    """Every file of the page by its path below `directory`, written with slashes."""
    files = {}
    for path in sorted(directory.rglob("*")):
        content_type = CONTENT_TYPES.get(path.suffix)
        if content_type is None or not path.is_file():
            continue
        body = path.read_bytes()
        files[path.relative_to(directory).as_posix()] = PageFile(body, content_type, f'"{hashlib.sha256(body).hexdigest()[:32]}"')
    return files


def mount_page(app: FastAPI) -> None:
    """Serves the page at `/` and its files below `/page/`."""
    files = page_files()

    async def index(request: Request) -> Response:
        return _answer(request, files[INDEX])

    async def file(request: Request) -> Response:
        found = files.get(request.path_params["name"])
        if found is None:
            raise HTTPException(404)
        return _answer(request, found)

    app.add_route("/", index, methods=["GET"], include_in_schema=False)
    app.add_route("/page/{name:path}", file, methods=["GET"], include_in_schema=False)


def _answer(request: Request, file: PageFile) -> Response:
    """The file, or 304 to a browser that has it. (To HEAD uvicorn sends no body.)"""
    headers = {**HEADERS, "ETag": file.etag}
    if file.etag in (tag.strip().removeprefix("W/") for tag in request.headers.get("If-None-Match", "").split(",")):
        return Response(status_code=304, headers=headers)
    return Response(file.body, media_type=file.content_type, headers=headers)
