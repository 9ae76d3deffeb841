"""Command lines that cannot be read: one line says what to write instead."""

import pytest

from ggpipe.cli.app import run


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["genrate", "-m", "x.gguf"], "no such command: genrate; did you mean generate?"),
        (["halp"], "no such command: halp; the commands are generate, chat, batch, record, "
         "simulate, pairs, plan, profile, bench, demo, serve, doctor"),
        (["-v"], "no such command: -v; write `ggpipe --version` for the version"),
        (["--verison"], "no such option: --verison; did you mean --version?"),
        (["-m", "x.gguf", "generate"], "-m is before the command: write `ggpipe generate -m ...`"),
        (["-m", "x.gguf"], "the first word must be a command, as in `ggpipe generate -m ...`; the commands are"),
        (["generate", "x.gguf", "-p", "a"], "unexpected argument x.gguf: name the model with -m/--model, as in -m"),
        (["generate", "-m", "x.gguf", "-p", "a", "b"], "b is not part of -p/--prompt: put several words in quotes"),
        (["generate", "-m", "x.gguf", "a b"], "unexpected argument a b: give the prompt with -p/--prompt, in quotes"),
        (["generate", "-m", "x.gguf", "-f", "a", "b"], "unexpected argument b: if it is part of a value, "),
        (["plan", "two-cores", "office"], "unexpected argument office: if it is part of a value, "),
        (["generate", "-p", "a"], "-m/--model is missing: GGUF file of the target model"),
        (["batch", "-m", "x.gguf", "-o", "y"], "IN is missing: File of prompts"),
        (["batch", "-m", "x.gguf", "z"], "-o/--output is missing: "),
        (["generate", "-m", "x.gguf", "-n", "many"], "-n/--predict must be a whole number, got many"),
        (["generate", "-m", "x.gguf", "--temp=hot"], "--temp must be a number, got hot"),
        (["generate", "-m"], "-m needs a value: GGUF file of the target model"),
        (["generate", "-m", "x.gguf", "--prompd", "a"], "no such option: --prompd; did you mean --prompt"),
    ],
)  # fmt: skip
def test_what_to_write(arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"ggpipe: error: {why}")
