"""Multi-LoRA inference engine: one base model in memory, many adapters mixed in one batch."""

__version__ = "0.1.0"
