// The Python face of a sealed segment: its layout, and searches over it without the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <exception>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "stoker/errors.hpp"
#include "stoker/page_pool.hpp"
#include "stoker/quantizer.hpp"
#include "stoker/segment.hpp"
#include "stoker/simd.hpp"

namespace stoker_python {

using namespace nb::literals;

namespace {

// Queries of a batch that a thread takes at once, at most.
constexpr std::size_t kRunMax = 4;

// What a query has to be: finite, or of a squared length that a float holds, too.
enum class Check : std::uint8_t { values, squares };

// A `LossLine` that takes the error model's word.
constexpr std::array<float, 5> kModelLine = {0.0f, 1.0f, 0.0f, 0.0f, 0.0f};

// What the threads of a batch share, on cache lines of its own.
struct alignas(128) Progress {
  std::atomic<std::size_t> next{0};   // the first query that nobody has taken
  std::atomic<bool> failed{false};
  std::exception_ptr failure;
};

// How searches of one k, width and recall target are done; a search adds what is its own.
struct SearchOptions {
  stoker::SearchParams params;
  bool normalize = false;
};

// What searches say of themselves, a row a query; in columns only for who asks.
struct Facts {
  std::vector<stoker::QueryStats> rows;

  // In the order of FACTS in index/recall_bounds.py.
  static constexpr std::size_t kColumns = 20;

  NumpyArray<double> columns() const {
    Owned<double> out(rows.size() * kColumns);
    double* to = out.get();
    for (const stoker::QueryStats& s : rows) {
      const double values[kColumns] = {static_cast<double>(s.expected_recall),
                                       static_cast<double>(s.expanded),
                                       static_cast<double>(s.evaluated),
                                       static_cast<double>(s.skipped),
                                       static_cast<double>(s.exact),
                                       static_cast<double>(s.refined),
                                       static_cast<double>(s.damaged),
                                       static_cast<double>(s.rounds),
                                       static_cast<double>(s.pages_read),
                                       static_cast<double>(s.bytes_read),
                                       s.deadline_hit ? 1.0 : 0.0,
                                       s.scanned ? 1.0 : 0.0,
                                       static_cast<double>(s.found),
                                       static_cast<double>(s.best),
                                       static_cast<double>(s.query_length),
                                       s.narrow ? 1.0 : 0.0,
                                       static_cast<double>(s.farther),
                                       static_cast<double>(s.unrelated),
                                       static_cast<double>(s.range_groups),
                                       static_cast<double>(s.ranges_whole)};
      to = std::copy(values, values + kColumns, to);
    }
    return out.to_numpy({rows.size(), kColumns});
  }
};

// A segment's stores in a pool, and the searcher over them.
class NativeSegment {
 public:
  NativeSegment(nb::object pool, const stoker::SegmentLayout& layout, std::size_t dim,
                std::uint64_t seed, Vector<float> centre,
                const std::optional<stoker::CoarseBasis>& basis, double row_length2)
      : pool_object_(std::move(pool)),
        pool_(nb::cast<stoker::PagePool&>(pool_object_)),
        quantizer_(dim, seed, check_centre(centre, dim), basis.value_or(stoker::CoarseBasis{}),
                   row_length2),
        searcher_(pool_, layout, quantizer_) {}

  Facts search(Matrix<float> queries, Output<std::int64_t> rows, Output<float> scores,
               const SearchOptions& options, bool resident_only, std::optional<double> deadline_s,
               std::optional<Vector<std::uint8_t>> allow, unsigned threads) {
    const stoker::SegmentLayout& layout = searcher_.layout();
    const std::size_t count = queries.shape(0);
    if (queries.shape(1) != layout.dim) {
      throw stoker::BadInput("query has " + std::to_string(queries.shape(1)) +
                             " dimensions, the index " + std::to_string(layout.dim));
    }
    stoker::SearchParams params = options.params;
    if (rows.shape(0) != count || scores.shape(0) != count || rows.shape(1) != params.k ||
        scores.shape(1) != params.k) {
      throw stoker::BadInput("arrays for the answer have other shapes than the question");
    }
    params.resident_only = resident_only;
    params.deadline = deadline_in(deadline_s);
    if (allow) set_allowed(params, *allow);
    std::int64_t* out = rows.data();
    const auto put = [out, k = params.k](std::size_t i, std::uint32_t j, std::uint32_t row) {
      out[i * k + j] = row == stoker::kNoRow ? -1 : static_cast<std::int64_t>(row);
    };
    return run(queries.data(), count, params, Check::values, options.normalize, threads,
               scores.data(), put);
  }

