// Batches, whose queries are settled while later ones walk: what singles answer, over devices that
// fail, dawdle and are let down.
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <mutex>
#include <numeric>
#include <random>
#include <stdexcept>
#include <thread>
#include <vector>

#include "check.hpp"
#include "page_files.hpp"
#include "segment_fixture.hpp"
#include "stoker/loss_credit.hpp"

using namespace stoker;
using stoker::testing::Fixture;
using stoker::testing::kBackends;
using stoker::testing::kPage;
using stoker::testing::recall;

namespace {

struct Answer {
  std::vector<std::uint32_t> rows;
  std::vector<float> scores;
  QueryStats stats;
  int taken = 0;
};

// Keeps the answers of a batch.
struct Kept final : Searcher::Answers {
  Kept(std::size_t count, std::uint32_t k_) : k(k_), answers(count) {
    for (Answer& answer : answers) answer.scores.resize(k);
  }
  void take(std::size_t number, const std::uint32_t* rows, const QueryStats& stats) override {
    Answer& answer = answers.at(number);
    answer.rows.assign(rows, rows + k);
    answer.stats = stats;
    ++answer.taken;
  }
  const std::uint32_t k;
  std::vector<Answer> answers;
};

// `left`: how many more the session is told to expect; with few it reads at once.
std::vector<Answer> ask_all(Searcher& searcher, const std::vector<float>& queries, std::size_t dim,
                            const SearchParams& params, std::size_t left = 1000) {
  Kept kept(queries.size() / dim, params.k);
  Searcher::Session session(searcher);
  for (std::size_t i = 0; i < kept.answers.size(); ++i) {
    session.ask(i, queries.data() + i * dim, params, kept.answers[i].scores.data(), left, kept);
  }
  session.finish(kept);
  for (const Answer& answer : kept.answers) CHECK_EQ(answer.taken, 1);
  return std::move(kept.answers);
}

// A target that no code is sure of: every query reads vectors.
SearchParams reads_all(std::uint32_t ef) {
  SearchParams params;
  params.ef = ef;
  params.rerank_target = 0.9999f;
  params.read_vectors = true;
  return params;
}

// Said to be followed by many, each query of a batch finds the same pages in memory as it would
// alone, since nothing that one of them wants is read before the last has walked: three queries
// want fewer pages than a flight waits for. So they answer alike, to the bit.
void batches_answer_like_singles(bool l2, bool coarse, bool vectors, IoBackend backend) {
  std::mt19937 rng(20261130);
  Fixture f(250, 900, l2, 4096 * kPage, rng, false, coarse, false, backend);
  Searcher searcher(f.pool, f.layout, f.quantizer);
  SearchParams params = reads_all(60);
  params.rerank_reads_max = 4;
  params.read_vectors = vectors;
  std::vector<std::uint8_t> allow((f.n + 7) / 8, 0xB7);
  std::uint64_t alone = 0;
  std::uint64_t together = 0;
  f.load_walked();
  for (int round = 0; round < 24; ++round) {
    params.k = round % 2 == 0 ? 10 : 3;
    params.allow = round % 3 == 0 ? allow.data() : nullptr;
    params.allow_count = 0;
    for (std::uint32_t i = 0; i < f.n; ++i) params.allow_count += (allow[i >> 3] >> (i & 7)) & 1;
    const auto queries = Fixture::make(3, f.dim, rng);
    std::vector<Answer> singles;
    for (std::size_t i = 0; i < 3; ++i) {
      f.forget_forms();
      Answer one;
      one.rows.resize(params.k);
      one.scores.resize(params.k);
      one.stats = searcher.search(queries.data() + i * f.dim, params, one.rows.data(),
                                  one.scores.data());
      singles.push_back(one);
    }
    f.forget_forms();
    const std::uint64_t before = f.pool.stats().demand_bytes;
    const std::vector<Answer> batch = ask_all(searcher, queries, f.dim, params);
    std::uint64_t read = 0;
    for (std::size_t i = 0; i < 3; ++i) {
      CHECK(batch[i].rows == singles[i].rows);
      CHECK(batch[i].scores == singles[i].scores);
      CHECK_EQ(batch[i].stats.expected_recall, singles[i].stats.expected_recall);
      CHECK_EQ(batch[i].stats.exact, singles[i].stats.exact);
      CHECK_EQ(batch[i].stats.refined, singles[i].stats.refined);
      CHECK_EQ(batch[i].stats.misses, singles[i].stats.misses);
      CHECK(batch[i].stats.rounds <= singles[i].stats.rounds);
      CHECK_EQ(batch[i].stats.bytes_read, batch[i].stats.pages_read * kPage);
      read += batch[i].stats.bytes_read;
      alone += singles[i].stats.pages_read;
      together += batch[i].stats.pages_read;
    }
    CHECK_EQ(read, f.pool.stats().demand_bytes - before);
    f.pool.check();
  }
  CHECK(alone > 0);
  CHECK(together < alone);   // a page that two want is read once
}

// Delays that make flights overlap with walks, errors and flipped bits. It has to outlive every
// read: where some may be late, it is made before the pool, which waits for them in the end.
struct Faults : ReadFaults {
  Faults() { set_read_faults(this); }
  ~Faults() override { set_read_faults(nullptr); }
  std::chrono::microseconds delay(const ReadRequest&) noexcept override {
    const std::lock_guard<std::mutex> lock(mutex);
    const unsigned most = delay_us;
    return std::chrono::microseconds(most == 0 ? 0 : random() % most);
  }
  std::int64_t result(const ReadRequest& request, std::int64_t outcome) noexcept override {
    const std::lock_guard<std::mutex> lock(mutex);
    const std::uint64_t dice = random() % 100;
    if (dice < error_percent) return -EIO;
    if (dice < error_percent + flip_percent && outcome > 0) {
      const iovec& part = request.parts[random() % request.parts.size()];
      static_cast<unsigned char*>(part.iov_base)[random() % part.iov_len] ^= 0x10;
    }
    return outcome;
  }
  std::mutex mutex;
  std::mt19937_64 random{7};
  std::atomic<unsigned> delay_us{0};   // at most; may change while reads are late
  unsigned error_percent = 0;
  unsigned flip_percent = 0;
};

// Several batches at once over fewer frames than pages: their walks miss what others' flights read,
// and the other way round.
void batches_of_threads_agree(IoBackend backend) {
  std::mt19937 rng(3);
  Fixture f(400, 32, true, 24 * kPage, rng, false, false, false, backend);
  Searcher searcher(f.pool, f.layout, f.quantizer);
  Faults faults;
  faults.delay_us = 200;
  SearchParams params;
  params.ef = 200;
  params.rerank_target = 0.99f;
  const auto queries = Fixture::make(60, f.dim, rng);
  std::vector<double> recalls(4, 0);
  std::vector<std::thread> threads;
  for (std::size_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      const std::vector<Answer> answers =
          ask_all(searcher, queries, f.dim, params, t < 2 ? 0 : 1000);
      for (std::size_t i = 0; i < answers.size(); ++i) {
        recalls[t] += recall(answers[i].rows, f.truth(queries.data() + i * f.dim, params.k));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const double sum : recalls) CHECK(sum / 60 > 0.9);
  f.pool.check();
}

// A device that fails costs completeness: every query is answered once, says what it lacks, and
// nothing stays pinned.
void failing_reads_cost_completeness(unsigned error_percent, unsigned flip_percent,
                                     IoBackend backend) {
  std::mt19937 rng(5);
  Fixture f(250, 300, true, 4096 * kPage, rng, false, true, false, backend);
  Searcher searcher(f.pool, f.layout, f.quantizer);
  SearchParams params = reads_all(40);
  const auto queries = Fixture::make(120, f.dim, rng);
  f.load_walked();
  std::uint64_t damaged = 0;
  {
    Faults faults;
    faults.error_percent = error_percent;
    faults.flip_percent = flip_percent;
    for (const Answer& answer : ask_all(searcher, queries, f.dim, params)) {
      damaged += answer.stats.damaged;
      CHECK(answer.rows[9] != kNoRow);
      for (std::size_t j = 1; j < params.k; ++j) CHECK(answer.scores[j] >= answer.scores[j - 1]);
    }
  }
  CHECK(damaged > 0);
  f.pool.check();
  for (const StoreId store : {f.layout.codes.store, f.layout.refine.store, f.layout.vectors.store}) {
    const std::uint64_t resident = f.pool.store_stats(store).resident;
    CHECK_EQ(f.evict_all(store), resident);
  }
}

// Past the deadline answers are made of what there is, and say so; what is on its way then ends
// without them.
void a_deadline_ends_flights(IoBackend backend) {
  Faults faults;
  std::mt19937 rng(6);
  Fixture f(250, 300, true, 4096 * kPage, rng, false, true, false, backend);
  Searcher searcher(f.pool, f.layout, f.quantizer);
  SearchParams params = reads_all(40);
  const auto queries = Fixture::make(40, f.dim, rng);
  f.load_walked();
  faults.delay_us = 300'000;
  params.deadline = Clock::now() + std::chrono::milliseconds(20);
  std::size_t late = 0;
  for (const Answer& answer : ask_all(searcher, queries, f.dim, params)) {
    CHECK(answer.rows[9] != kNoRow);
    late += answer.stats.deadline_hit ? 1 : 0;
  }
  CHECK(late > 0);
  f.pool.check();
}

// Queries that wait for a flight when their deadline passes are answered of what there is, and
// nothing is read for them.
void nothing_flies_past_the_deadline(IoBackend backend) {
  std::mt19937 rng(11);
  Fixture f(250, 900, true, 4096 * kPage, rng, false, true, false, backend);
  Searcher searcher(f.pool, f.layout, f.quantizer);
  SearchParams params = reads_all(60);
  params.rerank_reads_max = 4;
  const auto queries = Fixture::make(3, f.dim, rng);
  f.load_walked();
  for (auto time = std::chrono::milliseconds(20);; time *= 2) {
    params.deadline = Clock::now() + time;
    Kept kept(3, params.k);
    Searcher::Session session(searcher);
    const std::uint64_t reads = f.pool.stats().demand_reads;
    for (std::size_t i = 0; i < 3; ++i) {
      session.ask(i, queries.data() + i * f.dim, params, kept.answers[i].scores.data(), 1000, kept);
    }
    if (Clock::now() >= *params.deadline) continue;   // on a busy machine: once more, with longer
    for (const Answer& answer : kept.answers) CHECK_EQ(answer.taken, 0);
    while (Clock::now() < *params.deadline) std::this_thread::yield();
    session.finish(kept);
    CHECK_EQ(f.pool.stats().demand_reads, reads);
    for (const Answer& answer : kept.answers) {
      CHECK_EQ(answer.taken, 1);
      CHECK(answer.rows[9] != kNoRow);
      CHECK(answer.stats.deadline_hit);
      CHECK_EQ(answer.stats.rounds, 0u);
    }
    break;
  }
  f.pool.check();
}

// A session that goes with a flight in the air, and one whose caller throws, leave nothing behind.
void abandoned_batches_leave_nothing(IoBackend backend) {
  Faults faults;
  std::mt19937 rng(8);
  Fixture f(250, 300, true, 4096 * kPage, rng, false, true, false, backend);
  Searcher searcher(f.pool, f.layout, f.quantizer);
  SearchParams params = reads_all(40);
  const auto queries = Fixture::make(40, f.dim, rng);
  const std::vector<Answer> whole = ask_all(searcher, queries, f.dim, params);
  struct Throwing final : Searcher::Answers {
    void take(std::size_t, const std::uint32_t*, const QueryStats&) override {
      throw std::runtime_error("no place for it");
    }
  } throwing;
  faults.delay_us = 3000;
  for (int round = 0; round < 6; ++round) {
    f.forget_forms();
    std::vector<float> scores(40 * params.k);
    Kept kept(40, params.k);
    Searcher::Answers& answers = round % 2 == 0 ? static_cast<Searcher::Answers&>(kept) : throwing;
    try {
      Searcher::Session session(searcher);
      for (std::size_t i = 0; i < 40; ++i) {
        float* to = scores.data() + i * params.k;
        session.ask(i, queries.data() + i * f.dim, params, to, 40, answers);
      }
      if (round % 2 != 0) session.finish(answers);
      CHECK(round % 2 == 0);
    } catch (const std::runtime_error&) {
      CHECK(round % 2 != 0);
    }
    // Who comes next reads the same pages, also those that are still on their way.
    const std::vector<Answer> again = ask_all(searcher, queries, f.dim, params);
    for (std::size_t i = 0; i < 40; ++i) CHECK(again[i].rows[0] == whole[i].rows[0]);
    f.pool.check();
  }
}

// However long a batch: where a flight has room for one query, and each takes several flights, few
// wait all the same.
void few_wait_at_once(IoBackend backend) {
  std::mt19937 rng(10);
  Fixture f(250, 900, true, 40 * kPage, rng, false, true, false, backend);
  Searcher searcher(f.pool, f.layout, f.quantizer);
  SearchParams params = reads_all(60);
  params.rerank_reads_max = 4;
  f.load_walked();
  struct Counted final : Searcher::Answers {
    void take(std::size_t, const std::uint32_t*, const QueryStats& stats) override {
      ++count;
      rounds += stats.rounds;
    }
    std::size_t count = 0;
    std::size_t rounds = 0;
  } answered;
  constexpr std::size_t kQueries = 600;
  const auto queries = Fixture::make(kQueries, f.dim, rng);
  std::vector<float> scores(kQueries * params.k);
  std::size_t most = 0;
  Searcher::Session session(searcher);
  for (std::size_t i = 0; i < kQueries; ++i) {
    session.ask(i, queries.data() + i * f.dim, params, scores.data() + i * params.k, 1000, answered);
    most = std::max(most, i + 1 - answered.count);
  }
  session.finish(answered);
  std::printf("at most %zu of %zu waited, for %zu rounds in all\n", most, kQueries, answered.rounds);
  CHECK_EQ(answered.count, kQueries);
  CHECK(answered.rounds > kQueries);
  CHECK(most < 300);   // those who want 256 pages, a flight, and the last one asked
}

// The mean holds in batches, too, though those that read settle their account late.
void the_mean_holds() {
  std::mt19937 rng(9);
  const auto queries = Fixture::make(400, 48, rng);
  std::uint64_t pages[2];
  double mean[2] = {0, 0};
  for (const bool batch : {false, true}) {
    std::mt19937 same(7);
    Fixture f(2000, 48, false, 70 * kPage, same);
    Searcher searcher(f.pool, f.layout, f.quantizer);
    SearchParams params;
    params.ef = 100;
    params.rerank_target = 0.96f;
    params.mean_loss = 0.05f;
    params.loss_ceiling = 0.3f;
    std::vector<Answer> answers;
    if (batch) {
      answers = ask_all(searcher, queries, 48, params);
    } else {
      for (std::size_t i = 0; i < 400; ++i) {
        answers.push_back(ask_all(searcher, {queries.begin() + static_cast<std::ptrdiff_t>(i * 48),
                                             queries.begin() + static_cast<std::ptrdiff_t>(i * 48 + 48)},
                                  48, params)[0]);
      }
    }
    pages[batch] = 0;
    for (const Answer& answer : answers) {
      pages[batch] += answer.stats.pages_read;
      mean[batch] += answer.stats.expected_recall / 400.0;
    }
  }
  std::printf("singles: %llu pages at %.4f; a batch: %llu at %.4f\n",
              static_cast<unsigned long long>(pages[0]), mean[0],
              static_cast<unsigned long long>(pages[1]), mean[1]);
  for (const double one : mean) CHECK(one > 1 - 0.05 * (1 + LossCredit::kCreditMax / 400));
}

}  // namespace

int main() {
  for (const IoBackend backend : kBackends) {
    for (const bool l2 : {false, true}) {
      for (const bool coarse : {false, true}) {
        batches_answer_like_singles(l2, coarse, l2 != coarse, backend);
      }
    }
    batches_of_threads_agree(backend);
    failing_reads_cost_completeness(20, 0, backend);
    failing_reads_cost_completeness(30, 30, backend);
    failing_reads_cost_completeness(100, 0, backend);
    a_deadline_ends_flights(backend);
    nothing_flies_past_the_deadline(backend);
    abandoned_batches_leave_nothing(backend);
    few_wait_at_once(backend);
  }
  the_mean_holds();
  return 0;
}
