"""Text files as sections under headings: plain text, Markdown, reStructuredText, HTML.

Parsing is done by the libraries of the extra ``formats``; where one is missing, that format is an
error that names it, never a silent worse reading. reStructuredText is parsed with file inclusion
and raw output switched off, so a document cannot read other files.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from stoker.errors import InputError, UnavailableError
from stoker.service.chunking import Section

_GAP = re.compile(r"\n[ \t]*\n\s*")
_CONTROLS_MAX_RATIO = 0.01
_NODES_MAX = 2_000_000
_ROLE = re.compile(r":[A-Za-z][\w+.:-]*:`([^`<]*?)(?:\s*<[^`>]*>)?`")
_DIRECTIVE = re.compile(r"^\.\.\s+[\w:+-]+::[ \t]*", re.MULTILINE)
_OPTION = re.compile(r"^\s*:[\w-]+:.*$", re.MULTILINE)


def read_sections(path: Path, *, bytes_max: int) -> list[Section]:
    """Read one text file by its ending.

    Raises:
        InputError: too large, not UTF-8 (names the byte), binary, or not parseable.
        UnavailableError: the library for this format is not installed.
        OSError: the file cannot be opened.
    """
    text = _decoded(path, bytes_max)
    for endings, parse in _PARSERS:
        if path.name.lower().endswith(endings):
            try:
                return list(parse(text))
            except ImportError as error:
                raise UnavailableError(
                    f"{path}: this format needs {error.name}: pip install 'stoker[formats]'"
                ) from error
            except RecursionError as error:
                raise InputError(f"{path}: nested too deeply") from error
            except InputError as error:
                raise InputError(f"{path}: {error}") from error
    raise InputError(f"{path}: not a text ending")


def _decoded(path: Path, bytes_max: int) -> str:
    with path.open("rb") as file:
        raw = file.read(bytes_max + 1)
    if len(raw) > bytes_max:
        raise InputError(f"{path}: larger than file_bytes_max = {bytes_max} bytes")
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise InputError(f"{path}: is UTF-16, expected UTF-8")
    if (place := raw.find(b"\0")) >= 0:
        raise InputError(f"{path}: is binary (a zero byte at {place}), expected UTF-8 text")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 at byte {error.start}") from error
    controls = sum(letter < " " and letter not in "\t\n\r\f\v" for letter in text)
    if controls > len(text) * _CONTROLS_MAX_RATIO:
        raise InputError(f"{path}: is binary ({controls} control characters)")
    return text


class _Outline:
    """Collects paragraphs under the current path of headings."""

    def __init__(self) -> None:
        self._levels: list[tuple[int, str]] = []
        self._paragraphs: list[str] = []
        self._sections: list[Section] = []

    def heading(self, level: int, title: str) -> None:
        self._flush()
        while self._levels and self._levels[-1][0] >= level:
            self._levels.pop()
        self._levels.append((level, " ".join(title.split())))

    def paragraph(self, text: str) -> None:
        if text.strip():
            self._paragraphs.append(text)

    def _flush(self) -> None:
        if self._paragraphs:
            titles = tuple(title for _, title in self._levels if title)
            self._sections.append(Section(titles, tuple(self._paragraphs)))
            self._paragraphs = []

    def sections(self) -> list[Section]:
        self._flush()
        return self._sections


def _plain(text: str) -> list[Section]:
    outline = _Outline()
    for paragraph in _GAP.split(text):
        outline.paragraph(paragraph)
    return outline.sections()


def _markdown(text: str) -> list[Section]:
    module = importlib.import_module("markdown_it")
    outline = _Outline()
    level: int | None = None
    row: list[str] | None = None
    for token in module.MarkdownIt("commonmark").enable("table").parse(_no_front_matter(text)):
        if token.type == "heading_open":
            level = int(token.tag[1:])
        elif token.type == "tr_open":
            row = []
        elif token.type == "tr_close" and row is not None:
            outline.paragraph(" | ".join(row))
            row = None
        elif token.type == "inline":
            content = _inline_text(token)
            if level is not None:
                outline.heading(level, content)
                level = None
            elif row is not None:
                row.append(content)
            else:
                outline.paragraph(content)
        elif token.type in ("fence", "code_block"):
            outline.paragraph(token.content)
        elif token.type == "html_block":
            for section in _html(token.content):
                for paragraph in section.paragraphs:
                    outline.paragraph(paragraph)
    return outline.sections()


def _no_front_matter(text: str) -> str:
    if text.startswith("---\n") and (end := text.find("\n---\n", 4)) > 0:
        return text[end + 5 :]
    return text


def _inline_text(token: Any) -> str:
    parts = []
    for child in token.children or ():
        if child.type in ("text", "code_inline"):
            parts.append(child.content)
        elif child.type in ("softbreak", "hardbreak"):
            parts.append("\n")
        elif child.type == "image":
            parts.append(_inline_text(child))
    return "".join(parts)


_HTML_DROPPED = ("script", "style", "noscript", "template", "nav", "svg", "iframe", "form")
_HTML_BLOCKS = frozenset(
    {"p", "li", "pre", "td", "th", "dt", "dd", "blockquote", "div", "section", "article", "main"}
    | {"body", "html", "table", "tr", "ul", "ol", "dl", "figure", "figcaption", "caption", "br"}
    | {"header", "footer", "aside", "hr", "tbody", "thead", "tfoot", "address", "details"}
)
_HTML_HEADINGS = frozenset({"h1", "h2", "h3", "h4", "h5", "h6"})


def _html(text: str) -> list[Section]:
    """Walk the tree without recursion: documents may be nested deeper than the stack is."""
    soup_module = importlib.import_module("bs4")
    tree = soup_module.BeautifulSoup(text, "html.parser")
    strings = (soup_module.NavigableString, soup_module.CData)
    outline = _Outline()
    held: list[str] = []
    level: int | None = None

    def flush() -> None:
        content = "".join(held)
        held.clear()
        if level is not None:
            outline.heading(level, content)
        else:
            outline.paragraph(content)

    stack: list[tuple[Any, bool]] = [(tree, False)]
    left = _NODES_MAX
    while stack:
        left -= 1
        if left < 0:  # a part of the page must not pass for the page
            raise InputError(f"has more than {_NODES_MAX:,} tags and texts")
        node, leaving = stack.pop()
        if type(node) in strings:
            held.append(str(node))
            continue
        name = getattr(node, "name", None)
        if name is None or name in _HTML_DROPPED:
            continue
        if name in _HTML_HEADINGS:
            flush()
            level = None if leaving else int(name[1])
        elif name in _HTML_BLOCKS and level is None:
            flush()
        if not leaving:
            stack.append((node, True))
            stack.extend((child, False) for child in reversed(node.contents))
    flush()
    return outline.sections()


def _restructured(text: str) -> list[Section]:
    core = importlib.import_module("docutils.core")
    nodes = importlib.import_module("docutils.nodes")
    tree = core.publish_doctree(
        _ROLE.sub(r"``\1``", text),
        settings_overrides={
            "report_level": 5,
            "halt_level": 6,
            "file_insertion_enabled": False,
            "raw_enabled": False,
            "_disable_config": True,
            "warning_stream": False,
            "doctitle_xform": False,
            "line_length_limit": 1 << 20,
        },
    )
    outline = _Outline()
    for level, kind, content in _doctree(tree, nodes):
        if kind == "title":
            outline.heading(level, content)
        else:
            outline.paragraph(content)
    return outline.sections()


def _doctree(tree: Any, nodes: Any) -> Iterator[tuple[int, str, str]]:
    """Yield (section depth, kind, text) in reading order."""
    stack: list[tuple[Any, int]] = [(tree, 0)]
    skipped = (nodes.comment, nodes.substitution_definition, nodes.target, nodes.problematic)
    leaves = (nodes.paragraph, nodes.literal_block, nodes.term, nodes.line, nodes.doctest_block)
    while stack:
        node, depth = stack.pop()
        if isinstance(node, skipped):
            continue
        if isinstance(node, nodes.system_message):
            # An unknown directive (Sphinx has many) keeps its source in the message: read that.
            for block in node.findall(nodes.literal_block):
                source = _OPTION.sub("", _DIRECTIVE.sub("", block.astext()))
                for paragraph in _GAP.split(source):
                    yield depth, "paragraph", paragraph
        elif isinstance(node, nodes.title | nodes.rubric):
            yield depth, "title", node.astext()
        elif isinstance(node, leaves):
            yield depth, "paragraph", node.astext()
        else:
            deeper = depth + isinstance(node, nodes.section)
            stack.extend((child, deeper) for child in reversed(node.children))


_PARSERS: tuple[tuple[tuple[str, ...], Callable[[str], list[Section]]], ...] = (
    ((".md", ".markdown"), _markdown),
    ((".rst", ".rest"), _restructured),
    ((".html", ".htm", ".xhtml"), _html),
    ((".txt", ".text"), _plain),
)
TEXT_ENDINGS = tuple(ending for endings, _ in _PARSERS for ending in endings)
