"""Log-probabilities of a prompt's own tokens, computed as its chunks pass through the model."""

from collections.abc import Callable

import torch

from engine.kernels.sampling import token_logprobs
from engine.runtime.request import ScheduledRow
from engine.runtime.sampler import TokenLogprobs

# Rows of logits that are held at once, beside those of the rows that sample.
MAX_LOGIT_ROWS = 16


def prompt_logprobs(
    row: ScheduledRow, hidden: torch.Tensor, logits: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[TokenLogprobs, ...]:
    """For each new token of `row` that another prompt token follows: that one's log-probability
    and the likeliest ones instead of it.

    hidden [new, hidden]; `logits` takes rows of it to [rows, vocab].
    """
    request = row.request
    num_top = request.params.prompt_logprobs
    assert num_top is not None
    first = request.num_computed
    targets = request.prompt_ids[first + 1 : first + 1 + row.num_new]
    found: list[TokenLogprobs] = []
    for start in range(0, len(targets), MAX_LOGIT_ROWS):
        own = targets[start : start + MAX_LOGIT_ROWS]
        ids = torch.tensor(own, device=hidden.device)
        part = logits(hidden[start : start + len(own)])
        chosen, top, top_ids = token_logprobs(part, ids, min(num_top, part.shape[1]))
        for value, values, top_of in zip(
            chosen.tolist(), top.tolist(), top_ids.tolist(), strict=True
        ):
            found.append(TokenLogprobs(value, tuple(zip(top_of, values, strict=True))))
    return tuple(found)
