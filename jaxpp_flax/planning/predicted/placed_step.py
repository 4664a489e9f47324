"""The bytes of each rank of a placed step, before any of its tasks is compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

from jax.sharding import NamedSharding, PartitionSpec

from jaxpp_flax.engine.analyses.spec_flow import specs_after
from jaxpp_flax.engine.arrays.mesh import MpmdMesh
from jaxpp_flax.engine.pipeline import PlacedPipeline
from jaxpp_flax.engine.program.program import ProgramTask
from jaxpp_flax.engine.runtime.executables import Executables
from jaxpp_flax.engine.runtime.task_compiler import TaskCompiler
from jaxpp_flax.engine.summary import MemoryAnalysis, analyse_memory
from jaxpp_flax.engine.tracing.ir import Value

__all__ = ["predict_memory", "predicted_executables"]


def predict_memory(placed: PlacedPipeline) -> tuple[MemoryAnalysis, ...]:
    """Return what `memory_analysis` of the compiled step will say, but for `temp_bytes`."""
    return analyse_memory(predicted_executables(placed))


def predicted_executables(placed: PlacedPipeline) -> Executables:
    """Return a step's program as if it was compiled.

    The partitions of what tasks return are predicted, not XLA's own: see `specs_after`. Nothing is compiled, and other
    processes take no part.
    """
    return placed.executables_by(cast(TaskCompiler[MpmdMesh], _Predictor(placed.mpmd_mesh)), alone=True)


@dataclass
class _Predictor:
    """Stands in for a `TaskCompiler`: an executable only knows how its results are partitioned."""

    mesh: MpmdMesh
    chooses_layouts: ClassVar[bool] = False
    _known: dict[Any, _Predicted] = field(default_factory=dict[Any, Any])

    def start(
        self, task: ProgramTask, in_specs: Sequence[PartitionSpec], out_specs: Sequence[PartitionSpec | None], *_: Any
    ) -> Callable[[], _Predicted]:
        """Return a function that returns the predicted executable."""
        if None not in out_specs:
            return lambda: _Predicted(())
        key = task.graph, tuple(in_specs)
        if key not in self._known:
            mesh = self.mesh.unstack[task.rank]
            specs = specs_after(task.graph, in_specs, mesh.shape)
            found = [
                specs.get(v, PartitionSpec()) if isinstance(v, Value) else PartitionSpec() for v in task.graph.outputs
            ]
            self._known[key] = _Predicted(tuple(NamedSharding(mesh, spec) for spec in found))
        return lambda: self._known[key]


@dataclass(frozen=True)
class _Predicted:
    """What is known of a task's executable."""

    output_shardings: tuple[NamedSharding, ...]
