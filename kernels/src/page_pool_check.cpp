// The pool's invariants, said as code.
#include <stdexcept>
#include <string>

#include "page_pool_impl.hpp"
#include "stoker/crc32c.hpp"

namespace stoker {
namespace {

void require(bool holds, const std::string& what) {
  if (!holds) throw std::logic_error("page pool: " + what);
}

std::string name(std::uint32_t frame) { return "frame " + std::to_string(frame); }

// Frames by state, and each resident one against its store's translation and its checksum.
void check_frames(const PagePool::Impl& pool) {
  std::uint32_t counts[4] = {};
  require(pool.frames_begun <= pool.frame_count, "more frames are used than there are");
  for (std::uint32_t frame = 1; frame <= pool.frames_begun; ++frame) {
    const Frame& entry = pool.frames[frame];
    ++counts[static_cast<unsigned>(entry.state)];
    const bool on_ring = entry.ring != RingName::none;
    require(on_ring == (entry.next != kAbsent), name(frame) + " has neighbors and no ring");
    const bool resident = entry.state == FrameState::resident;
    require(on_ring == (resident && !entry.sticky), name(frame) + " is wrongly on or off the ring");
    require(resident || !entry.sticky, name(frame) + " is sticky and not resident");
    if (entry.state == FrameState::free) {
      require(entry.pins.load() == 0, name(frame) + " is free and pinned");
    }
    if (!resident) continue;
    Store* store = pool.store_or_null(entry.store);
    require(store != nullptr, name(frame) + " is of a store that is gone");
    require(store->table[entry.page].load() == frame,
            name(frame) + " holds page " + std::to_string(entry.page) + " of " +
                store->spec.path + ", which is translated elsewhere");
    const std::uint32_t crc = crc32c(pool.frame_bytes(frame), pool.options.page_bytes);
    require(store->checksums.match(store->file, entry.page, crc),
            name(frame) + " holds wrong bytes for page " + std::to_string(entry.page) + " of " +
                store->spec.path);
  }
  require(counts[0] == pool.free_frames.size(), "the free list does not list the free frames");
  require(counts[1] == pool.reading_count, "reading_count is off");
  require(counts[2] == pool.resident_count, "resident_count is off");
  require(counts[3] == pool.limbo_count, "limbo_count is off");
  require(pool.limbo_count == pool.limbo.size() + pool.limbo_pinned.size(), "limbo is miscounted");
  require(pool.resident_count + pool.reading_count <= pool.capacity, "the budget is exceeded");
  for (const std::uint32_t frame : pool.free_frames) {
    require(pool.frames[frame].state == FrameState::free, name(frame) + " is listed as free");
  }
  std::uint64_t before = 0;
  for (std::size_t i = 0; i < pool.limbo.size(); ++i) {
    const auto& entry = pool.limbo[i];
    require(pool.frames[entry.frame].state == FrameState::limbo,
            name(entry.frame) + " is listed in limbo");
    require(entry.stamp > before, "limbo is out of order");
    before = entry.stamp;
  }
}

void check_ring(const PagePool::Impl& pool, RingName which) {
  const Ring& ring = which == RingName::probation ? pool.probation : pool.proven;
  std::uint32_t steps = 0;
  if (ring.hand != kAbsent) {
    std::uint32_t at = ring.hand;
    do {
      require(pool.frames[at].state == FrameState::resident, name(at) + " is on a ring");
      require(pool.frames[at].ring == which, name(at) + " is on another ring");
      require(pool.frames[pool.frames[at].next].previous == at, "a ring is torn");
      at = pool.frames[at].next;
      require(++steps <= ring.size, "a ring is longer than its count");
    } while (at != ring.hand);
  }
  require(steps == ring.size, "a ring is shorter than its count");
}

void check_store(const PagePool::Impl& pool, const Store& store) {
  std::uint64_t resident = 0;
  std::uint64_t sticky = 0;
  std::uint64_t quarantined = 0;
  std::uint64_t unproven = 0;
  for (PageNumber page = 0; page < store.spec.page_count; ++page) {
    const std::uint32_t frame = store.table[page].load();
    if (store.quarantined[page]) ++quarantined;
    if (frame == kAbsent) continue;
    const std::string what = store.spec.path + ": page " + std::to_string(page);
    require(frame <= pool.frames_begun, what + " is translated beyond the slab");
    const Frame& entry = pool.frames[frame];
    require(entry.state == FrameState::resident && entry.store == store.id && entry.page == page,
            what + " is translated to a frame of another page");
    require(!store.quarantined[page], what + " is resident and quarantined");
    ++resident;
    if (entry.sticky) ++sticky;
    if (entry.prefetched) ++unproven;
  }
  const StoreStats& stats = store.stats;
  require(stats.resident == resident, store.spec.path + ": resident is off");
  require(stats.sticky == sticky, store.spec.path + ": sticky is off");
  require(stats.quarantined == quarantined, store.spec.path + ": quarantined is off");
  require(stats.prefetched_pages ==
              stats.prefetched_useful + stats.prefetched_unused + unproven,
          store.spec.path + ": prefetched pages are neither useful, unused nor resident");
}

void check_pending(const PagePool::Impl& pool) {
  std::uint32_t with_frame = 0;
  for (const auto& [key, page] : pool.pending) {
    const std::string what = page->store->spec.path + ": page " + std::to_string(page->page);
    require(key == (static_cast<std::uint64_t>(page->store->id) << 32 | page->page),
            what + " is pending under another page's key");
    require(!page->ended, what + " has ended and is still pending");
    require(page->store->table[page->page].load() == kAbsent, what + " is pending and resident");
    if (page->frame == kAbsent) continue;
    ++with_frame;
    require(pool.frames[page->frame].state == FrameState::reading,
            what + " is read into a frame that is in use");
  }
  require(with_frame == pool.reading_count, "a frame is being read that no page waits for");
}

}  // namespace

void PagePool::check() const {
  const std::lock_guard<std::mutex> lock(impl_->mutex);
  check_frames(*impl_);
  check_ring(*impl_, RingName::probation);
  check_ring(*impl_, RingName::proven);
  check_pending(*impl_);
  for (StoreId id = 0; id < impl_->store_count; ++id) {
    if (const Store* store = impl_->store_or_null(id)) check_store(*impl_, *store);
  }
}

}  // namespace stoker
