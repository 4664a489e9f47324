"""Groups of options of `PipelineTrainer`: each group is a small frozen dataclass that checks its values."""

from jaxpp_flax.trainers.options.checkpoints import Checkpoints
from jaxpp_flax.trainers.options.logging import Logging
from jaxpp_flax.trainers.options.memory import Memory
from jaxpp_flax.trainers.options.mesh import MeshOptions
from jaxpp_flax.trainers.options.precision import Precision
from jaxpp_flax.trainers.options.training import Inference, Training

__all__ = [
    "Checkpoints",
    "Inference",
    "Logging",
    "Memory",
    "MeshOptions",
    "Precision",
    "Training",
]
