"""Is my pipeline right? Compare a step with the same step under plain `jax.jit`, and find the first difference."""

from jaxpp_flax.verify.errors import ReplayError, VerifyError
from jaxpp_flax.verify.parting import Parting, bisect
from jaxpp_flax.verify.replay import Replay
from jaxpp_flax.verify.report import Choice, Report, Row
from jaxpp_flax.verify.verification import verify

__all__ = ["Choice", "Parting", "Replay", "ReplayError", "Report", "Row", "VerifyError", "bisect", "verify"]
