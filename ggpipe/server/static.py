"""Files for browsers: the page's, or a folder's."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

PAGE = Path(__file__).parent / "page"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
"""The page loads nothing from other hosts, runs no script in its text, and is in no other page's frame."""
_OF_FOLDERS = {name: value for name, value in HEADERS.items() if name != "Content-Security-Policy"}
"""What a folder's pages load is for those who wrote them to say."""


@dataclass(frozen=True)
class _File:
    content: bytes
    headers: Mapping[str, str]


class Page:
    """`/` and `/page/…`: files that are read once, so no path of a request reaches the file system."""

    def __init__(self, folder: Path = PAGE) -> None:
        self._files = {path.name: _read(path) for path in sorted(folder.iterdir()) if path.suffix in _TYPES}

    async def get(self, request: Request) -> Response:
        """The file that a path names; `/` is `index.html`."""
        file = self._files.get(request.path_params.get("name", "index.html"))
        if file is None:
            return Response("Not found", 404, {"X-Content-Type-Options": "nosniff"}, "text/plain")
        if request.headers.get("if-none-match") == file.headers["ETag"]:
            return Response(status_code=304, headers=file.headers)
        return Response(file.content, headers=file.headers)


def _read(path: Path) -> _File:
    content = path.read_bytes()
    tag = hashlib.sha256(content).hexdigest()[:16]
    return _File(content, {**HEADERS, "ETag": f'"{tag}"', "Content-Type": _TYPES[path.suffix]})


class Folder(StaticFiles):
    """A folder's files, at all paths that are no endpoint's. Nothing outside the folder is read, whatever links lead
    there. `index.html` stands for its folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__(directory=folder, html=True)

    async def get_response(self, path: str, scope: Scope) -> Response:
        try:
            response = await super().get_response(path, scope)
        except HTTPException as e:
            raise HTTPException(404 if e.status_code == 401 else e.status_code, headers=e.headers) from e
        except OSError as e:  # a link that leads to itself
            raise HTTPException(404) from e
        if isinstance(response, RedirectResponse):  # to a place that this server names, not a header of the client
            response.headers["Location"] = f"./{quote(scope['path'].rpartition('/')[2])}/"
        response.headers.update(_OF_FOLDERS)
        return response
