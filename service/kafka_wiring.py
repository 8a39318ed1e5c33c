"""From settings to a Kafka client: which library, which cluster, which credentials."""

from __future__ import annotations

import importlib.util

from stoker.errors import ConfigError
from stoker.service.kafka_options import OTHER_CLIENT, KafkaOptions
from stoker.service.settings import ServiceSettings
from stoker.service.streams import EventLog


def kafka_options(settings: ServiceSettings) -> KafkaOptions:
    """Collect what the settings say about the cluster.

    Raises:
        ConfigError: they do not go together; the message names the key.
    """
    return KafkaOptions(
        bootstrap=settings.kafka_bootstrap,
        security_protocol=settings.kafka_security_protocol,
        sasl_mechanism=settings.kafka_sasl_mechanism,
        sasl_username=settings.kafka_sasl_username,
        sasl_password=settings.kafka_sasl_password,
        tls_ca_file=settings.kafka_tls_ca_file,
        tls_cert_file=settings.kafka_tls_cert_file,
        tls_key_file=settings.kafka_tls_key_file,
        compression=settings.kafka_compression,
        replication_factor=settings.kafka_replication_factor,
    )


def open_kafka(settings: ServiceSettings) -> EventLog:
    """Make the log on the cluster that the settings name; it connects when first used.

    Raises:
        ConfigError: `kafka_client` names a library that is not installed, or lacks what we use of
            it; or see `kafka_options`.
    """
    # Imported here: the clients take a while to load, and most servers run without.
    if settings.kafka_client == "confluent":
        if importlib.util.find_spec("confluent_kafka") is None:
            raise ConfigError(
                "service.kafka_client is confluent, but confluent-kafka is not installed; "
                "pip install 'stoker[confluent]', or set service.kafka_client to kafka-python"
            )
        from stoker.service.confluent_log import ConfluentLog

        return ConfluentLog(kafka_options(settings))
    try:
        from stoker.service.kafka_log import KafkaLog
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"the installed kafka-python is not one that works here ({error}): {OTHER_CLIENT}"
        ) from error
    return KafkaLog(kafka_options(settings))
