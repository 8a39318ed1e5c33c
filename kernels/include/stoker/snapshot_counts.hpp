// Counts who reads which version of something that is replaced while it is read.
//
// A version lives in a slot. Readers take the slot of the present version and give it back, without
// a lock and without waiting for a writer; a writer fills a free slot, publishes it, and hears which
// slots nobody can look at any more. What a slot stands for is the owner's: it is written before
// `publish` and may be destroyed once `publish` or `reclaim` has named it.
//
// Why it is exact: a reader counts itself and then looks whether the slot is still the present one;
// a writer makes another one present and then looks at the counts. All four are sequentially
// consistent, so of two that meet at least one sees the other. A reader that came too late takes its
// count back and tries again; a writer that sees such a count keeps the slot until its next look.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

namespace stoker {

class SnapshotCounts {
 public:
  using Slot = std::uint32_t;

  // Slot 0 is present.
  SnapshotCounts();
  SnapshotCounts(const SnapshotCounts&) = delete;
  SnapshotCounts& operator=(const SnapshotCounts&) = delete;

  // Takes a reference to the present version. Any thread.
  Slot acquire() {
    return acquire([] {});
  }

  // The same; `before_count` runs between the look at what is present and the count (tests).
  template <class Before>
  Slot acquire(Before before_count) {
    for (;;) {
      const Slot slot = present_.load();
      before_count();
      std::atomic<std::uint64_t>& count = at(slot);
      count.fetch_add(1);
      if (present_.load() == slot) return slot;
      count.fetch_sub(1);
    }
  }

  // Gives a reference back. Any thread. Throws BadInput where none is counted, and counts on.
  void release(Slot slot);

  // A slot for the next version; the same one until it is published. One writer at a time.
  Slot vacant();

  // Makes the vacant slot the present one, and reclaims. One writer at a time. Throws BadInput for
  // any other slot.
  std::vector<Slot> publish(Slot slot);

  // Names the superseded slots that nobody holds; each is named once. One writer at a time.
  std::vector<Slot> reclaim();

  // References that are counted now: exact at rest, else as of some moment of the call. Throws
  // BadInput for a slot that never was.
  std::uint64_t references(Slot slot) const;

 private:
  // Slots come in segments that double, so that a count never moves while readers look at it.
  static constexpr std::uint32_t kFirst = 64;
  static constexpr std::uint32_t kSegments = 20;
  struct alignas(64) Count {  // a line each: readers of one version do not slow those of another
    std::atomic<std::uint64_t> value{0};
  };

  static std::uint32_t segment_of(Slot slot);
  std::atomic<std::uint64_t>& at(Slot slot) const;

  std::atomic<Slot> present_{0};
  std::array<std::unique_ptr<Count[]>, kSegments> segments_;
  // What follows is the writer's.
  std::atomic<Slot> slots_{1};  // read by `references` too
  std::vector<Slot> past_;
  std::vector<Slot> vacant_;
};

}  // namespace stoker
