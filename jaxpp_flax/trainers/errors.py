"""The trainer's errors and warnings: each message names the fault, its place, and the remedy."""

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
    """A loss writes statistics of a batch, as BatchNorm does: each comes from one microbatch only."""


class DataPositionError(ValueError):
    """The data cannot be moved to the position of a checkpoint."""


class LossError(TypeError):
    """A loss function returned a value that is not a loss."""


class MeshError(ValueError):
    """Devices, mesh and stages do not fit each other."""


class ModelError(ValueError):
    """A model cannot be trained in its present form."""


class NonFiniteLossError(FloatingPointError):
    """A loss, or a parameter to save, is not finite."""