  // The short way: ids in place of rows, and nothing held but this object. Returns nothing where
  // the question, or the moment, is not for it: the general way then says what is wrong.
  std::optional<Facts> answer(AnyShape<const float> queries, AnyShape<std::int64_t> ids,
                              AnyShape<float> scores, const SearchOptions& options,
                              unsigned threads) {
    const std::size_t dim = searcher_.layout().dim;
    const std::size_t ndim = queries.ndim();
    const std::uint32_t k = options.params.k;
    if (ndim < 1 || ndim > 2 || queries.shape(ndim - 1) != dim) return {};
    const std::size_t count = ndim == 1 ? 1 : queries.shape(0);
    if (ids.size() != count * k || scores.size() != count * k) {
      throw stoker::BadInput("arrays for the answer have other shapes than the question");
    }
    if (count == 0 || !(narrow_ids_ || wide_ids_)) return {};
    std::int64_t* out = ids.data();
    // Looked at first: whoever waited here behind close() would hold the interpreter's lock, which
    // those that close() waits for want before they let go.
    if (closed_) return {};
    const std::shared_lock<std::shared_mutex> under_way(closing_);
    if (closed_) return {};
    const auto put = [this, out, k](std::size_t i, std::uint32_t j, std::uint32_t row) {
      out[i * k + j] = row == stoker::kNoRow ? -1 : id_of(row);
    };
    try {
      return run(queries.data(), count, options.params, Check::squares, options.normalize, threads,
                 scores.data(), put);
    } catch (const stoker::BadInput&) {
      return {};
    }
  }

  // The id of each row, for answer(); the first table counts.
  void set_narrow_ids(Vector<std::uint32_t> ids) { keep_ids(std::move(ids), narrow_ids_); }
  void set_wide_ids(Vector<std::int64_t> ids) { keep_ids(std::move(ids), wide_ids_); }

  // Refuses further answer()s, and waits for those under way.
  void close() {
    closed_ = true;   // first, so that those who come later do not hold it up
    const nb::gil_scoped_release release;
    const std::unique_lock<std::shared_mutex> nobody(closing_);
  }

  nb::tuple vectors(Vector<std::uint32_t> rows) {
    const std::size_t count = rows.shape(0);
    const std::size_t dim = searcher_.layout().dim;
    Owned<float> out(count * dim);
    std::size_t lost = 0;
    {
      const nb::gil_scoped_release release;
      lost = searcher_.vectors(rows.data(), count, out.get());
    }
    return nb::make_tuple(out.to_numpy({count, dim}), lost);
  }

  NumpyArray<std::uint32_t> nearest_groups(Matrix<float> queries, std::size_t most) {
    const std::size_t count = queries.shape(0);
    if (queries.shape(1) != searcher_.layout().dim) throw stoker::BadInput("query dimension");
    Owned<std::uint32_t> out(count * most);
    {
      const nb::gil_scoped_release release;
      for (std::size_t i = 0; i < count; ++i) {
        searcher_.nearest_groups(queries.data() + i * queries.shape(1), most,
                                 out.get() + i * most);
      }
    }
    return out.to_numpy({count, most});
  }

  nb::tuple page_counts() const { return nb::make_tuple(searcher_.hits(), searcher_.misses()); }

  nb::tuple estimate_errors(Vector<float> query, Vector<std::uint32_t> rows) {
    if (query.shape(0) != searcher_.layout().dim) throw stoker::BadInput("query dimension");
    const std::size_t count = rows.shape(0);
    Owned<float> code(count);
    Owned<float> refine(count);
    {
      const nb::gil_scoped_release release;
      searcher_.estimate_errors(query.data(), rows.data(), count, code.get(), refine.get());
    }
    return nb::make_tuple(code.to_numpy({count}), refine.to_numpy({count}));
  }

