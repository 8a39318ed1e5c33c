// Memory for frames: when the system gives it, and when it gets it back.
#include <sys/mman.h>

#include <algorithm>
#include <functional>
#include <system_error>

#include "page_pool_impl.hpp"

namespace stoker {
namespace {

#ifdef MADV_POPULATE_WRITE
constexpr int kPopulate = MADV_POPULATE_WRITE;
#else
constexpr int kPopulate = 23;   // Linux 5.14; an older kernel refuses it, and nothing is lost
#endif

constexpr std::size_t kStep = 2u << 20;
// Smaller loads end before a thread has begun.
constexpr std::size_t kWorthBytes = 4 * kStep;
// The reads under way come first; what is far ahead of them would only be cached for nothing.
constexpr std::size_t kGapBytes = 2 * kStep;
constexpr std::size_t kAheadBytes = 32 * kStep;
constexpr auto kLook = std::chrono::milliseconds(2);

}  // namespace

// Frames that no page is in need no memory until their next use; they go to the far end of the
// free list.
void PagePool::Impl::give_memory_back() noexcept {
  std::sort(free_frames.begin(), free_frames.end(), std::greater<>());
  constexpr std::size_t kSystemPage = 4096;
  if (options.page_bytes % kSystemPage != 0) return;
  for (std::size_t i = 0; i < free_frames.size();) {
    std::size_t j = i + 1;
    while (j < free_frames.size() && free_frames[j] + 1 == free_frames[j - 1]) ++j;
    ::madvise(frame_bytes(free_frames[j - 1]), (j - i) * options.page_bytes, MADV_DONTNEED);
    i = j;
  }
}

void PagePool::Impl::join_small_pages() noexcept {
  if (small_joined.exchange(true)) return;
  ::madvise(frame_bytes(1), small_bytes, MADV_HUGEPAGE);
}

FramesAhead::FramesAhead(PagePool::Impl& owner, std::size_t pages) : pool_(owner) {
  const std::size_t page_bytes = owner.options.page_bytes;
  if (pages * page_bytes < kWorthBytes) return;
  {
    const std::lock_guard<std::mutex> lock(owner.mutex);
    const std::size_t frames = std::min<std::size_t>(owner.capacity, owner.frames_begun + pages);
    end_bytes_ = frames * page_bytes;
  }
  try {
    thread_ = std::thread([this] { work(); });
  } catch (const std::system_error&) {
    // The reads give the frames their memory themselves.
  }
}

FramesAhead::~FramesAhead() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    over_ = true;
  }
  ended_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void FramesAhead::work() {
  std::byte* const first = pool_.frame_bytes(1);
  std::unique_lock<std::mutex> lock(mutex_);
  std::size_t next = 0;
  while (!over_) {
    std::size_t begun = 0;
    {
      const std::lock_guard<std::mutex> pool_lock(pool_.mutex);
      begun = pool_.frames_begun * pool_.options.page_bytes;
    }
    next = std::max(next, (begun + kGapBytes) / kStep * kStep);
    if (next >= end_bytes_) return;
    if (next >= begun + kAheadBytes) {
      ended_.wait_for(lock, kLook);
      continue;
    }
    lock.unlock();
    const bool given = ::madvise(first + next, std::min(kStep, end_bytes_ - next), kPopulate) == 0;
    lock.lock();
    if (!given) return;
    next += kStep;
  }
}

}  // namespace stoker
