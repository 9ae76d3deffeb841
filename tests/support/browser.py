"""Debian's Chromium without a screen, and what goes wrong in its pages."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import ConsoleMessage, Page, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome")
LIMIT_MS = 60_000
"""For one step of a page, on a loaded machine."""
_FLAGS = ("--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync")


@dataclass
class Watched:
    """A page, with its errors and the hosts that it asked."""

    page: Page
    host: str
    errors: list[str] = field(default_factory=list)
    hosts: set[str] = field(default_factory=set)

    def check(self) -> None:
        """There was no error, and no request to another host."""
        assert self.errors == []
        assert self.hosts <= {self.host}


@contextlib.contextmanager
def browser(url: str) -> Iterator[Watched]:
    """A page of its own at an address. Skips the test where there is no Chromium."""
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip("no Chromium here (Debian: apt-get install chromium)")
    flags = [*_FLAGS, *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=flags, timeout=2 * LIMIT_MS)
        with contextlib.closing(chromium):
            page = chromium.new_page(viewport={"width": 1280, "height": 800})
            page.set_default_timeout(LIMIT_MS)
            watched = Watched(page, urlsplit(url).netloc)
            page.on("request", lambda request: watched.hosts.add(urlsplit(request.url).netloc))
            page.on("pageerror", lambda error: watched.errors.append(str(error)))
            page.on("console", lambda message: _note(watched, message))
            yield watched


def _note(watched: Watched, message: ConsoleMessage) -> None:
    if message.type in ("error", "warning"):
        watched.errors.append(message.text)
