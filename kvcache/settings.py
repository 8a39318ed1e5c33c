"""Settings of the KV room: every default with its reason and unit."""

from __future__ import annotations

import dataclasses

from stoker.errors import ConfigError

_MIB = 1024 * 1024


@dataclasses.dataclass(frozen=True)
class KvcacheSettings:
    """Everything that can be set about lookup reuse, stored KV and the GPU slab.

    Raises:
        ConfigError: a value is out of range, or two cannot go together; the message names the key.
    """

    reuse_enabled: bool = dataclasses.field(
        default=True,
        metadata={
            "help": "Whether earlier lookups may be reused at all; on, because nothing but an "
            "exact repeat is reused before the error bound is proved"
        },
    )
    reuse_delta: float = dataclasses.field(
        default=0.01,
        metadata={
            "help": "Largest share of reused lookups whose passages may differ from a fresh "
            "search; one in a hundred is below what embedding noise causes; ratio"
        },
    )
    reuse_alpha: float = dataclasses.field(
        default=0.05,
        metadata={
            "help": "Chance that the error bound is ever broken; the usual 95 % confidence; ratio"
        },
    )
    reuse_overlap_min: float = dataclasses.field(
        default=0.8,
        metadata={
            "help": "Share of a fresh result's ids that an earlier result must hold to count as "
            "the same; 8 of 10 leaves a prompt's best passages in place; ratio"
        },
    )
    reuse_similarity_min: float = dataclasses.field(
        default=0.50,
        metadata={
            "help": "Cosine under which an earlier question is never a candidate; below it small "
            "sentence models hold next to no paraphrases; cosine in [-1, 1]"
        },
    )
    reuse_verify_ratio: float = dataclasses.field(
        default=0.1,
        metadata={
            "help": "Least share of reused lookups that a real search checks in the background, "
            "once the proof could bear several errors; one in ten keeps nine tenths of the saving; "
            "ratio"
        },
    )
    reuse_entries_max: int = dataclasses.field(
        default=20_000,
        metadata={
            "help": "Earlier questions kept per tenant; at 384 dimensions about 4 KB each, so "
            "80 MB at most; count"
        },
    )
    reuse_exact_entries_max: int = dataclasses.field(
        default=1_000,
        metadata={
            "help": "Entries up to which all are compared exactly; beyond it a small HNSW index "
            "is quicker; count"
        },
    )
    reuse_tenants_max: int = dataclasses.field(
        default=256,
        metadata={
            "help": "Tenants with earlier questions in memory; the longest idle one is dropped "
            "beyond it; what is learnt of each takes 64 KiB, and up to 4 MB once it has asked "
            "much, beside its questions; count"
        },
    )
    reuse_candidates_max: int = dataclasses.field(
        default=4,
        metadata={
            "help": "Nearest earlier questions that the guards look at; more cost time and rarely "
            "pass where the nearest four did not; count"
        },
    )
    reuse_text_bytes_max: int = dataclasses.field(
        default=4_096,
        metadata={
            "help": "Longer questions are never reused: they are documents, and the guards read "
            "every word; bytes of UTF-8"
        },
    )
    reuse_window_s: float = dataclasses.field(
        default=5.0,
        metadata={"help": "Width of the sliding window in a lookup's group key; seconds"},
    )
    kv_bytes_max: int = dataclasses.field(
        default=256 * _MIB,
        metadata={
            "help": "Host memory for KV of passages; 5,600 tokens of a 135M model in float32; bytes"
        },
    )
    kv_disk_bytes_max: int = dataclasses.field(
        default=4096 * _MIB,
        metadata={"help": "Files of passage KV kept on disk, oldest use first out; bytes"},
    )
    kv_storage: str = dataclasses.field(
        default="float32",
        metadata={
            "help": "How KV files keep numbers: float32 (exact), float16, int8 or int4; exact, "
            "because greedy answers must not change unless someone asks for less"
        },
    )
    kv_block_tokens: int = dataclasses.field(
        default=16,
        metadata={
            "help": "Tokens per prefix block; the size that vLLM uses, so events match; 16 to 2048"
        },
    )
    kv_pressure_ratio: float = dataclasses.field(
        default=0.9,
        metadata={
            "help": "Share of a tier in use above which blocks move a tier down; leaves room for "
            "one burst; ratio"
        },
    )
    kv_recompute_ratio: float = dataclasses.field(
        default=0.15,
        metadata={
            "help": "Most tokens of a moved chunk that are computed again; the share at which "
            "published quality loss levels off; ratio"
        },
    )
    kv_gate_kl_max: float = dataclasses.field(
        default=0.25,
        metadata={"help": "Mean logit divergence above which chunk reuse is off for a model; nats"},
    )
    kv_gate_agreement_min: float = dataclasses.field(
        default=0.85,
        metadata={
            "help": "Least share of equal most-likely next tokens for chunk reuse to stay on; ratio"
        },
    )
    kv_gate_loss_gain_max: float = dataclasses.field(
        default=0.02,
        metadata={
            "help": "Growth of the next-token loss above which chunk reuse is off for a model; "
            "the loss of quality that is borne; ratio"
        },
    )
    kv_gate_every_s: float = dataclasses.field(
        default=86_400.0,
        metadata={
            "help": "Time after which a model's chunk reuse is measured again, on or off; a "
            "verdict lapses after twice that; a day sees each change of model or prompts; seconds"
        },
    )
    kv_gate_uses_max: int = dataclasses.field(
        default=10_000,
        metadata={
            "help": "Uses of chunks after which a model is measured again though it is not time; "
            "a few minutes of computing for ten thousand prompts; count"
        },
    )
    kv_gate_retry_s: float = dataclasses.field(
        default=600.0,
        metadata={
            "help": "Time before a measurement that came to no end is tried again; long enough "
            "for whoever is told to look; seconds"
        },
    )
    passages_dir: str = dataclasses.field(
        default="",
        metadata={
            "help": "Folder of passages' KV that warm-ups load beside the pages; empty by default, "
            "since only who runs a model has one"
        },
    )
    passages_model_id: str = dataclasses.field(
        default="",
        metadata={"help": "The model whose KV is in passages_dir; letters and digits, as it says"},
    )
    documents_bytes_max: int = dataclasses.field(
        default=0,
        metadata={
            "help": "Memory for documents that answers carry, all tenants; 0 reads each from "
            "storage, which the operating system caches well on an idle machine; bytes"
        },
    )
    documents_tenant_ratio: float = dataclasses.field(
        default=0.25,
        metadata={"help": "Share of documents_bytes_max that one tenant may hold; four fill it"},
    )
    hot_accesses_min: int = dataclasses.field(
        default=500,
        metadata={"help": "Reads of a document within hot_window_s above which it may be hot"},
    )
    hot_window_s: float = dataclasses.field(
        default=10.0, metadata={"help": "Window in which reads are counted; seconds"}
    )
    hot_p99_us: float = dataclasses.field(
        default=100.0,
        metadata={
            "help": "Time of reads at the 99th percentile above which a hot document is read "
            "without a lock; under it there is nothing to gain; microseconds"
        },
    )
    hot_keys_max: int = dataclasses.field(
        default=256, metadata={"help": "Documents that may be hot at once; they are in no quota"}
    )
    prompt_order_enabled: bool = dataclasses.field(
        default=False,
        metadata={
            "help": "Whether answers also name their results in the order that shares the longest "
            "prompt prefix; off, because another order than the ranking is the caller's choice"
        },
    )
    engine_url: str = dataclasses.field(
        default="",
        metadata={
            "help": "LMCache server of the inference engine to warm, http://host:port; empty "
            "warms none"
        },
    )
    engine_model: str = dataclasses.field(
        default="", metadata={"help": "The engine's name of its model, as its requests say it"}
    )
    engine_world_size: int = dataclasses.field(
        default=1, metadata={"help": "Ranks that the engine spreads the model over; one GPU is 1"}
    )
    engine_salt: str = dataclasses.field(
        default="",
        metadata={"help": "Cache salt of the engine's requests; empty where they send none"},
    )
    engine_tokenizer: str = dataclasses.field(
        default="",
        metadata={"help": "Folder with the engine's tokenizer.json; needed with engine_url"},
    )
    engine_before: str = dataclasses.field(
        default="",
        metadata={"help": "What prompts say before their first passage; empty for nothing"},
    )
    engine_every_s: float = dataclasses.field(
        default=5.0,
        metadata={"help": "Time between two rounds of engine warming; heat moves slower; seconds"},
    )
    engine_lease_s: float = dataclasses.field(
        default=60.0,
        metadata={"help": "How long a passage counts as asked for; renewed while hot; seconds"},
    )
    engine_leases_max: int = dataclasses.field(
        default=256,
        metadata={"help": "Passages kept warm in the engine; its memory is mostly for requests"},
    )
    engine_tokens_per_s_max: float = dataclasses.field(
        default=20_000.0,
        metadata={
            "help": "Rate of prefetch calls, tokens per second; leaves a disk of 1 GB/s half free "
            "at 25 KB a token"
        },
    )
    engine_events: str = dataclasses.field(
        default="",
        metadata={
            "help": "ZeroMQ endpoint of the engine's KV events, tcp://host:port; empty follows none"
        },
    )
    engine_replay: str = dataclasses.field(
        default="",
        metadata={"help": "ZeroMQ endpoint that sends lost KV events again; empty where none is"},
    )
    engine_shared: bool = dataclasses.field(
        default=False,
        metadata={
            "help": "Whether other replicas warm the same engine: leases are then shared over the "
            "event log; off, because most replicas have an engine of their own"
        },
    )
    engine_blocks_dir: str = dataclasses.field(
        default="",
        metadata={
            "help": "Folder of prefix blocks that the engine's connector writes; this server keeps "
            "it within kv_disk_bytes_max by heat. Empty keeps none: the connector's own budget "
            "goes by last use alone"
        },
    )
    engine_blocks_model_id: str = dataclasses.field(
        default="",
        metadata={"help": "model_id of the connector's settings; needed with engine_blocks_dir"},
    )
    engine_blocks_tenant: str = dataclasses.field(
        default="", metadata={"help": "tenant of the connector's settings; empty as there"}
    )
    predict_every_s: float = dataclasses.field(
        default=30.0,
        metadata={
            "help": "Time between two looks at the heat for which stored KV will be needed; heat "
            "moves slower; seconds"
        },
    )
    predict_passages_max: int = dataclasses.field(
        default=1_024,
        metadata={
            "help": "Hottest passages whose prefix blocks are predicted; each is read and "
            "tokenised once; count"
        },
    )
    group_keys_enabled: bool = dataclasses.field(
        default=False,
        metadata={
            "help": "Whether answers and events of searches by text carry a group key "
            "(win|grp|sig); off, because it costs a search about 1 ms and needs stoker[models]"
        },
    )
    slab_pages_max: int = dataclasses.field(
        default=4_096,
        metadata={
            "help": "Pages in the GPU slab; at 64 KiB pages 256 MiB, which fits beside a model on "
            "the smallest cards; count"
        },
    )
    device: str = dataclasses.field(
        default="auto",
        metadata={"help": "Where the slab lives: auto (CUDA if there is one), cpu, or cuda:N"},
    )

    def __post_init__(self) -> None:
        for keys, wanted, within in (
            (_RATIOS, "a ratio in (0, 1]", lambda value: 0.0 < value <= 1.0),
            (_COUNTS, "at least 1", lambda value: value >= 1),
            (_MORE_THAN_0, "more than 0", lambda value: value > 0.0),
            (("hot_p99_us", "documents_bytes_max"), "at least 0", lambda value: value >= 0),
            (("kv_recompute_ratio",), "0 to 1", lambda value: 0.0 <= value <= 1.0),
            (("reuse_similarity_min",), "a cosine in [-1, 1]", lambda value: -1 <= value <= 1),
            (("kv_block_tokens",), "16 to 2048", lambda value: 16 <= value <= 2048),
            (("kv_storage",), "float32, float16, int8 or int4", STORAGES.__contains__),
            (("device",), "auto, cpu or cuda:N", _is_device),
        ):
            for key in keys:
                found = getattr(self, key)
                if not within(found):
                    raise ConfigError(f"{key}: expected {wanted}, found {found!r}")
        if self.passages_dir and not self.passages_model_id.isalnum():
            raise ConfigError(
                "passages_model_id: expected letters and digits beside passages_dir, found "
                f"{self.passages_model_id!r}"
            )
        if self.engine_url and not (self.engine_model and self.engine_tokenizer):
            raise ConfigError("engine_url: expected engine_model and engine_tokenizer beside it")
        if self.engine_blocks_dir and not (self.engine_blocks_model_id and self.engine_tokenizer):
            raise ConfigError(
                "engine_blocks_dir: expected engine_blocks_model_id and engine_tokenizer beside it"
            )


_RATIOS = (
    "reuse_delta", "reuse_alpha", "reuse_overlap_min", "reuse_verify_ratio", "kv_pressure_ratio",
    "kv_gate_agreement_min", "documents_tenant_ratio",
)  # fmt: skip
_COUNTS = (
    "reuse_entries_max", "reuse_exact_entries_max", "reuse_tenants_max", "reuse_candidates_max",
    "reuse_text_bytes_max", "kv_bytes_max", "kv_disk_bytes_max", "slab_pages_max",
    "engine_world_size", "engine_leases_max", "hot_accesses_min", "hot_keys_max",
    "kv_gate_uses_max", "predict_passages_max",
)  # fmt: skip
_MORE_THAN_0 = (
    "reuse_window_s", "hot_window_s", "kv_gate_kl_max", "engine_every_s", "engine_lease_s",
    "engine_tokens_per_s_max", "kv_gate_loss_gain_max", "kv_gate_every_s", "kv_gate_retry_s",
    "predict_every_s",
)  # fmt: skip
STORAGES = ("float32", "float16", "int8", "int4")


def _is_device(name: str) -> bool:
    return name in ("auto", "cpu", "cuda") or name.startswith("cuda:")
