#include "stoker/excitations.hpp"

#include <algorithm>
#include <numeric>
#include <string>
#include <utility>

#include "stoker/errors.hpp"

namespace stoker {

namespace {

void check_rows(const std::int64_t* picked, std::size_t count, std::size_t rows) {
  for (std::size_t i = 0; i < count; ++i) {
    if (picked[i] < 0 || static_cast<std::size_t>(picked[i]) >= rows) {
      throw BadInput("row " + std::to_string(picked[i]) + " of " + std::to_string(rows));
    }
  }
}

void check_amounts(const Excitations& table, const Amounts& added) {
  check_rows(added.rows, added.count, table.rows);
  for (std::size_t term = 0; term < table.terms; ++term) {
    if (added.groups[term] >= static_cast<std::int64_t>(added.width)) {
      throw BadInput("amount " + std::to_string(added.groups[term]) + " of " +
                     std::to_string(added.width));
    }
  }
}

// Calls change(cell, sum, amount times growth) for every cell that an amount belongs to.
template <typename Change>
void for_cells(const Excitations& table, const Amounts& added, const double* grown,
               Change change) {
  check_amounts(table, added);
  for (std::size_t i = 0; i < added.count; ++i) {
    double* row = table.values + static_cast<std::size_t>(added.rows[i]) * table.terms;
    const double* amounts = added.amounts + i * added.width;
    for (std::size_t term = 0; term < table.terms; ++term) {
      if (added.groups[term] < 0) continue;
      change(row[term], table.sums[term],
             amounts[static_cast<std::size_t>(added.groups[term])] * grown[term]);
    }
  }
}

std::size_t key_at(std::int64_t key) {
  if (key < 0 || key > 0x7FFFFFFF) throw BadInput("key " + std::to_string(key) + " is no number");
  return static_cast<std::size_t>(key);
}

// Leaves the first `count` of `rows` in order, and no others.
template <typename Before>
void keep_first(std::vector<std::int64_t>& rows, std::size_t count, Before before) {
  if (count < rows.size()) {
    std::nth_element(rows.begin(), rows.begin() + static_cast<std::ptrdiff_t>(count), rows.end(),
                     before);
    rows.resize(count);
  }
  std::sort(rows.begin(), rows.end(), before);
}

}  // namespace

void add_excitations(const Excitations& table, const Amounts& added, const double* grown) {
  for_cells(table, added, grown, [](double& cell, double& sum, double amount) {
    cell += amount;
    sum += amount;
  });
}

void withdraw_excitations(const Excitations& table, const Amounts& added, const double* grown) {
  for_cells(table, added, grown, [](double& cell, double& sum, double amount) {
    const double left = std::max(cell - amount, 0.0);
    sum = std::max(sum - (cell - left), 0.0);
    cell = left;
  });
}

void weighted_rows(const double* values, std::size_t rows, std::size_t terms,
                   const double* weights, double base, float* out) {
  const std::size_t even = terms - terms % 2;
  for (std::size_t at = 0; at < rows; ++at) {
    const double* row = values + at * terms;
    double first = base;
    double second = 0.0;
    for (std::size_t term = 0; term < even; term += 2) {
      first += row[term] * weights[term];
      second += row[term + 1] * weights[term + 1];
    }
    if (even < terms) first += row[even] * weights[even];
    out[at] = static_cast<float>(first + second);
  }
}

void add_shares(const double* values, std::size_t rows, std::size_t terms,
                const std::int64_t* picked, std::size_t count, const double* weights, double base,
                double* out) {
  check_rows(picked, count, rows);
  for (std::size_t i = 0; i < count; ++i) {
    const double* row = values + static_cast<std::size_t>(picked[i]) * terms;
    double total = base;
    for (std::size_t term = 0; term < terms; ++term) total += row[term] * weights[term];
    for (std::size_t term = 0; term < terms; ++term) out[term] += row[term] * weights[term] / total;
  }
}

Renewal renew_rows(const float* rates, bool* inside, std::size_t rows, std::size_t capacity,
                   std::size_t swaps, float gain) {
  std::vector<std::int64_t> least;
  for (std::size_t row = 0; row < rows; ++row) {
    if (inside[row]) least.push_back(static_cast<std::int64_t>(row));
  }
  const std::size_t over = least.size() > capacity ? least.size() - capacity : 0;
  const std::size_t free = capacity > least.size() ? capacity - least.size() : 0;
  keep_first(least, over + swaps, [rates](std::int64_t a, std::int64_t b) {
    return rates[a] < rates[b] || (rates[a] == rates[b] && a < b);
  });
  Renewal out;
  for (std::size_t i = 0; i < over; ++i) {
    inside[least[i]] = false;
    out.left.push_back(least[i]);
  }
  if (swaps == 0 || (free == 0 && least.size() == over)) return out;
  std::vector<std::int64_t> best;
  for (std::size_t row = 0; row < rows; ++row) {
    // Where there is no free room, what is not worth more than the very least cannot come.
    if (!inside[row] && (free > 0 || rates[row] > gain * rates[least[over]])) {
      best.push_back(static_cast<std::int64_t>(row));
    }
  }
  keep_first(best, swaps, [rates](std::int64_t a, std::int64_t b) {
    return rates[a] > rates[b] || (rates[a] == rates[b] && a < b);
  });
  for (std::size_t i = 0; i < best.size(); ++i) {
    if (i >= free) {
      const std::size_t at = over + i - free;
      if (at >= least.size() || !(rates[best[i]] > gain * rates[least[at]])) break;
      inside[least[at]] = false;
      out.left.push_back(least[at]);
    }
    inside[best[i]] = true;
    out.came.push_back(best[i]);
  }
  return out;
}

LinkCounts::LinkCounts(std::size_t degree) : degree_(degree) {
  if (degree == 0) throw BadInput("a key needs room for at least one companion");
}

void LinkCounts::add(const std::int64_t* keys, std::size_t count, const std::int64_t* others,
                     std::size_t others_count) {
  std::size_t rows = rows_.size();
  for (std::size_t i = 0; i < count; ++i) rows = std::max(rows, key_at(keys[i]) + 1);
  for (std::size_t i = 0; i < others_count; ++i) key_at(others[i]);
  if (rows > rows_.size()) rows_.resize(rows);
  for (std::size_t i = 0; i < count; ++i) {
    Row& row = rows_[static_cast<std::size_t>(keys[i])];
    row.seen += 1.0;
    for (std::size_t j = 0; j < others_count; ++j) {
      if (others[j] == keys[i]) continue;
      const auto other = static_cast<std::int32_t>(others[j]);
      const auto found = std::find(row.others.begin(), row.others.end(), other);
      if (found != row.others.end()) {
        row.counts[static_cast<std::size_t>(found - row.others.begin())] += 1;
      } else {
        row.others.push_back(other);
        row.counts.push_back(1);
      }
    }
    if (row.others.size() > 2 * degree_) cut(row);
  }
}

void LinkCounts::cut(Row& row) const {
  std::vector<std::size_t> order(row.others.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&row](std::size_t a, std::size_t b) {
    return row.counts[a] > row.counts[b];
  });
  Row kept;
  kept.seen = row.seen;
  for (std::size_t i = 0; i < degree_; ++i) {
    kept.others.push_back(row.others[order[i]]);
    kept.counts.push_back(row.counts[order[i]]);
  }
  row = std::move(kept);
}

