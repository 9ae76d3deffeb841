"""`ggpipe plan` for a target with MTP layers."""

from __future__ import annotations

from pathlib import Path

from support.architectures import write
from support.in_process import ggpipe

CLUSTER = """
[[node]]
name = "here"
cores = 2
memory_gb = 8
memory_gb_per_s = 20
core_gb_per_s = 11
core_gflops = 20
"""


def test_they_draft_without_a_draft_model(tmp_path: Path) -> None:
    """The command names them, and a model without any has none to name."""
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    for n_mtp in (1, 0):
        model = write("glm4moe", tmp_path / f"{n_mtp}.gguf", n_mtp=n_mtp)
        result = ggpipe("plan", tmp_path / "cluster.toml", "-m", model, "--mode", "speculative", "-c", "256")
        if n_mtp:
            assert result.returncode == 0, result.stderr
            assert "--spec-type mtp,ngram" in result.stdout
        else:
            assert result.returncode == 2
            assert "needs a draft model" in result.stderr
