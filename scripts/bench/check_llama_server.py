"""llama.cpp's own server tests, with the bundled model; run it as `scripts/bench/check_llama_server`.

The tests are those of `tools/server/tests` in llama.cpp's source. They start `ggpipe serve` where they would start
llama-server; `--server` names a llama-server to compare with. Slow tests, and those of features that ggpipe lacks, are
left out (`LEFT_OUT`).

A line per test that fails, with the reason if it is known. `DIFFERENT` has the tests that llama-server passes with the
bundled model, `OF_OTHER_MODELS` those that it does not pass either: they expect the words, the tokens or the files of
other models. Then counts per file. Exit code 1 if a test fails for another reason.
"""

from __future__ import annotations

import argparse
import collections
import fnmatch
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Iterator
from pathlib import Path

from support import llama_cpp_source
from support.commands import TARGET

LEFT_OUT = (
    "gcp", "infill", "lora", "mcp_servers", "proxy", "rerank", "router", "sleep", "speculative", "tools_builtin",
    "vision_api",
)  # fmt: skip
OF_OTHER_MODELS = {
    "basic": ("test_load_split_model",),
    "chat_completion": (
        "test_chat_completion[[]*", "test_chat_completion_cached_tokens", "test_chat_completion_stream[[]Book*",
        "test_chat_completion_with_openai_library", "test_chat_template", "test_return_progress[[]64-4-False]",
    ),
    "compat_anthropic": (
        "test_anthropic_vision_base64_with_multimodal_model", "test_anthropic_thinking_with_reasoning_model*",
    ),
    "compat_oai_responses": ("test_responses_*with_openai_library", "test_responses_stream_with_llama_telemetry"),
    "completion": (
        "test_completion[[]*", "test_completion_stream[[]*", "test_completion_with_openai_library",
        "test_completion_stream_with_openai_library*", "test_completion_parallel_slots*",
        "test_completion_response_fields*", "test_completion_prompt_cache",
    ),
    "ctx_shift": (
        "test_ctx_shift_enabled", "test_ctx_shift_disabled_short_prompt[[]-1-248-True]",
        "test_ctx_shift_disabled_long_prompt",
    ),
    "embedding": (
        "test_embedding_pooling_none", "test_embedding_error_prompt_too_long", "test_embedding_usage_single*",
    ),
    "security": ("test_local_media_file*",),
    "slot_save": ("*",),
    "stream": ("test_stream_stop_during_model_load", "test_stream_resumes_after_reload_during_model_load"),
    "tokenize": ("test_tokenize_with_bos",),
}  # fmt: skip
"""Tests that llama-server fails with the bundled model, which writes other words, divides prompts into other tokens,
lacks a BOS token and cannot see; or whose models would have to be downloaded. Patterns of names, by file."""
_SHARED_CELLS = (
    "all requests share the KV cells, so each may use the whole context; llama-server divides it by its slots"
)
_IMAGE = "an image is the client's mistake: 400, where llama-server says 500"
_PREFLIGHT = "pages are allowed GET and POST, and never their visitors' cookies"
_NO_TOOLS = "`--tools` and `--ui-mcp-proxy` would run programs and fetch addresses for whoever reaches the server"
DIFFERENT = {
    "basic": {"test_server_props": _SHARED_CELLS, "test_server_slots": _SHARED_CELLS},
    "chat_completion": {
        "test_context_size_exceeded*": _SHARED_CELLS,
        "test_completion_with_response_format[[]response_format1-*": "`items` alone says nothing about values that are "
        "no arrays, by the standard; llama-server takes it for `type: array`",
        "test_invalid_chat_completion_req[[]messages7]": "two messages of the model in a row are continued",
        "test_chat_completion_stream[[]You are a coding*": "it looks for words of another model, which llama-server's "
        "output happens to contain",
    },
    "compat_anthropic": {
        "test_anthropic_tool_result_with_image": _IMAGE,
        "test_anthropic_vision_format_accepted": _IMAGE,
        "test_anthropic_empty_messages": "no messages are refused, as by Anthropic's own API",
    },
    "compat_gcp": {"*": "there is no `/predict` for Vertex AI"},
    "completion": {"test_nocache_long_input_prompt": _SHARED_CELLS},
    "kv_keep_only_active": {"test_clear_and_restore": "it looks for lines of llama-server's log"},
    "metrics": {"test_metrics_prometheus_format": "`n_tokens_max` is a gauge: a counter would end in `_total`"},
    "security": {
        "test_access_static_assets_without_api_key": "it asks for the files of llama-server's own page",
        "test_cors_options*": _PREFLIGHT,
        "test_cors_origins_defaults_to_localhost_with_tools_enabled": _NO_TOOLS,
        "test_cors_proxy_only_forwards_explicit_proxy_headers": _NO_TOOLS,
    },
    "stream": {
        "test_stream_resume_and_stop_with_slashed_model_name": "finished streams are not kept (`/v1/stream`), and "
        "there is only one model",
    },
}
"""Why tests fail that llama-server passes with the bundled model, by file and pattern of their names."""
DROPPED = {"--hf-repo": 1, "--hf-file": 1, "--no-jinja": 0, "--offline": 0}
"""Flags of the tests that are left out, with the number of their values: the model is the bundled one."""
SERVER = """#!{python}
import os, sys
words, dropped, server = sys.argv[1:], {dropped!r}, {server!r}
kept, i = [], 0
while i < len(words):
    if words[i] in dropped:
        i += 1 + dropped[words[i]]
    else:
        kept.append(words[i])
        i += 1
if "--embedding" in kept and "--pooling" not in kept:
    kept += ["--pooling", "mean"]  # the model has none of its own
os.execv(server[0], [*server, "-m", {model!r}, *kept])
"""


