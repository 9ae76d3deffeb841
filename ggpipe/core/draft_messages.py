"""What the head and the drafters send each other: the text so far, draft tokens."""

from __future__ import annotations

import enum
import math

import msgspec

from ggpipe.config.engine import Saves
from ggpipe.config.speculation import SpeculationConfig

ROOT = 0
"""As a draft token's parent: the last accepted token that the drafter knew."""

Candidates = tuple[tuple[int, float], ...]
"""A draft's best tokens for one position with their probabilities, the most probable first."""


class Expansion(msgspec.Struct, frozen=True):
    """What a drafter proposes after one node: its best candidates with their probabilities.

    The first `n` candidates are draft tokens, numbered `first`, `first + 1`, ... within their request and drafter.
    """

    parent: int
    first: int
    n: int
    candidates: Candidates
    again: tuple[tuple[int, float], ...] = ()
    """New probabilities of draft tokens that it named earlier after this node, by their numbers."""


class BlockOf(enum.IntEnum):
    """Which block draft tokens are from, of a head that drafts a block at a time."""

    NONE = 0
    """The drafter has no blocks."""
    THIS_ROOT = 1
    EARLIER_ROOT = 2
    """What an earlier block says of the tokens after the last accepted one; one that begins there may still come."""


class MicroBatch(msgspec.Struct, frozen=True, kw_only=True):
    """Draft tokens on their way to the head, parents before children."""

    request: int
    epoch: int
    """Accepted tokens that the drafter knew of."""
    expansions: tuple[Expansion, ...]
    complete: bool
    """The drafter sends nothing more until a further token is accepted."""
    drafter: int = 0
    """Which drafter drafted them."""
    block: BlockOf = BlockOf.NONE
    """Where they come from."""


class VocabOutline(msgspec.Struct, frozen=True, kw_only=True):
    """The properties by which two vocabularies are compared."""

    kind: int
    """libllama's number for the kind of tokenizer."""
    added_bos: int | None
    """The token that tokenizing puts before the text; None: it adds none."""
    added_eos: int | None
    """The token that tokenizing puts after the text; None: it adds none."""
    eos: int
    """The end-of-sequence token; negative: there is none."""
    checksums: tuple[int, ...]
    """Checksum of each token's text."""
    rolls_back: bool
    """Whether the model's memory can remove the end of a sequence."""


class Vocabularies(msgspec.Struct, frozen=True):
    """The tokens of a target and of its draft: the same ids name the same tokens, and one may have a few more.

    Chat fine-tunes add tokens such as `<|im_end|>` that a draft for the base model does not have. The draft reads
    `stand_in` in their place. The text stays the target's, which verifies each draft token.
    """

    n_target: int
    n_draft: int
    stand_in: int

    def for_draft(self, token: int) -> int:
        """The token that the draft reads for one of the target's."""
        return token if token < self.n_draft else self.stand_in

    @property
    def only_draft(self) -> tuple[int, ...]:
        """Tokens that the target does not have."""
        return tuple(range(self.n_target, self.n_draft))


class Drawing(msgspec.Struct, frozen=True, kw_only=True):
    """How a request's tokens are drawn: each with one random number, from what these samplers leave."""

    seed: int
    samplers: tuple[tuple[str, float], ...]
    """llama.cpp's `top_k`, `top_p`, `min_p` and `temperature` in their order, with their settings. Others may be there
    too, of which a drafter knows nothing."""
    n_drawn: int = 0
    """Random numbers that are taken before the first token."""

    @property
    def is_sorted(self) -> bool:
        """Whether candidates are added up from the most probable one on; else by their ids."""
        return any(name in ("top_k", "top_p") for name, _ in self.samplers)

    @property
    def temp(self) -> float:
        """Temperature; above 0."""
        return math.prod(value for name, value in self.samplers if name == "temperature")

    @property
    def whole_temp(self) -> float:
        """Temperature if no token is removed, for `LogitsRequest.temp`; otherwise 0."""
        return self.temp if all(name == "temperature" for name, _ in self.samplers) else 0.0


class Penalties(msgspec.Struct, frozen=True, kw_only=True):
    """llama.cpp's penalties for tokens that are among the last ones."""

    n_last: int
    """How many of the last tokens count."""
    repeat: float
    """The token's logit is divided by it, or multiplied if it is negative."""
    frequency: float
    """Taken from the logit for each time that the token is among them."""
    presence: float
    """Taken from the logit once."""


class Dry(msgspec.Struct, frozen=True, kw_only=True):
    """llama.cpp's DRY: penalties for tokens that would continue a repetition."""

    n_last: int
    """How many of the last tokens are searched for one."""
    multiplier: float
    base: float
    allowed_length: int
    """Tokens that may be repeated. The next one's logit is lowered by `multiplier`, that of each further one by `base`
    times as much."""
    breakers: tuple[int, ...]
    """Tokens that end a repetition."""


class Adjustments(msgspec.Struct, frozen=True, kw_only=True):
    """How a request's logits are adjusted before a token is chosen."""

    biases: tuple[tuple[int, float], ...] = ()
    """(token, what is added to its logit)."""
    penalties: Penalties | None = None
    dry: Dry | None = None

    @property
    def raised(self) -> tuple[int, ...]:
        """Tokens that may be chosen although their own logits are low."""
        return tuple(token for token, bias in self.biases if bias > 0)


class BeginDrafting(msgspec.Struct, frozen=True, kw_only=True):
    """A request to draft for."""

    request: int
    prompt: tuple[int, ...]
    n_left: int
    """Tokens that may be generated."""
    look_ahead: int
    """Depth of the deepest draft token below the last accepted token, at most."""
    ends: frozenset[int]
    """Tokens that end the text."""
    banned: tuple[int, ...]
    """Tokens that are never drafted."""
    speculation: SpeculationConfig
    cache_prompt: bool = True
    """The prefix cache is used for it, as in `Request`."""
    saves: Saves = "nothing"
    """As in `Request`. Unless it is nothing, one `Save` follows, which may have no tokens."""
    drawing: Drawing | None = None
    """As in `Request`."""
    adjustments: Adjustments | None = None
    """As in `Request`."""


class Accepted(msgspec.Struct, frozen=True):
    """Tokens that the target added to the text since the last such message."""

    request: int
    epoch: int
    """All tokens accepted so far."""
    tokens: tuple[int, ...]
    look_ahead: int
    """Replaces the one of `BeginDrafting`."""
    least_path: float = 0.0
    """Path probability below which draft tokens are not worth their time."""
    rows: tuple[tuple[int, int], ...] = ()
    """For each of the tokens, the target's run and row whose logits it was sampled from."""
    n_drawn: int = 0
    """Random numbers that were taken so far (see `Drawing`)."""


class SharedToken(msgspec.Struct, frozen=True):
    """A draft token of another drafter."""

    path: tuple[int, ...]
    """The draft tokens between it and the root in order, and itself."""
    number: int
    """The head's number for it: negative, unlike the drafter's own."""
    probability: float
    """Of this token after its parent."""


class Shared(msgspec.Struct, frozen=True):
    """Draft tokens that other drafters named. A draft model may decode them before it names them, so a fast one drafts
    for a slow one. It may draft after them, so it continues after tokens on which they disagreed."""

    request: int
    epoch: int
    """Accepted tokens; the last of them is the root."""
    tokens: tuple[SharedToken, ...]
    """Parents before children."""


class EndDrafting(msgspec.Struct, frozen=True):
    """No more draft tokens are needed for this request."""

    request: int


DrafterMessage = BeginDrafting | Accepted | Shared | EndDrafting
"""What the head sends to a drafter."""
