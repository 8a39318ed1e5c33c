// Demand: pages that somebody waits for.
#include <algorithm>
#include <optional>
#include <utility>

#include "page_pool_impl.hpp"
#include "stoker/errors.hpp"

namespace stoker {
namespace {

// Adjacent pages of one fetch are one read up to this size.
constexpr std::size_t kDemandRunBytesMax = 128u << 10;
// Who has no more time than this reads little at once: a deadline is looked at between two reads, and
// what the last of them brings is still checked after it.
constexpr auto kHurry = std::chrono::milliseconds(100);
constexpr std::size_t kHurriedClusterBytes = 32u << 10;

}  // namespace

// ---- PinnedPages -------------------------------------------------------------------------------

struct PinnedPages::State {
  struct Entry {
    const std::byte* data = nullptr;
    std::uint32_t frame = kAbsent;
    PageStatus status = PageStatus::deadline;
    bool read = false;
    std::shared_ptr<PageBuffer> buffer;
  };

  State(PagePool::Impl& owner, std::size_t count) : pool(owner), entries(count) {}
  ~State() {
    // Release: what was read through the pin happened before the frame is used again.
    for (const Entry& entry : entries) {
      if (entry.frame != kAbsent) {
        pool.frames[entry.frame].pins.fetch_sub(1, std::memory_order_release);
      }
    }
  }
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  void take(std::size_t i, std::uint32_t frame) noexcept {
    entries[i].frame = frame;
    entries[i].data = pool.frame_bytes(frame);
    entries[i].status = PageStatus::ok;
  }

  PagePool::Impl& pool;
  std::vector<Entry> entries;
  std::uint64_t reads = 0;
  std::uint64_t bytes = 0;
  bool around = false;
};

PinnedPages::PinnedPages() = default;
PinnedPages::PinnedPages(PinnedPages&&) noexcept = default;
PinnedPages& PinnedPages::operator=(PinnedPages&&) noexcept = default;
PinnedPages::~PinnedPages() = default;

std::size_t PinnedPages::size() const noexcept { return state_ ? state_->entries.size() : 0; }

std::size_t PinnedPages::page_bytes() const noexcept { return state_->pool.options.page_bytes; }

const std::byte* PinnedPages::data(std::size_t i) const noexcept {
  return state_->entries[i].data;
}

PageStatus PinnedPages::status(std::size_t i) const noexcept { return state_->entries[i].status; }

std::uint64_t PinnedPages::reads() const noexcept { return state_ ? state_->reads : 0; }

std::uint64_t PinnedPages::bytes_read() const noexcept { return state_ ? state_->bytes : 0; }

bool PinnedPages::is_read(std::size_t i) const noexcept { return state_->entries[i].read; }

bool PinnedPages::read_around() const noexcept { return state_ && state_->around; }

void PinnedPages::release() noexcept { state_.reset(); }

// ---- what a fetch is made of --------------------------------------------------------------------

namespace {

struct Open {
  std::size_t entry;
  PendingRef page;
};

// The pages that a fetch waits for, each with a pin that is this fetch's. Whatever it does not come
// to take, because something failed, is let go again.
class OpenPages {
 public:
  explicit OpenPages(PagePool::Impl& pool) : pool_(pool) {}
  ~OpenPages() {
    if (pages_.empty()) return;
    const std::lock_guard<std::mutex> lock(pool_.mutex);
    for (const Open& item : pages_) {
      Pending& page = *item.page;
      if (!page.ended) {
        --page.wanted;
      } else if (page.status == PageStatus::ok && page.frame != kAbsent) {
        pool_.frames[page.frame].pins.fetch_sub(1, std::memory_order_release);
      }
    }
  }
  OpenPages(const OpenPages&) = delete;
  OpenPages& operator=(const OpenPages&) = delete;

  const std::vector<Open>& pages() const noexcept { return pages_; }
  void reserve(std::size_t most) { pages_.reserve(most); }
  // Under the mutex, and within what was reserved.
  void add(std::size_t entry, PendingRef page) noexcept {
    ++page->wanted;
    pages_.push_back({entry, std::move(page)});
  }
  void taken() noexcept { pages_.clear(); }

