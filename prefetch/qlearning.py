"""Learn by temporal differences what it is worth to hold a key on GPU, host or NVMe.

The state of a key is (frequency, recency, vector width, locality), each in a few classes; the
actions are the tiers. For one stretch of ``d`` accesses in state s that ends in state s':

    Q(s, a) <- hit * saved(a) - price(a) * d * bytes(s)
               + 0.5 ^ (d / horizon) * max over a' of (Q(s', a') - move(a, a') * bytes(s'))

where a' is any tier after an access, and else a or a lower one: only an access brings a key up.

* ``saved``: latency saved against a read from NVMe, when the stretch ended with an access.
* ``price``: what holding a byte costs: the evictions that it causes. It clears the market: it rises
  while what is evicted was still worth its room, and falls while that was worth nothing.
* ``move``: the time of the link that a copy takes, by tier pair: moves and their bandwidth.

What is asked for does not depend on where keys lie, so one stretch teaches all three actions, and
nothing has to be placed badly in order to explore. Before a state has been seen its value is that
of frequency over age. Updates are batched: `update` takes all stretches since the last one.

Sources: Watkins, Dayan, "Q-learning", 1992; room priced by a multiplier: Whittle, "Restless
bandits", 1988; hits per room and time by age class: Beckmann, Chen, Cidon, "LHD", NSDI 2018. Ours
learns the value by temporal differences, for three tiers, with costs of moving.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from stoker.errors import ConfigError, CorruptError, UnavailableError

TIERS = ("gpu", "host", "nvme")
GPU, HOST, NVME = range(3)

FREQUENCIES = 8  # decayed accesses: 1, 2, 4, ... 128 and more
AGES = 12  # accesses since the last one: below a unit, then doubling
WIDTHS = 3  # bytes of a unit against the usual one: under 3/4, about as large, over 3/2
LOCALITIES = 3  # the key's neighbours were asked for just now, lately, or not
STATES = FREQUENCIES * AGES * WIDTHS * LOCALITIES

_FORMAT = "stoker placement 1"
_WIDTH_FACTORS = (0.5, 1.0, 2.0)  # bytes of a class, in usual units


class LearnerCorrupt(CorruptError):
    """Saved placement values are not what was written: start with an empty learner."""


@dataclass(frozen=True)
class TierCosts:
    """What the tiers cost. Times in microseconds of a unit of usual size (4 KiB).

    Attributes:
        gpu_us: A read inside the GPU's memory by a kernel that runs anyway.
        host_us: A read from host memory over PCIe: the latency of one small copy.
        nvme_us: A 4 KiB random read from a data-centre NVMe device, idle, without cache.
        to_gpu_us: Time that a copy to the GPU takes of the link (4 KiB at 25 GB/s, PCIe 4 x16).
        to_host_us: Time that a read takes of the device (4 KiB at 3 GB/s); also for a copy down
            from the GPU, which the link carries as fast as one up, ``to_gpu_us``.

    The defaults are of the order that vendors' data sheets give, not measured: the project's test
    machine has no GPU, and its device (36 us) is served by the host's memory. What is learnt
    depends on their ratios, and every comparison states them.
    """

    gpu_us: float = 2.0
    host_us: float = 12.0
    nvme_us: float = 100.0
    to_gpu_us: float = 0.16
    to_host_us: float = 1.4

    def __post_init__(self) -> None:
        """Raise ConfigError where the tiers are not in order."""
        if not 0.0 <= self.gpu_us <= self.host_us < self.nvme_us:
            raise ConfigError(
                "expected 0 <= gpu_us <= host_us < nvme_us, found "
                f"{self.gpu_us}, {self.host_us}, {self.nvme_us}"
            )
        if not (self.to_gpu_us >= 0.0 and self.to_host_us >= 0.0):
            raise ConfigError("to_gpu_us and to_host_us must be >= 0")

    @property
    def read_us(self) -> tuple[float, float, float]:
        """Microseconds of a read by tier."""
        return self.gpu_us, self.host_us, self.nvme_us

    def move_us(self, before: int, after: int) -> float:
        """Return what moving a usual unit takes of the links; dropping a copy takes nothing."""
        if before == after or after == NVME:
            return 0.0
        up = self.to_gpu_us if GPU in (before, after) else 0.0
        return up + (self.to_host_us if before == NVME else 0.0)


class Stretch(NamedTuple):
    """One key from one state to its next: what the learner learns from."""

    state: int
    after: int
    accesses: float
    hit: bool


def state_number(frequency: int, age: int, width: int, locality: int) -> int:
    """Return the number of a state; older ones have higher numbers."""
    return ((age * FREQUENCIES + frequency) * WIDTHS + width) * LOCALITIES + locality


def state_parts(state: int) -> tuple[int, int, int, int]:
    """Return (frequency, age, width, locality) of a state's number."""
    state, locality = divmod(state, LOCALITIES)
    state, width = divmod(state, WIDTHS)
    age, frequency = divmod(state, FREQUENCIES)
    return frequency, age, width, locality


