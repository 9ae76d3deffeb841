"""Who may import whom, what a mere --help may load, and that libllama is in a process only once.

The code has four floors, which ARCHITECTURE.md draws, and a floor imports from those below it. Packages of one floor
import each other in one direction only, and so do the sub-packages of one package.
"""

from __future__ import annotations

import ast
import functools
import graphlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "ggpipe"
FILES = sorted(PACKAGE.rglob("*.py"))

FLOORS = (  # the lowest first
    {"core", "config", "cluster", "stats", "errors", "_version"},
    {"llama", "transport", "channel", "launch", "text", "apis", "options"},
    {"engine", "planning", "profiling", "sim"},
    {"cli", "server", "api", "display", "__main__"},
)
MOST_NAMES = 20
"""On the package's first level, without those that begin with an underscore."""

PURE = ("core", "config", "errors", "_version")
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


def floor(part: str) -> int:
    (found,) = (i for i, parts in enumerate(FLOORS) if part in parts)
    return found


@functools.cache
def imports(path: Path) -> list[str]:
    return sorted(set(modules_imported(path.read_text())))


def name(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def test_every_part_has_a_floor() -> None:
    parts = {part_of(path) for path in FILES} - {"__init__"}
    assert {"errors", "config", "core", "transport", "llama", "engine", "cli"} <= parts
    assert parts == set().union(*FLOORS)
    assert len([part for part in parts if not part.startswith("_")]) <= MOST_NAMES


def test_the_drawing_shows_these_floors() -> None:
    (drawing,) = re.findall(r"^```\n(.*?)^```", (ROOT / "ARCHITECTURE.md").read_text(), re.DOTALL | re.MULTILINE)
    drawn = [set(re.split(" {2,}", line)[1:]) for line in drawing.splitlines()]
    assert drawn == [{part for part in parts if not part.startswith("_")} for parts in reversed(FLOORS)]


def upward(path: Path) -> Iterator[str]:
    """What a file may not import of ours. The public API may import anything: it loads a name's module on first use."""
    part = part_of(path)
    for module in imports(path):
        package, _, inner = module.partition(".")
        if package != "ggpipe" or part == "__init__":
            continue
        other = inner.split(".")[0]
        is_allowed = part == "llama" if other == "_native" else other != "" and floor(other) <= floor(part)
        if not is_allowed:
            yield f"{name(path)} imports {module}"


def test_imports_go_down() -> None:
    assert [found for path in FILES for found in upward(path)] == []


def neighbours(folder: Path) -> dict[str, set[str]]:
    """The packages in a folder, and the modules of the first level, each with those beside it that it imports."""
    below = {
        path: path.relative_to(folder).parts[0].removesuffix(".py") for path in FILES if path.is_relative_to(folder)
    }
    names = {path.name for path in folder.iterdir() if (path / "__init__.py").exists()}
    if folder == PACKAGE:
        names |= set(below.values()) - {"__init__"}
    found: dict[str, set[str]] = {one: set() for one in names}
    prefix = ".".join(("ggpipe", *folder.relative_to(PACKAGE).parts, ""))
    for path, one in below.items():
        others = {module.removeprefix(prefix).split(".")[0] for module in imports(path) if module.startswith(prefix)}
        if one in names:
            found[one] |= others & names - {one}
    return found


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Names that import each other in a circle; empty where there is none."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as e:
        found: list[str] = e.args[1]
        return found
    return []


def test_no_packages_import_each_other() -> None:
    folders = {path.parent for path in FILES}
    assert {"core/drafters", "cli/commands", "text/chat"} <= {name(folder) for folder in folders}
    assert "drafters" in neighbours(PACKAGE / "core")["batching"]
    assert {name(folder): found for folder in folders if (found := circle(neighbours(folder)))} == {}


def test_a_circle_is_found() -> None:
    assert set(circle({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}})) == {"a", "b", "c"}
    assert circle({"a": {"b"}, "b": {"c"}, "c": set()}) == []


def test_folders_of_tests_are_named_like_packages() -> None:
    tests = {path.parent.relative_to(ROOT / "tests") for path in (ROOT / "tests").rglob("test_*.py")}
    assert len(tests) > 10
    assert [str(folder) for folder in tests if not (PACKAGE / folder / "__init__.py").exists()] == ["scripts"]


def impure(path: Path) -> Iterator[str]:
    """What a file of a pure part may not import."""
    further = {"config/engine.py": {"pathlib"}, "config/model.py": {"pathlib"}}.get(name(path), set())
    if part_of(path) == "core":
        further = {"msgspec"}  # records alone
    allowed = sys.stdlib_module_names - IMPURE | {"ggpipe"} | further
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
        assert "ggpipe.cli.help" in modules
        assert "ggpipe" in out.lower()
        assert not modules.intersection(HEAVY)


def test_the_list_of_loaded_modules_would_show_them() -> None:
    modules, _ = loaded_by("-c", "import ggpipe.llama.libllama, ggpipe.transport.mpi")
    assert set(HEAVY) <= modules


def test_one_libllama_and_one_ggml_in_a_process() -> None:
    """The wheel holds its libraries under several names, as different files: two would mean two of all state."""
    script = (
        "import ggpipe.llama.stage, ggpipe.llama.vocab, ggpipe.llama.sampler, ggpipe.engine.wiring\n"
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
