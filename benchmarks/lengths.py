"""Texts of several lengths: padding to the longest, whole batches of one length, and microbatches of several lengths.

    python benchmarks/lengths.py --orders
    python benchmarks/lengths.py --patterns --stages 8 --microbatches 16 --width 16 [--schedule zbv]
    python benchmarks/lengths.py [--functions 512] [--lengths 128,256,512,1024] [--json rows.json]

The corpus is the functions of Python's own standard library, by bytes: most are short, a few are long. Each contestant
trains on the same functions in one pass after a pass that compiles:

- "padded": batches in the order of the corpus, padded to the longest declared length;
- "as drawn": the same batches, each padded as a whole to the next declared length of its longest function;
- "whole": batches bucketed whole, all functions of a batch of one declared length, as many as fit the budget of tokens;
- "whole, one size": the same, with as many functions in each batch as `fit` asks for: what fits of the longest;
- "grouped": `group_by_length`.

Figures are ratios to "padded" in one run: functions a second of processor time, and a second of the clock (on a quiet
machine with a core for each stage alone). "predicted" is the same ratio by the FLOPs of the padded shapes; "predicted
of the order" is what the order of the microbatches gains in the simulator, which needs idle ranks to show.

`--patterns` tells what a step costs whose microbatches are a new mixture of shapes that are compiled already: the
processor time of such a step, less that of the same step again.
"""

from __future__ import annotations

import ast
import random
import resource
import statistics
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import workload


def corpus(count: int, longest: int) -> list[Any]:
    """The bytes of functions of the standard library, in one mixed order, cut at the longest length."""
    import numpy as np

    functions: list[str] = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")
        lines = text.splitlines(keepends=True)
        nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
        functions += ["".join(lines[node.lineno - 1 : node.end_lineno]) for node in nodes]
    order = np.random.default_rng(0).permutation(len(functions))[:count]
    return [np.frombuffer(functions[n].encode()[:longest], np.uint8).astype(np.int32) for n in order]


def padded(texts: Sequence[Any], rows: int, length: int) -> dict[str, Any]:
    """A batch of so many rows; those behind the texts are padding."""
    import numpy as np

    tokens, mask = np.zeros((rows, length), np.int32), np.zeros((rows, length), bool)
    for row, text in enumerate(texts):
        tokens[row, : len(text)], mask[row, : len(text)] = text, True
    return {"tokens": tokens, "mask": mask}


@dataclass
class Contestant:
    """A way to make batches, and what its passes took."""

    batches: list[Any]
    trainer: Any
    processor: float = 0.0
    clock: float = 0.0

    def run(self, *, timed: bool) -> None:
        """One pass."""
        usage, clock = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        for batch in self.batches:
            self.trainer.train_step(batch)
        workload.wait(self.trainer.state.params)
        after = resource.getrusage(resource.RUSAGE_SELF)
        if timed:
            self.processor += after.ru_utime + after.ru_stime - usage.ru_utime - usage.ru_stime
            self.clock += time.perf_counter() - clock


def contestants(arguments: Any, texts: Sequence[Any], lengths: Sequence[int]) -> dict[str, list[Any]]:
    """The batches of each contestant, all with the same texts and the same budget for a microbatch."""
    from jaxpp_flax import group_by_length

    count = arguments.microbatches
    groups = group_by_length(texts, lengths=lengths, tokens=arguments.tokens, num_microbatches=count)
    rows = dict(zip(groups.counts.lengths, groups.counts.rows, strict=True))

    def fitting(some: Sequence[Any]) -> int:
        return min(length for length in lengths if length >= max(map(len, some)))

    def cut(some: Sequence[Any], size: int, length: int | None) -> list[Any]:
        parts = [some[begin : begin + size] for begin in range(0, len(some), size)]
        return [padded(part, size, length or fitting(part)) for part in parts]

    drawn = count * rows[lengths[-1]]
    whole: list[Any] = []
    one_size: list[Any] = []
    for length in lengths:
        of_length = [text for text in texts if fitting([text]) == length]
        whole += cut(of_length, count * rows[length], length)
        one_size += cut(of_length, drawn, length)
    return {
        "padded": cut(texts, drawn, lengths[-1]),
        "as drawn": cut(texts, drawn, None),
        "whole": whole,
        "whole, one size": one_size,
        "grouped": list(groups),
    }


