"""Reads YAML the way YAML 1.2 means it, and remembers where everything stands.

PyYAML reads YAML 1.1, where ``1e-4`` is text, ``no`` is false, ``010`` is eight and the second of two equal keys wins
in silence. Here its scanner and parser are kept and the meanings of scalars are those of the 1.2 core schema
(https://yaml.org/spec/1.2.2/#103-core-schema): ``1e-4`` is a number, ``no`` is text, ``010`` is ten, ``0o10`` is eight
and a repeated key is an error.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import yaml
from yaml.error import Mark, MarkedYAMLError
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from yaml.reader import ReaderError

from jobs.problem import JobError, Problem

Path: TypeAlias = tuple[str | int, ...]  # ("datasets", 0, "path")

MOST_CHARACTERS = 1_000_000  # the longest real job has a few thousand; PyYAML reads some 100 000 a second
MOST_VALUES = 20_000  # after aliases: nine lists of nine aliases each would be nine to the ninth

_TAG = "tag:yaml.org,2002:"
_CORE = (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", list("-+.0123456789")),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", list("-+.")),
    ("merge", r"<<", ["<"]),
)


class _Loader(yaml.SafeLoader):
    pass


_Loader.yaml_implicit_resolvers = {}  # without those of YAML 1.1
for _kind, _pattern, _first in _CORE:
    _Loader.add_implicit_resolver(_TAG + _kind, re.compile(f"(?:{_pattern})$"), _first)


@dataclass(frozen=True)
class Place:
    """Where a key or a value begins; both count from 1."""

    line: int
    column: int


@dataclass
class Document:
    """What a file says. ``problems`` are those that leave the rest readable, such as a key written twice."""

    value: Any
    keys: dict[Path, Place] = field(default_factory=dict)
    values: dict[Path, Place] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def place(self, path: Path) -> Place:
        """Where ``path`` is written: its key, else its value, else the group it would belong to."""
        while path not in self.keys and path not in self.values:
            if not path:
                return Place(1, 1)
            path = path[:-1]
        return self.keys.get(path) or self.values[path]


def decode(data: bytes, file: str) -> str:
    """The text of a job file: UTF-8, or UTF-16 where it says so itself (Windows Notepad's "Unicode")."""
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        encoding = "utf-16"
    else:
        encoding = "utf-8-sig"
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        before = data[: error.start]
        raise JobError(
            [
                Problem(
                    f"the byte 0x{data[error.start]:02x} is not UTF-8 text"
                    if encoding == "utf-8-sig"
                    else "the file is damaged UTF-16 text",
                    "Save the file with the encoding UTF-8 (your editor's Save As offers it)",
                    file=file,
                    line=before.count(b"\n") + 1,
                    column=len(before) - before.rfind(b"\n"),
                )
            ]
        ) from None


def parse(text: str, file: str = "") -> Document:
    """Reads one document.

    :raises JobError: where the text cannot be read at all; with line, column, an excerpt and what to do.
    """
    source = _Source(text.removeprefix("\ufeff"), file)
    if len(text) > MOST_CHARACTERS:
        raise source.error("the file is too long for a job", "Is it a picture or a log? A job has some dozen lines", 0)
    try:
        return _document(source)
    except RecursionError:
        raise source.error("lists and groups are nested too deeply", "A job needs three levels at most", 0) from None


def _document(source: _Source) -> Document:
    node = _compose(source)
    if node is None or (isinstance(node, ScalarNode) and not node.value):
        raise source.error("the file is empty", "Copy one of the jobs that come with fluxpod and change it", 0)
    reading = _Reading(source)
    if not isinstance(node, MappingNode):
        kind = "a list" if isinstance(node, SequenceNode) else "one piece of text"
        remedy = "Write lines such as name: my-style: no dash before the key, a space after the colon"
        raise source.error(
            f"the file holds {kind}, and a job is made of keys and values", remedy, node.start_mark.index
        )
    document = Document(None, reading.keys, reading.values, reading.problems)
    document.value = reading.value(node, ())
    document.problems += _odd_spaces(source, node)
    return document


class _Source:
    """The text, for messages that point into it."""

    def __init__(self, text: str, file: str) -> None:
        self.text = text
        self.file = file
        self.lines = re.split(r"\r\n|[\n\r\x85\u2028\u2029]", text)  # what PyYAML counts as line breaks

    def problem(self, message: str, remedy: str, index: int, key: str = "") -> Problem:
        """A problem at a character of the text, with the line and a caret below it."""
        before = re.split(r"\r\n|[\n\r\x85\u2028\u2029]", self.text[:index])
        line, column = len(before), len(before[-1]) + 1
        return Problem(message, remedy, key, self.file, line, column, self.excerpt(line, column))

    def error(self, message: str, remedy: str, index: int) -> JobError:
        return JobError([self.problem(message, remedy, index)])

    def excerpt(self, line: int, column: int, most: int = 100) -> str:
        """The line as written, tabs and odd spaces made visible, with a caret under the column."""
        written = self.lines[line - 1] if line <= len(self.lines) else ""
        start = max(0, column - most)
        visible = "".join(_visible(letter) for letter in written[start : start + most])
        return f"{line:6} | {visible}\n       | {' ' * (column - 1 - start)}^"


def _visible(letter: str) -> str:
    if letter == "\t":
        return "→"
    if letter != " " and letter.isspace():
        return "·"
    return letter if letter.isprintable() else "?"


def _compose(source: _Source) -> Node | None:
    loader = None
    try:
        loader = _Loader(source.text)
        node: Node | None = loader.get_single_node()
        return node
    except ReaderError as error:
        remedy = "Delete it; if nothing is to be seen there, type the line anew"
        code = error.character if isinstance(error.character, int) else ord(error.character)
        raise source.error(f"there is an unreadable character (U+{code:04X})", remedy, error.position) from None
    except MarkedYAMLError as error:
        raise _explained(error, source) from None
    except (ValueError, IndexError):  # PyYAML on escapes such as "\U00110000" and some directives
        index = loader.index if loader is not None else 0
        raise source.error("a character written with a backslash does not exist", _WINDOWS, index) from None
    finally:
        if loader is not None:
            loader.dispose()


def _explained(error: MarkedYAMLError, source: _Source) -> JobError:
    """PyYAML's error in words for someone who does not know its grammar."""
    mark = error.problem_mark or error.context_mark
    index = _index(mark, source)
    problem = (error.problem or "").lower()
    context = (error.context or "").lower()
    line_start = max(source.text.rfind(end, 0, index) for end in "\n\r") + 1
    if "unexpected end of stream" in problem:
        index = _index(error.context_mark, source)  # where it begins tells more than the end of the file
    odd = next((place for place in _odd_indentation(source) if place <= index), None)
    if odd is not None:
        return JobError([_odd_space_problem(source, odd)])
    if "'\\t'" in problem or "\t" in source.text[line_start : index + 1]:
        tab = source.text.find("\t", line_start, index + 1)
        return source.error(
            "a tab stands where only spaces are allowed",
            "Replace it by spaces: two for every level. Most editors can do so for the whole file",
            tab if tab >= 0 else index,
        )
    for needle, message, remedy in _EXPLANATIONS:
        if needle in problem or needle in context:
            if needle == "double-quoted" and "escape" not in problem:
                continue
            return source.error(message, remedy, index)
    return source.error(f"this cannot be read as YAML ({error.problem or error.context})", _GENERAL, index)


_GENERAL = "Check the line and the one before it: the indentation, the colon with a space after it, quotes and brackets"
_WINDOWS = "In double quotes a backslash begins a code. Write / instead, or use single quotes: 'like this'"
_EXPLANATIONS = (
    ("expected a single document", "a second document begins here (---)", "One file is one job: make it two files"),
    ("double-quoted", "a backslash in double quotes that begins no known code", _WINDOWS),
    ("unexpected end of stream", "a quotation mark is opened and never closed", "Close it, or delete it"),
    (
        "mapping values are not allowed",
        "a second colon in a line, or a line indented otherwise than its neighbours",
        "Put text with a colon in quotes, let the keys of one group begin in the same column, and a space follow each "
        "key's colon",
    ),
    (
        "sequence entries are not allowed",
        "a dash begins a list in the middle of a line",
        "Begin the list in a line of its own, or put the text in quotes",
    ),
    (
        "expected <block end>",
        "this line is indented otherwise than its neighbours",
        "Let the keys of one group, and the dashes of one list, begin in the same column",
    ),
    (
        "could not find expected ':'",
        "a line without a colon after its key",
        "Write key: value, with a space after the colon",
    ),
    (
        "while parsing a flow",
        "a bracket [ or { is not closed, or a comma is missing before this",
        "Close it, and put commas between its parts",
    ),
    (
        "undefined alias",
        "a * begins a reference to something that is not there",
        "Put text that begins with * in quotes",
    ),
    ("while scanning an alias", "a * begins a reference", "Put text that begins with * in quotes"),
    ("while scanning an anchor", "an & begins a name", "Put text that begins with & in quotes"),
    ("cannot start any token", "a value cannot begin with this character", "Put the value in quotes"),
    ("while scanning a directive", "a line cannot begin with %", "Put the value in quotes, or # before a remark"),
    ("tag", "a ! begins a type", "Put text that begins with ! in quotes"),
    ("duplicate anchor", "two values have the same &name", "Rename one of them"),
)


def _index(mark: Mark | None, source: _Source) -> int:
    return min(mark.index, len(source.text)) if mark is not None else 0


class _Reading:
    """Turns nodes into plain values, and notes where each stands."""

    def __init__(self, source: _Source) -> None:
        self.source = source
        self.keys: dict[Path, Place] = {}
        self.values: dict[Path, Place] = {}
        self.problems: list[Problem] = []
        self.count = 0
        self.open: list[Node] = []  # to find a value that contains itself

    def value(self, node: Node, path: Path) -> Any:
        self.count += 1
        if self.count > MOST_VALUES or node in self.open:
            remedy = "Write the values out, without & and *"
            raise self.source.error("references (*) multiply without end", remedy, node.start_mark.index)
        self.values.setdefault(path, _place(node.start_mark))
        if isinstance(node, ScalarNode):
            return self.scalar(node)
        if node.tag not in (_TAG + "map", _TAG + "seq"):
            self.tell(
                f"this cannot be read as {node.tag.replace(_TAG, '!!')}", "Delete the ! and the word after it", node
            )
        self.open.append(node)
        try:
            if isinstance(node, MappingNode):
                return self.mapping(node, path)
            assert isinstance(node, SequenceNode)
            return [self.value(each, (*path, i)) for i, each in enumerate(node.value)]
        finally:
            self.open.pop()

    def mapping(self, node: MappingNode, path: Path) -> dict[str, Any]:
        result: dict[str, Any] = {}
        merged: list[MappingNode] = []
        for key_node, value_node in node.value:
            if key_node.tag == _TAG + "merge":
                merged += self.merged(value_node)
                continue
            key = self.key(key_node)
            if key in result:
                first = self.keys[(*path, key)].line
                self.tell(f"{key} stands here and in line {first}", "Delete one of the two", key_node)
                continue
            if key is not None:
                self.keys.setdefault((*path, key), _place(key_node.start_mark))
                result[key] = self.value(value_node, (*path, key))
        for other in merged:  # what is written beside << wins over what << brings
            for key, value in self.value(other, path).items():
                result.setdefault(key, value)
        return result

    def merged(self, node: Node) -> Iterator[MappingNode]:
        for each in node.value if isinstance(node, SequenceNode) else [node]:
            if isinstance(each, MappingNode):
                yield each
            else:
                self.tell("<< needs a group of keys", "Write the keys out", each)

    def key(self, node: Node) -> str | None:
        if isinstance(node, ScalarNode):
            return str(node.value)
        self.tell("a list or a group stands where a key is needed", "Write key: value", node)
        return None

    def scalar(self, node: ScalarNode) -> Any:
        text, tag = node.value, node.tag.removeprefix(_TAG)
        written = self.source.text[node.start_mark.index : node.end_mark.index]
        if node.style == '"' and re.match(r'"[A-Za-z]:\\[^\\]', written):
            self.tell("a Windows path in double quotes, where a backslash begins a code", _WINDOWS, node)
            return written.strip('"')
        try:
            return _scalar(text, tag)
        except (ValueError, KeyError):
            self.tell(
                f"this cannot be read as {node.tag.replace(_TAG, '!!')}", "Delete the ! and the word after it", node
            )
            return text

    def tell(self, message: str, remedy: str, node: Node) -> None:
        self.problems.append(self.source.problem(message, remedy, node.start_mark.index))


def _place(mark: Mark) -> Place:
    return Place(mark.line + 1, mark.column + 1)


def _scalar(text: str, tag: str) -> Any:
    """The value of a scalar by its core-schema type. Raises ValueError or KeyError where text and type disagree."""
    if tag in ("str", "merge"):
        return text
    if tag == "null":
        return None
    if tag == "bool":
        return {"true": True, "false": False}[text.lower()]
    if tag == "int":
        bases = {"0o": 8, "0x": 16}
        digits = text[2:] if text[:2] in bases else text
        if len(digits) > 1000:  # Python refuses to read more than 4300
            return float("-inf" if text.startswith("-") else "inf")
        return int(digits, bases.get(text[:2], 10))
    if tag == "float":
        return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    raise KeyError(tag)


def _odd_indentation(source: _Source) -> Iterator[int]:
    """Where a line is indented with something that looks like a space and is none."""
    for match in re.finditer(r"^ *([^\S \t\r\n])[^\S\r\n]*(?=\S)", source.text, re.MULTILINE):
        yield match.start(1)


def _odd_space_problem(source: _Source, index: int) -> Problem:
    code = ord(source.text[index])
    return source.problem(
        f"the line is indented with a character that only looks like a space (U+{code:04X})",
        "Delete the space before the text and type it anew; it came along when the text was copied",
        index,
    )


def _odd_spaces(source: _Source, node: Node) -> list[Problem]:
    """Odd indentation that YAML takes for a part of the text; inside block text and quotes it may well be."""
    quoted = [(each.start_mark.index, each.end_mark.index) for each in _scalars(node, set()) if each.style is not None]
    odd = (index for index in _odd_indentation(source) if not any(a <= index < b for a, b in quoted))
    return [_odd_space_problem(source, index) for index in odd]


def _scalars(node: Node, seen: set[int]) -> Iterator[ScalarNode]:
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, ScalarNode):
        yield node
    for each in node.value if isinstance(node, SequenceNode) else []:
        yield from _scalars(each, seen)
    for pair in node.value if isinstance(node, MappingNode) else []:
        for each in pair:
            yield from _scalars(each, seen)
