"""A real broker for the tests, started by them: Apache Kafka itself where Java and Maven are there.

Found in this order: the cluster that `STOKER_TEST_KAFKA=host:port` names; Apache Kafka in KRaft
mode, one process, its jars fetched once by their coordinates into a cache folder outside the
checkout; `noida-db`, a small binary that speaks the protocol. In CI, Apache Kafka must start where
Java and Maven are there.
"""

from __future__ import annotations

import abc
import contextlib
import fcntl
import importlib.metadata
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

KAFKA_VERSION = "4.1.2"
# Of the listener that asks for a login over TLS, on loopback, for the length of the tests.
SECURE_USER, SECURE_PASSWORD = "stoker", "only-for-these-tests"
_START_S_MAX = 60.0
_PORTS_GIVEN: set[int] = set()
_JAVA_FLAGS = (
    "-Xms128m",
    "-Xmx512m",
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    "-Xshare:auto",
)
_POM = """<project xmlns="http://maven.apache.org/POM/4.0.0">
<modelVersion>4.0.0</modelVersion>
<groupId>test</groupId><artifactId>broker</artifactId><version>1</version>
<packaging>pom</packaging>
<dependencies><dependency>
<groupId>org.apache.kafka</groupId><artifactId>kafka_2.13</artifactId><version>{version}</version>
</dependency></dependencies></project>
"""
_PROPERTIES = """process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller}
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller},\\
  SECURE://127.0.0.1:{secure},BEHIND://127.0.0.1:{behind}
advertised.listeners=PLAINTEXT://127.0.0.1:{port},SECURE://127.0.0.1:{secure},\\
  BEHIND://127.0.0.1:{before}
controller.listener.names=CONTROLLER
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,\\
  SECURE:SASL_SSL,BEHIND:PLAINTEXT
listener.name.secure.sasl.enabled.mechanisms=PLAIN
listener.name.secure.plain.sasl.jaas.config=\\
  org.apache.kafka.common.security.plain.PlainLoginModule required user_stoker="{password}";
listener.name.secure.ssl.keystore.type=PKCS12
listener.name.secure.ssl.keystore.location={keystore}
listener.name.secure.ssl.keystore.password={password}
log.dirs={data}
offsets.topic.replication.factor=1
offsets.topic.num.partitions=4
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
transaction.state.log.num.partitions=4
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
group.initial.rebalance.delay.ms=0
broker.heartbeat.interval.ms=500
broker.session.timeout.ms=6000
group.min.session.timeout.ms=1000
auto.create.topics.enable=false
log.retention.check.interval.ms=1000
log.segment.delete.delay.ms=0
log.initial.task.delay.ms=500
num.network.threads=1
num.io.threads=2
num.recovery.threads.per.data.dir=1
"""


class BrokerUnavailable(RuntimeError):
    """No broker can be started here; the message says what is missing."""


class Broker:
    """A running broker. What was acknowledged survives `stop`, `kill` and `start`."""

    def __init__(self, name: str, bootstrap: str, *, is_apache: bool) -> None:
        self.name = name
        self.bootstrap = bootstrap
        self.is_apache = is_apache
        self.can_restart = False

    def start(self) -> None:
        """Start it and return when it answers."""
        raise BrokerUnavailable(f"{self.name} cannot be restarted by the tests")

    def stop(self) -> None:
        """Ask it to end, and return when it has."""

    def kill(self) -> None:
        """End it at once, as a crash would."""

    def pause(self) -> None:
        """Let it hang: connections stay open, nothing is answered."""

    def resume(self) -> None:
        """Let it go on."""


class _Process(Broker, abc.ABC):
    """A broker that runs as a child of the tests."""

    def __init__(self, name: str, folder: Path, port: int, *, is_apache: bool) -> None:
        super().__init__(name, f"127.0.0.1:{port}", is_apache=is_apache)
        self.can_restart = True
        self.folder = folder
        self.port = port
        self.process: subprocess.Popen[bytes] | None = None

    @abc.abstractmethod
    def command(self) -> list[str]:
        """What to run."""

    def start(self) -> None:
        log_path = self.folder / "broker.log"
        with log_path.open("ab") as log:
            self.process = subprocess.Popen(
                self.command(), stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=self.folder
            )
        end_s = time.monotonic() + _START_S_MAX
        try:
            while not self._answers():
                if self.process.poll() is not None or time.monotonic() > end_s:
                    tail = log_path.read_text(errors="replace")[-2000:]
                    raise BrokerUnavailable(f"{self.name} did not start: {tail}")
                time.sleep(0.05)  # a foreign process: nothing tells us, so we look
        except BaseException:
            self.kill()
            raise

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def pause(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def _end(self, how: signal.Signals) -> None:
        process, self.process = self.process, None
        if process is None:
            return
        process.send_signal(how)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _answers(self) -> bool:
        from kafka import KafkaAdminClient
        from kafka.errors import KafkaError

        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 0.2):
            try:
                client = KafkaAdminClient(
                    bootstrap_servers=self.bootstrap, bootstrap_timeout_ms=2000
                )
            except KafkaError:
                return False
            try:
                client.list_topics()
                return True
            except KafkaError:
                return False
            finally:
                client.close()
        return False


