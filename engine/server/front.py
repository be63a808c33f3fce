"""What the front end knows beside the engine process: tokenizer, names, defaults, keys, roots.

Made from the config alone; reads the checkpoint's texts, never its weights.
"""

from dataclasses import dataclass
from functools import lru_cache

from engine.config import EngineConfig, SamplingConfig
from engine.server.auth import Keys
from engine.server.paths import AdapterRoots
from engine.text.tokenizer import Tokenizer
from engine.weights.checkpoint import open_checkpoint


@dataclass(frozen=True, slots=True, eq=False)
class FrontEnd:
    """`model_name`: what clients call the base. `resolve`: load unknown adapters by name from the
    roots.
    """

    tokenizer: Tokenizer
    model_name: str
    sampling: SamplingConfig
    keys: Keys
    roots: AdapterRoots
    resolve: bool = False

    @classmethod
    def open(cls, config: EngineConfig) -> "FrontEnd":
        """Raises ConfigError, ModelError."""
        keys = Keys.from_config(config.server)
        roots = AdapterRoots(config.server.adapter_roots)
        checkpoint = open_checkpoint(config.model)
        return cls(
            tokenizer=Tokenizer.from_checkpoint(checkpoint),
            model_name=config.server.served_model_name or checkpoint.name,
            sampling=config.sampling,
            keys=keys,
            roots=roots,
            resolve=config.lora.resolve,
        )

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes that a token stands for; none without a tokenizer."""
        return _token_bytes(self.tokenizer, token_id)

    def token_text(self, token_id: int) -> str:
        """The same as text, U+FFFD for what is no UTF-8 by itself."""
        return self.token_bytes(token_id).decode("utf-8", "replace")


@lru_cache(maxsize=1 << 16)
def _token_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    return tokenizer.token_bytes(token_id) if tokenizer.available else b""
