// The inside of the page pool. Private to page_pool*.cpp.
//
// One mutex guards all bookkeeping; it is never held over I/O, over a checksum, or by a reader of
// the hot path. A frame is in exactly one of four states:
//
//   free --take_frame--> reading --finish--> resident --evict--> limbo --reclaim--> free
//                           `------ failed ------------------------------------------^
//
// In limbo it waits for the readers that may still see its old page: each eviction is stamped with
// the epoch, each ReadGuard announces the epoch it began in, and a frame is free again once every
// announced epoch is younger than its stamp.
#pragma once

#include <array>
#include <condition_variable>
#include <list>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

#include "lazy_table.hpp"
#include "page_checksums.hpp"
#include "stoker/page_io.hpp"
#include "stoker/page_pool.hpp"

namespace stoker {

constexpr std::uint8_t kTouchedBit = 0x80;
constexpr std::uint8_t kWeightMask = 0x07;
constexpr std::uint8_t kWeightMax = 7;

// Memory of its own for one page, when the pool has no frame for it.
struct PageBuffer {
  explicit PageBuffer(std::size_t bytes);
  ~PageBuffer();
  PageBuffer(const PageBuffer&) = delete;
  PageBuffer& operator=(const PageBuffer&) = delete;
  std::byte* data;
};

enum class FrameState : std::uint8_t { free, reading, resident, limbo };
enum class RingName : std::uint8_t { none, probation, proven };

// A circle of frames and the hand that goes round it.
struct Ring {
  std::uint32_t hand = kAbsent;
  std::uint32_t size = 0;
};

// All zeros is a free frame that nobody has used.
struct Frame {
  std::atomic<std::uint32_t> pins{0};   // raised under the mutex, lowered by anyone
  StoreId store = 0;
  PageNumber page = 0;
  std::uint32_t next = kAbsent;         // its ring: resident frames that are not sticky
  std::uint32_t previous = kAbsent;
  std::uint32_t load_stamp = 0;         // the load() that brought it, 0 for demand
  FrameState state = FrameState::free;
  RingName ring = RingName::none;
  bool sticky = false;
  bool prefetched = false;              // by load(), and not known to be of use yet
};

struct Store {
  Store(StoreId id, StoreSpec&& spec, const PoolOptions& options);

  StoreId id;
  PageChecksums checksums;
  const StoreSpec spec;
  PageFile file;
  const std::shared_ptr<ReadLimit> limit;        // null: none is known
  LazyTable<std::atomic<std::uint32_t>> table;   // page -> frame, or kAbsent
  std::vector<bool> quarantined;
  LazyTable<std::uint32_t> failed_probation;     // page -> when, by Impl::departures; 0: not so
  std::uint32_t pending_count = 0;   // pages being read
  std::uint32_t use_count = 0;       // calls that are under way and let go of the mutex
  bool removing = false;
  StoreStats stats;
};

// Whoever waits for pages that another thread reads; see PageWait.
struct Waiter {
  std::condition_variable done;
  std::size_t outstanding = 0;
};

// One page on its way. Guarded by the mutex, but for the bytes, which belong to the reading job.
struct Pending {
  Store* store = nullptr;
  PageNumber page = 0;
  std::uint32_t frame = kAbsent;        // or, without a frame:
  std::shared_ptr<PageBuffer> buffer;
  std::byte* bytes = nullptr;
  std::uint32_t wanted = 0;             // pins that the frame gets when it is installed
  std::uint32_t load_stamp = 0;
  std::uint8_t weight = 0;
  bool sticky = false;
  bool prefetch = false;
  std::uint64_t fetch_stamp = 0;        // the fetch() that reads it, 0 for a load
  bool ended = false;
  PageStatus status = PageStatus::ok;
  std::vector<Waiter*> waiters;
};
using PendingRef = std::shared_ptr<Pending>;

// One read of adjacent pages.
struct Run : ReadRequest {
  std::vector<PendingRef> pages;
  std::size_t index = 0;   // its place in ReadJob::runs_
  bool second_try = false;
};

// A reader's announcement: 0, or the epoch that its guard began in.
struct alignas(64) ReaderSlot {
  std::atomic<std::uint64_t> epoch{0};
};
constexpr std::uint32_t kReaderSlots = 256;
constexpr std::uint32_t kNoSlot = kReaderSlots;

class ReadJob;

// How long the device takes for a byte of a load: the median of what was seen last.
class ReadPace {
 public:
  void note(std::size_t bytes, Clock::duration busy) noexcept;
  // Without bound while nothing was seen.
  Clock::duration time_of(std::size_t bytes) const noexcept;

