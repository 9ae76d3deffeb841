"""Opens models with the inputs of layer 1 kept, as a draft head wants it: libllama aborts where one has none.

    python -m support.layer_inputs_check MODEL...

Exit code 0: they have them, and their KV caches can roll back; 1: one cannot.
"""

import sys
from pathlib import Path

from ggpipe.config.context import ContextConfig
from ggpipe.config.model import ModelConfig
from ggpipe.llama.gguf import ModelFile
from ggpipe.llama.stage import Stage

if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        file, own, context = ModelFile.open(path), ModelConfig(path=path), ContextConfig(n_ctx=64)
        print(path.stem, file=sys.stderr)
        if not Stage(file, (0, file.n_layer), own, context, (1, 1), wanted_inputs=(1,)).rolls_back:
            sys.exit(1)
