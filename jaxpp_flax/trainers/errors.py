"""What the trainer raises, and what it warns of: each names what is wrong, where, and what to change."""

__all__ = [
    "BatchError",
    "BatchStatisticsWarning",
    "DataPositionError",
    "LossError",
    "MeshError",
    "ModelError",
    "NonFiniteLossError",
]


class BatchError(ValueError):
    """A batch does not fit the microbatches, the mesh, or itself."""


class BatchStatisticsWarning(UserWarning):
    """A loss writes statistics of a batch, as BatchNorm does: they are those of one microbatch."""


class DataPositionError(ValueError):
    """The data cannot be brought to where a checkpoint was written."""


class LossError(TypeError):
    """A loss function returned something that is no loss."""


class MeshError(ValueError):
    """Devices, mesh and stages do not fit each other."""


class ModelError(ValueError):
    """A model cannot be trained as it is."""


class NonFiniteLossError(FloatingPointError):
    """A loss, or a parameter that is to be saved, is not finite."""
