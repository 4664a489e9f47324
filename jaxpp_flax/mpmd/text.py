"""The program as text, in the style of Shardy's MPMD dialect."""

from __future__ import annotations

import itertools
from typing import Any

from jax.sharding import PartitionSpec

from jaxpp_flax.engine.program.program import Run, Transfer
from jaxpp_flax.engine.tracing.ir import Value
from jaxpp_flax.mpmd.partitioning.build import Built

__all__ = ["as_text"]


def _tensor(aval: Any) -> str:
    dims = "".join(f"{dim}x" for dim in aval.shape)
    return f"tensor<{dims}{aval.dtype}>"


def _mesh_tensor(mesh: str, aval: Any, spec: PartitionSpec | None = None) -> str:
    sharding = f", sharding={spec}" if spec else ""
    return f'!mpmd.mesh_tensor<"{mesh}", {_tensor(aval)}{sharding}>'


def as_text(built: Built, meshes: tuple[str, ...], name: str, specs: list[PartitionSpec]) -> str:
    """Return one line for each run of a fragment and for each transfer, then the fragments' equations."""
    program = built.program
    names: dict[int, str] = {}
    avals: dict[int, Any] = {}
    numbers = itertools.count()

    def define(slot: int, aval: Any) -> str:
        names[slot], avals[slot] = f"%{next(numbers)}", aval
        return names[slot]

    arguments: list[str] = []
    for number, (ranks, value, spec) in enumerate(zip(program.arguments, built.step.inputs, specs, strict=True)):
        for rank, slot in ranks.items():
            names[slot], avals[slot] = f"%arg{number}", value.aval
            arguments.append(f"%arg{number}: {_mesh_tensor(meshes[rank], value.aval, spec)}")
    lines: list[str] = []
    fragments = iter(built.fragments)
    for instruction in program.instructions:
        if isinstance(instruction, Run):
            fragment, task = next(fragments), program.tasks[instruction.task]
            read = ", ".join(names[s] for s in instruction.inputs)
            made = [define(s, a.aval) for s, a in zip(instruction.outputs, task.graph.outputs, strict=True)]
            origin = ", ".join(map(str, fragment.origins))
            stage = "" if fragment.key.stage is None else f", stage={fragment.key.stage}"
            counter = f" {{call_counter = {instruction.microbatch}}}" if instruction.microbatch >= 0 else ""
            lines.append(
                f'    {", ".join(made) + " = " if made else ""}mpmd.fragment_call<mesh="{meshes[instruction.rank]}", '
                f"origin=[{origin}]{stage}> @p{instruction.task}_{task.name}.main({read}){counter}"
            )
        elif isinstance(instruction, Transfer):
            for sent, received in zip(instruction.sent, instruction.received, strict=True):
                source, aval = names[sent], avals[sent]
                ends = [_mesh_tensor(meshes[end], aval) for end in (instruction.source, instruction.target)]
                lines.append(f"    {define(received, aval)} = mpmd.transfer {source} : {' -> '.join(ends)}")
    results = [
        names[next(iter(result.values()))] if isinstance(result, dict) else str(getattr(result, "value", result))
        for result in program.results
    ]
    types = [
        _mesh_tensor(meshes[rank], atom.aval) if isinstance(atom, Value) else _tensor(atom.aval)
        for atom, rank in zip(built.step.outputs, built.placement.results, strict=True)
    ]
    text = [
        f"module @{name} {{",
        f"  func.func public @main({', '.join(arguments)}) -> ({', '.join(types)}) {{",
        *lines,
        f"    return {', '.join(results)}",
        "  }",
    ]
    for number, task in enumerate(program.tasks):
        body = "\n".join(f"    {line}" for line in task.graph.as_text().splitlines())
        text += [f"  func.func @p{number}_{task.name}.main {{", body, "  }"]
    return "\n".join([*text, "}"])
