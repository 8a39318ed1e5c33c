"""Load layer i + 1 of a stored prefix while layer i computes.

A stored prefix is one file whose arrays have the layers first, so a layer is two short reads. The
file says a checksum for each: a layer is believed as soon as it is there, without the rest. A
thread reads ahead; the model's cache waits, layer by layer, for no more than it needs.
"""

from __future__ import annotations

import functools
import hmac
import json
import os
import struct
import threading
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.errors import InputError
from stoker.kvcache.kv_file import KvCorrupt, layer_checksum, read_header, restored_layer
from stoker.kvcache.language_model import Kv, LanguageModel, tensor_of

_NUMPY: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "I8": np.dtype("i1"), "U8": np.dtype("u1"),
    "I32": np.dtype("<i4"),
}  # fmt: skip


class LayerFile:
    """One KV file read layer by layer; each layer is checked on its own. Thread-safe.

    Args:
        path: Written by `kv_file.write_kv`.

    Raises:
        KvCorrupt: not such a file, or one of before layers had checksums.
        OSError: it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.header = read_header(path)
        self._name = path.name
        self._file = path.open("rb")
        try:
            (length,) = struct.unpack("<Q", self._file.read(8))
            document = json.loads(self._file.read(length))
            metadata = document.pop("__metadata__")
            self._entries: dict[str, Any] = document
            self._data_start = 8 + length
            self._checksums = metadata.get("layer_checksums", "").split(",")
            self.layers = int(document["keys"]["shape"][0])
            self.token_ids: NDArray[np.int32] = self._whole("token_ids").astype(np.int32)
            if len(self._checksums) != self.layers:
                raise KvCorrupt(
                    f"{path.name}: expected {self.layers} checksums of layers, found "
                    f"{len(self._checksums)}"
                )
        except (ValueError, KeyError, TypeError, struct.error) as error:
            self._file.close()
            raise KvCorrupt(f"{path.name}: expected a KV file, found damage: {error}") from error
        except KvCorrupt:
            self._file.close()
            raise

    def _read(self, name: str, layer: int | None) -> NDArray[Any]:
        entry = self._entries[name]
        start, stop = entry["data_offsets"]
        shape = list(entry["shape"])
        if layer is not None:
            size = (stop - start) // shape[0]
            start, stop = start + layer * size, start + (layer + 1) * size
            shape = shape[1:]
        raw = bytearray(stop - start)
        count = os.preadv(self._file.fileno(), [raw], self._data_start + start)
        if count != len(raw):
            raise KvCorrupt(f"{self._name}: expected {len(raw)} bytes of {name}, found {count}")
        found: NDArray[Any] = np.frombuffer(raw, dtype=_NUMPY[entry["dtype"]])
        return found.reshape(shape)

    def _whole(self, name: str) -> NDArray[Any]:
        return self._read(name, None)

    def layer(self, number: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Read and check one layer: keys and values, float32, shape (kv_heads, tokens, head_dim).

        Raises:
            KvCorrupt: its checksum does not fit.
            OSError: it cannot be read.
        """
        names = [name for name in self._entries if name.split(".")[0] in ("keys", "values")]
        parts = {name: self._read(name, number) for name in names}
        found = layer_checksum(self.token_ids, parts)
        if not hmac.compare_digest(found, self._checksums[number]):
            raise KvCorrupt(
                f"{self._name}: expected checksum {self._checksums[number]} of layer {number}, "
                f"found {found}"
            )
        storage = self.header.storage
        return restored_layer(parts, "keys", storage), restored_layer(parts, "values", storage)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class LayerLoader:
    """Reads all layers of a file in a thread, in order, each handed over once it is checked.

    Args:
        file: The file; closed when the last layer is read or the loader is closed.
    """

    def __init__(self, file: LayerFile) -> None:
        self._file = file
        self._ready = [threading.Event() for _ in range(file.layers)]
        self._layers: list[tuple[NDArray[np.float32], NDArray[np.float32]] | None] = [
            None for _ in range(file.layers)
        ]
        self._error: BaseException | None = None
        self._stop = False
        self._thread = threading.Thread(target=self._run, name="kv-layers", daemon=True)
        self._thread.start()

    @property
    def tokens(self) -> int:
        """Tokens of the prefix."""
        return len(self._file.token_ids)

    @property
    def layers(self) -> int:
        """Layers of the model."""
        return self._file.layers

    def _run(self) -> None:
        try:
            for number in range(self._file.layers):
                if self._stop:
                    break
                self._layers[number] = self._file.layer(number)
                self._ready[number].set()
        except KeyError as error:
            self._error = KvCorrupt(f"expected a KV file, found damage: {error!r}")
        except (KvCorrupt, OSError, ValueError) as error:
            self._error = error
        finally:
            self._file.close()
            for event in self._ready:
                event.set()

    def take(self, number: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Wait for a layer and take it; each can be taken once.

        Raises:
            KvCorrupt, OSError: as `LayerFile.layer` found; the pass that asked is void.
        """
        self._ready[number].wait()
        found, self._layers[number] = self._layers[number], None
        if found is None:
            raise self._error or InputError(f"layer {number}: taken already, or the loader closed")
        return found

    def close(self) -> None:
        """Read no more and wait for the thread."""
        self._stop = True
        self._thread.join()


def overlapped_cache(model: LanguageModel, loader: LayerLoader) -> Any:
    """Return a `transformers` cache that begins with the loader's prefix, layer by layer.

    Use it for one pass at once, as ``model.forward(question, cache=cache)``: layer i of the model
    waits for layer i of the file. After that pass it is an ordinary cache.

    Raises:
        InputError: the file has other layers than the model.
    """
    if loader.layers != model.config.num_hidden_layers:
        raise InputError(f"expected {model.config.num_hidden_layers} layers, found {loader.layers}")
    from transformers.cache_utils import DynamicCache

    cache = DynamicCache()
    layer_class = _layer_class()
    cache.layers = [layer_class(model.torch, loader, number) for number in range(loader.layers)]
    cache.layer_class_to_replicate = None
    return cache


@functools.cache
def _layer_class() -> type[Any]:
    from transformers.cache_utils import DynamicLayer

    class LoadedLayer(DynamicLayer):  # type: ignore[misc,no-untyped-call,unused-ignore]
        """A layer whose first tokens arrive while the layers before it compute."""

        def __init__(self, torch: Any, loader: LayerLoader, number: int) -> None:
            super().__init__()  # type: ignore[no-untyped-call,unused-ignore]
            self._torch = torch
            self._loader: LayerLoader | None = loader
            self._number = number

        def get_seq_length(self) -> int:
            if self._loader is not None:
                return self._loader.tokens
            return int(super().get_seq_length())

        def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
            if self._loader is not None:
                keys, values = self._loader.take(self._number)
                self._loader = None
                self.lazy_initialization(key_states, value_states)
                self.keys = tensor_of(self._torch, keys)[None]
                self.values = tensor_of(self._torch, values)[None]
            return super().update(key_states, value_states, *args, **kwargs)

    return LoadedLayer


def load_first(model: LanguageModel, file: LayerFile) -> Any:
    """Return a cache with all layers loaded, and close the file: loading before computing."""
    try:
        layers = [file.layer(number) for number in range(file.layers)]
    finally:
        file.close()
    keys, values = (np.stack(part) for part in zip(*layers, strict=True))
    return model.cache_of(Kv(file.token_ids, keys, values))