def new_trainer(arguments: Any) -> Any:
    """A small decoder over bytes; its attention costs the square of the length."""
    import jax
    import jax.numpy as jnp
    import optax
    from flax import nnx

    from jaxpp_flax import PipelineStage, PipelineTrainer

    width = arguments.width

    class Block(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.qkv, self.out = nnx.Linear(width, 3 * width, rngs=rngs), nnx.Linear(width, width, rngs=rngs)
            self.up, self.down = nnx.Linear(width, 4 * width, rngs=rngs), nnx.Linear(4 * width, width, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            q, k, v = (part[:, :, None] for part in jnp.split(self.qkv(x), 3, -1))
            x = x + self.out(jax.nn.dot_product_attention(q, k, v, is_causal=True)[:, :, 0])
            return x + self.down(jax.nn.gelu(self.up(x)))

    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.embed, self.head = nnx.Embed(256, width, rngs=rngs), nnx.Linear(width, 256, rngs=rngs)
            self.blocks = nnx.List([PipelineStage(Block(rngs)) for _ in range(arguments.blocks or arguments.stages)])

        def __call__(self, tokens: jax.Array) -> jax.Array:
            x = self.embed(tokens)
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    def loss(model: Model, batch: Any) -> Any:
        tokens, mask = batch["tokens"], batch["mask"][:, 1:]
        losses = optax.softmax_cross_entropy_with_integer_labels(model(tokens)[:, :-1], tokens[:, 1:])
        return (losses * mask).sum(), mask.sum()

    return PipelineTrainer(
        Model(nnx.Rngs(0)), optax.sgd(1e-5), loss, num_stages=arguments.stages,  # many stages without norms grow
        num_microbatches=arguments.microbatches, schedule=arguments.schedule, logging=False,
    )  # fmt: skip


def operations(arguments: Any, batch: Any) -> float:
    """The FLOPs of a batch: those of the matrix products of the model, backward twice forward."""
    width, blocks = arguments.width, arguments.blocks or arguments.stages
    leaves = [batch] if isinstance(batch, dict) else batch
    sizes = [microbatch["tokens"].shape for microbatch in leaves]
    # Attention computes all pairs: XLA masks those that are not causal.
    return 3.0 * sum(rows * n * (blocks * (24 * width**2 + 4 * n * width) + 2 * 256 * width) for rows, n in sizes)


def report_orders(path: str | None) -> None:
    """What the order by cost gains in the simulator: 16 microbatches of four costs in random orders, on 8 ranks."""
    from jaxpp_flax.schedules import Costs, by_name, order_by_cost

    draws = random.Random(0)
    kinds = [Costs(forward=time, backward_input=time, backward_weight=time) for time in (1.0, 1.4, 2.0, 3.0)]
    rows: list[dict[str, Any]] = []
    for name in ("gpipe", "eager_1f1b", "interleaved_1f1b", "zbv", "zero_bubble", "1f1b"):
        schedule = by_name(name, 16 if name in ("interleaved_1f1b", "zbv") else 8, 8)
        began = time.process_time()
        gains = [order_by_cost(schedule, draws.choices(kinds, k=16)).gain for _ in range(20)]
        seconds = (time.process_time() - began) / len(gains)
        row = {"schedule": name, "least": min(gains), "mean": statistics.fmean(gains), "most": max(gains)}
        rows.append({**row, "ms": 1e3 * seconds})
    workload.report("the time in the given order, as a multiple of that in the order by cost", rows, path)


def report_patterns(arguments: Any) -> None:
    """The processor time of steps: the first, which compiles; new mixtures of its shapes; and the same again."""
    workload.prepare(arguments, arguments.stages)
    import numpy as np

    from jaxpp_flax import Microbatches

    trainer, draws = new_trainer(arguments), random.Random(0)
    kinds = [padded([np.arange(length) % 7] * rows, rows, length) for rows, length in ((8, 8), (4, 16), (2, 32))]

    def seconds(batch: Any) -> float:
        began = time.process_time()
        trainer.train_step(batch)
        workload.wait(trainer.state.params)
        return time.process_time() - began

    def drawn(*first: Any) -> Any:
        return Microbatches([*first, *draws.choices(kinds, k=arguments.microbatches - len(first))])

    batch = drawn(*kinds)
    first, again, new = seconds(batch), list[float](), list[float]()
    seconds(batch)
    for _ in range(arguments.repeats):
        batch = drawn()
        new.append(seconds(batch))
        again.append(min(seconds(batch), seconds(batch)))
    more = statistics.median(one - other for one, other in zip(new, again, strict=True))
    row = {"first": first, "again": statistics.median(again), "new": statistics.median(new), "more for a pattern": more}
    workload.report("processor seconds of a step", [{"schedule": arguments.schedule, **row}], arguments.json)


def main() -> None:
    flags = workload.parser(str(__doc__))
    flags.set_defaults(microbatches=8, width=64, repeats=3)
    flags.add_argument("--functions", type=int, default=512)
    flags.add_argument("--lengths", default="128,256,512,1024")
    flags.add_argument("--tokens", type=int, default=4096, help="of a microbatch, padding included")
    flags.add_argument("--orders", action="store_true", help="simulate orders of microbatches alone")
    flags.add_argument("--patterns", action="store_true", help="time new mixtures of compiled shapes alone")
    flags.add_argument("--schedule", default="1f1b")
    arguments = flags.parse_args()
    if arguments.orders:
        report_orders(arguments.json)
    elif arguments.patterns:
        report_patterns(arguments)
    else:
        race_batches(arguments)


def race_batches(arguments: Any) -> None:
    """Train on the corpus in batches of each kind."""
    workload.prepare(arguments, arguments.stages)
    lengths = [int(length) for length in arguments.lengths.split(",")]
    texts = corpus(arguments.functions, lengths[-1])
    racing = {
        name: Contestant(batches, new_trainer(arguments))
        for name, batches in contestants(arguments, texts, lengths).items()
    }
    for turn in range(arguments.repeats + 1):  # in turn, so that a noisy machine is noisy for all
        for contestant in racing.values():
            contestant.run(timed=turn > 0)
    first = racing["padded"]
    rows: list[dict[str, Any]] = []
    for name, contestant in racing.items():
        masks = [m["mask"] for b in contestant.batches for m in ([b] if isinstance(b, dict) else b)]
        gains = [order.gain for order in contestant.trainer.steps.orders.chosen.values()]
        work, of_first = (sum(operations(arguments, b) for b in one.batches) for one in (contestant, first))
        rows.append(
            {
                "batches": name,
                "steps": len(contestant.batches),
                "padding": 1 - sum(int(mask.sum()) for mask in masks) / sum(mask.size for mask in masks),
                "predicted": of_first / work,
                "predicted of the order": statistics.fmean(gains) if gains else 1.0,
                "functions a processor second": first.processor / contestant.processor,
                "functions a second": first.clock / contestant.clock,
            }
        )
    workload.report(f"{len(texts)} functions of the standard library, lengths {lengths}", rows, arguments.json)


if __name__ == "__main__":
    main()
