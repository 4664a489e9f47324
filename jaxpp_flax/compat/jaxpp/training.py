"""`jaxpp.training`."""

from jaxpp_flax.api import Add, Concat, Max, treduce, treduce_i

__all__ = ["Add", "Concat", "Max", "treduce", "treduce_i"]
