// Counts of a snapshot's readers stay exact: by steps in a forced order, and with readers and a
// writer at full speed, where what a slot stands for is plain memory that a sanitizer watches.
#include <atomic>
#include <cstdint>
#include <thread>
#include <unordered_set>
#include <vector>

#include "check.hpp"
#include "stoker/errors.hpp"
#include "stoker/snapshot_counts.hpp"

using namespace stoker;
using Slots = std::vector<SnapshotCounts::Slot>;

namespace {

void a_held_version_is_not_reclaimed() {
  SnapshotCounts counts;
  const auto first = counts.acquire();
  CHECK_EQ(counts.acquire(), first);
  CHECK_EQ(counts.references(first), 2u);
  const auto second = counts.vacant();
  CHECK_EQ(counts.vacant(), second);
  CHECK(second != first);
  CHECK(counts.publish(second).empty());
  CHECK_EQ(counts.acquire(), second);
  counts.release(first);
  CHECK(counts.reclaim().empty());
  counts.release(first);
  CHECK(counts.reclaim() == Slots{first});
  CHECK(counts.reclaim().empty());  // named once
  CHECK_EQ(counts.vacant(), first);
  counts.release(second);
  CHECK_EQ(counts.references(second), 0u);
}

void wrong_slots_are_refused() {
  SnapshotCounts counts;
  CHECK_THROWS(counts.release(0), BadInput, "not held");
  CHECK_EQ(counts.references(0), 0u);
  CHECK_THROWS(counts.release(7), BadInput, "never was");
  CHECK_THROWS(counts.references(7), BadInput, "never was");
  CHECK_THROWS(counts.publish(0), BadInput, "vacant");
}

void a_version_that_went_before_it_was_counted_is_not_given() {
  SnapshotCounts counts;
  bool written = false;
  SnapshotCounts::Slot second = 0;
  Slots gone;
  const auto slot = counts.acquire([&] {
    if (written) return;
    written = true;
    second = counts.vacant();
    gone = counts.publish(second);
  });
  CHECK(gone == Slots{0});
  CHECK_EQ(slot, second);
  CHECK_EQ(counts.references(0), 0u);
  CHECK_EQ(counts.references(second), 1u);
}

// The slot is present again, for a newer version: then that is what was taken.
void a_slot_that_came_back_is_the_newest_version() {
  SnapshotCounts counts;
  bool written = false;
  const auto slot = counts.acquire([&] {
    if (written) return;
    written = true;
    const auto second = counts.vacant();
    CHECK(counts.publish(second) == Slots{0});
    CHECK_EQ(counts.vacant(), 0u);
    CHECK(counts.publish(0) == Slots{second});
  });
  CHECK_EQ(slot, 0u);
  CHECK_EQ(counts.references(0), 1u);
  const auto next = counts.vacant();
  CHECK(counts.publish(next).empty());
}

void many_held_at_once() {
  SnapshotCounts counts;
  Slots held;
  for (int i = 0; i < 1'000; ++i) {
    held.push_back(counts.acquire());
    CHECK(counts.publish(counts.vacant()).empty());
  }
  CHECK_EQ((std::unordered_set<SnapshotCounts::Slot>(held.begin(), held.end()).size()), 1'000u);
  for (const auto slot : held) CHECK_EQ(counts.references(slot), 1u);
  for (const auto slot : held) counts.release(slot);
  CHECK_EQ(counts.reclaim().size(), 1'000u);
}

// The writer fills and wipes the words of a slot without any care but the counts'. One word read
// torn, wiped or by a race that a sanitizer sees is a fault; so is a count that is not 0 at rest.
void readers_and_a_writer_at_full_speed() {
  constexpr int kWords = 8;
  constexpr std::uint64_t kVersions = 20'000;
  struct Version {
    std::uint64_t words[kWords] = {};
  };
  SnapshotCounts counts;
  std::vector<Version> at(4'096);
  for (auto& word : at[0].words) word = 1;
  std::atomic<bool> stop{false};
  std::atomic<std::uint64_t> reads{0};
  std::vector<std::thread> readers;
  for (int r = 0; r < 4; ++r) {
    readers.emplace_back([&] {
      std::uint64_t last = 0;
      std::uint64_t mine = 0;
      while (!stop.load() || mine == 0) {
        const auto slot = counts.acquire();
        const auto again = counts.acquire();  // perhaps a newer one, never an older
        const std::uint64_t version = at[slot].words[0];
        const std::uint64_t newer = at[again].words[0];
        CHECK(version >= last && version != 0);
        CHECK(newer >= version);
        for (const auto word : at[slot].words) CHECK_EQ(word, version);
        CHECK(counts.references(slot) >= 1);
        counts.release(again);
        counts.release(slot);
        last = newer;
        ++mine;
      }
      reads.fetch_add(mine);
    });
  }
  std::uint64_t reclaimed = 0;
  for (std::uint64_t version = 2; version <= kVersions; ++version) {
    const auto slot = counts.vacant();
    CHECK(slot < at.size());
    for (auto& word : at[slot].words) word = version;
    for (const auto gone : counts.publish(slot)) {
      for (auto& word : at[gone].words) word = 0;
      ++reclaimed;
    }
  }
  stop.store(true);
  for (auto& reader : readers) reader.join();
  reclaimed += counts.reclaim().size();
  CHECK_EQ(reclaimed, kVersions - 1);  // all but the present one, each once
  for (SnapshotCounts::Slot slot = 0; slot <= counts.vacant(); ++slot) {
    CHECK_EQ(counts.references(slot), 0u);
  }
  std::printf("%llu reads\n", static_cast<unsigned long long>(reads.load()));
}

}  // namespace

int main() {
  RUN(a_held_version_is_not_reclaimed);
  RUN(wrong_slots_are_refused);
  RUN(a_version_that_went_before_it_was_counted_is_not_given);
  RUN(a_slot_that_came_back_is_the_newest_version);
  RUN(many_held_at_once);
  RUN(readers_and_a_writer_at_full_speed);
  return 0;
}