 private:
  template <typename Id>
  void keep_ids(Vector<Id> ids, std::optional<Vector<Id>>& kept) {
    if (ids.shape(0) != searcher_.layout().count) {
      throw stoker::BadInput(std::to_string(ids.shape(0)) + " ids for " +
                             std::to_string(searcher_.layout().count) + " rows");
    }
    if (!narrow_ids_ && !wide_ids_) kept.emplace(std::move(ids));
  }

  std::int64_t id_of(std::uint32_t row) const noexcept {
    return narrow_ids_ ? static_cast<std::int64_t>(narrow_ids_->data()[row])
                       : wide_ids_->data()[row];
  }

  void set_allowed(stoker::SearchParams& params, const Vector<std::uint8_t>& allow) const {
    const std::size_t wanted = (searcher_.layout().count + 7) / 8;
    if (allow.shape(0) != wanted) {
      throw stoker::BadInput("filter has " + std::to_string(allow.shape(0)) +
                             " bytes, expected one bit a row: " + std::to_string(wanted));
    }
    params.allow = allow.data();
    std::uint64_t set = 0;
    for (std::size_t i = 0; i < wanted; ++i) {
      set += static_cast<unsigned>(__builtin_popcount(params.allow[i]));
    }
    params.allow_count = set;
  }

  // Puts answers where they belong; see run().
  template <typename Put>
  class Taken final : public stoker::Searcher::Answers {
   public:
    Taken(const Put& put, std::uint32_t k, float* scores, stoker::QueryStats* stats)
        : put_(put), k_(k), scores_(scores), stats_(stats) {}
    void take(std::size_t i, const std::uint32_t* rows, const stoker::QueryStats& stats) override {
      stats_[i] = stats;
      float* const score = scores_ + i * k_;
      for (std::uint32_t j = 0; j < k_; ++j) {
        put_(i, j, rows[j]);
        if (rows[j] == stoker::kNoRow) score[j] = std::numeric_limits<float>::quiet_NaN();
      }
    }

   private:
    const Put& put_;
    const std::uint32_t k_;
    float* const scores_;
    stoker::QueryStats* const stats_;
  };

  // Answers `count` queries on up to `threads` threads; `put(query, place, row)` takes each hit.
  template <typename Put>
  Facts run(const float* data, std::size_t count, const stoker::SearchParams& params, Check check,
            bool normalize, unsigned threads, float* scores, const Put& put) {
    const nb::gil_scoped_release release;
    const std::size_t dim = searcher_.layout().dim;
    const std::uint32_t k = params.k;
    Facts facts;
    facts.rows.resize(count);
    const std::size_t wanted =
        std::max<std::size_t>(std::min<std::size_t>(threads, count), std::size_t{1});
    // A few at a time: answers lie side by side, and threads that write to one line wait.
    const std::size_t run_length = std::min<std::size_t>(count / (16 * wanted) + 1, kRunMax);
    Progress progress;
    stoker::QueryStats* const stats = facts.rows.data();
    // By value, but for what is shared: helpers read nothing of this thread's stack meanwhile.
    auto work = [=, &progress, &params, &searcher = searcher_] {
      try {
        stoker::Searcher::Session session(searcher);
        Taken<Put> taken(put, k, scores, stats);
        std::vector<float> unit;
        for (std::size_t first = progress.next.fetch_add(run_length); first < count;
             first = progress.next.fetch_add(run_length)) {
          const std::size_t last = std::min(first + run_length, count);
          for (std::size_t i = first; i < last && !progress.failed; ++i) {
            const float* query = check_query(data + i * dim, dim, i, check, normalize, unit);
            session.ask(i, query, params, scores + i * k, count - 1 - i, taken);
          }
        }
        if (!progress.failed) session.finish(taken);
      } catch (...) {
        if (!progress.failed.exchange(true)) progress.failure = std::current_exception();
      }
    };
    std::vector<std::thread> helpers;
    helpers.reserve(wanted);
    try {
      for (std::size_t t = 1; t < wanted; ++t) helpers.emplace_back(work);
    } catch (const std::exception&) {
      // No more threads, or no memory for one: those that there are, this one at least, do the work.
    }
    work();
    for (std::thread& helper : helpers) helper.join();
    if (progress.failure) std::rethrow_exception(progress.failure);
    return facts;
  }

