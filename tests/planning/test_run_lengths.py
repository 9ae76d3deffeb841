"""Longer runs for long prompts: where latent vectors are expanded once for all rows, and there is the memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.in_process import ggpipe
from support.planning import GB, TARGET, cluster, node, request

from ggpipe.cluster.model_shape import ModelShape
from ggpipe.core.row_work import Attention
from ggpipe.planning.planner import make_plan
from ggpipe.planning.run_lengths import LongerRuns, longer_runs
from ggpipe.sim.limits import Sizes
from ggpipe.sim.simulation_spec import SyntheticText

LATENT = replace(
    TARGET,
    layer_attention=(Attention(cell=6e5, long_cell=6e5 * 320 / 1088, expansion=6e5 * 131072 / 1088),) * TARGET.n_layer,
)


def found(target: ModelShape = LATENT, n_prompt: int = 4000, memory_gb: float = 200) -> LongerRuns | None:
    asked = request(tokens=SyntheticText(n_prompt=n_prompt))
    asked = replace(asked, constraints=replace(asked.constraints, n_ctx=8192), sizes=Sizes(n_ctx=8192))
    plan = make_plan(cluster(node("a", memory_gb=memory_gb)), target, None, asked)
    return longer_runs(target, (), asked, plan)


def test_runs_as_long_as_they_pay() -> None:
    longer = found()
    assert longer is not None
    assert longer.n_ubatch in (1024, 2048)
    assert longer.ttft_s < 0.95 * longer.usual_s
    assert longer.memory[0].compute > LATENT.row_bytes * longer.n_ubatch, "the buffers of these runs"


@pytest.mark.parametrize(("target", "n_prompt"), [(TARGET, 4000), (LATENT, 500)])
def test_other_models_and_short_prompts_gain_nothing(target: ModelShape, n_prompt: int) -> None:
    assert found(target, n_prompt) is None


def test_memory_limits_them() -> None:
    """Compute buffers grow with the rows of the longest run."""
    wide = replace(LATENT, row_bytes=LATENT.row_bytes * 200)
    assert found(wide) is not None
    assert found(wide, memory_gb=(LATENT.weight_bytes + 62 * GB) / GB) is None


def test_the_command_asks_for_them() -> None:
    words = ("plan", "deepseek-v3-xeons", "--prompt-tokens", 16000, "-c", 20000, "--mode", "iterative")
    done = ggpipe(*words)
    assert done.returncode == 0
    (command,) = [line for line in done.stdout.splitlines() if line.startswith("ggpipe generate ")]
    assert " -ub 2048 " in command
    (reason,) = [line for line in done.stdout.splitlines() if line.startswith("-ub 2048 computes more of a prompt")]
    assert " instead of " in reason
    assert "-ub 2048" not in ggpipe(*words, "-ub", 256).stdout


def test_exact_runs_expand_nothing() -> None:
    assert found(LATENT.never_long()) is None
    words = ("plan", "deepseek-v3-xeons", "--prompt-tokens", 16000, "-c", 20000, "--mode", "iterative", "--exact")
    assert "-ub 2048" not in ggpipe(*words).stdout
