// The Python face of event batches, key tables and edge rows; registered by bindings.cpp.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "stoker/edge_rows.hpp"
#include "stoker/errors.hpp"
#include "stoker/event_batch.hpp"
#include "stoker/key_table.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

template <typename T>
using Vector = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <typename T>
using Column = nb::ndarray<nb::numpy, T, nb::ndim<1>>;
template <typename T>
using Table = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// Gives the vector's own memory to Python.
template <typename T>
Column<T> column(std::vector<T>&& values) {
  auto* kept = new std::vector<T>(std::move(values));
  nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return Column<T>(kept->data(), {kept->size()}, owner);
}

nb::str text(std::string_view bytes) { return nb::str(bytes.data(), bytes.size()); }

stoker::EventBatch scan(const stoker::EnvelopeRules& rules, const nb::list& payloads) {
  struct Payload {
    std::string_view bytes;
    bool present;
  };
  std::vector<nb::object> held;  // the list may change while the lock is released
  std::vector<Payload> views;
  held.reserve(nb::len(payloads));
  views.reserve(nb::len(payloads));
  for (nb::handle item : payloads) {
    if (item.is_none()) {
      views.push_back({{}, false});
      continue;
    }
    if (!nb::isinstance<nb::bytes>(item)) throw nb::type_error("a payload is bytes, or None");
    held.push_back(nb::borrow(item));
    const nb::bytes bytes = nb::borrow<nb::bytes>(item);
    views.push_back({std::string_view(bytes.c_str(), bytes.size()), true});
  }
  stoker::EventBatch batch;
  {
    const nb::gil_scoped_release release;
    batch.rows.reserve(views.size());
    for (const Payload& payload : views) {
      if (payload.present) {
        batch.scan(payload.bytes, rules);
      } else {
        batch.rows.emplace_back();
        batch.rows.back().state = stoker::RowState::kOut;
      }
    }
  }
  return batch;
}

template <typename T, typename Get>
Column<T> rows_column(const stoker::EventBatch& batch, Get get) {
  std::vector<T> out;
  out.reserve(batch.rows.size());
  for (const stoker::EventRow& row : batch.rows) out.push_back(static_cast<T>(get(row)));
  return column(std::move(out));
}

const stoker::EventRow& row_at(const stoker::EventBatch& batch, std::size_t at) {
  if (at >= batch.rows.size()) {
    throw nb::index_error(("row " + std::to_string(at)).c_str());
  }
  return batch.rows[at];
}

nb::tuple row_values(const stoker::EventBatch& batch, std::size_t at) {
  const stoker::EventRow& row = row_at(batch, at);
  nb::list keys;
  for (std::size_t i = 0; i < row.key_count; ++i) {
    keys.append(text(batch.view(batch.keys[row.first_key + i])));
  }
  nb::object session = nb::none();
  if (row.has_session) session = text(batch.view(row.session));
  return nb::make_tuple(row.kind, row.time_s, text(batch.view(row.id)),
                        text(batch.view(row.tenant)), session, keys);
}

void put(stoker::EventBatch& batch, std::size_t at, std::uint8_t kind, double time_s,
         std::string_view id, std::string_view tenant, std::optional<std::string_view> session,
         const std::vector<std::string_view>& keys) {
  batch.put(at, kind, time_s, id, tenant, session ? &*session : nullptr, keys);
}

stoker::EdgeRows rows_of(const Table<std::int32_t>& targets, const Table<double>& weights) {
  if (targets.shape(0) != weights.shape(0) || targets.shape(1) != weights.shape(1)) {
    throw stoker::BadInput("targets and weights differ in shape");
  }
  return {targets.data(), weights.data(), targets.shape(0), targets.shape(1)};
}

