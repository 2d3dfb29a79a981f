"""The datasets of sd-scripts: ``[general]``, ``[[datasets]]`` and ``[[datasets.subsets]]`` of a dataset file, or the
arguments that say the same of a single folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from jobs.convert import entries
from jobs.convert.draft import MAPPED, NOT_NEEDED, NOT_SUPPORTED, OFF, Draft, Given, missing
from jobs.convert.entries import (
    Level,
    Outcome,
    Row,
    as_number_of,
    as_path,
    as_switch,
    as_text,
    needless,
    rows,
    sets,
    unsupported,
)
from jobs.convert.values import is_empty, is_off, path_here, resolution_of
from jobs.reference import spelled

PLACEHOLDER = "datasets/my-pictures"
BESIDE = "Captions are read from name.txt or name.caption beside the pictures"


def _size(value: Any) -> Outcome:
    size = resolution_of(value)
    if size is None:
        return Outcome(NOT_SUPPORTED, "This is no size. Write resolution: 512 into the job by hand")
    return sets("resolution", size)


def _both(*keys: str) -> Row:
    return lambda value: (
        Outcome(NOT_NEEDED, OFF)
        if is_off(value)
        else Outcome(MAPPED, ", ".join(f"datasets[].{key}: true" for key in keys), dict.fromkeys(keys, True))
    )


ROWS = rows(
    ("num_repeats dataset_repeats", as_number_of("repeats", whole=True, usual=1)),
    ("class_tokens", as_text("caption")),
    ("resolution", _size),
    ("caption_extension caption_extention", entries.caption_ending),
    ("caption_prefix", as_text("prefix")),
    ("caption_suffix", as_text("suffix")),
    ("enable_wildcard", _both("wildcards", "multiline")),
    ("caption_dropout_rate", as_number_of("caption_dropout")),
    ("shuffle_caption", as_switch("shuffle_tags")),
    ("keep_tokens", as_number_of("keep_tags", whole=True, usual=0, only_with="shuffle_tags")),
    (
        "keep_tokens_separator secondary_separator",
        unsupported("Tags stand between commas, and keep_tags says how many stay in front", only_with="shuffle_tags"),
    ),
    ("caption_separator", unsupported("Tags stand between commas", ",", only_with="shuffle_tags")),
    ("caption_tag_dropout_rate", unsupported("Tags are not dropped; caption_dropout drops whole captions")),
    ("token_warmup_min", unsupported("Captions are used whole from the start", 1)),
    ("token_warmup_step", unsupported("Captions are used whole from the start")),
    ("flip_aug", as_switch("flip")),
    ("random_crop", as_switch("random_crops", 4, "at 4 places, since each is cached")),
    ("color_aug", unsupported("Colours are not changed: it would teach wrong ones")),
    ("face_crop_aug_range", unsupported("Faces are not looked for; crop says which part of a picture is kept")),
    ("alpha_mask", as_switch("mask", "alpha")),
    ("conditioning_data_dir", as_path("mask", "datasets")),
    ("skip_image_resolution", unsupported("Small pictures are not left out: take them out of the folder")),
    ("resize_interpolation interpolation_type", needless("pictures are always resized with an antialiased filter")),
    ("custom_attributes network_multiplier", unsupported("Only the weight of a dataset can be set", 1)),
)
# What datasets may differ in there, and is one for the whole job here; by the names that the arguments have.
_HOISTED = {
    "batch_size": "train_batch_size",
    "caption_dropout_rate": "caption_dropout_rate",
    **{name: name for name in ("enable_bucket", "bucket_no_upscale", "bucket_reso_steps")},
    **{name: name for name in ("min_bucket_reso", "max_bucket_reso", "caption_dropout_every_n_epochs")},
    **{name: name for name in ("validation_split", "validation_seed", "cache_info")},
}


def read_datasets(draft: Draft, datasets: Mapping[str, Any] | None) -> None:
    """The job's datasets: from the dataset file, or else from train_data_dir and reg_data_dir."""
    if datasets is None:
        _from_arguments(draft)
    else:
        _from_file(draft, datasets)
    if not draft.datasets:
        entries.entry_of(draft, (PLACEHOLDER, "the source names no folder here: write yours"), [], ROWS, ())
    if any("mask" in entry for entry in draft.datasets):
        draft.not_needed(["masked_loss"], "the masks of the datasets say it")
    missing("Write the folder of the masks at datasets[].mask, or mask: alpha")(draft, ["masked_loss"])
    draft.not_needed(["prior_loss_weight"], "there are no regularisation images")
    entries.join(draft)


def _from_arguments(draft: Draft) -> None:
    level = {name: given for name, given in draft.given.items() if name in ROWS}
    place, origin = (PLACEHOLDER, "the source names no folder: write yours"), []
    if draft.on("train_data_dir"):
        place, origin = path_here(draft.text("train_data_dir"), "datasets"), [draft.given["train_data_dir"]]
    elif draft.on("dataset_config"):
        place = (PLACEHOLDER, "the dataset file is not here: write yours")
        draft.not_supported(["dataset_config"], "That file is not here. Give it with --dataset, and convert again")
    entries.entry_of(draft, place, [level], ROWS, origin)
    if draft.on("reg_data_dir"):
        path, remark = path_here(draft.text("reg_data_dir"), "datasets")
        given = [draft.given["reg_data_dir"]]
        entries.entry_of(draft, (path, remark or entries.REGULARISING), [level], ROWS, given, _regularising(draft))


def _regularising(draft: Draft) -> dict[str, Any]:
    """What a dataset of regularisation images has besides: how much it counts."""
    weight = draft.number("prior_loss_weight", 1)
    draft.mapped(["prior_loss_weight"], f"datasets[].weight: {spelled(weight)}")
    if entries.REGULARISATION not in draft.notes:
        draft.notes.append(entries.REGULARISATION)
    return {"weight": int(weight) if weight.is_integer() else weight} if weight != 1 else {}


def _from_file(draft: Draft, document: Mapping[str, Any]) -> None:
    outer = {name: given for name, given in draft.given.items() if name in ROWS}
    loose = {name: Given(name, value) for name, value in document.items() if not isinstance(value, (Mapping, list))}
    general = loose | _level(document.get("general"), "general")
    chains = [[outer, general, own, subset] for own, subset in _subsets(document["datasets"])]
    for chain in chains:
        if _is_picture_set(draft, chain[-1]):
            place, regularising = chain[-1]["image_dir"], _is_regularising(chain[-1])
            path, remark = path_here(str(place.value), "datasets")
            remark = remark or (entries.REGULARISING if regularising else "")
            more = _regularising(draft) if regularising else {}
            entries.entry_of(draft, (path, remark), chain, ROWS, [place], more)
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
    draft.not_needed(["train_data_dir", "reg_data_dir", "in_json"], "the dataset file decides")
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


def _is_regularising(subset: Level) -> bool:
    return "is_reg" in subset and not is_off(subset["is_reg"].value)


def _is_picture_set(draft: Draft, subset: Level) -> bool:
    """Whether a subset can be a dataset of ours; tells its keys where not."""
    if "image_dir" not in subset or is_empty(subset["image_dir"].value):
        for given in subset.values():
            draft.tell(given, NOT_SUPPORTED, f"{BESIDE}: write the folder as a dataset")
        return False
    if "is_reg" in subset:
        told = (MAPPED, "a dataset of its own") if _is_regularising(subset) else (NOT_NEEDED, "is off")
        draft.tell(subset["is_reg"], *told)
    if "metadata_file" in subset:
        draft.tell(subset["metadata_file"], NOT_SUPPORTED, BESIDE)
    return True
