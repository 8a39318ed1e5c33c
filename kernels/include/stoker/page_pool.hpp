// The page pool: a fixed budget of frames that hold pages of several files ("stores").
//
// Invariants
//   * resident pages * page_bytes <= budget_bytes, at every moment.
//   * A page's bytes are checked against its CRC-32C before any reader can see them.
//   * No lock is held over I/O. Concurrent misses on one page cause one read.
//   * A frame is reused only when no reader that could have seen its old page is still inside a
//     ReadGuard, and nobody pins it.
//   * Demand outranks prefetch: load() keeps a bounded number of bytes in flight; while a fetch()
//     waits, no more than the device reads in a third of a millisecond, which of a slow device is
//     nothing (but for a trickle, so that it ends some day).
//   * A deadline that passes leaves no read behind that could write to reused memory: the pool
//     finishes it in the background, and keeps what it brought.
//
// Readers on the hot path call peek() inside a ReadGuard: one atomic load, no reference count.
// Whatever needs I/O goes through fetch(), outside of any guard.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "stoker/page_io.hpp"
#include "stoker/read_limit.hpp"

namespace stoker {

using StoreId = std::uint32_t;
using PageNumber = std::uint32_t;

// No frame: they are numbered from 1, so that a table of zeros says that nothing is resident.
constexpr std::uint32_t kAbsent = 0;

enum class PageStatus : std::uint8_t {
  ok,
  corrupt,      // the checksum failed twice; the page is quarantined
  io_error,     // the device failed the read twice
  deadline,     // the deadline passed before the read ended
};

struct PoolOptions {
  std::size_t page_bytes = 4096;      // a multiple of 512
  std::size_t budget_bytes = 0;       // rounded down to whole frames; at least 16 frames
  IoBackend backend = IoBackend::automatic;
  bool direct = true;                 // O_DIRECT where the file system has it
  unsigned io_threads = 16;           // size of the pool of the `threads` backend
  std::size_t prefetch_inflight_bytes_max = 2u << 20;  // bound on load()'s reads in flight
  // Under demand without a pause, load() still issues one small read after this long: navigation
  // data that never arrives would keep the demand going.
  unsigned prefetch_pause_ms_max = 20;
  VolumeLimits volume;                // of the volumes that the files lie on, where they are known
};

// One file region made of whole pages. Page p lies at offset_bytes + p * page_bytes.
struct StoreSpec {
  std::string path;
  std::uint64_t offset_bytes = 0;            // a multiple of 4096
  std::uint32_t page_count = 0;
  // CRC-32C of each page, page_count of them, little-endian. Or none, and they are read from the
  // file, at table_offset_bytes, when first needed; table_crc is the CRC-32C of that table.
  std::vector<std::uint32_t> checksums;
  std::uint64_t table_offset_bytes = 0;
  std::uint32_t table_crc = 0;
  // While many frames lie idle, a miss brings its whole aligned cluster of so many pages, or, to one
  // whose deadline is near, one of 32 KiB at most.
  std::uint32_t cluster_pages = 1;
};

struct PageRef {
  StoreId store;
  PageNumber page;
};

class PagePool;

// Pages that fetch() brought, held until this object goes, which must be before the pool. Either
// frames of the pool (pinned) or, when no frame could be had, buffers of its own; the caller cannot
// tell and need not.
class PinnedPages {
 public:
  PinnedPages();
  PinnedPages(PinnedPages&&) noexcept;
  PinnedPages& operator=(PinnedPages&&) noexcept;
  PinnedPages(const PinnedPages&) = delete;
  PinnedPages& operator=(const PinnedPages&) = delete;
  ~PinnedPages();

  std::size_t size() const noexcept;
  std::size_t page_bytes() const noexcept;
  // nullptr unless status(i) == PageStatus::ok.
  const std::byte* data(std::size_t i) const noexcept;
  PageStatus status(std::size_t i) const noexcept;
  std::uint64_t reads() const noexcept;        // device reads that this fetch itself issued
  std::uint64_t bytes_read() const noexcept;
  // Whether this fetch itself issued the read of the page; of those that ask for one, the first.
  bool is_read(std::size_t i) const noexcept;
  // Whether missed pages' clusters were read with them: frames lie idle, so what is read too much
  // takes nobody's place, and no deadline is near.
  bool read_around() const noexcept;
  void release() noexcept;

