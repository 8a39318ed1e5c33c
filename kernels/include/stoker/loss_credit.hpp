// Keeps a mean over queries, so that the odd doubtful one need not wait for the device.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <optional>

namespace stoker {

// A recall target is a mean. Queries that end surer than it earns what others may then lack: a token
// bucket (as ATM's leaky bucket, ITU-T I.371) whose tokens are expected loss, in units of the loss
// that the mean allows. Over any run of n queries at about one target, those that were let off
// lose at most n + kCreditMax units in all, so the mean stays within (1 + kCreditMax / n) times what
// is allowed. The first queries are such a run as any other, so the bucket is full at first: who
// opens an index and asks 200 queries that lose less than is allowed waits for no read. Targets
// whose allowances differ by more than a factor of about 1.4 keep separate buckets: a lenient
// caller earns nothing for a strict one. Thread-safe.
class LossCredit {
 public:
  static constexpr double kCreditMax = 32;

  LossCredit() noexcept {
    for (std::atomic<double>& credit : credit_) credit.store(kCreditMax, std::memory_order_relaxed);
  }

  // Of what is there, one query may take a fifth. To read costs much the same whatever it spares,
  // so the queries that expect to lose most should read; the bucket then settles at the level where
  // those that may take what they ask for lose in the mean what is allowed. Were all of it given to
  // whoever comes, more would read for the same mean.
  static constexpr double kShare = 5;

  // Whether a query that expects to lose `loss` may be let off; takes its price if so.
  bool spend(double loss, double allowed) noexcept {
    if (!(allowed > 0) || !(loss >= 0)) return false;
    std::atomic<double>& credit = bucket(allowed);
    const double price = loss / allowed;
    double now = credit.load(std::memory_order_relaxed);
    while (now >= kShare * price) {
      if (credit.compare_exchange_weak(now, now - price, std::memory_order_relaxed)) return true;
    }
    return false;
  }

  // A query was answered, and expects to lose `loss`, which has not been paid for by spend().
  void settle(double loss, double allowed) noexcept {
    if (!(allowed > 0) || !(loss >= 0)) return;
    add(1.0 - loss / allowed, allowed);
  }

  // What settle(expected) said is not so: the query expects to lose `loss`, or, without one, was no
  // query that counts.
  void correct(double expected, std::optional<double> loss, double allowed) noexcept {
    if (!(allowed > 0) || !(expected >= 0) || (loss && !(*loss >= 0))) return;
    add(loss ? (expected - *loss) / allowed : expected / allowed - 1.0, allowed);
  }

 private:
  void add(double gain, double allowed) noexcept {
    std::atomic<double>& credit = bucket(allowed);
    double now = credit.load(std::memory_order_relaxed);
    double next;
    do {
      next = std::min(std::max(now + gain, 0.0), kCreditMax);
    } while (next != now &&
             !credit.compare_exchange_weak(now, next, std::memory_order_relaxed));
  }

  std::atomic<double>& bucket(double allowed) noexcept {
    const double octave = -2.0 * std::log2(std::min(allowed, 1.0));
    const auto at = static_cast<std::size_t>(std::min(std::max(octave, 0.0), 31.0));
    return credit_[at];
  }

  std::array<std::atomic<double>, 32> credit_;
};

}  // namespace stoker
