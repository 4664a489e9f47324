"""`mpmd_jit_with_loop` and `mpmd_jit_by_yield` with the parameters of JaxPP."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jaxpp_flax.api.steps.step import StepFunction
from jaxpp_flax.engine.arrays.mesh import MpmdMesh
from jaxpp_flax.engine.jit import one_pass
from jaxpp_flax.messages import warn_user

__all__ = ["mpmd_jit_by_yield", "mpmd_jit_with_loop", "say_about_pgle"]


def mpmd_jit_with_loop(
    fun: Callable[..., Any],
    mpmd_mesh: MpmdMesh,
    *,
    in_shardings: Any = None,
    out_shardings: Any = None,
    in_specs: Any = None,
    out_specs: Any = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Iterable[str] | None = None,
    abstracted_axes: Any | None = None,
    compiler_options: Mapping[str, Any] | None = None,
    use_pgle: bool = False,
) -> StepFunction:
    """Compile a train step with a `treduce` loop into one SPMD program per stage.

    Args: as in `jaxpp_flax.mpmd_jit_with_loop`. `in_specs` and `out_specs` are other names of `in_shardings` and
      `out_shardings`. A spec may name the axis that counts the ranks: this axis is ignored. `abstracted_axes` must be
      None. `use_pgle` has no effect; a warning says so once.

    Returns:
      A function with `compile(*args)`, whose result has `closed_jaxpr` and `in_shardings` (a tree like
      `(args, kwargs)`).

    Raises:
      NotImplementedError: if `abstracted_axes` is given.
      ValueError: if both names of one parameter are given, and where `jaxpp_flax.mpmd_jit_with_loop` raises it.

    Example:
      >>> import functools, jax, jax.numpy as jnp, numpy as np
      >>> import jaxpp_flax.api as jaxpp
      >>> mesh = jaxpp.MpmdMesh(jax.sharding.Mesh(np.array(jax.devices()[:2]), ("stage",)), "stage")
      >>> def loss(w, x):
      ...     x = jaxpp.mark_stage_end(jnp.tanh(x @ w[0]))
      ...     return jnp.mean((x @ w[1]) ** 2)
      >>> @functools.partial(jaxpp.mpmd_jit_with_loop, mpmd_mesh=mesh)
      ... def gradients(w, batch):
      ...     gradient = functools.partial(jax.value_and_grad(loss), w)
      ...     return jaxpp.treduce(gradient, batch, schedule=jaxpp.Std1F1B(mesh.mpmd_dim))
      >>> losses, grads = gradients([jnp.ones((3, 3)), jnp.ones((3, 3))], jnp.ones((4, 2, 3)))
      >>> losses.shape, grads[0].mpmd_idxs, grads[1].mpmd_idxs
      ((4,), (0,), (1,))
    """
    _refuse_abstracted_axes("mpmd_jit_with_loop", abstracted_axes)
    say_about_pgle("mpmd_jit_with_loop", use_pgle)
    return StepFunction(
        fun,
        mpmd_mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        in_shardings=in_shardings,
        out_shardings=out_shardings,
        static_argnums=static_argnums,
        static_argnames=static_argnames,
        donate_argnums=donate_argnums,
        donate_argnames=donate_argnames,
        compiler_options=compiler_options,
    )


def mpmd_jit_by_yield(
    fun: Callable[..., Any],
    mpmd_mesh: MpmdMesh,
    *,
    target_num_stages: int | None = None,
    in_shardings: Any = None,
    out_shardings: Any = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Iterable[str] | None = None,
    abstracted_axes: Any | None = None,
    compiler_options: Mapping[str, Any] | None = None,
    use_pgle: bool = False,
) -> StepFunction:
    """Compile a marked function without a loop into one SPMD program per stage: inference, or one gradient.

    Args:
      fun: the function, with marked stages.
      mpmd_mesh: the ranks.
      target_num_stages: the number of stages, a multiple of the number of ranks; by default one for each rank.

    For the other arguments, see `mpmd_jit_with_loop`.

    Raises:
      NotImplementedError: if `abstracted_axes` is given.
      ValueError: if there are too few or too many marks.

    Example:
      >>> import jax, jax.numpy as jnp, numpy as np
      >>> import jaxpp_flax.api as jaxpp
      >>> mesh = jaxpp.MpmdMesh(jax.sharding.Mesh(np.array(jax.devices()[:2]), ("stage",)), "stage")
      >>> forward = jaxpp.mpmd_jit_by_yield(lambda w, x: jaxpp.mark_stage_end(x @ w[0]) @ w[1], mesh)
      >>> np.asarray(forward([jnp.eye(2), jnp.eye(2)], jnp.ones((1, 2))))
      array([[1., 1.]], dtype=float32)
    """
    _refuse_abstracted_axes("mpmd_jit_by_yield", abstracted_axes)
    say_about_pgle("mpmd_jit_by_yield", use_pgle)
    return StepFunction(
        one_pass(fun, mpmd_mesh, target_num_stages),
        mpmd_mesh,
        in_shardings=in_shardings,
        out_shardings=out_shardings,
        static_argnums=static_argnums,
        static_argnames=static_argnames,
        donate_argnums=donate_argnums,
        donate_argnames=donate_argnames,
        compiler_options=compiler_options,
    )


def _refuse_abstracted_axes(function: str, abstracted_axes: Any) -> None:
    if abstracted_axes is not None:
        raise NotImplementedError(
            f"{function} got abstracted_axes={abstracted_axes!r}: shapes are fixed when a step is compiled, and each "
            "new shape compiles once. Leave it out, and pad batches to one shape."
        )


def say_about_pgle(function: str, use_pgle: bool) -> None:
    """Warn that `use_pgle=True` has no effect."""
    if use_pgle:
        warn_user(
            f"{function} got use_pgle=True, which has no effect: each task is compiled on its own. Set the option "
            "`jax_enable_pgle` of JAX to let XLA schedule by measured latencies.",
        )
