"""A model with its adapters off, for the reference of a preference loss: the same weights, without a copy of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpp_flax.globs import NameFilter, matches_any

__all__ = ["without_adapters"]

M = TypeVar("M")

_NAMES = ("*lora_a", "*lora_b")  # of Flax's and of qwix's factors


@runtime_checkable
class _HasVariables(Protocol):
    """The model that the loss function of a Linen module gets."""

    @property
    def variables(self) -> Mapping[str, Any]: ...

    def with_variables(self, variables: Mapping[str, Any]) -> Any: ...


def without_adapters(model: M, adapters: NameFilter | None = None) -> M:
    """Return a model that computes what `model` does with its adapters off; `model` does not change.

    Call it in a loss function whose reference is the model before its adapters were trained: both passes go through the
    same stages, and the weights are there once. The factors of the adapters count as zeros, so each adapter's term is
    zero. The result is a module of its own: its `eval()` is not that of `model`, and what its calls write
    (statistics, random streams) is not kept. If other parameters than adapters are trained too, the result has their
    present values: `jax.lax.stop_gradient` of its output keeps gradients away.

    Args:
      model: an NNX module; the model that the loss function of a Linen module gets; or the variables of a Linen module,
        a mapping of collections.
      adapters: which parameters are adapters: globs on their paths, or a function of the path. None: in NNX all of type
        `nnx.LoRAParam` (those of `add_lora`, of Flax, of qwix), in Linen all whose names end with "lora_a" or "lora_b"
        (those of qwix).

    Raises:
      TypeError: if `model` is something else.
      ValueError: if no parameter is an adapter.

    Example:
      >>> from jaxpp_flax.layers import add_lora
      >>> model = add_lora(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), rank=1, rngs=nnx.Rngs(1))
      >>> x, before = jnp.ones((1, 2)), model(jnp.ones((1, 2)))
      >>> model.lora.lora_b[...] = jnp.ones((1, 3))  # as training does
      >>> bool((model(x) == before).all()), bool((without_adapters(model)(x) == before).all())
      (False, True)
    """
    if isinstance(model, nnx.Module):
        return cast(M, _module(model, adapters))
    if isinstance(model, Mapping):
        return cast(M, _variables(model, adapters))
    if isinstance(model, _HasVariables):
        return model.with_variables(_variables(model.variables, adapters))
    raise TypeError(
        "without_adapters needs an NNX module, the model of a Linen loss function, or a Linen module's variables, "
        f"got {type(model).__name__}."
    )


def _module(model: nnx.Module, adapters: NameFilter | None) -> nnx.Module:
    is_adapter = None if adapters is None else matches_any(adapters)
    chosen = nnx.LoRAParam if is_adapter is None else lambda path, _: is_adapter("/".join(map(str, path)))
    graphdef, factors, rest = nnx.split(model, chosen, ...)
    if not jax.tree.leaves(factors):
        raise ValueError(_refusal("no parameter of the model is an nnx.LoRAParam", adapters))
    return nnx.merge(graphdef, jax.tree.map(jnp.zeros_like, factors), rest, copy=True)


def _variables(variables: Mapping[str, Any], adapters: NameFilter | None) -> dict[str, Any]:
    if "params" not in variables:
        raise TypeError(
            f'without_adapters got a mapping with the keys {sorted(variables)}, and no collection "params": pass all '
            "variables of the Linen module, as `init` returns them."
        )
    is_adapter = matches_any(_NAMES if adapters is None else adapters)
    leaves, structure = jax.tree_util.tree_flatten_with_path(variables["params"])
    chosen = [is_adapter(jax.tree_util.keystr(path, simple=True, separator="/")) for path, _ in leaves]
    if not any(chosen):
        raise ValueError(_refusal("no name in the collection params ends with lora_a or lora_b", adapters))
    values = [jnp.zeros_like(leaf) if off else leaf for (_, leaf), off in zip(leaves, chosen, strict=True)]
    return {**variables, "params": jax.tree.unflatten(structure, values)}


def _refusal(default: str, adapters: NameFilter | None) -> str:
    what = default if adapters is None else f"adapters={adapters!r} chooses no parameter"
    return (
        f"without_adapters: {what}: this model has no adapters to turn off. Add some (`add_lora`, qwix's "
        "`LoraProvider`), name yours by `adapters=`, or keep a frozen copy of the model as the reference."
    )
