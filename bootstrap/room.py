"""Whether what a run will save fits on the volume, asked before it begins."""

from __future__ import annotations

import os
from pathlib import Path

from bootstrap.estimate import decimal
from bootstrap.outcome import PodError
from bootstrap.plan import Plan
from bootstrap.state import list_states
from bootstrap.volume import RunFolder, own_parts
from jobs.schema import Job


def refuse_without_room(plan: Plan, job: Job, folder: RunFolder, free: int) -> None:
    """Raises PodError where the states of this run, beside those that are there, are more than ``free`` bytes, which
    is 0 where that is not known. A copy of the weights as the output counts where the volume knows no links."""
    if job.save.interval.kind == "minutes" and job.save.weights == "all":
        return  # nobody knows how many those will be
    there = sum(state.bytes for state in list_states(folder.states)[0])
    output = 0 if can_link(folder.root) else plan.weights_bytes
    need = max(0, plan.disk_bytes - there) + output
    if 0 < free < need:
        parts = f"states of up to {decimal(plan.disk_bytes)}"
        parts += f", {decimal(there)} of which are there already" if there else ""
        parts += f", and {decimal(output)} for the output, since the volume has no links" if output else ""
        raise PodError(
            f"The run will take {decimal(need)} more on the volume ({parts}), and {decimal(free)} are free. Make the "
            "volume larger, clean it up (fluxpod clean), or keep less: save: { weights: 1, states: 1 }."
        )


def can_link(folder: Path) -> bool:
    """Whether a file can have two names there; tried where ``folder`` exists, else taken to be so."""
    if not folder.is_dir():
        return True
    first, second = (folder / f".{own_parts()}.{name}.part" for name in ("link", "name"))
    try:
        first.touch()
        os.link(first, second)
        return True
    except OSError:
        return False
    finally:
        for path in (first, second):
            path.unlink(missing_ok=True)
