"""llama.cpp's source, from the source distribution of the llama-cpp-python that is installed."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

VERSION = importlib.metadata.version("llama-cpp-python")
_KEPT = Path(__file__).parents[2] / "build" / f"llama.cpp-{VERSION}"


def source() -> Path:
    """The folder of the source. Downloaded with pip at first, then kept in `build`. Raises OSError if it cannot be."""
    if not _KEPT.exists():
        _KEPT.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=_KEPT.parent) as folder:
            _extracted(Path(folder)).rename(Path(folder) / "whole")
            try:
                (Path(folder) / "whole").rename(_KEPT)
            except OSError:  # another process was faster
                if not _KEPT.exists():
                    raise
    return _KEPT


def _extracted(folder: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-build-isolation"]
    command = [*pip, "--no-binary", "llama-cpp-python", "-d", str(folder), f"llama-cpp-python=={VERSION}"]
    environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    except subprocess.CalledProcessError as e:
        raise OSError(f"pip cannot download llama-cpp-python {VERSION}: {e.stderr.strip()[-300:]}") from e
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        inside = [file for file in files if "/vendor/llama.cpp/" in file.name]
        files.extractall(folder, inside, filter="data")
    (found,) = folder.glob("*/vendor/llama.cpp")
    return found
