"""A mixture of experts, in plain torch: which experts a token goes to, and what they make of it,
with each token's own adapters on them.

Shapes: T tokens, E experts, K experts a token, H hidden, F the experts' inner width. A pair is a
token at one of its experts; pairs are sorted by expert once, for the base and for adapters.
"""

import torch
import torch.nn.functional as F

from engine.kernels.expert_bank import ExpertBank, ExpertPair, ExpertUses, expert_pair
from engine.kernels.silu_mul import silu_mul


def route(
    logits: torch.Tensor, top_k: int, *, renormalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Router logits [T, E] -> experts int32 [T, K], best first, and their weights float32 [T, K].

    Weights are the softmax over all experts; `renormalize`: so that those of a token sum to 1,
    which is also the softmax over its K logits.
    """
    weights, experts = logits.float().softmax(-1).topk(top_k, dim=-1)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return experts.int(), weights


def run_experts(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    bank: ExpertBank | None = None,
    uses: ExpertUses | None = None,
) -> torch.Tensor:
    """x [T, H] -> [T, H]: the sum over a token's experts [T, K] (int32) of weight (float32 [T, K])
    times down(silu(gate(x)) * up(x)).

    gate_up [E, 2F, H] (gate first), down [E, H, F]. Adapters of `uses` add theirs to gate, up and
    down from the layer's `bank`; both are None for the base alone.
    """
    num_tokens, top_k = experts.shape
    order = experts.flatten().argsort(stable=True)
    counts = experts.flatten().bincount(minlength=gate_up.shape[0]).tolist()
    out = x.new_empty(num_tokens * top_k, x.shape[1])
    start = 0
    for expert, count in enumerate(counts):
        if not count:
            continue
        pairs = order[start : start + count]
        start += count
        tokens = pairs // top_k
        own_x = x.index_select(0, tokens)
        own = _adapters(bank, uses, tokens, expert, x.shape[1], down.shape[2])
        hidden = F.linear(own_x, gate_up[expert])
        for rows, scale, pair in own:
            delta = _gate_up_delta(own_x.index_select(0, rows), pair)
            hidden.index_add_(0, rows, delta * scale)
        inner = silu_mul(hidden)
        result = F.linear(inner, down[expert])
        for rows, scale, pair in own:
            delta = inner.index_select(0, rows) @ pair.down_a.t() @ pair.down_b
            result.index_add_(0, rows, delta * scale)
        out.index_copy_(0, pairs, result)
    summed = out.view(num_tokens, top_k, -1) * weights.to(x.dtype).unsqueeze(-1)
    return summed.sum(1)


def _adapters(
    bank: ExpertBank | None,
    uses: ExpertUses | None,
    tokens: torch.Tensor,
    expert: int,
    hidden: int,
    ffn: int,
) -> list[tuple[torch.Tensor, torch.Tensor, ExpertPair]]:
    """Of each adapter that changes `expert` for some of `tokens` [n]: the places of these tokens,
    what it counts for [n', 1], its matrices.
    """
    if bank is None or uses is None:
        return []
    found = []
    for slots, weights in zip(uses.slots, uses.weights, strict=True):
        own_slots = slots.index_select(0, tokens)
        own_weights = weights.index_select(0, tokens).to(bank.heap.dtype).unsqueeze(-1)
        for slot in own_slots.unique().tolist():
            if slot < 0 or bank.positions[slot, expert] < 0:
                continue
            rows = (own_slots == slot).nonzero().squeeze(-1)
            pair = expert_pair(bank, slot, expert, hidden, ffn)
            found.append((rows, own_weights.index_select(0, rows), pair))
    return found


def _gate_up_delta(x: torch.Tensor, pair: ExpertPair) -> torch.Tensor:
    """x [n, H] -> what the adapter adds to gate and up, [n, 2F]."""
    a = pair.gate_up_a.expand(2, -1, -1)
    return torch.cat(
        [x @ own_a.t() @ own_b for own_a, own_b in zip(a, pair.gate_up_b, strict=True)], -1
    )
