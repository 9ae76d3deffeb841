"""The public API: what `ggpipe` names, and where it comes from."""

from __future__ import annotations

import ast
import importlib.metadata
import inspect
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from support.commands import HANG_S, TARGET

import ggpipe

CONFIGS = {
    "ContextConfig", "DraftConfig", "EngineConfig", "LayerSplit", "ModelConfig", "PipelineConfig", "PromptCacheConfig",
    "SamplingConfig", "SpeculationConfig",
}  # fmt: skip
ERRORS = {
    "GgpipeError",
    "LaunchError",
    "ModelError",
    "QueueFull",
    "RankError",
    "RunError",
    "SettingError",
    "UsageError",
}
ENGINE = {
    "Answer",
    "Batch",
    "Engine",
    "EngineOptions",
    "Finish",
    "RequestOptions",
    "RequestStats",
    "Token",
    "TokenProb",
    "download",
}
RANKS = {"Head", "RequestSpec", "Session", "run_rank"}


def test_the_names() -> None:
    assert set(ggpipe.__all__) == CONFIGS | ERRORS | ENGINE | RANKS | {"__version__"}
    assert set(ggpipe.__all__) <= set(dir(ggpipe))


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse(inspect.getsource(ggpipe))
    imported = {
        (node.module, alias.name, alias.asname)
        for block in tree.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert imported == {(home, name, name) for home, names in ggpipe._HOMES.items() for name in names}


def test_each_name_has_a_docstring() -> None:
    names = CONFIGS | ERRORS | ENGINE | RANKS
    assert {name for name in names if not inspect.getdoc(getattr(ggpipe, name))} == set()


def test_other_names_are_refused() -> None:
    with pytest.raises(AttributeError, match="module 'ggpipe' has no attribute 'Stage'"):
        ggpipe.Stage  # noqa: B018


def test_settings_and_errors_load_nothing_heavy() -> None:
    script = "import sys, ggpipe; ggpipe.EngineConfig; ggpipe.RunError; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=HANG_S, check=True)
    assert not {"numpy", "mpi4py", "llama_cpp", "typer", "rich", "msgspec"} & set(done.stdout.split())


def test_the_version_is_the_packages() -> None:
    assert ggpipe.__version__ == importlib.metadata.version("ggpipe")


def test_types_are_marked_as_such() -> None:
    """The wheel ships the package's whole folder, see `wheel.packages` in pyproject.toml."""
    assert Path(ggpipe.__file__).with_name("py.typed").exists()


def test_a_program_writes_a_text(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent("""
        import sys
        from pathlib import Path

        import ggpipe

        def write(head: ggpipe.Head) -> int:
            session = ggpipe.Session.load(head)
            prompt = session.vocab.tokenize("Once upon a time")
            for token in session.generate(prompt, ggpipe.SamplingConfig(temp=0), 8):
                print(token.text, end="")
            return 0

        model = ggpipe.ModelConfig(path=Path(sys.argv[1]))
        context = ggpipe.ContextConfig(n_ctx=128)
        sys.exit(ggpipe.run_rank(ggpipe.EngineConfig(model, context), write))
    """)
    )
    command = [sys.executable, str(program), str(TARGET)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S)
    assert (done.returncode, done.stderr.count("Traceback")) == (0, 0), done.stderr
    assert len(done.stdout) > 8
