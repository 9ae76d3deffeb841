"""`ggpipe batch`: all prompts are answered once, however often the job is interrupted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.commands import HANG_S, ROOT, SPLITS, TARGET, marked, processes_with, ranks_of, wait_for
from support.in_process import ggpipe

N_PROMPTS = 24
OPTIONS = ("-m", TARGET, "-t", 1, "-c", 4096, "-n", 300, "--temp", 0, "--ignore-eos", *SPLITS[2])


def answers(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


class Job:
    """A batch that something happens to when some more answers are written."""

    def __init__(self, folder: Path, *arguments: object) -> None:
        self.out = folder / f"out-{os.getpid()}-{folder.name}.jsonl"
        command = [sys.executable, "-P", "-m", "ggpipe", "batch", folder / "in.txt", "-o", self.out, *OPTIONS]
        n_before = self.n_lines()
        self.process = subprocess.Popen(
            [*map(str, command), *map(str, arguments)],
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **marked(self.out.name)},
        )
        wait_for(lambda: self.n_lines() >= n_before + 2, 120)

    def n_lines(self) -> int:
        return self.out.read_bytes().count(b"\n") if self.out.exists() else 0

    def ends(self) -> tuple[int, str]:
        _, error = self.process.communicate(timeout=HANG_S)
        wait_for(lambda: not processes_with(self.out.name))
        assert "Traceback" not in error
        return self.process.returncode, error


def test_each_prompt_is_answered_once(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("".join(f"Tale number {i} begins:\n" for i in range(N_PROMPTS)))
    job = Job(tmp_path)
    job.process.send_signal(signal.SIGINT)
    code, error = job.ends()
    assert (code, "Run the same command again to continue" in error) == (130, True), error
    first = answers(job.out)
    assert 2 <= len(first) < N_PROMPTS

    job = Job(tmp_path)
    job.process.kill()
    job.ends()
    with job.out.open("ab") as file:
        file.write(b'{"id": "batch_req_')

    job = Job(tmp_path, "--restart", 2)
    os.kill(ranks_of(job.out.name)[1], signal.SIGKILL)
    code, error = job.ends()
    assert (code, "starting the ranks again (1 of 2)" in error) == (0, True), error
    whole = answers(job.out)
    assert whole[: len(first)] == first
    assert sorted(int(str(entry["custom_id"])) for entry in whole) == list(range(1, N_PROMPTS + 1))
    assert all(entry["error"] is None for entry in whole)


def test_what_it_says(tmp_path: Path) -> None:
    """At the end, and where nothing is left to do."""
    (tmp_path / "in").write_text("The king\n")
    again = ("batch", tmp_path / "in", "-o", tmp_path / "out", "-m", TARGET, "-t", 1, "-n", 2)
    assert ggpipe(*again).stderr.startswith("ggpipe: 1 prompt answered, 2 tokens in ")
    assert ggpipe(*again).stderr == "ggpipe: 1 of 1 prompts are already answered\n"


def test_a_bad_line_does_not_stop_the_others(tmp_path: Path) -> None:
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}
    good = {"custom_id": "good", "method": "POST", "url": "/v1/chat/completions", "body": body}
    long = {"custom_id": "long", "method": "POST", "url": "/v1/completions", "body": {"prompt": "word " * 3000}}
    several = {**long, "custom_id": "several", "body": {"prompt": ["Once", "The king"], "n": 2, "max_tokens": 3}}
    response = {**good, "custom_id": "response", "url": "/v1/responses"}
    response["body"] = {"input": "Hello", "max_output_tokens": 3}
    vectors = {**good, "custom_id": "vectors", "url": "/v1/embeddings", "body": {"input": ["Once"] * 9}}
    narrow = {**vectors, "custom_id": "narrow", "body": {"input": "Once", "dimensions": 3}}
    lines = ["{bad", *(json.dumps(one) for one in (long, good, several, response, vectors, narrow))]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    done = ggpipe(
        "batch", tmp_path / "in.jsonl", "-o", tmp_path / "out", "-m", TARGET, "-t", 1, "-c", 512, "--pooling", "last"
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, "")
    assert "3 of 7 prompts got an error instead of an answer" in done.stderr
    found = {entry["custom_id"]: entry for entry in answers(tmp_path / "out")}
    assert found["good"]["response"]["body"]["usage"]["completion_tokens"] == 3  # type: ignore[index]
    choices = found["several"]["response"]["body"]["choices"]  # type: ignore[index]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert all(choice["text"] for choice in choices)
    assert "raise -c/--ctx-size" in found["long"]["error"]["message"]  # type: ignore[index]
    assert found["response"]["response"]["body"]["usage"]["output_tokens"] == 3  # type: ignore[index]
    data = found["vectors"]["response"]["body"]["data"]  # type: ignore[index]
    assert [one["index"] for one in data] == list(range(9))
    assert sum(number**2 for number in data[8]["embedding"]) == pytest.approx(1, abs=1e-3)
    assert "`dimensions` must be 256" in found["narrow"]["error"]["message"]  # type: ignore[index]
    assert found[None]["error"]["message"].startswith("line 1: ")  # type: ignore[index]
