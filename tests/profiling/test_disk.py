"""How fast a model's file is read."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.commands import TARGET

from ggpipe.profiling.disk import disk_speed


@pytest.mark.parametrize("n_bytes", [1, 4096, (9 << 20) + 17])
def test_files_of_any_size(n_bytes: int, tmp_path: Path) -> None:
    (path := tmp_path / "model.gguf").write_bytes(bytes(n_bytes))
    assert disk_speed([path], 0.01) > 0


def test_files_on_a_filesystem_without_direct_access() -> None:
    """/proc has none, and says that its files are empty."""
    assert disk_speed([Path("/proc/self/maps")], 0.01) > 0


def test_the_largest_file_counts(tmp_path: Path) -> None:
    (tmp_path / "gone.gguf").symlink_to(TARGET)
    (small := tmp_path / "small.gguf").write_bytes(b"GGUF")
    assert disk_speed([small, tmp_path / "gone.gguf"], 0.01) > 1e6
