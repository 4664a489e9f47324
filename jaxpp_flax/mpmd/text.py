"""The program as text, in the style of Shardy's MPMD dialect."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
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


@dataclass(eq=False)
class _Value:
    """A value on a mesh; `source` is the value that was sent for it, `maker` the number of the run that makes it."""

    mesh: str
    aval: Any
    maker: int | None = None
    source: _Value | None = None

    @property
    def made_by(self) -> int | None:
        """The run that makes the value, or the value that was sent for it."""
        return self.maker if self.source is None else self.source.made_by


@dataclass(frozen=True)
class _Call:
    """One run of a fragment."""

    run: Run
    fragment: Fragment
    reads: list[_Value]
    makes: list[_Value]


class _Names:
    """The names of values; a value from another mesh gets a line for its transfer when it is first read."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._names: dict[_Value, str] = {}
        self._numbers = itertools.count()

    def of(self, value: _Value) -> str:
        """Return the name of a value."""
        if value not in self._names and value.source is not None:
            source = self.of(value.source)
            ends = [_mesh_tensor(end.mesh, value.aval) for end in (value.source, value)]
            name = self.define(value)
            self.lines.append(f"    {name} = mpmd.transfer {source} : ({ends[0]}) -> {ends[1]}")
        return self._names[value]

    def define(self, value: _Value, name: str | None = None) -> str:
        """Give a value the next name, or this one."""
        self._names[value] = f"%{next(self._numbers)}" if name is None else name
        return self._names[value]


def as_text(built: Built, meshes: tuple[str, ...], name: str, specs: list[PartitionSpec]) -> str:
    """Return a line for each run of a fragment and for each transfer, then the fragments' equations.

    The runs stand in the order of the program that was traced, as far as data and each mesh's own order allow. Work
    without a name stands in place, as `mpmd.fragment`.
    """
    program, names = built.program, _Names()
    held: dict[int, _Value] = {}
    arguments: list[str] = []
    for number, (ranks, value, spec) in enumerate(zip(program.arguments, built.step.inputs, specs, strict=True)):
        for rank, place in ranks.items():
            held[place] = _Value(meshes[rank], value.aval)
            names.define(held[place], f"%arg{number}")
            arguments.append(f"%arg{number}: {_mesh_tensor(meshes[rank], value.aval, spec)}")
    calls = _calls(built, meshes, held)
    for number in _listed(calls, built):
        names.lines += _lines(calls[number], built, meshes, names)
    results = [
        names.of(held[next(iter(result.values()))])
        if isinstance(result, dict)
        else str(getattr(result, "value", result))
        for result in program.results
    ]
    types = [
        _mesh_tensor(meshes[rank], atom.aval) if isinstance(atom, Value) else _tensor(atom.aval)
        for atom, rank in zip(built.step.outputs, built.placement.results, strict=True)
    ]
    text = [
        f"module @{name} {{",
        f"  func.func public @main({', '.join(arguments)}) -> ({', '.join(types)}) {{",
        *names.lines,
        f"    return {', '.join(results)}",
        "  }",
    ]
    for number in sorted({call.run.task for call in calls if call.fragment.origins}):
        text += [f"  func.func @p{number}_{program.tasks[number].name}.main {{", _body(built, number, "    "), "  }"]
    return "\n".join([*text, "}"])


def _calls(built: Built, meshes: tuple[str, ...], held: dict[int, _Value]) -> list[_Call]:
    """Return the runs in the order in which they start; `held` has the program's values."""
    calls: list[_Call] = []
    fragments = iter(built.fragments)
    for instruction in built.program.instructions:
        if isinstance(instruction, Run):
            mesh, outputs = meshes[instruction.rank], built.program.tasks[instruction.task].graph.outputs
            made = [_Value(mesh, atom.aval, maker=len(calls)) for atom in outputs]
            calls.append(_Call(instruction, next(fragments), [held[value] for value in instruction.inputs], made))
            held.update(zip(instruction.outputs, made, strict=True))
        elif isinstance(instruction, Transfer):
            sources = [held[value] for value in instruction.sent]
            mesh = meshes[instruction.target]
            found = [_Value(mesh, source.aval, source=source) for source in sources]
            held.update(zip(instruction.received, found, strict=True))
    return calls


def _listed(calls: list[_Call], built: Built) -> list[int]:
    """Return the numbers of the runs in program order, each after the runs that it waits for.

    The order is found in rounds: each goes through the program and takes what can run.
    """
    position = {node: number for number, node in enumerate(built.step.nodes)}
    first = [
        min(position[node] for node in named or call.fragment.nodes)
        for call in calls
        for named in [[node for node in call.fragment.nodes if node.computation is not None]]
    ]
    last_of_mesh: dict[int, int] = {}
    before: list[set[int]] = []
    for number, call in enumerate(calls):
        waits = {value.made_by for value in call.reads} | {last_of_mesh.get(call.run.rank)}
        before.append({other for other in waits if other is not None})
        last_of_mesh[call.run.rank] = number
    found: dict[int, None] = {}
    remaining = sorted(range(len(calls)), key=first.__getitem__)
    while remaining:
        for number in remaining:
            if before[number] <= found.keys():
                found[number] = None
        remaining = [number for number in remaining if number not in found]
    return list(found)


def _lines(call: _Call, built: Built, meshes: tuple[str, ...], names: _Names) -> list[str]:
    run, fragment = call.run, call.fragment
    read = ", ".join(map(names.of, call.reads))
    made = ", ".join(map(names.define, call.makes))
    made = f"    {made} = " if made else "    "
    mesh, origins = meshes[run.rank], ", ".join(map(str, fragment.origins))
    if not origins:
        return [f'{made}mpmd.fragment<mesh="{mesh}", origin=[]> ({read}) {{', _body(built, run.task, "      "), "    }"]
    stage = "" if fragment.key.stage is None else f", stage={fragment.key.stage}"
    counter = f" {{call_counter = {run.microbatch}}}" if run.microbatch >= 0 else ""
    task = f"@p{run.task}_{built.program.tasks[run.task].name}.main"
    return [f'{made}mpmd.fragment_call<mesh="{mesh}", origin=[{origins}]{stage}> {task}({read}){counter}']


def _body(built: Built, task: int, indent: str) -> str:
    return "\n".join(f"{indent}{line}" for line in built.program.tasks[task].graph.as_text().splitlines())
