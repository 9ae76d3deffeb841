"""Records the prompts that llama-server makes of conversations; run it as `scripts/bench/llama_server_prompts`.

Compiles llama-server's own function from llama.cpp's source, against the libraries that are installed, and applies all
templates that llama.cpp has for its tests to the conversations of `tests/support/llama_server_prompts.py`. The hashes
go to the table that ggpipe's prompts are compared with. Run it again when llama-cpp-python changes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sysconfig
import tempfile
from pathlib import Path

from support import llama_cpp_source
from support.llama_server_prompts import BODIES, TABLE, hash_of, templates

PROGRAM = Path(__file__).with_suffix(".cpp")
LIBRARIES = Path(sysconfig.get_path("platlib")) / "lib"


def compiled(folder: Path) -> Path:
    """The program. It takes a file of bodies, and templates."""
    source, program = llama_cpp_source.source(), folder / "llama_server_prompts"
    headers = ("tools/server", "tools/mtmd", "common", "include", "ggml/include", "vendor")
    command = ["c++", "-std=c++17", "-rdynamic", *(f"-I{source / header}" for header in headers)]
    command += [str(PROGRAM), str(source / "tools" / "server" / "server-common.cpp"), f"-L{LIBRARIES}"]
    command += ["-lllama-common", "-lmtmd", "-lllama", "-lggml", "-lggml-base", "-lpthread", "-o", str(program)]
    subprocess.run(command, check=True)
    return program


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--show", action="store_true", help="print the prompts as JSON lines instead of recording them")
    arguments = parser.parse_args()
    table = {}
    with tempfile.TemporaryDirectory() as name:
        bodies = Path(name) / "bodies.json"
        bodies.write_text(json.dumps(list(BODIES.values())))
        environment = {**os.environ, "LD_LIBRARY_PATH": str(LIBRARIES), "TZ": "UTC"}
        command = [compiled(Path(name)), bodies, *templates()]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout
    for path, line in zip(templates(), output.splitlines(), strict=True):
        found = json.loads(line)
        if arguments.show:
            print(json.dumps({"template": path.stem, "prompts": dict(zip(BODIES, found, strict=True))}))
        table[path.stem] = [hash_of(one["prompt"]) if "prompt" in one else None for one in found]
    if not arguments.show:
        lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(hashes)}" for name, hashes in table.items())
        TABLE.write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    main()
