"""What every use of `kafka-python` here shares: making clients, and its errors in our words.

A consumer or admin client whose first connection fails leaves a thread and four descriptors behind,
after the whole timeout: `made` looks first whether a broker listens, and closes what a failed
constructor had opened. The library also logs every attempt to connect: its logger is quietened, we
report the state's changes.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import kafka.errors
from kafka.net.compat import KafkaNetClient

from stoker.errors import ConfigError
from stoker.service.kafka_options import KafkaOptions
from stoker.service.streams import LogUnavailable, MemberFenced, RecordTooLarge

# What a commit fails with when the partition belongs to another member by now.
FENCED: Final = (
    kafka.errors.CommitFailedError,
    kafka.errors.IllegalGenerationError,
    kafka.errors.UnknownMemberIdError,
)


def made(client_class: Any, **settings: Any) -> Any:
    """Construct a client; where that fails, close the connection that it had begun to use.

    Raises:
        OSError: no broker takes connections.
    """
    _reach(settings["bootstrap_servers"], settings["bootstrap_timeout_ms"] / 1000)
    opened: list[Any] = []

    def connect(*args: Any, **kwargs: Any) -> Any:
        opened.append(KafkaNetClient(*args, **kwargs))
        return opened[-1]

    try:
        return client_class(kafka_client=connect, **settings)
    except BaseException:
        for connection in opened:
            connection.close()
        raise


def _reach(brokers: Sequence[str], timeout_s: float) -> None:
    """Return once one broker takes a connection; raise the last one's error where none does."""
    failure: OSError | None = None
    for broker in brokers:
        host, _, port = broker.rpartition(":")
        try:
            with socket.create_connection((host.strip("[]"), int(port)), timeout_s / len(brokers)):
                return
        except OSError as error:
            failure = error
    assert failure is not None
    raise failure


@contextmanager
def translated(action: str, options: KafkaOptions) -> Iterator[None]:
    """Turn the client's errors into ours, in one place."""
    try:
        yield
    except kafka.errors.MessageSizeTooLargeError as error:
        raise RecordTooLarge(f"Kafka at {options.bootstrap}: {action}: {error}") from error
    except kafka.errors.KafkaConfigurationError as error:
        raise ConfigError(f"Kafka at {options.bootstrap}: {action}: {error}") from error
    except kafka.errors.FencedInstanceIdError as error:
        raise MemberFenced(f"Kafka at {options.bootstrap}: {action}: {error}") from error
    except (kafka.errors.KafkaError, OSError) as error:
        detail = str(error) or type(error).__name__
        raise LogUnavailable(f"Kafka at {options.bootstrap}: {action}: {detail}") from error


def quieten() -> None:
    """Keep the library's own lines out of the log, unless someone has set its level."""
    logger = logging.getLogger("kafka")
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.CRITICAL)
