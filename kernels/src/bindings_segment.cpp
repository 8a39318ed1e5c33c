// The Python face of a sealed segment: its layout, and searches over it without the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <exception>
#include <limits>
#include <memory>
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

// Facts of a query, in the order of FACTS in index/segment.py.
constexpr std::size_t kFacts = 12;

// A segment's stores in a pool, and the searcher over them.
class NativeSegment {
 public:
  NativeSegment(nb::object pool, const stoker::SegmentLayout& layout, std::size_t dim,
                std::uint64_t seed, Vector<float> centre,
                const std::optional<stoker::CoarseBasis>& basis)
      : pool_object_(std::move(pool)),
        pool_(nb::cast<stoker::PagePool&>(pool_object_)),
        quantizer_(dim, seed, check_centre(centre, dim), basis.value_or(stoker::CoarseBasis{})),
        searcher_(pool_, layout, quantizer_) {}

  void search(Matrix<float> queries, Output<std::int64_t> rows, Output<float> scores,
              Output<double> facts, std::uint32_t ef, float rerank_target,
              float mean_loss, float loss_ceiling, std::uint32_t rerank_reads_max,
              bool read_vectors, bool resident_only, std::uint32_t beam,
              std::optional<double> deadline_s,
              std::optional<Vector<std::uint8_t>> allow, unsigned threads, bool normalize) {
    const stoker::SegmentLayout& layout = searcher_.layout();
    const std::size_t count = queries.shape(0);
    if (queries.shape(1) != layout.dim) {
      throw stoker::BadInput("query has " + std::to_string(queries.shape(1)) +
                             " dimensions, the index " + std::to_string(layout.dim));
    }
    const auto k = static_cast<std::uint32_t>(rows.shape(1));
    if (rows.shape(0) != count || scores.shape(0) != count || scores.shape(1) != k ||
        facts.shape(0) != count || facts.shape(1) != kFacts) {
      throw stoker::BadInput("arrays for the answer have other shapes than the question");
    }
    stoker::SearchParams params;
    params.k = k;
    params.ef = ef;
    params.rerank_target = rerank_target;
    params.mean_loss = mean_loss;
    params.loss_ceiling = loss_ceiling;
    params.rerank_reads_max = rerank_reads_max;
    params.read_vectors = read_vectors;
    params.resident_only = resident_only;
    params.beam = beam;
    params.deadline = deadline_in(deadline_s);
    if (allow) {
      if (allow->shape(0) != (layout.count + 7) / 8) {
        throw stoker::BadInput("filter has " + std::to_string(allow->shape(0)) +
                               " bytes, expected one bit a row: " +
                               std::to_string((layout.count + 7) / 8));
      }
      params.allow = allow->data();
      std::uint64_t set = 0;
      for (std::size_t i = 0; i < allow->shape(0); ++i) {
        set += static_cast<unsigned>(__builtin_popcount(params.allow[i]));
      }
      params.allow_count = set;
    }
    {
      const nb::gil_scoped_release release;
      const float* data = queries.data();
      std::atomic<std::size_t> next{0};
      std::exception_ptr failure;
      std::atomic<bool> failed{false};
      auto work = [&] {
        try {
          std::vector<std::uint32_t> found(k);
          std::vector<float> unit;
          for (std::size_t i = next++; i < count && !failed; i = next++) {
            const float* query = check_query(data + i * layout.dim, layout.dim, i, normalize, unit);
            float* score = scores.data() + i * k;
            const stoker::QueryStats stats = searcher_.search(query, params, found.data(), score);
            for (std::uint32_t j = 0; j < k; ++j) {
              const bool here = found[j] != stoker::kNoRow;
              rows.data()[i * k + j] = here ? static_cast<std::int64_t>(found[j]) : -1;
              if (!here) score[j] = std::numeric_limits<float>::quiet_NaN();
            }
            write_facts(stats, facts.data() + i * kFacts);
          }
        } catch (...) {
          if (!failed.exchange(true)) failure = std::current_exception();
        }
      };
      std::vector<std::thread> helpers;
      const std::size_t wanted = std::min<std::size_t>(std::max(threads, 1u), count);
      helpers.reserve(wanted);
      try {
        for (std::size_t t = 1; t < wanted; ++t) helpers.emplace_back(work);
      } catch (const std::system_error&) {
        // No more threads to be had: those that there are, this one at least, do the work.
      }
      work();
      for (std::thread& helper : helpers) helper.join();
      if (failure) std::rethrow_exception(failure);
    }
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
  // Returns the query, or a copy at unit length where asked for; refuses what is not finite.
  static const float* check_query(const float* source, std::size_t dim, std::size_t number,
                                  bool normalize, std::vector<float>& copy) {
    if (!normalize && std::isfinite(stoker::kernels().dot_f32(source, source, dim))) return source;
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

  static void write_facts(const stoker::QueryStats& s, double* out) {
    const double values[kFacts] = {static_cast<double>(s.expected_recall),
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
                                   s.scanned ? 1.0 : 0.0};
    std::copy(values, values + kFacts, out);
  }

  static const float* check_centre(const Vector<float>& centre, std::size_t dim) {
    if (centre.shape(0) != dim) throw stoker::BadInput("centre has the wrong dimension");
    return centre.data();
  }

  nb::object pool_object_;   // keeps the pool alive
  stoker::PagePool& pool_;
  stoker::Quantizer quantizer_;
  stoker::Searcher searcher_;
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
          nb::kw_only(), "store"_a, "record_bytes"_a, "half"_a);

  nb::class_<NativeSegment>(m, "NativeSegment", "Search over a segment's pages in a pool.")
      .def(nb::init<nb::object, const SegmentLayout&, std::size_t, std::uint64_t, Vector<float>,
                    const std::optional<stoker::CoarseBasis>&>(),
           nb::kw_only(), "pool"_a, "layout"_a, "dim"_a, "seed"_a, "centre"_a,
           "basis"_a = nb::none())
      .def("search", &NativeSegment::search, "queries"_a, "rows"_a, "scores"_a, "facts"_a,
           nb::kw_only(), "ef"_a, "rerank_target"_a, "mean_loss"_a, "loss_ceiling"_a,
           "rerank_reads_max"_a, "read_vectors"_a, "resident_only"_a, "beam"_a,
           "deadline_s"_a = nb::none(), "allow"_a = nb::none(), "threads"_a = 1, "normalize"_a = false,
           "Fills, for each query, its k rows (int64; -1 where there are fewer), their scores "
           "(float32; not-a-number there), and float64 facts: expected_recall, expanded, "
           "evaluated, skipped, exact, refined, damaged, rounds, pages_read, bytes_read, "
           "deadline_hit, scanned.")
      .def("vectors", &NativeSegment::vectors, "rows"_a,
           "Exact vectors as float32, and how many could not be read (not-a-number).")
      .def("page_counts", &NativeSegment::page_counts,
           "Records of all searches whose page was in memory when wanted, and was not.")
      .def("estimate_errors", &NativeSegment::estimate_errors, "query"_a, "rows"_a);
}

}  // namespace stoker_python
