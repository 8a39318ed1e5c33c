// What is let off was earned: over any run the tokens spent never exceed those that queries brought
// in by more than the bucket holds, at once from several threads too, and a lenient target earns
// nothing for a strict one.
#include <algorithm>
#include <cstdio>
#include <random>
#include <thread>
#include <vector>

#include "check.hpp"
#include "stoker/loss_credit.hpp"

using namespace stoker;

namespace {

void spends_what_was_earned(std::mt19937& rng) {
  for (const double allowed : {0.25, 0.025, 0.0025}) {
    LossCredit credit;
    std::uniform_real_distribution<double> kind(0, 1);
    double lost = 0;
    std::size_t queries = 0;
    std::size_t let_off = 0;
    for (int i = 0; i < 20'000; ++i) {
      // Most are sure, some are in doubt; now and then a long run of doubt, then of sureness.
      const double doubtful = i / 2'000 % 2 == 0 ? 0.02 : 0.6;
      const double loss = kind(rng) < doubtful ? allowed * (1 + 5 * kind(rng))
                                               : allowed * 0.5 * kind(rng);
      ++queries;
      if (loss > allowed && credit.spend(loss, allowed)) {
        credit.settle(0, allowed);
        lost += loss;
        ++let_off;
      } else {
        // One that reads ends sure.
        credit.settle(std::min(loss, allowed * 0.5), allowed);
      }
      const double earned = static_cast<double>(queries) + LossCredit::kCreditMax;
      CHECK(lost <= allowed * earned * (1 + 1e-9));
    }
    std::printf("allowed %.4f: %zu of %zu let off, mean loss of those %.5f a query\n", allowed,
                let_off, queries, lost / static_cast<double>(queries));
    CHECK(let_off > 100);
  }
}

void begins_full_and_forgets(std::mt19937&) {
  LossCredit credit;
  for (const bool later : {false, true}) {
    // A long sure time buys no more than the bucket holds, which is what it began with.
    for (int i = 0; later && i < 10'000; ++i) credit.settle(0, 0.025);
    std::size_t bought = 0;
    while (credit.spend(0.05, 0.025)) ++bought;
    CHECK(bought == static_cast<std::size_t>(LossCredit::kCreditMax / 2 - LossCredit::kShare) + 1);
  }
  for (int i = 0; i < 10'000; ++i) credit.settle(1, 0.025);   // nor is there debt for ever
  for (int i = 0; i < 10; ++i) credit.settle(0, 0.025);
  CHECK(credit.spend(0.05, 0.025));
}

// Of many queries in more doubt than the mean allows, those in most doubt read: nearly as few as
// there can be, whatever the order they come in.
void lets_the_surest_off(std::mt19937& rng) {
  constexpr double kAllowed = 0.05;
  constexpr std::size_t kQueries = 20'000;
  std::exponential_distribution<double> doubt(1 / (1.3 * kAllowed));
  std::vector<double> losses(kQueries);
  for (double& loss : losses) loss = doubt(rng);
  LossCredit credit;
  std::size_t read = 0;
  for (const double loss : losses) {
    const bool off = credit.spend(loss, kAllowed);
    credit.settle(0, kAllowed);
    read += off ? 0 : 1;
  }
  std::sort(losses.begin(), losses.end());
  double lost = 0;
  std::size_t spared = 0;
  while (spared < kQueries && lost <= kAllowed * kQueries) lost += losses[spared++];
  std::printf("%zu of %zu read, at least %zu have to\n", read, kQueries, kQueries - spared);
  CHECK(read < 3 * (kQueries - spared) / 2);
}

// However they lie in time: where the mean is below what is allowed, all are let off, from the
// first on.
void who_lacks_less_than_is_allowed_is_let_off(std::mt19937& rng) {
  for (int round = 0; round < 200; ++round) {
    std::gamma_distribution<double> doubt(4, 0.05 * 0.8 / 4);
    LossCredit credit;
    for (int i = 0; i < 200; ++i) {
      const double loss = doubt(rng);
      CHECK(credit.spend(loss, 0.05));
      credit.settle(0, 0.05);
    }
  }
}

void keeps_targets_apart(std::mt19937&) {
  LossCredit credit;
  for (int i = 0; i < 1'000; ++i) credit.settle(1, 0.01);   // a full bucket would do for both
  for (int i = 0; i < 1'000; ++i) credit.settle(0, 0.1);
  CHECK(!credit.spend(0.011, 0.01));
  CHECK(credit.spend(0.11, 0.1));
  for (const double odd : {0.0, -1.0, std::nan("")}) {
    credit.settle(0, odd);
    CHECK(!credit.spend(0, odd));
    CHECK(!credit.spend(odd == 0.0 ? std::nan("") : odd, 0.1));
  }
  for (const double allowed : {1e-300, 1e-9, 1.0, 7.0}) {   // beyond the table's ends
    for (int i = 0; i < 10; ++i) credit.settle(0, allowed);
    CHECK(credit.spend(allowed, allowed));
  }
}

void threads_share_it(std::mt19937&) {
  LossCredit credit;
  constexpr double kAllowed = 0.125;   // sums of these are exact
  constexpr int kEach = 50'000;
  std::vector<std::size_t> let_off(4, 0);
  std::vector<std::thread> threads;
  for (std::size_t t = 0; t < let_off.size(); ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < kEach; ++i) {
        const bool off = credit.spend(2 * kAllowed, kAllowed);
        let_off[t] += off ? 1 : 0;
        credit.settle(off ? 0 : kAllowed, kAllowed);
        if (i % 3 == 0) credit.settle(0, kAllowed);
      }
    });
  }
  const auto full = static_cast<std::size_t>(LossCredit::kCreditMax);
  for (std::thread& thread : threads) thread.join();
  std::size_t spent = 0;
  for (const std::size_t part : let_off) spent += 2 * part;
  const std::size_t earned = let_off.size() * ((kEach + 2) / 3) + spent / 2;
  CHECK(spent <= earned + full);
  CHECK(spent > earned / 2);
}

}  // namespace

int main() {
  const unsigned seed = 20261129;
  std::printf("seed %u\n", seed);
  std::mt19937 rng(seed);
  spends_what_was_earned(rng);
  begins_full_and_forgets(rng);
  lets_the_surest_off(rng);
  who_lacks_less_than_is_allowed_is_let_off(rng);
  keeps_targets_apart(rng);
  threads_share_it(rng);
  return 0;
}
