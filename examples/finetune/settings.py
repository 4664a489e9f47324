"""The settings of a fine-tuning run. `finetune.py --help` shows them: the command line is made from this class."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Settings:
    model: Path
    """A directory with config.json, tokenizer.json and safetensors, as Hugging Face writes them."""
    output: Path
    """The directory of this run: its checkpoints, and at the end the new model."""
    text: Path | None = None
    """A directory of .txt files, each a document, and .jsonl files, each line an object with "text". By default, the
    docstrings of Python's standard library."""

    lora_rank: int = 8
    """The rank of the adapters (LoRA), which are trained alone; 0 trains all weights."""
    lora_alpha: float = 16.0
    """The scale of the adapters, times their rank."""
    lora_layers: tuple[str, ...] = ("blocks/*",)
    """Globs on the paths of the linear layers that get adapters."""

    steps: int = 200
    batch_size: int = 16
    """Rows in a batch: a multiple of microbatches x data_parallel."""
    length: int = 256
    """Tokens in a row."""
    learning_rate: float = 2e-4
    """The peak, after a tenth of the steps; then it falls to 0 as a cosine. For all weights, 1e-5 is usual."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """The type of the computation. Weights are float32."""
    remat: bool = False
    """Recompute each block in backward: less memory, more time."""
    seed: int = 0

    stages: int = 2
    """Stages of the pipeline."""
    data_parallel: int = 1
    """Devices that share the rows of each stage."""
    microbatches: int = 4
    """Parts of a batch."""
    schedule: str = "1f1b"

    eval_every: int = 50
    eval_batches: int = 8
    """Batches of held-out documents (every tenth one is held out)."""
    save_every: int = 50
    """Steps between two checkpoints. Start the same command again to go on from the latest one."""
    prompts: tuple[str, ...] = ("Return the", "This module")
    """Texts that the new model continues at the end."""
    max_new_tokens: int = 32

    @property
    def num_devices(self) -> int:
        return self.stages * self.data_parallel
