// Reads kept under what a volume gives, where its owner says how much that is.
//
// A rented volume has a bound on reads and one on bytes a second, and whoever runs into it waits,
// for a tenth of a second at a time where the kernel's throttle sets it: a few reads come very late,
// and which ones nobody chose. Under a limit reads come evenly, demand before loads.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <memory>
#include <mutex>

#include "stoker/page_io.hpp"

namespace stoker {

struct VolumeLimits {
  double reads_s = 0;   // reads a second, as volumes count them: of 256 KiB at most; 0: no bound
  double bytes_s = 0;   // 0: no bound
  bool any() const noexcept { return reads_s > 0 || bytes_s > 0; }
};

// The generic cell rate algorithm (ITU-T I.371, virtual scheduling), once for reads and once for
// bytes: a clock runs ahead of the time by what was taken and not yet given. Thread-safe.
class ReadLimit {
 public:
  explicit ReadLimit(const VolumeLimits& limits) noexcept;
  // The one that all files on a device share, in all pools of the process that state these limits.
  static std::shared_ptr<ReadLimit> of_device(dev_t device, const VolumeLimits& limits);

  // Takes a read's share; it may begin at the moment returned, if it is one that somebody waits for.
  Clock::time_point take(std::size_t bytes, Clock::time_point now = Clock::now()) noexcept;
  // When a read of demand that took its share now could begin.
  Clock::time_point demand_turn() const noexcept;
  // As take(), for a read that nobody waits for.
  void take_for_load(std::size_t bytes, Clock::time_point now = Clock::now()) noexcept;
  // Notes a load's read while nobody else is about: the volume itself says when it comes, and whoever
  // asks next does not wait for it here.
  void take_alone(std::size_t bytes, Clock::time_point now = Clock::now()) noexcept;
  // When a load may take its next share: of what demand leaves, and of a part that it is sure of.
  Clock::time_point load_turn() const noexcept;

 private:
  struct Cost {
    Clock::duration reads, bytes;
  };
  Cost cost_of(std::size_t bytes) const noexcept;
  Clock::time_point take_locked(const Cost& cost, Clock::time_point now) noexcept;
  Clock::time_point given() const noexcept;

  const double read_s_;   // of the volume's time, by either bound
  const double byte_s_;
  mutable std::mutex mutex_;
  Clock::time_point reads_until_;
  Clock::time_point bytes_until_;
  Clock::time_point load_until_;   // at its part of the volume
};

}  // namespace stoker
