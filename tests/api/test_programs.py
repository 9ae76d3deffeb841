"""Programs that use `ggpipe.Engine`: no rank outlives them, and ranks that die are restarted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from support.commands import HANG_S, TARGET, marked, processes_with, wait_for

HEAD = """
import os, signal, sys, time
import ggpipe
engine = ggpipe.Engine(sys.argv[1], n_ctx=512, threads=1, temp=0, n_predict=8, restart=int(sys.argv[2]), **{options})
"""
ON_TWO = {"layer_split": "0.5,0.5", "n_requests": 2}


class Program:
    """A program with its own copy of the model, whose file name identifies its ranks."""

    def __init__(self, folder: Path, script: str, options: object, n_restarts: int = 0) -> None:
        self.model = folder / f"model-{os.getpid()}-{folder.name}.gguf"
        self.model.symlink_to(TARGET)
        path = folder / "program.py"
        path.write_text(HEAD.format(options=options) + textwrap.dedent(script))
        self.process = subprocess.Popen(
            [sys.executable, path, self.model, str(n_restarts)], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, cwd=folder, env={**os.environ, **marked(self.model.name)},
        )  # fmt: skip

    def ends(self) -> tuple[int, str, str]:
        """Exit code, stdout and stderr. Checks that no process is left."""
        out, err = self.process.communicate(timeout=HANG_S)
        wait_for(lambda: not processes_with(self.model.name))
        return self.process.returncode, out, err


def test_ten_lines_on_two_ranks(tmp_path: Path) -> None:
    script = """
    with engine:
        print([rank.layers for rank in engine.ranks])
        for token in engine.generate("Once upon a time"):
            print(token.text, end="", flush=True)
        for token in engine.generate("Once upon a time", n_predict=-1, ignore_eos=True):
            break
    """
    code, out, err = Program(tmp_path, script, ON_TWO).ends()
    assert (code, err) == (0, "")
    layers, _, text = out.partition("\n")
    assert layers == "[(0, 4), (4, 8)]"
    assert len(text) > 8


@pytest.mark.parametrize(
    ("last_line", "code"),
    [("sys.exit(3)", 3), ("raise ValueError('mine')", 1), ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL)],
)
def test_however_it_ends(tmp_path: Path, last_line: str, code: int) -> None:
    """Without `with`, in the middle of an answer."""
    script = f"""
    answer = iter(engine.generate("Once upon a time", n_predict=-1, ignore_eos=True))
    print(next(answer).text)
    {last_line}
    """
    found, out, err = Program(tmp_path, script, ON_TWO).ends()
    assert found == code, err
    assert out
    assert "ggpipe" not in err.replace(str(tmp_path), "")


def test_ranks_that_die(tmp_path: Path) -> None:
    script = """
    import contextlib, logging
    logging.basicConfig(stream=sys.stdout)
    from pathlib import Path

    def children():
        found = []
        for folder in Path("/proc").iterdir():
            if folder.name.isdecimal():
                with contextlib.suppress(FileNotFoundError):
                    if f"PPid:\\t{os.getpid()}\\n" in (folder / "status").read_text():
                        found.append(int(folder.name))
        return found

    def kill(processes):
        for process in processes:
            os.kill(process, signal.SIGKILL)

    with engine:
        ranks = children()  # before the first token: they have the others soon
        for number, token in enumerate(engine.generate("Once upon a time", n_predict=400, ignore_eos=True)):
            if number == 3:
                kill(ranks)
        print("TOKENS", number + 1)
        kill(children())
        try:
            engine.generate("Once upon a time").wait()
            print("ANSWERED")
        except ggpipe.RankError as error:
            print("ERROR", error)
    """
    code, out, err = Program(tmp_path, script, {}, n_restarts=1).ends()
    assert (code, err) == (0, ""), err
    assert "TOKENS 400" in out
    assert "starting the ranks again (1 of 1)" in out
    assert "ERROR the rank ended: signal 9" in out or "is gone" in out
