"""What XLA's compilers say in the text of a scheduled program: its collectives and copies, and what runs beside them.

The texts for TPU, GPU and CPU differ: an asynchronous collective is a pair `all-gather-start` and `all-gather-done` on
GPU, and on TPU also several fusions that share a channel: one that begins it, some that do other work meanwhile, and
one that ends it. A reduce-scatter may be a fusion around an all-reduce. What this file does not know it counts as an
operation, and nothing else of it; so another XLA gives less detail, and no error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from jaxpp_flax._compat_xla.lines import (
    HOST,
    Operation,
    array_bytes,
    computations,
    first_group,
    laid_out_bytes,
    memory_space,
)

__all__ = ["Collective", "Copy", "ProgramText", "read_program"]

_COLLECTIVES = {
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute",
    "collective-broadcast",
}  # fmt: skip
# What a device does not compute for: names of values, and the ends of what runs beside other work.
_NO_WORK = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "partition-id", "replica-id", "after-all",
    "opt-barrier", "while", "conditional", "call", "add-dependency",
}  # fmt: skip
_NO_WORK_TARGETS = {"ConcatBitcast", "AllocateBuffer", "AssumeGatherIndicesInBound"}
_BEGINS, _ENDS = "AsyncCollectiveStart", "AsyncCollectiveDone"  # targets of calls inside a TPU's fusions
_ALIAS = re.compile(r"\{[\d, ]*\}: \((\d+), \{[\d, ]*\}, (?:may|must)-alias\)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"?(\d+)')


@dataclass(frozen=True, kw_only=True)
class Collective:
    """A collective operation, as one device of a program sees it.

    Attributes:
      kind: such as "all-gather".
      nbytes: the bytes of the whole array on one device: what a gather makes, or what a reduction reads.
      devices: the program's numbers of the devices of the first group; empty if the text does not say.
      times: how often a run of the program does this.
      asynchronous: whether other operations may run beside it.
      work_beside: the operations that the schedule puts between its start and its end.
    """

    kind: str
    nbytes: int
    devices: tuple[int, ...] = ()
    times: int = 1
    asynchronous: bool = False
    work_beside: int = 0


@dataclass(frozen=True, kw_only=True)
class Copy:
    """A copy of an argument, or a copy between the memory of a device and of its host.

    Attributes:
      what: "argument", "to host" or "from host".
      nbytes: the bytes of one copy.
      argument: the number of the argument, if the copy is one of an argument.
      times, asynchronous, work_beside: as of a `Collective`.
    """

    what: str
    nbytes: int
    argument: int | None = None
    times: int = 1
    asynchronous: bool = False
    work_beside: int = 0


@dataclass(frozen=True)
class ProgramText:
    """A program's text, read.

    Attributes:
      computations: the operations of each computation by its name, in the order of the schedule.
      entry: the name of the computation that runs first.
      aliased: the numbers of the arguments whose memory a result takes over.
    """

    computations: Mapping[str, Sequence[Operation]]
    entry: str
    aliased: tuple[int, ...] = ()
    _types: dict[str, dict[str, str]] = field(default_factory=dict[str, "dict[str, str]"], compare=False)

    @cached_property
    def operations(self) -> int:
        """The number of operations that a device runs; those of a loop's body count once."""
        return sum(self._is_work(op) for name, _ in self._running() for op in self.computations[name])

    @cached_property
    def argument_bytes(self) -> tuple[int, ...]:
        """The bytes of each argument on a device, as the compiler lays it out: with its padding."""
        found = {
            int(re.search(r"\d+", op.rest)[0]): laid_out_bytes(op.type)  # pyright: ignore[reportOptionalSubscript]
            for op in self.computations.get(self.entry, ())
            if op.opcode == "parameter"
        }
        return tuple(found[number] for number in sorted(found))

    @cached_property
    def result_bytes(self) -> tuple[int, ...]:
        """The bytes of each result, likewise."""
        root = self.computations[self.entry][-1].type if self.computations.get(self.entry) else ""
        return array_bytes(root)

    @cached_property
    def collectives(self) -> tuple[Collective, ...]:
        """The collectives that a run does, in the order in which they begin."""
        return tuple(found for name, times in self._running() for found in self._collectives(name, times))

    @cached_property
    def copies(self) -> tuple[Copy, ...]:
        """The copies of arguments into the same memory, and those to the host and from it."""
        return tuple(found for name, times in self._running() for found in self._copies(name, times))

    # ------------------------------------------------------------ walks

    def _running(self) -> list[tuple[str, int]]:
        """Return the computations that run by themselves (not inside a fusion), each with how often it runs."""
        found: list[tuple[str, int]] = []
        waiting = [(self.entry, 1)]
        while waiting:
            name, times = waiting.pop(0)
            if name not in self.computations or any(name == known for known, _ in found):
                continue
            found.append((name, times))
            for op in self.computations[name]:
                if op.opcode in ("while", "conditional", "call"):
                    trips = _TRIPS.search(op.rest)
                    waiting += [(called, times * int(trips[1] if trips else 1)) for called in op.called]
        return found

    def _is_work(self, op: Operation) -> bool:
        target = re.search(r'custom_call_target="([^"]*)"', op.rest)
        if op.opcode in _NO_WORK or op.opcode.endswith("-done") or (target and target[1] in _NO_WORK_TARGETS):
            return False
        return not (op.opcode.endswith("-start") and _base(op.opcode) not in _COLLECTIVES)

    def _types_in(self, name: str) -> dict[str, str]:
        if name not in self._types:
            self._types[name] = {op.name: op.type for op in self.computations[name]}
        return self._types[name]

    def _collectives(self, name: str, times: int) -> Iterator[Collective]:
        operations, seen = self.computations[name], set[str]()
        for position, op in enumerate(operations):
            found = self._collective_of(name, op)
            if found is None:
                continue
            kind, inner, where = found
            if where != name and inner.channel in seen:  # the rest of one that has begun
                continue
            if where != name and inner.channel is not None:
                seen.add(inner.channel)
            end = self._end(operations, position, inner.channel)
            types, sync = self._types_in(where), '"is_sync":true' in op.rest
            read = sum(laid_out_bytes(types.get(operand, ""), padded=False) for operand in inner.operands)
            made = laid_out_bytes(operations[end].type if where == name else inner.type, padded=False)
            yield Collective(
                kind=kind, nbytes=max(read, made), devices=first_group(inner.rest), times=times,
                asynchronous=end > position and not sync,
                work_beside=0 if sync else self._work(operations[position + 1 : end]),
            )  # fmt: skip

    def _collective_of(self, name: str, op: Operation) -> tuple[str, Operation, str] | None:
        """Return the kind of an operation that is or holds a collective, that collective, and where it stands."""
        kind = _base(op.opcode)
        if kind in _COLLECTIVES and not op.opcode.endswith("-done"):
            return kind, op, name
        if op.opcode not in ("fusion", "async-start"):
            return None
        for called in op.called:
            for inner in self.computations.get(called, ()):
                if (kind := _base(inner.opcode)) in _COLLECTIVES:
                    return "reduce-scatter" if "reduce-scatter" in called else kind, inner, called
        return None

    def _end(self, operations: Sequence[Operation], start: int, channel: str | None) -> int:
        """Return the position where what starts at a position ends; its own if nothing runs beside it."""
        names = {operations[start].name}
        if operations[start].opcode.endswith("-start"):
            for position in range(start + 1, len(operations)):
                op = operations[position]
                if names.intersection(op.operands):
                    if op.opcode.endswith("-done"):
                        return position
                    names.add(op.name)
            return start
        if not self._calls(operations[start], _BEGINS):
            return start
        for position in range(start + 1, len(operations)):
            found = self._collective_of("", operations[position])
            if found and found[1].channel == channel and self._calls(operations[position], _ENDS):
                return position
        return start

    def _calls(self, op: Operation, target: str) -> bool:
        inside = (inner for called in op.called for inner in self.computations.get(called, ()))
        return any(f'custom_call_target="{target}"' in inner.rest for inner in inside)

    def _work(self, operations: Sequence[Operation]) -> int:
        """Return the number of operations that compute something: not those that only exchange or wait."""

        def computes(op: Operation) -> bool:
            if not self._is_work(op) or _base(op.opcode) in _COLLECTIVES:
                return False
            return not (self._calls(op, _BEGINS) or self._calls(op, _ENDS))

        return sum(map(computes, operations))

    def _copies(self, name: str, times: int) -> Iterator[Copy]:
        operations = self.computations[name]
        arguments = {
            op.name: int(re.search(r"\d+", op.rest)[0])  # pyright: ignore[reportOptionalSubscript]
            for op in operations
            if op.opcode == "parameter" and name == self.entry
        }
        for position, op in enumerate(operations):
            if op.opcode in ("bitcast", "get-tuple-element") and op.operands and op.operands[0] in arguments:
                arguments[op.name] = arguments[op.operands[0]]
            if not self._is_copy(op):
                continue
            source = self._types_in(name).get(op.operands[0], "") if op.operands else ""
            spaces = [memory_space(source), memory_space(op.type)]
            argument = arguments.get(op.operands[0]) if op.operands else None
            what = {("", HOST): "to host", (HOST, ""): "from host"}.get((spaces[0], spaces[1]), "argument")
            if (what == "argument" and (argument is None or spaces[0] != spaces[1])) or (
                op.opcode == "copy-start" and spaces == [HOST, HOST]
            ):
                continue  # a copy of what the program has made, or into a cache
            end = self._end(operations, position, None)
            yield Copy(
                what=what, nbytes=array_bytes(op.type)[0], argument=argument, times=times,
                asynchronous=end > position, work_beside=self._work(operations[position + 1 : end]),
            )  # fmt: skip

    def _is_copy(self, op: Operation) -> bool:
        """Return whether an operation only copies: also a fusion, if it holds nothing else."""
        if op.opcode in ("copy", "copy-start"):
            return True
        if op.opcode != "fusion":
            return False
        inside = {inner.opcode for called in op.called for inner in self.computations.get(called, ())}
        return "copy" in inside and inside <= {"copy", "parameter", "bitcast"}


def read_program(text: str) -> ProgramText:
    """Read the text of a scheduled program, as `executable.as_text()` returns it.

    Example:
      >>> found = read_program('''HloModule jit_f, input_output_alias={ {}: (0, {}, may-alias) }
      ...
      ... ENTRY %main (x: f32[8,8]) -> f32[8,8] {
      ...   %x = f32[8,8]{1,0} parameter(0)
      ...   ROOT %all-reduce = f32[8,8]{1,0} all-reduce(%x), channel_id=1, replica_groups={{0,1},{2,3}}, to_apply=%add
      ... }''')
      >>> found.collectives[0].kind, found.collectives[0].nbytes, found.collectives[0].devices
      ('all-reduce', 256, (0, 1))
      >>> found.aliased, found.operations
      ((0,), 1)
    """
    found, entry = computations(text)
    head = re.search(r"^HloModule .*$", text, re.MULTILINE)
    aliased = tuple(int(number) for number in _ALIAS.findall(head[0] if head else ""))
    return ProgramText(found, entry, aliased)


def _base(opcode: str) -> str:
    return opcode.removesuffix("-start").removesuffix("-done")
