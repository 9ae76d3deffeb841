"""libllama is loaded without the rest of its Python package, which stays whole for whoever wants it."""

from __future__ import annotations

import subprocess
import sys


def run(program: str) -> str:
    return subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout


def test_only_the_low_level_module_is_loaded() -> None:
    program = """
import sys
from ggpipe.llama import libllama, machine
libllama.start()
version = machine.libllama_version()
print([name for name in ("llama_cpp.llama", "jinja2") if name in sys.modules])
import llama_cpp
assert llama_cpp.llama_cpp is libllama.lib
assert llama_cpp.Llama.__module__ == "llama_cpp.llama"
assert llama_cpp.__version__ == version
print("jinja2" in sys.modules, type(llama_cpp).__name__)
"""
    assert run(program).splitlines() == ["[]", "True module"]


def test_a_package_that_is_loaded_before_stays_as_it_is() -> None:
    program = """
from llama_cpp import Llama
import llama_cpp
from ggpipe.llama import libllama
assert llama_cpp.Llama is Llama
assert llama_cpp.llama_cpp is libllama.lib
"""
    assert run(program) == ""


def test_names_of_the_package_can_be_imported_later() -> None:
    assert run("import ggpipe.llama.libllama\nfrom llama_cpp import Llama\nprint(Llama.__name__)") == "Llama\n"
