// Envelopes into columns, keys into numbers, links into rows: the plain cases, and damaged bytes.
#include <algorithm>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "check.hpp"
#include "stoker/edge_rows.hpp"
#include "stoker/errors.hpp"
#include "stoker/event_batch.hpp"
#include "stoker/key_table.hpp"

namespace {

using namespace stoker;

const EnvelopeRules kRules{{"search", "used"}, {0, 1}, {"application/json"}, 4096, 16, 16, 16,
                           16,                 64,     8};

const std::string kGood =
    R"({"specversion":"1.0","id":"e1","source":"/a","type":"search","time":)"
    R"("2026-01-31T12:00:00.25Z","x":[1,-2.5,{"y":null}],"data":{"tenant":"t","session":"s",)"
    "\"query\":\"wh\\u00e9 \xc3\xa9?\",\"chunk_ids\":[\"a\",\"b\"]}}";

RowState state_of(const std::string& payload) {
  EventBatch batch;
  batch.scan(payload, kRules);
  return batch.rows.at(0).state;
}

std::string changed(const std::string& from, const std::string& to) {
  std::string out = kGood;
  const std::size_t at = out.find(from);
  CHECK(at != std::string::npos);
  return out.replace(at, from.size(), to);
}

void test_scan() {
  EventBatch batch;
  batch.scan(kGood, kRules);
  const EventRow& row = batch.rows.at(0);
  CHECK(row.state == RowState::kReady);
  CHECK_EQ(row.time_s, 1769860800.25);
  CHECK_EQ(batch.view(row.id), std::string_view("e1"));
  CHECK_EQ(batch.view(row.session), std::string_view("s"));
  CHECK_EQ(row.key_count, 2u);
  CHECK_EQ(batch.view(batch.keys[1]), std::string_view("b"));
  CHECK_THROWS(batch.put(0, 0, 0, "a", "b", nullptr, {}), BadInput, "waits to be settled");
  for (const auto& [from, to] : std::vector<std::pair<std::string, std::string>>{
           {"1.0", "1.1"}, {"\"e1\"", "\"\""}, {"search", "serach"}, {"-01-31", "-02-30"},
           {"\"a\",", "\"a\","  "1,"}, {"\"t\"", "null"}, {"-2.5", "-02"}, {"-2.5", "1e3"},
           {"\\u00e9", "\\ud800"}, {"\xc3\xa9", "\xc0\xa9"}, {"\"x\"", "\"id\""}, {"}}", "}}}"},
           {"\"a\"", "\"\\u0061\""}, {"\"session\":\"s\"", "\"session\":7"}}) {
    CHECK(state_of(changed(from, to)) == RowState::kUndecided);
  }
  CHECK(state_of(changed("\"session\":\"s\"", "\"session\" : null ")) == RowState::kReady);
  CHECK(state_of(changed("\\u00e9", "\\ud83d\\ude00")) == RowState::kReady);
}

// Whatever the bytes: nothing is read outside them (AddressSanitizer watches), and a row is ready
// or undecided.
void test_damaged_bytes() {
  std::mt19937_64 random(7);
  for (int i = 0; i < 20000; ++i) {
    std::string payload = kGood.substr(0, 1 + random() % kGood.size());
    for (std::uint64_t changes = random() % 3; changes > 0; --changes) {
      payload[random() % payload.size()] = static_cast<char>(random());
    }
    payload.shrink_to_fit();
    state_of(payload);
  }
}

void test_keys() {
  EventBatch batch;
  const std::string_view session = "s";
  batch.rows.resize(3);
  batch.put(0, 0, 1.0, "1", "t", &session, {"a", "b", "a"});
  batch.put(1, 1, 2.0, "2", "u", &session, {"a"});
  batch.put(2, 0, 3.0, "3", "t", &session, {"c", "b"});
  KeyTable table;
  KeyTable::Interned run = table.intern(batch, 0, 2, 9, 3, true);
  CHECK_EQ(run.stop, 2u);  // no room for a row with an unknown key
  CHECK(run.numbers == (std::vector<std::int64_t>{0, 1, 0, 2}));
  run = table.intern(batch, 2, 2, 9, 3, false);
  CHECK(run.numbers == (std::vector<std::int64_t>{KeyTable::kAbsent, 1}));
  const KeyTable::Interned::Outside outside = run.outside(batch);
  CHECK(outside.places == (std::vector<std::int64_t>{0}));
  CHECK(outside.owners == (std::vector<std::int64_t>{0}));
  CHECK_EQ(outside.hashes.at(0), content_hash("t", "c"));
  CHECK_EQ(run.name(batch, 0, 0).second, std::string_view("c"));
  CHECK_THROWS(run.name(batch, 0, 2), BadInput, "is not of row 0");
  CHECK_THROWS(run.cut(1), BadInput, "cannot cut 1 rows to 1");
  run.cut(0);
  CHECK_EQ(run.stop, 2u);
  CHECK_EQ(table.find("u", "a"), 2);
  CHECK_EQ(table.find("v", "a"), KeyTable::kAbsent);
  const std::int64_t kept[] = {1, 2};
  table.keep(kept, 2);
  CHECK_EQ(table.find("t", "b"), 0);
  CHECK_EQ(table.find("t", "a"), KeyTable::kAbsent);
  CHECK_EQ(table.add("t", "z"), 2);
  const std::int64_t wrong[] = {5};
  CHECK_THROWS(table.keep(wrong, 1), BadInput, "key number 5 of 3");
}

void test_window() {
  EventBatch batch;
  batch.rows.resize(4);
  for (std::size_t i = 0; i < 4; ++i) {
    batch.put(i, 0, 1.0, std::to_string(i % 2), "t", nullptr, {});
  }
  const double times[] = {1.0, 1.0, 1.0, 1.0};
  IdWindow window(7);
  CHECK_EQ(window.pass(batch, times, {28, 9.0}), 0u);  // a window of one forgets the one before
  CHECK_EQ(window.size(), 1u);
  CHECK_EQ(window.bytes_used(), 24u);
  CHECK_EQ(window.pass(batch, times, {48, 9.0}), 3u);
  CHECK_EQ(window.size(), 2u);
  CHECK_THROWS(window.add("t", "x", 1.0, {27, 9.0}), BadInput, "at least 28 bytes");
  IdWindow other(7);
  const std::vector<std::uint64_t> held = window.fingerprints();
  other.load(held.data(), 2, {window.marks().begin(), window.marks().end()});
  CHECK(!other.add("t", "1", 2.0, {48, 9.0}));
  CHECK_THROWS(other.load(held.data(), 2, {{1.0, 1}}), BadInput, "2 ids, of which marks hold 1");
  CHECK_THROWS(other.load(held.data(), 2, {{2.0, 1}, {1.0, 1}}), BadInput, "must rise");
  const std::uint64_t twice[] = {5, 5};
  CHECK_THROWS(other.load(twice, 2, {{1.0, 2}}), BadInput, "twice");
  CHECK_EQ(other.size(), 2u);
}

void test_runs() {
  std::vector<double> values(6, 1.0);  // two parts of three keys
  const std::int64_t numbers[] = {2, 0, 2};
  const std::int64_t sizes[] = {1, 0, 2};
  const double grown[] = {1.0, 9.0, 2.0, 10.0, 90.0, 20.0};
  const double amounts[] = {1.0, 2.0, 1.0};
  add_runs(values.data(), 2, 3, numbers, 3, sizes, grown, 3, amounts);
  CHECK(values == (std::vector<double>{5.0, 1.0, 4.0, 41.0, 1.0, 31.0}));
  CHECK_THROWS(add_runs(values.data(), 2, 2, numbers, 3, sizes, grown, 3, amounts), BadInput,
               "key 2 among 2");
  CHECK_THROWS(add_runs(values.data(), 2, 3, numbers, 2, sizes, grown, 3, amounts), BadInput,
               "runs of 3 keys, 2 are given");
}

void test_edges() {
  std::vector<std::int32_t> targets(4, -1);
  std::vector<double> weights(4, 0.0);
  const EdgeRows table{targets.data(), weights.data(), 2, 2};
  const std::int64_t tails[] = {0, 0, 0, 1};
  const std::int64_t heads[] = {1, 0, 1, 0};
  const double grown[] = {1.0, 9.0, 2.0, 4.0};
  add_edges(table, tails, heads, grown, 4);
  CHECK(targets == (std::vector<std::int32_t>{1, -1, 0, -1}));
  CHECK(weights == (std::vector<double>{3.0, 0.0, 4.0, 0.0}));
  const std::int64_t outside[] = {2};
  CHECK_THROWS(add_edges(table, outside, heads, grown, 1), BadInput, "among 2 rows");
  const double none = std::numeric_limits<double>::quiet_NaN();
  CHECK_THROWS(add_edges(table, tails, heads, &none, 1), BadInput, "not a number");
  weights.assign(4, none);   // a row from a hostile file: some slot is taken, none outside it
  add_edges(table, tails, heads, grown, 1);
  CHECK(targets == (std::vector<std::int32_t>{1, -1, 0, -1}));
  targets.assign(4, -1);
  add_edges(table, tails, heads, grown, 1);
  CHECK(std::count(targets.begin(), targets.end(), 1) == 1);
}

}  // namespace

int main() {
  test_scan();
  test_damaged_bytes();
  test_keys();
  test_window();
  test_runs();
  test_edges();
  return 0;
}