 private:
  static constexpr std::size_t kSeen = 5;
  std::array<std::atomic<std::uint32_t>, kSeen> picoseconds_{};   // a byte; 0: not yet
  std::atomic<std::uint32_t> next_{0};
};

struct PagePool::Impl {
  explicit Impl(const PoolOptions& given);
  ~Impl();

  // ---- page_pool.cpp: stores and facts
  Store& store_at(StoreId id) const;   // throws BadInput, also for one that is on its way out
  Store* store_or_null(StoreId id) const noexcept;
  Store& store_of(const Frame& frame) noexcept { return *store_or_null(frame.store); }
  void require_rising(const Store& store, const PageNumber* pages, std::size_t count) const;
  const std::byte* frame_bytes(std::uint32_t frame) const noexcept {
    return slab + static_cast<std::size_t>(frame) * options.page_bytes;
  }
  std::byte* frame_bytes(std::uint32_t frame) noexcept {
    return slab + static_cast<std::size_t>(frame) * options.page_bytes;
  }
  void set_capacity(std::uint32_t frames_wanted);

  // ---- page_pool_frames.cpp: all under the mutex
  // A frame in state reading, or kAbsent. `evict` allows to take it from another page, but never
  // from one that the load of stamp `spare` brought.
  std::uint32_t take_frame(bool evict, std::uint32_t spare);
  void install(std::uint32_t frame, const Pending& pending);
  void put_back(std::uint32_t frame);              // reading -> free
  bool leaves_idle(std::uint32_t more) const;      // whether frames lie idle beside so many more
  void evict_frame(std::uint32_t frame);           // resident -> limbo
  void reclaim();                                  // limbo -> free, as far as readers allow

  // ---- page_pool_policy.cpp: all under the mutex
  bool evict_one(std::uint32_t spare);             // the page of least use; false: none may go
  std::uint32_t pick_victim(std::uint32_t spare);
  std::uint32_t look_at_probation(std::uint32_t spare);
  bool returns_soon(const Store& store, PageNumber page) const;
  Ring& ring_of(const Frame& frame) noexcept {
    return frame.ring == RingName::probation ? probation : proven;
  }
  void ring_insert(std::uint32_t frame, RingName name);
  void ring_remove(std::uint32_t frame);
  void set_sticky(std::uint32_t frame, bool sticky);
  void raise_weight(std::uint32_t frame, std::uint8_t weight);
  void note_use(Frame& frame);                     // a prefetched page proved useful
  std::uint64_t oldest_reader() const noexcept;
  void give_memory_back() noexcept;
  void join_small_pages() noexcept;                // without the mutex

  // ---- page_pool_job.cpp
  PendingRef find_pending(const Store& store, PageNumber page) const;
  PendingRef begin_pending(Store& store, PageNumber page, std::uint32_t frame);
  void finish_pending(Pending& pending, PageStatus status);
  void demand_begins() noexcept;
  void demand_ends() noexcept;
  void adopt(std::unique_ptr<ReadJob> job);  // drives it to its end in the background
  void reap_orphans();

  PoolOptions options;
  IoEngine io;
  const std::uint32_t frame_count;                 // frames in the slab, numbered from 1
  std::byte* slab = nullptr;                       // of a frame 0, which nobody has
  std::size_t slab_mapped_bytes = 0;
  void* slab_mapping = nullptr;
  std::size_t small_bytes = 0;                     // of the first frames, not yet huge pages
  std::atomic<bool> small_joined{false};
  LazyTable<Frame> frames;
  LazyTable<std::atomic<std::uint8_t>> clock;