 private:
  friend class PagePool;
  friend class PendingPages;
  struct State;
  std::unique_ptr<State> state_;
};

// A fetch that is under way; made by begin_fetch(), for one thread. Other threads that want a page
// which it reads wait until this takes that in: whoever holds one calls poll() every now and then,
// a search once a query, and land() before it waits for anything else, since two that wait for each
// other's pages would do so for ever. One that goes unfinished leaves its reads to the pool.
class PendingPages {
 public:
  PendingPages() noexcept;
  PendingPages(PendingPages&&) noexcept;
  PendingPages& operator=(PendingPages&&) noexcept;
  PendingPages(const PendingPages&) = delete;
  PendingPages& operator=(const PendingPages&) = delete;
  ~PendingPages();

  bool pending() const noexcept { return state_ != nullptr; }
  // Hands its reads to the device; what waits for them does, too.
  void issue();
  // Takes in what has arrived, without waiting. True when nothing is missing any more.
  bool poll();
  // Waits for the reads that this fetch itself issued.
  void land(const Deadline& deadline);
  // Waits for all pages, also those that other threads read. Nothing is pending afterwards.
  PinnedPages finish(const Deadline& deadline);

 private:
  friend class PagePool;
  struct State;
  std::unique_ptr<State> state_;
};

struct LoadOptions {
  bool sticky = false;            // never evicted until unstick()
  std::uint8_t weight = 3;        // clock passes that the page survives untouched, 0 ... 7;
                                  // with 0 it has to prove itself, as demand pages have
  Deadline deadline;
  const std::atomic<bool>* cancel = nullptr;
  std::size_t run_bytes_max = 1u << 20;      // adjacent pages are read together up to this size
  bool evict = false;             // whether pages that are resident may be evicted for this load
};

struct LoadReport {
  std::uint64_t pages_loaded = 0;
  std::uint64_t pages_already = 0;
  std::uint64_t pages_no_room = 0;
  std::uint64_t pages_failed = 0;
  std::uint64_t pages_not_reached = 0;       // deadline or cancel came first
  std::uint64_t reads = 0;
  std::uint64_t bytes_read = 0;
};

struct StoreStats {
  std::uint64_t pages = 0;
  std::uint64_t resident = 0;
  std::uint64_t sticky = 0;
  std::uint64_t quarantined = 0;
  std::uint64_t demand_pages = 0;            // brought by fetch()
  std::uint64_t prefetched_pages = 0;        // brought by load()
  std::uint64_t prefetched_useful = 0;       // of those, touched before they were evicted
  std::uint64_t prefetched_unused = 0;       // of those, evicted untouched
  std::uint64_t evictions = 0;
};

struct PoolStats {
  std::size_t page_bytes = 0;
  std::size_t budget_bytes = 0;
  std::size_t resident_bytes = 0;
  std::uint64_t demand_reads = 0;
  std::uint64_t demand_bytes = 0;
  std::uint64_t demand_wait_us = 0;
  std::uint64_t prefetch_reads = 0;
  std::uint64_t prefetch_bytes = 0;
  std::uint64_t evictions = 0;
  std::uint64_t checksum_failures = 0;       // failed verifications, retries included
  std::uint64_t io_errors = 0;
  std::uint64_t joined_reads = 0;            // misses that waited for another's read
  std::uint64_t overflow_pages = 0;          // demand pages served from a private buffer
};

// Thread-safe. Not for both sides of a fork().
class PagePool {
 public:
  explicit PagePool(const PoolOptions& options);
  ~PagePool();
  PagePool(const PagePool&) = delete;
  PagePool& operator=(const PagePool&) = delete;

  // Throws StoreError when the file cannot be opened or is shorter than its pages.
  StoreId add_store(StoreSpec spec);
  // Evicts the store's pages and closes its file, once the reads and calls that are under way have
  // ended. No reader may use the store any more; pages that are still pinned stay readable.
  void remove_store(StoreId store);

  // ---- hot path -------------------------------------------------------------------------------
  // A reader's translation of one store: valid while the pool and the store live.
  struct View {
    const std::atomic<std::uint32_t>* table = nullptr;   // page -> frame, or kAbsent
    std::atomic<std::uint8_t>* clock = nullptr;          // frame -> touch counter
    const std::byte* slab = nullptr;                     // frame f lies at f * page_bytes
    std::size_t page_bytes = 0;
    std::uint32_t page_count = 0;

