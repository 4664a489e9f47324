"""The parts of a report of a compiled step as text: the bytes of each rank, and the distinct tasks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from jaxpp_flax.messages import amount
from jaxpp_flax.planning.compilers.memory import RankBytes
from jaxpp_flax.planning.compilers.tasks import CompiledTask, Exchange

__all__ = ["answer", "rank_table", "task_table"]

_HEADS = {
    "parameters": "params", "optimizer state": "optimizer", "model state": "other state", "moving average": "average",
    "batch": "batch", "arguments": "arguments", "accumulators": "accumul.", "residuals": "residuals",
    "gradients between stages": "gradients", "between tasks": "others", "workspace": "workspace",
    "programs": "programs",
}  # fmt: skip


def rank_table(ranks: Sequence[RankBytes]) -> Iterator[str]:
    """Return a row for each rank at its fullest moment; neighbours that hold the same share one.

    Example:
      >>> print("\\n".join(rank_table([RankBytes(rank=r, task="bwd", kinds={"residuals": 8}) for r in range(3)])))
      ranks  residuals     total  while it runs
      0-2          8 B       8 B  bwd
    """
    found = {kind for rank in ranks for kind in rank.kinds}
    kinds = [kind for kind in _HEADS if kind in found] + sorted(found - _HEADS.keys())
    heads = [_HEADS.get(kind, kind) for kind in kinds] + ["total"]
    hosts = any(rank.host for rank in ranks)
    yield _line("ranks", [*heads, *(["on host"] if hosts else [])], heads, "while it runs")
    for first, last in _alike(ranks):
        rank = ranks[first]
        cells = [*(rank.kinds.get(kind, 0) for kind in kinds), rank.total, *([rank.host] if hosts else [])]
        names = f"{first}" if first == last else f"{first}-{last}"
        yield _line(names, [amount(cell, "B") if cell else "-" for cell in cells], heads, rank.task)


def _line(first: str, cells: Sequence[str], heads: Sequence[str], last: str) -> str:
    widths = [max(8, len(head)) for head in heads] + [8] * (len(cells) - len(heads))
    return f"{first:<5}  {'  '.join(f'{cell:>{width}}' for cell, width in zip(cells, widths, strict=True))}  {last}"


def _alike(ranks: Sequence[RankBytes]) -> Iterator[tuple[int, int]]:
    """Return the first and the last of neighbouring ranks whose rows are equal but for the task's name."""
    first = 0
    for rank in range(1, len(ranks) + 1):
        if rank == len(ranks) or _cells(ranks[rank]) != _cells(ranks[first]):
            yield first, rank - 1
            first = rank


def _cells(rank: RankBytes) -> tuple[Mapping[str, str], str]:
    return {kind: amount(nbytes, "B") for kind, nbytes in rank.kinds.items()}, amount(rank.host, "B")


def task_table(tasks: Sequence[CompiledTask]) -> Iterator[str]:
    """Return a row for each distinct task, and a line for its collectives and copies."""
    width = max((len(_name(task)) for task in tasks), default=4)
    yield (
        f"{'task':<{width}}  {'runs':>5}  {'operations':>10}  {'a run':>8}  {'workspace':>9}  {'donated':>8}  "
        f"{'compiled in':>11}"
    )
    for task in tasks:
        yield (
            f"{_name(task):<{width}}  {task.runs:>5}  {task.operations:>10}  {amount(task.seconds, 's'):>8}  "
            f"{_bytes(task.workspace_bytes):>9}  {_bytes(task.aliased_bytes):>8}  "
            f"{amount(task.compile_seconds, 's'):>11}"
        )
        for exchange in sorted(task.exchanges, key=lambda of: -of.nbytes):
            yield f"    {_exchange(exchange)}"
        yield from (f"    {line}" for line in _copies(task))


def _name(task: CompiledTask) -> str:
    more = len(task.names) - 1
    return task.names[0] + (f" and {more} like it" if more else "")


def _bytes(nbytes: int) -> str:
    return amount(nbytes, "B") if nbytes else "-"


def _exchange(exchange: Exchange) -> str:
    over = f" over {' and '.join(exchange.axes)}" if exchange.axes else ""
    beside = ""
    if exchange.asynchronous:
        beside = f", {exchange.asynchronous} beside {_operations(exchange.work_beside)}"
    return f"{exchange.count} x {exchange.kind}{over}, {amount(exchange.nbytes, 'B')}{beside}"


_COPIES = {"argument": "copy of an argument", "to host": "copy to the host", "from host": "copy from the host"}


def _operations(count: int) -> str:
    return "1 other operation" if count == 1 else f"{count} other operations"


def _copies(task: CompiledTask) -> Iterator[str]:
    for what, text in _COPIES.items():
        found = [copy for copy in task.copies if copy.what == what]
        if found:
            nbytes, beside = sum(of.times * of.nbytes for of in found), sum(of.asynchronous for of in found)
            more = f", {beside} beside {_operations(sum(of.work_beside for of in found))}" if beside else ""
            yield f"{len(found)} x {text}, {amount(nbytes, 'B')}{more}"


def answer(ranks: Sequence[RankBytes], memory: float | None, device: str) -> str:
    """Return the sentence that says whether every rank fits.

    Example:
      >>> answer([RankBytes(rank=0, task="bwd_0", kinds={"residuals": 8_000_000_000})], 6e9, "TPU v5")
      'It does not fit: rank 0 holds 8 GB of the 6 GB of a TPU v5 while bwd_0 runs, 2 GB too much.'
    """
    fullest = max(ranks, key=lambda rank: rank.total)
    holds = f"rank {fullest.rank} holds {amount(fullest.total, 'B')}"
    if memory is None:
        return f"The fullest is: {holds} while {fullest.task} runs; the memory of a {device} is not known."
    whole = f"{holds} of the {amount(memory, 'B')} of a {device} while {fullest.task} runs"
    over = fullest.total - memory
    if over > 0:
        return f"It does not fit: {whole}, {amount(over, 'B')} too much."
    return f"It fits: {whole}, {amount(-over, 'B')} are free."