  // Readers, lock-free.
  std::array<ReaderSlot, kReaderSlots> readers;
  std::atomic<std::uint32_t> reader_slots_used{0};       // slots below it may be in use
  std::atomic<std::uint32_t> readers_without_slot{0};    // while above 0, nothing is reclaimed
  std::atomic<std::uint64_t> epoch{1};

  // Stores by id, in chunks that never move, so that view() needs no lock. Ids are not reused.
  static constexpr std::uint32_t kChunk = 256;
  static constexpr std::uint32_t kChunks = 4096;
  struct StoreChunk {
    std::array<std::atomic<Store*>, kChunk> stores{};
  };
  std::array<std::atomic<StoreChunk*>, kChunks> store_chunks{};
  StoreId store_count = 0;

  mutable std::mutex mutex;
  std::uint32_t capacity = 0;                      // frames that the budget allows
  std::uint32_t resident_count = 0;
  std::uint32_t reading_count = 0;
  std::uint32_t limbo_count = 0;
  std::uint32_t frames_begun = 0;                  // those up to it have been used
  FrameStack free_frames;                          // of those; taken first
  struct Limbo {
    std::uint32_t frame;
    std::uint64_t stamp;
  };
  FixedQueue<Limbo> limbo;                         // by rising stamp
  FrameStack limbo_pinned;                         // of removed stores, still held by a fetch
  Ring probation;
  Ring proven;
  std::uint32_t departures = 0;                    // pages evicted for want of room
  bool pressed = false;                            // frames run short: evict a little ahead
  std::uint32_t load_stamps = 0;
  std::uint64_t fetch_stamps = 0;
  std::unordered_map<std::uint64_t, PendingRef> pending;
  PoolStats totals;                                // the counters that the mutex guards
  std::atomic<std::uint64_t> demand_reads{0};
  std::atomic<std::uint64_t> demand_bytes{0};
  std::atomic<std::uint64_t> demand_wait_us{0};
  std::atomic<std::uint64_t> prefetch_reads{0};
  std::atomic<std::uint64_t> prefetch_bytes{0};
  ReadPace prefetch_pace;

  // Demand that waits for the device, and the loads that wait for it to end.
  std::atomic<std::uint32_t> demand_waiting{0};
  std::atomic<Clock::rep> demand_seen{Clock::time_point::min().time_since_epoch().count() / 2};
  std::mutex demand_mutex;
  std::condition_variable demand_idle;
  std::condition_variable store_idle;              // with `mutex`: a store has no page on its way

  std::mutex orphan_mutex;
  std::condition_variable orphan_ready;
  std::list<std::unique_ptr<ReadJob>> orphans;     // handed over without an allocation
  std::thread orphan_thread;
  bool stopping = false;
};

// Keeps a store from going during a call that takes the mutex more than once.
struct StoreUse {
  StoreUse(PagePool::Impl& owner, StoreId id);
  ~StoreUse();
  StoreUse(const StoreUse&) = delete;
  StoreUse& operator=(const StoreUse&) = delete;

  PagePool::Impl& pool;
  Store& store;
};

// Has the system give memory to the frames that a load is about to fill, beside the thread that
// fills them: clearing a page can take longer than reading it, where a virtual machine gets its
// memory back from its host.
class FramesAhead {
 public:
  FramesAhead(PagePool::Impl& owner, std::size_t pages);
  ~FramesAhead();
  FramesAhead(const FramesAhead&) = delete;
  FramesAhead& operator=(const FramesAhead&) = delete;

 private:
  void work();

  PagePool::Impl& pool_;
  std::size_t end_bytes_ = 0;          // of the last frame that the load can need
  std::mutex mutex_;
  std::condition_variable ended_;
  bool over_ = false;
  std::thread thread_;
};

// Pages that were begun and not yet given to a job. Those it still has when it goes, because
// something failed, end with an error, so that nobody waits for them in vain.
class BegunPages {
 public:
  explicit BegunPages(PagePool::Impl& pool) : pool_(pool) {}
  ~BegunPages();
  BegunPages(const BegunPages&) = delete;
  BegunPages& operator=(const BegunPages&) = delete;

