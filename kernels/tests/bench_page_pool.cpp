// What the page pool costs, beside what the device gives without it. By hand; half a minute.
//
//   g++ -std=c++17 -O3 -Iinclude tests/bench_page_pool.cpp src/page_*.cpp src/crc32c.cpp -lpthread
//
// Figures of one run compare with each other and with nothing else. Reads are direct, so that the
// guest's cache does not count; a host may still hold the file.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>
#include <thread>

#include "check.hpp"
#include "page_files.hpp"

using namespace stoker;
using stoker::testing::TestFolder;

namespace {

constexpr std::size_t kPage = 4096;
constexpr std::uint32_t kPages = 65536;   // 256 MiB
constexpr double kMiB = 1 << 20;

double seconds_since(Clock::time_point began) {
  return std::chrono::duration<double>(Clock::now() - began).count();
}

void print_latency(const char* what, std::vector<double> micros) {
  std::sort(micros.begin(), micros.end());
  const auto at = [&](double share) {
    return micros[static_cast<std::size_t>(share * static_cast<double>(micros.size() - 1))];
  };
  std::printf("%-46s p50 %7.1f us  p90 %7.1f us  p99 %7.1f us\n", what, at(0.5), at(0.9), at(0.99));
}

// The device alone: runs of one size at a fixed depth, no pool, no checksum.
double raw_bandwidth(const StoreSpec& spec, IoBackend backend, std::size_t run, std::size_t depth) {
  IoEngine engine(backend, 16);
  PageFile file(spec.path, true);
  auto queue = engine.take_queue();
  std::vector<void*> buffers(depth);
  for (auto& buffer : buffers) {
    buffer = std::aligned_alloc(4096, run);
    std::memset(buffer, 1, run);
  }
  std::vector<ReadRequest> requests(depth);
  const std::uint64_t total = std::uint64_t{kPages} * kPage;
  std::uint64_t next = 0;
  const auto issue = [&](std::size_t slot) {
    if (next >= total) return;
    requests[slot] = {};
    requests[slot].file = &file;
    requests[slot].offset_bytes = next;
    requests[slot].length_bytes = run;
    requests[slot].parts.push_back({buffers[slot], run});
    queue->submit(requests[slot]);
    next += run;
  };
  const auto began = Clock::now();
  for (std::size_t slot = 0; slot < depth; ++slot) issue(slot);
  while (ReadRequest* ended = queue->wait({}, false)) {
    CHECK_EQ(ended->error, 0);
    issue(static_cast<std::size_t>(ended - requests.data()));
    queue->flush();
  }
  const double rate = static_cast<double>(total) / kMiB / seconds_since(began);
  for (void* buffer : buffers) std::free(buffer);
  return rate;
}

PoolOptions options_for(std::size_t frames, IoBackend backend) {
  PoolOptions options;
  options.budget_bytes = frames * kPage;
  options.backend = backend;
  return options;
}

std::vector<PageNumber> all_pages() {
  std::vector<PageNumber> pages(kPages);
  std::iota(pages.begin(), pages.end(), 0u);
  return pages;
}

void bench_load(const StoreSpec& spec, IoBackend backend) {
  const std::vector<PageNumber> pages = all_pages();
  for (int round = 0; round < 3; ++round) {
    const double raw = raw_bandwidth(spec, backend, 512u << 10, 4);
    const double raw_deep = raw_bandwidth(spec, backend, 1u << 20, 8);
    PagePool pool(options_for(kPages, backend));
    const StoreId store = pool.add_store(spec);
    const auto began = Clock::now();
    const LoadReport report = pool.load(store, pages.data(), pages.size(), {});
    const double seconds = seconds_since(began);
    CHECK_EQ(report.pages_loaded, kPages);
    std::printf("load %-8s: %6.0f MiB/s  raw 4 x 512 KiB %6.0f  raw 8 x 1 MiB %6.0f  (%llu reads)\n",
                pool.backend_name(), 256 / seconds, raw, raw_deep,
                static_cast<unsigned long long>(report.reads));
  }
}

void bench_fetch(const StoreSpec& spec, IoBackend backend, bool with_load) {
  PagePool pool(options_for(16384, backend));
  const StoreId store = pool.add_store(spec);
  std::mt19937_64 random(7);
  std::atomic<bool> stop{false};
  std::thread loader;
  std::uint64_t loaded = 0;
  if (with_load) {
    loader = std::thread([&] {
      const std::vector<PageNumber> pages = all_pages();
      LoadOptions options;
      options.cancel = &stop;
      options.evict = true;
      while (!stop) {
        loaded += pool.load(store, pages.data(), 8192, options).pages_loaded;
        pool.evict(store, pages.data(), 8192);
      }
    });
  }
  std::vector<double> micros;
  const auto all = Clock::now();
  for (int round = 0; round < 1500 && seconds_since(all) < 3; ++round) {
    std::vector<PageRef> wanted(16);
    for (PageRef& page : wanted) {
      page = {store, static_cast<PageNumber>(8192 + random() % (kPages - 8192))};
    }
    const auto began = Clock::now();
    const PinnedPages pinned = pool.fetch(wanted.data(), wanted.size());
    micros.push_back(seconds_since(began) * 1e6);
    CHECK(pinned.status(3) == PageStatus::ok);
  }
  const double seconds = seconds_since(all);
  stop = true;
  if (loader.joinable()) loader.join();
  const std::string what = std::string("fetch 16 pages, ") + pool.backend_name() +
                           (with_load ? ", load beside it" : "");
  print_latency(what.c_str(), micros);
  if (with_load) {
    std::printf("   the load brought %.0f MiB/s meanwhile\n",
                static_cast<double>(loaded) * kPage / kMiB / seconds);
  }
}

void bench_raw_batch(const StoreSpec& spec, IoBackend backend) {
  IoEngine engine(backend, 16);
  PageFile file(spec.path, true);
  auto queue = engine.take_queue();
  auto* buffer = static_cast<char*>(std::aligned_alloc(4096, 16 * kPage));
  std::mt19937_64 random(7);
  std::vector<double> micros;
  for (int round = 0; round < 1500; ++round) {
    std::vector<ReadRequest> requests(16);
    const auto began = Clock::now();
    for (std::size_t i = 0; i < 16; ++i) {
      requests[i].file = &file;
      requests[i].offset_bytes = random() % kPages * kPage;
      requests[i].length_bytes = kPage;
      requests[i].parts.push_back({buffer + i * kPage, kPage});
      queue->submit(requests[i]);
    }
    while (queue->wait({}, true) != nullptr) {
    }
    micros.push_back(seconds_since(began) * 1e6);
  }
  std::free(buffer);
  print_latency((std::string("raw 16 reads, ") + engine.name()).c_str(), micros);
}

void bench_hits(const StoreSpec& spec) {
  PagePool pool(options_for(kPages, IoBackend::automatic));
  const StoreId store = pool.add_store(spec);
  const std::vector<PageNumber> pages = all_pages();
  pool.load(store, pages.data(), pages.size(), {});
  const PagePool::View view = pool.view(store);
  std::vector<PageNumber> order(1u << 20);
  std::mt19937_64 random(3);
  for (const std::uint32_t span : {256u, kPages}) {
    for (PageNumber& page : order) page = static_cast<PageNumber>(random() % span);
    std::uintptr_t sum = 0;
    const auto timed = [&](auto&& body) {
      const auto began = Clock::now();
      for (int repeat = 0; repeat < 8; ++repeat) {
        for (const PageNumber page : order) body(page);
      }
      return seconds_since(began) * 1e9 / 8 / static_cast<double>(order.size());
    };
    double peek = 0;
    double touch = 0;
    {
      const PagePool::ReadGuard guard(pool);
      peek = timed([&](PageNumber page) { sum += reinterpret_cast<std::uintptr_t>(view.peek(page)); });
      touch = timed([&](PageNumber page) { sum += reinterpret_cast<std::uintptr_t>(view.touch(page)); });
    }
    const double guarded = timed([&](PageNumber page) {
      const PagePool::ReadGuard guard(pool);
      sum += reinterpret_cast<std::uintptr_t>(view.peek(page));
    });
    std::printf("hit among %5u pages: peek %.2f ns, touch %.2f ns, guard + peek %.2f ns (%c)\n", span,
                peek, touch, guarded, static_cast<char>('a' + sum % 26));
  }
  std::vector<double> micros;
  for (int round = 0; round < 20000; ++round) {
    std::vector<PageRef> wanted(16);
    for (PageRef& page : wanted) page = {store, static_cast<PageNumber>(random() % kPages)};
    const auto began = Clock::now();
    const PinnedPages pinned = pool.fetch(wanted.data(), wanted.size());
    micros.push_back(seconds_since(began) * 1e6);
  }
  print_latency("fetch 16 pages, all hits", micros);
}

void bench_checksums() {
  std::vector<std::byte> page(kPage, std::byte{7});
  for (const bool portable : {false, true}) {
    std::uint32_t sum = 0;
    const auto began = Clock::now();
    const int rounds = portable ? 40000 : 200000;
    for (int round = 0; round < rounds; ++round) {
      page[0] = static_cast<std::byte>(round);
      sum ^= portable ? crc32c_portable(page.data(), kPage) : crc32c(page.data(), kPage);
    }
    std::printf("crc32c %-8s: %.0f ns a page of 4 KiB (%x)\n",
                portable ? "portable" : crc32c_implementation(),
                seconds_since(began) * 1e9 / rounds, sum & 15u);
  }
}

}  // namespace

int main() {
  TestFolder folder;
  const StoreSpec spec = folder.write("bench", 5, kPages, kPage);
  bench_checksums();
  for (const IoBackend backend : {IoBackend::automatic, IoBackend::threads}) {
    bench_load(spec, backend);
    bench_raw_batch(spec, backend);
    bench_fetch(spec, backend, false);
    bench_fetch(spec, backend, true);
  }
  bench_hits(spec);
  return 0;
}
