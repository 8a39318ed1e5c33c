#include "stoker/snapshot_counts.hpp"

#include <string>

#include "stoker/errors.hpp"

namespace stoker {

SnapshotCounts::SnapshotCounts() { segments_[0] = std::make_unique<Count[]>(kFirst); }

std::uint32_t SnapshotCounts::segment_of(Slot slot) {
  std::uint32_t segment = 0;
  for (std::uint32_t rest = slot / kFirst + 1; rest > 1; rest /= 2) ++segment;
  return segment;
}

std::atomic<std::uint64_t>& SnapshotCounts::at(Slot slot) const {
  const std::uint32_t segment = segment_of(slot);
  return segments_[segment][slot - kFirst * ((1u << segment) - 1)].value;
}

void SnapshotCounts::release(Slot slot) {
  if (slot >= slots_.load()) throw BadInput("slot " + std::to_string(slot) + " never was");
  std::atomic<std::uint64_t>& count = at(slot);
  // Not a plain subtraction: one release too many must not make a reader's reference worthless.
  std::uint64_t seen = count.load();
  do {
    if (seen == 0) throw BadInput("slot " + std::to_string(slot) + " is not held");
  } while (!count.compare_exchange_weak(seen, seen - 1));
}

SnapshotCounts::Slot SnapshotCounts::vacant() {
  if (vacant_.empty()) {
    const Slot slot = slots_.load();
    const std::uint32_t segment = segment_of(slot);
    if (segment >= kSegments) throw BadInput("more versions are held at once than can be counted");
    if (!segments_[segment]) segments_[segment] = std::make_unique<Count[]>(kFirst << segment);
    vacant_.push_back(slot);
    slots_.store(slot + 1);
  }
  return vacant_.back();
}

std::vector<SnapshotCounts::Slot> SnapshotCounts::publish(Slot slot) {
  if (vacant_.empty() || vacant_.back() != slot) {
    throw BadInput("slot " + std::to_string(slot) + " is not the vacant one");
  }
  vacant_.pop_back();
  past_.push_back(present_.load());
  present_.store(slot);
  return reclaim();
}

std::vector<SnapshotCounts::Slot> SnapshotCounts::reclaim() {
  std::vector<Slot> gone;
  std::vector<Slot> kept;
  for (const Slot slot : past_) (at(slot).load() == 0 ? gone : kept).push_back(slot);
  past_.swap(kept);
  vacant_.insert(vacant_.end(), gone.begin(), gone.end());
  return gone;
}

std::uint64_t SnapshotCounts::references(Slot slot) const {
  if (slot >= slots_.load()) throw BadInput("slot " + std::to_string(slot) + " never was");
  return at(slot).load();
}

}  // namespace stoker
