"""Stages for Linen models: `PipelineStage` (wrapper and base class), the `pipeline_stage` decorator, and `scan`.

>>> import jaxpp_flax.linen as pipeline
>>> pipeline.PipelineStage.__name__
'PipelineStage'
"""

from jaxpp_flax.layers.linen import PipelineStage, pipeline_stage
from jaxpp_flax.layers.scan import scan

__all__ = ["PipelineStage", "pipeline_stage", "scan"]
