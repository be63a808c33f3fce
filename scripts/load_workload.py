"""What a load run asks for: when requests come, which adapter each names, how long they are.

Knows neither HTTP nor the server. Popularity of adapter i of n, 0 being the most popular:
  uniform    P(i) = 1 / n
  zipf       P(i) = (i + 1)^-s / sum of (j + 1)^-s over j < n
  slora      P(i) = ((i + 1) / n)^a - (i / n)^a, as S-LoRA draws it (floor(n u^(1/a)) for uniform
             u): a = 1 is uniform, below 1 the first are favoured
Arrivals are Poisson: gaps are exponential with mean 1 / rate.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

POPULARITIES = ("uniform", "zipf", "slora")
TEXT = (
    "the sea is blue and old ships sail when wind comes from north a man who can read stars knows "
    "where land will be but no one asks him for they trust more in gold than light so he sings "
    "at night to waves that never sleep"
)
WORDS = TEXT.split()


def popularity(kind: str, num_adapters: int, exponent: float) -> list[float]:
    """P(i) of each adapter, the most popular first."""
    n = num_adapters
    if kind == "uniform":
        return [1 / n] * n
    if kind == "zipf":
        weights = [(i + 1) ** -exponent for i in range(n)]
        return [weight / sum(weights) for weight in weights]
    assert kind == "slora", kind
    return [((i + 1) / n) ** exponent - (i / n) ** exponent for i in range(n)]


@dataclass(frozen=True)
class Ask:
    """One request: a greedy completion of `prompt` by `model`, in exactly `max_tokens` tokens."""

    model: str
    prompt: str
    max_tokens: int


@dataclass(frozen=True)
class Lengths:
    """Words of a prompt and tokens of an answer, drawn uniformly from inclusive ranges."""

    prompt_words: tuple[int, int]
    output_tokens: tuple[int, int]


class Workload:
    """Draws asks from `num_prompts` prompts, so that answers can be compared with solo runs.

    `base_share` of them name the base model.
    """

    def __init__(
        self,
        base: str,
        adapters: Sequence[str],
        lengths: Lengths,
        *,
        kind: str = "zipf",
        exponent: float = 1.0,
        base_share: float = 0.1,
        num_prompts: int = 16,
        seed: int = 0,
    ) -> None:
        self._draw = random.Random(seed)
        self._base, self._adapters = base, list(adapters)
        self._base_share = base_share if self._adapters else 1.0
        weights = popularity(kind, len(self._adapters), exponent) if self._adapters else []
        self._cumulative = list(accumulate(weights))
        self._prompts = [
            (self._prompt(lengths), self._draw.randint(*lengths.output_tokens))
            for _ in range(num_prompts)
        ]

    def next(self) -> Ask:
        prompt, max_tokens = self._draw.choice(self._prompts)
        return Ask(self._model(), prompt, max_tokens)

    def gaps(self, rate: float) -> Iterator[float]:
        """Seconds between arrivals of a Poisson process, for ever."""
        while True:
            yield self._draw.expovariate(rate)

    def happens(self, probability: float) -> bool:
        return self._draw.random() < probability

    def between(self, low: int, high: int) -> int:
        return self._draw.randint(low, high)

    def one_of(self, names: Sequence[str]) -> str:
        return self._draw.choice(names)

    def _model(self) -> str:
        if self.happens(self._base_share):
            return self._base
        return self._draw.choices(self._adapters, cum_weights=self._cumulative)[0]

    def _prompt(self, lengths: Lengths) -> str:
        return " ".join(self._draw.choices(WORDS, k=self._draw.randint(*lengths.prompt_words)))
