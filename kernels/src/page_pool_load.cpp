// Prefetch: pages that nobody waits for yet, read in long runs behind all demand.
#include <algorithm>
#include <new>

#include "page_pool_impl.hpp"

namespace stoker {
namespace {

// Runs in flight at least, within the bound on bytes: one at a time would leave the device idle
// while this thread checks the last one.
constexpr std::size_t kRunsInFlight = 4;
constexpr std::size_t kPartsMax = 1024;          // IOV_MAX
constexpr std::size_t kScanMax = 4096;           // pages looked at under one hold of the mutex
constexpr auto kLook = std::chrono::milliseconds(2);     // how soon a cancel is seen
constexpr auto kGrace = std::chrono::milliseconds(20);   // for what is out when the time is up
constexpr int kPassesMax = 4;
// After demand was seen, for so long only this part of the bytes may be in flight: the next fetch
// finds a shorter line before it.
constexpr auto kDemandEcho = std::chrono::milliseconds(100);
constexpr std::size_t kShareUnderDemand = 2;
constexpr std::size_t kRunShareUnderDemand = 4;
// While demand waits, so much of the device's time may be in flight for a load, and so much later
// at most does a demand read come. A fast device goes on loading between a query's reads; to a
// slow one even a single run is more, and the load pauses.
constexpr auto kDelayMax = std::chrono::microseconds(300);

class Loader {
 public:
  Loader(PagePool::Impl& pool, Store& store, const LoadOptions& options, std::uint32_t stamp)
      : pool_(pool), store_(store), options_(options), stamp_(stamp),
        job_(std::make_unique<ReadJob>(pool, true)) {
    const std::size_t inflight = pool.options.prefetch_inflight_bytes_max;
    const std::size_t bytes = std::min(options.run_bytes_max, inflight / kRunsInFlight);
    run_pages_ = std::clamp<std::size_t>(bytes / pool.options.page_bytes, 1, kPartsMax);
    last_issue_ = busy_since_ = Clock::now();
  }
  ~Loader() {
    if (job_ && !job_->idle()) job_->forget_sticky();   // it failed; the job's end waits for reads
  }
  Loader(const Loader&) = delete;
  Loader& operator=(const Loader&) = delete;

  LoadReport run(const PageNumber* pages, std::size_t count) {
    std::vector<PageNumber> again;
    for (int pass = 0; !pass_over(pages, count); ++pass) {
      if (elsewhere_.empty()) break;
      again.clear();
      for (const PendingRef& page : elsewhere_) again.push_back(page->page);
      if (pass + 1 == kPassesMax || !wait_elsewhere()) {
        report_.pages_not_reached += again.size();
        break;
      }
      elsewhere_.clear();
      pages = again.data();
      count = again.size();
    }
    finish();
    return report_;
  }

 private:
  bool stopped() const {
    return (options_.cancel != nullptr && options_.cancel->load(std::memory_order_relaxed)) ||
           (options_.deadline && Clock::now() >= *options_.deadline);
  }

  Deadline soon() const {
    const auto moment = Clock::now() + kLook;
    return options_.deadline ? std::min(moment, *options_.deadline) : moment;
  }

  // True when the call is over; false when the pages in elsewhere_ remain to be seen again.
  bool pass_over(const PageNumber* pages, std::size_t count) {
    std::size_t next = 0;
    while (next < count || !job_->idle()) {
      if (stopped()) {
        report_.pages_not_reached += (count - next) + elsewhere_.size();
        return true;
      }
      if (next < count && may_issue()) {
        issue(pages, count, next);
      } else if (!job_->idle()) {
        step(soon());
      } else if (before_turn()) {
        std::this_thread::sleep_until(std::min(*soon(), store_.limit->load_turn()));
      } else {
        std::unique_lock<std::mutex> lock(pool_.demand_mutex);
        pool_.demand_idle.wait_until(lock, *soon(), [this] {
          return pool_.demand_waiting.load(std::memory_order_relaxed) == 0;
        });
      }
    }
    return false;
  }

