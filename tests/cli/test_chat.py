"""`ggpipe chat`, with somebody at a terminal and without."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pexpect
import pytest
from support.commands import ROOT, SPLITS, TARGET, marked, processes_with, ranks_of, wait_for
from support.in_process import output

from ggpipe.launch.environment import mpi_environment

WITHIN_S = 120  # a loaded machine included
SHORT = ("-c", 512, "-t", 1, "-n", 12, "--temp", 0, "--ignore-eos", "--exact")
ENTER, CTRL_C, CTRL_D = "\r", "\x03", "\x04"


class Terminal:
    """A conversation with somebody at a terminal of 100 columns."""

    def __init__(self, folder: Path, *arguments: object) -> None:
        command = ["-P", "-m", "ggpipe", "chat", "-m", str(TARGET), *map(str, arguments)]
        environment = {**os.environ, **mpi_environment(), **marked(str(folder))}
        environment |= {"XDG_CACHE_HOME": str(folder), "TERM": "xterm-256color"}
        self._child: Any = pexpect.spawn(
            sys.executable, command, env={**environment, "PROMPT_TOOLKIT_NO_CPR": "1"}, cwd=ROOT, encoding="utf-8",
            dimensions=(40, 100), timeout=WITHIN_S,
        )  # fmt: skip

    def types(self, keys: str) -> None:
        self._child.send(keys)

    def presses(self, key: str) -> None:
        """When the next line is open: before that the kernel would take a key such as Ctrl-D."""
        self.shows(r"\x1b\[\?2004h")
        self.types(key)

    def shows(self, text: str) -> str:
        """Wait until it does; what it matches."""
        self._child.expect(text)
        return str(self._child.match[0])

    def asks(self, line: str, answer: str) -> str:
        """Send a line, and wait for this."""
        self.types(line + ENTER)
        return self.shows(answer)

    def ends(self) -> int:
        """Its exit code."""
        self._child.expect(pexpect.EOF)
        self._child.close()
        return int(self._child.exitstatus)

    def close(self) -> None:
        self._child.close(force=True)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    own = Terminal(tmp_path, *SHORT, "-sys", "Tell tales.")
    own.shows("/help lists the commands")
    yield own
    own.close()


def saved(terminal: Terminal, path: Path) -> list[dict[str, str]]:
    terminal.asks(f"/save {path}", "saved .* to")
    messages: list[dict[str, str]] = json.loads(path.read_text())["messages"]
    return messages


def test_a_conversation(terminal: Terminal, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    first = terminal.asks("Once", r"12 tokens[^\n]* prompt \d+ · [^\n]*length reached")
    second = terminal.asks("And then?", r"12 tokens[^\n]* prompt \d+, \d+ cached")
    n_first, cached = int(re.findall(r"prompt (\d+)", first)[0]), int(re.findall(r"(\d+) cached", second)[0])
    assert cached >= n_first  # only what is new was computed
    messages = saved(terminal, file)
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user", "assistant"]
    assert messages[1]["content"] == "Once"

    terminal.types("/edit" + ENTER)
    terminal.asks(" More.", "length reached")
    terminal.asks("/regen", "length reached")
    edited = saved(terminal, file)
    assert edited[:3] == messages[:3]
    assert [len(edited), edited[3]["content"]] == [5, "And then? More."]

    terminal.asks("/clear", "new conversation")
    terminal.asks("/system", "instructions: Tell tales.")
    terminal.asks("/system What is `n_ctx`?", r"instructions: What is `n_ctx`\?")  # no flag, as in messages of ours
    terminal.asks("/system -", "the model has no instructions")
    terminal.asks("two\\" + ENTER + "lines", "length reached")
    assert saved(terminal, tmp_path / "other.json")[0] == {"role": "user", "content": "two\nlines"}
    terminal.asks(f"/load {file}", "loaded 5 messages")
    terminal.asks("/stats", r"1 question so far|2 questions so far")
    terminal.presses(CTRL_D)
    assert terminal.ends() == 0
    assert "+And then?" in (tmp_path / "ggpipe" / "chat" / "history").read_text()


def test_mistakes(terminal: Terminal, tmp_path: Path) -> None:
    terminal.asks("/nonsense", "no such command: /nonsense")
    terminal.asks("/regen", "there is no question to answer again")
    terminal.asks("/load /none", r"(?<!: )cannot read /none: No such file")
    terminal.asks("/save", "/save needs a file")
    long = tmp_path / "long.txt"
    long.write_text("word " * 1000)
    terminal.asks(f"/read {long}", "added 5000 characters to the next question")
    terminal.asks("What?", r"the conversation has \d+ tokens, but the context only 512: start a new")
    terminal.presses(CTRL_C)  # the question is in the line again
    terminal.asks("Once", "length reached")
    assert [message["role"] for message in saved(terminal, tmp_path / "a")] == ["system", "user", "assistant"]
    terminal.types(CTRL_C)
    terminal.shows("press Ctrl-C again, or Ctrl-D, to quit")
    terminal.types(CTRL_C)
    assert terminal.ends() == 0


def test_a_rank_is_killed_and_an_answer_is_stopped(tmp_path: Path) -> None:
    """While the model writes, and again while nobody asks it anything."""
    settings = ("-c", 200000, "-t", 1, "--ignore-eos", "-sys", "Tell tales.", "-p", "Once", *SPLITS[2])
    terminal = Terminal(tmp_path, *settings)
    try:
        terminal.shows("generating")
        os.kill(ranks_of(str(tmp_path))[1], signal.SIGKILL)
        terminal.shows(r"starting the ranks again \(1 of 3\)")
        terminal.shows("loading")
        terminal.shows("generating")
        terminal.types(CTRL_C)
        terminal.shows("stopped")
        answer = saved(terminal, tmp_path / "a")[2]["content"]
        os.kill(ranks_of(str(tmp_path))[0], signal.SIGKILL)
        terminal.shows(r"starting the ranks again \(2 of 3\)")
        terminal.asks("And then?", "generating")
        terminal.types(CTRL_C)
        terminal.shows("stopped")
        messages = saved(terminal, tmp_path / "b")
        assert [len(messages), messages[2]["content"]] == [5, answer]
        terminal.types("/quit" + ENTER)
        assert terminal.ends() == 0
    finally:
        terminal.close()
    wait_for(lambda: not processes_with(str(tmp_path)))


# Without a terminal


def piped(said: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "ggpipe", "chat", "-m", str(TARGET), *map(str, arguments)]
    environment = {**os.environ, **mpi_environment()}
    return subprocess.run(
        command, input=said, capture_output=True, text=True, timeout=WITHIN_S, cwd=ROOT, env=environment
    )


def test_a_question_from_a_pipe() -> None:
    result = piped("the king?\n", *SHORT, "-sys", "Tell tales.", "-p", "Who was", *SPLITS[2])
    expected = output("generate", "-m", TARGET, *SHORT, "-sys", "Tell tales.", "-st", "-p", "Who was\\n\\nthe king?")
    assert (result.returncode, result.stdout.rstrip("\n")) == (0, expected.rstrip("\n"))
    assert len(expected) > 20


def test_nothing_is_asked() -> None:
    result = piped("", *SHORT)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("ggpipe: error: stdin is neither a terminal nor")


def test_stdin_is_closed() -> None:
    command = ["sh", "-c", 'exec "$@" <&-', "sh", sys.executable, "-P", "-m", "ggpipe", "chat", "-m", str(TARGET)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=WITHIN_S, cwd=ROOT)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("ggpipe: error: stdin is neither a terminal nor")
    assert len(result.stderr.splitlines()) == 1
