"""Names of some version of `jaxpp.api` that this package lacks, each with its replacement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jaxpp_flax.messages import missing_name

__all__ = ["REMEDIES", "explain"]

REMEDIES: Mapping[str, str] = {
    "accumulate_grads": "`treduce` has taken its place: "
    "`treduce(jax.value_and_grad(loss), batch, schedule=Std1F1B(n), operation=(Concat(), Add))`",
    "LoopOutput": "`treduce` has taken its place: give each result its operation, e.g. `operation=(Concat(), Add)`",
    "pipelined": "`mpmd_jit_with_loop` has taken its place: `@partial(mpmd_jit_with_loop, mpmd_mesh=mesh)`",
    "InterleavedZeroBubble": "JaxPP has dropped it too. Use `DualPipeV` for two stages a rank with a split backward, "
    "`ZeroBubble` for one, or `Interleaved1F1B`",
    "run_replicated_dced": "work after the loop is placed on the ranks that need it automatically: write it as "
    "ordinary code",
    "add_multi_p": "it is a primitive of that package's internals. Call `cross_mpmd_all_reduce(*arrays)`",
    "gather_multi_p": "it is a primitive of that package's internals. Call `cross_mpmd_stack(arrays, axis)`",
    "place_with_p": "it is a primitive of that package's internals. Call `place_with(val, with_val)`",
    "RemoteMpmdMesh": "it starts workers through Ray from one controller. One process drives all of its own devices: "
    "build an `MpmdMesh`; with several hosts, run the same program on each under `jax.distributed.initialize()`",
    "ArrayRef": "it names an array of a Ray worker. A step returns `MpmdArray`s, which can be read in this process",
    "_to_global_jax_array": "call `array.as_jax_array()`",
}


def explain(name: str, names: Sequence[str]) -> str:
    """Return the message for a missing `jaxpp_flax.api.<name>`.

    Example:
      >>> explain("LoopOutput", [])[:65]
      'jaxpp_flax.api has no LoopOutput: `treduce` has taken its place: '
      >>> explain("treduced", ["treduce", "Add"])
      "module 'jaxpp_flax.api' has no attribute 'treduced'. Did you mean 'treduce'?"
    """
    return missing_name("jaxpp_flax.api", name, REMEDIES, names)