  // Returns the query, or a copy at unit length where asked for; refuses what is not finite.
  static const float* check_query(const float* source, std::size_t dim, std::size_t number,
                                  Check check, bool normalize, std::vector<float>& copy) {
    if (check == Check::squares || !normalize) {
      const bool usable = std::isfinite(stoker::kernels().dot_f32(source, source, dim));
      if (usable && !normalize) return source;
      if (!usable && check == Check::squares) {
        throw stoker::BadInput("queries: row " + std::to_string(number) + " is not usable");
      }
    }
    double squared = 0;
    for (std::size_t d = 0; d < dim; ++d) {
      if (!std::isfinite(source[d])) {
        throw stoker::BadInput("queries: row " + std::to_string(number) + " is not finite");
      }
      squared += static_cast<double>(source[d]) * source[d];
    }
    if (!normalize || squared <= 0) return source;
    const double inverse = 1.0 / std::sqrt(squared);
    copy.resize(dim);
    for (std::size_t d = 0; d < dim; ++d) copy[d] = static_cast<float>(source[d] * inverse);
    return copy.data();
  }

  static const float* check_centre(const Vector<float>& centre, std::size_t dim) {
    if (centre.shape(0) != dim) throw stoker::BadInput("centre has the wrong dimension");
    return centre.data();
  }

