"""Changing the logits of some rows before a token is chosen, in plain torch and in place.

Shapes: N rows, V vocabulary, K distinct (row, token) pairs. Knows nothing of requests.
"""

import torch
from torch.nn import functional

_BITS_PER_WORD = 32


def num_mask_words(vocab_size: int) -> int:
    """int32 words of a bit mask over `vocab_size` tokens."""
    return -(-vocab_size // _BITS_PER_WORD)


def keep_allowed(logits: torch.Tensor, bits: torch.Tensor) -> None:
    """Set to -inf what a row's mask does not allow. logits float32 [N, V], finite or -inf.

    bits int32 [N, W >= ceil(V / 32)]: token t is bit t % 32, the lowest first, of word t // 32;
    bits past V are not looked at. Devices are little-endian.
    """
    num_rows, vocab_size = logits.shape
    device = logits.device
    octets = bits.view(torch.uint8).to(torch.int32)
    is_set = (torch.arange(256, device=device).unsqueeze(-1) >> torch.arange(8, device=device)) & 1
    # What is added for each of an octet's 8 tokens: one look-up is much faster than 8 tests.
    table = torch.zeros((256, 8), device=device).masked_fill_(is_set == 0, -torch.inf)
    logits += functional.embedding(octets, table).view(num_rows, -1)[:, :vocab_size]


def ban_tokens(logits: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor) -> None:
    """Set single tokens to -inf. logits [N, V] floating; rows, ids int64 [K]."""
    logits[rows, ids] = -torch.inf


def add_bias(
    logits: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor, bias: torch.Tensor
) -> None:
    """Add to single logits. logits float32 [N, V]; rows, ids int64 [K]; bias float32 [K]."""
    logits[rows, ids] += bias


def penalize(
    logits: torch.Tensor,
    rows: torch.Tensor,
    ids: torch.Tensor,
    counts: torch.Tensor,
    penalties: torch.Tensor,
) -> None:
    """Make tokens that came before less likely. logits float32 [N, V]; rows, ids int64 [K].

    counts float32 [K]: how often the token is in the answer, 0 for one of the prompt only.
    penalties float32 [N, 3], a row's repetition, presence and frequency. Repetition divides a
    positive logit and multiplies another one (Keskar et al., 2019, CTRL, with the sign taken care
    of); then presence is taken off once where the count is not 0, and frequency times the count.
    """
    repetition, presence, frequency = penalties[rows].unbind(-1)
    values = logits[rows, ids]
    values = torch.where(values > 0, values / repetition, values * repetition)
    logits[rows, ids] = values - presence * (counts > 0) - frequency * counts


def finite_peak(logits: torch.Tensor) -> torch.Tensor:
    """Whether a row's largest logit is a finite number: no nan, no +inf, not all -inf. logits
    [N, V] floating -> bool [N].
    """
    return logits.amax(-1).isfinite()
