"""The rows that a request has in a run."""

from __future__ import annotations

from ggpipe.core.batching.pipeline_state import ScheduledRows
from ggpipe.core.in_flight import RunPart
from ggpipe.core.messages import LogitsRequest, Row
from ggpipe.core.request_state import Phase, RequestState, SequenceState


def part_of(
    scheduled: ScheduledRows, run: int, logits_requests: dict[LogitsRequest, int]
) -> RunPart[SequenceState] | None:
    """The part of run number `run` that these rows are: of the prompt, tokens that are decoded again, and nodes of the
    tree, which get their sequence ids. None if there are none. `logits_requests`: those of the run, by their numbers;
    new ones are added."""
    state, tree = scheduled.state, scheduled.state.tree
    end, nodes, most = state.prompt_end(scheduled.n_prompt), scheduled.nodes, scheduled.most
    takes_root = bool(most) and not tree.root.submitted
    if scheduled.n_prompt and end == len(state.prompt) and isinstance(state, RequestState):
        end, nodes, most, takes_root = end - 1, (tree.root,), 1, True
        state.enter(Phase.DECODING)
    own_seqs: tuple[int, ...] = (tree.seq,)
    cells = [(state.prompt[i], i, own_seqs) for i in range(state.n_past, end)]
    again = state.again if takes_root else ()
    cells += [(token, tree.root.pos - len(again) + i, own_seqs) for i, token in enumerate(again)]
    state.n_past = max(state.n_past, end)
    placed = tree.place(nodes, run, most)
    cells += [(node.token, node.pos, node.sorted_seqs) for node in placed]
    rows, latest, index = [], None, -1
    for token, pos, seqs in cells:
        if (logits_request := state.logits_request_at(pos)) is not latest:
            latest, index = logits_request, -1
            if logits_request is not None:
                index = logits_requests.setdefault(logits_request, len(logits_requests))
        rows.append(Row(token=token, pos=pos, seqs=seqs, request=state.id, logits_request=index))
    if not rows:
        return None
    n_draft_tokens = len(placed) - (tree.root in placed)
    state.counters.submitted(node.depth for node in placed if node is not tree.root)
    state.counters.speculative_runs += n_draft_tokens > 0
    return RunPart(
        owner=state, request=state.id, rows=rows, nodes=placed, n_draft_tokens=n_draft_tokens, n_again=len(again)
    )
