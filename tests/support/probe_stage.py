"""Open one stage in a process of its own and print, as JSON, what that read and what stayed in memory.

    python tests/probe_stage.py MODEL FIRST LAST LOAD_MODE REPACK

`read`: bytes that went through read calls while the stage was opened; mapped bytes do not count.
`grown`: growth of the resident size in bytes. `resident`: all of it, Python and libraries included.
"""

import json
import sys
from pathlib import Path
from typing import cast

from ggpipe.config.context import ContextConfig
from ggpipe.config.model import LoadMode, ModelConfig
from ggpipe.core.messages import Row, Run
from ggpipe.llama.gguf import ModelFile
from ggpipe.llama.stage import Stage


def read_bytes() -> int:
    """Bytes that this process has got from read calls so far."""
    return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])


def resident_bytes() -> int:
    """Bytes of this process in RAM, file pages included."""
    return int(Path("/proc/self/smaps_rollup").read_text().split("Rss:")[1].split()[0]) * 1024


def main() -> None:
    """See the module's text."""
    path, first, last = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    config = ModelConfig(path=path, load_mode=cast(LoadMode, sys.argv[4]), repack=sys.argv[5] == "True")
    file = ModelFile.open(path)
    before = read_bytes(), resident_bytes()
    stage = Stage(file, (first, last), config, ContextConfig(n_ctx=256), (1, 1))
    read = read_bytes() - before[0]
    if stage.is_first:  # later ones have run in the dry run at load, as this one has
        stage.decode(
            Run(id=1, rows=tuple(Row(token=token, pos=token, seqs=(0,), request=0) for token in range(5))), None
        )
    resident = resident_bytes()
    print(json.dumps({"read": read, "grown": resident - before[1], "resident": resident}))


if __name__ == "__main__":
    main()
