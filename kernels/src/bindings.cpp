// The only file that knows Python. Arrays come as views; results go out as new arrays; every call
// that computes or reads releases the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <exception>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "stoker/crc32c.hpp"
#include "stoker/errors.hpp"
#include "stoker/order.hpp"
#include "stoker/page_pool.hpp"
#include "stoker/quantizer.hpp"
#include "stoker/segment.hpp"
#include "stoker/simd.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

template <typename T>
using Vector = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <typename T>
using Matrix = nb::ndarray<const T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
template <typename T>
using NumpyArray = nb::ndarray<nb::numpy, T>;

template <typename T>
struct Owned {
  std::unique_ptr<T[]> data;
  explicit Owned(std::size_t count) : data(new T[count]()) {}
  T* get() { return data.get(); }
  NumpyArray<T> to_numpy(std::initializer_list<std::size_t> shape) {
    T* raw = data.release();
    nb::capsule owner(raw, [](void* p) noexcept { delete[] static_cast<T*>(p); });
    return NumpyArray<T>(raw, shape, owner);
  }
};

template <typename T>
NumpyArray<T> copy_vector(const std::vector<T>& values) {
  Owned<T> out(values.size());
  if (!values.empty()) std::memcpy(out.get(), values.data(), values.size() * sizeof(T));
  return out.to_numpy({values.size()});
}

stoker::Deadline deadline_in(std::optional<double> seconds) {
  if (!seconds) return {};
  return stoker::Clock::now() +
         std::chrono::duration_cast<stoker::Clock::duration>(std::chrono::duration<double>(*seconds));
}

void raise_as(const char* name, const std::exception& error) {
  nb::object type = nb::module_::import_("stoker.errors").attr(name);
  PyErr_SetString(type.ptr(), error.what());
}

// A flag that Python can set while a native call is running.
struct CancelFlag {
  std::atomic<bool> set{false};
};

// Facts of a query, in the order of FACTS in index/segment.py.
constexpr std::size_t kFacts = 12;

// A segment's stores in a pool, and the searcher over them.
class NativeSegment {
 public:
  NativeSegment(nb::object pool, const stoker::SegmentLayout& layout, std::size_t dim,
                std::uint64_t seed, Vector<float> centre)
      : pool_object_(std::move(pool)),
        pool_(nb::cast<stoker::PagePool&>(pool_object_)),
        quantizer_(dim, seed, check_centre(centre, dim)),
        searcher_(pool_, layout, quantizer_) {}

  nb::tuple search(Matrix<float> queries, std::uint32_t k, std::uint32_t ef, float rerank_target,
                   std::uint32_t rerank_reads_max, bool read_vectors, bool resident_only,
                   std::uint32_t beam, std::optional<double> deadline_s,
                   std::optional<Vector<std::uint8_t>> allow, unsigned threads, bool normalize) {
    const stoker::SegmentLayout& layout = searcher_.layout();
    const std::size_t count = queries.shape(0);
    if (queries.shape(1) != layout.dim) {
      throw stoker::BadInput("query has " + std::to_string(queries.shape(1)) +
                             " dimensions, the index " + std::to_string(layout.dim));
    }
    stoker::SearchParams params;
    params.k = k;
    params.ef = ef;
    params.rerank_target = rerank_target;
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
    Owned<std::int64_t> rows(count * k);
    Owned<float> scores(count * k);
    Owned<double> facts(count * kFacts);
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
            float* score = scores.get() + i * k;
            const stoker::QueryStats stats = searcher_.search(query, params, found.data(), score);
            for (std::uint32_t j = 0; j < k; ++j) {
              const bool here = found[j] != stoker::kNoRow;
              rows.get()[i * k + j] = here ? static_cast<std::int64_t>(found[j]) : -1;
              if (!here) score[j] = std::numeric_limits<float>::quiet_NaN();
            }
            write_facts(stats, facts.get() + i * kFacts);
          }
        } catch (...) {
          if (!failed.exchange(true)) failure = std::current_exception();
        }
      };
      std::vector<std::thread> helpers;
      const std::size_t wanted = std::min<std::size_t>(std::max(threads, 1u), count);
      for (std::size_t t = 1; t < wanted; ++t) helpers.emplace_back(work);
      work();
      for (std::thread& helper : helpers) helper.join();
      if (failure) std::rethrow_exception(failure);
    }
    return nb::make_tuple(rows.to_numpy({count, k}), scores.to_numpy({count, k}),
                          facts.to_numpy({count, kFacts}));
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

