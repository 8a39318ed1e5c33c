// Thousands of random operations on the page pool, against a model of what may and must be
// resident; check() after every step. A failing seed is printed: run the test with it as argument.
#include <algorithm>
#include <map>
#include <random>
#include <set>

#include "check.hpp"
#include "page_files.hpp"
#include "stoker/errors.hpp"

using namespace stoker;
using stoker::testing::kBackends;
using stoker::testing::page_matches;
using stoker::testing::TestFolder;

namespace {

struct ModelStore {
  StoreId id = 0;
  std::uint64_t salt = 0;
  std::uint32_t page_count = 0;
  std::set<PageNumber> damaged;
  std::set<PageNumber> known_damaged;   // read at least once
  std::set<PageNumber> sticky;
};

struct Held {
  PinnedPages pages;
  std::vector<PageRef> wanted;
  std::vector<bool> in_frame;   // not in a private buffer
};

class Model {
 public:
  Model(std::uint64_t seed, IoBackend backend, TestFolder& folder)
      : random_(seed), folder_(folder) {
    page_bytes_ = 512u << below(4);
    frames_ = 16 + below(60);
    PoolOptions options;
    options.page_bytes = page_bytes_;
    options.budget_bytes = frames_ * page_bytes_ + below(512);
    options.backend = backend;
    options.io_threads = 2;
    options.direct = below(2) == 0;
    options.prefetch_inflight_bytes_max = page_bytes_ * (1 + below(40));
    pool_ = std::make_unique<PagePool>(options);
    capacity_ = frames_;
    for (std::uint32_t i = 0; i < 3; ++i) add_store();
  }

  void step() {
    switch (below(12)) {
      case 0: case 1: case 2: case 3: fetch(); break;
      case 4: case 5: load(); break;
      case 6: evict(); break;
      case 7: unstick(); break;
      case 8: set_budget(); break;
      case 9: release(); break;
      case 10: touch(); break;
      default:
        if (below(10) == 0) {
          replace_store();
        } else {
          fetch();
        }
    }
    pool_->check();
    compare();
  }

 private:
  using Resident = std::map<StoreId, std::vector<std::uint8_t>>;

  std::uint32_t below(std::uint32_t end) { return static_cast<std::uint32_t>(random_() % end); }

  ModelStore& any_store() { return stores_[below(static_cast<std::uint32_t>(stores_.size()))]; }

  ModelStore& store_of(StoreId id) {
    for (ModelStore& store : stores_) {
      if (store.id == id) return store;
    }
    CHECK(false);
    std::abort();
  }

  void add_store() {
    ModelStore store;
    store.salt = 1000 + next_salt_++;
    store.page_count = 1 + below(90);
    const StoreSpec spec = folder_.write("s" + std::to_string(store.salt), store.salt,
                                         store.page_count, page_bytes_, 4096 * below(3));
    for (std::uint32_t i = below(4); i > 0; --i) {
      const PageNumber page = below(store.page_count);
      if (store.damaged.insert(page).second) {
        TestFolder::damage(spec, page_bytes_, page, below(60000));
      }
    }
    store.id = pool_->add_store(spec);
    stores_.push_back(std::move(store));
  }

  void replace_store() {
    const std::uint32_t index = below(static_cast<std::uint32_t>(stores_.size()));
    pool_->remove_store(stores_[index].id);
    stores_.erase(stores_.begin() + index);
    add_store();
  }

  Resident residency() const {
    Resident facts;
    for (const ModelStore& store : stores_) facts[store.id] = pool_->residency(store.id);
    return facts;
  }

  bool pinned(StoreId store, PageNumber page) const {
    for (const Held& held : held_) {
      for (std::size_t i = 0; i < held.wanted.size(); ++i) {
        if (held.wanted[i].store == store && held.wanted[i].page == page && held.in_frame[i]) {
          return true;
        }
      }
    }
    return false;
  }

