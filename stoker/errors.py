"""The one error hierarchy: every error that Stoker raises on purpose is a `StokerError`.

Rooms derive precise classes from these five. A message says what was expected, what was found,
where (file, page, key, offset), and what the caller can do.
"""

from __future__ import annotations

from typing import ClassVar


class StokerError(Exception):
    """Base of all errors that Stoker raises on purpose.

    Attributes:
        retriable: Whether the same call may succeed later without a change by the caller.
    """

    retriable: ClassVar[bool] = False


class ConfigError(StokerError):
    """A setting is unknown, malformed, or cannot go together with another one."""


class InputError(StokerError, ValueError):
    """The caller's data cannot be taken: wrong shape, type, range, or not finite."""


class CapacityError(StokerError):
    """A stated bound (bytes, queue length, quota) is reached; retry later or raise the bound."""

    retriable = True


class UnavailableError(StokerError):
    """Something needed is not there now: a closed index, a broker, a model, a deadline passed."""

    retriable = True


class CorruptError(StokerError):
    """Stored bytes are not what was written: bad magic, version, length or checksum."""
