"""Opens models with the inputs of layer 1 kept, as a draft head wants it: libllama aborts where one has none.

    python -m support.layer_inputs_check MODEL...

Exit code 0: they have them, and their memories can roll back, or be taken back; 1: one cannot.
"""

import sys
from pathlib import Path

from ggpipe.config.context import ContextConfig
from ggpipe.config.model import ModelConfig
from ggpipe.llama.context_ids import TAKES_BACK
from ggpipe.llama.gguf import ModelFile
from ggpipe.llama.layer_inputs import WITH_OUTPUT
from ggpipe.llama.stage import Stage

if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        file, own, context = ModelFile.open(path), ModelConfig(path=path), ContextConfig(n_ctx=64)
        print(path.stem, file=sys.stderr)
        wanted = (1, file.n_layer) if file.architecture in WITH_OUTPUT else (1,)
        stage = Stage(file, (0, file.n_layer), own, context, (1, 1), wanted_inputs=wanted)
        if stage.tapped != wanted or not (stage.rolls_back or file.architecture in TAKES_BACK):
            sys.exit(1)
