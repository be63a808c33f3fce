"""From logits to tokens for the rows of one batch: greedy, random or both, log-probabilities for
rows that ask.

Owns how rows are grouped; the arithmetic is in `engine.kernels.sampling`, what changes logits
before in `engine.runtime.logits`. A row's token depends on its own logits, parameters, state, seed
and position, never on the rest of the batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from engine.device import Device
from engine.kernels.logit_changes import finite_peak
from engine.kernels.sampling import counter_uniform, greedy_tokens, sample_tokens, token_logprobs
from engine.runtime.logits import LogitsState, process_logits
from engine.runtime.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """Parameters of one row of logits, its random stream (0 <= seed < 2^63) and the new token's
    position; `state` if the logits are to be changed first.
    """

    params: SamplingParams
    seed: int
    position: int
    state: LogitsState | None = None


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

    A row's token means nothing where not `finite`, its raw logits are out of range, or not `open`,
    no token of finite logit is left to choose from: bool [N] on the device.
    """

    token_ids: torch.Tensor
    logprobs: tuple[TokenLogprobs | None, ...]
    finite: torch.Tensor
    open: torch.Tensor


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
        finite = finite_peak(logits)
        states = {index: row.state for index, row in enumerate(rows) if row.state is not None}
        if not states:
            token_ids, is_open = self._choose(logits, rows), finite
        else:
            token_ids, is_open = self._choose_with_states(logits, rows, states)
        return SampleOutput(token_ids, self._logprobs(logits, token_ids, rows), finite, is_open)

    def _choose_with_states(
        self,
        logits: torch.Tensor,
        rows: Sequence[SamplingRow],
        states: Mapping[int, LogitsState],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens int64 [N], and whether there was one to choose, bool [N]. Rows without a state
        never leave their own logits.
        """
        plain = [index for index in range(len(rows)) if index not in states]
        with_state = self._tensor(list(states), torch.int64)
        changed = logits[with_state].float()
        process_logits(changed, list(states.values()))
        token_ids = torch.zeros(len(rows), dtype=torch.int64, device=logits.device)
        is_open = torch.ones(len(rows), dtype=torch.bool, device=logits.device)
        token_ids[with_state] = self._choose(changed, [rows[index] for index in states])
        is_open[with_state] = finite_peak(changed)
        if plain:
            where = self._tensor(plain, torch.int64)
            token_ids[where] = self._choose(logits[where], [rows[index] for index in plain])
        return token_ids, is_open

    def _choose(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
        drawn = [index for index, row in enumerate(rows) if not row.params.greedy]
        if len(drawn) == len(rows):
            return self._draw(logits, rows)
        token_ids = greedy_tokens(logits)
        if drawn:
            where = self._tensor(drawn, torch.int64)
            token_ids[where] = self._draw(logits[where], [rows[index] for index in drawn])
        return token_ids

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
