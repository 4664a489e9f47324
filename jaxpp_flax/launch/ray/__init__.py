from jaxpp_flax.launch.ray.function import run

__all__ = ["run"]
