// Pages on their way: who reads what, the second try, and reads that outlive their caller.
#include <algorithm>
#include <cstdlib>
#include <exception>
#include <new>
#include <utility>

#include "page_pool_impl.hpp"
#include "stoker/crc32c.hpp"

namespace stoker {
namespace {

std::uint64_t key_of(StoreId store, PageNumber page) noexcept {
  return static_cast<std::uint64_t>(store) << 32 | page;
}

}  // namespace

PageBuffer::PageBuffer(std::size_t bytes)
    : data(static_cast<std::byte*>(std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096))) {
  if (data == nullptr) throw std::bad_alloc();
}

PageBuffer::~PageBuffer() { std::free(data); }

// ---- pending pages (under the mutex) -----------------------------------------------------------

PendingRef PagePool::Impl::find_pending(const Store& store, PageNumber page) const {
  const auto found = pending.find(key_of(store.id, page));
  return found == pending.end() ? nullptr : found->second;
}

PendingRef PagePool::Impl::begin_pending(Store& store, PageNumber page, std::uint32_t frame) {
  PendingRef begun;
  try {
    begun = std::make_shared<Pending>();
    begun->store = &store;
    begun->page = page;
    begun->frame = frame;
    if (frame == kAbsent) {
      begun->buffer = std::make_shared<PageBuffer>(options.page_bytes);
      begun->bytes = begun->buffer->data;
    } else {
      begun->bytes = frame_bytes(frame);
    }
    pending.emplace(key_of(store.id, page), begun);
  } catch (...) {
    if (frame != kAbsent) put_back(frame);
    throw;
  }
  ++store.pending_count;
  return begun;
}

void PagePool::Impl::finish_pending(Pending& page, PageStatus status) {
  Store& store = *page.store;
  page.ended = true;
  page.status = status;
  if (status == PageStatus::ok) {
    ++(page.prefetch ? store.stats.prefetched_pages : store.stats.demand_pages);
    if (page.frame != kAbsent) {
      install(page.frame, page);
      if (page.wanted > 0) note_use(frames[page.frame]);
    }
  } else {
    if (page.frame != kAbsent) put_back(page.frame);
    if (status == PageStatus::corrupt) {
      store.quarantined[page.page] = true;
      ++store.stats.quarantined;
    }
  }
  for (Waiter* waiter : page.waiters) {
    if (--waiter->outstanding == 0) waiter->done.notify_one();
  }
  page.waiters.clear();
  --store.pending_count;
  if (store.removing) store_idle.notify_all();
  pending.erase(key_of(store.id, page.page));   // last: it may be the page's last reference
}

// ---- what is begun, and what is waited for ------------------------------------------------------

BegunPages::~BegunPages() {
  if (pages_.empty()) return;
  const std::lock_guard<std::mutex> lock(pool_.mutex);
  for (const PendingRef& page : pages_) {
    if (page) pool_.finish_pending(*page, PageStatus::io_error);
  }
}

void BegunPages::add(const PendingRef& page) {
  try {
    pages_.push_back(page);
  } catch (...) {
    pool_.finish_pending(*page, PageStatus::io_error);
    throw;
  }
}

void BegunPages::sort_by_place() {
  std::sort(pages_.begin(), pages_.end(), [](const PendingRef& left, const PendingRef& right) {
    return left->store != right->store ? left->store->id < right->store->id
                                       : left->page < right->page;
  });
}

std::size_t BegunPages::run_end(std::size_t first, std::size_t run_pages_max) const {
  std::size_t last = first + 1;
  while (last < pages_.size() && last - first < run_pages_max &&
         pages_[last]->store == pages_[first]->store &&
         pages_[last]->page == pages_[last - 1]->page + 1) {
    ++last;
  }
  return last;
}

std::vector<Store*> BegunPages::unprepared_stores() const {
  std::vector<Store*> stores;
  for (const PendingRef& page : pages_) {
    if (page->store->checksums.is_settled()) continue;
    if (std::find(stores.begin(), stores.end(), page->store) == stores.end()) {
      stores.push_back(page->store);
    }
  }
  return stores;
}

void BegunPages::wait_turn(std::size_t run_pages_max) {
  if (!pool_.options.volume.any() || pages_.empty()) return;
  sort_by_place();
  const auto now = Clock::now();
  auto turn = now;
  for (std::size_t first = 0; first < pages_.size();) {
    const std::size_t last = run_end(first, run_pages_max);
    const std::size_t bytes = (last - first) * pool_.options.page_bytes;
    turn = std::max(turn, pages_[first]->store->limit->take(bytes, now));
    first = last;
  }
  if (turn > now) std::this_thread::sleep_until(turn);
}

