"""Who may import whom, what a mere --help may load, and that libllama is in a process only once.

cli > server > api > display > planning > measure | sim > runtime > batch | llama | options | transport
    > openai > cache | chat | cluster | launch | metrics > grammar > core | embeddings > prefixes | request
    > config | prompt > sampling > checks > errors
"""

from __future__ import annotations

import ast
import collections
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "ggpipe"
FILES = sorted(PACKAGE.rglob("*.py"))

LAYERS = (  # the lowest first
    {"errors"},
    {"checks"},
    {"sampling"},
    {"config", "prompt"},
    {"prefixes", "request"},
    {"core", "embeddings"},
    {"grammar"},
    {"cache", "chat", "cluster", "launch", "metrics"},
    {"openai"},
    {"batch", "llama", "options", "transport"},
    {"runtime"},
    {"measure", "sim"},
    {"planning"},
    {"display"},
    {"api"},
    {"server"},
    {"cli"},
    {"__main__"},
)
MOST_MODULES = 14
"""In a package, beside its `__init__`."""

PURE = ("core", "prefixes", "request", "config", "prompt", "sampling", "checks", "errors")
IMPURE = {
    "asyncio", "concurrent", "ctypes", "datetime", "multiprocessing", "os", "pathlib", "queue", "random", "sched",
    "secrets", "select", "selectors", "signal", "socket", "subprocess", "sys", "tempfile", "threading", "time", "uuid",
}  # fmt: skip


def modules_imported(source: str) -> Iterator[str]:
    """All modules that a file imports, wherever in it; `ggpipe.a.b` for `from ggpipe.a import b` of a module b."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports are not our style"
            assert node.module is not None
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if is_our_module(inner) else node.module


def is_our_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return name == "ggpipe._native" or path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def part_of(path: Path) -> str:
    """The part that a file belongs to: `core`, `cli`, `errors`, ..."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def level(part: str) -> int:
    (found,) = (i for i, parts in enumerate(LAYERS) if part in parts)
    return found


@functools.cache
def imports(path: Path) -> list[str]:
    return sorted(set(modules_imported(path.read_text())))


def name(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def test_every_part_has_a_layer() -> None:
    parts = {part_of(path) for path in FILES} - {"__init__"}
    assert {"errors", "config", "core", "transport", "llama", "runtime", "cli"} <= parts
    assert parts <= set().union(*LAYERS)


def upward(path: Path) -> Iterator[str]:
    """What a file may not import of ours. The public API may import anything: it loads a name's module on first use."""
    part = part_of(path)
    for module in imports(path):
        package, _, inner = module.partition(".")
        if package != "ggpipe" or part == "__init__":
            continue
        other = inner.split(".")[0]
        if other == "":  # the package itself: its version
            is_allowed = level(part) >= level("llama")
        elif other == "_native":
            is_allowed = part == "llama"
        else:
            is_allowed = other == part or level(other) < level(part)
        if not is_allowed:
            yield f"{name(path)} imports {module}"


def test_imports_go_down() -> None:
    assert [found for path in FILES for found in upward(path)] == []


def test_packages_stay_small() -> None:
    sizes = collections.Counter(path.parent for path in FILES if path.stem != "__init__")
    assert {name(folder): size for folder, size in sizes.items() if size > MOST_MODULES} == {}


def impure(path: Path) -> Iterator[str]:
    """What a file of a pure part may not import."""
    further = {"config": {"pathlib"}} | {part: {"msgspec"} for part in ("core", "prefixes", "request")}  # records alone
    allowed = sys.stdlib_module_names - IMPURE | {"ggpipe"} | further.get(part_of(path), set())
    return (f"{name(path)} imports {module}" for module in imports(path) if module.split(".")[0] not in allowed)


def test_core_is_pure() -> None:
    pure = [path for path in FILES if part_of(path) in PURE]
    assert {part_of(path) for path in pure} == set(PURE)
    assert [found for path in pure for found in impure(path)] == []


def files_that_import(*modules: str) -> set[str]:
    return {name(path) for path in FILES for module in imports(path) if f"{module}.".startswith(modules)}


def test_only_the_package_llama_knows_libllama() -> None:
    found = files_that_import("llama_cpp.", "ggpipe._native.")
    assert found
    assert {path for path in found if not path.startswith("llama/")} == set()


def test_only_its_transport_knows_mpi() -> None:
    assert files_that_import("mpi4py.") == {"transport/mpi.py"}


def test_imports_are_found_where_they_hide() -> None:
    source = "def f():\n    if True:\n        from ggpipe.transport import mpi, nothing\n    import mpi4py.MPI as m"
    assert set(modules_imported(source)) == {"ggpipe.transport.mpi", "ggpipe.transport", "mpi4py.MPI"}
    assert list(modules_imported("from ggpipe import _native as native")) == ["ggpipe._native"]


# What is loaded

HEAVY = ("mpi4py.MPI", "llama_cpp.llama_cpp", "ggpipe._native")


def loaded_by(*arguments: str) -> tuple[set[str], str]:
    """Modules that a Python process imports, and its stdout."""
    command = [sys.executable, "-X", "importtime", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT, check=True)
    return set(re.findall(r"^import time: .*\| *(\S+)$", done.stderr, re.MULTILINE)), done.stdout


def test_importing_the_package_loads_nothing() -> None:
    modules, _ = loaded_by("-c", "import ggpipe")
    assert "ggpipe" in modules
    assert not [module for module in modules if module.startswith((*HEAVY, "mpi4py", "llama_cpp", "numpy", "typer"))]


def test_help_starts_no_mpi_and_loads_no_libllama() -> None:
    lines = [["--version"], ["generate", "--help"], ["demo", "--help"]]
    for arguments in (
        ["-m", "ggpipe", "--help"],
        ["-c", f"from ggpipe.cli import run\nfor line in {lines}: run(line)"],
    ):
        modules, out = loaded_by(*arguments)
        assert "ggpipe.cli.parsing" in modules
        assert "ggpipe" in out.lower()
        assert not modules.intersection(HEAVY)


def test_the_list_of_loaded_modules_would_show_them() -> None:
    modules, _ = loaded_by("-c", "import ggpipe.llama.libllama, ggpipe.transport.mpi")
    assert set(HEAVY) <= modules


def test_one_libllama_and_one_ggml_in_a_process() -> None:
    """The wheel holds its libraries under several names, as different files: two would mean two of all state."""
    script = (
        "import ggpipe.llama.stage, ggpipe.llama.vocab, ggpipe.llama.sampler, ggpipe.runtime.handshake\n"
        "from ggpipe.llama.libllama import native\n"
        "native.ggml_version()\n"
        "print(open('/proc/self/maps').read())"
    )
    command = [sys.executable, "-c", script]
    maps = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT, check=True).stdout
    found: dict[str, set[tuple[str, str]]] = {}
    for line in maps.splitlines():
        if match := re.search(r"/(libllama|libggml[a-z-]*)\.so[^/]*$", line):
            _, _, _, device, inode, _ = line.split(maxsplit=5)
            found.setdefault(match[1], set()).add((device, inode))
    assert {"libllama", "libggml", "libggml-base"} <= set(found)
    assert {library: len(files) for library, files in found.items()} == dict.fromkeys(found, 1)
