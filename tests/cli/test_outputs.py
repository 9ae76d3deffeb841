"""Output files that are inputs of the same command are refused before anything is read or written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.in_process import ggpipe

DRAFT = ("-md", "ggpipe/models/tales-draft.gguf")


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (("generate", "-p", "x", "--json"), "--json"),
        (("generate", "-p", "x", "--csv"), "--csv"),
        (("generate", "-p", "x", "--prompt-cache"), "--prompt-cache"),
        (("record", *DRAFT, "-p", "x", "-o"), "-o/--output"),
        (("batch", "in.jsonl", "-o"), "-o/--output"),
        (("bench", "--receipt"), "--receipt"),
        (("serve", "--log-file"), "--log-file"),
    ],
)
@pytest.mark.parametrize("link", [None, os.symlink, os.link])
def test_the_model_is_not_overwritten(words: tuple[str, ...], flag: str, link: object, tmp_path: Path) -> None:
    model = output = tmp_path / "model.gguf"
    model.write_bytes(b"GGUF and weights")
    if callable(link):
        output = tmp_path / "other"
        link(model, output)
    command, *rest = words
    result = ggpipe(command, "-m", model, *rest, output)
    assert result.returncode == 2
    problem = f"{flag} {output} is the file of -m/--model, which would be overwritten: name another file"
    assert result.stderr == f"ggpipe: error: {problem}\n"
    assert model.read_bytes() == b"GGUF and weights"


def test_other_inputs_are_not_overwritten(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("{}")
    for words, flag in (
        (("generate", "-m", "m.gguf", "-f", file, "--json", file), "-f/--file"),
        (("generate", "-m", "m.gguf", "-p", "x", "--lora-scaled", f"{file}:1", "--trace", file), "--lora-scaled"),
        (("batch", "-m", "m.gguf", file, "-o", file), "IN"),
        (("simulate", "--against", file, "--json", file), "--against"),
    ):
        result = ggpipe(*words)
        assert (result.returncode, result.stderr.count("\n")) == (2, 1)
        assert f"{file} is the file of {flag}, which would be overwritten: " in result.stderr
