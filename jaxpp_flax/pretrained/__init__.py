"""Load and export weights of other libraries: safetensors as Hugging Face writes them, with a map of names.

The modules, from the lowest up: `name_map` (which tensor of the files fills which leaf), `slices` (the part of a tensor
that a part of a leaf needs), `safetensors_file` (one file), `orbax_tensors` (an Orbax checkpoint), `sources` (one
interface to files, shards and checkpoints), `loading` (check everything, then read each process's parts), `exporting`
(each process writes its own parts of the shards).
"""

from jaxpp_flax.pretrained.exporting import export_pretrained
from jaxpp_flax.pretrained.loading import load_pretrained
from jaxpp_flax.pretrained.name_map import IDENTITY, NameMap, Rule

__all__ = ["IDENTITY", "NameMap", "Rule", "export_pretrained", "load_pretrained"]
