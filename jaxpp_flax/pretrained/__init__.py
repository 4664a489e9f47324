"""Weights of other libraries, in and out: safetensors as Hugging Face writes them, through a map of names.

The files, from the lowest up: `name_map` (which tensor of the files fills which leaf: data), `slices` (the part of a
tensor that a part of a leaf needs), `safetensors_file` (one file), `orbax_tensors` (an Orbax checkpoint), `sources`
(files, shards or a checkpoint behind one face), `loading` (check everything, then read each process's parts),
`exporting` (write shards, each process its own parts).
"""

from jaxpp_flax.pretrained.exporting import export_pretrained
from jaxpp_flax.pretrained.loading import load_pretrained
from jaxpp_flax.pretrained.name_map import IDENTITY, NameMap, Rule

__all__ = ["IDENTITY", "NameMap", "Rule", "export_pretrained", "load_pretrained"]
