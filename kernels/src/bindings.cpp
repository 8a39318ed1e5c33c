// The Python module, and its small functions; classes are in the other bindings_*.cpp. Arrays come
// as views; results go out as new arrays; every call that computes or reads releases the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <cstring>
#include <exception>
#include <string>
#include <vector>

#include "bindings.hpp"
#include "stoker/best_rows.hpp"
#include "stoker/crc32c.hpp"
#include "stoker/errors.hpp"
#include "stoker/order.hpp"
#include "stoker/quantizer.hpp"
#include "stoker/simd.hpp"
#include "stoker/snapshot_counts.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace stoker_python;

namespace {

void raise_as(const char* name, const std::exception& error) {
  nb::object type = nb::module_::import_("stoker.errors").attr(name);
  PyErr_SetString(type.ptr(), error.what());
}

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
void ids_of_rows(Vector<Id> ids, Matrix<std::int64_t> rows, Output<std::int64_t> out) {
  const std::size_t count = rows.shape(0) * rows.shape(1);
  if (out.shape(0) != rows.shape(0) || out.shape(1) != rows.shape(1)) {
    throw stoker::BadInput("the array for ids has another shape than the rows");
  }
  for (std::size_t i = 0; i < count; ++i) {
    const std::int64_t row = rows.data()[i];
    if (row >= static_cast<std::int64_t>(ids.shape(0))) {
      throw stoker::BadInput("row " + std::to_string(row) + " of " + std::to_string(ids.shape(0)));
    }
    out.data()[i] = row < 0 ? -1 : static_cast<std::int64_t>(ids.data()[row]);
  }
}

}  // namespace

void bind_events(nb::module_& m);       // bindings_events.cpp
void bind_excitations(nb::module_& m);  // bindings_excitations.cpp

