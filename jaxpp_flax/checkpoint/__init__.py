"""Checkpoints that any layout can restore: ordinary Orbax checkpoints of trees with `MpmdArray`s, by logical paths."""

from jaxpp_flax.checkpoint.errors import (
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CheckpointSaveError,
    CorruptCheckpointError,
    DirectoryInUseError,
    UnfinishedCheckpointError,
)
from jaxpp_flax.checkpoint.format.handler import MpmdArrayHandler, register
from jaxpp_flax.checkpoint.plain_models import load_linen, load_nnx
from jaxpp_flax.checkpoint.reading import StoredLeaf, abstract_state, leaves_of, restore
from jaxpp_flax.checkpoint.writing import save

__all__ = [
    "CheckpointError",
    "CheckpointMismatchError",
    "CheckpointNotFoundError",
    "CheckpointSaveError",
    "CorruptCheckpointError",
    "DirectoryInUseError",
    "MpmdArrayHandler",
    "StoredLeaf",
    "UnfinishedCheckpointError",
    "abstract_state",
    "leaves_of",
    "load_linen",
    "load_nnx",
    "register",
    "restore",
    "save",
]
