"""The reserve for what a step allocates and frees again: activations, attention operands, logits.

Estimated from the layers' shapes at the largest step; nothing is allocated here.
"""

from engine.config import SchedulerConfig
from engine.kernels.sampling import CHUNK_LOGITS
from engine.memory.ledger import MemoryLedger
from engine.models.decoder import DecoderModel

# Working memory of a random draw, for each logit that is looked at together.
SAMPLING_BYTES = 90


class Workspace:
    """Holds the receipt of the largest step's working memory."""

    def __init__(self, cfg: SchedulerConfig, model: DecoderModel, ledger: MemoryLedger) -> None:
        num_bytes = step_bytes(cfg, model)
        what = (
            f"one step of {cfg.max_step_tokens} tokens, {cfg.max_running_requests} rows of logits"
        )
        self.receipt = ledger.reserve("workspace", num_bytes, what, transient=True)


def step_bytes(cfg: SchedulerConfig, model: DecoderModel) -> int:
    """Bytes that are live at once in the largest step.

    Per token: residual, normed input, and one layer's widest pair of input and output (twice, for
    temporaries). Per row that samples: logits in the model's dtype and in float32. Attention: keys
    and values of one layer gathered for the longest context.
    """
    size = model.dtype.itemsize
    spec = model.spec
    widest = max(linear.in_features + sum(linear.widths) for linear in model.linears())
    activations = cfg.max_step_tokens * (2 * spec.hidden_size + 2 * widest) * size
    logits = cfg.max_running_requests * spec.vocab_size * (size + 4)
    kv_heads, head_dim, _ = model.kv_shape
    gathered = 2 * model.max_model_len * kv_heads * head_dim * size
    drawn = min(cfg.max_running_requests * spec.vocab_size, max(CHUNK_LOGITS, spec.vocab_size))
    sampling = SAMPLING_BYTES * drawn
    return activations + logits + gathered + sampling
