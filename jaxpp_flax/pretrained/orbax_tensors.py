"""The leaves of an Orbax checkpoint, read in parts."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore

from jaxpp_flax.checkpoint.format.locations import checkpoint_location, storage_of
from jaxpp_flax.checkpoint.format.orbax_io import find_tree, naming_damage
from jaxpp_flax.checkpoint.reading import read_whole_metadata, stored_leaves
from jaxpp_flax.pretrained.slices import Index, StoredTensor

# The items of a trainer's checkpoint whose leaves are the model's; the others are the optimizer's, and counters.
_OF_THE_MODEL = ("params", "model_state")


def read_orbax(path: Path) -> tuple[dict[str, StoredTensor], frozenset[str]]:
    """Return the leaves of a checkpoint by name, with "." in names, and those that a model may leave unread.

    Of a trainer's checkpoint, these are the model's leaves, named as in the model; it may leave unread those that are
    no parameters (keys of random numbers). Elsewhere `params` at the beginning of names is left out.

    Raises:
      CheckpointNotFoundError, UnfinishedCheckpointError, CorruptCheckpointError: if it cannot be read.
    """
    directory = find_tree(checkpoint_location(path))
    leaves = stored_leaves(read_whole_metadata(directory))
    settings = json.loads((directory / "_METADATA").read_text(encoding="utf-8"))
    is_state = {"params", "step"} <= {name.partition("/")[0] for name in leaves}
    tensors: dict[str, StoredTensor] = {}
    optional: set[str] = set()
    for stored, leaf in leaves.items():
        item, _, rest = stored.partition("/")
        if leaf.dtype is None or (is_state and item not in _OF_THE_MODEL):
            continue
        name = rest if item in _OF_THE_MODEL and rest else stored
        name = name.removeprefix("collections/").removeprefix("frozen/").removesuffix("/value").replace("/", ".")
        if is_state and item != "params":
            optional.add(name)
        tensors[name] = StoredTensor(
            name=name,
            shape=leaf.shape or (),
            dtype=np.dtype(leaf.dtype),
            file=directory,
            read_values=partial(_read, directory, _spec(directory, stored.replace("/", "."), settings)),
        )
    return tensors, frozenset(optional)


def _read(directory: Path, spec: dict[str, Any], index: Index) -> np.ndarray:
    with naming_damage(directory):
        array = tensorstore.open(spec, open=True, read=True).result()  # pyright: ignore[reportAttributeAccessIssue]
        return np.asarray(array[index].read().result())


def _spec(directory: Path, key: str, settings: dict[str, Any]) -> dict[str, Any]:
    driver = "zarr3" if settings.get("use_zarr3") else "zarr"
    if settings.get("use_ocdbt", True):
        return {"driver": driver, "kvstore": {"driver": "ocdbt", "base": storage_of(directory), "path": f"{key}/"}}
    return {"driver": driver, "kvstore": storage_of(directory / key)}
