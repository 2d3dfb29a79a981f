"""From the job's dataset entries to the items of the run: every picture decoded, captioned and given its buckets.

All problems are found before one of them is reported. The order of the items is that of the entries, then of the
relative paths, then of the resolutions: the same on every machine.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from bootstrap.archives import ArchiveError, is_zip
from bootstrap.buckets import bucket_of, cropped_away
from bootstrap.caption_lists import CaptionListError, is_list, list_key, read_list
from bootstrap.captions import Sidecars, decode_text, dressed, has_wildcards, shown
from bootstrap.folders import Folder, named_repeats, walk
from bootstrap.held_out import held_out, tried
from bootstrap.images import ImageFacts
from bootstrap.inspection import AT_ONCE, Remembered, in_order, look_at_all
from bootstrap.links import LinkError
from bootstrap.masks import ALPHA, MaskFolder, why_not
from bootstrap.plan import DataSummary
from bootstrap.remote import address_of, find_fetched, is_remote, shown_path
from bootstrap.volume import Volume
from bootstrap.wildcards import unmatched
from jobs.problem import JobError, Problem
from jobs.schema import DatasetEntry, Job

Progress = Callable[[str], None]  # takes one line for people

# Read as captions by other tools; here they are no images and, where nothing else matched, perhaps misplaced captions.
TEXT_ENDINGS = frozenset(
    {
        *(".txt", ".caption", ".captions", ".cap", ".tags", ".tag", ".text", ".md"),
        *(".json", ".jsonl", ".csv", ".tsv", ".yaml", ".yml", ".toml", ".npz", ".npy"),
    }
)
LISTS_OF_CAPTIONS = frozenset(("metadata", "captions", "caption", "prompts", "labels"))
MOST_CROPPED = 0.5  # beyond this share of a picture's area, the crop is worth a note
PROGRESS_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Item:
    """One picture in one bucket: what is cached, and what is trained on."""

    path: str  # below the volume, with /; absolute where it lies elsewhere
    digest: str  # sha256 of the file's bytes
    caption: str  # as written; what is trained with is drawn from it, see bootstrap.captions
    repeats: int  # per epoch
    width: int  # of the upright picture, pixels
    height: int
    bucket: tuple[int, int]  # width, height it is trained at, pixels
    dataset: int = 0  # the number of its entry among the job's datasets
    mask: str = ""  # "alpha", the path of its mask file (as ``path``), or "" for none
    mask_digest: str = ""  # sha256 of the mask file's bytes


@dataclass(frozen=True)
class Part:
    """What one entry of the job has brought."""

    path: str  # as the job has it
    images: int
    captions: int  # images with a caption of their own
    repeats: tuple[int, int]  # least and most of its images, its folders' names counted in
    buckets: int
    per_epoch: int  # images in an epoch, each resolution counted
    skipped: int  # pictures that cannot be used
    fetched: bool = True  # False for a remote one of which nothing is known yet


@dataclass(frozen=True)
class Dataset:
    items: tuple[Item, ...]
    images: int
    captions: int  # images with a caption file of their own
    notes: tuple[str, ...]  # lines for people
    parts: tuple[Part, ...]  # one for each entry of the job
    held_out: tuple[Item, ...] = ()  # never trained on: what validation tries the model on

    def summary(self) -> DataSummary:
        counts: Counter[tuple[int, int]] = Counter()
        for item in self.items:
            counts[item.bucket] += item.repeats
        buckets = tuple((width, height, count) for (width, height), count in sorted(counts.items()))
        return DataSummary(images=self.images, items_per_epoch=sum(counts.values()), buckets=buckets)


def scan(job: Job, volume: Volume, progress: Progress | None = None, *, remember: bool = False) -> Dataset:
    """Every picture of every dataset entry, decoded unless remembered; with ``remember`` the volume is written to.

    Raises JobError with all that is wrong with any of them.
    """
    say = progress or (lambda line: None)
    entries = [_Entry(job, volume, entry, f"datasets[{i}]", i, say, remember) for i, entry in enumerate(job.datasets)]
    apart = [_apart(job, volume, say, remember)] if job.validation and job.validation.path else []
    for entry in (*entries, *apart):
        entry.look()
    fraction = job.validation.fraction if job.validation else None
    held = held_out((d for entry in entries for d in entry.digests), fraction) if fraction else frozenset()
    for entry in entries:
        entry.take(held)
    for entry in apart:
        entry.take(frozenset().union(*(other.digests for other in entries)))
    problems = [problem for entry in (*entries, *apart) for problem in entry.problems]
    kept = [item for entry in entries for item in entry.held_out] + [item for entry in apart for item in entry.items]
    if not problems:
        problems += _nothing_left(job, entries, apart)
    if problems:
        raise JobError(problems)
    notes = [f"{shown_path(entry.entry.path)}: {note}" for entry in (*entries, *apart) for note in entry.notes]
    if job.validation and kept:
        notes.append(_of_validation(kept, tried(kept, job.validation.images)))
    return Dataset(
        items=tuple(item for entry in entries for item in entry.items),
        images=sum(entry.images for entry in entries),
        captions=sum(entry.captions for entry in entries),
        parts=tuple(entry.part() for entry in entries),
        notes=tuple(notes),
        held_out=tuple(kept),
    )


def _apart(job: Job, volume: Volume, progress: Progress, remember: bool) -> _Entry:
    """Pictures of validation in a folder of their own: captions are dressed, and pictures cropped, as in the first
    dataset."""
    assert job.validation is not None
    assert job.validation.path is not None
    first = job.datasets[0]
    changes = {"path": job.validation.path, "repeats": 1, "mask": ALPHA if first.mask == ALPHA else None}
    entry = first.model_copy(update=changes)
    return _Entry(job, volume, entry, "validation", 0, progress, remember)


def _nothing_left(job: Job, entries: Sequence[_Entry], apart: Sequence[_Entry]) -> list[Problem]:
    """What holding pictures out has left nothing of."""
    problems = []
    known = all(entry.digests for entry in entries)
    if known and job.validation and job.validation.fraction and not any(entry.items for entry in entries):
        told = f"{job.validation.fraction:g} holds out every picture: nothing is left to train on"
        problems.append(Problem(told, "Write a smaller fraction, or use more pictures", key="validation.fraction"))
    for entry in apart:
        if entry.digests and not entry.items:
            told = f"every picture of {entry.entry.path} is also trained on, so none of them can tell of others"
            problems.append(Problem(told, "Take them out of the datasets, or name another folder", "validation.path"))
    return problems


def _of_validation(kept: Sequence[Item], used: Sequence[Item]) -> str:
    pictures = len({item.digest for item in kept})
    buckets = len({item.bucket for item in used})
    sizes = f"{buckets} sizes" if buckets > 1 else "one size"
    return f"validation: {pictures} pictures are held out of training; tried are {len(used)} images of {sizes}"


@dataclass
class _Entry:
    """One dataset entry while it is read; what is found is collected here."""

    job: Job
    volume: Volume
    entry: DatasetEntry
    key: str  # of the job, for messages
    index: int  # among the job's datasets
    progress: Progress
    remember: bool
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    items: list[Item] = field(default_factory=list)
    held_out: list[Item] = field(default_factory=list)
    root: Path | None = None
    folders: list[Folder] = field(default_factory=list)
    facts: dict[str, dict[str, ImageFacts]] = field(default_factory=dict)  # of good pictures, by folder and name
    images: int = 0
    captions: int = 0
    skipped: int = 0
    masks: dict[tuple[str, str], tuple[str, str]] = field(default_factory=dict)  # of folder and name: path and digest
    listed: dict[str, str] = field(default_factory=dict)  # captions from lists not taken yet, by list_key of the image
    stray: list[str] = field(default_factory=list)  # text files that belong to no image
    likely: list[str] = field(default_factory=list)  # those of them whose names look like captions
    # What is said of pictures -> their names: a note tells of all of them at once.
    said: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    @property
    def digests(self) -> frozenset[str]:
        return frozenset(image.digest for found in self.facts.values() for image in found.values())

    def _root(self) -> Path | None:
        """The folder or zip of this dataset; None where it is not there, which is told."""
        if not is_remote(self.entry.path):
            root = self.volume.resolve(self.entry.path)
            if root.is_dir() or is_zip(root):
                return root
            self.problems.append(_missing(self.entry.path, root, self.volume, f"{self.key}.path"))
            return None
        try:
            address_of(self.entry.path)
        except LinkError as error:
            self.problems.append(Problem(f"{shown_path(self.entry.path)} {error}", key=f"{self.key}.path"))
            return None
        fetched = find_fetched(self.entry.path, self.volume)
        if fetched is None:
            self.notes.append("is fetched when the job runs; what it holds is not known yet")
        return fetched

    def look(self) -> None:
        """Finds the folders and the good pictures in them."""
        root = self._root()
        if root is None:
            return
        try:
            tree = walk(root)
        except ArchiveError as error:
            self.problems.append(Problem(f"{shown_path(self.entry.path)}: {error}", key=f"{self.key}.path"))
            return
        masks = self._mask_folder()
        # A folder of masks may lie among the pictures: it holds none.
        folders = [f for f in tree.folders if masks is None or not f.path.is_relative_to(masks.root)]
        self.notes += tree.notes
        if tree.ignored:
            self.notes.append(f"{tree.ignored} hidden or system files ignored")
        facts = self._inspect(root, folders)
        if masks is not None:
            self._take_masks(masks, facts)
        if not facts and not self.problems:
            why = _no_images(shown_path(self.entry.path), root, folders, f"{self.key}.path")
            if self.skipped:
                told = f"not one of the {self.skipped} pictures in {shown_path(self.entry.path)!r} can be used"
                why = Problem(told, key=f"{self.key}.path")
            self.problems.append(why)
            return
        self.root, self.folders, self.facts = root, folders, facts

    def take(self, held: frozenset[str]) -> None:
        """Makes items of the pictures, those with these digests apart from the others."""
        if self.root is None:
            return
        for folder in self.folders:
            self._read_lists(folder)
        for folder in self.folders:
            self._take(folder, self.facts.get(folder.name, {}), held)
        self._tell_repeats(self.root, self.facts, self.folders)
        self._tell_captions()
        self.notes += [f"{said}: {shown(names)}" for said, names in self.said.items()]

    def _inspect(self, root: Path, folders: Sequence[Folder]) -> dict[str, dict[str, ImageFacts]]:
        """The good pictures by folder and name; what is wrong with the others is told."""
        files = [(f, name) for f in folders for name in f.files if Path(name).suffix.lower() not in TEXT_ENDINGS]
        facts: dict[str, dict[str, ImageFacts]] = defaultdict(dict)
        foreign: list[str] = []
        told = time.monotonic()
        with self._remembered(root) as remembered:
            paths = [folder.path / name for folder, name in files]
            looked = zip(files, look_at_all(paths, remembered), strict=True)
            for done, ((folder, name), found) in enumerate(looked, start=1):
                if found.facts:
                    facts[folder.name][name] = found.facts
                elif found.problem:
                    self._cannot_use(_below(folder, name), found.problem)
                else:
                    foreign.append(_below(folder, name))
                if time.monotonic() - told > PROGRESS_SECONDS:
                    told = time.monotonic()
                    self.progress(f"{shown_path(self.entry.path)}: checked {done}/{len(files)} images")
        if foreign:
            self.notes.append(f"{len(foreign)} files that are no images ignored: {shown(foreign)}")
        return facts

    def _remembered(self, root: Path) -> Remembered:
        key = hashlib.sha256(os.fsencode(_from_volume(root, self.volume))).hexdigest()[:32]
        return Remembered(self.volume.cache / "pictures" / f"{key}.json", root, writes=self.remember)

    def _mask_folder(self) -> MaskFolder | None:
        """The folder of masks, where the job names one; what is wrong with it is told."""
        if self.entry.mask in (None, ALPHA):
            return None
        root = self.volume.resolve(self.entry.mask)
        if not root.is_dir() and not is_zip(root):
            self.problems.append(_missing(self.entry.mask, root, self.volume, f"{self.key}.mask"))
            return None
        try:
            return MaskFolder(root)
        except ArchiveError as error:
            self.problems.append(Problem(f"{self.entry.mask}: {error}", key=f"{self.key}.mask"))
            return None

    def _take_masks(self, masks: MaskFolder, facts: dict[str, dict[str, ImageFacts]]) -> None:
        """Finds and checks the mask of each picture; a picture whose mask cannot be used is none to train on."""
        self.notes += masks.notes
        pairs = [(folder, name, masks.of(folder, name)) for folder, found in facts.items() for name in found]
        with self._remembered(masks.root) as remembered:
            looked = look_at_all([path for *_, path in pairs if path], remembered)
            for folder, name, path in pairs:
                if path is None:
                    self.said["without a mask: learned whole"].append(f"{folder}/{name}" if folder else name)
                    continue
                found, image = next(looked), facts[folder][name]
                if why := found.problem or why_not(found.facts, image.width, image.height):
                    self._cannot_use(_from_volume(path, self.volume), f"the mask of {name} {why}")
                    del facts[folder][name]
                elif found.facts:
                    self.masks[folder, name] = (_from_volume(path, self.volume), found.facts.digest)

    def _mask_of(self, folder: Folder, name: str, image: ImageFacts) -> tuple[str, str]:
        """What an item says of its mask: where it is, and its digest."""
        if self.entry.mask != ALPHA:
            return self.masks.get((folder.name, name), ("", ""))
        if image.transparent:
            return ALPHA, ""
        self.said["without transparency, so without a mask: learned whole"].append(_below(folder, name))
        return "", ""

    def _cannot_use(self, name: str, why: str, remedy: str = "Replace it or delete it") -> None:
        """A picture that training must do without: a problem, or a note where the job says to skip it."""
        if self.job.bad_images == "skip":
            self.skipped += 1
            self.notes.append(f"skipped {name}: {why}")
        else:
            self.problems.append(Problem(f"{name}: {why}", f"{remedy}, or write bad_images: skip", self.key))

    def part(self) -> Part:
        repeats = [item.repeats for item in self.items]
        return Part(
            path=shown_path(self.entry.path),
            images=self.images,
            captions=self.captions,
            repeats=(min(repeats, default=0), max(repeats, default=0)),
            buckets=len({item.bucket for item in self.items}),
            per_epoch=sum(repeats),
            skipped=self.skipped,
            fetched=bool(self.facts),
        )

    def _take(self, folder: Folder, facts: dict[str, ImageFacts], held: frozenset[str]) -> None:
        """Adds the items of one folder, and notes the text files there that belong to none of them."""
        sidecars = Sidecars(folder.files)
        files = {name: sidecar for name in facts if (sidecar := sidecars.of(name)) is not None}
        claimed = self._caption_texts(folder, sorted(set(files.values())))
        for name, image in facts.items():
            sidecar = files.get(name)
            text = self.listed.pop(list_key(_below(folder, name)), "")
            if sidecar is not None:
                text = claimed[sidecar]
            own = sidecar is not None or bool(text)
            text = text or self.entry.caption or folder.class_text
            apart = image.digest in held
            if not self._add_items(folder, name, image, text, self.held_out if apart else self.items):
                continue
            self.images += not apart
            self.captions += own and not apart
            if not own:
                self.said["without a caption"].append(_below(folder, name))
            for note in (*image.notes, *self._doubts(text)):
                self.said[note].append(_below(folder, name))
        stems = {Path(name).stem for name in facts} | LISTS_OF_CAPTIONS
        for name in folder.files:
            if Path(name).suffix.lower() in TEXT_ENDINGS and name not in claimed and not is_list(name):
                self.stray.append(_below(folder, name))
                if Path(name).stem in stems:
                    self.likely.append(_below(folder, name))

    def _caption_texts(self, folder: Folder, sidecars: Sequence[str]) -> dict[str, str]:
        """The captions in files of one folder; read several at a time, since a network volume takes long for each."""
        with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="captions") as pool:
            read = in_order(pool, lambda sidecar: _read(folder, sidecar), sidecars, 4 * AT_ONCE)
            return {name: self._caption_text(folder, name, found) for name, found in zip(sidecars, read, strict=True)}

    def _caption_text(self, folder: Folder, sidecar: str, found: bytes | OSError) -> str:
        if isinstance(found, OSError):
            self.problems.append(Problem(f"{_below(folder, sidecar)}: cannot be read ({found.strerror})", key=self.key))
            return ""
        text, note = decode_text(found)
        if note:
            self.said[f"captions {note}"].append(_below(folder, sidecar))
        if not text:
            self.said["empty caption files"].append(_below(folder, sidecar))
        return text

    def _read_lists(self, folder: Folder) -> None:
        """Takes the captions that the lists in ``folder`` have for images there and below."""
        for name in filter(is_list, folder.files):
            try:
                captions, note = read_list(name, folder.read(name))
            except OSError as error:
                problem = f"cannot be read ({error.strerror})"
                self.problems.append(Problem(f"{_below(folder, name)}: {problem}", key=self.key))
            except CaptionListError as error:
                remedy = 'Each row needs an image and its caption, such as {"file_name": "a.jpg", "text": "..."}'
                self.problems.append(Problem(f"{_below(folder, name)}: {error}", remedy, self.key))
            else:
                self.listed |= {list_key(_below(folder, image)): text for image, text in captions.items()}
                if note:
                    self.said[f"captions {note}"].append(_below(folder, name))

    def _doubts(self, caption: str) -> Iterator[str]:
        """What may not be meant by the way a caption is written."""
        if not self.entry.multiline and "\n" in caption:
            yield "captions of several lines are learned as they stand (multiline: true draws a line)"
        if not self.entry.wildcards and has_wildcards(caption):
            yield "captions with {a|b} are learned as they stand (wildcards: true draws a word)"
        if self.entry.wildcards and unmatched(caption):
            yield "a { or } in the caption lacks its partner and is taken as it stands"

    def _add_items(self, folder: Folder, name: str, image: ImageFacts, caption: str, to: list[Item]) -> bool:
        """Adds to ``to`` one item for each bucket that the picture has at the resolutions asked for; False where there
        is none."""
        path = _from_volume(folder.path / name, self.volume)
        if not _is_utf8(path):
            self._cannot_use(_below(folder, name), "its name is not UTF-8", "Rename it")
            return False
        resolutions = sorted(self.entry.resolutions or self.job.resolutions)
        step, upscale = self.job.bucket_step, self.job.upscale
        found = [bucket_of(image.width, image.height, resolution, step, upscale) for resolution in resolutions]
        buckets = list(dict.fromkeys(bucket for bucket in found if bucket is not None))
        if not buckets:
            why = f"{image.width} x {image.height} px is less than one bucket_step ({step})"
            self._cannot_use(_below(folder, name), why, "Delete it, set upscale: true")
            return False
        mask, mask_digest = self._mask_of(folder, name, image)
        for bucket in buckets:
            if cropped_away(image.width, image.height, bucket) > MOST_CROPPED:
                self.said[f"so long that more than half is cropped away at {bucket[0]} x {bucket[1]}"].append(
                    _below(folder, name)
                )
            to.append(
                Item(
                    path=path,
                    digest=image.digest,
                    caption=caption,
                    repeats=folder.repeats * self.entry.repeats,
                    width=image.width,
                    height=image.height,
                    bucket=bucket,
                    dataset=self.index,
                    mask=mask,
                    mask_digest=mask_digest,
                )
            )
        return True

    def _tell_repeats(
        self, root: Path, facts: Mapping[str, Mapping[str, ImageFacts]], folders: Sequence[Folder]
    ) -> None:
        for folder in folders:
            if folder.name and folder.repeats > 1 and (count := len(facts.get(folder.name, ()))):
                self.notes.append(f"{folder.name}: {count} images, {folder.repeats} repeats by its name")
        own = named_repeats(root.name)
        if own and own[0] > 1 and self.entry.repeats == 1:
            self.notes.append(
                f"the folder's own name is not taken for repeats: set repeats: {own[0]}, or give the folder above it"
            )

    def _tell_captions(self) -> None:
        """Reports how many images have captions; none at all beside other text files is a mistake, so it stops."""
        suspects = self.likely or (self.stray if 2 * len(self.stray) >= self.images else [])
        if self.images and not self.captions and suspects and self.entry.caption is None:
            self.problems.append(
                Problem(
                    f"captions: 0/{self.images}, but there are other text files: {shown(suspects)}",
                    "Captions are read from name.txt or name.caption beside each name.jpg, and from metadata.jsonl or "
                    "metadata.csv: rename them, or write "
                    'caption: "..." for all images without one',
                    f"{self.key}.path",
                )
            )
        self.notes.append(f"captions: {self.captions}/{self.images}")
        if self.listed:
            self.notes.append(
                f"lists name {len(self.listed)} images that are not there, or not used: {shown(sorted(self.listed))}"
            )
        if self.captions == 0:
            self.said.pop("without a caption", None)  # the line above says it
        if self.stray:
            self.notes.append(f"text files that belong to no image: {shown(self.stray)}")
        empty = sum(1 for item in self.items if not dressed(item.caption, self.entry))
        if empty:
            self.notes.append(f"{empty} items are learned with an empty caption: write captions, a trigger or caption")


def _read(folder: Folder, name: str) -> bytes | OSError:
    try:
        return folder.read(name)
    except OSError as error:
        return error


def _below(folder: Folder, name: str) -> str:
    """A file's name for people, relative to its dataset."""
    below = f"{folder.name}/{name}" if folder.name else name
    return os.fsencode(below).decode(errors="backslashreplace")


