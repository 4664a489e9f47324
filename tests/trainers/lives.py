"""The calls in the life of a model that is bigger than a device, for tests of what each of them holds.

A life is a trainer's: its calls are made in order. To watch another call of the trainer, add it to `LIVES`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxpp_flax import PipelineStage, PipelineTrainer
from jaxpp_flax.layers import add_lora
from jaxpp_flax.trainers import MeshOptions, Training

RANKS, LAYERS = 4, 8

Call = Callable[[PipelineTrainer, Path, np.ndarray], Any]


class Deep(nnx.Module):
    def __init__(self, width: int, rngs: nnx.Rngs):
        layers = [nnx.Linear(width, width, use_bias=False, rngs=rngs) for _ in range(LAYERS)]
        self.layers = nnx.List(map(PipelineStage, layers))

    def __call__(self, x):
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return x


class Recall(nnx.Module):
    """Adds to each token the sum of the tokens before it; in decoding form the sum is a cache."""

    def __init__(self, width: int, rngs: nnx.Rngs):
        self.linear = nnx.Linear(width, width, use_bias=False, rngs=rngs)
        self.decode = False

    def init_cache(self, input_shape: tuple[int, ...], dtype: Any = jnp.float32) -> None:
        self.sum = nnx.Cache(jnp.zeros((input_shape[0], 1, self.linear.in_features), dtype))

    def __call__(self, x):
        sums = jnp.cumsum(x, axis=1)
        if self.decode:
            sums += self.sum[...]
            self.sum[...] = sums[:, -1:]
        return jnp.tanh(self.linear(sums))


class Speaker(nnx.Module):
    def __init__(self, width: int, rngs: nnx.Rngs):
        self.embed = nnx.Embed(8, width, rngs=rngs)
        self.layers = nnx.List([PipelineStage(Recall(width, rngs)) for _ in range(LAYERS)])
        self.head = nnx.Linear(width, 8, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def live_bytes(least: int = 0) -> dict[Any, int]:
    """The bytes of all arrays of at least so many elements on each device, each buffer once."""
    buffers: dict[Any, dict[int, int]] = {device: {} for device in jax.devices()}
    for array in jax.live_arrays():
        if array.size < least or array.is_deleted() or jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
            continue
        for shard in array.addressable_shards:
            buffers[shard.device][shard.data.unsafe_buffer_pointer()] = shard.data.nbytes
    return {device: sum(found.values()) for device, found in buffers.items()}


def deep_loss(model, batch):
    return jnp.mean(model(batch) ** 2)


def adapted(width: int, rngs: nnx.Rngs) -> nnx.Module:
    return add_lora(Deep(width, rngs), rank=1, rngs=rngs)


@dataclass(frozen=True, kw_only=True)
class Life:
    """A trainer and its calls, by name; a name with "step" is allowed the gradients too."""

    calls: dict[str, Call]
    stages: int = RANKS
    ranks: int = RANKS
    model: Callable[[int, nnx.Rngs], nnx.Module] = Deep
    options: dict[str, Any] = field(default_factory=dict)

    def trainer(self, width: int) -> PipelineTrainer:
        """Return the trainer, before its first call."""
        return PipelineTrainer(
            lambda rngs: self.model(width, rngs), optax.adam(1e-2), deep_loss, num_stages=self.stages,
            num_microbatches=self.ranks, mesh=MeshOptions(num_ranks=self.ranks, axes={}),
            schedule="1f1b" if self.ranks == self.stages else "interleaved_1f1b", logging=False, **self.options,
        )  # fmt: skip


def data(width: int) -> np.ndarray:
    return np.ones((8, width), np.float32)


def step(trainer: PipelineTrainer, folder: Path, x: np.ndarray) -> None:
    """Make a step to its end: a rank without the loss may be at work when the loss is known."""
    jax.block_until_ready(trainer.train_step(x)["loss"])
    jax.block_until_ready(jax.tree.leaves(trainer.state))


STEP: dict[str, Call] = {"step": step}

LIVES: dict[str, Life] = {
    "new": Life(
        calls={
            "save before the first step": lambda t, folder, x: t.save(folder / "before"),
            "export before the first step": lambda t, folder, x: t.export_pretrained(folder / "out"),
            "first step": STEP["step"],
            "evaluate after training": lambda t, folder, x: t.evaluate([x]),
            "save": lambda t, folder, x: t.save(folder / "after"),
            "restore in place": lambda t, folder, x: t.restore(folder / "after"),
            "export": lambda t, folder, x: t.export_pretrained(folder / "trained"),
        }
    ),
    "adapted": Life(
        calls={
            "load_pretrained beside adapters": lambda t, folder, x: t.load_pretrained(folder / "out", keep="*/lora_*"),
            **STEP,
            "export of merged adapters": lambda t, folder, x: t.export_pretrained(folder / "merged"),
        },
        model=adapted,
        options={"training": Training(wrt=nnx.LoRAParam)},
    ),
    "evaluated": Life(
        calls={
            "evaluate before training": lambda t, folder, x: t.evaluate([x]),
            "predict before training": lambda t, folder, x: t.predict(x),
            **STEP,
        }
    ),
    "moved": Life(  # the first step moves half of the leaves to other ranks
        calls={"state before the first step": lambda t, folder, x: t.state, **STEP}, stages=LAYERS
    ),
    "restored": Life(calls={"restore": lambda t, folder, x: t.restore(folder / "after"), **STEP}),
    "restored on 2": Life(
        calls={
            "restore on fewer stages": lambda t, folder, x: t.restore(folder / "after"),
            "save on fewer stages": lambda t, folder, x: t.save(folder / "of two"),
        },
        stages=2,
        ranks=2,
    ),
    "restored from 2": Life(calls={"restore on more stages": lambda t, folder, x: t.restore(folder / "of two")}),
    "restored in part": Life(
        calls={"restore of the weights": lambda t, folder, x: t.restore(folder / "after", only="params/*")}
    ),
    "restored what is there": Life(
        calls={"restore of what is there": lambda t, folder, x: t.restore(folder / "after", missing="keep")}
    ),
    "saved in part": Life(
        calls={"save of the weights": lambda t, folder, x: t.save(folder / "weights", only="params/*")}
    ),
    "speaking": Life(
        calls={
            "generate": lambda t, folder, x: t.generate(np.ones((RANKS, 2), np.int32), max_new_tokens=2),
            "generate again": lambda t, folder, x: t.generate(np.ones((RANKS, 2), np.int32), max_new_tokens=2),
        },
        model=Speaker,
    ),
    "loaded": Life(
        calls={
            "load_pretrained": lambda t, folder, x: t.load_pretrained(folder / "out"),
            "predict": lambda t, folder, x: t.predict(x),
            "load_pretrained again": lambda t, folder, x: t.load_pretrained(folder / "trained"),
            "export of what was loaded": lambda t, folder, x: t.export_pretrained(folder / "again"),
        }
    ),
}  # fmt: skip


def num_bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def live(
    folder: Path, width: int, watched: Callable[[str, Callable[[], Any], int], Any], lives: dict[str, Life] = LIVES
) -> None:
    """Make all calls; `watched(name, call, share)` makes one, which may hold `share` bytes on a device."""
    for life_name, life in lives.items():
        held: list[PipelineTrainer] = []
        watched(f"{life_name}: construction", lambda life=life, held=held: held.append(life.trainer(width)), 0)
        trainer, x = held.pop(), data(width)
        state = trainer.held.memory
        share = num_bytes(state) // life.ranks
        gradients = num_bytes(state.params) // life.ranks
        for name, call in life.calls.items():
            may_hold = share + gradients if "step" in name and "before" not in name else share
            watched(f"{life_name}: {name}", lambda call=call, t=trainer, x=x: call(t, folder, x), may_hold)
        del trainer, state
