// The Python face of the page pool. Every call that reads releases the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "stoker/errors.hpp"
#include "stoker/page_pool.hpp"

namespace stoker_python {

using namespace nb::literals;

namespace {

// A flag that Python can set while a native call is running.
struct CancelFlag {
  std::atomic<bool> set{false};
};

}  // namespace

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
             std::size_t prefetch_inflight_bytes_max, double volume_reads_s,
             double volume_bytes_s) {
            stoker::PoolOptions options;
            options.page_bytes = page_bytes;
            options.budget_bytes = budget_bytes;
            options.direct = direct;
            options.io_threads = io_threads;
            options.prefetch_inflight_bytes_max = prefetch_inflight_bytes_max;
            options.volume = {volume_reads_s, volume_bytes_s};
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
          "direct"_a = true, "io_threads"_a = 16, "prefetch_inflight_bytes_max"_a = 2u << 20,
          "volume_reads_s"_a = 0.0, "volume_bytes_s"_a = 0.0)
      .def(
          "add_store",
          [](PagePool& pool, const std::string& path, std::uint64_t offset_bytes,
             std::uint32_t page_count, std::uint64_t table_offset_bytes, std::uint32_t table_crc,
             std::uint32_t cluster_pages) {
            stoker::StoreSpec spec;
            spec.path = path;
            spec.offset_bytes = offset_bytes;
            spec.page_count = page_count;
            spec.table_offset_bytes = table_offset_bytes;
            spec.table_crc = table_crc;
            spec.cluster_pages = cluster_pages;
            return pool.add_store(std::move(spec));
          },
          nb::kw_only(), "path"_a, "offset_bytes"_a, "page_count"_a, "table_offset_bytes"_a,
          "table_crc"_a, "cluster_pages"_a = 1, "Pages whose checksums lie in the same file; read when first needed.")
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

}  // namespace stoker_python
