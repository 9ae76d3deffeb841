"""Command lines that cannot be read: one line says what to write instead."""

import pytest

from ggpipe.cli.app import run


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["genrate", "-m", "x.gguf"], "there is no command genrate: did you mean generate?"),
        (["help"], "there is no command help: commands are generate, chat, batch, record, "
         "simulate, plan, profile, bench, demo, serve"),
        (["-m", "x.gguf", "generate"], "-m comes before the command: write `ggpipe generate -m ...`"),
        (["-m", "x.gguf"], "-m comes before a command, such as `ggpipe generate -m ...`; commands are generate, chat"),
        (["generate", "x.gguf", "-p", "a"], "x.gguf stands alone: name the model with -m/--model, as in -m x.gguf"),
        (["generate", "-m", "x.gguf", "-p", "a", "b"], "b follows the text of -p/--prompt: put a text of several "
         "words into quotes"),
        (["generate", "-m", "x.gguf", "a b"], "a b stands alone: give a prompt with -p/--prompt, in quotes"),
        (["generate", "-m", "x.gguf", "-f", "a", "b"], "b stands alone: no option takes it"),
        (["plan", "two-cores", "office"], "office stands alone: no option takes it"),
        (["generate", "-p", "a"], "-m/--model is missing: GGUF file of the target model"),
        (["batch", "-m", "x.gguf", "-o", "y"], "IN is missing: File of prompts"),
        (["batch", "-m", "x.gguf", "z"], "-o/--output is missing: "),
        (["generate", "-m", "x.gguf", "-n", "many"], "-n/--predict must be a whole number, got many"),
        (["generate", "-m", "x.gguf", "--temp=hot"], "--temp must be a number, got hot"),
        (["generate", "-m"], "-m needs a value: GGUF file of the target model"),
        (["generate", "-m", "x.gguf", "--prompd", "a"], "no such option: --prompd: did you mean --prompt"),
    ],
)  # fmt: skip
def test_what_to_write(arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"ggpipe: error: {why}")