  // Whether demand was waiting a moment ago, and will hardly have been the last.
  bool demand_about() const {
    return Clock::now().time_since_epoch().count() -
               pool_.demand_seen.load(std::memory_order_relaxed) <
           std::chrono::duration_cast<Clock::duration>(kDemandEcho).count();
  }

  // Whether the volume has yet to give what was asked of it, and demand is in line too.
  bool before_turn() const {
    return store_.limit && demand_about() && Clock::now() < store_.limit->load_turn();
  }

  bool may_issue() const {
    if (before_turn()) return false;
    const bool demand = demand_about();
    const std::size_t run_bytes = run_pages_now(demand) * pool_.options.page_bytes;
    const std::size_t bytes = job_->inflight_bytes() + run_bytes;
    const std::size_t share = demand ? kShareUnderDemand : 1;
    if (!job_->idle() && bytes > pool_.options.prefetch_inflight_bytes_max / share) return false;
    if (pool_.demand_waiting.load(std::memory_order_relaxed) == 0) return true;
    // Demand waits for what the volume gives, not behind this load, which has left it its part.
    if (store_.limit) return true;
    if (pool_.prefetch_pace.time_of(bytes) <= kDelayMax) return true;
    const auto pause = std::chrono::milliseconds(pool_.options.prefetch_pause_ms_max);
    return Clock::now() - last_issue_ >= pause;
  }

  std::size_t run_pages_now(bool demand) const {
    return demand ? std::max<std::size_t>(1, run_pages_ / kRunShareUnderDemand) : run_pages_;
  }

  // Ends what comes back until then, and notes how long the device had been busy with it.
  void step(const Deadline& until) {
    const std::size_t before = job_->inflight_bytes();
    if (!job_->step(until)) return;
    const auto now = Clock::now();
    seen_bytes_ += before - std::min(before, job_->inflight_bytes());
    seen_busy_ += now - busy_since_;
    busy_since_ = now;
    // One alone tells little: those of a line come back together.
    if (++seen_runs_ < kRunsInFlight) return;
    pool_.prefetch_pace.note(seen_bytes_, seen_busy_);
    seen_bytes_ = seen_runs_ = 0;
    seen_busy_ = Clock::duration::zero();
  }

  // Takes the next run of absent neighbors from pages[next ...] and sends it off.
  void issue(const PageNumber* pages, std::size_t count, std::size_t& next) {
    const std::size_t most = run_pages_now(demand_about());
    BegunPages run(pool_);
    {
      const std::lock_guard<std::mutex> lock(pool_.mutex);
      const std::size_t end = std::min(count, next + kScanMax);
      for (; next < end && run.size() < most; ++next) {
        if (!run.empty() && pages[next] != run.back().page + 1) break;
        begin(pages[next], run);
      }
    }
    if (run.empty()) return;
    last_issue_ = Clock::now();
    if (job_->idle()) busy_since_ = last_issue_;
    if (store_.limit) {
      const std::size_t bytes = run.size() * pool_.options.page_bytes;
      if (demand_about()) {
        store_.limit->take_for_load(bytes);
      } else {
        store_.limit->take_alone(bytes);
      }
    }
    run.submit(*job_, most);
    job_->flush();
  }

  // Under the mutex. Begins the page, or counts why not.
  void begin(PageNumber number, BegunPages& run) {
    const std::uint32_t frame = store_.table[number].load(std::memory_order_relaxed);
    if (frame != kAbsent) {
      keep(frame);
      ++report_.pages_already;
    } else if (store_.quarantined[number]) {
      ++report_.pages_failed;
    } else if (PendingRef other = pool_.find_pending(store_, number)) {
      elsewhere_.push_back(std::move(other));
    } else if (full_) {
      ++report_.pages_no_room;
    } else {
      PendingRef page = begin_in_frame(number);
      if (page) {
        run.add(page);
      } else {
        full_ = true;
        ++report_.pages_no_room;
      }
    }
  }

  // Null when no frame can be had, or no memory to keep account of it.
  PendingRef begin_in_frame(PageNumber number) {
    const std::uint32_t frame = pool_.take_frame(options_.evict, stamp_);
    if (frame == kAbsent) return nullptr;
    try {
      PendingRef page = pool_.begin_pending(store_, number, frame);
      page->load_stamp = stamp_;
      page->weight = std::min(options_.weight, kWeightMax);
      page->sticky = options_.sticky;
      page->prefetch = true;
      return page;
    } catch (const std::bad_alloc&) {
      return nullptr;
    }
  }