void bind_batch(nb::module_& m) {
  nb::class_<stoker::EnvelopeRules>(m, "EventScanner",
                                    "Scans envelopes of events into a batch's columns.")
      .def(
          "__init__",
          [](stoker::EnvelopeRules* self, std::vector<std::string> types,
             std::vector<std::uint32_t> keys_min, std::vector<std::string> content_types,
             std::size_t payload_bytes_max, std::size_t id_max, std::size_t source_max,
             std::size_t name_max, std::size_t key_max, std::size_t query_max,
             std::size_t keys_max) {
            if (types.size() != keys_min.size() || types.size() > 255) {
              throw stoker::BadInput("expected one least count of keys per type");
            }
            new (self) stoker::EnvelopeRules{std::move(types),
                                             std::move(keys_min),
                                             std::move(content_types),
                                             payload_bytes_max,
                                             id_max,
                                             source_max,
                                             name_max,
                                             key_max,
                                             query_max,
                                             keys_max};
          },
          nb::kw_only(), "types"_a, "keys_min"_a, "content_types"_a, "payload_bytes_max"_a,
          "id_max"_a, "source_max"_a, "name_max"_a, "key_max"_a, "query_max"_a, "keys_max"_a)
      .def("scan", &scan, "payloads"_a,
           "Return a batch with a row per payload; None makes a row that is out.");

  nb::class_<stoker::EventBatch>(m, "EventBatch", "Events as columns, a row each.")
      .def(nb::init<>())
      .def("__len__", [](const stoker::EventBatch& b) { return b.rows.size(); })
      .def(
          "states",
          [](const stoker::EventBatch& b) {
            return rows_column<std::uint8_t>(b, [](const auto& row) { return row.state; });
          },
          "uint8, shape (n,): 0 undecided, 1 ready, 2 out.")
      .def(
          "kinds",
          [](const stoker::EventBatch& b) {
            return rows_column<std::uint8_t>(b, [](const auto& row) { return row.kind; });
          },
          "uint8, shape (n,): the place of the row's type among the scanner's.")
      .def(
          "times",
          [](const stoker::EventBatch& b) {
            return rows_column<double>(b, [](const auto& row) { return row.time_s; });
          },
          "float64, shape (n,): Unix seconds.")
      .def(
          "undecided",
          [](const stoker::EventBatch& b) {
            std::vector<std::size_t> out;
            for (std::size_t i = 0; i < b.rows.size(); ++i) {
              if (b.rows[i].state == stoker::RowState::kUndecided) out.push_back(i);
            }
            return out;
          },
          "The rows that a full decoder has to settle.")
      .def_prop_ro("ready_count",
                   [](const stoker::EventBatch& b) {
                     std::size_t count = 0;
                     for (const auto& row : b.rows) {
                       count += row.state == stoker::RowState::kReady ? 1 : 0;
                     }
                     return count;
                   })
      .def("values", &row_values, "row"_a, "Return (kind, time_s, id, tenant, session, keys).")
      .def("put", &put, "row"_a, nb::kw_only(), "kind"_a, "time_s"_a, "id"_a, "tenant"_a,
           "session"_a.none(), "keys"_a, "Settle an undecided row.")
      .def(
          "append",
          [](stoker::EventBatch& b, std::uint8_t kind, double time_s, std::string_view id,
             std::string_view tenant, std::optional<std::string_view> session,
             const std::vector<std::string_view>& keys) {
            b.rows.emplace_back();
            put(b, b.rows.size() - 1, kind, time_s, id, tenant, session, keys);
          },
          nb::kw_only(), "kind"_a, "time_s"_a, "id"_a, "tenant"_a, "session"_a.none(), "keys"_a,
          "Add a row that is ready.")
      .def(
          "drop",
          [](stoker::EventBatch& b, std::size_t at) {
            row_at(b, at);
            b.rows[at].state = stoker::RowState::kOut;
          },
          "row"_a, "Put a row out.");
}

