"""Run by `test_memory.py` in a process of its own: the host's memory while weights are read and written.

Prints JSON: by what was done, the most that the process held beyond the weights themselves, in bytes.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpp_flax.pretrained import NameMap, Rule, export_pretrained, load_pretrained
from jaxpp_flax.pretrained.safetensors_file import create_file

SIDE, COUNT = 1448, 48  # 48 leaves of 8 MiB
NAMES = NameMap((Rule("*/kernel", "*.weight", transpose=(1, 0)),))


def memory(field: str) -> int:
    """VmRSS: the process's memory now. VmHWM: the most since the last `forget`."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024 if found else 0


def forget() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def load(source: Path, spec: P) -> Any:
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:2]), ("fsdp",)), spec)
    leaf = jax.ShapeDtypeStruct((SIDE, SIDE), np.float32, sharding=sharding)
    return load_pretrained(source, {str(i): {"kernel": leaf} for i in range(COUNT)}, map=NAMES)


def main() -> None:
    folder = Path(sys.argv[1])  # sys.argv[2]: what the devices cut
    (folder / "in").mkdir()
    # A file without extents on the disk: it reads as zeros.
    create_file(folder / "in" / "model.safetensors", [(f"{i}.weight", (SIDE, SIDE), np.float32) for i in range(COUNT)])
    size = COUNT * SIDE * SIDE * 4
    jax.block_until_ready(jax.numpy.zeros(2))
    spec = P("fsdp") if sys.argv[2] == "rows" else P(None, "fsdp")
    forget()
    before = memory("VmRSS")
    tree = load(folder / "in", spec)
    over = {"read": memory("VmHWM") - before - size}
    forget()
    before = memory("VmRSS")
    export_pretrained(tree, folder / "out", map=NAMES, max_shard_bytes=64 << 20)
    over["written"] = memory("VmHWM") - before
    print(json.dumps({"leaf": SIDE * SIDE * 4, "weights": size, "over": over}))


if __name__ == "__main__":
    main()