 private:
  PagePool::Impl& pool_;
  std::vector<Open> pages_;
};

// Under the mutex: the read to wait for, somebody's or a new one.
PendingRef miss(PagePool::Impl& pool, Store& store, PageNumber number, BegunPages& begun) {
  if (PendingRef page = pool.find_pending(store, number)) {
    if (page->fetch_stamp != begun.stamp()) ++pool.totals.joined_reads;
    return page;
  }
  const std::uint32_t frame = pool.take_frame(true, 0);
  PendingRef page = pool.begin_pending(store, number, frame);
  page->fetch_stamp = begun.stamp();
  begun.add(page);
  if (frame == kAbsent) ++pool.totals.overflow_pages;
  return page;
}

// Under the mutex: the rest of a missed page's cluster comes with it while frames lie idle. Who
// misses a page of a graph soon misses those beside it, and to a device that is bound by the
// number of reads a cluster costs no more than a page. Says whether there was room for it.
bool read_around(PagePool::Impl& pool, Store& store, PageNumber number, bool hurried,
                 BegunPages& begun) {
  std::uint32_t cluster = store.spec.cluster_pages;
  if (hurried) {
    cluster = std::min(cluster,
                       static_cast<std::uint32_t>(kHurriedClusterBytes / pool.options.page_bytes));
  }
  if (cluster < 2) return false;
  if (!pool.leaves_idle(cluster)) return false;
  const PageNumber first = number - number % cluster;
  const PageNumber last = std::min(store.spec.page_count - first, cluster) + first;
  for (PageNumber near = first; near < last; ++near) {
    if (store.table[near].load(std::memory_order_relaxed) != kAbsent || store.quarantined[near] ||
        pool.find_pending(store, near)) {
      continue;
    }
    const std::uint32_t frame = pool.take_frame(false, 0);
    if (frame == kAbsent) return true;
    PendingRef page = pool.begin_pending(store, near, frame);
    page->fetch_stamp = begun.stamp();
    page->prefetch = true;
    begun.add(page);
  }
  return true;
}

// Under the mutex: whether the volume will not have given the page by then, so that its read would
// only take from what others could have in time.
bool comes_too_late(const PagePool::Impl& pool, const Store& store, PageNumber number,
                    Clock::time_point deadline) {
  return store.limit && store.limit->demand_turn() >= deadline && !pool.find_pending(store, number);
}

// Loads make way for it while it lives.
class Demand {
 public:
  explicit Demand(PagePool::Impl& pool) : pool_(pool) { pool_.demand_begins(); }
  ~Demand() { pool_.demand_ends(); }
  Demand(const Demand&) = delete;
  Demand& operator=(const Demand&) = delete;

 private:
  PagePool::Impl& pool_;
};

// Adds the time of its life to what demand has waited.
class WaitTime {
 public:
  explicit WaitTime(PagePool::Impl& pool) : pool_(pool), began_(Clock::now()) {}
  ~WaitTime() {
    const auto waited = Clock::now() - began_;
    pool_.demand_wait_us.fetch_add(
        static_cast<std::uint64_t>(
            std::chrono::duration_cast<std::chrono::microseconds>(waited).count()),
        std::memory_order_relaxed);
  }
  WaitTime(const WaitTime&) = delete;
  WaitTime& operator=(const WaitTime&) = delete;

 private:
  PagePool::Impl& pool_;
  const Clock::time_point began_;
};

}  // namespace

// ---- PendingPages ------------------------------------------------------------------------------

struct PendingPages::State {
  State(PagePool::Impl& owner, std::size_t count) : pool(owner), open(owner) {
    result.state_ = std::make_unique<PinnedPages::State>(owner, count);
  }
  ~State() {
    // What is out at the device still comes, to nobody.
    if (job && !job->idle()) pool.adopt(std::move(job));
  }
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  void land(const Deadline& deadline) {
    while (job && !job->idle() && job->step(deadline)) {
    }
  }

