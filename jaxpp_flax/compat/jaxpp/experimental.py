"""`jaxpp.experimental`: its module `mpmd` is `jaxpp_flax.tasks`."""

from jaxpp_flax import tasks as mpmd

__all__ = ["mpmd"]
