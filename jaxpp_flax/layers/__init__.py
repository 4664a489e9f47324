"""For the author of a model: marks on blocks, recomputation of blocks, scanned stacks of layers, and adapters."""

from pathlib import Path

import flax
from jax.extend import source_info_util

from jaxpp_flax.layers.lora import add_lora, merge_lora
from jaxpp_flax.layers.marking import pipeline_stage
from jaxpp_flax.layers.nnx import PipelineStage
from jaxpp_flax.layers.scan import join_layers, join_scanned, split_layers, split_scanned
from jaxpp_flax.layers.without_adapters import without_adapters

# Messages name the user's line, not a line of this package or of a Flax transform that calls a block (`nn.scan`).
# Flax excludes other files of its own in the same way.
source_info_util.register_exclusion(str(Path(__file__).resolve().parent))
for _part in ("core", "nnx/transforms", "nnx/graph"):  # nnx/graph.py, nnx/graphlib.py
    source_info_util.register_exclusion(str(Path(flax.__file__).parent / _part))

__all__ = [
    "PipelineStage",
    "add_lora",
    "join_layers",
    "join_scanned",
    "merge_lora",
    "pipeline_stage",
    "split_layers",
    "split_scanned",
    "without_adapters",
]