  // Rising numbers, at times dense and at times scattered.
  std::vector<PageNumber> some_pages(const ModelStore& store) {
    std::vector<PageNumber> pages;
    const std::uint32_t keep = 1 + below(4);
    const PageNumber first = below(store.page_count);
    for (PageNumber page = first; page < store.page_count && pages.size() < 50; ++page) {
      if (below(4) < keep) pages.push_back(page);
    }
    return pages;
  }

  void fetch() {
    Held held;
    for (std::uint32_t i = 1 + below(20); i > 0; --i) {
      const ModelStore& store = any_store();
      held.wanted.push_back({store.id, below(store.page_count)});
    }
    held.pages = pool_->fetch(held.wanted.data(), held.wanted.size());
    for (const PageRef& wanted : held.wanted) {
      ModelStore& store = store_of(wanted.store);
      if (store.damaged.count(wanted.page) > 0) store.known_damaged.insert(wanted.page);
    }
    for (std::size_t i = 0; i < held.wanted.size(); ++i) {
      held.in_frame.push_back(held.pages.data(i) != nullptr && peek(held.wanted[i]) ==
                                                                   held.pages.data(i));
    }
    verify(held);
    if (below(3) == 0 && held_.size() < 4) held_.push_back(std::move(held));
  }

  const std::byte* peek(const PageRef& page) const {
    const PagePool::ReadGuard guard(*pool_);
    return pool_->view(page.store).peek(page.page);
  }

  void verify(const Held& held) {
    for (std::size_t i = 0; i < held.wanted.size(); ++i) {
      const PageRef& wanted = held.wanted[i];
      const auto store = std::find_if(stores_.begin(), stores_.end(), [&](const ModelStore& s) {
        return s.id == wanted.store;
      });
      if (store == stores_.end()) continue;   // removed since
      if (store->damaged.count(wanted.page) > 0) {
        CHECK(held.pages.status(i) == PageStatus::corrupt);
        CHECK(held.pages.data(i) == nullptr);
      } else {
        CHECK(held.pages.status(i) == PageStatus::ok);
        CHECK(page_matches(held.pages.data(i), page_bytes_, store->salt, wanted.page));
        if (held.in_frame[i]) CHECK(peek(wanted) == held.pages.data(i));
      }
    }
  }

  void load() {
    ModelStore& store = any_store();
    const std::vector<PageNumber> pages = some_pages(store);
    LoadOptions options;
    options.sticky = below(3) == 0;
    options.weight = static_cast<std::uint8_t>(below(8));
    options.evict = below(2) == 0;
    options.run_bytes_max = page_bytes_ * (1 + below(30));
    const Resident before = residency();
    const LoadReport report = pool_->load(store.id, pages.data(), pages.size(), options);
    const Resident after = residency();
    CHECK_EQ(report.pages_loaded + report.pages_already + report.pages_no_room +
                 report.pages_failed,
             pages.size());
    CHECK_EQ(report.pages_not_reached, 0u);
    std::uint64_t already = 0;
    for (const PageNumber page : pages) {
      const bool was_in = before.at(store.id)[page] == 1 || before.at(store.id)[page] == 2;
      const bool is_in = after.at(store.id)[page] == 1 || after.at(store.id)[page] == 2;
      if (was_in && !options.evict) ++already;
      if (is_in && options.sticky) store.sticky.insert(page);
      if (store.damaged.count(page) > 0 && report.pages_no_room == 0) {
        store.known_damaged.insert(page);
      } else if (after.at(store.id)[page] == 3) {
        store.known_damaged.insert(page);
      }
      // A load never throws out what it brought itself, nor what it found.
      if (report.pages_no_room == 0 && store.damaged.count(page) == 0) CHECK(is_in);
    }
    if (!options.evict) {
      CHECK_EQ(report.pages_already, already);
      for (const auto& [id, states] : before) {
        for (PageNumber page = 0; page < states.size(); ++page) {
          if (states[page] == 1 || states[page] == 2) CHECK(after.at(id)[page] != 0);
        }
      }
    }
  }

