"""The datasets of sd-scripts: ``[general]``, ``[[datasets]]`` and ``[[datasets.subsets]]`` of a dataset file, or the
arguments that say the same of a single folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from jobs.convert import entries
from jobs.convert.draft import NOT_NEEDED, NOT_SUPPORTED, Draft, Given, missing
from jobs.convert.entries import Level, Outcome, as_count, as_text, needless, rows, sets, unsupported
from jobs.convert.values import is_empty, is_off, path_here, resolution_of

PLACEHOLDER = "datasets/my-pictures"
NO_REGULARISATION = "There are no regularisation sets; rarely needed with FLUX"
NO_MASKS = "The whole picture is learned: there are no masks"
BESIDE = "Captions are read from name.txt or name.caption beside the pictures"


def _size(value: Any) -> Outcome:
    size = resolution_of(value)
    if size is None:
        return Outcome(NOT_SUPPORTED, "This is no size. Write resolution: 512 into the job by hand")
    return sets("resolution", size)


def _extension(value: Any) -> Outcome:
    if str(value).strip().lower().lstrip(".") in ("txt", "caption", ""):
        return Outcome(NOT_NEEDED, "name.txt and name.caption are both found")
    return Outcome(NOT_SUPPORTED, "Captions are read from name.txt or name.caption: rename the files")


ROWS = rows(
    ("num_repeats dataset_repeats", as_count("repeats")),
    ("class_tokens", as_text("caption")),
    ("resolution", _size),
    ("caption_extension caption_extention", _extension),
    ("shuffle_caption", unsupported("Captions are used as they stand: shuffle the tags in the files")),
    ("keep_tokens keep_tokens_separator secondary_separator", unsupported("belongs to shuffle_caption")),
    ("caption_separator", unsupported("belongs to shuffle_caption", ",")),
    (
        "enable_wildcard",
        unsupported("Wildcards and captions of several lines are not expanded: write one caption a file"),
    ),
    ("caption_prefix caption_suffix", unsupported("Write it into the caption files, or use trigger")),
    ("caption_tag_dropout_rate", unsupported("Tags are not dropped; caption_dropout drops whole captions")),
    ("token_warmup_min", unsupported("Captions are used whole from the start", 1)),
    ("token_warmup_step", unsupported("Captions are used whole from the start")),
    ("color_aug", unsupported("Colours are not changed: it would teach wrong ones")),
    ("flip_aug", unsupported("Pictures are not flipped: put flipped copies into the folder")),
    ("random_crop face_crop_aug_range", unsupported("Pictures are cropped at their centre: crop copies by hand")),
    ("alpha_mask masked_loss", unsupported(NO_MASKS)),
    ("skip_image_resolution", unsupported("Small pictures are not left out: take them out of the folder")),
    ("resize_interpolation interpolation_type", needless("pictures are always resized with an antialiased filter")),
    ("custom_attributes network_multiplier", unsupported("Every picture counts the same", 1)),
)
# What datasets may differ in there, and is one for the whole job here; by the names that the arguments have.
_HOISTED = {
    "batch_size": "train_batch_size",
    "caption_dropout_rate": "caption_dropout_rate",
    **{name: name for name in ("enable_bucket", "bucket_no_upscale", "bucket_reso_steps")},
    **{name: name for name in ("min_bucket_reso", "max_bucket_reso", "caption_dropout_every_n_epochs")},
    **{name: name for name in ("prior_loss_weight", "validation_split", "validation_seed", "cache_info")},
}


def read_datasets(draft: Draft, datasets: Mapping[str, Any] | None) -> None:
    """The job's datasets: from the dataset file, or else from train_data_dir."""
    if datasets is None:
        _from_arguments(draft)
    else:
        _from_file(draft, datasets)
    if not draft.datasets:
        draft.remarks["datasets[0].path"] = "the source names no folder here: write yours"
        draft.datasets.append({"path": PLACEHOLDER})
    entries.join_resolutions(draft)