  PagePool::Impl& pool;
  PinnedPages result;
  OpenPages open;
  std::optional<Demand> demand;
  std::unique_ptr<ReadJob> job;   // none where it reads nothing itself
};

PendingPages::PendingPages() noexcept = default;
PendingPages::PendingPages(PendingPages&&) noexcept = default;
PendingPages& PendingPages::operator=(PendingPages&&) noexcept = default;
PendingPages::~PendingPages() = default;

void PendingPages::issue() {
  if (state_ && state_->job) state_->job->flush();
}

bool PendingPages::poll() {
  if (!state_ || state_->open.pages().empty()) return true;
  if (state_->job && !state_->job->take_arrived()) return false;
  const std::lock_guard<std::mutex> lock(state_->pool.mutex);
  const std::vector<Open>& open = state_->open.pages();
  return std::all_of(open.begin(), open.end(), [](const Open& item) { return item.page->ended; });
}

void PendingPages::land(const Deadline& deadline) {
  if (!state_ || !state_->job || state_->job->idle()) return;
  const WaitTime waiting(state_->pool);
  state_->land(deadline);
}

PinnedPages PendingPages::finish(const Deadline& deadline) {
  const std::unique_ptr<State> mine = std::move(state_);
  if (!mine) return {};
  if (mine->open.pages().empty()) return std::move(mine->result);
  PinnedPages::State& state = *mine->result.state_;
  const WaitTime waiting(mine->pool);
  if (mine->job) {
    mine->land(deadline);
    state.reads = mine->job->reads();
    state.bytes = mine->job->bytes();
    if (!mine->job->idle()) mine->pool.adopt(std::move(mine->job));
  }
  std::unique_lock<std::mutex> lock(mine->pool.mutex);
  {
    PageWait wait;
    for (const Open& item : mine->open.pages()) wait.add(item.page);
    (void)wait.until(lock, deadline);
  }
  for (const Open& item : mine->open.pages()) {
    PinnedPages::State::Entry& entry = state.entries[item.entry];
    Pending& page = *item.page;
    if (!page.ended) {
      --page.wanted;
      entry.status = PageStatus::deadline;
    } else if (page.status != PageStatus::ok) {
      entry.status = page.status;
    } else if (page.frame != kAbsent) {
      state.take(item.entry, page.frame);
    } else {
      entry.buffer = page.buffer;
      entry.data = page.bytes;
      entry.status = PageStatus::ok;
    }
  }
  mine->open.taken();
  return std::move(mine->result);
}

// ---- fetch -------------------------------------------------------------------------------------

PendingPages PagePool::begin_fetch(const PageRef* wanted, std::size_t count, Deadline deadline,
                                   bool around) {
  Impl& pool = *impl_;
  PendingPages pending;
  pending.state_ = std::make_unique<PendingPages::State>(pool, count);
  PinnedPages::State& state = *pending.state_->result.state_;
  OpenPages& open = pending.state_->open;
  const bool hurried = deadline && *deadline < Clock::now() + kHurry;
  BegunPages begun(pool);
  {
    const std::lock_guard<std::mutex> lock(pool.mutex);
    for (std::size_t i = 0; i < count; ++i) {
      const Store& store = pool.store_at(wanted[i].store);
      if (wanted[i].page >= store.spec.page_count) {
        throw BadInput(store.spec.path + ": page " + std::to_string(wanted[i].page) +
                       " was asked for, of " + std::to_string(store.spec.page_count));
      }
    }
    for (std::size_t i = 0; i < count; ++i) {
      Store& store = pool.store_at(wanted[i].store);
      const PageNumber number = wanted[i].page;
      const std::uint32_t frame = store.table[number].load(std::memory_order_relaxed);
      if (frame != kAbsent) {
        Frame& entry = pool.frames[frame];
        entry.pins.fetch_add(1, std::memory_order_relaxed);
        pool.clock[frame].fetch_or(kTouchedBit, std::memory_order_relaxed);
        pool.note_use(entry);
        state.take(i, frame);
      } else if (store.quarantined[number]) {
        state.entries[i].status = PageStatus::corrupt;
      } else if (deadline && comes_too_late(pool, store, number, *deadline)) {
        state.entries[i].status = PageStatus::deadline;
      } else {
        if (open.pages().empty()) open.reserve(count - i);
        const std::size_t before = begun.size();
        open.add(i, miss(pool, store, number, begun));
        state.entries[i].read = begun.size() > before;
        if (around && read_around(pool, store, number, hurried, begun)) state.around = !hurried;
      }
    }
  }
  if (open.pages().empty()) return pending;
  pending.state_->demand.emplace(pool);
  if (!begun.empty()) {
    const std::size_t run_pages_max =
        std::max<std::size_t>(1, kDemandRunBytesMax / pool.options.page_bytes);
    {
      const WaitTime waiting(pool);
      begun.wait_turn(run_pages_max);
    }
    pending.state_->job = std::make_unique<ReadJob>(pool, false);
    const std::vector<Store*> unprepared = begun.unprepared_stores();
    begun.submit(*pending.state_->job, run_pages_max);
    if (!unprepared.empty()) {
      // A store's first pages are on their way while its checksums come: both are one wait.
      pending.state_->job->flush();
      for (Store* store : unprepared) store->checksums.prepare(store->file);
    }
  }
  return pending;
}

PinnedPages PagePool::fetch(const PageRef* wanted, std::size_t count, Deadline deadline) {
  return begin_fetch(wanted, count, deadline).finish(deadline);
}

}  // namespace stoker
