// Searches on one thread: one at a time, or a batch whose queries do not wait for each other's reads.
//
//   ask ──walk──> in doubt? ──no───────────────────────────────> answered
//                    │ yes
//                 waiting ──launch──> flying ──land──> settled? ──yes──> answered
//                    ^                                    │ no
//                    └────────────────────────────────────┘
//
// One flight at a time: what lands decides what is read next, and a thread that waits for others'
// pages has to take in one flight only before it does.
#include <algorithm>
#include <iterator>
#include <new>
#include <utility>

#include "walk.hpp"

namespace stoker {
namespace {

// A flight starts once so many pages are wanted or, lest few wait for ever, so many queries were
// asked meanwhile, or as few are left, who would be done before it lands. Processor time of a fetch,
// a page: alone 20 us, of 8 pages 6, of 32 and more 4.
constexpr std::size_t kFlightPages = 32;
constexpr std::size_t kFlightQueries = 64;
// Pages of one flight, if more than one query wants them: as many as a ring takes at once, and few
// of the frames that there are for such pages. Those of a flight keep nothing for later queries
// meanwhile. With 320 frames and flights of 128 pages on two threads, a seventh of the pages found
// no frame, and 1.1 pages were read a query where singles read 0.95.
constexpr std::size_t kFlightPagesMax = 128;
constexpr std::size_t kFlightFrameShare = 16;
// Those who wait hold no frames. So much may be wanted by them before somebody waits for a flight.
constexpr std::size_t kWaitingPagesMax = 256;
// What is kept for the next batch.
constexpr std::size_t kSpareMax = 32;

}  // namespace

Searcher::Session::Session(Searcher& searcher)
    : searcher_(searcher), scratch_(searcher.take_scratch()) {}

Searcher::Session::~Session() {
  try {
    if (scratch_ != nullptr && whole_ && flying_.empty()) {
      searcher_.give_scratch(std::move(scratch_));
    }
  } catch (const std::bad_alloc&) {
    // The next search makes one anew.
  }
  searcher_.hits_.fetch_add(hits_, std::memory_order_relaxed);
  searcher_.misses_.fetch_add(misses_, std::memory_order_relaxed);
}

std::unique_ptr<Settling> Searcher::Session::take_settling(const SearchParams& params) {
  std::unique_ptr<Settling> settling;
  if (scratch_->spare.empty()) {
    settling = std::make_unique<Settling>();
  } else {
    settling = std::move(scratch_->spare.back());
    scratch_->spare.pop_back();
  }
  settling->params = params;
  settling->stats = QueryStats();
  settling->reading = !params.resident_only;
  return settling;
}

QueryStats Searcher::Session::search(const float* query, const SearchParams& params,
                                     std::uint32_t* rows, float* scores) {
  if (scratch_ == nullptr) scratch_ = searcher_.take_scratch();
  std::unique_ptr<Settling> settling = take_settling(params);
  // Held here meanwhile: a walk that throws leaves it in no state to be used again.
  std::unique_ptr<Scratch> scratch = std::move(scratch_);
  QueryStats& stats = settling->stats;
  Walk(searcher_, *scratch, *settling).run(query);
  Rerank rerank(searcher_, *settling);
  rerank.begin();
  while (rerank.wants()) {
    const PinnedPages got = searcher_.pool_.fetch(settling->wanted.data(),
                                                  settling->wanted.size(), params.deadline);
    if (got.reads() > 0) ++stats.rounds;
    stats.pages_read += got.bytes_read() / got.page_bytes();
    stats.bytes_read += got.bytes_read();
    rerank.take(got, 0);
  }
  rerank.finish(rows, scores);
  const QueryStats found = stats;
  scratch->spare.push_back(std::move(settling));
  scratch_ = std::move(scratch);
  hits_ += found.hits;
  misses_ += found.misses;
  return found;
}

// ---- batches -----------------------------------------------------------------------------------

void Searcher::Session::ask(std::size_t number, const float* query, const SearchParams& params,
                            float* scores, std::size_t left, Answers& answers) {
  whole_ = false;
  {
    std::unique_ptr<Settling> settling = take_settling(params);
    settling->number = number;
    settling->scores = scores;
    Walk(searcher_, *scratch_, *settling).run(query);
    Rerank rerank(searcher_, *settling);
    rerank.begin();
    go_on(std::move(settling), rerank, answers);
  }
  if (!flying_.empty() && scratch_->flight.poll()) land(answers);
  // What landed may want more: one flight a query would not keep up with that.
  while (waiting_pages_ > kWaitingPagesMax) {
    land(answers);
    if (waiting_pages_ > kWaitingPagesMax) {
      launch(answers);
      scratch_->flight.issue();
    }
  }
  if (!waiting_.empty()) {
    ++waiting_since_;
    const bool due = left < kFlightQueries || waiting_since_ >= kFlightQueries ||
                     waiting_pages_ >= std::min(kFlightPages, flight_pages_max_);
    if (due && flying_.empty()) {
      launch(answers);
      scratch_->flight.issue();
    }
  }
  whole_ = true;
}

void Searcher::Session::finish(Answers& answers) {
  whole_ = false;
  while (!flying_.empty() || !waiting_.empty()) {
    if (flying_.empty()) launch(answers);
    land(answers);
  }
  whole_ = true;
}

// Has the query wait for what it wants to read, or ends it.
void Searcher::Session::go_on(std::unique_ptr<Settling> settling, Rerank& rerank,
                              Answers& answers) {
  if (rerank.wants()) {
    rerank.put_off();
    if (flight_pages_max_ == 0) {
      const std::size_t share = searcher_.pool_.demand_frames() / kFlightFrameShare;
      flight_pages_max_ = std::clamp<std::size_t>(share, 1, kFlightPagesMax);
    }
    waiting_pages_ += settling->wanted.size();
    waiting_.push_back(std::move(settling));
    return;
  }
  settling->rows.resize(settling->params.k);
  rerank.finish(settling->rows.data(), settling->scores);
  hits_ += settling->stats.hits;
  misses_ += settling->stats.misses;
  answers.take(settling->number, settling->rows.data(), settling->stats);
  if (scratch_->spare.size() < kSpareMax) scratch_->spare.push_back(std::move(settling));
}

// Has read what the first of those that wait want, as many as go together. Past the deadline, which
// a batch has in common, all of them are answered as they are instead, and nothing flies.
void Searcher::Session::launch(Answers& answers) {
  if (!may_read(*waiting_.front())) {
    flying_.swap(waiting_);
    waiting_pages_ = 0;
    for (std::unique_ptr<Settling>& settling : flying_) {
      Rerank rerank(searcher_, *settling);
      go_on(std::move(settling), rerank, answers);
    }
    flying_.clear();
    return;
  }
  std::vector<PageRef>& wanted = scratch_->wanted;
  wanted.clear();
  auto stays = waiting_.begin();
  for (; stays != waiting_.end(); ++stays) {
    const std::vector<PageRef>& more = (*stays)->wanted;
    if (!wanted.empty() && wanted.size() + more.size() > flight_pages_max_) break;
    wanted.insert(wanted.end(), more.begin(), more.end());
  }
  scratch_->flight = searcher_.pool_.begin_fetch(wanted.data(), wanted.size(),
                                                 waiting_.front()->params.deadline);
  flying_.assign(std::make_move_iterator(waiting_.begin()), std::make_move_iterator(stays));
  waiting_.erase(waiting_.begin(), stays);
  waiting_pages_ -= wanted.size();
  waiting_since_ = 0;
}

// Waits for what is on its way, if anything, and goes on with the answers that wait for it.
void Searcher::Session::land(Answers& answers) {
  if (flying_.empty()) return;
  const PinnedPages got = scratch_->flight.finish(flying_.front()->params.deadline);
  // A page that several wanted counts for the first of them; what came beside those that were
  // wanted, and second tries, for the first query.
  std::uint64_t beside = got.bytes_read();
  std::size_t first = 0;
  for (const std::unique_ptr<Settling>& settling : flying_) {
    std::uint64_t pages = 0;
    for (std::size_t i = 0; i < settling->wanted.size(); ++i) pages += got.is_read(first++) ? 1 : 0;
    if (pages > 0) ++settling->stats.rounds;
    settling->stats.pages_read += pages;
    settling->stats.bytes_read += pages * got.page_bytes();
    beside -= std::min(beside, pages * got.page_bytes());
  }
  flying_.front()->stats.pages_read += beside / got.page_bytes();
  flying_.front()->stats.bytes_read += beside;
  first = 0;
  for (std::unique_ptr<Settling>& settling : flying_) {
    const std::size_t wanted = settling->wanted.size();
    Rerank rerank(searcher_, *settling);
    rerank.take(got, first);
    first += wanted;
    go_on(std::move(settling), rerank, answers);
  }
  flying_.clear();
}

}  // namespace stoker
