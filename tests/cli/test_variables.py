"""llama.cpp's environment variables: which are read, what comes before them, and who does not read them."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from ggpipe.cli import app, dispatch
from ggpipe.config.context import ContextConfig
from ggpipe.config.model import ModelConfig
from ggpipe.config.sampling import SamplingConfig
from ggpipe.options.chat import ChatSettings
from ggpipe.options.option import Command, Options
from ggpipe.options.server import ServerConfig
from ggpipe.options.settings import LoadSettings, ModelSettings
from ggpipe.text.chat.conversation import CHATML

Line = Callable[..., Any]


@pytest.fixture
def line(monkeypatch: pytest.MonkeyPatch) -> Line:
    """Runs a command line with variables; returns the options that its command gets."""
    for variable in ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_STEP_NUM_TASKS", "GGPIPE_CHANNEL"):
        monkeypatch.delenv(variable, raising=False)

    def read(arguments: str, **variables: str) -> Any:
        for name, text in variables.items():
            monkeypatch.setenv(name, text)
        seen: list[Options] = []

        def keep(_: Command, options: Options) -> int:
            for record in (ContextConfig, ServerConfig):
                options[record]
            seen.append(options)
            return 0

        monkeypatch.setattr(dispatch, "_call", keep)
        code = app.run(arguments.split())
        assert code == (0 if seen or "--help" in arguments else 2)
        return seen[0] if seen else None

    return read


def test_variables_are_read(line: Line) -> None:
    options = line(
        "serve", LLAMA_ARG_MODEL="m.gguf", LLAMA_ARG_CTX_SIZE="512", LLAMA_ARG_PORT="81", LLAMA_API_KEY="a,b",
        LLAMA_ARG_TEMPERATURE="0.5", LLAMA_ARG_N_PARALLEL="3", LLAMA_ARG_ENDPOINT_METRICS="enabled",
        LLAMA_ARG_NO_ENDPOINT_SLOTS="1", LLAMA_ARG_FLASH_ATTN="0", LLAMA_ARG_ALIAS="",
        LLAMA_ARG_SPEC_DRAFT_MODEL="d.gguf",
    )  # fmt: skip
    assert list(map(str, (options[ModelSettings].target, *options[ModelSettings].drafts))) == ["m.gguf", "d.gguf"]
    assert (options[ContextConfig].n_ctx, options[ContextConfig].flash_attn) == (512, "off")
    server = options[ServerConfig]
    assert (server.port, server.keys(), server.n_slots, server.alias) == (81, ("a", "b"), 3, None)
    assert (server.metrics, server.slots) == (True, False)
    assert options.fields(SamplingConfig)["temp"] == 0.5


def test_flags_come_first(line: Line) -> None:
    options = line("serve -m a --port 82 --repack", LLAMA_ARG_MODEL="b", LLAMA_ARG_PORT="81", LLAMA_ARG_NO_REPACK="1")
    assert (str(options[ModelSettings].target), options[ServerConfig].port) == ("a", 82)
    assert options.fields(ModelConfig)["repack"]
    options = line(
        "chat -m a --no-mmap --chat-template-file f", LLAMA_ARG_LOAD_MODE="mmap", LLAMA_ARG_CHAT_TEMPLATE="c"
    )
    assert (options[LoadSettings].mode, options.fields(ChatSettings).get("template")) == ("none", None)


def test_a_template_is_for_conversations(line: Line) -> None:
    assert "template" not in line("generate -m a -p b", LLAMA_ARG_CHAT_TEMPLATE="chatml").fields(ChatSettings)
    assert line("generate -m a -p b -st")[ChatSettings].source == CHATML


@pytest.mark.parametrize(
    ("variable", "text", "why"),
    [
        ("LLAMA_ARG_PORT", "x", "LLAMA_ARG_PORT must be a whole number, got x"),
        ("LLAMA_ARG_PORT", "99999", "LLAMA_ARG_PORT must be .*got 99999"),
        ("LLAMA_ARG_ENDPOINT_METRICS", "maybe", "LLAMA_ARG_ENDPOINT_METRICS must be on or off .*got maybe"),
        ("LLAMA_ARG_THREADS", "two", "LLAMA_ARG_THREADS two: give one number"),
        ("LLAMA_ARG_CTX_SIZE", "-5", "LLAMA_ARG_CTX_SIZE must be .*got -5"),
    ],
)
def test_wrong_values_name_the_variable(
    line: Line, variable: str, text: str, why: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert line("serve -m m", **{variable: text}) is None
    assert re.fullmatch(f"ggpipe: error: {why}.*\n", capsys.readouterr().err)
    assert line("serve -m m", **{variable: ""}) is not None
    monkeypatch.setenv(variable, text)
    assert line("batch -m m in -o out") is not None  # llama.cpp has no such command


def test_ranks_do_not_read_them(
    line: Line, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    variables = {"LLAMA_ARG_CTX_SIZE": "512", "LLAMA_API_KEY": "k"}
    monkeypatch.setenv("PMIX_RANK", "0")
    options = line("serve -m m", **variables)  # the user's own mpirun
    assert (options[ContextConfig].n_ctx, options[ServerConfig].keys()) == (ContextConfig().n_ctx, ("k",))
    assert capsys.readouterr().err.startswith("ggpipe: warning: ignoring LLAMA_ARG_CTX_SIZE: under mpirun")
    monkeypatch.setenv("PMIX_RANK", "1")
    assert line("serve -m m")[ServerConfig].api_key is None
    monkeypatch.setenv("PMIX_RANK", "0")
    monkeypatch.setenv("GGPIPE_CHANNEL", "127.0.0.1:1")
    assert line("generate -m m -p x")[ContextConfig].n_ctx == ContextConfig().n_ctx
    assert not capsys.readouterr().err


def test_help_shows_the_variable_but_no_key(line: Line, capsys: pytest.CaptureFixture[str]) -> None:
    line("serve --help", LLAMA_API_KEY="my-secret")
    shown = capsys.readouterr().out
    assert "LLAMA_API_KEY" in shown
    assert "my-secret" not in shown
