"""Batches from examples of several lengths: rows of similar length stand together, padded to a declared length."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from jaxpp_flax.counts import check_count
from jaxpp_flax.engine.tracing.bodies.microbatches import Microbatches
from jaxpp_flax.processes import process_group
from jaxpp_flax.trainers.data.lengths.common_lengths import check_declared, common_places
from jaxpp_flax.trainers.data.lengths.padded_rows import RowLayout
from jaxpp_flax.trainers.data.lengths.row_counts import RowCounts
from jaxpp_flax.trainers.errors import BatchError, DataPositionError

__all__ = ["LengthGroups", "group_by_length"]

TooLong = Literal["refuse", "cut"]

_Numbered = tuple[int, Any]  # an example and its number


def group_by_length(
    examples: Iterable[Any],
    *,
    lengths: Sequence[int],
    tokens: int,
    num_microbatches: int,
    cost: Callable[[int], float] | None = None,
    pad: float | Mapping[str, float] = 0,
    mask: str = "mask",
    too_long: TooLong = "refuse",
    divisible_by: int = 1,
    own_examples: bool = False,
) -> LengthGroups:
    """Group examples of several lengths into batches for `PipelineTrainer.fit`: each batch is a `Microbatches`.

    An example is padded to the next declared length, and waits until so many of this length are there that they fill a
    microbatch. So there is one shape for each length, whatever the examples are. Each microbatch is a dict: the leaves
    of the examples, of shape (rows, length, ...), and the mask, a bool array (rows, length) that is True for tokens.
    The loss is a pair `(sum, weight)`: `(losses * mask).sum(), mask.sum()`.

    The order is that of the examples, and equal in each run. At the end of a pass, what is left becomes microbatches
    with rows of padding alone, whose mask is False; so does what lacks of the last batch. No example is left out.

    The position in the data is saved and restored with a checkpoint if `examples` has a length and items (a list, a
    dataset, grain's `MapDataset`): examples that wait are saved as their indices. Other data is drawn again up to its
    position. Shuffle the examples before; data with `set_epoch` is told each later pass.

    Args:
      examples: arrays of shape (length, ...), or dicts of them. Leaves without axes, such as a label, are stacked.
      lengths: the lengths to pad to. A stage is compiled once for each of them.
      tokens: the most tokens of a microbatch, padding included: `rows * length`.
      num_microbatches: the microbatches of a batch; that of the trainer.
      cost: the relative cost of a row of a length, by which microbatches get about equal costs; by default the length.
        With attention it grows faster: `lambda n: n * (1 + n / (6 * width))` for a transformer of that width.
      pad: the value of padding, or one for each leaf that has an axis of tokens; other leaves are stacked then.
      mask: the name of the mask.
      too_long: what becomes of an example above the last length: "refuse", or "cut" keeps its first tokens.
      divisible_by: the rows of a microbatch are a multiple of it: the number of data-parallel devices of a stage.
      own_examples: True if each of several processes passes its own share of the examples, and so its own rows of each
        microbatch; processes at one place of the data axis, one in each stage, pass the same ones. `tokens` and
        `divisible_by` then count what this process has. Before each batch the processes exchange the lengths of their
        next microbatches, the longest first, and each of these is as long as the longest of any process: a process with
        shorter examples there pads them to that length, and those without a place wait for the next microbatches. A
        process whose examples have ended passes rows of padding until all have ended. So all processes must draw the
        same number of batches, and at least one example each.

    Raises:
      ValueError: if the budget holds no row of the last length, or an argument is not what it must be.
      BatchError: while batches are drawn, for an example that is too long, or has other leaves than the first one.

    Example:
      >>> texts = [[1, 2, 3], [4], [5, 6, 7, 8, 9], [1, 2], [3], [4, 5, 6, 7, 8, 9, 9]]
      >>> for batch in group_by_length(texts, lengths=(4, 8), tokens=16, num_microbatches=2):
      ...     print(batch, [int(microbatch["mask"].sum()) for microbatch in batch])
      Microbatches([(4, 4), (4, 4)], [(2, 8), (2, 8)]) [7, 12]
    """
    return LengthGroups(
        examples,
        RowCounts.of(lengths, tokens, cost, divisible_by),
        num_microbatches=check_count("num_microbatches", num_microbatches),
        layout=lambda example: RowLayout.of(example, pad, mask),
        cuts=_cuts(too_long),
        own_examples=own_examples,
    )


def _cuts(too_long: str) -> bool:
    if too_long not in ("refuse", "cut"):
        raise ValueError(f'too_long={too_long!r}: it must be "refuse" or "cut".')
    return too_long == "cut"


class LengthGroups(Iterable[Microbatches]):
    """Examples grouped by length; `group_by_length` makes one. Each pass over it is a pass over the examples.

    Attributes:
      counts: the declared lengths, and the rows of a microbatch of each.
      own_examples: whether each process has other examples.
    """

    def __init__(
        self,
        examples: Iterable[Any],
        counts: RowCounts,
        *,
        num_microbatches: int,
        layout: Callable[[Any], RowLayout],
        cuts: bool,
        own_examples: bool = False,
    ) -> None:
        self.examples, self.counts, self.num_microbatches = examples, counts, num_microbatches
        self._layout, self.cuts, self.own_examples = layout, cuts, own_examples

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """The shapes (rows, length) that microbatches can have: a stage is compiled for each of them.

        Example:
          >>> group_by_length([], lengths=(4, 8), tokens=16, num_microbatches=2).shapes
          ((4, 4), (2, 8))
        """
        return tuple(zip(self.counts.rows, self.counts.lengths, strict=True))

    def layout_of(self, example: Any) -> RowLayout:
        """Return how examples like this one become rows."""
        return self._layout(example)

    def set_epoch(self, epoch: int) -> None:
        """Tell the examples the number of the next pass, if they ask for it."""
        if callable(tell := getattr(self.examples, "set_epoch", None)):
            tell(epoch)

    def __iter__(self) -> Iterator[Microbatches]:
        is_indexed = hasattr(self.examples, "__len__") and hasattr(self.examples, "__getitem__")
        return _IndexedPass(self) if is_indexed else _Pass(self, iter(self.examples))


class _Pass(Iterator[Microbatches]):
    """One pass over examples that can only be drawn one after another."""

    def __init__(self, groups: LengthGroups, drawn: Iterator[Any]) -> None:
        self.groups, self._drawn = groups, drawn
        self._layout: RowLayout | None = None
        self._has_met = False  # the other processes, if examples are own ones
        self._number = 0  # of the next example
        # The examples that wait, with their numbers: for each length, and of each full microbatch with its length.
        self._waiting: list[list[_Numbered]] = [[] for _ in groups.counts.lengths]
        self._full: list[tuple[int, list[_Numbered]]] = []

    def __next__(self) -> Microbatches:
        count, own = self.groups.num_microbatches, self.groups.own_examples
        if own and not self._has_met:
            check_declared(self.groups.shapes, count)
            self._has_met = True
        for example in self._until(count):
            self._add(self._number, example)
            self._number += 1
        if len(self._full) < count:  # the examples have ended
            self._full += [(place, rows) for place, rows in enumerate(self._waiting) if rows]
            self._waiting = [[] for _ in self._waiting]
        batch, self._full = self._full[:count], self._full[count:]
        batch = self._with_others(batch) if own else batch
        if not batch:
            raise StopIteration
        batch += [(0, [])] * (count - len(batch))
        return Microbatches([self._stacked(place, rows) for place, rows in batch], own_rows=own)

    def _with_others(self, batch: Sequence[tuple[int, list[_Numbered]]]) -> list[tuple[int, list[_Numbered]]]:
        """Return microbatches of the lengths that all processes take; examples without a place there wait again."""
        counts = self.groups.counts
        if self._layout is None:
            raise BatchError(
                f"group_by_length got no example in process {process_group().process_index}, so it cannot make rows of "
                "padding like those of the other processes. Give every process at least one example."
            )
        mine = sorted(batch, key=lambda microbatch: -microbatch[0])  # stable: earlier examples stay first
        places = common_places([place for place, _ in mine])
        mine += [(place, []) for place in places[len(mine) :]]
        for place, (own, rows) in reversed([*zip(places, mine, strict=True)]):
            self._waiting[own][:0] = rows[counts.rows[place] :]
        for own, waiting in enumerate(self._waiting):
            self._fill(own, waiting)
        return [(place, rows[: counts.rows[place]]) for place, (_, rows) in zip(places, mine, strict=True)]

    def _fill(self, place: int, waiting: list[_Numbered]) -> None:
        """Make full microbatches of the examples that wait for this length."""
        rows = self.groups.counts.rows[place]
        while len(waiting) >= rows:
            self._full.append((place, waiting[:rows]))
            del waiting[:rows]

    def _until(self, count: int) -> Iterator[Any]:
        """Draw examples until so many microbatches are full."""
        while len(self._full) < count:
            try:
                yield next(self._drawn)
            except StopIteration:
                return

    def _add(self, number: int, example: Any) -> None:
        """Let an example wait with others of its length; they may be a microbatch now."""
        groups = self.groups
        self._layout = self._layout or groups.layout_of(example)
        length, counts = self._layout.length_of(example, number), groups.counts
        place = counts.index_for(length)
        if place is None:
            if not groups.cuts:
                raise BatchError(
                    f"example {number} has {length} tokens, more than the last of lengths={counts.lengths}. Declare a "
                    f'longer length, leave the example out, or cut such examples: too_long="cut".'
                )
            place = len(counts.lengths) - 1
        waiting = self._waiting[place]
        waiting.append((number, example))
        self._fill(place, waiting)

    def _stacked(self, place: int, rows: Sequence[_Numbered]) -> dict[str, Any]:
        layout, counts = self._layout, self.groups.counts
        if layout is None:
            raise AssertionError("a microbatch is stacked after an example was drawn")
        return layout.stacked([example for _, example in rows], counts.rows[place], counts.lengths[place])


class _IndexedPass(_Pass):
    """One pass over examples with a length and items; its state names the examples that wait."""

    def __init__(self, groups: LengthGroups) -> None:
        self._items: Any = groups.examples
        super().__init__(groups, self._draw())

    def _draw(self) -> Iterator[Any]:
        while self._number < len(self._items):
            yield self._items[self._number]

    def get_state(self) -> dict[str, Any]:
        """Return where the pass stands between two batches."""
        return {
            "shapes": [list(shape) for shape in self.groups.shapes],
            "next": self._number,
            "waiting": [[number for number, _ in rows] for rows in self._waiting],
            "full": [[place, [number for number, _ in rows]] for place, rows in self._full],
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Go to where another pass stood: the examples that wait are read again.

        Raises:
          DataPositionError: if the state is of other lengths or budgets.
        """
        shapes = [tuple(shape) for shape in state["shapes"]]
        if tuple(shapes) != self.groups.shapes:
            raise DataPositionError(
                f"the checkpoint was written with microbatches of (rows, length) in {shapes}, and this data makes "
                f"those of {list(self.groups.shapes)}: other examples wait to be grouped. Pass the same lengths, "
                'tokens and cost, or resume_data="restart" to start the data again.'
            )
        self._number = state["next"]
        if self._number:
            self._layout = self.groups.layout_of(self._items[0])
        self._waiting = [self._read(numbers) for numbers in state["waiting"]]
        self._full = [(place, self._read(numbers)) for place, numbers in state["full"]]
        self._drawn = self._draw()

    def _read(self, numbers: Sequence[int]) -> list[_Numbered]:
        return [(number, self._items[number]) for number in numbers]
