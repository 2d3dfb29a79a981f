"""``python -m bench.volume_load FILE BLOCKS RANKS``: loads a file of ``bench.volume`` as one of so many ranks does.

Prints the seconds that it took, and the bytes of RAM beside the parameters.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

from bench.volume import peak_memory, shape_with
from bootstrap.layout import bfl_tensors
from bootstrap.tensor_files import Rows, load_rows
from trainer.model import bare_model, fill, sources
from trainer.trained import held_rows
from trainer.world import World


def main(file: Path, blocks: int, ranks: int) -> None:
    shape = shape_with(blocks)
    model = bare_model(shape)
    before = peak_memory()
    begun = time.monotonic()
    if ranks == 1:
        model.to_empty(device="cpu")
        fill(model, sources(shape, [file], "bfl"), World(0, 1, torch.device("cpu"), None))  # type: ignore[arg-type]
        kept = sum(parameter.nbytes for parameter in model.parameters())
    else:  # the first rank's share of every tensor; what FSDP2 makes of it costs no reading
        sizes = {name: (held_rows(size[0], 0, ranks)[1], *size[1:]) for name, size in bfl_tensors(shape).items()}
        rows = [Rows(torch.empty(size, dtype=torch.bfloat16), name) for name, size in sizes.items()]
        load_rows(file, rows)
        kept = sum(part.target.nbytes for part in rows)
    print(time.monotonic() - begun, peak_memory() - before - kept)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
