"""What a finished file says of itself in its header, by the names that tools for models show.

All files: modelspec's, https://github.com/Stability-AI/ModelSpec, version 1.0.1. A LoRA's also: those of kohya's
trainer (``ss_``), by which galleries and web UIs tell base, rank, settings and trigger words.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from bootstrap.dataset import Item
from bootstrap.run_file import RunFile, read_items
from jobs.schema import is_single_file
from trainer.checkpoint import job_digest
from trainer.file_hashes import with_places

IMPLEMENTATION = "https://github.com/black-forest-labs/flux"
LONGEST_TAG = 60  # characters between two commas of a caption: what is longer is a sentence, and nobody's tag
MOST_TAGS = 300  # of each dataset, the most frequent


def metadata(run: RunFile, step: int) -> dict[str, str]:
    """Text by name. No path of this machine, of the pictures nothing but triggers and, in a LoRA, tags; and no date:
    two runs of one job give the same bytes. ``state.json`` and exported files have it."""
    job = run.job
    kind = "flux-1-dev" if run.weights.shape.guidance else "flux-1-schnell"
    triggers = dict.fromkeys(entry.trigger for entry in job.datasets if entry.trigger)
    largest = max(size for entry in job.datasets for size in entry.resolutions or job.resolutions)
    told = {
        "modelspec.sai_model_spec": "1.0.1",
        "modelspec.architecture": f"{kind}/lora" if job.lora else kind,
        "modelspec.implementation": IMPLEMENTATION,
        "modelspec.title": job.name,
        "modelspec.license": f"that of its base, {_name_of(job.base)}",
        "modelspec.resolution": f"{largest}x{largest}",
        "modelspec.trigger_phrase": ", ".join(triggers),
        "fluxpod.ema": f"average of the weights, decay {job.ema.decay:g}" if job.ema else "",
        "fluxpod.base": _name_of(job.base),
        "fluxpod.blocks": f"{run.weights.shape.double_blocks}+{run.weights.shape.single_blocks}",
        "fluxpod.step": str(step),
        "fluxpod.job": job_digest(run),
        "fluxpod.t5_mask": str(job.t5_mask).lower(),
    }
    if job.lora:
        told |= _as_kohya(run, step, largest) | {"fluxpod.layout": job.lora.layout}
        told = with_places(told)
    return {name: text for name, text in told.items() if text}


def _name_of(base: str) -> str:
    """A hub's name, or that of a file or folder without the folders around it."""
    return base if not is_single_file(base) and base.count("/") == 1 and base[0] not in "./~" else Path(base).name


def _as_kohya(run: RunFile, step: int, largest: int) -> dict[str, str]:
    job, lora = run.job, run.job.lora
    assert lora is not None
    datasets = tuple((_dataset_name(number, each.path), each.trigger or "") for number, each in enumerate(job.datasets))
    special = {"dora_wd": lora.dora, "rs_lora": lora.rslora, "dropout": lora.dropout}  # LyCORIS's names
    special = {name: value for name, value in special.items() if value}
    images, tags = _pictures(run.folder.items, datasets)
    return {
        "ss_output_name": job.name,
        "ss_base_model_version": "flux1",
        "ss_sd_model_name": _name_of(job.base),
        "ss_network_module": "networks.lora_flux",
        "ss_network_dim": str(lora.rank),
        "ss_network_alpha": f"{lora.alpha:g}",
        "ss_network_args": json.dumps(special) if special else "",
        "ss_resolution": f"({largest}, {largest})",
        "ss_num_train_images": str(images),
        "ss_tag_frequency": tags,
        "ss_total_batch_size": str(job.images_per_step),
        "ss_steps": str(step),
        "ss_max_train_steps": str(run.plan.steps),
        "ss_epoch": str(step // run.plan.steps_per_epoch),
        "ss_num_epochs": str(-(-run.plan.steps // run.plan.steps_per_epoch)),
        "ss_learning_rate": f"{job.learning_rate:g}",
        "ss_optimizer": job.optimizer,
        "ss_lr_scheduler": job.schedule,
        "ss_lr_warmup_steps": str(job.warmup),
        "ss_seed": str(job.seed),
        "ss_mixed_precision": "bf16",
        "ss_caption_dropout_rate": f"{job.caption_dropout:g}",
        "ss_timestep_sampling": job.timestep_sampling,
        "ss_discrete_flow_shift": f"{job.discrete_flow_shift:g}",
        "ss_guidance_scale": f"{job.guidance:g}",
        "ss_model_prediction_type": "raw",
        "ss_apply_t5_attn_mask": str(job.t5_mask),
    }


@lru_cache(maxsize=1)  # a run saves often, and its pictures stay the same
def _pictures(file: Path, datasets: tuple[tuple[str, str], ...]) -> tuple[int, str]:
    """How many pictures an epoch shows, and kohya's table of tags, from a run's ``items.jsonl``."""
    items = read_items(file)
    return sum(item.repeats for item in items), json.dumps(tag_frequency(items, datasets))


def tag_frequency(items: Iterable[Item], datasets: Sequence[tuple[str, str]]) -> dict[str, dict[str, int]]:
    """For each dataset (name, trigger) how many of its pictures have which tag: what stands between two commas of a
    caption."""
    captions = {(item.dataset, item.path): item.caption for item in items}  # once, at however many resolutions
    found: dict[str, Counter[str]] = {}
    for (number, _), caption in captions.items():
        name, trigger = datasets[number]
        parts = (" ".join(part.split()) for part in caption.replace("[trigger]", trigger).split(","))
        tags = {part for part in parts if part and len(part) <= LONGEST_TAG} | ({trigger} if trigger else set())
        found.setdefault(name, Counter()).update(tags)
    return {
        name: dict(sorted(tags.items(), key=lambda tag: (-tag[1], tag[0]))[:MOST_TAGS]) for name, tags in found.items()
    }


def _dataset_name(number: int, path: str) -> str:
    """A folder's own name; links may hold what is nobody's business."""
    return f"dataset {number + 1}" if "://" in path else Path(path).name


def in_layout(told: Mapping[str, str], layout: str) -> dict[str, str]:
    """A LoRA's metadata, written once more: other bytes have other hashes, and the scale lies in the weights."""
    kept = {name: text for name, text in told.items() if name != "lora_adapter_metadata"}
    return with_places(kept | {"fluxpod.layout": layout})