class ApacheKafka(_Process):
    """Apache Kafka, KRaft mode, broker and controller in one process."""

    def __init__(self, folder: Path, jars: Path) -> None:
        super().__init__(f"Apache Kafka {KAFKA_VERSION}", folder, free_port(), is_apache=True)
        self.jars = jars
        self.secure_bootstrap = f"127.0.0.1:{free_port()}"
        # A listener that sends its clients to another port: to whoever listens there in between.
        self.behind_port, self.before_port = free_port(), free_port()
        certificate = certificate_folder(jars.parent)
        self.ca_file = certificate / "ca.pem"
        self.properties = folder / "server.properties"
        self.properties.write_text(
            _PROPERTIES.format(
                port=self.port,
                controller=free_port(),
                secure=self.secure_bootstrap.rpartition(":")[2],
                behind=self.behind_port,
                before=self.before_port,
                data=folder / "kafka-data",
                keystore=certificate / "keystore.p12",
                password=SECURE_PASSWORD,
            )
        )
        format_storage = [*self._java(), "kafka.tools.StorageTool", "format"]
        done = subprocess.run(
            [*format_storage, "-t", "c3Rva2VyLXRlc3RzLTAwMQ", "-c", str(self.properties)],
            capture_output=True,
            text=True,
            timeout=_START_S_MAX,
            check=False,
        )
        if done.returncode:
            raise BrokerUnavailable(f"formatting failed: {done.stdout}{done.stderr}")

    def command(self) -> list[str]:
        return [*self._java(), "kafka.Kafka", str(self.properties)]

    def _java(self) -> list[str]:
        return ["java", *_JAVA_FLAGS, "-cp", f"{self.jars}/*"]


class NoidaDb(_Process):
    """The small broker from PyPI. It cannot serve tests marked `apache_kafka`."""

    def __init__(self, folder: Path) -> None:
        import noida_db

        version = importlib.metadata.version("noida-db")
        super().__init__(f"noida-db {version}", folder, free_port(), is_apache=False)
        self.binary = Path(noida_db.__file__).parent / "noida-db"
        if not os.access(self.binary, os.X_OK):
            raise BrokerUnavailable(f"{self.binary} cannot be run")

    def command(self) -> list[str]:
        flags = ["start", "--only", "kafka", "--host", "127.0.0.1"]
        data = str(self.folder / "noida-data")
        return [str(self.binary), *flags, "--kafka-port", str(self.port), "--data-dir", data]


def start_broker(folder: Path, *, in_ci: bool) -> Broker:
    """Start, or find, the broker for this session.

    Raises:
        BrokerUnavailable: none can be started, or, in CI, Apache Kafka cannot though Java is there.
    """
    given = os.environ.get("STOKER_TEST_KAFKA")
    if given:
        return Broker(f"the cluster at {given}", given, is_apache=True)
    reason = "java or mvn is missing"
    if shutil.which("java") and shutil.which("mvn"):
        try:
            broker: _Process = ApacheKafka(folder, fetch_jars())
            broker.start()
            return broker
        except (BrokerUnavailable, OSError, subprocess.SubprocessError) as error:
            if in_ci:
                raise BrokerUnavailable(f"CI needs Apache Kafka: {error}") from error
            reason = str(error)
    try:
        broker = NoidaDb(folder)
        broker.start()
    except (ImportError, BrokerUnavailable) as error:
        raise BrokerUnavailable(f"no broker: {reason}; noida-db: {error}") from error
    return broker


def fetch_jars() -> Path:
    """Return the folder of Kafka's jars, fetching them from Maven Central where it is not there."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stoker"
    jars = cache / f"kafka-{KAFKA_VERSION}"
    if jars.is_dir():
        return jars
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "kafka.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if jars.is_dir():
            return jars
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            pom = Path(folder) / "pom.xml"
            pom.write_text(_POM.format(version=KAFKA_VERSION))
            fetched = Path(folder) / "jars"
            command = ["mvn", "-q", "-B", "-f", str(pom), "dependency:copy-dependencies"]
            done = subprocess.run(
                [*command, "-DincludeScope=runtime", f"-DoutputDirectory={fetched}"],
                capture_output=True,
                text=True,
                timeout=600,
                check=False,
            )
            if done.returncode:
                raise BrokerUnavailable(f"mvn could not fetch Kafka: {done.stdout[-1000:]}")
            fetched.rename(jars)
    return jars


def certificate_folder(cache: Path) -> Path:
    """Return a loopback certificate that signs itself, made once by the tool that Java brings."""
    made = cache / "broker-certificate"
    with (cache / "kafka.lock").open("w") as lock, tempfile.TemporaryDirectory(dir=cache) as name:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if made.is_dir():
            return made
        folder = Path(name) / "made"
        folder.mkdir()
        store = ["-keystore", str(folder / "keystore.p12"), "-storetype", "PKCS12"]
        store += ["-alias", "broker", "-storepass", SECURE_PASSWORD]
        make = ["-genkeypair", "-keyalg", "EC", "-groupname", "secp256r1", "-validity", "3650"]
        make += ["-dname", "CN=localhost", "-ext", "san=ip:127.0.0.1,dns:localhost"]
        export = ["-exportcert", "-rfc", "-file", str(folder / "ca.pem")]
        for action in (make, export):
            done = subprocess.run(
                ["keytool", *action, *store],
                capture_output=True,
                text=True,
                timeout=_START_S_MAX,
                check=False,
            )
            if done.returncode:
                raise BrokerUnavailable(f"keytool failed: {done.stdout}{done.stderr}")
        folder.rename(made)
    return made


def free_port() -> int:
    """Return a loopback port that nobody listens on now, another one at each call.

    Not one that the system gives to outgoing connections: a client that tries again and again to
    reach a stopped broker there would one day connect to itself, and hold the port.
    """
    while True:
        port = random.SystemRandom().randrange(15_000, 30_000)
        if port in _PORTS_GIVEN:
            continue
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            _PORTS_GIVEN.add(port)
            return port