stoker::NeighborTable table_of(const Matrix<std::uint32_t>& ids,
                               const Vector<std::uint16_t>& counts) {
  if (ids.shape(0) != counts.shape(0)) throw stoker::BadInput("ids and counts differ in length");
  for (std::size_t i = 0; i < counts.shape(0); ++i) {
    if (counts.data()[i] > ids.shape(1)) {
      throw stoker::BadInput("node " + std::to_string(i) + " counts more links than its row holds");
    }
  }
  return {ids.data(), ids.shape(1), counts.data(), static_cast<std::uint32_t>(ids.shape(0))};
}

template <typename Id>
NumpyArray<std::int64_t> ids_of_rows(Vector<Id> ids, Matrix<std::int64_t> rows) {
  const std::size_t count = rows.shape(0) * rows.shape(1);
  Owned<std::int64_t> out(count);
  for (std::size_t i = 0; i < count; ++i) {
    const std::int64_t row = rows.data()[i];
    if (row >= static_cast<std::int64_t>(ids.shape(0))) {
      throw stoker::BadInput("row " + std::to_string(row) + " of " + std::to_string(ids.shape(0)));
    }
    out.get()[i] = row < 0 ? -1 : static_cast<std::int64_t>(ids.data()[row]);
  }
  return out.to_numpy({rows.shape(0), rows.shape(1)});
}