void BegunPages::submit(ReadJob& job, std::size_t run_pages_max) {
  sort_by_place();
  for (std::size_t first = 0; first < pages_.size();) {
    const std::size_t last = run_end(first, run_pages_max);
    std::vector<PendingRef> run;
    run.reserve(last - first);
    for (; first < last; ++first) run.push_back(std::move(pages_[first]));
    job.submit(std::move(run));
  }
  pages_.clear();
}

PageWait::~PageWait() {
  for (const PendingRef& page : pages_) {
    auto& waiters = page->waiters;
    waiters.erase(std::remove(waiters.begin(), waiters.end(), &waiter_), waiters.end());
  }
}

void PageWait::add(const PendingRef& page) {
  if (page->ended) return;
  pages_.push_back(page);
  page->waiters.push_back(&waiter_);
  ++waiter_.outstanding;
}

bool PageWait::until(std::unique_lock<std::mutex>& lock, const Deadline& deadline) {
  const auto all = [this] { return waiter_.outstanding == 0; };
  if (deadline) return waiter_.done.wait_until(lock, *deadline, all);
  waiter_.done.wait(lock, all);
  return true;
}

// ---- demand and prefetch -----------------------------------------------------------------------

void PagePool::Impl::demand_begins() noexcept {
  demand_seen.store(Clock::now().time_since_epoch().count(), std::memory_order_relaxed);
  demand_waiting.fetch_add(1, std::memory_order_relaxed);
}

void PagePool::Impl::demand_ends() noexcept {
  demand_seen.store(Clock::now().time_since_epoch().count(), std::memory_order_relaxed);
  if (demand_waiting.fetch_sub(1, std::memory_order_relaxed) != 1) return;
  const std::lock_guard<std::mutex> lock(demand_mutex);
  demand_idle.notify_all();
}

// ---- ReadJob -----------------------------------------------------------------------------------

ReadJob::ReadJob(PagePool::Impl& pool, bool prefetch)
    : pool_(pool), prefetch_(prefetch), queue_(pool.io.take_queue()) {}

ReadJob::~ReadJob() {
  while (!idle()) (void)step({});
  pool_.io.give_back(std::move(queue_));
}

void ReadJob::submit(std::vector<PendingRef> pages) noexcept { start(std::move(pages), false); }

void ReadJob::start(std::vector<PendingRef> pages, bool second_try) noexcept {
  const std::size_t page_bytes = pool_.options.page_bytes;
  const std::size_t length = pages.size() * page_bytes;
  std::unique_ptr<Run> run;
  try {
    run = std::make_unique<Run>();
    Store& store = *pages.front()->store;
    run->file = &store.file;
    run->offset_bytes =
        store.spec.offset_bytes + static_cast<std::uint64_t>(pages.front()->page) * page_bytes;
    run->length_bytes = length;
    run->prefetch = prefetch_;
    run->second_try = second_try;
    for (const PendingRef& page : pages) {
      // Frames that happen to be neighbors make one part.
      if (!run->parts.empty()) {
        iovec& last = run->parts.back();
        if (static_cast<std::byte*>(last.iov_base) + last.iov_len == page->bytes) {
          last.iov_len += page_bytes;
          continue;
        }
      }
      run->parts.push_back({page->bytes, page_bytes});
    }
    run->index = runs_.size();
    if (runs_.size() == runs_.capacity()) runs_.reserve(std::max<std::size_t>(16, 2 * run->index));
    queue_->submit(*run);
  } catch (...) {
    // Nothing is out; others may be waiting for these pages.
    end_pages(pages.data(), pages.size(), PageStatus::io_error);
    return;
  }
  run->pages = std::move(pages);
  runs_.push_back(std::move(run));
  inflight_bytes_ += length;
  bytes_ += length;
  ++reads_;
  (prefetch_ ? pool_.prefetch_reads : pool_.demand_reads).fetch_add(1, std::memory_order_relaxed);
  (prefetch_ ? pool_.prefetch_bytes : pool_.demand_bytes)
      .fetch_add(length, std::memory_order_relaxed);
}

