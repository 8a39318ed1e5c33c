// A volume's limits: never exceeded for long, used to the full, demand before loads, and nothing read
// for who could not have it in time. The seed is printed: run the test with it as argument.
#include <algorithm>
#include <cstdlib>
#include <random>
#include <thread>

#include "check.hpp"
#include "page_files.hpp"
#include "stoker/read_limit.hpp"

using namespace stoker;
using stoker::testing::kBackends;
using stoker::testing::TestFolder;
using namespace std::chrono_literals;

namespace {

constexpr std::size_t kPage = 4096;
constexpr double kNever = 1e-4;   // reads a second: whoever waits for a second one waits hours

struct Read {
  Clock::time_point begins;
  double bytes;
};

double seconds(Clock::duration time) { return std::chrono::duration<double>(time).count(); }

// Reads that begin within any stretch of time are no more than the volume gives in it and ahead of it.
void check_within(const std::vector<Read>& reads, const VolumeLimits& limits) {
  constexpr double ahead_s = 0.0101;
  for (std::size_t first = 0; first < reads.size(); ++first) {
    double count = 0, bytes = 0;
    for (std::size_t last = first; last < reads.size(); ++last) {
      const double time = seconds(reads[last].begins - reads[first].begins);
      // The last one has begun, and is not given yet.
      CHECK(limits.reads_s == 0 || count <= limits.reads_s * (time + ahead_s) + 1);
      CHECK(limits.bytes_s == 0 || bytes <= limits.bytes_s * (time + ahead_s) + 1);
      count += std::max(1.0, reads[last].bytes / (256u << 10));
      bytes += reads[last].bytes;
    }
  }
}

void test_no_stretch_of_time_takes_more_than_the_volume_gives(std::uint64_t seed) {
  std::printf("  seed %llu\n", static_cast<unsigned long long>(seed));
  std::fflush(stdout);
  std::mt19937_64 random(seed);
  for (int round = 0; round < 40; ++round) {
    const VolumeLimits limits{round % 3 == 0 ? 0.0 : 100.0 + static_cast<double>(random() % 10000),
                              round % 3 == 1 ? 0.0 : 1e6 + static_cast<double>(random() % 500'000'000)};
    ReadLimit limit(limits);
    auto now = Clock::now();
    std::vector<Read> reads;
    for (int i = 0; i < 400; ++i) {
      const std::size_t bytes = kPage << random() % 8;
      // One that waits asks for its next when the last has begun; others come by and by.
      const auto begins = limit.take(bytes, now);
      CHECK(begins >= (reads.empty() ? now : reads.back().begins));
      reads.push_back({begins, static_cast<double>(bytes)});
      now = random() % 2 == 0 ? begins : now + std::chrono::microseconds(random() % 2000);
    }
    check_within(reads, limits);
  }
}

// Whoever asks without pause gets nearly all that the volume gives.
void test_the_volume_is_used() {
  for (const VolumeLimits& limits : {VolumeLimits{3000, 0}, VolumeLimits{0, 125e6},
                                     VolumeLimits{3000, 125e6}}) {
    ReadLimit limit(limits);
    const auto start = Clock::now();
    auto now = start;
    for (int i = 0; i < 10'000; ++i) now = limit.take(32u << 10, now);
    const double rate = 10'000 / seconds(now - start);
    const double given = std::min(limits.reads_s > 0 ? limits.reads_s : 1e9,
                                  limits.bytes_s > 0 ? limits.bytes_s / (32u << 10) : 1e9);
    CHECK(rate <= given);
    CHECK(rate >= 0.9 * given);
  }
}

// Demand that takes all it can leaves a load its part, and a load alone has the whole.
void test_a_load_has_its_part() {
  for (const bool demand : {false, true}) {
    ReadLimit limit({0, 100e6});
    const auto start = Clock::now();
    auto now = start;
    double loaded = 0;
    while (now < start + 2s) {
      if (limit.load_turn() <= now) {
        limit.take_for_load(128u << 10, now);
        loaded += 128u << 10;
      }
      // It goes on as soon as it may: no moment without a read that somebody waits for.
      while (demand && limit.demand_turn() <= now) (void)limit.take(kPage, now);
      now += 100us;
    }
    CHECK(loaded / 2 <= 100e6);
    CHECK(loaded / 2 >= (demand ? 0.6 : 0.9) * 100e6);
    CHECK(!demand || loaded / 2 <= 0.8 * 100e6);
  }
}

void test_a_device_has_one_limit() {
  const VolumeLimits slow{10, 0};
  const auto first = ReadLimit::of_device(7, slow);
  CHECK(ReadLimit::of_device(7, slow) == first);
  CHECK(ReadLimit::of_device(8, slow) != first);
  CHECK(ReadLimit::of_device(7, {10, 1e6}) != first);
}

struct Scene {
  explicit Scene(double reads_s, IoBackend backend = IoBackend::automatic) {
    PoolOptions options;
    options.page_bytes = kPage;
    options.budget_bytes = 256 * kPage;
    options.backend = backend;
    options.volume.reads_s = reads_s;
    pool = std::make_unique<PagePool>(options);
    store = pool->add_store(folder.write("pages", 1, 200, kPage));
  }
  PageStatus fetch(PageNumber page, Deadline deadline = {}) {
    const PageRef wanted{store, page};
    return pool->fetch(&wanted, 1, deadline).status(0);
  }
  TestFolder folder;
  std::unique_ptr<PagePool> pool;
  StoreId store = 0;
};

void test_reads_wait_for_their_turn() {
  for (const IoBackend backend : kBackends) {
    Scene scene(500, backend);
    const auto start = Clock::now();
    for (PageNumber page = 0; page < 40; page += 2) CHECK(scene.fetch(page) == PageStatus::ok);
    CHECK(seconds(Clock::now() - start) >= 20.0 / 500 - 0.0125);
    scene.pool->check();
  }
}

// What the volume gives too late is not read; what is there, or on its way, is still had.
void test_nothing_is_read_for_who_has_no_time() {
  for (const IoBackend backend : kBackends) {
    Scene scene(kNever, backend);
    CHECK(scene.fetch(3) == PageStatus::ok);
    CHECK(scene.fetch(9, Clock::now() + 1min) == PageStatus::deadline);
    CHECK(scene.fetch(3, Clock::now() + 1min) == PageStatus::ok);
    CHECK_EQ(scene.pool->stats().demand_reads, 1u);
    scene.pool->check();
  }
}

// While nobody asks, the volume itself says how fast a load may be; who asks then has the next turn.
void test_a_load_alone_waits_for_nothing() {
  Scene scene(10);
  std::vector<PageNumber> pages;
  for (PageNumber page = 0; page < 200; page += 2) pages.push_back(page);
  const LoadReport report = scene.pool->load(scene.store, pages.data(), pages.size(), {});
  CHECK_EQ(report.pages_loaded, pages.size());
  CHECK(scene.fetch(1, Clock::now() + 1min) == PageStatus::ok);
  CHECK(scene.fetch(3, Clock::now()) == PageStatus::deadline);
  scene.pool->check();
}

void test_a_load_ends_with_its_time() {
  Scene scene(kNever);
  (void)scene.fetch(1);   // somebody asks, so it has to wait
  std::vector<PageNumber> pages;
  for (PageNumber page = 0; page < 200; page += 2) pages.push_back(page);
  LoadOptions options;
  options.deadline = Clock::now() + 50ms;
  const LoadReport report = scene.pool->load(scene.store, pages.data(), pages.size(), options);
  CHECK_EQ(report.pages_loaded + report.pages_not_reached, pages.size());
  CHECK(report.pages_not_reached > 0);
  scene.pool->check();
}

// Pools of one process share what a volume gives.
void test_pools_share_a_volume() {
  Scene first(kNever), second(kNever);
  CHECK(first.fetch(3) == PageStatus::ok);
  CHECK(second.fetch(3, Clock::now() + 1min) == PageStatus::deadline);
}

}  // namespace

int main(int count, char** values) {
  const std::uint64_t given = count > 1 ? std::strtoull(values[1], nullptr, 10) : 0;
  const auto test_no_stretch = [given] {
    test_no_stretch_of_time_takes_more_than_the_volume_gives(
        given != 0 ? given : std::random_device{}());
  };
  RUN(test_no_stretch);
  RUN(test_the_volume_is_used);
  RUN(test_a_load_has_its_part);
  RUN(test_a_device_has_one_limit);
  RUN(test_reads_wait_for_their_turn);
  RUN(test_nothing_is_read_for_who_has_no_time);
  RUN(test_a_load_alone_waits_for_nothing);
  RUN(test_a_load_ends_with_its_time);
  RUN(test_pools_share_a_volume);
  return 0;
}