void bind_pool(nb::module_& m) {
  using stoker::PagePool;
  nb::class_<CancelFlag>(m, "CancelFlag", "A flag that stops a running load between two reads.")
      .def(nb::init<>())
      .def("set", [](CancelFlag& f) { f.set = true; })
      .def("clear", [](CancelFlag& f) { f.set = false; })
      .def("is_set", [](const CancelFlag& f) { return f.set.load(); });

  nb::class_<PagePool>(m, "PagePool", "A byte budget of page frames over the pages of many files.")
      .def(
          "__init__",
          [](PagePool* self, std::size_t page_bytes, std::size_t budget_bytes,
             const std::string& backend, bool direct, unsigned io_threads,
             std::size_t prefetch_inflight_bytes_max) {
            stoker::PoolOptions options;
            options.page_bytes = page_bytes;
            options.budget_bytes = budget_bytes;
            options.direct = direct;
            options.io_threads = io_threads;
            options.prefetch_inflight_bytes_max = prefetch_inflight_bytes_max;
            if (backend == "automatic") {
              options.backend = stoker::IoBackend::automatic;
            } else if (backend == "io_uring") {
              options.backend = stoker::IoBackend::io_uring;
            } else if (backend == "threads") {
              options.backend = stoker::IoBackend::threads;
            } else {
              throw stoker::BadInput("backend is automatic, io_uring or threads, not " + backend);
            }
            new (self) PagePool(options);
          },
          nb::kw_only(), "page_bytes"_a, "budget_bytes"_a, "backend"_a = "automatic",
          "direct"_a = true, "io_threads"_a = 16, "prefetch_inflight_bytes_max"_a = 2u << 20)
      .def(
          "add_store",
          [](PagePool& pool, const std::string& path, std::uint64_t offset_bytes,
             std::uint32_t page_count, std::uint64_t table_offset_bytes, std::uint32_t table_crc) {
            stoker::StoreSpec spec;
            spec.path = path;
            spec.offset_bytes = offset_bytes;
            spec.page_count = page_count;
            spec.table_offset_bytes = table_offset_bytes;
            spec.table_crc = table_crc;
            return pool.add_store(std::move(spec));
          },
          nb::kw_only(), "path"_a, "offset_bytes"_a, "page_count"_a, "table_offset_bytes"_a,
          "table_crc"_a, "Pages whose checksums lie in the same file; read when first needed.")
      .def("remove_store", &PagePool::remove_store, "store"_a,
           nb::call_guard<nb::gil_scoped_release>())
      .def(
          "load",
          [](PagePool& pool, std::uint32_t store, Vector<std::uint32_t> pages, bool sticky,
             std::uint8_t weight, bool evict, std::optional<double> deadline_s,
             CancelFlag* cancel) {
            stoker::LoadOptions options;
            options.sticky = sticky;
            options.weight = weight;
            options.evict = evict;
            options.deadline = deadline_in(deadline_s);
            options.cancel = cancel == nullptr ? nullptr : &cancel->set;
            stoker::LoadReport r;
            {
              const nb::gil_scoped_release release;
              r = pool.load(store, pages.data(), pages.shape(0), options);
            }
            nb::dict out;
            out["loaded"] = r.pages_loaded;
            out["already"] = r.pages_already;
            out["no_room"] = r.pages_no_room;
            out["failed"] = r.pages_failed;
            out["not_reached"] = r.pages_not_reached;
            out["reads"] = r.reads;
            out["bytes_read"] = r.bytes_read;
            return out;
          },
          "store"_a, "pages"_a, nb::kw_only(), "sticky"_a = false, "weight"_a = 3,
          "evict"_a = false, "deadline_s"_a = nb::none(), "cancel"_a = nb::none())
      .def(
          "unstick",
          [](PagePool& pool, std::uint32_t store, Vector<std::uint32_t> pages) {
            pool.unstick(store, pages.data(), pages.shape(0));
          },
          "store"_a, "pages"_a)
      .def(
          "evict",
          [](PagePool& pool, std::uint32_t store, Vector<std::uint32_t> pages) {
            return pool.evict(store, pages.data(), pages.shape(0));
          },
          "store"_a, "pages"_a)
      .def(
          "fetch",
          [](PagePool& pool, std::uint32_t store, Vector<std::uint32_t> pages) {
            const std::size_t count = pages.shape(0);
            const std::size_t page_bytes = pool.view(store).page_bytes;
            Owned<std::uint8_t> data(count * page_bytes);
            Owned<std::uint8_t> status(count);
            {
              const nb::gil_scoped_release release;
              std::vector<stoker::PageRef> wanted;
              for (std::size_t i = 0; i < count; ++i) {
                wanted.push_back({store, pages.data()[i]});
              }
              const stoker::PinnedPages got = pool.fetch(wanted.data(), count);
              for (std::size_t i = 0; i < count; ++i) {
                status.get()[i] = static_cast<std::uint8_t>(got.status(i));
                if (got.data(i) != nullptr) {
                  std::memcpy(data.get() + i * page_bytes, got.data(i), page_bytes);
                }
              }
            }
            return nb::make_tuple(data.to_numpy({count, page_bytes}), status.to_numpy({count}));
          },
          "store"_a, "pages"_a,
          "Copies of pages, and a status each: 0 ok, 1 corrupt, 2 I/O error, 3 deadline.")
      .def(
          "residency",
          [](const PagePool& pool, std::uint32_t store) {
            return copy_vector(pool.residency(store));
          },
          "store"_a, "One byte a page: 0 absent, 1 resident, 2 resident and sticky, 3 quarantined.")
      .def("stats",
           [](const PagePool& pool) {
             const stoker::PoolStats s = pool.stats();
             nb::dict out;
             out["page_bytes"] = s.page_bytes;
             out["budget_bytes"] = s.budget_bytes;
             out["resident_bytes"] = s.resident_bytes;
             out["demand_reads"] = s.demand_reads;
             out["demand_bytes"] = s.demand_bytes;
             out["demand_wait_us"] = s.demand_wait_us;
             out["prefetch_reads"] = s.prefetch_reads;
             out["prefetch_bytes"] = s.prefetch_bytes;
             out["evictions"] = s.evictions;
             out["checksum_failures"] = s.checksum_failures;
             out["io_errors"] = s.io_errors;
             out["joined_reads"] = s.joined_reads;
             out["overflow_pages"] = s.overflow_pages;
             return out;
           })
      .def(
          "store_stats",
          [](const PagePool& pool, std::uint32_t store) {
            const stoker::StoreStats s = pool.store_stats(store);
            nb::dict out;
            out["pages"] = s.pages;
            out["resident"] = s.resident;
            out["sticky"] = s.sticky;
            out["quarantined"] = s.quarantined;
            out["demand_pages"] = s.demand_pages;
            out["prefetched_pages"] = s.prefetched_pages;
            out["prefetched_useful"] = s.prefetched_useful;
            out["prefetched_unused"] = s.prefetched_unused;
            out["evictions"] = s.evictions;
            return out;
          },
          "store"_a)
      .def("set_budget", &PagePool::set_budget, "budget_bytes"_a)
      .def("check", &PagePool::check)
      .def_prop_ro("backend", [](const PagePool& pool) { return std::string(pool.backend_name()); })
      .def("direct_io", &PagePool::direct_io, "store"_a);
}

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
      .def(nb::init<nb::object, const SegmentLayout&, std::size_t, std::uint64_t, Vector<float>>(),
           nb::kw_only(), "pool"_a, "layout"_a, "dim"_a, "seed"_a, "centre"_a)
      .def("search", &NativeSegment::search, "queries"_a, nb::kw_only(), "k"_a, "ef"_a,
           "rerank_target"_a, "rerank_reads_max"_a, "read_vectors"_a, "resident_only"_a, "beam"_a,
           "deadline_s"_a = nb::none(), "allow"_a = nb::none(), "threads"_a = 1,
           "normalize"_a = false,
           "Rows (-1 where there are fewer than k), scores (not-a-number there), and float64 facts "
           "per query: expected_recall, expanded, evaluated, skipped, exact, refined, damaged, "
           "rounds, pages_read, bytes_read, deadline_hit, scanned.")
      .def("vectors", &NativeSegment::vectors, "rows"_a,
           "Exact vectors as float32, and how many could not be read (not-a-number).")
      .def("page_counts", &NativeSegment::page_counts,
           "Records of all searches whose page was in memory when wanted, and was not.")
      .def("estimate_errors", &NativeSegment::estimate_errors, "query"_a, "rows"_a);
}

}  // namespace

