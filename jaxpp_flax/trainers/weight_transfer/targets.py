"""Where weights go, and in which type: checked for every leaf before the first one moves."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, Sharding

from jaxpp_flax.engine.runtime.relayout import is_attached
from jaxpp_flax.messages import listed
from jaxpp_flax.processes import compare_hashes, process_group
from jaxpp_flax.trainers.errors import ModelError
from jaxpp_flax.trainers.model.sharding import unboxed
from jaxpp_flax.trainers.state.train_state import own_path, weight_leaves
from jaxpp_flax.trainers.weight_transfer.outgoing import Outgoing

__all__ = ["Target", "compare_targets", "plan_targets"]


@dataclass(frozen=True)
class Target:
    """The place of an array, and its type there."""

    sharding: Sharding
    dtype: Any


def plan_targets(
    call: str,
    given: Any,
    leaves: Mapping[str, Outgoing],
    *,
    dtype: Any = None,
    kept: Collection[str] = (),
    process: int | None = None,
) -> dict[str, Target]:
    """Return the target of each array.

    Args:
      call: the name of the call, for errors.
      given: a sharding for all; an NNX module; or a tree of shardings, of arrays, or of `jax.ShapeDtypeStruct`s with a
        sharding.
      leaves: the arrays by path.
      dtype: the type of floating numbers where `given` says none; None keeps their types. Numbers of 8 bits or less
        stay as they are.
      kept: the trainer's other leaves, which `given` may have.
      process: the one that makes this call; None if all of the job make it.

    Raises:
      ModelError: the message lists the arrays that do not fit.
    """
    if dtype is not None and not jnp.issubdtype(dtype, jnp.floating):
        raise ModelError(f"{call}: dtype={dtype!r} is no floating type. Give jnp.bfloat16, jnp.float32 or another one.")
    places, optional = (dict.fromkeys(leaves, given), set()) if isinstance(given, Sharding) else _places(given, leaves)
    faults = [f"{path}: the trainer has no such leaf" for path in places if path not in {*leaves, *kept} | optional] + [
        f"{path}: nothing is given for it" for path in leaves if path not in places
    ]
    targets: dict[str, Target] = {}
    for path, leaf in leaves.items():
        if path not in places:
            continue
        place = places[path]
        sharding = place if isinstance(place, Sharding) else getattr(place, "sharding", None)
        own = None if isinstance(place, Sharding) else np.dtype(getattr(place, "dtype", leaf.dtype))
        targets[path] = Target(sharding, own if own is not None else _narrowed(leaf.dtype, dtype))  # type: ignore[arg-type]
        faults += [f"{path}: {fault}" for fault in _faults(leaf, place, targets[path], process)]
    if faults:
        raise ModelError(
            f"{call} got a {type(given).__name__} that does not fit, and nothing was moved. {listed(faults, 8, str)}. "
            f"It sends: {listed(list(leaves), 4, str)}."
        )
    return targets


def compare_targets(call: str, leaves: Mapping[str, Outgoing], targets: Mapping[str, Target]) -> None:
    """Make sure that all processes send the same leaves to the same places.

    Raises:
      ValuesMismatchError: the message names the first one that differs, and the processes.
    """
    texts: dict[str, str | None] = {path: _text(leaves[path], target) for path, target in targets.items()}
    remedy = "Every process must make this call with the same leaves, shardings and types, those of all processes."
    compare_hashes(process_group(), f"the targets of {call}", texts, remedy)


def _places(given: Any, leaves: Mapping[str, Outgoing]) -> tuple[dict[str, Any], set[str]]:
    """Return what is given for each path, and the paths of which the trainer needs no leaf: they are no parameters."""
    tree = nnx.state(given) if isinstance(given, nnx.Module) else unboxed(given)
    found = weight_leaves(tree)
    places = {path if path in leaves else own_path(path): place for path, place in found.items()}
    if isinstance(given, nnx.Module):
        return places, places.keys() - weight_leaves(nnx.state(given, nnx.Param)).keys()
    if isinstance(given, Mapping) and "params" in given:
        return places, {path for path in found if not path.startswith("params/")}
    return places, set()


def _narrowed(own: Any, dtype: Any) -> Any:
    wide = jnp.issubdtype(own, jnp.floating) and own.itemsize > 1
    return np.dtype(dtype) if dtype is not None and wide else own


def _faults(leaf: Outgoing, place: Any, target: Target, process: int | None) -> Iterator[str]:
    """Yield what is wrong with the place of one array."""
    if target.sharding is None:
        yield f"the {type(place).__name__} given for it has no sharding. Put it on devices, or give a sharding"
        return
    if not isinstance(place, Sharding) and np.shape(place) != leaf.shape:
        yield f"shape {np.shape(place)}, and the trainer has {leaf.shape}"
        return
    both_float = all(jnp.issubdtype(of, jnp.floating) for of in (leaf.dtype, target.dtype))
    if target.dtype != leaf.dtype and not both_float:
        yield f"dtype {target.dtype}, and the trainer has {leaf.dtype}"
    sharding = target.sharding
    try:
        sharding.shard_shape(leaf.shape)
    except (ValueError, IndexError) as error:  # JAX's, for a spec with more entries than the leaf has axes
        named = isinstance(sharding, NamedSharding)
        text = f"{sharding.spec} over {dict(sharding.mesh.shape)}" if named else f"{sharding}: {error}"
        yield f"its shape {leaf.shape} cannot be divided as {text}"
    devices = sorted(sharding.device_set, key=lambda device: device.id)
    if absent := [device for device in devices if not is_attached(device)]:
        yield f"this job has no device {absent[0]}; it has {listed(jax.devices(), 4, str)}"
    elif process is not None and (others := [device for device in devices if device.process_index != process]):
        yield (
            f"{others[0]} belongs to process {others[0].process_index}, and all ranks of this trainer to process "
            f"{process}, so that no other process takes part in this call"
        )


def _text(leaf: Outgoing, target: Target) -> str:
    """Return a text of a target that is the same in every process."""
    regions = target.sharding.devices_indices_map(leaf.shape)
    parts = sorted((device.id, str(index)) for device, index in regions.items())
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=4).hexdigest()
    return f"{target.dtype} on {len(parts)} devices, {target.sharding.memory_kind} memory, layout {digest}"
