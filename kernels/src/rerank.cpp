// From candidates to an answer: upgrade what is resident, estimate what is still in doubt, and
// read from the device only what can change the answer.
#include <algorithm>
#include <cmath>
#include <optional>

#include "walk.hpp"   // of Searcher, and what codes walks compare

namespace stoker {
namespace {

// Candidates further than this many standard deviations behind the k-th cannot come into the
// answer in any way that the expected recall would notice.
constexpr float kDoubtSigmas = 3.5f;

// What a query that reads may keep of what it may lose. The first page costs it a wait for the
// device, the next ones hardly more; and the surer it ends, the more others may do without.
constexpr double kLeftByReads = 0.1;

// What a query reads, one after the other: two helpings of what settles its doubt, and full vectors
// where they are asked for.
constexpr std::size_t kSteps = 3;
// Pages of a row's first and second code, which lie apart.
constexpr double kPlanePages = 2;

// Vectors on their way from memory while one is compared.
constexpr std::size_t kVectorsAhead = 3;

// Probability that a standard normal variable exceeds `z`.
double upper_tail(double z) { return 0.5 * std::erfc(z * 0.70710678118654752); }

// On how many pages a vector lies in the mean: it is cut wherever a page ends.
double pages_of_vector(const SegmentLayout& layout, const PagePool& pool) {
  const double bytes = static_cast<double>(layout.vectors.record_bytes);
  return 1.0 + (bytes - 1.0) / static_cast<double>(pool.view(layout.vectors.store).page_bytes);
}

bool nearer(const Candidate& a, const Candidate& b) {
  return a.distance < b.distance || (a.distance == b.distance && a.row < b.row);
}

}  // namespace

bool may_read(Settling& settling) {
  if (!settling.reading) return false;
  if (settling.params.deadline && Clock::now() >= *settling.params.deadline) {
    settling.stats.deadline_hit = true;
    settling.reading = false;
  }
  return settling.reading;
}

Rerank::Rerank(Searcher& searcher, Settling& settling)
    : searcher_(searcher),
      s_(settling),
      layout_(searcher.layout_),
      pool_(searcher.pool_),
      fine_(pool_.view(layout_.codes.store)),
      refine_(pool_.view(layout_.refine.store)),
      vectors_(layout_, searcher.kernels_, pool_, settling),
      code_bytes_(searcher.quantizer_.shape().code_bytes),
      blocks_(searcher.quantizer_.shape().blocks),
      // After a walk on coarse codes a row takes both its codes, or its vector.
      settles_by_vectors_(layout_.walk_coarse && pages_of_vector(layout_, pool_) < kPlanePages) {}

// Takes a better distance. One that is no number, from a hostile record, is damage, as in offer():
// the candidate stays as it was, since sorting by such distances is undefined.
void Rerank::improve(Candidate& candidate, float distance, float sigma, Grade grade) {
  if (!(std::fabs(distance) < 3.0e38f)) {
    ++s_.stats.damaged;
    return;
  }
  candidate.distance = distance;
  candidate.sigma = sigma > 0 ? sigma : 0;
  candidate.grade = grade;
}

// For a candidate that the walk knows by 2 bits: the estimate from 4.
void Rerank::use_code(Candidate& candidate, const std::uint8_t* high) {
  std::int32_t dot;
  searcher_.kernels_.dot_code4(s_.query.q8.data(), blocks_, &high, 1, &dot);
  const float correction = read_f32(high + code_bytes_);
  const float length2 = read_f32(high + code_bytes_ + 4);
  const float centred = static_cast<float>(dot) - 7.5f * static_cast<float>(s_.query.sum8);
  estimate(candidate, centred * s_.query.scale8 * correction, length2, layout_.code_error,
           Grade::code);
}

void Rerank::refine(Candidate& candidate, const std::uint8_t* high, const std::uint8_t* low) {
  const std::int64_t dot =
      searcher_.kernels_.dot_code8(s_.query.q16.data(), blocks_, high, low);
  const float correction = read_f32(low + code_bytes_);
  const float length2 = read_f32(high + code_bytes_ + 4);
  const float product = static_cast<float>(dot) * s_.query.scale16 * correction;
  estimate(candidate, product, length2, layout_.refine_error, Grade::refined);
}

// Takes what codes say: the product with the centred row, and the second number of its record.
void Rerank::estimate(Candidate& candidate, float product, float length2, float error,
                      Grade grade) {
  const PreparedQuery& q = s_.query;
  improve(candidate, q.product_factor * product + q.length_factor * length2,
          -q.product_factor * error * q.length * std::sqrt(length2), grade);
}

// Inside a ReadGuard. Takes the best form of the candidate that is resident.
void Rerank::upgrade_resident(Candidate& candidate) {
  if (candidate.grade == Grade::exact) return;
  if (const std::byte* vector = vectors_.resident(candidate.row)) {
    improve(candidate, vectors_.distance_to(vector), 0, Grade::exact);
    return;
  }
  if (candidate.grade == Grade::refined) return;
  const std::byte* low = refine_.touch(layout_.refine.page_of(candidate.row));
  if (low == nullptr && candidate.grade == Grade::code) return;
  const std::byte* high = fine_.touch(layout_.codes.page_of(candidate.row));
  if (high == nullptr) return;
  const auto* code =
      reinterpret_cast<const std::uint8_t*>(high + layout_.codes.offset_of(candidate.row));
  if (low == nullptr) {
    use_code(candidate, code);
  } else {
    refine(candidate, code,
           reinterpret_cast<const std::uint8_t*>(low + layout_.refine.offset_of(candidate.row)));
  }
}

// The expected number of wrong members among the k nearest of the first `count` candidates, which
// are sorted. Each error is taken as normal and independent; the border between members and
// others lies half-way between the k-th and the next. Fills `doubt` with each one's share.
double Rerank::expected_loss() {
  const std::vector<Candidate>& list = s_.list;
  const std::size_t k = s_.k;
  s_.doubt.assign(s_.count, 0.0);
  if (s_.count <= k) return 0;
  const double border = 0.5 * (static_cast<double>(list[k - 1].distance) +
                               static_cast<double>(list[k].distance));
  // Copies of one vector have one code: which of them are members is no loss.
  const bool tied = list[k - 1].distance == list[k].distance;
  double out = 0;
  double in = 0;
  for (std::size_t i = 0; i < s_.count; ++i) {
    const double sigma = list[i].sigma;
    if (sigma <= 0 || (tied && list[i].distance == list[k].distance)) continue;
    const double tail = upper_tail(std::fabs(list[i].distance - border) / sigma);
    s_.doubt[i] = tail;
    (i < k ? out : in) += tail;
  }
  return std::max(out, in);
}

void Rerank::sort_and_judge() {
  std::sort(s_.list.begin(), s_.list.begin() + static_cast<std::ptrdiff_t>(s_.count), nearer);
  s_.loss = expected_loss();
}

void Rerank::begin() {
  const SearchParams& params = s_.params;
  s_.k = std::min<std::size_t>(params.k, s_.list.size());
  s_.count = s_.k;
  s_.step = 0;
  s_.loss = 0;
  s_.loss_unread = 0;
  s_.mixed = 1;
  s_.has_read = false;
  s_.let_off = false;
  s_.put_off_at = -1;
  if (s_.k == 0) return;
  // Everything that could still be a member: the rest is out of doubt and stays behind.
  const Candidate& last = s_.list[s_.k - 1];
  const float reach = last.distance + kDoubtSigmas * 1.41421356f * last.sigma;
  while (s_.count < s_.list.size() && s_.list[s_.count].distance <= reach) ++s_.count;
  {
    const Grade walked = walked_grade(layout_);
    const PagePool::ReadGuard guard(pool_);
    for (std::size_t i = 0; i < std::min(kVectorsAhead, s_.count); ++i) {
      vectors_.prefetch(s_.list[i].row);
    }
    for (std::size_t i = 0; i < s_.count; ++i) {
      if (i + kVectorsAhead < s_.count) vectors_.prefetch(s_.list[i + kVectorsAhead].row);
      upgrade_resident(s_.list[i]);
    }
    for (std::size_t i = 0; i < s_.count; ++i) s_.stats.hits += s_.list[i].grade > walked ? 1 : 0;
  }
  sort_and_judge();
  s_.mixed = mixed();
  s_.loss_unread = s_.loss * s_.mixed;
  s_.let_off = s_.loss_unread > loss_max() &&
               s_.loss <= params.loss_ceiling * static_cast<double>(s_.k) && may_read(s_) &&
               !params.read_vectors &&
               searcher_.credit_.spend(lost(s_.loss, false), params.mean_loss);
}

// How many times as much is lost as is expected, where part of the answer is known better than by
// what the walk compared.
double Rerank::mixed() const {
  if (s_.params.line.mixed <= 0) return 1;
  std::size_t known = 0;
  for (std::size_t i = 0; i < s_.k; ++i) known += s_.list[i].grade > walked_grade(layout_) ? 1 : 0;
  return 1 + s_.params.line.mixed * static_cast<double>(known) / static_cast<double>(s_.k);
}

double Rerank::loss_max() const {
  return (1.0 - static_cast<double>(s_.params.rerank_target)) * static_cast<double>(s_.k);
}

// What a query that reads may keep in doubt. Where none may go without reading, they read no
// further down for that.
double Rerank::loss_left() const {
  const double mean = static_cast<double>(s_.params.mean_loss) * static_cast<double>(s_.k);
  return kLeftByReads * std::max(loss_max(), mean);
}

// The share of the true k that a query with so many wrong members expected is taken to lose. What
// the walk has not met stays lost when the rest is read, and those in most doubt miss most of it.
double Rerank::lost(double loss, bool has_read) const {
  const LossLine& line = s_.params.line;
  const double k = static_cast<double>(s_.k);
  loss *= s_.mixed;
  double found = line.least + line.share * (loss / k);
  if (has_read) {
    const double codes = std::max(static_cast<double>(line.share) - line.read_share, 0.0);
    found = std::max(line.read_least + line.read_share * (s_.loss_unread / k), 0.0) +
            codes * (loss / k);
  }
  return std::min(std::max(found, 0.0), 1.0);
}

// What the step that comes next lifts candidates to. What vectors leave in doubt, since they moved
// the border or no more of them could be read, takes codes.
Grade Rerank::step_grade() const {
  const bool vectors = s_.step + 1 == kSteps || (s_.step == 0 && settles_by_vectors_);
  return vectors ? Grade::exact : Grade::refined;
}

bool Rerank::wants() {
  for (; s_.k > 0 && s_.step < kSteps; ++s_.step) {
    s_.wanted.clear();
    s_.order.clear();
    if (s_.step + 1 == kSteps) {
      if (s_.params.read_vectors && may_read(s_)) want_vectors();
    } else if (step_grade() > walked_grade(layout_) && s_.loss * s_.mixed > loss_max() &&
               !s_.let_off && may_read(s_)) {
      step_grade() == Grade::exact ? want_doubtful_vectors() : want_planes();
    }
    if (!s_.wanted.empty()) return true;
  }
  return false;
}

void Rerank::put_off() {
  if (s_.let_off || s_.put_off_at >= 0) return;
  s_.put_off_at = lost(std::min(s_.loss, loss_left()), true);
  searcher_.credit_.settle(s_.put_off_at, s_.params.mean_loss);
}

// Has `want` take those candidates below `grade` that are most in doubt, as many as it takes to
// bring the expected loss down to what a query that reads may keep, or until it has no room for
// one.
template <typename Want>
void Rerank::want_doubtful(Grade grade, const Want& want) {
  for (std::size_t i = 0; i < s_.count; ++i) {
    if (s_.list[i].grade < grade && s_.doubt[i] > 1e-4) {
      s_.order.push_back(static_cast<std::uint32_t>(i));
    }
  }
  std::sort(s_.order.begin(), s_.order.end(), [&](std::uint32_t a, std::uint32_t b) {
    return s_.doubt[a] > s_.doubt[b] || (s_.doubt[a] == s_.doubt[b] && a < b);
  });
  double out = 0;
  double in = 0;
  for (std::size_t i = 0; i < s_.count; ++i) (i < s_.k ? out : in) += s_.doubt[i];
  std::size_t taken = 0;
  for (const std::uint32_t i : s_.order) {
    if (std::max(out, in) <= loss_left() || !want(s_.list[i].row)) break;
    (i < s_.k ? out : in) -= s_.doubt[i];
    ++taken;
  }
  s_.order.resize(taken);
}

// Second codes, and the first ones that they continue.
void Rerank::want_planes() {
  std::vector<PageNumber> pages;
  want_doubtful(Grade::refined, [&](std::uint32_t row) {
    const PageNumber page = layout_.refine.page_of(row);
    if (std::find(pages.begin(), pages.end(), page) == pages.end()) {
      if (pages.size() >= s_.params.rerank_reads_max) return false;
      pages.push_back(page);
    }
    s_.wanted.push_back({layout_.codes.store, layout_.codes.page_of(row)});
    s_.wanted.push_back({layout_.refine.store, page});
    return true;
  });
}

// Full vectors: where the walk compared coarse codes they settle as much as both codes in fewer
// pages, and in one round what first codes and then second ones settle in two. 100,000 x 384, a
// tenth of the bytes in memory, for one mean loss: 0.42 to 0.63 pages in 0.05 to 0.08 rounds a
// query; first codes and then second ones took 0.51 to 0.71 in 0.10 to 0.13.
void Rerank::want_doubtful_vectors() {
  want_doubtful(Grade::exact, [&](std::uint32_t row) {
    if (s_.wanted.size() >= s_.params.rerank_reads_max) return false;
    vectors_.want(row, s_.wanted);
    return true;
  });
}

// Wants the exact vectors of the members, and of every candidate still in doubt.
void Rerank::want_vectors() {
  for (std::size_t i = 0; i < s_.count; ++i) {
    if (s_.list[i].grade == Grade::exact || (i >= s_.k && s_.doubt[i] <= 1e-3)) continue;
    if (s_.order.size() >= s_.params.rerank_reads_max) break;
    s_.order.push_back(static_cast<std::uint32_t>(i));
    vectors_.want(s_.list[i].row, s_.wanted);
  }
}

void Rerank::missed(PageStatus status) {
  if (status == PageStatus::deadline) {
    s_.stats.deadline_hit = true;
    s_.reading = false;
  } else {
    ++s_.stats.damaged;
  }
}

void Rerank::take(const PinnedPages& got, std::size_t first) {
  s_.stats.misses += static_cast<std::uint32_t>(s_.order.size());
  s_.has_read = true;
  step_grade() == Grade::exact ? take_vectors(got, first) : take_planes(got, first);
  ++s_.step;
  // What is read moves the border, and may leave others in doubt: hence the second helping.
  sort_and_judge();
  s_.mixed = mixed();
}

void Rerank::take_planes(const PinnedPages& got, std::size_t first) {
  std::size_t at = first;
  for (const std::uint32_t i : s_.order) {
    Candidate& candidate = s_.list[i];
    const std::size_t high_at = at++;
    const std::size_t low_at = at++;
    const std::byte* high = got.data(high_at);
    const std::byte* low = got.data(low_at);
    if (low == nullptr || high == nullptr) {
      missed(got.status(high == nullptr ? high_at : low_at));
      continue;
    }
    refine(candidate,
           reinterpret_cast<const std::uint8_t*>(high + layout_.codes.offset_of(candidate.row)),
           reinterpret_cast<const std::uint8_t*>(low + layout_.refine.offset_of(candidate.row)));
  }
}

void Rerank::take_vectors(const PinnedPages& got, std::size_t first) {
  std::size_t at = first;
  for (const std::uint32_t i : s_.order) {
    const std::byte* vector = vectors_.fetched(got, at, s_.list[i].row,
                                               [this](PageStatus status) { missed(status); });
    if (vector != nullptr) improve(s_.list[i], vectors_.distance_to(vector), 0, Grade::exact);
  }
}

void Rerank::finish(std::uint32_t* rows, float* scores) {
  std::fill(rows, rows + s_.params.k, kNoRow);
  std::fill(scores, scores + s_.params.k, 0.0f);
  QueryStats& stats = s_.stats;
  if (s_.k == 0) return;
  const double share = static_cast<double>(s_.k);
  // One that could read nothing says nothing about what the others may do without.
  LossCredit& credit = searcher_.credit_;
  if (s_.let_off) {
    credit.settle(0, s_.params.mean_loss);
  } else if (s_.put_off_at >= 0) {
    const auto loss =
        s_.reading ? std::optional<double>(lost(s_.loss, s_.has_read)) : std::nullopt;
    credit.correct(s_.put_off_at, loss, s_.params.mean_loss);
  } else if (s_.reading) {
    credit.settle(lost(s_.loss, s_.has_read), s_.params.mean_loss);
  }
  stats.expected_recall = static_cast<float>(std::max(0.0, 1.0 - s_.loss / share));
  stats.found = static_cast<std::uint32_t>(s_.k);
  for (std::size_t i = 0; i < s_.k; ++i) {
    const Candidate& candidate = s_.list[i];
    rows[i] = candidate.row;
    scores[i] = layout_.metric == Metric::l2
                    ? std::max(0.0f, candidate.distance + s_.offset)
                    : s_.offset - candidate.distance;
    if (candidate.grade == Grade::exact) ++stats.exact;
    if (candidate.grade == Grade::refined) ++stats.refined;
  }
  stats.best = scores[0];
}

}  // namespace stoker
