"""scripts/install, where all is installed already, and where something is missing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.commands import HANG_S, ROOT

SUM = "{ cat pyproject.toml CMakeLists.txt native/*; find ggpipe -name '*.py' | sort; } | sha256sum | cut -d' ' -f1"


def test_modules_are_compiled_where_processes_may_not(tmp_path: Path) -> None:
    for folder in ("scripts", "native", "ggpipe", ".venv/bin"):
        (tmp_path / folder).mkdir(parents=True)
    for file in ("pyproject.toml", "CMakeLists.txt", "native/x.cpp"):
        (tmp_path / file).write_text(file)
    shutil.copy(ROOT / "scripts" / "install", tmp_path / "scripts")
    (tmp_path / ".venv" / "bin" / "python").symlink_to(sys.executable)
    module, compiled = tmp_path / "ggpipe" / "a.py", tmp_path / "ggpipe" / "__pycache__"
    module.write_text("A = 1\n")
    sources = subprocess.run(["sh", "-c", SUM], cwd=tmp_path, capture_output=True, text=True, check=True).stdout.strip()
    (tmp_path / ".venv" / "installed").write_text(f"{sources} plots server hub openmpi\n")
    environment = {**os.environ, "GGPIPE_MPI": "openmpi", "PYTHONDONTWRITEBYTECODE": "1"}

    def install() -> None:
        subprocess.run([tmp_path / "scripts" / "install"], check=True, timeout=HANG_S, env=environment)

    install()
    (first,) = compiled.iterdir()
    text = first.read_bytes()
    module.write_text("A = 12\n")
    later = (tmp_path / ".venv" / "compiled").stat().st_mtime + 1
    os.utime(module, (later, later))
    install()
    assert first.read_bytes() != text


@pytest.mark.parametrize(
    ("module", "content", "package"),
    [
        ("sitecustomize", "import sysconfig\nsysconfig.get_path = lambda *_, **__: '/nowhere'", "python3-dev"),
        ("ensurepip", "raise ImportError('as on Debian')", "python3-venv"),
    ],
)
def test_what_is_missing_is_named_before_anything_is_compiled(
    module: str, content: str, package: str, tmp_path: Path
) -> None:
    for folder in ("scripts", "native", "ggpipe", "modules", ".venv"):  # a .venv that an earlier try has left
        (tmp_path / folder).mkdir()
    for file in ("pyproject.toml", "CMakeLists.txt", "native/x.cpp"):
        (tmp_path / file).write_text(file)
    (tmp_path / "modules" / f"{module}.py").write_text(content)
    shutil.copy(ROOT / "scripts" / "install", tmp_path / "scripts")
    environment = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(tmp_path / "modules")}
    done = subprocess.run(
        [tmp_path / "scripts" / "install"], capture_output=True, text=True, timeout=HANG_S, env=environment, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("ggpipe needs Python's ")
    assert line.endswith(f"(Debian: apt-get install {package})")
