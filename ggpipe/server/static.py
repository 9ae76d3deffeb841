"""Files for browsers: the page's, or a folder's."""

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
"""The page loads nothing from other hosts, runs no script in its text, and is in no other page's frame."""
FOLDER_HEADERS = {name: value for name, value in PAGE_HEADERS.items() if name != "Content-Security-Policy"}
"""What a folder's pages load is for those who wrote them to say."""


class Files(StaticFiles):
    """A folder's files. Nothing outside the folder is read, whatever links lead there."""

    def __init__(self, folder: Path, headers: Mapping[str, str], has_indexes: bool = False) -> None:
        """`headers`: those of all files. `has_indexes`: `index.html` stands for its folder."""
        super().__init__(directory=folder, html=has_indexes)
        self._headers = headers

    async def index(self, request: Request) -> Response:
        """`index.html`."""
        return await self.get_response("index.html", request.scope)

    async def get_response(self, path: str, scope: Scope) -> Response:
        try:
            response = await super().get_response(path, scope)
        except HTTPException as e:
            raise HTTPException(404 if e.status_code == 401 else e.status_code, headers=e.headers) from e
        except OSError as e:  # a link that leads to itself
            raise HTTPException(404) from e
        if isinstance(response, RedirectResponse):  # to a place that this server names, not a header of the client
            response.headers["Location"] = f"./{quote(scope['path'].rpartition('/')[2])}/"
        response.headers.update(self._headers)
        return response
