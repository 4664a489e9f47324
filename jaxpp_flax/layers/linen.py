"""`PipelineStage` for Linen modules; `pipeline_stage` is the same decorator for both."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from flax import linen as nn
from flax import nnx

from jaxpp_flax.layers.marking import pipeline_stage, remedy_for
from jaxpp_flax.layers.remat import check_remat
from jaxpp_flax.layers.stage_class import mark_call, register_metaclass, stage_class

__all__ = ["PipelineStage", "pipeline_stage"]

M = TypeVar("M")


class _StageMeta(type(nn.Module)):
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls is PipelineStage:
            return _wrap(*args, **kwargs)
        return super().__call__(*args, **kwargs)


register_metaclass(_StageMeta)


class PipelineStage(nn.Module, metaclass=_StageMeta):
    """A Linen module with a marked result: the model may be cut into stages after this module.

    Wrap a module, `PipelineStage(Block(...))(x)`, in `setup`, in a compact method or outside of modules; or write a
    subclass, `class Block(PipelineStage)`. Wrapping returns the same module with a changed class, a subclass of its old
    class. So the paths of parameters are the same as in the unmarked model. For `nn.remat(Block)(...)` or
    `nn.jit(Block)(...)`, the mark is outside of the transformed block.

    Args:
      module: the Linen module to mark; it is changed in place and returned.
      name: the name of the block, for assignments by name and for messages; the module's own `name` does not change.
        Default: the module's path, such as `decoder/block_0`.
      remat: "full" recomputes the block in the backward pass, so that only the block's input is kept; a
        `jax.checkpoint` policy selects more values to keep. Default: None, which keeps all values.

    Raises:
      TypeError: if `module` is a class, an NNX module, or not a module; if `remat` is another value.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from flax import linen as nn
      >>> class MLP(nn.Module):
      ...     @nn.compact
      ...     def __call__(self, x):
      ...         for _ in range(2):
      ...             x = nn.relu(PipelineStage(nn.Dense(4))(x))
      ...         return x
      >>> variables = MLP().init(jax.random.key(0), jnp.ones((1, 4)))
      >>> sorted(variables["params"])
      ['Dense_0', 'Dense_1']
    """

    stage_name = None
    stage_remat = None

    if TYPE_CHECKING:

        def __new__(cls, module: M, name: str | None = None, remat: Any = None) -> M: ...

    def __init_subclass__(cls, **kwargs: Any) -> None:
        # The mark comes first, so that Linen treats it as a part of the method.
        mark_call(cls)
        super().__init_subclass__(**kwargs)

    @classmethod
    def _stage_class_of(cls, module_class: type, name: str | None = None, remat: Any = None) -> type:
        return stage_class(PipelineStage, module_class, name, remat)


def _wrap(module: Any, name: str | None = None, remat: Any = None) -> Any:
    check_remat(remat, "linen.PipelineStage")
    if not isinstance(module, nn.Module):
        raise TypeError(_refusal(module))
    if name is not None or remat is not None or not isinstance(module, PipelineStage):
        # Linen clones modules from their fields only, so the class keeps name and remat.
        object.__setattr__(module, "__class__", PipelineStage._stage_class_of(type(module), name, remat))
    return module


def _refusal(module: Any) -> str:
    if isinstance(module, type):
        got = f"an instance of a Linen Module, got the class {module.__name__}"
        return f"linen.PipelineStage wraps {got}. {remedy_for(module)}"
    remedy = remedy_for(module)
    if isinstance(module, nnx.Module):
        remedy = "Use jaxpp_flax.PipelineStage, which takes the same arguments."
    return f"linen.PipelineStage wraps a Linen Module, got {type(module).__name__}. {remedy}"