Spread LinkCounts::spread(const std::int64_t* keys, std::size_t count, const double* amounts,
                          std::size_t width, double prior) const {
  for (std::size_t i = 0; i < count; ++i) key_at(keys[i]);
  Spread out;
  for (std::size_t i = 0; i < count; ++i) {
    const auto key = static_cast<std::size_t>(keys[i]);
    if (key >= rows_.size()) continue;
    const Row& row = rows_[key];
    const double* amount = amounts + i * width;
    for (std::size_t j = 0; j < row.others.size(); ++j) {
      const auto other = static_cast<std::size_t>(row.others[j]);
      if (other >= places_.size()) places_.resize(std::max(2 * places_.size(), other + 1), 0);
      std::uint32_t& place = places_[other];
      if (place == 0) {
        out.keys.push_back(row.others[j]);
        out.amounts.resize(out.amounts.size() + width, 0.0);
        place = static_cast<std::uint32_t>(out.keys.size());
      }
      double* into = out.amounts.data() + (place - 1) * width;
      for (std::size_t column = 0; column < width; ++column) {
        into[column] += amount[column] / (row.seen + prior) * static_cast<double>(row.counts[j]);
      }
    }
  }
  for (const std::int64_t key : out.keys) places_[static_cast<std::size_t>(key)] = 0;
  return out;
}

void LinkCounts::renumber(const std::int64_t* numbers, std::size_t count) {
  std::size_t total = 0;
  const auto check = [&](std::size_t key) {
    if (key >= count) throw BadInput("key " + std::to_string(key) + " has no new number");
    if (numbers[key] >= 0) total = std::max(total, key_at(numbers[key]) + 1);
  };
  for (std::size_t key = 0; key < rows_.size(); ++key) {
    if (rows_[key].seen > 0.0) check(key);
    for (const std::int32_t other : rows_[key].others) check(static_cast<std::size_t>(other));
  }
  std::vector<Row> moved(total);
  for (std::size_t key = 0; key < rows_.size() && key < count; ++key) {
    if (numbers[key] < 0 || rows_[key].seen <= 0.0) continue;
    const Row& from = rows_[key];
    Row& to = moved[static_cast<std::size_t>(numbers[key])];
    to.seen = from.seen;
    for (std::size_t j = 0; j < from.others.size(); ++j) {
      const std::int64_t other = numbers[from.others[j]];
      if (other < 0) continue;
      to.others.push_back(static_cast<std::int32_t>(other));
      to.counts.push_back(from.counts[j]);
    }
  }
  rows_ = std::move(moved);
  places_.clear();
}

std::size_t LinkCounts::bytes() const {
  std::size_t total = rows_.capacity() * sizeof(Row) + places_.capacity() * sizeof(std::uint32_t);
  for (const Row& row : rows_) {
    total += row.others.capacity() * sizeof(std::int32_t);
    total += row.counts.capacity() * sizeof(std::uint32_t);
  }
  return total;
}

}  // namespace stoker