  nb::object pool_object_;   // keeps the pool alive
  stoker::PagePool& pool_;
  stoker::Quantizer quantizer_;
  stoker::Searcher searcher_;
  // Set once, under the interpreter's lock, before the first answer() that reads them.
  std::optional<Vector<std::uint32_t>> narrow_ids_;
  std::optional<Vector<std::int64_t>> wide_ids_;
  std::shared_mutex closing_;       // held, shared, by answer()
  std::atomic<bool> closed_{false};
};

}  // namespace

void bind_segment(nb::module_& m) {
  using stoker::LinkLevel;
  using stoker::SegmentLayout;
  nb::class_<SegmentLayout>(m, "SegmentLayout", "Where a segment's records lie in its pages.")
      .def(
          "__init__",
          [](SegmentLayout* self, std::uint32_t dim, std::uint32_t count, bool l2,
             std::uint32_t entry_row, float code_error, float refine_error) {
            new (self) SegmentLayout();
            self->dim = dim;
            self->count = count;
            self->metric = l2 ? stoker::Metric::l2 : stoker::Metric::inner_product;
            self->entry_row = entry_row;
            self->code_error = code_error;
            self->refine_error = refine_error;
          },
          nb::kw_only(), "dim"_a, "count"_a, "l2"_a, "entry_row"_a, "code_error"_a,
          "refine_error"_a)
      .def(
          "set_links", [](SegmentLayout& self, std::uint32_t store) { self.links = store; },
          "store"_a)
      .def(
          "add_level",
          [](SegmentLayout& self, std::uint32_t count, std::uint32_t m_max, std::uint32_t id_bits,
             std::uint32_t record_bytes, std::uint32_t per_page, std::uint32_t first_page) {
            if (per_page == 0) throw stoker::CorruptData("segment layout: no records in a page");
            LinkLevel level;
            level.count = count;
            level.m = m_max;
            level.id_bits = id_bits;
            level.record_bytes = record_bytes;
            level.per_page = stoker::Divisor(per_page);
            level.first_page = first_page;
            self.levels.push_back(level);
          },
          nb::kw_only(), "count"_a, "m"_a, "id_bits"_a, "record_bytes"_a, "per_page"_a,
          "first_page"_a, "Adds the next level, the bottom first.")
      .def(
          "set_codes",
          [](SegmentLayout& self, std::uint32_t store, std::uint32_t record_bytes,
             std::uint32_t per_page) {
            if (per_page == 0) throw stoker::CorruptData("segment layout: no records in a page");
            self.codes = {store, record_bytes, stoker::Divisor(per_page)};
          },
          nb::kw_only(), "store"_a, "record_bytes"_a, "per_page"_a)
      .def(
          "set_coarse",
          [](SegmentLayout& self, std::uint32_t store, std::uint32_t record_bytes,
             std::uint32_t per_page, float error) {
            if (per_page == 0) throw stoker::CorruptData("segment layout: no records in a page");
            self.coarse = {store, record_bytes, stoker::Divisor(per_page)};
            self.coarse_error = error;
            self.walk_coarse = true;
          },
          nb::kw_only(), "store"_a, "record_bytes"_a, "per_page"_a, "error"_a,
          "Navigates on these 2-bit codes; `error` as the constructor's.")
      .def(
          "set_refine",
          [](SegmentLayout& self, std::uint32_t store, std::uint32_t record_bytes,
             std::uint32_t per_page) {
            if (per_page == 0) throw stoker::CorruptData("segment layout: no records in a page");
            self.refine = {store, record_bytes, stoker::Divisor(per_page)};
          },
          nb::kw_only(), "store"_a, "record_bytes"_a, "per_page"_a)
      .def(
          "set_vectors",
          [](SegmentLayout& self, std::uint32_t store, std::uint32_t record_bytes, bool half) {
            self.vectors = {store, record_bytes, half};
          },
          nb::kw_only(), "store"_a, "record_bytes"_a, "half"_a)
      .def(
          "set_walk_vectors",
          [](SegmentLayout& self, bool unit_rows) {
            self.walk_vectors = true;
            self.unit_rows = unit_rows;
          },
          nb::kw_only(), "unit_rows"_a,
          "Navigates on the vectors themselves; `unit_rows` where the measure is the cosine.")
      .def(
          "set_ranges",
          [](SegmentLayout& self, std::uint32_t store, std::uint32_t groups,
             std::uint32_t record_bytes, std::uint32_t per_page, std::uint32_t pieces,
             std::uint32_t whole_nearest, std::uint32_t small_share) {
            if (per_page == 0) throw stoker::CorruptData("segment layout: no records in a page");
            self.ranges = {store,  groups,        record_bytes, stoker::Divisor(per_page),
                           pieces, whole_nearest, small_share};
          },
          nb::kw_only(), "store"_a, "groups"_a, "record_bytes"_a, "per_page"_a, "pieces"_a,
          "whole_nearest"_a, "small_share"_a,
          "Where the table of groups of near rows lies. Beyond the nearest ones, pieces of less than "
          "a so manieth of their group's rows are left out.");

  nb::class_<SearchOptions>(m, "SearchOptions",
                            "How searches of one k, width and recall target are done.")
      .def(
          "__init__",
          [](SearchOptions* self, std::uint32_t k, std::uint32_t ef, float rerank_target,
             float mean_loss, float loss_ceiling, std::uint32_t rerank_reads_max,
             bool read_vectors, std::uint32_t beam, bool normalize, std::uint32_t near_ef,
             float near_from, float spread, std::uint32_t entry_ef, float near_mean_loss,
             std::optional<float> near_rerank_target, const std::array<float, 5>& line,
             const std::array<float, 5>& near_line) {
            new (self) SearchOptions();
            self->params.k = k;
            self->params.ef = ef;
            self->params.rerank_target = rerank_target;
            self->params.mean_loss = mean_loss;
            self->params.loss_ceiling = loss_ceiling;
            self->params.rerank_reads_max = rerank_reads_max;
            self->params.read_vectors = read_vectors;
            self->params.beam = beam;
            self->normalize = normalize;
            self->params.near_ef = near_ef;
            self->params.near_from = near_from;
            self->params.spread = spread;
            self->params.entry_ef = entry_ef;
            self->params.near_mean_loss = near_mean_loss;
            self->params.near_rerank_target = near_rerank_target.value_or(rerank_target);
            self->params.line = {line[0], line[1], line[2], line[3], line[4]};
            self->params.near_line = {near_line[0], near_line[1], near_line[2], near_line[3],
                                      near_line[4]};
          },
          nb::kw_only(), "k"_a, "ef"_a, "rerank_target"_a, "mean_loss"_a, "loss_ceiling"_a,
          "rerank_reads_max"_a, "read_vectors"_a, "beam"_a, "normalize"_a,
          "near_ef"_a = 0, "near_from"_a = 0.0f, "spread"_a = 0.0f,
          "entry_ef"_a = 1, "near_mean_loss"_a = 0.0f, "near_rerank_target"_a = nb::none(),
          "line"_a = kModelLine, "near_line"_a = kModelLine,
          "Lines: least, share, read_least, read_share, mixed of `LossLine` in stoker/segment.hpp.")
      .def(
          "add_farther",
          [](SearchOptions& self, float below, std::uint32_t ef, std::uint32_t entry_ef,
             std::uint32_t range_groups) {
            stoker::SearchParams& params = self.params;
            if (params.farther_count == stoker::kFartherMax) {
              throw stoker::BadInput("more than " + std::to_string(stoker::kFartherMax) +
                                     " farther walks");
            }
            if (params.farther_count > 0 &&
                !(below <= params.farther[params.farther_count - 1].below)) {
              throw stoker::BadInput("edges of farther walks do not fall");
            }
            params.farther[params.farther_count++] = {below, ef, entry_ef, range_groups};
          },
          nb::kw_only(), "below"_a, "ef"_a, "entry_ef"_a, "range_groups"_a = 0,
          "How walks go on for queries that lie farther than `below` from what they find, or to how "
          "many groups scans of `set_ranges` do.")
      .def(
          "set_ranges",
          [](SearchOptions& self, std::uint32_t groups, float mean_loss, float rerank_target,
             bool hurried) {
            self.params.range_groups = groups;
            self.params.range_hurried = hurried;
            self.params.range_mean_loss = mean_loss;
            self.params.range_rerank_target = rerank_target;
          },
          nb::kw_only(), "groups"_a, "mean_loss"_a, "rerank_target"_a, "hurried"_a = false,
          "A walk that misses a page is left for a scan of so many groups, the nearest, which loses "
          "no more in the mean than this when it is settled; `hurried`: only by who has a deadline.")
      .def_prop_ro("mean_loss", [](const SearchOptions& self) { return self.params.mean_loss; });
  nb::class_<Facts>(m, "Facts", "What the searches of a batch say of themselves.")
      .def("columns", &Facts::columns,
           "float64, a row a query: expected_recall, expanded, evaluated, skipped, exact, "
           "refined, damaged, rounds, pages_read, bytes_read, deadline_hit, scanned, found, best, "
           "query_length, narrow, farther, unrelated, range_groups, ranges_whole.");
  nb::class_<NativeSegment>(m, "NativeSegment", "Search over a segment's pages in a pool.")
      .def(nb::init<nb::object, const SegmentLayout&, std::size_t, std::uint64_t, Vector<float>,
                    const std::optional<stoker::CoarseBasis>&, double>(),
           nb::kw_only(), "pool"_a, "layout"_a, "dim"_a, "seed"_a, "centre"_a,
           "basis"_a = nb::none(), "row_length2"_a = 0.0)
      .def("search", &NativeSegment::search, "queries"_a, "rows"_a, "scores"_a, "options"_a,
           nb::kw_only(), "resident_only"_a = false, "deadline_s"_a = nb::none(),
           "allow"_a = nb::none(), "threads"_a = 1,
           "Fills, for each query, its k rows (int64; -1 where there are fewer) and their scores "
           "(float32; not-a-number there).")
      .def("answer", &NativeSegment::answer, "queries"_a, "ids"_a, "scores"_a, "options"_a,
           "threads"_a,
           "Fills ids (-1 where there are fewer) and scores of one query, shape (dim,), or of a "
           "batch, with no filter and no deadline. Returns None, and the arrays hold nothing of "
           "use, where queries have another shape or are not finite, ids are not set, or after "
           "`close`.")
      .def("set_ids", &NativeSegment::set_narrow_ids, "ids"_a, "The id of each row, for `answer`.")
      .def("set_ids", &NativeSegment::set_wide_ids, "ids"_a)
      .def("close", &NativeSegment::close,
           "Refuse further calls of `answer`, and wait for those under way.")
      .def("vectors", &NativeSegment::vectors, "rows"_a,
           "Exact vectors as float32, and how many could not be read (not-a-number).")
      .def("page_counts", &NativeSegment::page_counts,
           "Records of all searches whose page was in memory when wanted, and was not.")
      .def("nearest_groups", &NativeSegment::nearest_groups, "queries"_a, "most"_a,
           "The groups of the range table that lie nearest to each query, in order, uint32; 2^32 - 1 "
           "where there are fewer.")
      .def("estimate_errors", &NativeSegment::estimate_errors, "query"_a, "rows"_a);
}

}  // namespace stoker_python