    // The page's bytes, or nullptr when it is not resident. Only inside a ReadGuard.
    const std::byte* peek(PageNumber page) const noexcept {
      // Sequentially consistent, which costs nothing more here: after the guard announced itself,
      // either this sees the eviction of the page or the evictor sees the guard.
      const std::uint32_t frame = table[page].load(std::memory_order_seq_cst);
      return frame == kAbsent ? nullptr : slab + static_cast<std::size_t>(frame) * page_bytes;
    }
    // peek(), and tells the eviction clock that the page is in use.
    const std::byte* touch(PageNumber page) const noexcept;
  };
  View view(StoreId store) const noexcept;

  // While one lives, no frame that its thread has seen is reused. One atomic exchange; keep it
  // short, since frames evicted meanwhile are of use to nobody until it ends.
  class ReadGuard {
   public:
    explicit ReadGuard(const PagePool& pool) noexcept;
    ~ReadGuard();
    ReadGuard(const ReadGuard&) = delete;
    ReadGuard& operator=(const ReadGuard&) = delete;

   private:
    const PagePool& pool_;
    std::uint32_t slot_;
  };

  // ---- demand ---------------------------------------------------------------------------------
  // Brings every page of `wanted` (duplicates allowed) and pins it; missing ones are read in one
  // parallel batch. Must not be called inside a ReadGuard. Never waits for a frame: without one,
  // the page comes in a private buffer. Pages that another thread is reading are waited for.
  PinnedPages fetch(const PageRef* wanted, std::size_t count, Deadline deadline = {});
  // As fetch(), but the caller has other things to do while the pages are read. Where the volume's
  // limits are known, this first waits until it gives what is missing, and what it would give only
  // after the deadline is not read. `around`: whether
  // the clusters of missed pages may come with them; not for who asks for all that it will want.
  PendingPages begin_fetch(const PageRef* wanted, std::size_t count, Deadline deadline = {},
                           bool around = true);

  // ---- prefetch -------------------------------------------------------------------------------
  // Loads pages (rising page numbers) at a priority under demand, in the calling thread.
  LoadReport load(StoreId store, const PageNumber* pages, std::size_t count,
                  const LoadOptions& options);
  void unstick(StoreId store, const PageNumber* pages, std::size_t count);
  // Drops pages that are neither pinned nor sticky. Returns how many.
  std::uint64_t evict(StoreId store, const PageNumber* pages, std::size_t count);

  // ---- facts ----------------------------------------------------------------------------------
  PoolStats stats() const;
  StoreStats store_stats(StoreId store) const;
  // One byte a page: 0 absent, 1 resident, 2 resident and sticky, 3 quarantined.
  std::vector<std::uint8_t> residency(StoreId store) const;
  // Frames that demand may have: all but those of sticky pages.
  std::size_t demand_frames() const;
  // Whether so many frames lie idle that what is read too much takes nobody's place: while they do,
  // clusters are read.
  bool is_roomy() const;
  const char* backend_name() const noexcept;   // "io_uring" or "threads"
  bool direct_io(StoreId store) const;         // whether O_DIRECT is in force
  // Lowers or raises the budget; evicts down to it. Throws StoreError if sticky or pinned pages
  // do not fit. The budget never exceeds the one given at construction.
  void set_budget(std::size_t budget_bytes);
  // Throws std::logic_error naming the first invariant that does not hold. For tests.
  void check() const;

  struct Impl;   // of no use to callers

 private:
  std::unique_ptr<Impl> impl_;
};

inline const std::byte* PagePool::View::touch(PageNumber page) const noexcept {
  const std::uint32_t frame = table[page].load(std::memory_order_seq_cst);
  if (frame == kAbsent) return nullptr;
  // Bit 7 is "touched since the hand passed". Read first: a store would bounce the cache line.
  std::atomic<std::uint8_t>& counter = clock[frame];
  const std::uint8_t seen = counter.load(std::memory_order_relaxed);
  if ((seen & 0x80u) == 0) {
    counter.store(static_cast<std::uint8_t>(seen | 0x80u), std::memory_order_relaxed);
  }
  return slab + static_cast<std::size_t>(frame) * page_bytes;
}

}  // namespace stoker