  // Under the mutex: what tells this fetch's own reads from those of others.
  std::uint64_t stamp() noexcept {
    if (stamp_ == 0) stamp_ = ++pool_.fetch_stamps;
    return stamp_;
  }
  bool empty() const noexcept { return pages_.empty(); }
  std::size_t size() const noexcept { return pages_.size(); }
  const Pending& back() const noexcept { return *pages_.back(); }
  void add(const PendingRef& page);                // under the mutex
  // Stores whose checksums nobody has read yet; each lives while pages of it are begun.
  std::vector<Store*> unprepared_stores() const;
  // Waits until the volume gives what submit() will ask of it, where its limits are known.
  void wait_turn(std::size_t run_pages_max);
  // Cuts them into runs of neighbors, which the job then has.
  void submit(ReadJob& job, std::size_t run_pages_max);

 private:
  void sort_by_place();
  std::size_t run_end(std::size_t first, std::size_t run_pages_max) const;

  PagePool::Impl& pool_;
  std::uint64_t stamp_ = 0;
  std::vector<PendingRef> pages_;   // null: the job has it
};

// A wait for pages that other threads read. Made, used and gone under the mutex; whatever ends it,
// no page knows of it afterwards.
class PageWait {
 public:
  PageWait() = default;
  ~PageWait();
  PageWait(const PageWait&) = delete;
  PageWait& operator=(const PageWait&) = delete;

  void add(const PendingRef& page);   // nothing, if the page has ended
  // Lets go of the mutex meanwhile. False when the deadline came first.
  bool until(std::unique_lock<std::mutex>& lock, const Deadline& deadline);

 private:
  Waiter waiter_;
  std::vector<PendingRef> pages_;
};

// Calls body(i) for i in [0, count) under the mutex, but lets others in now and then.
template <class Body>
void in_stretches(std::mutex& mutex, std::size_t count, Body&& body) {
  constexpr std::size_t kStretch = 2048;
  for (std::size_t first = 0; first < count; first += kStretch) {
    const std::lock_guard<std::mutex> lock(mutex);
    const std::size_t end = count - first < kStretch ? count : first + kStretch;
    for (std::size_t i = first; i < end; ++i) body(i);
  }
}

// A set of reads and the queue that they go through. Owns everything that the device writes to,
// by way of its pending pages, until the last read has ended: whoever may not wait for that gives
// the job to the pool (Impl::adopt).
class ReadJob {
 public:
  ReadJob(PagePool::Impl& pool, bool prefetch);
  ~ReadJob();
  ReadJob(const ReadJob&) = delete;
  ReadJob& operator=(const ReadJob&) = delete;

  // Adjacent pages of one store, by rising number, each begun and unended. Whatever fails, they end.
  void submit(std::vector<PendingRef> pages) noexcept;
  void flush() { queue_->flush(); }
  // Ends the pages of one run that came back. False when `until` came first or none is out.
  bool step(const Deadline& until);
  // Ends the pages of what has come back already, without waiting, and hands on what has room only
  // now. Asks the kernel for nothing where nothing came. Returns idle().
  bool take_arrived();
  // The pages still out shall not be sticky when they arrive: their load has given up.
  void forget_sticky();
  std::size_t pages_out() const noexcept;
  bool idle() const noexcept { return runs_.empty(); }
  std::size_t inflight_bytes() const noexcept { return inflight_bytes_; }
  std::uint64_t reads() const noexcept { return reads_; }
  std::uint64_t bytes() const noexcept { return bytes_; }
  std::uint64_t pages_ok() const noexcept { return pages_ok_; }
  std::uint64_t pages_failed() const noexcept { return pages_failed_; }

 private:
  void start(std::vector<PendingRef> pages, bool second_try) noexcept;
  void end_run(Run& run) noexcept;
  void end_pages(const PendingRef* pages, std::size_t count, PageStatus status) noexcept;

  PagePool::Impl& pool_;
  const bool prefetch_;
  std::unique_ptr<ReadQueue> queue_;
  std::vector<std::unique_ptr<Run>> runs_;   // out at the device
  std::size_t inflight_bytes_ = 0;
  std::uint64_t reads_ = 0;
  std::uint64_t bytes_ = 0;
  std::uint64_t pages_ok_ = 0;
  std::uint64_t pages_failed_ = 0;
};

}  // namespace stoker
