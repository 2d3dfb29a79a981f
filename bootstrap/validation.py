"""What validation finds: a line a round in ``validation.jsonl``, and what the rounds say together.

The loss of a flow model is mostly the noise level that was drawn: near 1 for one, near 0 for the other. So losses are
told in bands of levels, and the loss of a round is the mean over levels that are spread evenly, each image with the
same noise in every round. Levels spread evenly follow the quality of what is drawn (Esser et al. 2024, section 5.3).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

BANDS = 4  # of noise levels, equally wide
WORSE = 1.01  # times the lowest loss: with fixed noise two rounds differ by what was learned, and rounding
ROUNDS = 3  # in a row that must be worse before it is said


@dataclass(frozen=True)
class Round:
    """One line of ``validation.jsonl``: the model after ``step`` updates, tried on pictures that it is not shown.

    ``train``: the mean loss in each band of the steps since the round before, and how many images it is of; of none in
    the round before the first step.
    """

    step: int
    loss: float | None  # None where it is no number
    by_level: tuple[float | None, ...]  # of each band; None for one without a level
    train: tuple[float | None, ...]
    train_images: tuple[float, ...]
    pictures: str  # what was tried: rounds of other pictures or levels are not compared
    seconds: float

    def line(self) -> str:
        return json.dumps(asdict(self)) + "\n"

    @classmethod
    def read(cls, text: str) -> Round:
        """Raises ValueError, TypeError for what is no such line."""
        told = json.loads(text)
        lists = {name: tuple(told[name]) for name in ("by_level", "train", "train_images") if name in told}
        return cls(**told | lists)


@dataclass(frozen=True)
class Parting:
    """Where the validation loss has turned: ``lowest`` is the round before it rose. ``overfits``: the loss of training
    still falls, else both rise."""

    lowest: Round
    overfits: bool


def band_name(band: int) -> str:
    """Of noise levels from 0, a clean picture, to 1, pure noise: "0.25-0.50"."""
    return f"{band / BANDS:.2f}-{(band + 1) / BANDS:.2f}"


def read_rounds(path: Path) -> list[Round]:
    """The rounds in a ``validation.jsonl``, in order; those of the pictures of the last one. Empty where there is none;
    a line that a kill left half-written is passed over. Raises OSError."""
    try:
        texts = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []
    rounds = []
    for text in texts:
        try:
            rounds.append(Round.read(text))
        except (ValueError, TypeError):
            continue
    return [each for each in rounds if each.pictures == rounds[-1].pictures]


def lowest(rounds: Sequence[Round]) -> Round | None:
    """The round of the lowest loss, the first of several."""
    numbers = [each for each in rounds if each.loss is not None]
    return min(numbers, key=lambda each: (each.loss, each.step)) if numbers else None


def parting(rounds: Sequence[Round]) -> Parting | None:
    """Where the curves have parted: the last ``ROUNDS`` rounds are all worse than the lowest one by more than one in a
    hundred. The loss of training is compared over the same time, band by band."""
    best, last = lowest(rounds), rounds[-ROUNDS:]
    if best is None or best.loss is None or len(last) < ROUNDS or last[0].step <= best.step:
        return None
    if any(each.loss is not None and each.loss <= best.loss * WORSE for each in last):
        return None
    # Before the first step there is no loss of training: the first round after it stands for that time.
    begin = best if any(best.train_images) else next(each for each in rounds if each.step > best.step)
    return Parting(best, overfits=_train_change(begin, last) < 0)


def _train_change(begin: Round, rounds: Sequence[Round]) -> float:
    """By how much the loss of training has changed from ``begin`` to ``rounds``, each band as much as it has images in
    both."""
    change = 0.0
    for band, (before, images) in enumerate(zip(begin.train, begin.train_images, strict=True)):
        pairs = [(each.train[band], each.train_images[band]) for each in rounds]
        numbers = [(loss, count) for loss, count in pairs if loss is not None]
        count = sum(count for _, count in numbers)
        if before is not None and count > 0:
            now = sum(loss * count for loss, count in numbers) / count
            change += min(images, count) * (now - before)
    return change


def in_words(rounds: Sequence[Round]) -> str:
    """The last round for people, in one line; "" before the first."""
    if not rounds:
        return ""
    last, best, parted = rounds[-1], lowest(rounds), parting(rounds)
    told = f"validation {_number(last.loss)} at step {last.step}"
    if best and best.step != last.step:
        told += f", lowest {_number(best.loss)} at step {best.step}"
    if parted and parted.overfits:
        told += f"; OVERFITTING since step {parted.lowest.step}: pictures it is shown get better, others worse"
    elif parted:
        told += f"; WORSE since step {parted.lowest.step}, and so is training: a lower learning_rate usually helps"
    return told


def _number(loss: float | None) -> str:
    return "no number" if loss is None else f"{loss:.4f}"