void bind_events(nb::module_& m);  // bindings_events.cpp

NB_MODULE(_core, m) {
  m.doc() = "Native core of Stoker: page pool, codes, and the walk over a segment.";
  nb::register_exception_translator([](const std::exception_ptr& p, void*) {
    try {
      std::rethrow_exception(p);
    } catch (const stoker::CorruptData& error) {
      raise_as("CorruptError", error);
    } catch (const stoker::StoreError& error) {
      raise_as("UnavailableError", error);
    } catch (const stoker::BadInput& error) {
      raise_as("InputError", error);
    }
  });

  m.def("simd_name", [] { return std::string(stoker::kernels().name); });
  m.def(
      "crc32c",
      [](Vector<std::uint8_t> data, std::uint32_t seed) {
        const nb::gil_scoped_release release;
        return stoker::crc32c(data.data(), data.shape(0), seed);
      },
      "data"_a, "seed"_a = 0);
  m.def(
      "crc32c_pages",
      [](Matrix<std::uint8_t> pages) {
        Owned<std::uint32_t> out(pages.shape(0));
        {
          const nb::gil_scoped_release release;
          for (std::size_t i = 0; i < pages.shape(0); ++i) {
            out.get()[i] = stoker::crc32c(pages.data() + i * pages.shape(1), pages.shape(1));
          }
        }
        return out.to_numpy({pages.shape(0)});
      },
      "pages"_a);
  m.def(
      "first_unusable_row",
      [](Matrix<float> vectors) {
        const std::size_t dim = vectors.shape(1);
        for (std::size_t row = 0; row < vectors.shape(0); ++row) {
          const float* v = vectors.data() + row * dim;
          if (!std::isfinite(stoker::kernels().dot_f32(v, v, dim))) {
            return static_cast<std::int64_t>(row);
          }
        }
        return std::int64_t{-1};
      },
      "vectors"_a,
      "The first row with a value that is not finite, or whose squared length is not; else -1.");
  m.def("ids_of_rows", &ids_of_rows<std::uint32_t>, "ids"_a, "rows"_a,
        "ids[rows] as int64, -1 where the row is negative.");
  m.def("ids_of_rows", &ids_of_rows<std::int64_t>, "ids"_a, "rows"_a);
  m.def(
      "encode",
      [](Matrix<float> vectors, std::uint64_t seed, Vector<float> centre) {
        if (centre.shape(0) != vectors.shape(1)) throw stoker::BadInput("centre dimension");
        const std::size_t count = vectors.shape(0);
        const stoker::CodeShape shape(vectors.shape(1));
        Owned<std::uint8_t> codes(count * shape.code_record_bytes);
        Owned<std::uint8_t> refines(count * shape.refine_record_bytes);
        Owned<std::uint8_t> coarse(count * shape.coarse_record_bytes);
        {
          const nb::gil_scoped_release release;
          const stoker::Quantizer quantizer(vectors.shape(1), seed, centre.data());
          quantizer.encode(vectors.data(), count, codes.get(), refines.get(), coarse.get());
        }
        return nb::make_tuple(codes.to_numpy({count, shape.code_record_bytes}),
                              refines.to_numpy({count, shape.refine_record_bytes}),
                              coarse.to_numpy({count, shape.coarse_record_bytes}));
      },
      "vectors"_a, nb::kw_only(), "seed"_a, "centre"_a,
      "Navigation, refinement and coarse records of float32 vectors, shape (n, dim).");
  m.def(
      "code_record_bytes", [](std::size_t dim) { return stoker::CodeShape(dim).code_record_bytes; },
      "dim"_a);
  m.def(
      "coarse_record_bytes",
      [](std::size_t dim) { return stoker::CodeShape(dim).coarse_record_bytes; }, "dim"_a);
  m.def(
      "refine_record_bytes",
      [](std::size_t dim) { return stoker::CodeShape(dim).refine_record_bytes; }, "dim"_a);
  m.def(
      "rotate",
      [](Vector<float> vector, std::uint64_t seed) {
        Owned<float> out(vector.shape(0));
        std::memcpy(out.get(), vector.data(), vector.shape(0) * sizeof(float));
        stoker::Rotation(vector.shape(0), seed).apply(out.get());
        return out.to_numpy({vector.shape(0)});
      },
      "vector"_a, nb::kw_only(), "seed"_a);
  m.def(
      "locality_order",
      [](Matrix<std::uint32_t> ids, Vector<std::uint16_t> counts, Vector<std::uint32_t> groups,
         std::uint32_t page_nodes) {
        if (groups.shape(0) != ids.shape(0)) throw stoker::BadInput("groups differ in length");
        const stoker::NeighborTable table = table_of(ids, counts);
        std::vector<std::uint32_t> order;
        {
          const nb::gil_scoped_release release;
          order = stoker::locality_order(table, groups.data(), page_nodes);
        }
        return copy_vector(order);
      },
      "ids"_a, "counts"_a, "groups"_a, nb::kw_only(), "page_nodes"_a);
  m.def(
      "pack_links",
      [](Matrix<std::uint32_t> ids, Vector<std::uint16_t> counts, std::uint32_t id_bits,
         std::uint32_t record_bytes, std::uint32_t per_page, std::size_t page_bytes) {
        const stoker::NeighborTable table = table_of(ids, counts);
        if (per_page == 0) throw stoker::BadInput("no records in a page");
        const std::size_t pages = (table.rows + per_page - 1) / per_page;
        Owned<std::uint8_t> out(pages * page_bytes);
        {
          const nb::gil_scoped_release release;
          stoker::pack_links(table, id_bits, record_bytes, per_page, page_bytes, out.get());
        }
        return out.to_numpy({pages, page_bytes});
      },
      "ids"_a, "counts"_a, nb::kw_only(), "id_bits"_a, "record_bytes"_a, "per_page"_a,
      "page_bytes"_a);
  m.def(
      "unpack_links",
      [](Matrix<std::uint8_t> pages, std::uint32_t rows, std::uint32_t degree_max,
         std::uint32_t id_bits, std::uint32_t record_bytes, std::uint32_t per_page) {
        if (per_page == 0 || pages.shape(0) * per_page < rows) {
          throw stoker::CorruptData(std::to_string(rows) + " link records are not all in " +
                                    std::to_string(pages.shape(0)) + " pages");
        }
        Owned<std::uint32_t> ids(static_cast<std::size_t>(rows) * degree_max);
        Owned<std::uint16_t> counts(rows);
        {
          const nb::gil_scoped_release release;
          stoker::unpack_links(pages.data(), rows, degree_max, id_bits, record_bytes, per_page,
                               pages.shape(1), ids.get(), counts.get());
        }
        return nb::make_tuple(ids.to_numpy({rows, degree_max}), counts.to_numpy({rows}));
      },
      "pages"_a, "rows"_a, "m"_a, nb::kw_only(), "id_bits"_a, "record_bytes"_a, "per_page"_a,
      "The inverse of pack_links: uint32 ids, shape (rows, m), and uint16 counts.");

  bind_pool(m);
  bind_segment(m);
  bind_events(m);
}
