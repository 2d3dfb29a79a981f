"""Samples that show a model gone wrong: black, flat, nothing but noise, or no numbers at all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np
from PIL.Image import Image

from jobs import rules
from jobs.schema import Job

Fault = Literal["", "no numbers", "black", "flat", "pure noise"]

DARKEST = 10  # of 255: a picture without a lighter pixel is black
FLATTEST = 3.0  # of 255: the spread of a picture of one colour, VAE's grain included
PATCH = 16  # pixels, of FLUX's latent: the grain of noise
LEAST_PATCHES = 576  # 384 x 384 pixels: with fewer, neighbours say too little
# Patches two apart are alike in pictures of anything: correlations of 0.4 and more in photographs, drawings, even pages
# of diagrams. Decoded noise has 0.1 and less, of which the VAE's blur is a part (measured with flux-tiny's VAE).
APART = 2
LEAST_CORRELATION = 0.2
LEAST_ROUGHNESS = 8.0  # of 255: a smoother picture is no noise
HARMLESS = ("warmup", "images_per_step", "datasets")  # what is doubted of these costs time, and breaks no model


def fault_of(image: Image) -> Fault:
    """What is wrong with a picture by its looks alone; "" for most."""
    pixels = np.asarray(image.convert("RGB"), dtype=np.float32)
    if pixels.max() <= DARKEST:
        return "black"
    if pixels.std(axis=(0, 1)).max() <= FLATTEST:
        return "flat"
    return "pure noise" if _is_noise(pixels.mean(axis=2)) else ""


def _is_noise(grey: np.ndarray) -> bool:
    """Whether the patches of ``grey`` [height, width] are rough, and know nothing of their neighbours."""
    rows, columns = grey.shape[0] // PATCH, grey.shape[1] // PATCH
    if rows * columns < LEAST_PATCHES or min(rows, columns) <= APART:
        return False
    patches = grey[: rows * PATCH, : columns * PATCH].reshape(rows, PATCH, columns, PATCH)
    means, roughness = patches.mean(axis=(1, 3)), patches.std(axis=(1, 3)).mean()
    if roughness < LEAST_ROUGHNESS:
        return False
    centred = means - means.mean()
    across, down = centred[:, APART:] * centred[:, :-APART], centred[APART:] * centred[:-APART]
    correlation = np.concatenate([across.ravel(), down.ravel()]).mean() / max(float(centred.var()), 1e-6)
    return bool(abs(correlation) < LEAST_CORRELATION)


def alarm_text(step: int, faults: Mapping[int, Fault], count: int, job: Job) -> str:
    """What to tell people of a round of samples, some of which (``faults``, by number) are wrong."""
    kinds = " and ".join(dict.fromkeys(faults.values()))
    which = "all samples" if len(faults) == count else f"{len(faults)} of {count} samples"
    return f"{which} of step {step} are {kinds}. {usual_causes(job)}"


def usual_causes(job: Job) -> str:
    """The settings that ruin a model, those of this job first that are known for it."""
    doubts = [finding for finding in rules.doubts(job) if finding.path[0] not in HARMLESS]
    causes = [f"{'.'.join(map(str, finding.path))}: {finding.message}" for finding in doubts]
    if all(finding.path[-1] != "learning_rate" for finding in doubts):
        causes.append(f"learning_rate ({job.learning_rate:g}) too high for {job.optimizer} or for this many steps")
    causes.append("broken pictures or captions")
    back = "Go back to an earlier state (resume_from) with a lower learning_rate."
    return f"Usual causes{', in this job' * bool(doubts)}: {'; '.join(causes)}. {back}"
