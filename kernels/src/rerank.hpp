// How an answer is settled, once its walk has ended.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "stoker/segment.hpp"

namespace stoker {

// A number of a record, which lies anywhere.
inline float read_f32(const std::uint8_t* p) {
  float value;
  std::memcpy(&value, p, 4);
  return value;
}

// What a candidate's distance was computed from; later ones are better.
enum class Grade : std::uint8_t { coarse, code, refined, exact };

struct Candidate {
  float distance;       // smaller is nearer: minus the centred inner product, or centred l2
  float sigma;          // standard deviation of its error; 0 when exact
  std::uint32_t row;
  bool expanded;
  Grade grade;
};

// All that is left of a query once its walk has ended. Settling it may take pages, and what is
// known of it waits here until they have come, while other queries walk.
struct Settling {
  SearchParams params;
  PreparedQuery query;
  QueryStats stats;
  std::vector<Candidate> list;      // what the walk found, the nearest first
  // What makes a distance a score: added to it under l2, less it for inner products.
  float offset = 0;
  double query_length = 0;          // where walks compare vectors
  bool reading = true;              // until the deadline, if pages may be read at all
  std::vector<PageRef> wanted;      // pages to read; see Rerank::wants

  // Of a batch.
  std::size_t number = 0;
  std::vector<std::uint32_t> rows;
  float* scores = nullptr;

  // Of Rerank.
  std::size_t k = 0;
  std::size_t count = 0;            // candidates that are members or may be, the first of `list`
  std::size_t step = 0;             // of reading, that comes next
  double loss = 0;                  // expected number of wrong members
  double loss_unread = 0;           // the same before anything was read
  double mixed = 1;                 // times as much is lost as is expected; see LossLine
  bool has_read = false;
  bool let_off = false;             // from reading
  double put_off_at = -1;           // loss that was settled in advance; see Rerank::put_off
  std::vector<double> doubt;        // each candidate's share of the loss
  std::vector<std::uint32_t> order; // candidates that `wanted` is for
  std::vector<float> vector;        // one assembled full vector
};

// What a walk knows its candidates by.
inline Grade walked_grade(const SegmentLayout& layout) noexcept {
  if (layout.walk_vectors) return Grade::exact;
  return layout.walk_coarse ? Grade::coarse : Grade::code;
}

// Full vectors, wherever they lie, and their distances from the query.
class FullVectors {
 public:
  FullVectors(const SegmentLayout& layout, const Kernels& kernels, const PagePool& pool,
              Settling& settling)
      : layout_(layout), kernels_(kernels), pages_(pool.view(layout.vectors.store)), s_(settling) {}

  float distance_to(const std::byte* vector) const;
  // Inside a ReadGuard. A vector in its page, or put together in the settling's `vector`; nullptr
  // where a page of it is absent.
  const std::byte* resident(std::uint32_t row) const;
  // Inside a ReadGuard. Starts to bring a resident vector to the processor.
  void prefetch(std::uint32_t row) const;
  // Adds the pages of a row's vector; fetched() takes as many.
  void want(std::uint32_t row, std::vector<PageRef>& wanted) const;
  // Puts together what was read from `at` on, which moves past it. Calls `missed` with the status of
  // each page that did not come; nullptr where one did not.
  template <typename Missed>
  const std::byte* fetched(const PinnedPages& got, std::size_t& at, std::uint32_t row,
                           const Missed& missed) const;

 private:
  double behind_query(const std::byte* vector) const;

  const SegmentLayout& layout_;
  const Kernels& kernels_;
  PagePool::View pages_;
  Settling& s_;
};

template <typename Missed>
const std::byte* FullVectors::fetched(const PinnedPages& got, std::size_t& at, std::uint32_t row,
                                      const Missed& missed) const {
  const std::size_t record = layout_.vectors.record_bytes;
  s_.vector.resize((record + 3) / 4);
  auto* out = reinterpret_cast<std::byte*>(s_.vector.data());
  std::size_t offset = static_cast<std::uint64_t>(row) * record % pages_.page_bytes;
  bool whole = true;
  for (std::size_t done = 0; done < record; ++at, offset = 0) {
    const std::byte* page = got.data(at);
    const std::size_t part = std::min(pages_.page_bytes - offset, record - done);
    if (page == nullptr) {
      whole = false;
      missed(got.status(at));
    } else {
      std::memcpy(out + done, page + offset, part);
    }
    done += part;
  }
  return whole ? out : nullptr;
}

// Settles an answer: begin(); while wants(), have the pages read, and take() them; finish(). No
// longer-lived than both its arguments; another one may go on where it was left.
class Rerank {
 public:
  Rerank(Searcher& searcher, Settling& settling);

  // Takes the best form of each candidate that is resident, and decides whether the query may do
  // without reading: in the order of these calls queries spend the searcher's credit.
  void begin();
  // Whether pages are to be read now, `wanted` ones.
  bool wants();
  // The query is to wait for what it wants while others begin. It counts meanwhile as one that reads
  // and loses what reads aim at, so that those others spend no less, nor more, than after it.
  void put_off();
  // What was read, from the entry `first` of a fetch on. What others wanted may lie beside it.
  void take(const PinnedPages& got, std::size_t first);
  void finish(std::uint32_t* rows, float* scores);

 private:
  double loss_max() const;
  double loss_left() const;
  double lost(double loss, bool has_read) const;
  double mixed() const;
  Grade step_grade() const;
  template <typename Want>
  void want_doubtful(Grade grade, const Want& want);
  void want_planes();
  void want_doubtful_vectors();
  void want_vectors();
  void take_planes(const PinnedPages& got, std::size_t first);
  void take_vectors(const PinnedPages& got, std::size_t first);
  void missed(PageStatus status);
  void sort_and_judge();
  void improve(Candidate& candidate, float distance, float sigma, Grade grade);
  void estimate(Candidate& candidate, float product, float length2, float error, Grade grade);
  void use_code(Candidate& candidate, const std::uint8_t* high);
  void refine(Candidate& candidate, const std::uint8_t* high, const std::uint8_t* low);
  void upgrade_resident(Candidate& candidate);
  double expected_loss();

  Searcher& searcher_;
  Settling& s_;
  const SegmentLayout& layout_;
  PagePool& pool_;
  PagePool::View fine_;     // pages of 4-bit codes, which second codes need beside them
  PagePool::View refine_;
  FullVectors vectors_;
  std::size_t code_bytes_;  // of a 4-bit code
  std::size_t blocks_;
  bool settles_by_vectors_;   // what is in doubt, at first
};

// False from the deadline on, which the statistics then say was hit.
bool may_read(Settling& settling);

}  // namespace stoker
