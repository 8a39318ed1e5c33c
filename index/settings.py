"""Settings of the index room."""

from __future__ import annotations

import dataclasses

from stoker.errors import ConfigError

IO_BACKENDS = ("automatic", "io_uring", "threads")


@dataclasses.dataclass(frozen=True)
class IndexSettings:
    """How segments are built, opened and searched."""

    memory_bytes: int = dataclasses.field(
        default=0,
        metadata={
            "help": "budget of the page pool in bytes; 0 means room for every page of the index, "
            "which is what a machine with memory to spare wants. Ids are held beside it: 4 or 8 "
            "bytes a row, or 8 and the text, and 12 more once ids were looked up"
        },
    )
    recall_target: float = dataclasses.field(
        default=0.95,
        metadata={
            "help": "recall@k aimed at when a search states neither ef nor a target; 0.95 is what "
            "RAG evaluations commonly hold a retriever to"
        },
    )
    rerank_reads_max: int = dataclasses.field(
        default=20,
        metadata={
            "help": "pages that one query may read to settle its answer; 20 keeps the worst query "
            "under two device round trips. At least two for each hit asked for, and twice as many "
            "after walks on 2-bit codes"
        },
    )
    beam: int = dataclasses.field(
        default=4,
        metadata={
            "help": "nodes expanded ahead while missing pages are gathered into one read batch; "
            "more saves round trips on a cold index and wastes reads on a warm one. Where the "
            "budget leaves pages free, wide walks go on as far as 16, whatever it says"
        },
    )
    navigation_bits: int = dataclasses.field(
        default=0,
        metadata={
            "help": "bits a dimension of the codes that walks compare: 4, 2, or 0 to let the "
            "memory budget decide. Walks on 4 bits settle more answers without reading; 2 bits "
            "halve the codes, so that a budget of a tenth of the index still holds all of them. "
            "Vectors no longer than a code (9 dimensions of float32) are compared themselves, "
            "whatever this says"
        },
    )
    search_threads: int = dataclasses.field(
        default=0,
        metadata={
            "help": "threads that share one batch of queries; 0 means one per processor that the "
            "process may use, and four where the memory budget makes most queries read. A single "
            "query always takes one"
        },
    )
    io_backend: str = dataclasses.field(
        default="automatic",
        metadata={
            "help": "automatic, io_uring or threads; automatic takes io_uring where the kernel "
            "allows it, since a batch is then one system call"
        },
    )
    io_direct: bool = dataclasses.field(
        default=True,
        metadata={
            "help": "read past the operating system's cache, which would be a second, blind tier "
            "holding the same pages; off where the file system cannot"
        },
    )
    prefetch_inflight_bytes_max: int = dataclasses.field(
        default=2 << 20,
        metadata={
            "help": "bytes of prefetch in flight; 2 MiB fills the devices measured and bounds how "
            "long a demand read can queue behind it"
        },
    )
    volume_iops: int = dataclasses.field(
        default=0,
        metadata={
            "help": "reads a second that the volume under the index gives, as its contract says; 0 "
            "means that no bound is known. Where one is stated, reads come evenly under it, demand "
            "before loads, instead of running into the volume's own throttle, which holds back "
            "whole tenths of a second at a time"
        },
    )
    volume_bytes_s: int = dataclasses.field(
        default=0,
        metadata={
            "help": "bytes a second that the volume under the index gives; 0 means that no bound "
            "is known. All segments on one volume share it"
        },
    )
    merge_rows: int = dataclasses.field(
        default=16_384,
        metadata={
            "help": "changed rows in memory that start a merge in the background; below it a scan "
            "costs about a millisecond, above it a search would feel them. 0 leaves merging to the "
            "caller"
        },
    )
    delta_rows_max: int = dataclasses.field(
        default=262_144,
        metadata={
            "help": "changed rows held in memory; at the bound upserts are refused (retriable) "
            "until a merge has caught up. 256k rows of 384 floats are 400 MB"
        },
    )
    segments_max: int = dataclasses.field(
        default=6,
        metadata={
            "help": "sealed segments of one collection; a merge takes the smallest with it beyond "
            "that, since a search visits each one"
        },
    )
    dead_ratio_max: float = dataclasses.field(
        default=0.3,
        metadata={
            "help": "share of a segment's rows that may be outdated before a merge rewrites it; a "
            "walk passes through them for nothing"
        },
    )
    merge_threads: int = dataclasses.field(
        default=1,
        metadata={
            "help": "threads that link a merge's new segment, at the lowest priority; one leaves "
            "the other processors to searches"
        },
    )
    sealed_vectors_kept: bool = dataclasses.field(
        default=True,
        metadata={
            "help": "keep the vectors of sealed documents in documents.db too, at the price of "
            "their size on disk: `stoker repair` then needs no segment file to be whole"
        },
    )

    def __post_init__(self) -> None:
        if self.memory_bytes < 0:
            raise ConfigError(f"index.memory_bytes: expected 0 or more, found {self.memory_bytes}")
        if not 0 < self.recall_target < 1:
            raise ConfigError(
                f"index.recall_target: expected between 0 and 1, found {self.recall_target}"
            )
        if self.rerank_reads_max < 0:
            raise ConfigError(
                f"index.rerank_reads_max: expected 0 or more, found {self.rerank_reads_max}"
            )
        if not 1 <= self.beam <= 64:
            raise ConfigError(f"index.beam: expected 1 to 64, found {self.beam}")
        if self.navigation_bits not in (0, 2, 4):
            raise ConfigError(
                f"index.navigation_bits: expected 0, 2 or 4, found {self.navigation_bits}"
            )
        if self.search_threads < 0:
            raise ConfigError(
                f"index.search_threads: expected 0 or more, found {self.search_threads}"
            )
        if self.io_backend not in IO_BACKENDS:
            raise ConfigError(
                f"index.io_backend: expected one of {', '.join(IO_BACKENDS)}, "
                f"found {self.io_backend!r}"
            )
        if self.prefetch_inflight_bytes_max < 64 << 10:
            raise ConfigError(
                "index.prefetch_inflight_bytes_max: expected at least 65536, "
                f"found {self.prefetch_inflight_bytes_max}"
            )
        for name in ("volume_iops", "volume_bytes_s"):
            if getattr(self, name) < 0:
                raise ConfigError(f"index.{name}: expected 0 or more, found {getattr(self, name)}")
        if self.merge_rows < 0:
            raise ConfigError(f"index.merge_rows: expected 0 or more, found {self.merge_rows}")
        if self.delta_rows_max < max(1, self.merge_rows):
            raise ConfigError(
                f"index.delta_rows_max: expected at least index.merge_rows ({self.merge_rows}), "
                f"found {self.delta_rows_max}"
            )
        if self.segments_max < 1:
            raise ConfigError(f"index.segments_max: expected 1 or more, found {self.segments_max}")
        if not 0 < self.dead_ratio_max <= 1:
            raise ConfigError(
                f"index.dead_ratio_max: expected above 0 up to 1, found {self.dead_ratio_max}"
            )
        if self.merge_threads < 1:
            raise ConfigError(
                f"index.merge_threads: expected 1 or more, found {self.merge_threads}"
            )
