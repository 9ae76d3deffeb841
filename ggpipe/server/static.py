"""Static files for browsers: the page, or a folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

PAGE = Path(__file__).parent / "page"
PAGE_HEADERS = {
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
"""The page loads nothing from other hosts, runs no inline scripts, and cannot be framed by other pages."""
FOLDER_HEADERS = {name: value for name, value in PAGE_HEADERS.items() if name != "Content-Security-Policy"}
"""A folder's pages may load what their authors want."""


class Files(StaticFiles):
    """The files of a folder. Links to files outside the folder are not followed."""

    def __init__(self, folder: Path, headers: Mapping[str, str], has_indexes: bool = False) -> None:
        """`headers`: sent with all files. `has_indexes`: a folder's path returns its `index.html`."""
        super().__init__(directory=folder, html=has_indexes)
        self._headers = headers

    async def index(self, request: Request) -> Response:
        """The folder's `index.html`."""
        return await self.get_response("index.html", request.scope)

    async def get_response(self, path: str, scope: Scope) -> Response:
        try:
            response = await super().get_response(path, scope)
        except HTTPException as e:
            raise HTTPException(404 if e.status_code == 401 else e.status_code, headers=e.headers) from e
        except OSError as e:  # a circular link
            raise HTTPException(404) from e
        if isinstance(response, RedirectResponse):  # relative, since the client's header may name another host
            response.headers["Location"] = f"./{quote(scope['path'].rpartition('/')[2])}/"
        response.headers.update(self._headers)
        return response
