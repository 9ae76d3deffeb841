"""Pages from other origins, static files, and path prefixes."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from starlette.testclient import TestClient
from support.commands import TARGET
from support.servers import Serving, server

from ggpipe.errors import SettingError, UsageError
from ggpipe.options.server import ServerConfig
from ggpipe.server.app import application
from ggpipe.server.backend import Status

KEY = "a-key"
OWN = "127.0.0.1:8080"


def client(config: ServerConfig, *keys: str, is_on_loopback: bool = True) -> TestClient:
    own = MagicMock(config=config)
    own.backend.status = Status.OK
    return TestClient(application(own, keys, is_on_loopback), base_url=f"http://{OWN}", follow_redirects=False)


def status(own: TestClient, origin: str | None = None, host: str = OWN) -> int:
    found = own.get("/health", headers={"Host": host} | ({} if origin is None else {"Origin": origin}))
    return found.status_code


@pytest.mark.parametrize(
    "origin",
    [
        "http://localhost:3000", "http://LOCALHOST", "https://127.0.0.1", "http://[::1]:5000", "http://app.localhost:1",
        f"http://{OWN}",
    ],
)  # fmt: skip
def test_without_keys_pages_of_this_machine_may_use_the_server(origin: str) -> None:
    assert status(client(ServerConfig()), origin.lower()) == 200


@pytest.mark.parametrize(
    "origin",
    [
        "https://example.org", "null", "", "file://", "http://localhost.example.org", "http://127.0.0.1.example.org",
        "http://examplelocalhost", "http://localhost:3000.example.org", "http://localhost:3000/", "http://127.0.0.1:1@a.org",
        "http://x@localhost", "chrome-extension://abc", "http://localhost\t", "http://evil.org/.localhost",
    ],
)  # fmt: skip
def test_without_keys_other_pages_are_refused_whatever_they_send(origin: str) -> None:
    own = client(ServerConfig())
    for method, path in (("GET", "/health"), ("POST", "/v1/completions")):
        found = own.request(method, path, headers={"Origin": origin})
        assert found.status_code == 403, (method, found.text)
        assert found.json()["error"]["type"] == "permission_error"
        assert "access-control-allow-origin" not in found.headers
    asked = {"Origin": origin, "Access-Control-Request-Method": "POST"}
    found = own.request("OPTIONS", "/v1/completions", headers=asked)
    assert (found.status_code, found.content) == (200, b"")
    assert not [name for name in found.headers if name.startswith("access-control")]


def test_browsers_get_leave_before_they_send_and_to_read_errors_too() -> None:
    own = client(ServerConfig(cors_origins=("https://Example.org:8443",)), KEY)
    asked = {
        "Origin": "https://example.org:8443",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization, content-type",
    }
    found = own.options("/v1/completions", headers=asked)
    assert found.status_code == 200
    assert found.headers["access-control-allow-origin"] == asked["Origin"]
    assert "authorization" in found.headers["access-control-allow-headers"]
    assert "POST" in found.headers["access-control-allow-methods"]
    refused = own.post("/v1/completions", headers={"Origin": asked["Origin"]})
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, asked["Origin"])
    assert "Origin" in refused.headers["vary"]
    assert "access-control-allow-credentials" not in {*found.headers, *refused.headers}
    assert status(own, "https://example.org") == 403


def test_with_keys_all_pages_may_ask_but_never_with_what_browsers_keep() -> None:
    own = client(ServerConfig(), KEY)
    found = own.get("/health", headers={"Origin": "https://example.org"})
    assert (found.status_code, found.headers["access-control-allow-origin"]) == (200, "*")
    assert "access-control-allow-credentials" not in found.headers
    assert own.get("/props", headers={"Origin": "https://example.org"}).status_code == 401
    assert status(client(ServerConfig(cors_origins=("",)), KEY), "https://example.org") == 403
    assert status(client(ServerConfig(cors_origins=("",))), f"http://{OWN}") == 200


def test_a_name_that_was_made_to_lead_here_is_refused() -> None:
    own = client(ServerConfig())
    for host in ("evil.example.org:8080", "localhost.example.org", "127.0.0.1.example.org", "[", "a.b:c:d"):
        assert status(own, host=host) == 403, host
        assert status(own, f"http://{host}", host=host) == 403, host
    for host in ("localhost:8080", "[::1]:8080", "192.168.0.7", "node7:8080", "a.localhost", "localhost."):
        assert status(own, host=host) == 200, host
    own = client(ServerConfig(cors_origins=("https://llm.example.org",)))
    assert status(own, "https://llm.example.org", host="llm.example.org") == 200
    assert status(own, host="evil.example.org") == 403
    for free in (
        client(ServerConfig(), KEY), client(ServerConfig(), is_on_loopback=False),
        client(ServerConfig(cors_origins=("*",))),
    ):  # fmt: skip
        assert status(free, host="node.example.org") == 200


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    own = tmp_path / "files"
    (own / "sub: 1").mkdir(parents=True)
    (own / "index.html").write_text("<p>own page")
    (own / "sub: 1" / "index.html").write_text("<p>inner")
    (own / "a.js").write_text("1")
    (tmp_path / "secret").write_text("never shown")
    (tmp_path / "files2").mkdir()
    (tmp_path / "files2" / "secret").write_text("never shown")
    (own / "out").symlink_to(tmp_path / "secret")
    (own / "up").symlink_to(tmp_path)
    (own / "loop").symlink_to("loop")
    os.mkfifo(own / "pipe")
    return own


def test_a_folder_instead_of_the_page(folder: Path) -> None:
    own = client(ServerConfig(static_path=folder), KEY)
    found = own.get("/")
    assert found.text == "<p>own page"
    assert (found.headers["x-frame-options"], found.headers["x-content-type-options"]) == ("DENY", "nosniff")
    assert "content-security-policy" not in found.headers
    assert own.get("/", headers={"If-None-Match": found.headers["etag"]}).status_code == 304
    assert own.get("/a.js").headers["content-type"].startswith("text/javascript")
    moved = own.get("/sub: 1", headers={"Host": "evil.example.org"})
    assert moved.headers["location"] == "./sub%3A%201/"
    assert own.get("/sub: 1/").text == "<p>inner"
    assert [own.get(path).status_code for path in ("/props", "/v1/models")] == [401, 401]
    assert own.post("/v1/completions").status_code == 401
    for path in (
        "/out", "/up/secret", "/loop", "/pipe", "/no.html", "/page/app.js", "/%2e%2e/secret", "/..%2fsecret",
        "/sub: 1/..%2f..%2fsecret", "/%2fetc%2fpasswd", "//etc/passwd", "/%00", "/..%2ffiles2/secret",
        "/" + "a" * 5000, "/%ff", "/..%5csecret", f"/{folder.parent}/secret",
    ):  # fmt: skip
        found = own.get(path)
        assert found.status_code == 404, path
        assert "never shown" not in found.text
        assert found.json()["error"]["message"]


def test_no_page() -> None:
    own = client(ServerConfig(webui=False))
    assert [own.get(path).status_code for path in ("/", "/page/app.js", "/health")] == [404, 404, 200]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"cors_origins": ("example.org",)}, "cors_origins"), ({"cors_origins": ("https://a.org/",)}, "cors_origins"),
        ({"static_path": Path("/nowhere")}, "static_path"), ({"api_prefix": "llm"}, "api_prefix"),
        ({"api_prefix": "/llm/"}, "api_prefix"), ({"api_prefix": "/a?b"}, "api_prefix"),
    ],
)  # fmt: skip
def test_settings_that_cannot_be(fields: dict[str, object], named: str) -> None:
    with pytest.raises(SettingError, match=f"`{named}`"):
        ServerConfig(**fields)  # type: ignore[arg-type]


def test_a_folder_is_no_page(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="`static_path`"):
        ServerConfig(static_path=tmp_path, webui=False)


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    files = tmp_path_factory.mktemp("files")
    (files / "index.html").write_text("<p>own page")
    with (files / "large").open("wb") as large:
        large.truncate(2**26)
    with server(
        "-c", "1024", "--api-prefix", "/llm", "--path", str(files), "--threads-http", "8", "--jinja", "--timeout", "3"
    ) as own:
        own.wait_for(lambda: own.ask("GET", "/llm/health")[0] == 200)
        yield own


def test_a_prefix_of_all_paths_and_what_is_behind_it(serving: Serving) -> None:
    serving.wait_for(lambda: f"ready: {serving.url}/llm/v1" in "".join(serving.lines))
    assert serving.ask("GET", "/llm/")[1] == "<p>own page"
    moved, _, headers = serving.ask("GET", "/llm")
    assert (moved, headers["location"]) == (308, "/llm/")
    for path in ("/health", "/llmhealth", "/", "/llm/../health", "/llm/llm/health"):
        assert serving.ask("GET", path)[0] == 404, path
    code, answer, _ = serving.ask("POST", "/llm/completion", {"prompt": "Once upon a time", "n_predict": 3})
    assert (code, answer["tokens_predicted"]) == (200, 3)
    for number, found in ((3, 200), (0, 200), (-1, 200), (None, 200), (4, 400), (-2, 400)):
        body = {"prompt": "Once", "n_predict": 1, "id_slot": number}
        code, answer, _ = serving.ask("POST", "/llm/completion", body)
        assert code == found
        if code == 400:
            assert answer["error"]["param"] == "id_slot"
        elif number is not None and number >= 0:
            assert answer["id_slot"] == number
    (model,) = serving.ask("GET", "/llm/v1/models")[1]["data"]
    assert {"vocab_type", "n_vocab", "n_ctx", "n_ctx_train", "n_embd", "n_params", "size"} == set(model["meta"])
    assert all(number > 0 for number in model["meta"].values())
    assert model["meta"]["size"] < TARGET.stat().st_size
    props = serving.ask("GET", "/llm/props")[1]
    assert "{%" in props["chat_template"]
    assert props["eos_token"]
    assert serving.ask("GET", "/llm/props", None, {"Origin": "https://example.org"})[0] == 403


def test_a_file_that_is_not_taken(serving: Serving) -> None:
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", serving.port))
        connection.sendall(b"GET /llm/large HTTP/1.1\r\nHost: localhost\r\n\r\n")
        serving.wait_for(lambda: any("GET /large 200" in line for line in serving.lines))
    assert not [line for line in serving.lines if "a bug" in line]
