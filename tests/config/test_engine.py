"""A setting out of bounds is refused in one line: its name, its bounds and the value."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ggpipe.config.context import ContextConfig
from ggpipe.config.draft import DraftConfig
from ggpipe.config.engine import EngineConfig
from ggpipe.config.layer_split import LayerSplit
from ggpipe.config.model import ModelConfig
from ggpipe.config.pipeline import PipelineConfig
from ggpipe.config.sampling import SamplingConfig
from ggpipe.config.speculation import SpeculationConfig
from ggpipe.errors import SettingError

MODEL = ModelConfig(path=Path("m.gguf"))


@pytest.mark.parametrize(
    ("make", "field", "values"),
    [
        (lambda n: ContextConfig(n_ctx=n), "n_ctx", (-1, 2**31, 2**32, 2**64)),
        (lambda n: ContextConfig(n_batch=n), "n_batch", (0, 2**32 + 1)),
        (lambda n: ContextConfig(n_ubatch=n), "n_ubatch", (0, 2**32 + 1)),
        (lambda n: ContextConfig(yarn_orig_ctx=n), "yarn_orig_ctx", (-1, 2**32 + 1)),
        (lambda n: SamplingConfig(repeat_last_n=n), "repeat_last_n", (-2, 2**31, 2**80)),
        (lambda n: SamplingConfig(mirostat=n), "mirostat", (-1, 3)),
        (lambda n: SamplingConfig(dry_penalty_last_n=n), "dry_penalty_last_n", (-2, 2**31)),
        (lambda n: SamplingConfig(dry_allowed_length=n), "dry_allowed_length", (-1, 2**31)),
        (lambda n: SamplingConfig(min_keep=n), "min_keep", (-1, 2**31)),
        (lambda n: SamplingConfig(top_k=n), "top_k", (-(2**32), 2**31)),
        (lambda n: SpeculationConfig(n_draft=n), "n_draft", (0, 99999999999)),
        (lambda n: SpeculationConfig(n_parallel=n), "n_parallel", (0, 257)),
        (lambda n: SpeculationConfig(n_min=n), "n_min", (-1, 65)),
        (lambda n: PipelineConfig(threads=(1, n)), "threads", (0, -2, 513)),
        (lambda n: DraftConfig(model=MODEL, window=n), "draft.window", (-1, 1, 63, 2**31)),
        (lambda n: PipelineConfig(threads_batch=(n,)), "threads_batch", (0, -2, 513)),
        (lambda n: PipelineConfig(layer_split=LayerSplit((0.5, 0.5), (1, n))), "group_sizes", (0, 17)),
        (lambda n: DraftConfig(model=MODEL, threads=n), "draft.threads", (0, -2, 513)),
        (lambda n: DraftConfig(model=MODEL, threads_batch=n), "draft.threads_batch", (0, -2, 513)),
    ],
)
def test_out_of_bounds(make: Callable[[int], object], field: str, values: tuple[int, ...]) -> None:
    for value in values:
        with pytest.raises(SettingError, match=rf"^`{field}` must be .*, got {value}$") as caught:
            make(value)
        assert caught.value.field == field


def test_more_sequences_than_tokens() -> None:
    ContextConfig(n_ctx=100, n_seq=100)
    ContextConfig(n_seq=200)
    with pytest.raises(
        SettingError, match="`n_ctx` must be at least 200, a token for each sequence, got 100: raise it"
    ):
        ContextConfig(n_ctx=100, n_seq=200)


def test_bounds_themselves_are_taken() -> None:
    most = 2**31 - 256
    ContextConfig(n_ctx=most, n_batch=most, n_ubatch=most, yarn_orig_ctx=most)
    SamplingConfig(repeat_last_n=most, top_k=most)
    SamplingConfig(top_k=-1)
    SpeculationConfig(n_draft=most, n_min=most, n_parallel=256)
    PipelineConfig(threads=(-1, 1, 512))


BAD: Any = "bad"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: ModelConfig(path=Path("m"), load_mode=BAD),
            "`load_mode` must be auto, mmap, none, mlock, mmap+mlock, dio or stream, ",
        ),
        (lambda: ModelConfig(path=Path("m"), numa=BAD), "`numa` must be distribute, isolate or numactl, got bad"),
        (lambda: ContextConfig(flash_attn=BAD), "`flash_attn` must be on, off or auto, got bad"),
        (lambda: ContextConfig(rope_scaling=BAD), "`rope_scaling` must be none, linear or yarn, got bad"),
        (lambda: ContextConfig(rope_scale=float("inf")), "`rope_scale` must be a finite number, got inf"),
        (lambda: ContextConfig(cache_type_k=BAD), "`cache_type_k` must be f32, f16, bf16, "),
        (lambda: ContextConfig(cache_type_v="q8_0", flash_attn="off"), "`cache_type_v` q8_0 needs flash attention"),
        (lambda: SamplingConfig(temp=float("nan")), "`temp` must be a finite number, got nan"),
        (lambda: SamplingConfig(repeat_penalty=0), "`repeat_penalty` must be above 0, got 0"),
        (lambda: SpeculationConfig(mode=BAD), "`mode` must be iterative, speculative or async, got bad"),
        (lambda: SpeculationConfig(p_accept=1.5), "`p_accept` must be a probability from 0 to 1, got 1.5"),
    ],
)
def test_values_that_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(SettingError, match=re.escape(message)):
        make()


def test_wide_records_take_keywords_only() -> None:
    records: tuple[Callable[..., object], ...] = (
        ContextConfig,
        SamplingConfig,
        SpeculationConfig,
        ModelConfig,
        DraftConfig,
    )
    for record in records:
        with pytest.raises(TypeError, match="positional"):
            record(MODEL)


# Groups

GROUPS = PipelineConfig(layer_split=LayerSplit((0.5, 0.5), (2, 1)))


def test_ranks_of_groups() -> None:
    draft = DraftConfig(model=MODEL, layer_split=LayerSplit((1.0,), (3,)))
    config = EngineConfig(MODEL, pipeline=GROUPS, drafts=(draft,))
    assert (GROUPS.n_ranks, draft.n_ranks, config.n_draft_ranks) == (3, 3, 3)
    assert (PipelineConfig().n_ranks, PipelineConfig(layer_split=LayerSplit((0.5, 0.5))).n_ranks) == (None, 2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: PipelineConfig(layer_split=LayerSplit((1.0,), (2, 2))),
            "`group_sizes` has 2 numbers for 1 shares",
        ),
        (lambda: PipelineConfig(tensor_split=(3, 0)), "`tensor_split` must be numbers above 0, as in 3,1, got 0"),
        (lambda: PipelineConfig(tensor_wire=BAD), "`tensor_wire` must be f32 or f16, got bad"),
        (
            lambda: EngineConfig(
                MODEL, pipeline=PipelineConfig(layer_split=LayerSplit((0.5, 0.5)), tensor_split=(3, 1))
            ),
            "`tensor_split` has 2 numbers, but `layer_split` has no group of 2 ranks",
        ),
        (lambda: EngineConfig(MODEL, ContextConfig(exact=True), GROUPS), "`exact` does not work with groups"),
        (
            lambda: EngineConfig(MODEL, ContextConfig(flash_attn="off"), GROUPS),
            "`flash_attn` off does not work with groups",
        ),
        (
            lambda: EngineConfig(ModelConfig(path=Path("m"), loras=((Path("a"), 1.0),)), pipeline=GROUPS),
            "`loras` cannot be used with groups",
        ),
    ],
)
def test_what_groups_cannot_do_is_one_line(make: Callable[[], object], message: str) -> None:
    with pytest.raises(SettingError) as caught:
        make()
    assert str(caught.value).startswith(message)
    assert len(str(caught.value).splitlines()) == 1


def test_proportions_of_a_drafts_group() -> None:
    draft = DraftConfig(model=MODEL, layer_split=LayerSplit((1.0,), (3,)))
    EngineConfig(
        MODEL, pipeline=PipelineConfig(layer_split=LayerSplit((1.0,)), tensor_split=(3, 2, 1)), drafts=(draft,)
    )