def prepared(folder: Path, server: list[str]) -> Path:
    """A copy of the tests that starts `server` with the bundled model. Nothing is downloaded."""
    tests = folder / "tools" / "server" / "tests"
    (folder / "models").symlink_to(llama_cpp_source.source() / "models")  # of chat templates
    shutil.copytree(llama_cpp_source.source() / "tools" / "server" / "tests", tests)
    conftest = tests / "conftest.py"
    conftest.write_text(conftest.read_text().replace("ServerPreset.load_all()", "pass"))
    (tests / "wget.py").write_text("")
    utils = tests / "utils.py"  # which compares the names of headers as they are written, unlike HTTP
    utils.write_text(utils.read_text().replace("dict(response.headers)", "response.headers"))
    program = tests / "server"
    program.write_text(SERVER.format(python=sys.executable, dropped=DROPPED, server=server, model=str(TARGET)))
    program.chmod(0o755)
    return tests


def outcomes(tests: Path, names: Iterable[str], port: int, only: str) -> Iterator[tuple[str, str]]:
    """Each test, with `passed`, `skipped`, or the line that says why it failed. `only`: for pytest's -k; empty: all."""
    environment = {**os.environ, "LLAMA_SERVER_BIN_PATH": str(tests / "server"), "PORT": str(port)}
    for name in names:
        report = tests / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout", "120", "-m", "not slow"]
        command += ["-c", "pytest.ini", f"--junitxml={report}", f"unit/test_{name}.py"]
        command += ["-k", only] if only else []
        subprocess.run(command, cwd=tests, env=environment, stdout=subprocess.DEVNULL, check=False)
        for case in ElementTree.parse(report).iter("testcase"):
            worst = next((part for part in case if part.tag in ("failure", "error", "skipped")), None)
            outcome = "passed" if worst is None else "skipped" if worst.tag == "skipped" else worst.get("message", "")
            yield f"{name}::{case.get('name')}", re.sub(r"\s+", " ", outcome)


def reason(name: str, test: str) -> str | None:
    """Why a test of a file fails; None: not known."""
    for pattern, why in DIFFERENT.get(name, {}).items():
        if fnmatch.fnmatchcase(test, pattern):
            return why
    if any(fnmatch.fnmatchcase(test, pattern) for pattern in OF_OTHER_MODELS.get(name, ())):
        return "for another model"
    return None


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="names of test files, such as completion (default: all that apply)")
    parser.add_argument("-k", dest="only", default="", help="run only the tests that match, as pytest's -k does")
    parser.add_argument("--server", help="the command of another server, such as a llama-server to compare with")
    parser.add_argument("--port", type=int, default=8080, help="port of the servers (default 8080)")
    arguments = parser.parse_args()
    ours = [sys.executable, "-m", "ggpipe", "serve"]
    server = ours if arguments.server is None else shlex.split(arguments.server)
    n_passed: collections.Counter[str] = collections.Counter()
    n_explained: collections.Counter[str] = collections.Counter()
    n_all: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory() as folder:
        tests = prepared(Path(folder), server)
        files = sorted(path.stem.removeprefix("test_") for path in tests.glob("unit/test_*.py"))
        names = arguments.names or [name for name in files if name not in LEFT_OUT]
        for test, outcome in outcomes(tests, names, arguments.port, arguments.only):
            if outcome == "skipped":
                continue
            name, _, case = test.partition("::")
            n_all[name] += 1
            n_passed[name] += outcome == "passed"
            if outcome != "passed":
                why = reason(name, case)
                n_explained[name] += why is not None
                print(f"{test}: {why or outcome[:200]}", flush=True)
    print("| file | passed | run | explained |\n|---|---|---|---|")
    for name in names:
        print(f"| {name} | {n_passed[name]} | {n_all[name]} | {n_explained[name]} |")
    print(f"| all | {n_passed.total()} | {n_all.total()} | {n_explained.total()} |")
    return 1 if n_passed.total() + n_explained.total() < n_all.total() else 0


if __name__ == "__main__":
    sys.exit(main())
