#include "stoker/read_limit.hpp"

#include <algorithm>
#include <vector>

namespace stoker {
namespace {

using namespace std::chrono_literals;

// A little is left for what is not read through a pool, and for clocks that differ.
constexpr double kShare = 0.95;
constexpr double kReadBytesMax = 256u << 10;   // a longer read counts as several
// How far reads may run ahead: what a volume left idle gives at once. With the share it makes little
// more than the volume gives in a tenth of a second, the slice that the kernel's throttle counts in.
constexpr auto kDemandAhead = 10ms;
constexpr auto kLoadAhead = 4ms;
// A load is sure of this part while demand is about, however much it asks for. Without it
// demand took the volume in one small read after the other, and the navigation set at a million rows
// took 2.2 times its bytes over the bandwidth; with more, answers waited.
constexpr double kLoadShare = 0.75;

double cost_s(double rate) noexcept { return rate > 0 ? 1 / (rate * kShare) : 0; }

Clock::duration to_duration(double seconds) noexcept {
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

struct Shared {
  dev_t device;
  VolumeLimits limits;
  std::weak_ptr<ReadLimit> limit;
};

}  // namespace

ReadLimit::ReadLimit(const VolumeLimits& limits) noexcept
    : read_s_(cost_s(limits.reads_s)), byte_s_(cost_s(limits.bytes_s)) {}

std::shared_ptr<ReadLimit> ReadLimit::of_device(dev_t device, const VolumeLimits& limits) {
  static std::mutex mutex;
  static std::vector<Shared> known;
  const std::lock_guard<std::mutex> lock(mutex);
  known.erase(std::remove_if(known.begin(), known.end(),
                             [](const Shared& each) { return each.limit.expired(); }),
              known.end());
  for (const Shared& each : known) {
    if (each.device != device || each.limits.reads_s != limits.reads_s ||
        each.limits.bytes_s != limits.bytes_s) {
      continue;
    }
    if (auto limit = each.limit.lock()) return limit;
  }
  auto limit = std::make_shared<ReadLimit>(limits);
  known.push_back({device, limits, limit});
  return limit;
}

ReadLimit::Cost ReadLimit::cost_of(std::size_t bytes) const noexcept {
  const double size = static_cast<double>(bytes);
  return {to_duration(std::max(1.0, size / kReadBytesMax) * read_s_), to_duration(size * byte_s_)};
}

Clock::time_point ReadLimit::take_locked(const Cost& cost, Clock::time_point now) noexcept {
  const auto begins = std::max(now, given() - kDemandAhead);
  reads_until_ = std::max(reads_until_, begins) + cost.reads;
  bytes_until_ = std::max(bytes_until_, begins) + cost.bytes;
  return begins;
}

Clock::time_point ReadLimit::take(std::size_t bytes, Clock::time_point now) noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  return take_locked(cost_of(bytes), now);
}

void ReadLimit::take_for_load(std::size_t bytes, Clock::time_point now) noexcept {
  const Cost cost = cost_of(bytes);
  const std::lock_guard<std::mutex> lock(mutex_);
  (void)take_locked(cost, now);
  const double longer = std::chrono::duration<double>(std::max(cost.reads, cost.bytes)).count();
  load_until_ = std::max(load_until_, now) + to_duration(longer / kLoadShare);
}

void ReadLimit::take_alone(std::size_t bytes, Clock::time_point now) noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  (void)take_locked(cost_of(bytes), now);
  reads_until_ = std::min(reads_until_, now + kDemandAhead);
  bytes_until_ = std::min(bytes_until_, now + kDemandAhead);
}

Clock::time_point ReadLimit::given() const noexcept { return std::max(reads_until_, bytes_until_); }

Clock::time_point ReadLimit::demand_turn() const noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  return given() - kDemandAhead;
}

Clock::time_point ReadLimit::load_turn() const noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::min(given(), load_until_) - kLoadAhead;
}

}  // namespace stoker
