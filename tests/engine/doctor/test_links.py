"""Links are measured, and strangers get no answer."""

from __future__ import annotations

import socket

import pytest

from ggpipe.engine.doctor import links
from ggpipe.engine.doctor.links import LinkServer, measure


def test_a_link_is_measured() -> None:
    with LinkServer() as server:
        for _ in range(2):
            found = measure(f"127.0.0.1:{server.port}", server.secret)
            assert found.problem == ""
            assert 0 < found.round_trip_s < 5
            assert found.bytes_per_s > 0


def test_a_wrong_secret() -> None:
    with LinkServer() as server:
        found = measure(f"127.0.0.1:{server.port}", "0" * len(server.secret))
        assert found.problem.startswith("cannot connect to 127.0.0.1 (")
        assert measure(f"127.0.0.1:{server.port}", server.secret).problem == ""


def test_a_closed_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "_PATIENCE_S", 1.0)
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
        assert measure(f"127.0.0.1:{port}", "x").problem == "cannot connect to 127.0.0.1 (Connection refused)"
