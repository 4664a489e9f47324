"""The adapter for Linen models, and the model that loss functions get."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from flax import core
from flax import linen as nn
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT

from jaxpp_flax.checkpoint.format.paths import flatten
from jaxpp_flax.trainers.model.adapter import PERTURBATIONS, fold, numbers_as_arrays, without_sown
from jaxpp_flax.trainers.model.frozen import frozen_filter, merge_frozen, path_text, split_frozen
from jaxpp_flax.trainers.model.precision import narrowed, widened
from jaxpp_flax.trainers.model.sharding import is_box

STREAMS = ("params", "dropout")
"""The random streams of a Linen model. Flax draws those of other names from "params"."""


class LinenCall:
    """A Linen module with the variables and keys of one microbatch: the `model` that a loss function is given.

    `model(x, ...)` is `module.apply(variables, x, ...)` with the trainer's variables and keys. Collections other than
    `params` (such as `batch_stats`) are mutable, and keep the values that the call writes. `model.params`,
    `model.variables` and `model.rngs` are for users who call `module.apply` themselves. `model.training` is False in
    `evaluate` and `predict`.

    Example:
      >>> import jax.numpy as jnp
      >>> module = nn.Dense(2)
      >>> variables = module.init(jax.random.key(0), jnp.ones((1, 3)))
      >>> model = LinenCall(module, variables, rngs={}, training=True)
      >>> model(jnp.ones((4, 3))).shape
      (4, 2)
    """

    def __init__(
        self,
        module: nn.Module,
        variables: Mapping[str, Any],
        *,
        rngs: Mapping[str, jax.Array],
        training: bool,
        compute: Any = None,
    ) -> None:
        self.module = module
        self.variables: dict[str, Any] = dict(variables)
        self.training = training
        self._rngs = dict(rngs)
        self._calls = 0
        self._compute = compute

    @property
    def params(self) -> Any:
        """The parameters."""
        return self.variables["params"]

    @property
    def rngs(self) -> dict[str, jax.Array]:
        """The keys of this microbatch, by name; after each call the keys are different."""
        return {name: fold(key, self._calls) for name, key in self._rngs.items()} if self._calls else dict(self._rngs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call `module.apply`; `rngs=`, `mutable=`, `method=` as there. Return only outputs, unless `mutable=`."""
        rngs = kwargs.pop("rngs", None) or self.rngs
        self._calls += 1
        mutable = [name for name in self.variables if name != "params"]
        args, kwargs = narrowed((args, kwargs), self._compute)
        if "mutable" in kwargs or not mutable:
            return self._wide(self.module.apply(self.variables, *args, rngs=rngs, **kwargs))
        outputs, written = self.module.apply(self.variables, *args, rngs=rngs, mutable=mutable, **kwargs)
        self.variables.update(written)
        return self._wide(outputs)

    def with_variables(self, variables: Mapping[str, Any]) -> LinenCall:
        """Return this model with other variables: what its calls write stays in it, and is not kept."""
        return LinenCall(self.module, variables, rngs=self.rngs, training=self.training, compute=self._compute)

    def _wide(self, outputs: Any) -> Any:
        return outputs if self._compute is None else widened(outputs)


@dataclass(frozen=True, kw_only=True)
class LinenModel:
    """A Linen module; the rest of its state is `{"collections": ..., "key": ...}`, and `"frozen"` parameters."""

    module: nn.Module
    compute: Any = None  # the type in which the module computes; None: its own

    @classmethod
    def take_apart(
        cls, module: nn.Module, variables: Mapping[str, Any], key: jax.Array, frozen: Any
    ) -> tuple[LinenModel, Any, Any]:
        """Return the adapter, the `params` collection without the frozen parameters, and the rest."""
        collections = numbers_as_arrays(core.unfreeze(dict(variables)))  # type: ignore[arg-type]
        params = collections.pop("params")
        collections.pop(PERTURBATIONS, None)
        rest = {"collections": collections, "key": key}
        if frozen is not None:
            leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_box)
            paths = [path_text(path) for path, _ in leaves]
            params, rest["frozen"] = split_frozen(params, frozen_filter(frozen, paths))
        return cls(module=module), params, rest

    def computing_in(self, compute: Any) -> LinenModel:
        return replace(self, compute=compute)

    def narrowed(self, params: Any, rest: Any) -> tuple[Any, Any]:
        frozen = {name: narrowed(tree, self.compute) for name, tree in rest.items() if name == "frozen"}
        return narrowed(params, self.compute), {**rest, **frozen}

    def bind(self, params: Any, rest: Any, *, step: Any, microbatch: Any, training: bool) -> LinenCall:
        # Keys depend on step, microbatch and name; modules fold in their paths.
        rngs = self.rngs(rest, step=step, microbatch=microbatch)
        variables = {"params": _all(params, rest), **rest["collections"]}
        return LinenCall(self.module, variables, rngs=rngs, training=training, compute=self.compute)

    def rngs(self, rest: Any, *, step: Any, microbatch: Any) -> dict[str, jax.Array]:
        key = fold(rest["key"], step, microbatch)
        return {name: jax.random.fold_in(key, zlib.crc32(name.encode()) & 0x7FFFFFFF) for name in STREAMS}

    def batch_statistics(self, rest: Any) -> list[bool]:
        own = ["collections", "batch_stats"]
        return [_first_keys(path, 2) == own for path, _ in jax.tree_util.tree_leaves_with_path(rest)]

    def overwritten_by_gradients(self, rest: Any) -> list[bool]:
        own = ["collections", OVERWRITE_WITH_GRADIENT]
        return [_first_keys(path, 2) == own for path, _ in jax.tree_util.tree_leaves_with_path(rest)]

    def params_of(self, bound: LinenCall, before: Any) -> Any:
        return _same_paths(bound.params, before)

    def frozen_in(self, rest: Any) -> Collection[str]:
        return flatten({"frozen": rest.get("frozen", {})})[0].keys()

    def rest_of(self, bound: LinenCall, before: Any) -> Any:
        # What the call leaves in the collection that gradients overwrite is not its next value.
        collections = {
            name: old if name == OVERWRITE_WITH_GRADIENT else without_sown(old, core.unfreeze(bound.variables[name]))
            for name, old in before["collections"].items()
        }
        frozen = {"frozen": _same_paths(bound.params, before["frozen"])} if "frozen" in before else {}
        return {**before, **frozen, "collections": collections}

    def rebuild(self, params: Any, rest: Any) -> nn.Module:
        return self.module.bind(self.variables_of(params, rest))

    def variables_of(self, params: Any, rest: Any) -> dict[str, Any]:
        """Return all collections, in the form that `module.apply` takes."""
        return {"params": _all(params, rest), **rest["collections"]}


def _first_keys(path: Sequence[Any], count: int) -> list[Any]:
    return [getattr(step, "key", None) for step in path[:count]]


def _same_paths(params: Any, before: Any) -> Any:
    """Return those of all parameters that have a path in `before`."""
    found = dict(jax.tree_util.tree_leaves_with_path(core.unfreeze(params)))
    return jax.tree_util.tree_map_with_path(lambda path, old: found.get(path, old), before)


def _all(params: Any, rest: Any) -> Any:
    return merge_frozen(params, rest["frozen"]) if "frozen" in rest else params
