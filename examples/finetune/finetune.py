"""Fine-tunes a Llama-style decoder from a Hugging Face directory as a pipeline, by adapters (LoRA) or whole.

    python examples/finetune/make_tiny_model.py tiny
    python examples/finetune/finetune.py --model tiny --output run
    python -m jaxpp_flax.launch -n 4 examples/finetune/finetune.py --model tiny --output run4 --data-parallel 2
    sbatch examples/finetune/job.slurm --model llama --output run --stages 4 --data-parallel 8 --batch-size 64

The same command again goes on after an interruption. docs/guides/finetuning.md explains each part.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from typing import Any

import jax
import optax
import tyro
from data import held_out_batches, read_documents, split_documents, training_batches
from flax import nnx
from model import NAMES, end_token, loss_fn, model_factory, read_config
from settings import Settings
from tokenizers import Tokenizer

from jaxpp_flax import Callback, Checkpoints, PipelineTrainer
from jaxpp_flax.trainers import Memory, Training

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json")


def make_trainer(settings: Settings, config: dict[str, Any]) -> PipelineTrainer:
    warmup = max(1, settings.steps // 10)
    rate = optax.warmup_cosine_decay_schedule(0.0, settings.learning_rate, warmup, max(settings.steps, warmup + 1))
    return PipelineTrainer(
        model_factory(config, settings),
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate)),
        loss_fn,
        num_stages=settings.stages,
        num_microbatches=settings.microbatches,
        schedule=settings.schedule,
        mesh={"data": settings.data_parallel},
        training=Training(wrt=nnx.LoRAParam if settings.lora_rank else nnx.Param, seed=settings.seed),
        memory=Memory(remat="full" if settings.remat else None),
        checkpoints=Checkpoints(settings.output / "checkpoints", every=settings.save_every, keep=2),
    )


def finetune(settings: Settings, callbacks: Sequence[Callback] = ()) -> PipelineTrainer:
    """Train from the weights of `settings.model`, or from the latest checkpoint, to the last step."""
    config, tokenizer = read_config(settings.model), read_tokenizer(settings)
    train, held_out = split_documents(read_documents(settings.text))
    batches = training_batches(train, tokenizer, end_token(config), settings)
    eval_batches = held_out_batches(held_out, tokenizer, end_token(config), settings)

    saved = any(path.name.isdigit() for path in (settings.output / "checkpoints").glob("*"))
    trainer = make_trainer(settings, config)
    if not saved:
        trainer.load_pretrained(settings.model, map=NAMES, cast=True, keep="*/lora_*" if settings.lora_rank else ())
        say(f"{len(train)} documents to train on; held-out loss before: {trainer.evaluate(eval_batches)['loss']:.4f}")
    metrics = trainer.fit(
        batches, steps=settings.steps, eval_data=eval_batches, eval_every=settings.eval_every, callbacks=callbacks,
        resume=True,
    )  # fmt: skip
    if metrics:  # none where the last step was done before
        say(f"held-out loss: {metrics['eval_loss']:.4f}")
    return trainer


def generate(trainer: PipelineTrainer, settings: Settings) -> list[str]:
    """The prompts, continued by the most likely tokens."""
    tokenizer, end = read_tokenizer(settings), end_token(read_config(settings.model))
    prompts = [tokenizer.encode(prompt).ids for prompt in settings.prompts]
    found = trainer.generate(prompts, max_new_tokens=settings.max_new_tokens, eos_token_id=end)
    return [tokenizer.decode([*prompt, *new.tolist()]) for prompt, new in zip(prompts, found, strict=True)]


def export(trainer: PipelineTrainer, settings: Settings) -> None:
    """Write the new model, adapters merged, as `transformers` and this recipe read it."""
    config = read_config(settings.model) | {"dtype": "float32"}
    target = settings.output / "model"
    trainer.export_pretrained(target, map=NAMES, config=config)
    if jax.process_index() == 0:
        for name in TOKENIZER_FILES:
            if (settings.model / name).exists():
                shutil.copy(settings.model / name, target / name)
    say(f"wrote {target}")


def read_tokenizer(settings: Settings) -> Tokenizer:
    return Tokenizer.from_file(str(settings.model / "tokenizer.json"))


def say(text: str) -> None:
    if jax.process_index() == 0:
        print(text, flush=True)


def main() -> None:
    settings = tyro.cli(Settings, description=__doc__)
    if (settings.output / "model").exists():
        raise SystemExit(f"{settings.output / 'model'} is there: this run is complete. Choose another --output.")
    if not jax.distributed.is_initialized():  # of several processes, the launcher knows the devices
        jax.config.update("jax_num_cpu_devices", settings.num_devices)  # on CPU alone
    trainer = finetune(settings)
    for text in generate(trainer, settings) if settings.prompts else ():
        say(f"> {text}")
    export(trainer, settings)


if __name__ == "__main__":
    main()
