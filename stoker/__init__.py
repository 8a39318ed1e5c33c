"""Stoker keeps the part of a RAG system that the next requests need in the fastest memory.

`import stoker` is cheap: public names are loaded on first use, native code and models later still.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from stoker.errors import (
    CapacityError,
    ConfigError,
    CorruptError,
    InputError,
    StokerError,
    UnavailableError,
)

if TYPE_CHECKING:
    from stoker.index.build import BuildReport
    from stoker.index.hits import Hits
    from stoker.index.residency import Residency
    from stoker.prefetch.receipt import Receipt
    from stoker.prefetch.warm_control import WarmControl
    from stoker.service.async_client import AsyncClient
    from stoker.service.client import Client
    from stoker.service.embedded import Index, build, open

__version__ = "0.1.0"

_HOMES = {
    "AsyncClient": "stoker.service.async_client",
    "BuildReport": "stoker.index.build",
    "Client": "stoker.service.client",
    "Hits": "stoker.index.hits",
    "Index": "stoker.service.embedded",
    "Receipt": "stoker.prefetch.receipt",
    "Residency": "stoker.index.residency",
    "WarmControl": "stoker.prefetch.warm_control",
    "build": "stoker.service.embedded",
    "open": "stoker.service.embedded",
}

__all__ = [
    "AsyncClient",
    "BuildReport",
    "CapacityError",
    "Client",
    "ConfigError",
    "CorruptError",
    "Hits",
    "Index",
    "InputError",
    "Receipt",
    "Residency",
    "StokerError",
    "UnavailableError",
    "WarmControl",
    "__version__",
    "build",
    "open",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'stoker' has no attribute {name!r}")
    try:
        module = importlib.import_module(home)
    except ModuleNotFoundError as error:
        if error.name != "stoker.kernels._core":
            raise
        raise ImportError(
            f"{__path__[0]} has no native core: it is Stoker's source and not an installation of "
            "it. Python looks in its working folder first, so leave that one; or build there, "
            "with `make setup`, and use its .venv"
        ) from error
    value = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_HOMES))
