"""The program as text, in the style of Shardy's MPMD dialect."""

from __future__ import annotations

from typing import Any

from jax.sharding import PartitionSpec

from jaxpp_flax.engine.program.program import Run, Transfer
from jaxpp_flax.engine.tracing.ir import Value
from jaxpp_flax.mpmd.partitioning.build import Built
from jaxpp_flax.mpmd.partitioning.fragments import Fragment

__all__ = ["as_text"]


def _tensor(aval: Any) -> str:
    dims = "".join(f"{dim}x" for dim in aval.shape)
    return f"tensor<{dims}{aval.dtype}>"


def _mesh_tensor(mesh: str, aval: Any, spec: PartitionSpec | None = None) -> str:
    sharding = f", sharding={spec}" if spec else ""
    return f'!mpmd.mesh_tensor<"{mesh}", {_tensor(aval)}{sharding}>'


def as_text(built: Built, meshes: tuple[str, ...], name: str, specs: list[PartitionSpec]) -> str:
    """Return a line for each run of a fragment and for each transfer, as they run, then the fragments' equations.

    Work without a name stands in place, as `mpmd.fragment`.
    """
    program = built.program
    names: dict[int, tuple[str, Any]] = {}  # the name and the type of each value
    arguments: list[str] = []
    for number, (ranks, value, spec) in enumerate(zip(program.arguments, built.placed.inputs, specs, strict=True)):
        for rank, place in ranks.items():
            names[place] = f"%arg{number}", value.aval
            arguments.append(f"%arg{number}: {_mesh_tensor(meshes[rank], value.aval, spec)}")
    lines: list[str] = []
    named: set[int] = set()
    fragments = iter(built.fragments)
    for instruction in program.instructions:
        if isinstance(instruction, Run):
            fragment = next(fragments)
            lines += _run_lines(instruction, fragment, built, meshes, names)
            named |= {instruction.task} if fragment.origins else set()
        elif isinstance(instruction, Transfer):
            source, target = meshes[instruction.source], meshes[instruction.target]
            for sent, received in zip(instruction.sent, instruction.received, strict=True):
                value, aval = names[sent]
                ends = _mesh_tensor(source, aval), _mesh_tensor(target, aval)
                names[received] = f"%{received}", aval
                lines.append(f"    %{received} = mpmd.transfer {value} : ({ends[0]}) -> {ends[1]}")
    results = [
        names[next(iter(result.values()))][0] if isinstance(result, dict) else str(getattr(result, "value", result))
        for result in program.results
    ]
    types = [
        _mesh_tensor(meshes[rank], atom.aval) if isinstance(atom, Value) else _tensor(atom.aval)
        for atom, rank in zip(built.placed.outputs, built.placed.results, strict=True)
    ]
    text = [
        f"module @{name} {{",
        f"  func.func public @main({', '.join(arguments)}) -> ({', '.join(types)}) {{",
        *lines,
        f"    return {', '.join(results)}",
        "  }",
    ]
    for number in sorted(named):
        text += [f"  func.func @p{number}_{program.tasks[number].name}.main {{", _body(built, number, "    "), "  }"]
    return "\n".join([*text, "}"])


def _run_lines(run: Run, fragment: Fragment, built: Built, meshes: tuple[str, ...], names: dict[int, Any]) -> list[str]:
    task = built.program.tasks[run.task]
    read = ", ".join(names[value][0] for value in run.inputs)
    names.update((v, (f"%{v}", atom.aval)) for v, atom in zip(run.outputs, task.graph.outputs, strict=True))
    made = f"    {', '.join(names[value][0] for value in run.outputs)} = " if run.outputs else "    "
    mesh, origins = meshes[run.rank], ", ".join(map(str, fragment.origins))
    if not origins:
        return [f'{made}mpmd.fragment<mesh="{mesh}", origin=[]> ({read}) {{', _body(built, run.task, "      "), "    }"]
    stage = "" if fragment.key.stage is None else f", stage={fragment.key.stage}"
    counter = f" {{call_counter = {run.microbatch}}}" if run.microbatch >= 0 else ""
    name = f"@p{run.task}_{task.name}.main"
    return [f'{made}mpmd.fragment_call<mesh="{mesh}", origin=[{origins}]{stage}> {name}({read}){counter}']


def _body(built: Built, task: int, indent: str) -> str:
    return "\n".join(f"{indent}{line}" for line in built.program.tasks[task].graph.as_text().splitlines())