void bind_keys(nb::module_& m) {
  nb::class_<stoker::KeyTable::Interned>(m, "KeyRun", "A run of rows with their keys' numbers.")
      .def_ro("stop", &stoker::KeyTable::Interned::stop)
      .def("rows", [](const stoker::KeyTable::Interned& r) { return column(std::vector(r.rows)); })
      .def("sizes",
           [](const stoker::KeyTable::Interned& r) { return column(std::vector(r.sizes)); })
      .def("numbers",
           [](const stoker::KeyTable::Interned& r) { return column(std::vector(r.numbers)); })
      .def(
          "settle",
          [](stoker::KeyTable::Interned& r, std::size_t place, std::int64_t number) {
            if (place >= r.numbers.size()) throw stoker::BadInput("no such place in the run");
            r.numbers[place] = number;
          },
          "place"_a, "number"_a, "Give a key of the run its number.")
      .def(
          "outside",
          [](const stoker::KeyTable::Interned& r, const stoker::EventBatch& batch) {
            auto found = r.outside(batch);
            return nb::make_tuple(column(std::move(found.places)), column(std::move(found.owners)),
                                  column(std::move(found.hashes)));
          },
          "batch"_a, "Where a number is absent: (places, rows of the run, content hashes).")
      .def(
          "name",
          [](const stoker::KeyTable::Interned& r, const stoker::EventBatch& batch,
             std::size_t owner, std::size_t place) {
            const auto [group, key] = r.name(batch, owner, place);
            return nb::make_tuple(text(group), text(key));
          },
          "batch"_a, "row"_a, "place"_a, "The (group, key) at a place of the run.")
      .def("cut", &stoker::KeyTable::Interned::cut, "count"_a, "Keep only the first rows.");

  nb::class_<stoker::KeyTable>(m, "KeyTable", "(group, key) to 0, 1, 2, ... as they were added.")
      .def(nb::init<>())
      .def("__len__", &stoker::KeyTable::size)
      .def_prop_ro("bytes_used", &stoker::KeyTable::bytes_used)
      .def("find", &stoker::KeyTable::find, "group"_a, "key"_a, "The number, or -1.")
      .def("add", &stoker::KeyTable::add, "group"_a, "key"_a,
           "The number, a new one where there was none.")
      .def(
          "names",
          [](const stoker::KeyTable& t, std::size_t start) {
            nb::list out;
            nb::str group;
            std::string_view of;
            for (std::size_t number = start; number < t.size(); ++number) {
              if (number == start || t.group_of(number) != of) {
                of = t.group_of(number);
                group = text(of);
              }
              out.append(nb::make_tuple(group, text(t.key_of(number))));
            }
            return out;
          },
          "start"_a, "(group, key) of the numbers from `start` on.")
      .def(
          "members",
          [](const stoker::KeyTable& t, std::string_view group) {
            return column(t.members(group));
          },
          "group"_a, "int64: the numbers of one group's keys, rising.")
      .def(
          "keep",
          [](stoker::KeyTable& t, Vector<std::int64_t> numbers) {
            t.keep(numbers.data(), numbers.shape(0));
          },
          "numbers"_a, "Keep only these (rising), renumbered 0, 1, 2, ...")
      .def(
          "intern",
          [](stoker::KeyTable& t, const stoker::EventBatch& batch, std::size_t start,
             std::uint8_t kinds_end, std::uint8_t stop_kind, std::size_t keys_max, bool grow) {
            const nb::gil_scoped_release release;
            return t.intern(batch, start, kinds_end, stop_kind, keys_max, grow);
          },
          "batch"_a, nb::kw_only(), "start"_a, "kinds_end"_a, "stop_kind"_a, "keys_max"_a,
          "grow"_a, "Look up the keys of the ready rows from `start` on.");

  nb::class_<stoker::SessionTable>(m, "SessionTable", "The first keys of each session's last row.")
      .def(nb::init<>())
      .def("__len__", &stoker::SessionTable::size)
      .def(
          "load",
          [](stoker::SessionTable& t, std::string group, std::string name, double time_s,
             std::vector<std::int64_t> numbers) {
            t.load({std::move(group), std::move(name), time_s, std::move(numbers)});
          },
          "group"_a, "name"_a, "time_s"_a, "numbers"_a)
      .def("clear", &stoker::SessionTable::clear)
      .def("items",
           [](const stoker::SessionTable& t) {
             nb::list out;
             for (const auto& s : t.sessions()) {
               nb::list numbers;
               for (const std::int64_t n : s.numbers) numbers.append(n);
               out.append(nb::make_tuple(text(s.group), text(s.name), s.time_s, numbers));
             }
             return out;
           },
           "(group, name, time_s, numbers), the least recent first.")
      .def(
          "renumber",
          [](stoker::SessionTable& t, Vector<std::int64_t> number) {
            t.renumber(number.data(), number.shape(0));
          },
          "number"_a)
      .def(
          "links",
          [](stoker::SessionTable& t, const stoker::EventBatch& batch,
             const stoker::KeyTable::Interned& run, Vector<double> times_s, std::uint8_t kind,
             std::size_t width, double gap_s, std::size_t sessions_max, std::size_t window) {
            if (times_s.shape(0) != run.rows.size()) {
              throw stoker::BadInput("expected one time per row of the run");
            }
            stoker::Links links;
            std::vector<double> moments;
            {
              const nb::gil_scoped_release release;
              stoker::SessionTable::Followed followed =
                  t.follow(batch, run, times_s.data(), kind, width, gap_s, sessions_max);
              std::vector<std::uint8_t> linked;
              linked.reserve(run.rows.size());
              for (const std::int64_t row : run.rows) {
                linked.push_back(batch.rows.at(static_cast<std::size_t>(row)).kind == kind ? 1 : 0);
              }
              links = stoker::links_of(run.sizes, run.numbers, linked.data(), window,
                                       {std::move(followed.tails), std::move(followed.heads),
                                        std::move(followed.rows)});
              moments.reserve(links.rows.size());
              for (const std::int64_t row : links.rows) moments.push_back(times_s.data()[row]);
            }
            return nb::make_tuple(column(std::move(links.tails)), column(std::move(links.heads)),
                                  column(std::move(moments)));
          },
          "batch"_a, "run"_a, "times_s"_a, nb::kw_only(), "kind"_a, "width"_a, "gap_s"_a,
          "sessions_max"_a, "window"_a,
          "Note each session's rows; return what is linked as (tails, heads, times).");

  using stoker::IdWindow;
  nb::class_<IdWindow>(m, "IdWindow", "Fingerprints of the ids seen lately, per group.")
      .def(nb::init<std::uint64_t>(), "seed"_a)
      .def("__len__", &IdWindow::size)
      .def_prop_ro("seed", &IdWindow::seed)
      .def_prop_ro("bytes_used", &IdWindow::bytes_used)
      .def_prop_ro("span_s", &IdWindow::span_s, "Seconds that the ids cover.")
      .def(
          "pass_rows",
          [](IdWindow& w, stoker::EventBatch& batch, Vector<double> times_s,
             std::size_t bytes_max, double age_s_max) {
            if (times_s.shape(0) != batch.rows.size()) {
              throw stoker::BadInput("expected one time per row of the batch");
            }
            return w.pass(batch, times_s.data(), {bytes_max, age_s_max});
          },
          "batch"_a, "times_s"_a, nb::kw_only(), "bytes_max"_a, "age_s_max"_a,
          "Put out the rows whose id is held; return how many.")
      .def(
          "add",
          [](IdWindow& w, std::string_view group, std::string_view id, double time_s,
             std::size_t bytes_max, double age_s_max) {
            return w.add(group, id, time_s, {bytes_max, age_s_max});
          },
          "group"_a, "id"_a, "time_s"_a, nb::kw_only(), "bytes_max"_a, "age_s_max"_a,
          "Remember one id; False where it is held.")
      .def("fingerprints", [](const IdWindow& w) { return column(w.fingerprints()); },
           "uint64, shape (len,), the oldest first.")
      .def("marks",
           [](const IdWindow& w) {
             nb::list out;
             for (const IdWindow::Mark& mark : w.marks()) {
               out.append(nb::make_tuple(mark.time_s, mark.count));
             }
             return out;
           },
           "(time_s, how many ids came from then until the next), the oldest first.")
      .def(
          "load",
          [](IdWindow& w, Vector<std::uint64_t> fingerprints, Vector<double> times_s,
             Vector<std::int64_t> counts) {
            std::vector<IdWindow::Mark> marks;
            if (times_s.shape(0) != counts.shape(0)) {
              throw stoker::BadInput("expected one count per mark");
            }
            for (std::size_t i = 0; i < counts.shape(0); ++i) {
              if (counts.data()[i] < 0) throw stoker::BadInput("a mark's count is below 0");
              marks.push_back({times_s.data()[i], static_cast<std::size_t>(counts.data()[i])});
            }
            w.load(fingerprints.data(), fingerprints.shape(0), marks);
          },
          "fingerprints"_a, "times_s"_a, "counts"_a,
          "Take over what another window of this seed held.");
}

}  // namespace

