"""A Linen model without the trainer: `module.apply` with its variables and keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
from flax import core
from flax import linen as nn
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxpp_flax.verify.reference.keys import keys_of, linen_keys
from jaxpp_flax.verify.reference.narrow_types import narrow, wide

__all__ = ["PlainLinen"]


class _Call:
    """The `model` of a loss function: it applies the module, and keeps what the call writes."""

    training = True

    def __init__(self, module: nn.Module, variables: Mapping[str, Any], keys: Any, compute: Any) -> None:
        self.module, self.variables, self._keys, self._compute = module, dict(variables), keys, compute
        self._calls = 0

    @property
    def params(self) -> Any:
        return self.variables["params"]

    @property
    def rngs(self) -> dict[str, jax.Array]:
        """Each call of a module has keys of its own."""
        return {name: keys_of(key, self._calls) if self._calls else key for name, key in self._keys.items()}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        rngs = kwargs.pop("rngs", None) or self.rngs
        self._calls += 1
        args, kwargs = narrow((args, kwargs), self._compute)
        mutable = [name for name in self.variables if name != "params"]
        if "mutable" in kwargs or not mutable:
            found = self.module.apply(self.variables, *args, rngs=rngs, **kwargs)
        else:
            found, written = self.module.apply(self.variables, *args, rngs=rngs, mutable=mutable, **kwargs)
            self.variables.update(written)
        return found if self._compute is None else wide(found)


@dataclass(frozen=True, kw_only=True)
class PlainLinen:
    """A Linen module; `params` are its trained parameters, and `rest` is `{"collections", "key"}`, maybe "frozen"."""

    module: nn.Module
    compute: Any

    def computed(self, params: Any, rest: Any) -> tuple[Any, Any]:
        """Return both with all parameters in the type of the computation."""
        frozen = {"frozen": narrow(rest["frozen"], self.compute)} if "frozen" in rest else {}
        return narrow(params, self.compute), {**rest, **frozen}

    def bind(self, params: Any, rest: Any, *, step: Any, microbatch: Any) -> _Call:
        """Return the model for a loss function, with the keys of a step and microbatch."""
        keys = linen_keys(rest["key"], step, microbatch)
        return _Call(self.module, _variables(params, rest), keys, self.compute)

    def rngs(self, rest: Any, *, step: Any, microbatch: Any) -> dict[str, jax.Array]:
        """Return the `rngs` of a loss function."""
        return linen_keys(rest["key"], step, microbatch)

    def written(self, model: _Call, params: Any, rest: Any) -> tuple[Any, Any]:
        """Return both as they are after a call."""
        return _divided(model.variables, params, rest)

    def next_by_gradient(self, rest: Any) -> list[bool]:
        """Return for each leaf whether its "gradient" is its next value, as for the scales of Flax's fp8."""
        own = [("collections", OVERWRITE_WITH_GRADIENT)]
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(rest)]
        return [tuple(getattr(key, "key", None) for key in path[:2]) in own for path in paths]

    def are_parameters(self, rest: Any) -> list[bool]:
        """Return for each leaf whether it is a parameter that is not trained."""
        return [getattr(path[0], "key", None) == "frozen" for path, _ in jax.tree_util.tree_leaves_with_path(rest)]

    def after_update(self, hook: Any, params: Any, rest: Any, metrics: Any) -> tuple[Any, Any]:
        """Return both after a function of the variables and the metrics, which returns the new variables."""
        return _divided(hook(_variables(params, rest), metrics), params, rest)


def _variables(params: Any, rest: Any) -> dict[str, Any]:
    if "frozen" in rest:
        params = unflatten_dict({**flatten_dict(params), **flatten_dict(rest["frozen"])})
    return {"params": params, **rest["collections"]}


def _divided(variables: Mapping[str, Any], params: Any, rest: Any) -> tuple[Any, Any]:
    """Return the leaves of variables in the structure of both; collections that were not there before are left out."""
    every = flatten_dict(core.unfreeze(dict(variables["params"])))

    def of(tree: Any) -> Any:
        return unflatten_dict({path: every[path] for path in flatten_dict(tree)})

    new = {**rest, "collections": {name: core.unfreeze(variables[name]) for name in rest["collections"]}}
    if "frozen" in rest:
        new["frozen"] = of(rest["frozen"])
    return of(params), new
