"""What a model's author touches: marking blocks, recomputing them, scanned stacks of them."""

from pathlib import Path

import flax
from jax.extend import source_info_util

from jaxpp_flax.layers.marking import pipeline_stage
from jaxpp_flax.layers.nnx import PipelineStage
from jaxpp_flax.layers.scan import join_layers, join_scanned, split_layers, split_scanned

# Messages name the user's line, not ours, nor that of a Flax transform which calls a block, as `nn.scan(Block)` does.
# Flax leaves other files of its own out in the same way.
source_info_util.register_exclusion(str(Path(__file__).resolve().parent))
for _part in ("core", "nnx/transforms", "nnx/graph"):  # nnx/graph.py, nnx/graphlib.py
    source_info_util.register_exclusion(str(Path(flax.__file__).parent / _part))

__all__ = [
    "PipelineStage",
    "join_layers",
    "join_scanned",
    "pipeline_stage",
    "split_layers",
    "split_scanned",
]
