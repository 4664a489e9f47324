"""A model as the trainer sees it, NNX or Linen."""
