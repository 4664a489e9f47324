"""NNX models as the trainer sees them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from jaxpp_flax.trainers.model.adapter import fold
from jaxpp_flax.trainers.model.frozen import frozen_filter, path_text

__all__ = ["NnxModel"]


# Told apart from the streams of a module that was made with the same seed.
_OF_THE_CALL = 1


@dataclass(frozen=True, kw_only=True)
class NnxModel:
    """An NNX module, split into the variables that are trained (`wrt`, a filter) and the rest; `seed` is of `rngs`."""

    graphdef: Any
    wrt: Any
    seed: int = 0

    @classmethod
    def take_apart(
        cls, module: nnx.Module, wrt: Any = nnx.Param, frozen: Any = None, seed: int = 0
    ) -> tuple[NnxModel, Any, Any]:
        """The adapter, the trained variables and the rest, both as `nnx.State`; `module` is left as it is."""
        if frozen is not None:
            chosen = nnx.to_flat_state(nnx.state(module, wrt))
            is_frozen = frozen_filter(frozen, [path_text(path) for path, _ in chosen])
            wrt = nnx.All(wrt, lambda path, _: not is_frozen(path_text(path)))
        graphdef, params, rest = nnx.split(module, wrt, ...)
        return cls(graphdef=graphdef, wrt=wrt, seed=seed), params, rest

    def bind(self, params: Any, rest: Any, *, step: Any, microbatch: Any, training: bool) -> Any:
        """A module of its own for each microbatch: the copy is what makes it legal inside the loop."""
        module = nnx.merge(self.graphdef, params, _fold_keys(rest, step, microbatch), copy=True)
        if not training:
            module.eval()
        return module

    def rngs(self, rest: Any, *, step: Any, microbatch: Any) -> nnx.Rngs:
        """One stream for all names, with keys in the order of calls; no key is one of the module's own streams."""
        return nnx.Rngs(fold(jax.random.fold_in(jax.random.key(self.seed), _OF_THE_CALL), step, microbatch))

    def batch_statistics(self, rest: Any) -> list[bool]:
        """Those in variables of Flax's type `nnx.BatchStat`."""
        variables = jax.tree.leaves(rest, is_leaf=lambda x: isinstance(x, nnx.Variable))
        return [isinstance(variable, nnx.BatchStat) for variable in variables for _ in jax.tree.leaves(variable)]

    def rest_of(self, bound: Any, before: Any) -> Any:
        """The variables of `before` as the call left them; those that it created (sown ones) are dropped."""
        _, _, after = nnx.split(bound, self.wrt, ...)
        new = dict(nnx.to_flat_state(after))

        def pick(path: Any, old: Any) -> Any:
            # Streams of random numbers start anew in each microbatch: a counter would tie the masks to the schedule.
            return old if isinstance(old, nnx.RngState) else new.get(path, old)

        return nnx.from_flat_state([(path, pick(path, old)) for path, old in nnx.to_flat_state(before)])

    def rebuild(self, params: Any, rest: Any) -> nnx.Module:
        """An ordinary module, unconnected to the trainer."""
        return nnx.merge(self.graphdef, params, rest, copy=True)


def _fold_keys(rest: Any, step: Any, microbatch: Any) -> Any:
    def one(variable: Any) -> Any:
        if isinstance(variable, nnx.RngKey):
            return variable.replace(fold(variable.get_value(), step, microbatch))
        return variable

    return jax.tree.map(one, rest, is_leaf=lambda x: isinstance(x, nnx.Variable))
