// From candidates to an answer: upgrade what is resident, estimate what is still in doubt, and
// read from the device only what can change the answer.
#include <algorithm>
#include <cmath>

#include "walk.hpp"

namespace stoker {
namespace {

// Candidates further than this many standard deviations behind the k-th cannot come into the
// answer in any way that the expected recall would notice.
constexpr float kDoubtSigmas = 3.5f;

// What a query that reads may keep of what it may lose. The first page costs it a wait for the
// device, the next ones hardly more; and the surer it ends, the more others may do without.
constexpr double kLeftByReads = 0.1;

// Vectors on their way from memory while one is compared.
constexpr std::size_t kVectorsAhead = 3;

inline float read_f32(const std::uint8_t* p) {
  float value;
  std::memcpy(&value, p, 4);
  return value;
}

// Probability that a standard normal variable exceeds `z`.
double upper_tail(double z) { return 0.5 * std::erfc(z * 0.70710678118654752); }

bool nearer(const Candidate& a, const Candidate& b) {
  return a.distance < b.distance || (a.distance == b.distance && a.row < b.row);
}

}  // namespace

// Takes a better distance. One that is no number, from a hostile record, is damage, as in offer():
// the candidate stays as it was, since sorting by such distances is undefined.
void Walk::improve(Candidate& candidate, float distance, float sigma, Grade grade) {
  if (!(std::fabs(distance) < 3.0e38f)) {
    ++stats_.damaged;
    return;
  }
  candidate.distance = distance;
  candidate.sigma = sigma > 0 ? sigma : 0;
  candidate.grade = grade;
}

// For a candidate that the walk knows by 2 bits: the estimate from 4.
void Walk::use_code(Candidate& candidate, const std::uint8_t* high) {
  std::int32_t dot;
  searcher_.kernels_.dot_code4(s_.query.q8.data(), blocks_, &high, 1, &dot);
  const float correction = read_f32(high + code_bytes_);
  const float length2 = read_f32(high + code_bytes_ + 4);
  const float centred = static_cast<float>(dot) - 7.5f * static_cast<float>(s_.query.sum8);
  improve(candidate, dot_factor_ * (centred * s_.query.scale8 * correction) + l2_factor_ * length2,
          -dot_factor_ * layout_.code_error * s_.query.length * std::sqrt(length2), Grade::code);
}

void Walk::refine(Candidate& candidate, const std::uint8_t* high, const std::uint8_t* low) {
  const std::int64_t dot =
      searcher_.kernels_.dot_code8(s_.query.q16.data(), blocks_, high, low);
  const float correction = read_f32(low + code_bytes_);
  const float length2 = read_f32(high + code_bytes_ + 4);
  const float product = static_cast<float>(dot) * s_.query.scale16 * correction;
  improve(candidate, dot_factor_ * product + l2_factor_ * length2,
          -dot_factor_ * layout_.refine_error * s_.query.length * std::sqrt(length2),
          Grade::refined);
}

// The distance of a full vector.
float Walk::distance_to(const std::byte* vector) const {
  const Kernels& k = searcher_.kernels_;
  const float* q = s_.query.original.data();
  const std::size_t dim = layout_.dim;
  if (layout_.metric == Metric::l2) {
    const float d = layout_.vectors.half
                        ? k.l2_f16(q, reinterpret_cast<const std::uint16_t*>(vector), dim)
                        : k.l2_f32(q, reinterpret_cast<const float*>(vector), dim);
    return d - offset_;
  }
  if (by_vectors_) return static_cast<float>(behind_query(vector));
  const float d = layout_.vectors.half
                      ? k.dot_f16(q, reinterpret_cast<const std::uint16_t*>(vector), dim)
                      : k.dot_f32(q, reinterpret_cast<const float*>(vector), dim);
  return -(d - offset_);
}

// By how much a vector's inner product with the query is less than the query's length: nothing for
// the query itself at unit length. In doubles, since among many rows of few dimensions a query's
// neighbors have products that floats round to one; and of unit rows, whose lengths are rounded
// too, by the cosine.
double Walk::behind_query(const std::byte* vector) const {
  double product = 0;
  double length2 = 0;
  for (std::size_t d = 0; d < layout_.dim; ++d) {
    float value;
    if (layout_.vectors.half) {
      std::uint16_t half;
      std::memcpy(&half, vector + 2 * d, 2);
      value = half_to_float(half);
    } else {
      std::memcpy(&value, vector + 4 * d, 4);
    }
    product += static_cast<double>(s_.query.original[d]) * value;
    length2 += static_cast<double>(value) * value;
  }
  if (layout_.unit_rows && length2 > 0) product /= std::sqrt(length2);
  return query_length_ - product;
}

// Inside a ReadGuard. Starts to bring a resident vector to the processor.
void Walk::prefetch_vector(std::uint32_t row) const {
  const std::size_t page_bytes = vectors_.page_bytes;
  const std::size_t record = layout_.vectors.record_bytes;
  const std::uint64_t start = static_cast<std::uint64_t>(row) * record;
  std::size_t offset = start % page_bytes;
  std::size_t left = record;
  for (auto page = static_cast<PageNumber>(start / page_bytes); left > 0; ++page, offset = 0) {
    const std::byte* bytes = vectors_.peek(page);
    const std::size_t part = std::min(left, page_bytes - offset);
    if (bytes == nullptr) return;
    for (std::size_t at = 0; at < part; at += 64) __builtin_prefetch(bytes + offset + at);
    left -= part;
  }
}

// Inside a ReadGuard. A vector in its page, or put together in s_.vector; nullptr where a page of it
// is absent.
const std::byte* Walk::resident_vector(std::uint32_t row) {
  const std::size_t page_bytes = vectors_.page_bytes;
  const std::size_t record = layout_.vectors.record_bytes;
  const std::uint64_t start = static_cast<std::uint64_t>(row) * record;
  const auto first = static_cast<PageNumber>(start / page_bytes);
  const auto last = static_cast<PageNumber>((start + record - 1) / page_bytes);
  const std::size_t offset = start % page_bytes;
  const std::byte* page = vectors_.touch(first);
  if (page == nullptr || first == last) return page == nullptr ? nullptr : page + offset;
  s_.vector.resize((record + 3) / 4);
  auto* out = reinterpret_cast<std::byte*>(s_.vector.data());
  std::size_t done = page_bytes - offset;
  std::memcpy(out, page + offset, done);
  for (PageNumber next = first + 1; next <= last; ++next) {
    const std::byte* more = vectors_.touch(next);
    if (more == nullptr) return nullptr;
    const std::size_t part = std::min(page_bytes, record - done);
    std::memcpy(out + done, more, part);
    done += part;
  }
  return out;
}

// Inside a ReadGuard. Takes the best form of the candidate that is resident.
void Walk::upgrade_resident(Candidate& candidate) {
  if (candidate.grade == Grade::exact) return;
  if (const std::byte* vector = resident_vector(candidate.row)) {
    improve(candidate, distance_to(vector), 0, Grade::exact);
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
// others lies half-way between the k-th and the next. Fills s_.doubt with each one's share.
double Walk::expected_loss(const std::vector<Candidate>& list, std::size_t count, std::size_t k) {
  s_.doubt.assign(count, 0.0);
  if (count <= k) return 0;
  const double border = 0.5 * (static_cast<double>(list[k - 1].distance) +
                               static_cast<double>(list[k].distance));
  // Copies of one vector have one code: which of them are members is no loss.
  const bool tied = list[k - 1].distance == list[k].distance;
  double out = 0;
  double in = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const double sigma = list[i].sigma;
    if (sigma <= 0 || (tied && list[i].distance == list[k].distance)) continue;
    const double tail = upper_tail(std::fabs(list[i].distance - border) / sigma);
    s_.doubt[i] = tail;
    (i < k ? out : in) += tail;
  }
  return std::max(out, in);
}

// Reads, in one batch, what lifts the candidates most in doubt to `grade`, as many as it takes to
// bring the expected loss under `loss_max`, within the bound on reads. Lifting to Grade::code reads
// first planes, for walks that compared coarse codes; to Grade::refined, second ones.
void Walk::read_planes(std::vector<Candidate>& list, std::size_t count, std::size_t k,
                       double loss_max, Grade grade) {
  const bool second = grade == Grade::refined;
  const RecordStore& plane = second ? layout_.refine : layout_.codes;
  s_.order.clear();
  for (std::size_t i = 0; i < count; ++i) {
    if (list[i].grade < grade && s_.doubt[i] > 1e-4) {
      s_.order.push_back(static_cast<std::uint32_t>(i));
    }
  }
  std::sort(s_.order.begin(), s_.order.end(), [&](std::uint32_t a, std::uint32_t b) {
    return s_.doubt[a] > s_.doubt[b] || (s_.doubt[a] == s_.doubt[b] && a < b);
  });
  double out = 0;
  double in = 0;
  for (std::size_t i = 0; i < count; ++i) (i < k ? out : in) += s_.doubt[i];
  std::vector<PageNumber> pages;
  std::size_t taken = 0;
  for (const std::uint32_t i : s_.order) {
    if (std::max(out, in) <= loss_max) break;
    const PageNumber page = plane.page_of(list[i].row);
    if (std::find(pages.begin(), pages.end(), page) == pages.end()) {
      if (pages.size() >= params_.rerank_reads_max) break;
      pages.push_back(page);
    }
    (i < k ? out : in) -= s_.doubt[i];
    ++taken;
  }
  s_.wanted.clear();
  for (std::size_t t = 0; t < taken; ++t) {
    const std::uint32_t row = list[s_.order[t]].row;
    s_.wanted.push_back({layout_.codes.store, layout_.codes.page_of(row)});
    if (second) s_.wanted.push_back({layout_.refine.store, layout_.refine.page_of(row)});
  }
  const PinnedPages got = pool_.fetch(s_.wanted.data(), s_.wanted.size(), params_.deadline);
  if (got.reads() > 0) ++stats_.rounds;
  stats_.bytes_read += got.bytes_read();
  stats_.pages_read += got.bytes_read() / refine_.page_bytes;
  stats_.misses += static_cast<std::uint32_t>(taken);
  const std::size_t each = second ? 2 : 1;
  for (std::size_t t = 0; t < taken; ++t) {
    Candidate& candidate = list[s_.order[t]];
    const std::byte* high = got.data(each * t);
    const std::byte* low = second ? got.data(each * t + 1) : high;
    if (low == nullptr || high == nullptr) {
      const PageStatus status = got.status(high == nullptr ? each * t : each * t + 1);
      if (status == PageStatus::deadline) {
        stats_.deadline_hit = true;
        reading_ = false;
      } else {
        ++stats_.damaged;
      }
      continue;
    }
    const auto* code =
        reinterpret_cast<const std::uint8_t*>(high + layout_.codes.offset_of(candidate.row));
    if (second) {
      refine(candidate, code,
             reinterpret_cast<const std::uint8_t*>(low + layout_.refine.offset_of(candidate.row)));
    } else {
      use_code(candidate, code);
    }
  }
}

// Reads the exact vectors of the members, and of every candidate still in doubt, in one batch.
void Walk::read_vectors(std::vector<Candidate>& list, std::size_t count, std::size_t k) {
  s_.wanted.clear();
  s_.order.clear();
  for (std::size_t i = 0; i < count; ++i) {
    if (list[i].grade == Grade::exact || (i >= k && s_.doubt[i] <= 1e-3)) continue;
    if (s_.order.size() >= params_.rerank_reads_max) break;
    s_.order.push_back(static_cast<std::uint32_t>(i));
    want_vector(list[i].row);
  }
  if (s_.order.empty()) return;
  const PinnedPages got = pool_.fetch(s_.wanted.data(), s_.wanted.size(), params_.deadline);
  if (got.reads() > 0) ++stats_.rounds;
  stats_.bytes_read += got.bytes_read();
  stats_.pages_read += got.bytes_read() / vectors_.page_bytes;
  stats_.misses += static_cast<std::uint32_t>(s_.order.size());
  const auto missed = [this](PageStatus status) {
    if (status == PageStatus::deadline) {
      stats_.deadline_hit = true;
      reading_ = false;
    } else {
      ++stats_.damaged;
    }
  };
  std::size_t at = 0;
  for (const std::uint32_t i : s_.order) {
    if (const std::byte* vector = fetched_vector(got, at, list[i].row, missed)) {
      improve(list[i], distance_to(vector), 0, Grade::exact);
    }
  }
}

void Walk::answer(std::uint32_t* rows, float* scores) {
  std::vector<Candidate>& list = filtered_ ? s_.allowed.items() : s_.nearest.items();
  const std::size_t k = std::min<std::size_t>(params_.k, list.size());
  if (k == 0) {
    stats_.expected_recall = 0;
    return;
  }
  // Everything that could still be a member: the rest is out of doubt and stays behind.
  const float reach =
      list[k - 1].distance + kDoubtSigmas * 1.41421356f * list[k - 1].sigma;
  std::size_t count = k;
  while (count < list.size() && list[count].distance <= reach) ++count;
  const auto end = [&] { return list.begin() + static_cast<std::ptrdiff_t>(count); };
  {
    const PagePool::ReadGuard guard(pool_);
    for (std::size_t i = 0; i < std::min(kVectorsAhead, count); ++i) prefetch_vector(list[i].row);
    for (std::size_t i = 0; i < count; ++i) {
      if (i + kVectorsAhead < count) prefetch_vector(list[i + kVectorsAhead].row);
      upgrade_resident(list[i]);
    }
    for (std::size_t i = 0; i < count; ++i) stats_.hits += list[i].grade > grade_ ? 1 : 0;
  }
  std::sort(list.begin(), end(), nearer);
  const double loss_max = (1.0 - static_cast<double>(params_.rerank_target)) *
                          static_cast<double>(k);
  double loss = expected_loss(list, count, k);
  const double share = static_cast<double>(k);
  const bool let_off = loss > loss_max && loss <= params_.loss_ceiling * share && may_read() &&
                       !params_.read_vectors &&
                       searcher_.credit_.spend(loss / share, params_.mean_loss);
  // What is read moves the border, and may leave others in doubt: hence the second helping.
  for (const Grade grade : {Grade::code, Grade::refined, Grade::refined}) {
    if (grade <= grade_ || loss <= loss_max || let_off || !may_read()) continue;
    read_planes(list, count, k, kLeftByReads * loss_max, grade);
    std::sort(list.begin(), end(), nearer);
    loss = expected_loss(list, count, k);
  }
  if (params_.read_vectors && may_read()) {
    read_vectors(list, count, k);
    std::sort(list.begin(), end(), nearer);
    loss = expected_loss(list, count, k);
  }
  // One that could read nothing says nothing about what the others may do without.
  if (let_off) {
    searcher_.credit_.settle(0, params_.mean_loss);
  } else if (reading_) {
    searcher_.credit_.settle(loss / share, params_.mean_loss);
  }
  stats_.expected_recall = static_cast<float>(std::max(0.0, 1.0 - loss / share));
  stats_.found = static_cast<std::uint32_t>(k);
  for (std::size_t i = 0; i < k; ++i) {
    rows[i] = list[i].row;
    scores[i] = layout_.metric == Metric::l2
                    ? std::max(0.0f, list[i].distance + offset_)
                    : offset_ - list[i].distance;
    if (list[i].grade == Grade::exact) ++stats_.exact;
    if (list[i].grade == Grade::refined) ++stats_.refined;
  }
  stats_.best = scores[0];
}

}  // namespace stoker