def _from_arguments(draft: Draft) -> None:
    level = {name: given for name, given in draft.given.items() if name in ROWS}
    path, remark, origin = PLACEHOLDER, "the source names no folder: write yours", []
    if draft.on("train_data_dir"):
        path, remark = path_here(draft.text("train_data_dir"), "datasets")
        origin = [draft.given["train_data_dir"]]
    elif draft.on("dataset_config"):
        remark = "the dataset file is not here: write yours"
        draft.not_supported(["dataset_config"], "That file is not here. Give it with --dataset, and convert again")
    entries.entry_of(draft, path, remark, [level], ROWS, origin)
    missing(NO_REGULARISATION)(draft, ["reg_data_dir"])
    missing(NO_MASKS)(draft, ["conditioning_data_dir"])


def _from_file(draft: Draft, document: Mapping[str, Any]) -> None:
    outer = {name: given for name, given in draft.given.items() if name in ROWS}
    loose = {name: Given(name, value) for name, value in document.items() if not isinstance(value, (Mapping, list))}
    general = loose | _level(document.get("general"), "general")
    chains = [[outer, general, own, subset] for own, subset in _subsets(document["datasets"])]
    for chain in chains:
        if _is_picture_set(draft, chain[-1]):
            place = chain[-1]["image_dir"]
            path, remark = path_here(str(place.value), "datasets")
            entries.entry_of(draft, path, remark, chain, ROWS, [place])
    for name, argument in _HOISTED.items():
        found = [entries.effective(chain[1:]).get(name) for chain in chains]
        values = [given for place, given in enumerate(found) if given is not None and given not in found[:place]]
        entries.hoist(draft, argument, values, max if name == "batch_size" else None)
    levels = [outer, general, *(level for chain in chains for level in chain)]
    entries.tell_unused(draft, levels, ROWS)
    replaced = [{name: given for name, given in level.items() if not draft.waits(given)} for level in levels[1:]]
    entries.tell_unused(draft, replaced, _HOISTED)
    draft.given |= {
        given.key: given for level in levels[1:] for given in level.values() if given.key not in draft.fates
    }
    draft.not_needed(["train_data_dir", "reg_data_dir", "in_json", "conditioning_data_dir"], "the dataset file decides")
    draft.mapped(["dataset_config"], "datasets")


def _subsets(datasets: list[Any]) -> Iterator[tuple[Level, Level]]:
    """Each subset with the dataset that it belongs to."""
    for place, dataset in enumerate(datasets):
        own = _level(dataset, f"datasets[{place}]")
        subsets = dataset.get("subsets")
        for index, subset in enumerate(subsets if isinstance(subsets, list) and subsets else [{}]):
            yield own, _level(subset, f"datasets[{place}].subsets[{index}]")


def _level(keys: Any, place: str) -> dict[str, Given]:
    if not isinstance(keys, Mapping):
        return {}
    return {name: Given(f"{place}.{name}", value) for name, value in keys.items() if name != "subsets"}


def _is_picture_set(draft: Draft, subset: Level) -> bool:
    """Whether a subset can be a dataset of ours; tells its keys where not."""
    if "is_reg" in subset and not is_off(subset["is_reg"].value):
        why = NO_REGULARISATION
    elif "image_dir" not in subset or is_empty(subset["image_dir"].value):
        why = f"{BESIDE}: write the folder as a dataset"
    else:
        for name, kind, told in (
            ("conditioning_data_dir", NOT_SUPPORTED, NO_MASKS),
            ("metadata_file", NOT_SUPPORTED, BESIDE),
            ("is_reg", NOT_NEEDED, "is off"),
        ):
            if name in subset:
                draft.tell(subset[name], kind, told)
        return True
    for given in subset.values():
        draft.tell(given, NOT_SUPPORTED, why)
    return False
