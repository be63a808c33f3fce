"""Choosing the next token, in plain torch: greedy, random, and the log-probabilities of the choice.

Shapes: N rows, V vocabulary, K leading candidates. Whatever decides a random draw is integer
arithmetic (hash, sums of weights), so that neither the batch nor the order of a reduction changes
it; knows nothing of requests.
"""

import torch

NUM_LEADING = 1024
CHUNK_LOGITS = 1 << 20
_WEIGHT_ONE = 1 << 40


def greedy_tokens(logits: torch.Tensor) -> torch.Tensor:
    """The likeliest token of each row, the lowest id among equals. logits [N, V] -> ids int64
    [N].
    """
    return logits.argmax(-1)


def counter_uniform(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Uniform numbers in [0, 1) that depend on (seed, position) alone. int64 [N], int64 [N] ->
    float64 [N].

    Two rounds of the SplitMix64 finalizer (Steele, Lea and Flood, 2014; constants of Stafford's
    variant 13), one over the seed and one over the position added to it. int64 products and sums
    wrap modulo 2^64 on every device, which equals the unsigned arithmetic of the paper bit by bit;
    its unsigned right shifts are made of signed ones by masking the copies of the sign bit. The
    upper 53 bits give the number.
    """
    state = _mix(seeds + _GAMMA) + (positions + 1) * _GAMMA
    return _shift_right(_mix(state), 11).double() * 2.0**-53


def sample_tokens(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    uniform: torch.Tensor,
) -> torch.Tensor:
    """Draw one token per row. logits [N, V] floating, -inf is never drawn -> ids int64 [N].

    temperature (above 0), top_p, min_p, uniform: float64 [N]; top_k: int64 [N], V or more is off;
    all on the logits' device. Order of the filters: temperature, top_k, top_p over what is left,
    min_p as a share of the likeliest token's probability (the same before and after renormalizing).
    The likeliest token always stays.

    Tokens are ordered by falling logit, equal ones by rising id, and the draw is the inverse CDF
    over that order. Probabilities are integers, 2^40 for the likeliest token, whose sums do not
    depend on the order of addition; a token of less than 2^-40 of the likeliest one's probability
    is never drawn. Most draws end among the NUM_LEADING likeliest tokens, only rows that do not are
    sorted whole: both ways give the same token.

    Working memory is up to 90 bytes for each of CHUNK_LOGITS logits or of one row, whichever is
    more.
    """
    num_rows = max(1, CHUNK_LOGITS // logits.shape[1])
    columns = torch.stack([temperature, top_p, min_p, uniform]).unsqueeze(-1)
    limits = top_k.clamp(max=logits.shape[1]).unsqueeze(-1)
    ids = [
        _sample_chunk(
            logits[start : start + num_rows].float(),
            columns[:, start : start + num_rows],
            limits[start : start + num_rows],
        )
        for start in range(0, len(logits), num_rows)
    ]
    return torch.cat(ids)


def token_logprobs(
    logits: torch.Tensor, ids: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """log_softmax in float32 of raw logits [N, V] at ids [N], and its `num_top` largest entries.

    Returns the chosen tokens' float32 [N], the largest float32 [N, num_top] in falling order, their
    ids int64.
    """
    logprobs = logits.float().log_softmax(-1)
    top, top_ids = logprobs.topk(num_top, dim=-1)
    return logprobs.gather(-1, ids.unsqueeze(-1)).squeeze(-1), top, top_ids


# ---------------------------------------------------------------------- random draws


def _sample_chunk(
    logits: torch.Tensor, columns: torch.Tensor, limits: torch.Tensor
) -> torch.Tensor:
    vocab_size = logits.shape[1]
    num_leading = min(NUM_LEADING, vocab_size)
    keys = _order_keys(logits)
    leading = keys.topk(num_leading, dim=-1).values
    cut_by_k = limits <= num_leading
    total = torch.zeros_like(limits)
    if not bool(cut_by_k.all()):
        peak = logits.amax(-1, keepdim=True).double()
        total = _weights(logits, peak, columns[0]).sum(-1, keepdim=True).clamp_min_(_WEIGHT_ONE)
    ids, decided = _draw(logits, leading, columns, limits, total)
    if not bool(decided.all()):
        rest = (~decided).nonzero().squeeze(-1)
        ranked = keys[rest].sort(dim=-1, descending=True).values
        ids[rest], _ = _draw(logits[rest], ranked, columns[:, rest], limits[rest], total[rest])
    return ids


def _draw(
    logits: torch.Tensor,
    ranked: torch.Tensor,
    columns: torch.Tensor,
    limits: torch.Tensor,
    total: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw from the candidates `ranked` [n, K] (order keys, falling); ids [n], and which of them
    are certain.

    `limits` is top_k [n, 1] and `total` the weight of the whole row, looked at if top_k reaches
    past K.
    """
    temperature, top_p, min_p, uniform = columns.unbind()
    num_ranked, vocab_size = ranked.shape[1], logits.shape[1]
    candidates = vocab_size - 1 - (ranked & 0xFFFFFFFF)
    values = logits.gather(-1, candidates)
    weights = _weights(values, values[:, :1].double(), temperature)
    weights[:, 0] = _WEIGHT_ONE
    weights.masked_fill_(torch.arange(num_ranked, device=logits.device) >= limits, 0)
    cumulative = weights.cumsum(-1)

    all_seen = limits <= num_ranked
    total = torch.where(all_seen, cumulative[:, -1:], total)
    kept = (cumulative - weights) < top_p * total
    kept &= weights >= min_p * _WEIGHT_ONE
    num_kept = kept.sum(-1, keepdim=True)
    unfiltered = (limits == vocab_size) & (top_p >= 1.0) & (min_p <= 0.0)
    mass = cumulative.gather(-1, num_kept - 1)
    mass = torch.where(unfiltered, total, mass)
    end_seen = all_seen | unfiltered | ((limits == vocab_size) & (num_kept < num_ranked))

    # Below mass also where it is rounded to a double, for uniform is at most 1 - 2^-53.
    target = (uniform * mass).long()
    index = (cumulative <= target).sum(-1, keepdim=True)
    decided = end_seen & (index < num_ranked)
    return candidates.gather(-1, index.clamp_max_(num_ranked - 1)).squeeze(-1), decided.squeeze(-1)


def _order_keys(logits: torch.Tensor) -> torch.Tensor:
    """Distinct int64 keys [n, V] in the order of the logits, the lower id above among equal ones.

    Upper half: the float's bits, made monotone as a signed integer; lower half: V - 1 - id.
    """
    bits = (logits + 0.0).view(torch.int32)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = bits.to(torch.int64).bitwise_left_shift_(32)
    return keys.bitwise_or_(torch.arange(logits.shape[1] - 1, -1, -1, device=logits.device))


def _weights(logits: torch.Tensor, peak: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Integer weights [n, K]: 2^40 at the peak, exp((logit - peak) / temperature) of it elsewhere,
    rounded down.
    """
    scaled = logits.double().sub_(peak).div_(temperature).exp_()
    return scaled.mul_(_WEIGHT_ONE).nan_to_num_(0.0).to(torch.int64)


# ---------------------------------------------------------------------- 64-bit hash


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


_GAMMA = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


def _shift_right(x: torch.Tensor, count: int) -> torch.Tensor:
    return (x >> count) & ((1 << (64 - count)) - 1)


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)
