"""`PipelineStage` for NNX modules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from flax import nnx

from jaxpp_flax.layers.marking import remedy_for
from jaxpp_flax.layers.remat import check_remat
from jaxpp_flax.layers.stage_class import mark_call, register_metaclass, stage_class

__all__ = ["PipelineStage"]

M = TypeVar("M")


class StageMeta(type(nnx.Module)):
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls is PipelineStage:
            return _wrap(*args, **kwargs)
        return super().__call__(*args, **kwargs)


register_metaclass(StageMeta)


class PipelineStage(nnx.Module, metaclass=StageMeta):
    """A module with a marked result: the model may be cut into stages after this module.

    Wrap a module, `PipelineStage(Block(...), name="block_0")`, or write a subclass, `class Block(PipelineStage)`.
    Wrapping returns the same module with a changed class: a subclass of both its old class and `PipelineStage`. So the
    paths of parameters, the tree of states and checkpoints are the same as in the unmarked model. Outside a pipeline,
    the results are the same too: the marks in the jaxpr do nothing, and `remat` recomputes as well. If another model
    shares the module, the module is marked there as well, because it is the same object.

    Args:
      module: the NNX module to mark; it is changed in place and returned.
      name: the name of the block, for assignments by name and for messages (you can also set the attribute
        `stage_name`). Default: the name of the class, numbered in order of execution if it occurs several times.
      remat: "full" recomputes the block in the backward pass, so that only the block's input is kept; a
        `jax.checkpoint` policy selects more values to keep. Default: None, which keeps all values (also settable as
        the attribute `stage_remat`, of the instance or of a subclass).

    Raises:
      TypeError: if `module` is a class, a Linen module, not a module, or has no `__call__`; if `remat` is another
        value.

    Example:
      >>> from flax import nnx
      >>> import jax.numpy as jnp
      >>> class MLP(nnx.Module):
      ...     def __init__(self, rngs):
      ...         self.layers = nnx.List([PipelineStage(nnx.Linear(4, 4, rngs=rngs)) for _ in range(2)])
      ...     def __call__(self, x):
      ...         for layer in self.layers:
      ...             x = layer(x)
      ...         return x
      >>> model = MLP(nnx.Rngs(0))
      >>> isinstance(model.layers[0], nnx.Linear), isinstance(model.layers[0], PipelineStage)
      (True, True)
      >>> model(jnp.ones((1, 4))).shape
      (1, 4)
      >>> class Block(PipelineStage):
      ...     def __init__(self, rngs):
      ...         self.linear = nnx.Linear(4, 4, rngs=rngs)
      ...     def __call__(self, x):
      ...         return self.linear(x)
      >>> Block(nnx.Rngs(0))(jnp.ones((1, 4))).shape
      (1, 4)
    """

    stage_name = None
    stage_remat = None

    if TYPE_CHECKING:

        def __new__(cls, module: M, name: str | None = None, remat: Any = None) -> M: ...

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        mark_call(cls)

    @classmethod
    def _stage_class_of(cls, module_class: Any, name: str | None = None, remat: Any = None) -> type:
        return stage_class(PipelineStage, module_class, pytree=module_class._pytree__is_pytree)


def _wrap(module: Any, name: str | None = None, remat: Any = None) -> Any:
    check_remat(remat, "PipelineStage")
    if not isinstance(module, nnx.Module):
        raise TypeError(_refusal(module))
    if not any("__call__" in vars(base) for base in type(module).__mro__):
        raise TypeError(
            f"PipelineStage got a {type(module).__name__}, which has no `__call__` to mark. "
            "Mark its results in your model: `x = mark_stage_end(x)`, or decorate a method with @pipeline_stage."
        )
    if not isinstance(module, PipelineStage):
        object.__setattr__(module, "__class__", PipelineStage._stage_class_of(type(module)))
    if name is not None:
        module.stage_name = name  # type: ignore[attr-defined]
    if remat is not None:
        module.stage_remat = remat  # type: ignore[attr-defined]
    return module


def _refusal(module: Any) -> str:
    from flax import linen as nn

    if isinstance(module, type):
        return (
            f"PipelineStage wraps an instance of an nnx.Module, got the class {module.__name__}. {remedy_for(module)}"
        )
    remedy = remedy_for(module)
    if isinstance(module, nn.Module):
        remedy = "Use jaxpp_flax.linen.PipelineStage, which takes the same arguments."
    return f"PipelineStage wraps an nnx.Module, got {type(module).__name__}. {remedy}"