bool ReadJob::step(const Deadline& until) {
  ReadRequest* request = queue_->wait(until, !prefetch_);
  if (request == nullptr) return false;
  const std::size_t index = static_cast<Run*>(request)->index;
  const std::unique_ptr<Run> run = std::move(runs_[index]);
  if (index + 1 != runs_.size()) {
    runs_[index] = std::move(runs_.back());
    runs_[index]->index = index;
  }
  runs_.pop_back();
  inflight_bytes_ -= run->length_bytes;
  end_run(*run);
  return true;
}

bool ReadJob::take_arrived() {
  // A moment long past: a request that has to be issued again is nothing to wait for.
  while (queue_->ready() && step(Clock::time_point{})) {
  }
  // What had no room at the device has it now.
  queue_->flush();
  return idle();
}

// A page that failed is read once more, alone; its second failure is final.
void ReadJob::end_run(Run& run) noexcept {
  PendingRef* const pages = run.pages.data();
  const std::size_t count = run.pages.size();
  std::size_t good = 0;   // pages in front that are sound
  PageStatus failure = PageStatus::io_error;
  if (run.error == 0) {
    const std::size_t page_bytes = pool_.options.page_bytes;
    const auto sound = [page_bytes](const PendingRef& page) {
      Store& store = *page->store;
      return store.checksums.match(store.file, page->page, crc32c(page->bytes, page_bytes));
    };
    try {
      good = static_cast<std::size_t>(std::partition(pages, pages + count, sound) - pages);
      failure = PageStatus::corrupt;
    } catch (const std::bad_alloc&) {
      // No memory for the table of checksums: nothing is known to be sound, nor to be damaged.
    }
    end_pages(pages, good, PageStatus::ok);
  }
  if (good == count) return;
  {
    const std::lock_guard<std::mutex> lock(pool_.mutex);
    if (failure == PageStatus::corrupt) {
      pool_.totals.checksum_failures += count - good;
    } else {
      ++pool_.totals.io_errors;
    }
  }
  for (std::size_t i = good; i < count; ++i) {
    std::vector<PendingRef> alone;
    try {
      if (!run.second_try) alone.reserve(1);
    } catch (const std::bad_alloc&) {
      // It ends with its first failure.
    }
    if (alone.capacity() == 0) {
      // Only a second look may call a page damaged.
      end_pages(pages + i, 1, run.second_try ? failure : PageStatus::io_error);
    } else {
      alone.push_back(std::move(pages[i]));
      start(std::move(alone), true);
    }
  }
}

void ReadJob::end_pages(const PendingRef* pages, std::size_t count, PageStatus status) noexcept {
  if (count == 0) return;
  const std::lock_guard<std::mutex> lock(pool_.mutex);
  for (std::size_t i = 0; i < count; ++i) pool_.finish_pending(*pages[i], status);
  (status == PageStatus::ok ? pages_ok_ : pages_failed_) += count;
}

void ReadJob::forget_sticky() {
  const std::lock_guard<std::mutex> lock(pool_.mutex);
  for (const auto& run : runs_) {
    for (const PendingRef& page : run->pages) page->sticky = false;
  }
}

std::size_t ReadJob::pages_out() const noexcept {
  std::size_t pages = 0;
  for (const auto& run : runs_) pages += run->pages.size();
  return pages;
}

// ---- reads that outlive their caller -----------------------------------------------------------

void PagePool::Impl::adopt(std::unique_ptr<ReadJob> job) {
  try {
    std::list<std::unique_ptr<ReadJob>> one;
    one.push_back(std::move(job));
    const std::lock_guard<std::mutex> lock(orphan_mutex);
    if (!orphan_thread.joinable()) orphan_thread = std::thread([this] { reap_orphans(); });
    orphans.splice(orphans.end(), one);
    orphan_ready.notify_one();
  } catch (const std::exception&) {
    // No thread to be had: late is better than memory that the device still writes to. The job's
    // end, wherever it is by now, waits for its reads.
    job.reset();
  }
}

void PagePool::Impl::reap_orphans() {
  std::list<std::unique_ptr<ReadJob>> mine;
  for (;;) {
    {
      std::unique_lock<std::mutex> lock(orphan_mutex);
      if (mine.empty()) {
        orphan_ready.wait(lock, [this] { return stopping || !orphans.empty(); });
        if (orphans.empty()) return;
      }
      mine.splice(mine.end(), orphans);
    }
    // In turns, so that no job waits for the slowest one.
    for (auto& job : mine) {
      Deadline until = Clock::now() + std::chrono::milliseconds(1);
      while (!job->idle() && job->step(until)) {
      }
    }
    mine.remove_if([](const auto& job) { return job->idle(); });
  }
}

}  // namespace stoker
