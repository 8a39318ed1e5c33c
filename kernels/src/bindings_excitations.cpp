// The Python face of excitations and counts of what goes together; registered by bindings.cpp.
// What looks at one request's keys takes microseconds and keeps the GIL: where other threads want
// it, giving it back and taking it again costs more than the work.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "stoker/errors.hpp"
#include "stoker/excitations.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace stoker_python;

namespace {

using Rows = Vector<std::int64_t>;
using Values = Output<double>;
using Sums = nb::ndarray<double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

stoker::Excitations table_of(const Values& values, const Sums& sums) {
  if (sums.shape(0) != values.shape(1)) {
    throw stoker::BadInput("excitations and their sums differ in terms");
  }
  return {values.data(), sums.data(), values.shape(0), values.shape(1)};
}

using Change = void (*)(const stoker::Excitations&, const stoker::Amounts&, const double*);

template <Change change>
void changed(const Values& values, const Sums& sums, const Rows& rows,
             const Matrix<double>& amounts, const Rows& groups, const Vector<double>& grown) {
  const stoker::Excitations table = table_of(values, sums);
  if (amounts.shape(0) != rows.shape(0) || groups.shape(0) != table.terms ||
      grown.shape(0) != table.terms) {
    throw stoker::BadInput("rows, amounts, groups and growth differ in shape");
  }
  const stoker::Amounts added{rows.data(), rows.shape(0), amounts.data(), amounts.shape(1),
                              groups.data()};
  change(table, added, grown.data());
}

void bind_counts(nb::module_& m) {
  nb::class_<stoker::LinkCounts>(m, "LinkCounts",
                                 "Bounded counts of what goes with a key. One thread at a time.")
      .def(nb::init<std::size_t>(), nb::kw_only(), "degree"_a)
      .def(
          "add",
          [](stoker::LinkCounts& counts, Rows keys, Rows others) {
            counts.add(keys.data(), keys.shape(0), others.data(), others.shape(0));
          },
          "keys"_a, "others"_a, "Count each key once, together with all others but itself.")
      .def(
          "spread",
          [](const stoker::LinkCounts& counts, Rows keys, Matrix<double> amounts, double prior) {
            if (amounts.shape(0) != keys.shape(0)) {
              throw stoker::BadInput("keys and amounts differ in length");
            }
            const std::size_t width = amounts.shape(1);
            const stoker::Spread out =
                counts.spread(keys.data(), keys.shape(0), amounts.data(), width, prior);
            Owned<double> shares(out.amounts.size());
            std::copy(out.amounts.begin(), out.amounts.end(), shares.get());
            return nb::make_tuple(copy_vector(out.keys),
                                  shares.to_numpy({out.keys.size(), width}));
          },
          "keys"_a, "amounts"_a, nb::kw_only(), "prior"_a,
          "Return (companions, their shares of the amounts), in the order of first mention.")
      .def(
          "renumber",
          [](stoker::LinkCounts& counts, Rows numbers) {
            const nb::gil_scoped_release release;
            counts.renumber(numbers.data(), numbers.shape(0));
          },
          "numbers"_a, "Give keys new numbers; below 0 a key is forgotten.")
      .def_prop_ro("bytes", &stoker::LinkCounts::bytes, "Bytes held.");
}

}  // namespace

void bind_excitations(nb::module_& m) {
  bind_counts(m);
  m.def("add_excitations", &changed<stoker::add_excitations>, "values"_a, "sums"_a, "rows"_a,
        "amounts"_a, "groups"_a, "grown"_a,
        "Add each row's amount groups[term], where >= 0, times the term's growth, in place.");
  m.def("withdraw_excitations", &changed<stoker::withdraw_excitations>, "values"_a, "sums"_a,
        "rows"_a, "amounts"_a, "groups"_a, "grown"_a,
        "Take back what was added with that growth, in place; nothing falls below 0.");
  m.def(
      "weighted_rows",
      [](Matrix<double> values, Vector<double> weights, double base, std::size_t rows) {
        if (weights.shape(0) != values.shape(1) || rows > values.shape(0)) {
          throw stoker::BadInput("more rows or weights than there are excitations");
        }
        Owned<float> out(rows);
        {
          const nb::gil_scoped_release release;
          stoker::weighted_rows(values.data(), rows, values.shape(1), weights.data(), base,
                                out.get());
        }
        return out.to_numpy({rows});
      },
      "values"_a, "weights"_a, "base"_a, "rows"_a,
      "Return the weighted sum of each of the first rows, plus base, as float32.");
  m.def(
      "add_shares",
      [](Matrix<double> values, Rows rows, Vector<double> weights, double base, Sums out) {
        if (weights.shape(0) != values.shape(1) || out.shape(0) != values.shape(1)) {
          throw stoker::BadInput("weights and shares differ in terms from the excitations");
        }
        stoker::add_shares(values.data(), values.shape(0), values.shape(1), rows.data(),
                           rows.shape(0), weights.data(), base, out.data());
      },
      "values"_a, "rows"_a, "weights"_a, "base"_a, "out"_a,
      "Add to out what part of each row's weighted sum plus base each term has, in place.");
  m.def(
      "renew_rows",
      [](Vector<float> rates, nb::ndarray<bool, nb::ndim<1>, nb::c_contig, nb::device::cpu> inside,
         std::size_t capacity, std::size_t swaps, float gain) {
        if (inside.shape(0) < rates.shape(0)) throw stoker::BadInput("more rates than rows");
        stoker::Renewal out;
        {
          const nb::gil_scoped_release release;
          out = stoker::renew_rows(rates.data(), inside.data(), rates.shape(0), capacity, swaps,
                                   gain);
        }
        return std::make_pair(std::move(out.left), std::move(out.came));
      },
      "rates"_a, "inside"_a, nb::kw_only(), "capacity"_a, "swaps"_a, "gain"_a,
      "Renew which rows are inside, in place; return (rows that left, rows that came).");
}