def load_torch() -> Any:
    """Return torch.

    Raises:
        UnavailableError: it is not installed.
    """
    try:
        return importlib.import_module("torch")
    except ImportError as error:
        raise UnavailableError(
            "Q-learning placement needs torch: pip install 'stoker[models]'"
        ) from error


class PlacementLearner:
    """The values of all states and the prices of room. One thread at a time.

    Invariants: values are finite; prices are positive, and that of the GPU is at least the host's.
    """

    def __init__(
        self,
        *,
        room: float,
        costs: TierCosts | None = None,
        horizon_ratio: float = 1.0,
        rate_min: float = 0.005,
        price_rate: float = 0.1,
    ) -> None:
        """Start with what frequency over age says.

        Args:
            room: Usual units that fit into GPU and host together; sets the first prices and what
                "soon" means.
            costs: What the tiers cost; None means the defaults.
            horizon_ratio: After so many times ``room`` accesses, a saving counts half.
            rate_min: Least step of a value towards a new observation; keeps up with drift.
            price_rate: Largest relative step of a price per update.

        Raises:
            UnavailableError: torch is not installed.
        """
        self._torch = torch = load_torch()
        self.costs = costs or TierCosts()
        self.room = max(1.0, float(room))
        self._horizon = horizon_ratio * self.room
        self._rate_min = rate_min
        self._price_rate = price_rate
        read = self.costs.read_us
        self._saved = torch.tensor([read[NVME] - us for us in read], dtype=torch.float64)
        self._move = torch.tensor(
            [[self.costs.move_us(a, b) for b in range(3)] for a in range(3)], dtype=torch.float64
        )
        self._upwards = torch.tensor([[b < a for b in range(3)] for a in range(3)])
        parts = [state_parts(state) for state in range(STATES)]
        self.size_of = [_WIDTH_FACTORS[width] for _, _, width, _ in parts]
        self._size = torch.tensor(self.size_of, dtype=torch.float64)
        likely = torch.tensor(
            [0.9 * (1 + f) / FREQUENCIES * 2.0 ** (-0.5 * age) for f, age, _, _ in parts],
            dtype=torch.float64,
        )
        self._values = likely[:, None] * self._saved[None, :]
        self._seen = torch.zeros(STATES, dtype=torch.float64)
        host = 0.25 * float(self._saved[HOST]) / self.room
        self._prices = torch.tensor([host * 1.1, host, 0.0], dtype=torch.float64)
        self.updates = 0
        self.stretches = 0
        self.index_gpu: list[float] = []
        self.index_host: list[float] = []
        self._index()

    def _index(self) -> None:
        """Bring the ranks up to date: what a byte of a tier earns over the tier below."""
        values = self._values
        self.index_gpu = ((values[:, GPU] - values[:, HOST]) / self._size).tolist()
        # A key that leaves the GPU may stay on the host; one that leaves the host goes.
        self.index_host = ((values[:, HOST] - values[:, NVME]) / self._size).tolist()

    @property
    def prices(self) -> tuple[float, float]:
        """Microseconds per usual unit and access of holding it: (GPU, host)."""
        gpu, host, _ = self._prices.tolist()
        return gpu, host

    def values(self, state: int) -> dict[str, float]:
        """Return the value of each tier for a state, in microseconds."""
        return dict(zip(TIERS, self._values[state].tolist(), strict=True))

    def update(
        self, stretches: Sequence[Stretch], *, pressure: tuple[float, float] = (0.0, 0.0)
    ) -> None:
        """Take one temporal-difference step for everything that happened since the last.

        Args:
            stretches: What happened; states below STATES.
            pressure: For GPU and host, the share of evictions of something still worth its room
                less the share of others, in [-1, 1]; 0 where nothing was evicted.
        """
        self.updates += 1
        if stretches:
            self._learn(stretches)
        for tier, push in zip((GPU, HOST), pressure, strict=True):
            self._prices[tier] *= math.exp(self._price_rate * max(-1.0, min(1.0, push)))
        ceiling = float(self._saved[HOST]) or 1.0
        self._prices[:NVME].clamp_(1e-9 * ceiling, ceiling)
        if self._prices[GPU] < self._prices[HOST]:
            self._prices[GPU] = self._prices[HOST]
        self._index()

    def _learn(self, stretches: Sequence[Stretch]) -> None:
        torch = self._torch
        self.stretches += len(stretches)
        table = torch.tensor(stretches, dtype=torch.float64)
        before, after = table[:, 0].long(), table[:, 1].long()
        length, hit = table[:, 2], table[:, 3]
        best = self._values[after][:, None, :] - (
            self._move[None, :, :] * self._size[after][:, None, None]
        )
        # Only an access brings a key up; until then it can stay or go down.
        best = best.masked_fill(self._upwards[None, :, :] & (hit == 0.0)[:, None, None], -math.inf)
        targets = (
            hit[:, None] * self._saved[None, :]
            - (length * self._size[before])[:, None] * self._prices[None, :]
            + torch.exp2(-length / self._horizon)[:, None] * best.max(dim=2).values
        )
        counts = torch.zeros(STATES, dtype=torch.float64).index_add_(
            0, before, torch.ones_like(length)
        )
        sums = torch.zeros_like(self._values).index_add_(0, before, targets)
        states = torch.nonzero(counts).flatten()
        seen, count = self._seen[states], counts[states]
        # The average of the first observations, later a moving one.
        step = torch.maximum(
            count / (seen + count + 1.0), 1.0 - torch.pow(1.0 - self._rate_min, count)
        )
        mean = sums[states] / count[:, None]
        self._values[states] += step[:, None] * (mean - self._values[states])
        self._seen[states] = seen + count

    def explain(self, state: int, tier: int) -> dict[str, Any]:
        """Say why a key in ``state`` lies in ``tier``: the state in words, values, prices."""
        frequency, age, width, locality = state_parts(state)
        return {
            "tier": TIERS[tier],
            "frequency": f"at least {2**frequency}" if frequency else "below 2",
            "age": "just now" if age == 0 else f"at least {2 ** (age - 1)} units",
            "width": ("narrow", "usual", "wide")[width],
            "locality": ("neighbours asked for now", "lately", "not")[locality],
            "value_us": self.values(state),
            "best": TIERS[int(self._values[state].argmax())],
            "price_us": dict(zip(TIERS[:2], self.prices, strict=True)),
            "move_us": {
                name: self.costs.move_us(tier, at) * self.size_of[state]
                for at, name in enumerate(TIERS)
            },
            "seen": int(self._seen[state]),
        }

    # -- saving ----------------------------------------------------------------------------

    def to_bytes(self) -> bytes:
        """Return all that was learnt, in the safetensors format with a checksum.

        Raises:
            UnavailableError: safetensors is not installed.
        """
        tensors = {
            "prices": self._prices.contiguous(),
            "seen": self._seen.contiguous(),
            "values": self._values.contiguous(),
        }
        record = {
            "format": _FORMAT,
            "room": self.room,
            "costs": dataclasses.asdict(self.costs),
            "updates": self.updates,
            "stretches": self.stretches,
        }
        record["digest"] = _digest(record, tensors)
        # One key only: the format writes several in no fixed order.
        saved: bytes = _safetensors().save(tensors, {"stoker": json.dumps(record, sort_keys=True)})
        return saved

    def restore(self, data: bytes) -> None:
        """Take over what `to_bytes` saved; the learner then goes on as if it had not stopped.

        Raises:
            LearnerCorrupt: the bytes are damaged, or of another format.
            ConfigError: they were learnt with other costs of the tiers.
            UnavailableError: safetensors is not installed.
        """
        library = _safetensors()
        try:
            (header_bytes,) = struct.unpack_from("<Q", data)
            header = json.loads(data[8 : 8 + header_bytes])
            record = json.loads(header["__metadata__"]["stoker"])
            tensors = library.load(data)
            claimed = record.pop("digest")
        except Exception as error:  # the library raises an error class of its own
            raise LearnerCorrupt(f"saved placement values cannot be read: {error}") from error
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        expected = {"prices": (3,), "seen": (STATES,), "values": (STATES, 3)}
        if record.get("format") != _FORMAT or shapes != expected:
            raise LearnerCorrupt(
                f"expected {_FORMAT!r} with {expected}, found {record.get('format')!r}, {shapes}"
            )
        found = _digest(record, tensors)
        if found != claimed:
            raise LearnerCorrupt(f"expected digest {claimed}, found {found}")
        if record["costs"] != dataclasses.asdict(self.costs):
            raise ConfigError(f"placement was learnt with the costs {record['costs']}")
        # A byte of a larger cache turns over more slowly, and is worth less per access.
        scale = float(record["room"]) / self.room
        self._values = tensors["values"].clone()
        self._seen = tensors["seen"].clone()
        self._prices = tensors["prices"].clone() * scale
        self.updates, self.stretches = int(record["updates"]), int(record["stretches"])
        self._index()

    def check(self) -> None:
        """Raise AssertionError on the first broken invariant."""
        assert bool(self._torch.isfinite(self._values).all())
        gpu, host = self.prices
        assert gpu >= host > 0.0


def _digest(record: dict[str, Any], tensors: dict[str, Any]) -> str:
    digest = hashlib.blake2b(json.dumps(record, sort_keys=True).encode(), digest_size=16)
    for name in sorted(tensors):
        digest.update(name.encode() + tensors[name].numpy().tobytes())
    return digest.hexdigest()


def _safetensors() -> Any:
    try:
        return importlib.import_module("safetensors.torch")
    except ImportError as error:
        raise UnavailableError(
            "saving placement values needs safetensors: pip install 'stoker[models]'"
        ) from error