void bind_events(nb::module_& m) {
  bind_batch(m);
  bind_keys(m);
  m.def("content_hash", &stoker::content_hash, "group"_a, "key"_a,
        "A number for (group, key) that is the same in every process.");
  m.def(
      "add_edges",
      [](Table<std::int32_t> targets, Table<double> weights, Vector<std::int64_t> tails,
         Vector<std::int64_t> heads, Vector<double> grown) {
        const stoker::EdgeRows table = rows_of(targets, weights);
        if (tails.shape(0) != heads.shape(0) || tails.shape(0) != grown.shape(0)) {
          throw stoker::BadInput("tails, heads and weights differ in length");
        }
        const nb::gil_scoped_release release;
        stoker::add_edges(table, tails.data(), heads.data(), grown.data(), tails.shape(0));
      },
      "targets"_a, "weights"_a, "tails"_a, "heads"_a, "grown"_a,
      "Strengthen edges in rows of slots, in place.");
  m.def(
      "add_runs",
      [](Table<double> values, Vector<std::int64_t> numbers, Vector<std::int64_t> sizes,
         Table<const double> grown, Vector<double> amounts) {
        if (grown.shape(0) != values.shape(0) || grown.shape(1) != sizes.shape(0) ||
            amounts.shape(0) != numbers.shape(0)) {
          throw stoker::BadInput("counts, runs and amounts differ in shape");
        }
        const nb::gil_scoped_release release;
        stoker::add_runs(values.data(), values.shape(0), values.shape(1), numbers.data(),
                         numbers.shape(0), sizes.data(), grown.data(), sizes.shape(0),
                         amounts.data());
      },
      "values"_a, "numbers"_a, "sizes"_a, "grown"_a, "amounts"_a,
      "Add each run's growth times the amount to its keys' values, per part, in place.");
}
