"""MTP layers as a drafter: layers that a target has for drafting, which read its last hidden states.

    the row at position P      the token at P, with the target's state at P - 1; the first token reads zeros
    a draft token's row        the draft token, with the state that the layers gave for its parent

Everything else is as for an EAGLE-3 head (`eagle`), except that the text begins with its first token. Of several MTP
layers, the first one drafts, again and again.
"""

from __future__ import annotations

from ggpipe.core.drafters.eagle import EagleHead


class MtpLayers(EagleHead):
    """The drafter (see the module's docstring), for any number of requests."""

    _shift = 0
