"""`ggpipe demo`: the main job on the bundled models."""

from __future__ import annotations

from pathlib import Path

import typer

import ggpipe
from ggpipe.cli.arguments import normalise

_MODELS = Path(ggpipe.__file__).parent / "models"
_OPENING = "Once upon a time there was a king who had three sons."


def demo(context: typer.Context) -> int:
    """Watch the bundled model write a tale: two ranks hold its layers, a third guesses ahead with the draft model.

    Takes the flags of `generate`; `ggpipe demo -n 400 -s 7` writes a longer, other one.
    """
    from ggpipe.cli import app

    given = normalise(context.args)
    defaults = {
        "-m": str(_MODELS / "tales-target.gguf"),
        "-md": str(_MODELS / "tales-draft.gguf"),
        "--mpi-layer-split": "0.5,0.5/1.0",
        "-p": _OPENING,
        "-n": "200",
        "-c": "1024",
        "-t": "1",
        "-s": "1",
    }
    if any(word == "-f" or word.startswith(("--file", "-f=")) for word in given):
        del defaults["-p"]
    arguments = [word for pair in defaults.items() for word in pair]
    code = app.app(["generate", *arguments, *given], standalone_mode=False, prog_name="ggpipe")
    return int(code or 0)