  void evict() {
    ModelStore& store = any_store();
    const std::vector<PageNumber> pages = some_pages(store);
    const Resident before = residency();
    std::uint64_t expected = 0;
    for (const PageNumber page : pages) {
      if (before.at(store.id)[page] == 1 && !pinned(store.id, page)) ++expected;
    }
    const std::uint64_t evicted = pool_->evict(store.id, pages.data(), pages.size());
    CHECK_EQ(evicted, expected);
    const Resident after = residency();
    for (const PageNumber page : pages) {
      if (!pinned(store.id, page)) CHECK(after.at(store.id)[page] != 1);
    }
  }

  void unstick() {
    ModelStore& store = any_store();
    const std::vector<PageNumber> pages = some_pages(store);
    pool_->unstick(store.id, pages.data(), pages.size());
    for (const PageNumber page : pages) store.sticky.erase(page);
  }

  void set_budget() {
    const std::uint32_t wanted = 16 + below(frames_ - 15);
    std::uint32_t held_least = 0;
    for (const ModelStore& store : stores_) {
      held_least += static_cast<std::uint32_t>(store.sticky.size());
    }
    try {
      pool_->set_budget(wanted * page_bytes_);
      CHECK(held_least <= wanted);
      capacity_ = wanted;
    } catch (const StoreError&) {
      std::uint32_t held_most = held_least;
      for (const Held& held : held_) held_most += static_cast<std::uint32_t>(held.pages.size());
      CHECK(held_most > wanted);
    }
    CHECK_EQ(pool_->stats().budget_bytes, capacity_ * page_bytes_);
  }

  void release() {
    if (held_.empty()) return;
    const std::uint32_t index = below(static_cast<std::uint32_t>(held_.size()));
    verify(held_[index]);
    held_.erase(held_.begin() + index);
  }

  void touch() {
    const PagePool::ReadGuard guard(*pool_);
    for (int i = 0; i < 30; ++i) {
      const ModelStore& store = any_store();
      const PagePool::View view = pool_->view(store.id);
      CHECK_EQ(view.page_count, store.page_count);
      const PageNumber page = below(store.page_count);
      const std::byte* bytes = below(2) == 0 ? view.touch(page) : view.peek(page);
      if (bytes != nullptr) CHECK(page_matches(bytes, page_bytes_, store.salt, page));
    }
  }

  void compare() {
    std::uint64_t resident = 0;
    for (const ModelStore& store : stores_) {
      const std::vector<std::uint8_t> states = pool_->residency(store.id);
      CHECK_EQ(states.size(), store.page_count);
      for (PageNumber page = 0; page < store.page_count; ++page) {
        if (states[page] == 1 || states[page] == 2) ++resident;
        CHECK_EQ(states[page] == 2, store.sticky.count(page) > 0);
        CHECK_EQ(states[page] == 3, store.known_damaged.count(page) > 0);
      }
      CHECK_EQ(pool_->store_stats(store.id).sticky, store.sticky.size());
    }
    CHECK_EQ(pool_->stats().resident_bytes, resident * page_bytes_);
    CHECK(resident <= capacity_);
    for (const Held& held : held_) verify(held);
  }

  std::mt19937_64 random_;
  TestFolder& folder_;
  std::size_t page_bytes_ = 0;
  std::uint32_t frames_ = 0;
  std::uint32_t capacity_ = 0;
  std::unique_ptr<PagePool> pool_;
  std::vector<ModelStore> stores_;
  std::vector<Held> held_;
  std::uint64_t next_salt_ = 0;
};

void run_seed(std::uint64_t seed, int steps) {
  for (const IoBackend backend : kBackends) {
    std::printf("seed %llu, backend %d\n", static_cast<unsigned long long>(seed),
                static_cast<int>(backend));
    std::fflush(stdout);
    TestFolder folder;
    Model model(seed, backend, folder);
    for (int step = 0; step < steps; ++step) model.step();
  }
}

}  // namespace

int main(int count, char** values) {
  if (count > 1) {
    run_seed(std::strtoull(values[1], nullptr, 10), 2000);
    return 0;
  }
  for (std::uint64_t seed = 1; seed <= 8; ++seed) run_seed(seed, 300);
  return 0;
}
