"""The adapters between the trainer and a model, NNX or Linen."""
