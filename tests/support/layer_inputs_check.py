"""Opens a model with the inputs of layer 1 kept, as a draft head wants it: libllama aborts where it has none.

    python -m support.layer_inputs_check MODEL

Exit code 0: it has them, and its KV cache can roll back; 1: it cannot.
"""

import sys
from pathlib import Path

from ggpipe.config.context import ContextConfig
from ggpipe.config.model import ModelConfig
from ggpipe.llama.gguf import ModelFile
from ggpipe.llama.stage import Stage

if __name__ == "__main__":
    path = Path(sys.argv[1])
    file = ModelFile.open(path)
    stage = Stage(file, (0, file.n_layer), ModelConfig(path=path), ContextConfig(n_ctx=64), (1, 1), wanted_inputs=(1,))
    sys.exit(not stage.rolls_back)
