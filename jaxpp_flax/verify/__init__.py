"""Is my pipeline right? One step as a pipeline and under plain `jax.jit`: the first block and leaf that differ."""

from jaxpp_flax.verify.errors import ReplayError, VerifyError
from jaxpp_flax.verify.parting import Parting, bisect
from jaxpp_flax.verify.replay import Replay
from jaxpp_flax.verify.report import Choice, Report, Row
from jaxpp_flax.verify.verification import verify

__all__ = ["Choice", "Parting", "Replay", "ReplayError", "Report", "Row", "VerifyError", "bisect", "verify"]
