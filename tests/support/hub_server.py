"""A Hugging Face Hub on this machine: the endpoints that downloads use, with faults on request."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_API = re.compile(r"/api/models/([^/]+/[^/]+)(?:/revision/[^/]+)?")
_FILE = re.compile(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)")
_SMALL_BYTES = 1000
"""Smaller files are in the repository itself, without a SHA-256."""


@dataclass
class HubServer:
    """Repositories, and what was asked of them."""

    repos: dict[str, Mapping[str, bytes]]
    """Files of each repository."""
    url: str = ""
    token: str = ""
    """Required for all requests, if not empty."""
    break_after_bytes: int | None = None
    """Close the connection of each download after this many bytes."""
    spoiled: set[str] = field(default_factory=set)
    """Files that arrive with a wrong byte."""
    asked: list[str] = field(default_factory=list)
    """`METHOD PATH RANGE` of each request."""
    n_sent: int = 0
    """Bytes of files that were sent."""


@contextlib.contextmanager
def hub_server(**repos: Mapping[str, bytes]) -> Iterator[HubServer]:
    """A running hub. `repos`: files by name for each `user__repo`."""
    hub = HubServer({name.replace("__", "/"): files for name, files in repos.items()})
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(has_body=False)

    def do_GET(self) -> None:
        self._answer(has_body=True)

    def _answer(self, has_body: bool) -> None:
        path, wanted = unquote(urlsplit(self.path).path), self.headers.get("Range", "")
        self.hub.asked.append(f"{self.command} {path} {wanted}".strip())
        if self.hub.token and self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            self._send(401, b"", {"X-Error-Message": "Invalid credentials in Authorization header"})
        elif (match := _API.fullmatch(path)) and match[1] in self.hub.repos:
            self._send(200, json.dumps(self._info(match[1])).encode(), {"Content-Type": "application/json"})
        elif (match := _FILE.fullmatch(path)) and match[2] in self.hub.repos.get(match[1], {}):
            self._file(match[1], match[2], wanted, has_body)
        else:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound" if _FILE.fullmatch(path) else "RepoNotFound"})

    def _info(self, repo: str) -> dict[str, object]:
        siblings = []
        for name, data in self.hub.repos[repo].items():
            lfs = {"size": len(data), "sha256": _sha256(data), "pointerSize": 134}
            siblings.append({"rfilename": name, "size": len(data), "blobId": _blob_id(data)})
            siblings[-1].update({"lfs": lfs} if len(data) >= _SMALL_BYTES else {})
        return {"id": repo, "modelId": repo, "sha": COMMIT, "private": False, "siblings": siblings}

    def _file(self, repo: str, name: str, wanted: str, has_body: bool) -> None:
        data = self.hub.repos[repo][name]
        etag = _sha256(data) if len(data) >= _SMALL_BYTES else _blob_id(data)
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{etag}"', "Accept-Ranges": "bytes"}
        if name in self.hub.spoiled:
            data = data[:-1] + bytes([data[-1] ^ 1])
        status, first, end = 200, 0, len(data)
        if match := re.fullmatch(r"bytes=(\d+)-(\d*)", wanted):
            status, first, end = 206, int(match[1]), min(int(match[2] or end - 1) + 1, end)
            headers["Content-Range"] = f"bytes {first}-{end - 1}/{len(data)}"
        limit = self.hub.break_after_bytes if has_body else None
        self._send(status, data[first:end], headers, has_body, limit)

    def _send(
        self, status: int, body: bytes, headers: Mapping[str, str], has_body: bool = True, limit: int | None = None
    ) -> None:
        self.send_response(status)
        for name, text in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, text)
        self.end_headers()
        if has_body and self.command == "GET":
            sent = body[:limit]
            self.wfile.write(sent)
            self.hub.n_sent += len(sent)
            self.close_connection = self.close_connection or len(sent) < len(body)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _blob_id(data: bytes) -> str:
    """The id that git gives a file."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
