"""The trainer's errors and warnings: each message says what is wrong, where, and what to change."""

from jaxpp_flax.error_codes import documented

__all__ = [
    "BatchError",
    "BatchStatisticsWarning",
    "DataPositionError",
    "LossError",
    "MeshError",
    "MicrobatchLossWarning",
    "MicrobatchStateWarning",
    "ModelError",
    "NonFiniteLossError",
    "PrecisionWarning",
    "UnusedParametersWarning",
]


@documented("JPF201")
class BatchError(ValueError):
    """A batch does not fit the microbatches or the mesh, or its leaves do not fit each other."""


@documented("JPF901")
class BatchStatisticsWarning(UserWarning):
    """A loss writes batch statistics, as BatchNorm does: they are computed from one microbatch, not the whole batch."""


@documented("JPF202")
class DataPositionError(ValueError):
    """The data cannot continue at the position that a checkpoint holds."""


@documented("JPF102")
class LossError(TypeError):
    """A loss function returned a value that is not a loss."""


@documented("JPF103")
class MeshError(ValueError):
    """The devices, the mesh and the stages do not fit each other."""


@documented("JPF904")
class MicrobatchLossWarning(UserWarning):
    """A loss is not a mean over equally weighted examples: a sum, a masked mean, or one that mixes examples."""


@documented("JPF908")
class MicrobatchStateWarning(UserWarning):
    """A loss moves state in each microbatch that plain Flax moves once a step, such as a moving average."""


@documented("JPF101")
class ModelError(ValueError):
    """A model cannot be trained in its present form."""


@documented("JPF104")
class NonFiniteLossError(FloatingPointError):
    """A loss, or a parameter to save, is not finite."""


@documented("JPF906")
class PrecisionWarning(UserWarning):
    """Most of a model computes in a wider type than `precision=` says, because its layers set their own `dtype`."""


@documented("JPF905")
class UnusedParametersWarning(UserWarning):
    """A loss does not depend on some of the trained parameters: their gradients are zero."""
