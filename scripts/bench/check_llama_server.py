"""llama.cpp's own server tests, with the bundled model; run it as `scripts/bench/check_llama_server`.

The tests are those of `tools/server/tests` in llama.cpp's source. They start `ggpipe serve` where they would start
llama-server; `--server` names a llama-server to compare with. Tests of models or features that ggpipe does not have are
left out (`LEFT_OUT`). Where the bundled model writes something else than the model that a test was written for, the
test fails with llama-server as well.

A line per test that fails, and counts per file. Exit code 1 if a test fails.
"""

from __future__ import annotations

import argparse
import collections
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
    program = tests / "server"
    program.write_text(SERVER.format(python=sys.executable, dropped=DROPPED, server=server, model=str(TARGET)))
    program.chmod(0o755)
    return tests


def outcomes(tests: Path, names: Iterable[str], port: int) -> Iterator[tuple[str, str]]:
    """Each test, with `passed`, `skipped`, or the line that says why it failed."""
    environment = {**os.environ, "LLAMA_SERVER_BIN_PATH": str(tests / "server"), "PORT": str(port)}
    for name in names:
        report = tests / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout", "120"]
        command += ["-c", "pytest.ini", f"--junitxml={report}", f"unit/test_{name}.py"]
        subprocess.run(command, cwd=tests, env=environment, stdout=subprocess.DEVNULL, check=False)
        for case in ElementTree.parse(report).iter("testcase"):
            worst = next((part for part in case if part.tag in ("failure", "error", "skipped")), None)
            outcome = "passed" if worst is None else "skipped" if worst.tag == "skipped" else worst.get("message", "")
            yield f"{name}::{case.get('name')}", re.sub(r"\s+", " ", outcome)


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="names of test files, such as completion (default: all that apply)")
    parser.add_argument("--server", help="the command of another server, such as a llama-server to compare with")
    parser.add_argument("--port", type=int, default=8080, help="port of the servers (default 8080)")
    arguments = parser.parse_args()
    ours = [sys.executable, "-m", "ggpipe", "serve"]
    server = ours if arguments.server is None else shlex.split(arguments.server)
    n_passed: collections.Counter[str] = collections.Counter()
    n_all: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory() as folder:
        tests = prepared(Path(folder), server)
        files = sorted(path.stem.removeprefix("test_") for path in tests.glob("unit/test_*.py"))
        names = arguments.names or [name for name in files if name not in LEFT_OUT]
        for test, outcome in outcomes(tests, names, arguments.port):
            if outcome == "skipped":
                continue
            name = test.partition("::")[0]
            n_all[name] += 1
            n_passed[name] += outcome == "passed"
            if outcome != "passed":
                print(f"{test}: {outcome[:200]}", flush=True)
    print("| file | passed | of |\n|---|---|---|")
    for name in names:
        print(f"| {name} | {n_passed[name]} | {n_all[name]} |")
    print(f"| all | {n_passed.total()} | {n_all.total()} |")
    return 1 if n_passed != n_all else 0


if __name__ == "__main__":
    sys.exit(main())
