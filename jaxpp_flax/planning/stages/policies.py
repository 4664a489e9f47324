"""Policies that assign a model's blocks to stages: a policy chooses the marks that cut.

The marks of a model, in program order, divide it into segments. If the marks close named blocks (`PipelineStage`), the
work after the last mark (head, loss) belongs to the last block, so M marks make M blocks. Bare marks
(`mark_stage_end`) make M + 1 segments. Work before the first mark belongs to the first segment. A balanced assignment,
a mapping from names and a plan may also cut at the last mark: then the work after this mark is a block of its own,
`after_<name of the last block>`.

The number of stages need not divide the number of segments. Each segment is in exactly one stage.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

from jaxpp_flax.engine.traced import Marks
from jaxpp_flax.engine.tracing.markers import Mark, block_names, segment_names
from jaxpp_flax.error_codes import documented
from jaxpp_flax.globs import matches
from jaxpp_flax.messages import listed, near_names
from jaxpp_flax.planning.predicted.blocks import Blocks
from jaxpp_flax.planning.stages.balancing import balance, even_sizes

__all__ = [
    "AssignmentError",
    "CutPolicy",
    "balanced",
    "block_names",
    "by_name",
    "cuts_of",
    "even",
    "segment_names",
    "sizes",
    "sizes_of",
]

CutPolicy = Callable[[Sequence[Mark], int], tuple[int, ...]]
"""`policy(marks, num_stages)` returns the indices of the `num_stages - 1` marks that cut, in increasing order."""


@documented("JPF303")
class AssignmentError(ValueError):
    """The blocks of a model cannot be assigned to stages as the arguments say."""


def even() -> CutPolicy:
    """Return the policy that gives each stage the same number of segments, or one more to each of the first stages.

    Example:
      >>> marks = [Mark(f"block_{i}", True, "model.py:7") for i in range(8)]
      >>> even()(marks, 3)  # 3, 3 and 2 blocks
      (2, 5)
    """

    def policy(marks: Sequence[Mark], num_stages: int) -> tuple[int, ...]:
        _check_enough(marks, num_stages)
        return cuts_of(even_sizes(_num_segments(marks, num_stages), num_stages))

    return policy


def balanced(costs: Sequence[float] | None = None) -> CutPolicy:
    """Return the policy that makes the slowest stage as fast as possible: its cost is the smallest that is possible.

    The result is exact, by dynamic programming. This policy is for `mpmd_jit_with_loop(cut_policy=)`, with one stage on
    each rank. The trainer's `assignment="balanced"` also uses the schedule.

    Args:
      costs: the cost of each block, and one more number for the work after the last block (without it, this work stays
        with the last block). Default: the engine's estimate in FLOPs, forward and backward, with embedding and head.

    Raises (when the policy is used):
      AssignmentError: if `costs` does not give one number for each block.
      TypeError: without `costs`, if the marks are not those of the engine.

    Example:
      >>> marks = [Mark(f"block_{i}", True, "model.py:7") for i in range(5)]
      >>> balanced([1, 1, 1, 1, 4])(marks, 2), balanced([1, 1, 1, 1, 1, 4])(marks, 2)
      ((3,), (4,))

    Source: the linear partition problem; Skiena, "The Algorithm Design Manual", section 8.5.
    """

    def policy(marks: Sequence[Mark], num_stages: int) -> tuple[int, ...]:
        _check_enough(marks, num_stages)
        if costs is not None:
            found = list(costs)
        elif isinstance(marks, Marks):
            found = [work.total for work in Blocks.of(marks).work()]
        else:
            raise TypeError("balanced() without costs needs the engine's `Marks`, which have the costs of blocks.")
        if len(found) not in (len(marks), len(marks) + 1) or len(found) < num_stages:
            raise AssignmentError(
                f"balanced() got {len(found)} costs for {len(marks)} blocks: {_listing(marks)}. Give one for each "
                "block, and optionally one more for the work after the last block."
            )
        return cuts_of(balance(found, num_stages))

    return policy


def sizes(blocks_per_stage: Sequence[int]) -> CutPolicy:
    """Return the policy that puts the given numbers of blocks into the stages, in order.

    Args:
      blocks_per_stage: the number of blocks of each stage.

    Raises (when the policy is used):
      AssignmentError: if the sizes do not fit the number of stages or of blocks, or a stage would be empty.

    Example:
      >>> marks = [Mark(f"block_{i}", True, "model.py:7") for i in range(8)]
      >>> sizes([3, 2, 3])(marks, 3)
      (2, 4)
    """
    wanted = list(blocks_per_stage)

    def policy(marks: Sequence[Mark], num_stages: int) -> tuple[int, ...]:
        if len(wanted) != num_stages:
            raise AssignmentError(
                f"assignment={wanted} gives sizes for {len(wanted)} stages, but num_stages={num_stages}. "
                "Give one size for each stage."
            )
        for stage, size in enumerate(wanted):
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise AssignmentError(
                    f"assignment={wanted} would leave stage {stage} empty ({size!r} blocks). Every stage needs at "
                    "least one block: give a smaller num_stages, or sizes of 1 and more."
                )
        _check_enough(marks, num_stages)
        allowed = {len(marks)} if not marks or marks[-1].closes_block else {len(marks), len(marks) + 1}
        if sum(wanted) not in allowed:
            counts = " or ".join(map(str, sorted(allowed)))
            raise AssignmentError(
                f"assignment={wanted} adds up to {sum(wanted)}, but the model has {counts} blocks: "
                f"{_listing(marks)}. Change the sizes so that they add up."
            )
        return cuts_of(wanted)

    return policy


def by_name(stages: Mapping[str, int]) -> CutPolicy:
    """Return the policy that assigns blocks by name.

    Every block must match. An exact name has priority over a glob, and an earlier glob over a later one. The work after
    the last block has its own name (`after_<name of the last block>`). Without an entry for this name, the work stays
    with the last block, or forms the last stage if no block is assigned to the last stage.

    Args:
      stages: a mapping from names, or globs of names (see `jaxpp_flax.globs`), to stages.

    Raises (when the policy is used):
      AssignmentError: if a name matches no block, a block is matched by no name, a stage would be empty, or the
        stages are not in the order of the model.

    Example:
      >>> marks = [Mark(name, True, "model.py:7") for name in ("embed", "block_0", "block_1", "head")]
      >>> by_name({"embed": 0, "block_*": 0, "head": 1})(marks, 2)
      (2,)
    """
    wanted = dict(stages)

    def policy(marks: Sequence[Mark], num_stages: int) -> tuple[int, ...]:
        names = segment_names(marks)
        _check_keys(wanted, names, num_stages)
        if names[-1] not in wanted:
            names = names[:-1]
        assigned = [_stage_of(name, wanted) for name in names]
        missing = [name for name, stage in zip(names, assigned, strict=True) if stage is None]
        if missing:
            raise AssignmentError(
                f"the assignment by name leaves out {listed(missing)}. Add these names, or a glob that matches them."
            )
        placed = [stage for stage in assigned if stage is not None]
        for i, (before, after) in enumerate(itertools.pairwise(placed)):
            if after < before:
                raise AssignmentError(
                    f"the assignment by name is not contiguous: {names[i + 1]!r} is on stage {after}, but "
                    f"{names[i]!r}, which runs before it, is on stage {before}. Stages must follow the model's order."
                )
        tail = bool(placed) and placed[-1] == num_stages - 2 and len(placed) == len(marks)
        empty = sorted(set(range(num_stages)) - set(placed) - ({num_stages - 1} if tail else set()))
        if empty:
            raise AssignmentError(
                f"the assignment by name leaves stage {listed(empty)} of num_stages={num_stages} empty. "
                f"Assign a block to it, or use fewer stages. The blocks: {listed(list(names))}."
            )
        cuts = [i for i, (before, after) in enumerate(itertools.pairwise(placed)) if before != after]
        if tail:
            cuts.append(len(marks) - 1)
        return tuple(cuts)

    return policy


def _num_segments(marks: Sequence[Mark], num_stages: int) -> int:
    if len(marks) == num_stages - 1:
        return num_stages
    # A final mark after the last layer, as JaxPP's programs have it, adds no stage.
    if marks and (marks[-1].closes_block or len(marks) == num_stages):
        return len(marks)
    return len(marks) + 1


def cuts_of(segments_per_stage: Sequence[int]) -> tuple[int, ...]:
    """Return the marks that cut a model into stages with these numbers of segments.

    Example:
      >>> cuts_of([3, 2, 3])
      (2, 4)
    """
    return tuple(total - 1 for total in itertools.accumulate(segments_per_stage[:-1]))


def sizes_of(cuts: Sequence[int], marks: Sequence[Mark]) -> tuple[int, ...]:
    """Return the number of blocks in each stage; the part after the last mark counts too.

    Example:
      >>> sizes_of((2, 4), [Mark(f"block_{i}", True, "model.py:7") for i in range(8)])
      (3, 2, 4)
    """
    edges = [0, *(cut + 1 for cut in cuts), len(marks) + 1]
    return tuple(b - a for a, b in itertools.pairwise(edges))


def _check_enough(marks: Sequence[Mark], num_stages: int) -> None:
    if len(marks) >= num_stages - 1:
        return
    raise AssignmentError(
        f"num_stages={num_stages} needs at least {num_stages - 1} marks, but the function has {len(marks)}"
        + (f": {_listing(marks)}. " if marks else ". ")
        + "Layers that are called beside one another count once. "
        "Wrap more of the model's layers in PipelineStage (or mark them with mark_stage_end), "
        f"or use at most num_stages={len(marks) + 1}."
    )


def _check_keys(wanted: Mapping[str, int], names: Sequence[str], num_stages: int) -> None:
    for key, stage in wanted.items():
        if not any(matches(name, key) for name in names):
            raise AssignmentError(
                f"the assignment names {key!r}, which matches no block of the model.{near_names(key, names)} "
                f"The blocks: {listed(list(names))}."
            )
        if isinstance(stage, bool) or not isinstance(stage, int) or not 0 <= stage < num_stages:
            raise AssignmentError(
                f"the assignment puts {key!r} on stage {stage!r}; stages are numbered 0 to {num_stages - 1} "
                f"(num_stages={num_stages})."
            )


def _stage_of(name: str, wanted: Mapping[str, int]) -> int | None:
    if name in wanted:
        return wanted[name]
    return next((stage for key, stage in wanted.items() if matches(name, key)), None)


def _listing(marks: Sequence[Mark]) -> str:
    pairs = [f"{name} ({mark.where})" for name, mark in zip(block_names(marks), marks, strict=True)]
    return listed(pairs, text=str)
