"""What the kit runs, in the order of its worth under a short limit, with the sizes of each platform."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

__all__ = ["NAMES", "Part", "parts"]


@dataclass(frozen=True, kw_only=True)
class Part:
    """One program of the kit.

    Args:
      section: the section's number in the list of what to run, and its name.
      name: the name of the part.
      command: what follows `python`, from the root of the checkout.
      weight: its share of the time: the seconds that it is expected to take on one H100.
      environment: variables of its own.
      shares_cache: True if JAX's cache on disk may serve it, which all such parts fill; False where compiling is timed.
    """

    section: str
    name: str
    command: tuple[str, ...]
    weight: float
    environment: Mapping[str, str] = field(default_factory=dict)
    shares_cache: bool = True


# Of each program: its flags on an accelerator. On CPU, `SMALL` comes instead.
LARGE = {
    "first_run": "--width 256 --length 256 --repeats 20",
    "precision": "--stages 2 --blocks 4 --width 512 --length 256 --microbatches 4",
    "step": "--width 2048 --length 512 --repeats 5",
    "timeline": "--blocks 8 --width 2048 --length 512 --microbatches 16",
    "dispatch": "--repeats 10",
    "compile_time": "",
    "memory": "--width 1024 --length 512 --batch 2 --microbatches 16",
    "offload": "--width 1024 --length 512 --batch 2 --microbatches 16 --repeats 3",
    "wire": "--repeats 10",
    "linen": "--blocks 12 --width 768 --heads 12 --vocabulary 50257 --length 1024 --batch 2 --microbatches 8 "
    "--repeats 5 --schedules 1F1B interleaved",
    "facts": "--width 4096",
    "nccl": "",
}
# One device, as of a machine with one GPU, and sizes that mean nothing.
SMALL = "--devices 1 --stages 2 --blocks 2 --microbatches 4 --batch 1 --width 8 --length 4 --repeats 1"
SMALL_ALSO = {
    "compile_time": "--blocks 4",  # interleaved: two stages on each rank
    "facts": "--width 64",
    "first_run": "--repeats 3",
    "linen": "--vocabulary 16 --schedules 1F1B",
    "memory": "--blocks 4",
    "precision": "--cases 1f1b",
    "step": "--schedules 1f1b",
    "timeline": "--contestants 1f1b",
}
NAMES = ("runs", "precision", "step", "memory", "nccl", "transport", "comparison", "facts")


def parts(platform: str, folder: str) -> Iterator[Part]:
    """All parts for a platform; `folder` is one that the parts may fill."""

    def part(section: str, name: str, weight: float, script: str, *more: str, cached: bool = True) -> Part:
        program = script.rpartition("/")[2]
        flags = f"{SMALL} {SMALL_ALSO.get(program, '')}" if platform == "cpu" else LARGE[program]
        command = (f"benchmarks/{script}.py", "--platform", platform, *flags.split(), *more)
        return Part(section=section, name=name, command=command, weight=weight, shares_cache=cached)

    doctor = ("-m", "jaxpp_flax.doctor", "--no-processes")
    cache = ("--cache", f"{folder}/second_start")
    yield Part(section="1 runs", name="doctor", command=doctor, weight=20)
    yield part("1 runs", "four stages", 45, "device/first_run")
    yield part("3 precision", "verify", 75, "device/precision")
    yield part("4 step", "step", 60, "step")
    yield part("4 step", "timeline", 45, "device/timeline")
    yield part("4 step", "dispatch", 25, "dispatch")
    yield part("4 step", "first start", 25, "compile_time", *cache, cached=False)
    yield part("4 step", "second start", 15, "compile_time", *cache, cached=False)
    yield part("5 memory", "schedules", 45, "memory")
    yield part("5 memory", "offload", 40, "offload")
    yield part("2 nccl", "CuPy", 25, "device/nccl")
    yield part("6 transport", "transfer", 20, "device/wire", "--transport", "transfer")
    if platform != "cpu":
        yield part("6 transport", "device_put", 20, "device/wire", "--transport", "device_put")
    yield part("7 comparison", "GPT-2 small", 60, "linen")
    yield part("8 facts", "facts", 35, "device/facts", cached=False)
