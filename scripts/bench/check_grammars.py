"""Check that outputs fit their grammars. Run it as `scripts/bench/check_grammars`.

The bundled pair on two ranks, in one process, generates at temperature 1 for each of the tests' grammars and JSON
schemas, without draft tokens and with trees of them. Each whole text is checked in another way than by its grammar, and
must be the same in both modes. (`exact`, so that draft tokens change no bit.)
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable
from typing import Any

from support.commands import TARGET
from support.grammars import GRAMMARS, SCHEMAS, fits
from support.pipeline import local_session

from ggpipe.channel.client import ClientRequest
from ggpipe.config.context import ContextConfig
from ggpipe.config.draft import DraftConfig
from ggpipe.config.engine import EngineConfig
from ggpipe.config.model import ModelConfig
from ggpipe.config.pipeline import PipelineConfig
from ggpipe.config.sampling import SamplingConfig
from ggpipe.config.speculation import SpeculationConfig
from ggpipe.core.request import Finish
from ggpipe.core.request_spec import RequestSpec

MODES = (SpeculationConfig(mode="iterative"), SpeculationConfig(mode="speculative", n_draft=4, n_parallel=2, n_seq=4))


def cases() -> dict[str, tuple[dict[str, Any], Callable[[str], bool]]]:
    """Constraints, as settings of a request, and their checks, by name."""
    found: dict[str, tuple[dict[str, Any], Callable[[str], bool]]] = {
        name: ({"grammar": case.grammar}, case.is_right) for name, case in GRAMMARS.items()
    }
    for name, schema in SCHEMAS.items():
        found[f"schema: {name}"] = ({"json_schema": json.dumps(schema)}, functools.partial(fits, schema=schema))
    return found


def text_of(request: ClientRequest) -> str:
    """What was written."""
    return "".join(token.text for token in request.tokens) + request.rest


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=50, help="outputs per grammar and mode (50)")
    parser.add_argument("-n", "--predict", type=int, default=200, help="tokens of a text, at most (200)")
    arguments = parser.parse_args()
    context = ContextConfig(n_ctx=4096, n_seq=8, exact=True)
    draft = DraftConfig(model=ModelConfig(path=TARGET.with_name("tales-draft.gguf")), context=context)
    config = EngineConfig(
        ModelConfig(path=TARGET),
        context,
        PipelineConfig(threads=(1,)),
        (draft,),
        n_requests=4,
        n_queued=2 * arguments.times,
    )
    n_wrong = 0
    print("| grammar | complete | cut by -n | wrong | differ with draft tokens |\n|---|---|---|---|---|")
    with local_session(config, 2) as session:
        prompt = session.tokenize("Once upon a time")
        for name, (constraint, is_right) in cases().items():
            requests = [
                session.submit(
                    RequestSpec(
                        prompt=prompt,
                        sampling=SamplingConfig(temp=1.0, seed=seed, **constraint),
                        n_predict=arguments.predict,
                        speculation=mode,
                    )
                )
                for seed in range(arguments.times)
                for mode in MODES
            ]
            while any(request.is_active for request in requests):
                session.step()
            whole = [request for request in requests if request.stats.finish is Finish.END_OF_TEXT]
            wrong = [text for request in whole if not is_right(text := text_of(request))]
            texts = [text_of(request) for request in requests]
            n_differ = sum(one != other for one, other in zip(texts[::2], texts[1::2], strict=True))
            n_wrong += len(wrong) + n_differ
            n_cut = sum(request.stats.finish is Finish.LENGTH for request in requests)
            print(f"| {name} | {len(whole)} | {n_cut} | {len(wrong)} | {n_differ} |", flush=True)
            for text in wrong[:3]:
                print(repr(text), file=sys.stderr)
    return int(n_wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
