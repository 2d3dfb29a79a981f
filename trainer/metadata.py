"""What a finished file says of itself: in its header, by the names of modelspec, which tools for models show.

https://github.com/Stability-AI/ModelSpec, version 1.0.1.
"""

from __future__ import annotations

from bootstrap.run_file import RunFile
from trainer.checkpoint import job_digest

IMPLEMENTATION = "https://github.com/black-forest-labs/flux"


def metadata(run: RunFile, step: int) -> dict[str, str]:
    """Text by name. No path of this machine, nothing of the pictures but their triggers, and no date: two runs of one
    job give the same bytes. ``state.json`` and exported files have it."""
    job = run.job
    kind = "flux-1-dev" if run.weights.shape.guidance else "flux-1-schnell"
    triggers = dict.fromkeys(entry.trigger for entry in job.datasets if entry.trigger)
    largest = max(size for entry in job.datasets for size in entry.resolutions or job.resolutions)
    told = {
        "modelspec.sai_model_spec": "1.0.1",
        "modelspec.architecture": f"{kind}/lora" if job.lora else kind,
        "modelspec.implementation": IMPLEMENTATION,
        "modelspec.title": job.name,
        "modelspec.license": f"that of its base, {job.base}",
        "modelspec.resolution": f"{largest}x{largest}",
        "modelspec.trigger_phrase": ", ".join(triggers),
        "fluxpod.base": job.base,
        "fluxpod.step": str(step),
        "fluxpod.job": job_digest(run),
    }
    return {name: text for name, text in told.items() if text}
