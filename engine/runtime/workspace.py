"""The reserve for what a step allocates and frees again: activations, attention operands, logits.

On a card the largest step is run and measured; elsewhere it is estimated from the layers' shapes.
"""

from engine.config import KernelsConfig, MemoryConfig, SchedulerConfig
from engine.device import Device
from engine.kernels.sampling import CHUNK_LOGITS
from engine.lora.manager import LoRAManager
from engine.memory.ledger import MemoryLedger
from engine.models.decoder import DecoderModel
from engine.runtime.attention_space import AttentionSpace
from engine.runtime.step_probe import StepProbe

# Working memory of a random draw, for each logit that is looked at together.
SAMPLING_BYTES = 90


class Workspace:
    """Holds the receipt of the largest step's working memory."""

    def __init__(
        self,
        cfg: SchedulerConfig,
        paging: MemoryConfig,
        kernels: KernelsConfig,
        model: DecoderModel,
        lora_manager: LoRAManager,
        attention_space: AttentionSpace,
        device: Device,
        ledger: MemoryLedger,
    ) -> None:
        """Measure and reserve. Raises CapacityError."""
        if device.dry or device.host_visible:
            num_bytes, how = step_bytes(cfg, model), "estimated"
        else:
            probe = StepProbe(cfg, paging, kernels, model, lora_manager, attention_space, device)
            num_bytes, how = probe.measured_bytes(), "measured"
        what = (
            f"one step of {cfg.max_step_tokens} tokens, {cfg.max_running_requests} rows of logits, "
            f"{how}"
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
