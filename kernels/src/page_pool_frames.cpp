// Frames: who gets one, whose is taken, and when it may be used again.
//
// Reclamation is by epochs; source: Fraser, "Practical lock-freedom", 2004, section 5.2.3. Ours
// has one reader slot a guard instead of three generations of lists.
#include <algorithm>

#include "page_pool_impl.hpp"

namespace stoker {
namespace {

constexpr std::uint32_t kAheadMax = 256;
// Frames lie idle while at least one in so many is free.
constexpr std::uint32_t kIdleShare = 8;

std::uint32_t thread_number() noexcept {
  static std::atomic<std::uint32_t> threads{0};
  thread_local const std::uint32_t number = threads.fetch_add(1, std::memory_order_relaxed);
  return number;
}

}  // namespace

// ---- readers -----------------------------------------------------------------------------------
//
// A guard stores its epoch, then loads translations; an evictor stores kAbsent, then loads the
// guards' epochs. All four are sequentially consistent: at least one side sees the other.

PagePool::ReadGuard::ReadGuard(const PagePool& pool) noexcept : pool_(pool), slot_(kNoSlot) {
  Impl& impl = *pool.impl_;
  const std::uint64_t now = impl.epoch.load(std::memory_order_seq_cst);
  const std::uint32_t first = thread_number() % kReaderSlots;
  for (std::uint32_t tries = 0; tries < kReaderSlots; ++tries) {
    const std::uint32_t slot = (first + tries) % kReaderSlots;
    std::uint32_t used = impl.reader_slots_used.load(std::memory_order_seq_cst);
    while (used <= slot && !impl.reader_slots_used.compare_exchange_weak(used, slot + 1)) {
    }
    std::atomic<std::uint64_t>& announced = impl.readers[slot].epoch;
    std::uint64_t nobody = 0;
    if (announced.load(std::memory_order_relaxed) == 0 &&
        announced.compare_exchange_strong(nobody, now, std::memory_order_seq_cst)) {
      slot_ = slot;
      return;
    }
  }
  impl.readers_without_slot.fetch_add(1, std::memory_order_seq_cst);
}

PagePool::ReadGuard::~ReadGuard() {
  if (slot_ == kNoSlot) {
    pool_.impl_->readers_without_slot.fetch_sub(1, std::memory_order_release);
  } else {
    pool_.impl_->readers[slot_].epoch.store(0, std::memory_order_release);
  }
}

std::uint64_t PagePool::Impl::oldest_reader() const noexcept {
  if (readers_without_slot.load(std::memory_order_seq_cst) > 0) return 0;
  std::uint64_t oldest = UINT64_MAX;
  const std::uint32_t used = reader_slots_used.load(std::memory_order_seq_cst);
  for (std::uint32_t slot = 0; slot < used; ++slot) {
    const std::uint64_t announced = readers[slot].epoch.load(std::memory_order_seq_cst);
    if (announced != 0) oldest = std::min(oldest, announced);
  }
  return oldest;
}

// ---- the life of a frame -----------------------------------------------------------------------

std::uint32_t PagePool::Impl::take_frame(bool evict, std::uint32_t spare) {
  const auto used = [this] { return resident_count + reading_count + limbo_count; };
  const auto room = [&] { return used() < capacity; };
  const std::uint32_t ahead = std::clamp<std::uint32_t>(capacity / 64, 1, kAheadMax);
  const auto evict_some = [&](std::uint32_t most) {
    while (most > 0 && evict_one(spare)) --most;
  };
  if (pressed && evict) {
    // Evict before the last frame is gone: what lies in limbo needs time until readers let it go.
    const std::uint32_t spare_frames = capacity > used() ? capacity - used() : 0;
    if (spare_frames > 2 * ahead) {
      pressed = false;
    } else if (spare_frames + limbo_count < ahead / 2) {
      evict_some(2);
    }
  }
  if (!room()) reclaim();
  if (!room() && evict) {
    pressed = true;
    if (limbo_count < 2 * ahead) evict_some(ahead);
    reclaim();
  }
  if (!room()) return kAbsent;
  const std::uint32_t frame = free_frames.empty() ? ++frames_begun : free_frames.pop();
  frames[frame].state = FrameState::reading;
  ++reading_count;
  return frame;
}

void PagePool::Impl::install(std::uint32_t frame, const Pending& arrived) {
  Frame& entry = frames[frame];
  Store& store = *arrived.store;
  entry.pins.store(arrived.wanted, std::memory_order_relaxed);
  entry.store = store.id;
  entry.page = arrived.page;
  entry.load_stamp = arrived.load_stamp;
  entry.state = FrameState::resident;
  entry.sticky = arrived.sticky;
  entry.prefetched = arrived.prefetch;
  --reading_count;
  ++resident_count;
  ++store.stats.resident;
  if (entry.sticky) {
    ++store.stats.sticky;
  } else {
    const bool proves_itself = arrived.weight == 0 && !returns_soon(store, arrived.page);
    ring_insert(frame, proves_itself ? RingName::probation : RingName::proven);
  }
  std::uint32_t& ghost = store.failed_probation[arrived.page];
  if (ghost != 0) ghost = 0;   // a write would give memory to a part that may never need any
  clock[frame].store(arrived.weight, std::memory_order_relaxed);
  store.table[arrived.page].store(frame, std::memory_order_seq_cst);
}

bool PagePool::Impl::leaves_idle(std::uint32_t more) const {
  const std::uint64_t used = std::uint64_t{resident_count} + reading_count + limbo_count + more;
  return used + capacity / kIdleShare <= capacity;
}

void PagePool::Impl::put_back(std::uint32_t frame) {
  frames[frame].state = FrameState::free;
  --reading_count;
  free_frames.push(frame);
}

void PagePool::Impl::evict_frame(std::uint32_t frame) {
  Frame& entry = frames[frame];
  Store& store = store_of(entry);
  if ((clock[frame].load(std::memory_order_relaxed) & kTouchedBit) != 0) note_use(entry);
  if (entry.prefetched) ++store.stats.prefetched_unused;
  entry.prefetched = false;
  if (entry.sticky) {
    entry.sticky = false;
    --store.stats.sticky;
  } else {
    ring_remove(frame);
  }
  store.table[entry.page].store(kAbsent, std::memory_order_seq_cst);
  entry.state = FrameState::limbo;
  limbo.push({frame, epoch.fetch_add(1, std::memory_order_seq_cst)});
  --resident_count;
  ++limbo_count;
  --store.stats.resident;
  ++store.stats.evictions;
  ++totals.evictions;
}

void PagePool::Impl::reclaim() {
  if (limbo_count == 0) return;
  const std::uint64_t oldest = oldest_reader();
  const auto free_now = [this](std::uint32_t frame) {
    frames[frame].state = FrameState::free;
    free_frames.push(frame);
    --limbo_count;
  };
  while (!limbo.empty() && limbo.front().stamp < oldest) {
    const std::uint32_t frame = limbo.front().frame;
    limbo.pop();
    if (frames[frame].pins.load(std::memory_order_acquire) == 0) {
      free_now(frame);
    } else {
      limbo_pinned.push(frame);
    }
  }
  const auto still_pinned = [&](std::uint32_t frame) {
    if (frames[frame].pins.load(std::memory_order_acquire) > 0) return true;
    free_now(frame);
    return false;
  };
  const auto* freed = std::partition(limbo_pinned.begin(), limbo_pinned.end(), still_pinned);
  limbo_pinned.keep(static_cast<std::size_t>(freed - limbo_pinned.begin()));
}

}  // namespace stoker
