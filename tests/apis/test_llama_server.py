"""The objects of a reply to llama-server's `/completion`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
import pytest

from ggpipe.apis.decode import convert
from ggpipe.apis.llama_server import NativeBody, NativeWriter
from ggpipe.config.sampling import SamplingConfig
from ggpipe.core.request import Finish, Token, TokenProb
from ggpipe.core.request_spec import RequestSpec
from ggpipe.stats.records import RequestStats

TOKEN = Token(7, "a\n", probs=(TokenProb(7, b"a\n", math.log(0.25)), TokenProb(8, b"\xc3", math.log(0.5))))


@dataclass(frozen=True)
class Output:
    """One token of an output."""

    stats: RequestStats
    spec: RequestSpec
    index: int = 1
    prompt: int = 0
    tokens: Sequence[Token] = (TOKEN,)
    rest: str = ""
    marks: None = None
    key: str = "k"


def output(finish: Finish) -> Output:
    sampling = SamplingConfig(logit_bias=((5, float("-inf")), (6, 0.5)), stop=("b",), grammar="root ::= [^b]*")
    spec = RequestSpec(prompt=(1, 2), n_predict=4, sampling=sampling)
    return Output(RequestStats(n_prompt=2, token_times=[1.0], finish=finish, seed=3), spec)


def writer(**fields: object) -> NativeWriter:
    body = convert(NativeBody, {"prompt": "a", **fields})
    return NativeWriter(body, "m", lambda key: 2 if key == "k" else -1, body.response_fields or ())


def test_a_part_has_its_tokens_and_their_probabilities() -> None:
    (part,) = writer().add(output(Finish.LENGTH), [], [TOKEN])
    (probs,) = part.pop("completion_probabilities")
    assert part == {
        "index": 1, "content": "a\n", "tokens": [7], "stop": False, "id_slot": 2, "tokens_predicted": 1,
        "tokens_evaluated": 2,
    }  # fmt: skip
    assert (probs["id"], probs["logprob"], probs["top_logprobs"][0]["bytes"]) == (7, math.log(0.25), [0xC3])


def test_probabilities_of_the_draw_are_no_logarithms() -> None:
    (part,) = writer(post_sampling_probs=True).add(output(Finish.LENGTH), [], [TOKEN])
    (probs,) = part["completion_probabilities"]
    assert probs["prob"] == pytest.approx(0.25)
    assert probs["top_probs"][0]["prob"] == pytest.approx(0.5)
    assert "logprob" not in probs


@pytest.mark.parametrize(
    ("finish", "kind"),
    [
        (Finish.END_OF_TEXT, "eos"), (Finish.STOP_STRING, "word"), (Finish.LENGTH, "limit"),
        (Finish.CONTEXT_FULL, "limit"), (Finish.STOPPED, "none"),
    ],
)  # fmt: skip
def test_the_last_part_says_how_the_output_ended(finish: Finish, kind: str) -> None:
    (last,) = writer().end(output(finish), "b")
    assert (last["stop"], last["stop_type"], last["stopping_word"], last["has_new_line"]) == (True, kind, "b", True)
    assert last["truncated"] == (finish is Finish.CONTEXT_FULL)
    settings = last["generation_settings"]
    assert (settings["seed"], settings["n_predict"], settings["stop"]) == (3, 4, ("b",))
    assert settings["logit_bias"] == [{"token": 5, "bias": None}, {"token": 6, "bias": 0.5}]


def test_a_forbidden_end_is_a_bias_of_all_end_tokens() -> None:
    own = output(Finish.LENGTH)
    sampling = replace(own.spec.sampling, ignore_eos=True)
    own = replace(own, spec=msgspec.structs.replace(own.spec, sampling=sampling))
    body = convert(NativeBody, {"prompt": "a"})
    (last,) = NativeWriter(body, "m", lambda key: -1, end_tokens=(3, 6)).end(own)
    assert last["generation_settings"]["logit_bias"] == [
        {"token": 5, "bias": None}, {"token": 6, "bias": None}, {"token": 3, "bias": None}
    ]  # fmt: skip


def test_progress_has_the_timings_so_far() -> None:
    own = writer(timings_per_token=True)
    found = []
    for processed in (2, 12):
        progress = {"total": 12, "cache": 2, "processed": processed, "time_ms": 50}
        (part,) = own.progress(output(Finish.LENGTH), progress)
        assert part["prompt_progress"] == progress
        found.append([part["timings"][name] for name in ("cache_n", "prompt_n", "prompt_ms", "predicted_n")])
    assert found == [[2, 0, 0.0, 0], [2, 10, 50.0, 0]]


def test_a_reply_has_the_fields_that_were_chosen() -> None:
    own = writer(response_fields=["content", "timings/prompt_n", "missing"])
    assert own.whole([output(Finish.LENGTH)], [""]) == {"content": "a\n", "timings/prompt_n": 2}


@pytest.mark.parametrize(("fields", "shows"), [([], True), (["prompt"], True), (["content"], False)])
def test_the_prompt_is_written_if_it_is_wanted(fields: list[str], shows: bool) -> None:
    own = writer(response_fields=fields)
    own.prompts = {0: "the prompt"}
    whole = own.whole([output(Finish.LENGTH)], [""])
    assert isinstance(whole, dict)
    assert own.shows_prompts == shows == (whole.get("prompt") == "the prompt")
