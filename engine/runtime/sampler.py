"""From logits to tokens for the rows of one batch: greedy, random or both, log-probabilities for
rows that ask.

Owns how rows are grouped; the arithmetic is in `engine.kernels.sampling`. A row's token depends on
its own logits, parameters, seed and position, never on the rest of the batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.device import Device
from engine.kernels.sampling import counter_uniform, greedy_tokens, sample_tokens, token_logprobs
from engine.runtime.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """Parameters of one row of logits, its random stream (0 <= seed < 2^63) and the new token's
    position.
    """

    params: SamplingParams
    seed: int
    position: int


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """log_softmax of the raw logits: the chosen token's, and (id, value) of the likeliest ones in
    falling order.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class SampleOutput:
    """`token_ids` int64 [N] on the device; per row the log-probabilities, None where they were not
    asked for.
    """

    token_ids: torch.Tensor
    logprobs: tuple[TokenLogprobs | None, ...]


class Sampler:
    """Chooses one token per row."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def sample(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> SampleOutput:
        """logits [N, V] in any floating dtype, row i for `rows[i]`; they are read only.

        `token_ids` is left on the device; what log-probabilities rows ask for comes to the host in
        one copy.
        """
        assert len(logits) == len(rows), f"{len(logits)} rows of logits for {len(rows)} rows"
        drawn = [index for index, row in enumerate(rows) if not row.params.greedy]
        if len(drawn) == len(rows):
            token_ids = self._draw(logits, rows)
        else:
            token_ids = greedy_tokens(logits)
            if drawn:
                where = self._tensor(drawn, torch.int64)
                token_ids[where] = self._draw(logits[where], [rows[index] for index in drawn])
        return SampleOutput(token_ids, self._logprobs(logits, token_ids, rows))

    def _draw(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
        params = [row.params for row in rows]
        vocab_size = logits.shape[1]
        top_k = [min(one.top_k, vocab_size) or vocab_size for one in params]
        counters = [[row.seed for row in rows], [row.position for row in rows], top_k]
        shares = [[float(getattr(one, name)) for one in params] for name in _SHARES]
        seeds, positions, limits = self._tensor(counters, torch.int64)
        temperature, top_p, min_p = self._tensor(shares, torch.float64)
        uniform = counter_uniform(seeds, positions)
        return sample_tokens(logits, temperature, limits, top_p, min_p, uniform)

    def _logprobs(
        self, logits: torch.Tensor, token_ids: torch.Tensor, rows: Sequence[SamplingRow]
    ) -> tuple[TokenLogprobs | None, ...]:
        asked = {
            index: row.params.logprobs
            for index, row in enumerate(rows)
            if row.params.logprobs is not None
        }
        found: list[TokenLogprobs | None] = [None] * len(rows)
        if not asked:
            return tuple(found)
        where = self._tensor(list(asked), torch.int64)
        num_top = min(max(asked.values()), logits.shape[1])
        chosen, top, top_ids = token_logprobs(logits[where], token_ids[where], num_top)
        # float64 holds both exactly, so that one copy brings values and ids.
        table = torch.cat([chosen.unsqueeze(-1).double(), top.double(), top_ids.double()], dim=-1)
        for (index, count), (logprob, *rest) in zip(asked.items(), table.tolist(), strict=True):
            pairs = zip(map(int, rest[num_top:]), rest[:num_top], strict=True)
            found[index] = TokenLogprobs(logprob, tuple(pairs)[:count])
        return tuple(found)

    def _tensor(self, values: Sequence[object], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self._device.torch_device)


_SHARES = ("temperature", "top_p", "min_p")
