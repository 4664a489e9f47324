"""The adapter for NNX models."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import jax
from flax import nnx
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT

from jaxpp_flax.checkpoint.format.paths import flatten
from jaxpp_flax.trainers.errors import ModelError
from jaxpp_flax.trainers.model.adapter import fold, has_grown, numbers_as_arrays, without_sown_variables
from jaxpp_flax.trainers.model.frozen import frozen_filter, path_text
from jaxpp_flax.trainers.model.precision import calling_in, narrowed

# Makes these keys differ from the streams of a module with the same seed.
_OF_THE_CALL = 1


@dataclass(frozen=True, kw_only=True)
class NnxModel:
    """An NNX module, split into trained variables (`wrt`, a filter) and the rest.

    `kinds` is the filter before `frozen`; `seed` is the seed of `rngs`; `compute` is the type in which the module
    computes (None: its own).
    """

    graphdef: Any
    wrt: Any
    kinds: Any = nnx.Param
    seed: int = 0
    compute: Any = None

    @classmethod
    def take_apart(
        cls, module: nnx.Module, wrt: Any = nnx.Param, frozen: Any = None, seed: int = 0
    ) -> tuple[NnxModel, Any, Any]:
        """Return the adapter, the trained variables and the rest (each an `nnx.State`); `module` does not change."""
        module = without_sown_variables(module)
        kinds = wrt
        if frozen is not None:
            chosen = nnx.to_flat_state(nnx.state(module, wrt))
            is_frozen = frozen_filter(frozen, [path_text(path) for path, _ in chosen])
            wrt = nnx.All(wrt, lambda path, _: not is_frozen(path_text(path)))
        graphdef, params, rest = nnx.split(module, wrt, ...)
        adapter = cls(graphdef=graphdef, wrt=wrt, kinds=kinds, seed=seed)
        return adapter, numbers_as_arrays(params), numbers_as_arrays(rest)

    def computing_in(self, compute: Any) -> NnxModel:
        return replace(self, compute=compute)

    def narrowed(self, params: Any, rest: Any) -> tuple[Any, Any]:
        def one(variable: Any) -> Any:
            is_param = isinstance(variable, nnx.Param)
            return variable.replace(narrowed(variable.get_value(), self.compute)) if is_param else variable

        return narrowed(params, self.compute), jax.tree.map(one, rest, is_leaf=lambda x: isinstance(x, nnx.Variable))

    def bind(self, params: Any, rest: Any, *, step: Any, microbatch: Any, training: bool) -> Any:
        """Make a new module for each microbatch: only a copy is legal inside the loop."""
        module = nnx.merge(self.graphdef, params, _fold_keys(rest, step, microbatch), copy=True)
        if not training:
            module.eval()
        return calling_in(module, self.compute)

    def rngs(self, rest: Any, *, step: Any, microbatch: Any) -> nnx.Rngs:
        """Return one stream for all names, with keys in the order of calls."""
        return nnx.Rngs(fold(jax.random.fold_in(jax.random.key(self.seed), _OF_THE_CALL), step, microbatch))

    def batch_statistics(self, rest: Any) -> list[bool]:
        variables = jax.tree.leaves(rest, is_leaf=lambda x: isinstance(x, nnx.Variable))
        return [isinstance(variable, nnx.BatchStat) for variable in variables for _ in jax.tree.leaves(variable)]

    def frozen_in(self, rest: Any) -> Collection[str]:
        return flatten(nnx.filter_state(rest, nnx.Any(nnx.Param, self.kinds)))[0].keys()

    def overwritten_by_gradients(self, rest: Any) -> list[bool]:
        variables = jax.tree.leaves(rest, is_leaf=lambda x: isinstance(x, nnx.Variable))
        return [_is_overwritten(variable) for variable in variables for _ in jax.tree.leaves(variable)]

    def params_of(self, bound: Any, before: Any) -> Any:
        new = dict(nnx.to_flat_state(nnx.state(bound, self.wrt)))
        return nnx.from_flat_state([(path, new.get(path, old)) for path, old in nnx.to_flat_state(before)])

    def rest_of(self, bound: Any, before: Any) -> Any:
        """Return the variables of `before` after the call; variables that the call created (sown ones) are dropped.

        Raises:
          ModelError: if the call has removed a variable.
        """
        _, _, after = nnx.split(bound, self.wrt, ...)
        new = dict(nnx.to_flat_state(after))

        def pick(path: Any, old: Any) -> Any:
            # Random streams start again in each microbatch: with a counter, masks would depend on the schedule.
            # What the call leaves in a variable that gradients overwrite is not its next value.
            if isinstance(old, nnx.RngState) or _is_overwritten(old):
                return old
            if path not in new:
                raise ModelError(_removed(path_text(path), type(old)))
            # A model sows into a type of its own; an array may be an attribute.
            is_sown = isinstance(old, nnx.Variable) and type(old) is not nnx.Variable
            return old if is_sown and has_grown(old.get_value(), new[path].get_value()) else new[path]

        return nnx.from_flat_state([(path, pick(path, old)) for path, old in nnx.to_flat_state(before)])

    def rebuild(self, params: Any, rest: Any) -> nnx.Module:
        return nnx.merge(self.graphdef, params, rest, copy=True)


def _is_overwritten(variable: Any) -> bool:
    """Return True for a variable of Linen's collection, which `nnx.bridge.ToNNX` makes a type of this name."""
    try:
        return nnx.variable_name_from_type(type(variable)) == OVERWRITE_WITH_GRADIENT
    except ValueError:  # a type without a name in Linen
        return False


def _removed(path: str, kind: type[nnx.Variable[Any]]) -> str:
    """Return the message for a variable that the model had, and that is gone after the call."""
    return (
        f"the loss removes the variable {path} ({kind.__name__}), which the model had before training, as `nnx.pop` "
        "does with what an earlier call of the model has sown: in plain Flax that value counts too. Remove it before "
        f"you make the trainer: `nnx.pop(model, {kind.__name__})`."
    )


def _fold_keys(rest: Any, step: Any, microbatch: Any) -> Any:
    def one(variable: Any) -> Any:
        is_key = isinstance(variable, nnx.RngKey)
        return variable.replace(fold(variable.get_value(), step, microbatch)) if is_key else variable

    return jax.tree.map(one, rest, is_leaf=lambda x: isinstance(x, nnx.Variable))
