// Scans of groups of near rows: what the groups hold is found, in two rounds; tables may say anything.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <random>
#include <set>
#include <vector>

#include "check.hpp"
#include "segment_fixture.hpp"
#include "stoker/errors.hpp"

using namespace stoker;
using stoker::testing::Fixture;
using stoker::testing::kPage;
using stoker::testing::recall;

namespace {

constexpr std::uint32_t kRowsOfGroup = 20;

std::vector<std::uint8_t> words(const std::vector<std::uint32_t>& values) {
  std::vector<std::uint8_t> bytes(values.size() * 4);
  std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

// A segment whose groups are every so many-th row: of many pieces, none near each other.
struct Grouped {
  Fixture f;
  std::string path;
  std::vector<std::vector<std::uint32_t>> rows;   // of each group
  std::vector<float> means;

  explicit Grouped(std::mt19937& rng, bool l2 = false, bool coarse = false,
                   std::uint32_t lie = 0)
      : f(600, 40, l2, 4096 * kPage, rng, false, coarse), path(f.folder + "/ranges") {
    const auto groups = static_cast<std::uint32_t>(f.n) / kRowsOfGroup;
    rows.resize(groups);
    means.assign(groups * f.dim, 0);
    std::vector<std::uint32_t> pieces;
    std::vector<std::uint32_t> tails;
    for (std::uint32_t group = 0; group < groups; ++group) {
      const auto first_piece = static_cast<std::uint32_t>(pieces.size() / 2);
      for (std::uint32_t at = 0; at < kRowsOfGroup; at += 2) {   // runs of two rows
        const std::uint32_t row = (at / 2 * groups + group) * 2;
        pieces.insert(pieces.end(), {row | (lie == 1 ? 1u << 31 : 0u),
                                     lie == 2 ? 1u << 31 : lie == 7 ? 0u : 2u});
        for (const std::uint32_t one : {row, row + 1}) {
          rows[group].push_back(one);
          for (std::size_t d = 0; d < f.dim; ++d) {
            means[group * f.dim + d] += f.vectors[one * f.dim + d] / kRowsOfGroup;
          }
        }
      }
      tails.insert(tails.end(), {lie == 3 ? 1u << 30 : first_piece,
                                 lie == 4 ? 0xFFFFFFFFu : lie == 6 ? 0u : kRowsOfGroup / 2});
    }
    if (lie == 5) {   // all groups are the first one's rows
      for (std::size_t i = 0; i < tails.size(); i += 2) tails[i] = 0;
    }
    const CodeShape& shape = f.quantizer.shape();
    std::vector<std::uint8_t> codes(groups * shape.code_record_bytes);
    std::vector<std::uint8_t> unused(groups * shape.refine_record_bytes);
    std::vector<std::uint8_t> unused_too(groups * shape.coarse_record_bytes);
    f.quantizer.encode(means.data(), groups, codes.data(), unused.data(), unused_too.data());
    const std::size_t record = shape.code_record_bytes + RangeTable::kTailBytes;
    std::vector<std::uint8_t> records(groups * record);
    const std::vector<std::uint8_t> tail = words(tails);
    for (std::uint32_t group = 0; group < groups; ++group) {
      std::uint8_t* to = records.data() + group * record;
      std::memcpy(to, codes.data() + group * shape.code_record_bytes, shape.code_record_bytes);
      std::memcpy(to + shape.code_record_bytes, tail.data() + group * 8, 8);
    }
    std::vector<std::uint8_t> pages = stoker::testing::to_pages(records, record, kPage / record);
    const std::vector<std::uint8_t> more =
        stoker::testing::to_pages(words(pieces), RangeTable::kPieceBytes, kPage / 8);
    pages.insert(pages.end(), more.begin(), more.end());
    f.layout.ranges = {stoker::testing::add(f.pool, path, pages), groups,
                       static_cast<std::uint32_t>(record),
                       Divisor(static_cast<std::uint32_t>(kPage / record)),
                       static_cast<std::uint32_t>(pieces.size() / 2)};
  }
  ~Grouped() { std::remove(path.c_str()); }

  SearchParams params(std::uint32_t groups) const {
    SearchParams params;
    params.ef = 100;
    params.range_groups = groups;
    params.range_rerank_target = 0.9999f;
    params.rerank_reads_max = 200;
    params.read_vectors = true;
    return params;
  }
  void forget() {
    for (const StoreId store : {f.layout.links, f.layout.codes.store, f.layout.refine.store,
                                f.layout.coarse.store, f.layout.vectors.store,
                                f.layout.ranges.store}) {
      f.evict_all(store);
    }
  }
};

void finds_what_the_groups_hold(bool l2, bool coarse, std::mt19937& rng) {
  Grouped g(rng, l2, coarse);
  Searcher searcher(g.f.pool, g.f.layout, g.f.quantizer);
  constexpr std::uint32_t kGroups = 6;
  double mean = 0;
  for (int round = 0; round < 30; ++round) {
    g.forget();
    const auto query = Fixture::make(1, g.f.dim, rng);
    SearchParams params = g.params(kGroups);
    std::vector<std::uint8_t> allow((g.f.n + 7) / 8, 0xFF);
    if (round % 3 == 2) {   // a filter that takes out a tenth
      for (std::size_t row = rng() % 10; row < g.f.n; row += 10) {
        allow[row >> 3] &= static_cast<std::uint8_t>(~(1u << (row & 7)));
      }
      params.allow = allow.data();
      params.k = params.ef = 5;   // or so few rows would all be compared
      for (std::uint32_t row = 0; row < g.f.n; ++row) {
        params.allow_count += (allow[row >> 3] >> (row & 7)) & 1;
      }
    }
    std::uint32_t nearest[kGroups];
    searcher.nearest_groups(query.data(), kGroups, nearest);
    g.forget();
    std::vector<std::uint32_t> held;
    for (const std::uint32_t group : nearest) {
      for (const std::uint32_t row : g.rows[group]) {
        if (((allow[row >> 3] >> (row & 7)) & 1) != 0) held.push_back(row);
      }
    }
    std::sort(held.begin(), held.end(), [&](std::uint32_t a, std::uint32_t b) {
      return g.f.score(query.data(), a) < g.f.score(query.data(), b);
    });
    held.resize(params.k);
    std::vector<std::uint32_t> rows(params.k);
    std::vector<float> scores(params.k);
    const QueryStats stats = searcher.search(query.data(), params, rows.data(), scores.data());
    CHECK_EQ(stats.range_groups, kGroups);
    CHECK_EQ(stats.ranges_whole, kGroups);
    CHECK_EQ(stats.evaluated, kGroups * kRowsOfGroup);
    CHECK_EQ(stats.skipped, 0u);
    CHECK(stats.rounds >= 2 && stats.rounds <= 5);   // table, codes, what settles
    mean += recall(rows, held);
    g.f.pool.check();
  }
  std::printf("%s, %d bits: %.4f of what the groups hold\n", l2 ? "l2" : "ip", coarse ? 2 : 4,
              mean / 30);
  CHECK(mean / 30 > 0.97);
}

// Codes of 2 bits mistake the order of rows that are all about as far, as of queries at random: enough
// rows are kept until they are settled. Here they mistake it as badly as of many more rows.
void keeps_what_coarse_codes_mistake(std::mt19937& rng) {
  Grouped g(rng, false, true);
  const CodeShape& shape = g.f.quantizer.shape();
  std::vector<float> mistaken(g.f.vectors);
  std::normal_distribution<float> noise(0.0f, 0.7f);
  for (float& x : mistaken) x += noise(rng);
  std::vector<std::uint8_t> codes(g.f.n * shape.code_record_bytes);
  std::vector<std::uint8_t> refines(g.f.n * shape.refine_record_bytes);
  std::vector<std::uint8_t> coarse(g.f.n * shape.coarse_record_bytes);
  g.f.quantizer.encode(mistaken.data(), g.f.n, codes.data(), refines.data(), coarse.data());
  const std::size_t per_page = g.f.layout.coarse.per_page.value();
  const std::string path = g.f.folder + "/mistaken";
  g.f.layout.coarse.store = stoker::testing::add(
      g.f.pool, path, stoker::testing::to_pages(coarse, shape.coarse_record_bytes, per_page));
  g.f.layout.coarse_error *= 2;
  Searcher searcher(g.f.pool, g.f.layout, g.f.quantizer);
  double mean = 0;
  constexpr int kRounds = 100;
  for (int round = 0; round < kRounds; ++round) {
    g.forget();
    const auto query = Fixture::make(1, g.f.dim, rng);
    const SearchParams params = g.params(static_cast<std::uint32_t>(g.rows.size()));
    std::vector<std::uint32_t> rows(params.k);
    std::vector<float> scores(params.k);
    const QueryStats stats = searcher.search(query.data(), params, rows.data(), scores.data());
    CHECK_EQ(stats.evaluated, g.f.n);
    mean += recall(rows, g.f.truth(query.data(), params.k)) / kRounds;
  }
  std::remove(path.c_str());
  std::printf("all rows by mistaken codes: %.4f\n", mean);
  CHECK(mean > 0.98);
}

// A filter that leaves little of the groups that lie nearest is walked after all.
void walks_where_a_filter_took_the_groups(std::mt19937& rng) {
  Grouped g(rng);
  Searcher searcher(g.f.pool, g.f.layout, g.f.quantizer);
  const auto query = Fixture::make(1, g.f.dim, rng);
  std::uint32_t nearest[5];
  searcher.nearest_groups(query.data(), 5, nearest);
  std::vector<std::uint8_t> allow((g.f.n + 7) / 8, 0xFF);
  for (const std::uint32_t group : nearest) {
    for (const std::uint32_t row : g.rows[group]) {
      allow[row >> 3] &= static_cast<std::uint8_t>(~(1u << (row & 7)));
    }
  }
  g.forget();
  SearchParams params = g.params(5);
  params.k = params.ef = 5;
  params.allow = allow.data();
  params.allow_count = g.f.n - 5 * kRowsOfGroup;
  std::vector<std::uint32_t> rows(params.k);
  std::vector<float> scores(params.k);
  const QueryStats stats = searcher.search(query.data(), params, rows.data(), scores.data());
  CHECK_EQ(stats.range_groups, 0u);
  CHECK(stats.expanded > 0);
  CHECK(recall(rows, g.f.truth(query.data(), params.k, &allow)) >= 0.8);
}

// Nor is it enough to have met what a filter leaves of fewer rows than a scan keeps: nearer ones may lie
// in other groups.
void walks_where_a_filtered_scan_keeps_all_it_meets(std::mt19937& rng) {
  Grouped g(rng);
  Searcher searcher(g.f.pool, g.f.layout, g.f.quantizer);
  const auto query = Fixture::make(1, g.f.dim, rng);
  std::vector<std::uint8_t> allow((g.f.n + 7) / 8, 0xFF);
  allow[rng() % (allow.size() - 1)] = 0;
  for (const bool filtered : {false, true}) {
    g.forget();
    SearchParams params = g.params(3);   // of 60 rows
    params.k = params.ef = 5;
    if (filtered) {
      params.allow = allow.data();
      params.allow_count = static_cast<std::uint32_t>(g.f.n) - 8;
    }
    std::vector<std::uint32_t> rows(params.k);
    std::vector<float> scores(params.k);
    const QueryStats stats = searcher.search(query.data(), params, rows.data(), scores.data());
    CHECK_EQ(stats.range_groups, filtered ? 0u : 3u);
  }
}

// Nothing is scanned that walks can have, nor where nothing may be read.
void walks_what_is_there(std::mt19937& rng) {
  Grouped g(rng);
  Searcher searcher(g.f.pool, g.f.layout, g.f.quantizer);
  const auto query = Fixture::make(1, g.f.dim, rng);
  std::vector<std::uint32_t> rows(10);
  std::vector<float> scores(10);
  SearchParams params = g.params(5);
  params.resident_only = true;
  QueryStats stats = searcher.search(query.data(), params, rows.data(), scores.data());
  CHECK(rows[0] == kNoRow && stats.skipped > 0 && stats.range_groups == 0);
  params.resident_only = false;
  params.deadline = Clock::now() - std::chrono::seconds(1);
  stats = searcher.search(query.data(), params, rows.data(), scores.data());
  CHECK(stats.deadline_hit && stats.bytes_read == 0 && stats.skipped > 0);
  params.deadline = Clock::now() + std::chrono::hours(1);   // in helpings, with the same answer
  stats = searcher.search(query.data(), params, rows.data(), scores.data());
  CHECK_EQ(stats.ranges_whole, 5u);
  params.deadline.reset();
  g.f.load_walked();
  stats = searcher.search(query.data(), params, rows.data(), scores.data());
  CHECK(stats.range_groups == 0 && stats.expanded > 0);
}

// Recall of queries that nothing is loaded for; each one's statistics go to `check`.
template <typename Check>
double recall_from_cold(Grouped& g, std::mt19937& rng, const Check& check) {
  Searcher searcher(g.f.pool, g.f.layout, g.f.quantizer);
  constexpr int kRounds = 10;
  double mean = 0;
  for (int round = 0; round < kRounds; ++round) {
    const auto query = Fixture::make(1, g.f.dim, rng);
    g.forget();
    const SearchParams params = g.params(5);
    std::vector<std::uint32_t> rows(params.k);
    std::vector<float> scores(params.k);
    check(searcher.search(query.data(), params, rows.data(), scores.data()));
    mean += recall(rows, g.f.truth(query.data(), params.k)) / kRounds;
  }
  return mean;
}

// Where a page of the table is damaged nobody knows which groups lie nearest, so queries walk; and so
// they do without a table, whatever they were told.
void walks_where_the_table_is_damaged(std::mt19937& rng) {
  Grouped g(rng);
  {
    std::fstream file(g.path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(100);
    const int byte = file.get();
    file.seekp(100);
    file.put(static_cast<char>(byte ^ 0x10));
  }
  for (const bool table : {true, false}) {
    if (!table) g.f.layout.ranges = RangeTable();
    const double mean = recall_from_cold(g, rng, [table](const QueryStats& stats) {
      CHECK(stats.range_groups == 0 && stats.expanded > 0);
      CHECK_EQ(stats.damaged > 0, table);
    });
    CHECK(mean >= 0.8);
  }
}

// Where the table says of no group which rows it has, a walk takes the scan's place, and finds all.
void walks_where_groups_have_no_rows(std::mt19937& rng) {
  for (const std::uint32_t lie : {3u, 6u, 7u}) {   // pieces beyond the last; none; of no rows
    Grouped g(rng, false, false, lie);
    const double mean = recall_from_cold(g, rng, [](const QueryStats& stats) {
      CHECK(stats.range_groups == 0 && stats.expanded > 0 && stats.damaged > 0 &&
            stats.skipped > 0);
      CHECK_EQ(stats.ranges_whole, 0u);
    });
    CHECK(mean >= 0.8);
  }
}

// The table comes long after a deadline.
class LateTable final : public ReadFaults {
 public:
  LateTable() { set_read_faults(this); }
  ~LateTable() override { set_read_faults(nullptr); }
  std::chrono::microseconds delay(const ReadRequest& request) noexcept override {
    const std::string& path = request.file->path();
    return std::chrono::milliseconds(path.substr(path.rfind('/')) == "/ranges" ? 300 : 0);
  }
};

// What a walk had met before it was left is the answer where a scan comes to nothing in time.
void keeps_what_was_walked(std::mt19937& rng) {
  const LateTable late;   // it outlives the pool, whose reads it delays
  Grouped g(rng);
  const PageNumber entry = g.f.layout.codes.page_of(g.f.layout.entry_row);
  const PageNumber pages = g.f.pool.view(g.f.layout.codes.store).page_count;
  int left = 0;
  for (PageNumber page = 0; page < pages && left < 6; ++page) {
    Searcher searcher(g.f.pool, g.f.layout, g.f.quantizer);
    const auto query = Fixture::make(1, g.f.dim, rng);
    g.forget();
    g.f.load_walked();
    g.f.pool.evict(g.f.layout.codes.store, &page, 1);
    SearchParams params = g.params(5);
    params.deadline = Clock::now() + std::chrono::milliseconds(40);
    std::vector<std::uint32_t> rows(params.k);
    std::vector<float> scores(params.k);
    const QueryStats stats = searcher.search(query.data(), params, rows.data(), scores.data());
    if (stats.range_groups == 0) continue;
    ++left;
    CHECK(stats.deadline_hit && stats.ranges_whole == 0);
    CHECK(rows[0] != kNoRow || page == entry);
    std::vector<std::uint32_t> found(rows);
    found.erase(std::remove(found.begin(), found.end(), kNoRow), found.end());
    CHECK_EQ(std::set<std::uint32_t>(found.begin(), found.end()).size(), found.size());
  }
  CHECK(left > 0);
}

// A walk that missed nothing, but met too little that a filter allows, reads what it misses as it goes
// on: nothing is left out unsaid.
void reads_what_a_wider_walk_misses(std::mt19937& rng) {
  Grouped g(rng);
  Searcher searcher(g.f.pool, g.f.layout, g.f.quantizer);
  int widened = 0;
  for (int round = 0; round < 20; ++round) {
    const auto query = Fixture::make(1, g.f.dim, rng);
    std::vector<std::uint8_t> allow((g.f.n + 7) / 8, 0xFF);
    const auto taken = static_cast<std::uint32_t>(g.f.n / 20);
    for (const std::uint32_t row : g.f.truth(query.data(), taken)) {
      allow[row >> 3] &= static_cast<std::uint8_t>(~(1u << (row & 7)));
    }
    SearchParams params = g.params(40);
    params.k = params.ef = 1;
    params.allow = allow.data();
    params.allow_count = static_cast<std::uint32_t>(g.f.n) - taken;
    params.rerank_reads_max = 0;
    params.read_vectors = false;
    for (PageNumber page = 0; page < g.f.pool.view(g.f.layout.links).page_count; ++page) {
      g.f.load_walked();
      g.f.pool.evict(g.f.layout.links, &page, 1);
      std::uint32_t row;
      float score;
      const QueryStats stats = searcher.search(query.data(), params, &row, &score);
      if (stats.misses == 0 || stats.range_groups > 0) continue;
      ++widened;
      CHECK(stats.rounds > 0);
    }
  }
  CHECK(widened > 0);
}

void hostile_tables_do_not_crash(std::mt19937& rng) {
  for (std::uint32_t lie = 1; lie <= 7; ++lie) {
    Grouped g(rng, lie % 2 == 0, false, lie);
    Searcher searcher(g.f.pool, g.f.layout, g.f.quantizer);
    const auto query = Fixture::make(1, g.f.dim, rng);
    SearchParams params = g.params(12);
    std::vector<std::uint32_t> rows(params.k);
    std::vector<float> scores(params.k);
    const QueryStats stats = searcher.search(query.data(), params, rows.data(), scores.data());
    std::set<std::uint32_t> distinct;
    std::size_t found = 0;
    for (const std::uint32_t row : rows) {
      if (row == kNoRow) continue;
      CHECK(row < g.f.n);
      ++found;
      distinct.insert(row);
    }
    CHECK_EQ(distinct.size(), found);
    CHECK_EQ(found, 10u);   // where the table has no rows to offer, a walk finds them
    if (lie != 5) {
      CHECK(stats.damaged >= 12);
      CHECK_EQ(stats.ranges_whole, 0u);
    }
  }
}

void a_layout_that_does_not_fit_is_refused(std::mt19937& rng) {
  Grouped g(rng);
  const RangeTable good = g.f.layout.ranges;
  const auto build = [&] { Searcher searcher(g.f.pool, g.f.layout, g.f.quantizer); };
  build();
  for (const int wrong : {0, 1, 2, 3}) {
    RangeTable bad = good;
    if (wrong == 0) ++bad.record_bytes;
    if (wrong == 1) bad.groups += 10000;
    if (wrong == 2) bad.pieces += 10000;
    if (wrong == 3) bad.per_page = Divisor(10000);
    g.f.layout.ranges = bad;
    CHECK_THROWS(build(), CorruptData, "group");
  }
}

}  // namespace

int main() {
  std::mt19937 rng(20261130);
  for (const bool l2 : {false, true}) {
    for (const bool coarse : {false, true}) finds_what_the_groups_hold(l2, coarse, rng);
  }
  keeps_what_coarse_codes_mistake(rng);
  walks_where_a_filter_took_the_groups(rng);
  walks_where_a_filtered_scan_keeps_all_it_meets(rng);
  walks_what_is_there(rng);
  walks_where_the_table_is_damaged(rng);
  walks_where_groups_have_no_rows(rng);
  keeps_what_was_walked(rng);
  reads_what_a_wider_walk_misses(rng);
  hostile_tables_do_not_crash(rng);
  a_layout_that_does_not_fit_is_refused(rng);
  return 0;
}