def _is_utf8(path: str) -> bool:
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


def _from_volume(path: Path, volume: Volume) -> str:
    try:
        return str(PurePosixPath(path.relative_to(volume.root)))
    except ValueError:
        return str(path.absolute())


def _missing(written: str, path: Path, volume: Volume, key: str) -> Problem:
    """A path that is no folder: what was tried, what is there, and what may have been meant."""
    if path.exists():
        return Problem(
            f"{written!r} is a file, and neither a folder nor a zip",
            "Give the folder or zip that holds the images",
            key,
        )
    meant = [Path("/") / written, volume.root / written.replace("\\", "/"), volume.datasets / Path(written).name]
    there = next(parent for parent in path.parents if parent.is_dir())
    names = sorted(entry.name for entry in there.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    child = path.relative_to(there).parts[0]
    by_lower = {name.lower(): name for name in names}
    meant += [there / by_lower[near] for near in difflib.get_close_matches(child.lower(), by_lower, n=1, cutoff=0.6)]
    near = next((guess for guess in meant if guess.is_dir()), None)
    guess = f"Did you mean {_from_volume(near, volume)}? " if near else ""
    found = f"{there} holds the folders {shown(names, 10)}" if names else f"{there} holds no folders"
    return Problem(f"{written!r} does not exist (looked for {path})", guess + found, key)


def _no_images(written: str, root: Path, folders: Sequence[Folder], key: str) -> Problem:
    endings = Counter(Path(name).suffix.lower() or "no ending" for folder in folders for name in folder.files)
    there = ", ".join(f"{count} x {ending}" for ending, count in endings.most_common(8)) or "no files at all"
    zips = [folder.path / name for folder in folders for name in folder.files if name.lower().endswith(".zip")]
    remedy = f"give the zip itself, such as path: {zips[0]}" if zips else "give the folder that holds them"
    return Problem(
        f"no images in {written!r} (looked through {root} and {len(folders) - 1} folders below it; found {there})",
        f"Put images there, or {remedy}",
        key,
    )
