"""Writes a tiny random Llama as Hugging Face does, to try the recipe without a download.

python examples/finetune/make_tiny_model.py tiny
"""

from __future__ import annotations

import sys
from pathlib import Path

from data import read_documents
from flax import nnx
from model import NAMES, Llama, LlamaConfig
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from jaxpp_flax.pretrained import export_pretrained

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 512, "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6, "max_position_embeddings": 2048, "tie_word_embeddings": False, "dtype": "float32",
    "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip


def make_tokenizer(documents: list[str], vocabulary: int) -> Tokenizer:
    """Byte pairs of the text, and a token before each document."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<begin>", "<end>"]
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(documents, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<begin> $A", special_tokens=[("<begin>", 0)])
    return tokenizer


def make_tiny_model(directory: Path, text: Path | None = None) -> Path:
    tokenizer = make_tokenizer(read_documents(text), CONFIG["vocab_size"])
    model = Llama(LlamaConfig.from_huggingface(CONFIG), rngs=nnx.Rngs(0))
    export_pretrained(nnx.state(model, nnx.Param), directory, map=NAMES, config=CONFIG)
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    print(make_tiny_model(Path(sys.argv[1])))