  // The page is there: it gets what this load would have given it.
  void keep(std::uint32_t frame) {
    if (options_.sticky) pool_.set_sticky(frame, true);
    pool_.frames[frame].load_stamp = stamp_;
    pool_.raise_weight(frame, std::min(options_.weight, kWeightMax));
  }

  // Until the pages that demand is reading have ended. False when the time is up.
  bool wait_elsewhere() {
    std::unique_lock<std::mutex> lock(pool_.mutex);
    PageWait wait;
    for (const PendingRef& page : elsewhere_) wait.add(page);
    while (!stopped()) {
      if (wait.until(lock, soon())) return true;
    }
    return wait.until(lock, Clock::now());
  }

  void finish() {
    const Deadline grace = Clock::now() + kGrace;
    while (!job_->idle() && job_->step(grace)) {
    }
    report_.reads = job_->reads();
    report_.bytes_read = job_->bytes();
    report_.pages_loaded = job_->pages_ok();
    report_.pages_failed += job_->pages_failed();
    report_.pages_not_reached += job_->pages_out();
    if (!job_->idle()) {
      job_->forget_sticky();
      pool_.adopt(std::move(job_));
    }
  }

  PagePool::Impl& pool_;
  Store& store_;
  const LoadOptions& options_;
  const std::uint32_t stamp_;
  std::unique_ptr<ReadJob> job_;
  std::size_t run_pages_ = 1;
  Clock::time_point last_issue_;
  Clock::time_point busy_since_;        // the device, with what is out now
  std::size_t seen_runs_ = 0;           // since the pace was noted last
  std::size_t seen_bytes_ = 0;
  Clock::duration seen_busy_ = Clock::duration::zero();
  std::vector<PendingRef> elsewhere_;   // pages that somebody else is reading
  bool full_ = false;
  LoadReport report_;
};

}  // namespace

// ---- pace --------------------------------------------------------------------------------------

void ReadPace::note(std::size_t bytes, Clock::duration busy) noexcept {
  if (bytes == 0) return;
  const auto nanoseconds = std::chrono::duration_cast<std::chrono::nanoseconds>(busy).count();
  const double each = 1e3 * static_cast<double>(nanoseconds) / static_cast<double>(bytes);
  const auto kept = static_cast<std::uint32_t>(std::clamp(each, 1.0, 4e9));
  picoseconds_[next_.fetch_add(1, std::memory_order_relaxed) % kSeen].store(
      kept, std::memory_order_relaxed);
}

Clock::duration ReadPace::time_of(std::size_t bytes) const noexcept {
  std::array<std::uint32_t, kSeen> seen;
  for (std::size_t i = 0; i < kSeen; ++i) seen[i] = picoseconds_[i].load(std::memory_order_relaxed);
  if (*std::min_element(seen.begin(), seen.end()) == 0) return Clock::duration::max();
  std::nth_element(seen.begin(), seen.begin() + kSeen / 2, seen.end());
  const double nanoseconds = static_cast<double>(bytes) * seen[kSeen / 2] / 1e3;
  return std::chrono::duration_cast<Clock::duration>(
      std::chrono::nanoseconds(static_cast<std::int64_t>(nanoseconds)));
}

LoadReport PagePool::load(StoreId store, const PageNumber* pages, std::size_t count,
                          const LoadOptions& options) {
  const StoreUse use(*impl_, store);
  impl_->require_rising(use.store, pages, count);
  std::uint32_t stamp = 0;
  {
    const std::lock_guard<std::mutex> lock(impl_->mutex);
    if (++impl_->load_stamps == 0) ++impl_->load_stamps;
    stamp = impl_->load_stamps;
  }
  const FramesAhead ahead(*impl_, count);
  const LoadReport report = Loader(*impl_, use.store, options, stamp).run(pages, count);
  impl_->join_small_pages();
  return report;
}

}  // namespace stoker