NB_MODULE(_core, m) {
  m.doc() = "Native core of Stoker: page pool, codes, and the walk over a segment.";
#ifdef NDEBUG
  // What other packages keep alive to the end of a process (aiohttp remembers its applications) is
  // no concern of whoever ends a server; builds for debugging still say it.
  nb::set_leak_warnings(false);
#endif
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
  m.def("ids_of_rows", &ids_of_rows<std::uint32_t>, "ids"_a, "rows"_a, "out"_a,
        "Writes ids[rows] to `out`, -1 where the row is negative.");
  m.def("ids_of_rows", &ids_of_rows<std::int64_t>, "ids"_a, "rows"_a, "out"_a);
  nb::class_<stoker::CoarseBasis>(
      m, "CoarseBasis", "The directions that coarse codes keep, and with how many bits.")
      .def(
          "__init__",
          [](stoker::CoarseBasis* self, std::size_t wide_blocks, std::size_t fine,
             std::size_t blocks, Vector<float> steps, Matrix<std::uint16_t> rows) {
            new (self) stoker::CoarseBasis();
            self->wide_blocks = wide_blocks;
            self->directions = rows.shape(0);
            self->fine = fine;
            self->blocks = blocks;
            self->steps.assign(steps.data(), steps.data() + steps.shape(0));
            self->rows.assign(rows.data(), rows.data() + rows.shape(0) * rows.shape(1));
          },
          nb::kw_only(), "wide_blocks"_a, "fine"_a, "blocks"_a, "steps"_a, "rows"_a,
          "`steps`: float32, shape (directions,); `rows`: bits of float16, shape (directions, dim).")
      .def_ro("wide_blocks", &stoker::CoarseBasis::wide_blocks)
      .def_ro("directions", &stoker::CoarseBasis::directions)
      .def_ro("fine", &stoker::CoarseBasis::fine)
      .def_ro("blocks", &stoker::CoarseBasis::blocks)
      .def_prop_ro(
          "steps", [](const stoker::CoarseBasis& self) { return copy_vector(self.steps); },
          nb::rv_policy::automatic)
      .def_prop_ro(
          "rows", [](const stoker::CoarseBasis& self) { return copy_vector(self.rows); },
          nb::rv_policy::automatic, "The same, one row after the other.");
  m.def(
      "encode",
      [](Matrix<float> vectors, std::uint64_t seed, Vector<float> centre,
         const std::optional<stoker::CoarseBasis>& basis, double row_length2) {
        if (centre.shape(0) != vectors.shape(1)) throw stoker::BadInput("centre dimension");
        const std::size_t count = vectors.shape(0);
        const stoker::Quantizer quantizer(vectors.shape(1), seed, centre.data(),
                                          basis.value_or(stoker::CoarseBasis{}), row_length2);
        const stoker::CodeShape& shape = quantizer.shape();
        Owned<std::uint8_t> codes(count * shape.code_record_bytes);
        Owned<std::uint8_t> refines(count * shape.refine_record_bytes);
        Owned<std::uint8_t> coarse(count * shape.coarse_record_bytes);
        {
          const nb::gil_scoped_release release;
          quantizer.encode(vectors.data(), count, codes.get(), refines.get(), coarse.get());
        }
        return nb::make_tuple(codes.to_numpy({count, shape.code_record_bytes}),
                              refines.to_numpy({count, shape.refine_record_bytes}),
                              coarse.to_numpy({count, shape.coarse_record_bytes}));
      },
      "vectors"_a, nb::kw_only(), "seed"_a, "centre"_a, "basis"_a = nb::none(),
      "row_length2"_a = 0.0,
      "Navigation, refinement and coarse records of float32 vectors, shape (n, dim).\n\n"
      "``row_length2``: 0, or of inner products with rows of about one length: its square.");
  m.def(
      "meet_rows",
      [](Matrix<float> queries, Matrix<float> vectors, std::int64_t first_row, bool l2,
         Output<float> scores, Output<std::int64_t> rows) {
        const std::size_t count = queries.shape(0);
        if (vectors.shape(1) != queries.shape(1)) throw stoker::BadInput("dimension of the rows");
        if (scores.shape(0) != count || rows.shape(0) != count ||
            scores.shape(1) != rows.shape(1)) {
          throw stoker::BadInput("shape of the best");
        }
        const stoker::BestRows best{queries.data(), count,         queries.shape(1), scores.shape(1),
                                    l2,             scores.data(), rows.data()};
        const nb::gil_scoped_release release;
        stoker::meet_rows(best, vectors.data(), vectors.shape(0), first_row);
      },
      "queries"_a, "vectors"_a, nb::kw_only(), "first_row"_a, "l2"_a, "scores"_a, "rows"_a,
      "Put the rows of float32 vectors that beat a query's best so far among those, in place.\n\n"
      "Scores are <q, x>, or under l2 2 <q, x> - <x, x>; float32, shape (nq, k), falling. Equal\n"
      "ones stay in the order in which they were met. ``rows``: int64, of the same shape.");
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
  // The GIL is kept: each is shorter than giving it up, and none of them waits.
  nb::class_<stoker::SnapshotCounts>(
      m, "SnapshotCounts",
      "Who reads which version: readers count without a lock, one writer at a time.")
      .def(nb::init<>(), "Slot 0 is present.")
      .def("acquire", [](stoker::SnapshotCounts& self) { return self.acquire(); },
           "Take a reference to the present version; returns its slot.")
      .def("release", &stoker::SnapshotCounts::release, "slot"_a, "Give a reference back.")
      .def("vacant", &stoker::SnapshotCounts::vacant,
           "The slot for the next version; the same one until it is published.")
      .def("publish", &stoker::SnapshotCounts::publish, "slot"_a,
           "Make the vacant slot the present one; returns what `reclaim` does.")
      .def("reclaim", &stoker::SnapshotCounts::reclaim,
           "Superseded slots that nobody holds; each is named once.")
      .def("references", &stoker::SnapshotCounts::references, "slot"_a,
           "References that are counted now.");

  bind_pool(m);
  bind_segment(m);
  bind_events(m);
  bind_excitations(m);
}
