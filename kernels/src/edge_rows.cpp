#include "stoker/edge_rows.hpp"

#include <algorithm>
#include <string>

#include "stoker/byte_hash.hpp"
#include "stoker/errors.hpp"

namespace stoker {

namespace {

struct Pair {
  std::int64_t tail, head;
  double weight;
};

// Sums equal pairs, in the order of their first.
std::vector<Pair> summed(const EdgeRows& table, const std::int64_t* tails,
                         const std::int64_t* heads, const double* weights, std::size_t count) {
  std::size_t slots = 16;
  while (slots < 2 * count) slots *= 2;
  std::vector<std::uint32_t> places(slots, 0);  // into `pairs`, plus 1
  std::vector<Pair> pairs;
  pairs.reserve(count);
  const auto rows = static_cast<std::int64_t>(table.rows);
  for (std::size_t i = 0; i < count; ++i) {
    const std::int64_t tail = tails[i];
    const std::int64_t head = heads[i];
    if (tail < 0 || tail >= rows || head < 0 || head >= rows) {
      throw BadInput("edge " + std::to_string(tail) + " to " + std::to_string(head) + " among " +
                     std::to_string(table.rows) + " rows");
    }
    if (tail == head) continue;
    const std::uint64_t joined =
        (static_cast<std::uint64_t>(tail) << 32) | static_cast<std::uint64_t>(head);
    std::size_t at = fold_product(joined, 0x9E3779B97F4A7C15u) & (slots - 1);
    for (;; at = (at + 1) & (slots - 1)) {
      if (places[at] == 0) {
        pairs.push_back({tail, head, weights[i]});
        places[at] = static_cast<std::uint32_t>(pairs.size());
        break;
      }
      Pair& pair = pairs[places[at] - 1];
      if (pair.tail == tail && pair.head == head) {
        pair.weight += weights[i];
        break;
      }
    }
  }
  return pairs;
}

// Puts one row's new edges, strongest first, into its weakest slots.
void replace_weakest(const EdgeRows& table, const Pair* first, const Pair* last) {
  const std::size_t degree = table.degree;
  std::int32_t* targets = table.targets + static_cast<std::size_t>(first->tail) * degree;
  double* weights = table.weights + static_cast<std::size_t>(first->tail) * degree;
  const std::size_t fits = std::min(degree, static_cast<std::size_t>(last - first));
  thread_local std::vector<std::pair<double, std::size_t>> weakest;
  weakest.clear();
  for (std::size_t slot = 0; slot < degree; ++slot) weakest.emplace_back(weights[slot], slot);
  std::partial_sort(weakest.begin(), weakest.begin() + static_cast<std::ptrdiff_t>(fits),
                    weakest.end());
  for (std::size_t i = 0; i < fits; ++i) {
    const std::size_t slot = weakest[i].second;
    targets[slot] = static_cast<std::int32_t>(first[i].head);
    weights[slot] = first[i].weight;
  }
}

}  // namespace

std::vector<std::int64_t> add_edges(const EdgeRows& table, const std::int64_t* tails,
                                    const std::int64_t* heads, const double* weights,
                                    std::size_t count) {
  const std::vector<Pair> pairs = summed(table, tails, heads, weights, count);
  std::vector<Pair> unknown;
  std::vector<std::int64_t> changed;
  changed.reserve(pairs.size());
  for (const Pair& pair : pairs) {
    changed.push_back(pair.tail);
    const std::size_t row = static_cast<std::size_t>(pair.tail) * table.degree;
    const std::int32_t* targets = table.targets + row;
    std::size_t slot = table.degree;
    for (std::size_t i = 0; i < table.degree; ++i) {
      if (targets[i] == pair.head) slot = i;
    }
    if (slot < table.degree) {
      table.weights[row + slot] += pair.weight;
    } else {
      unknown.push_back(pair);
    }
  }
  std::sort(unknown.begin(), unknown.end(), [](const Pair& a, const Pair& b) {
    if (a.tail != b.tail) return a.tail < b.tail;
    if (a.weight != b.weight) return a.weight > b.weight;
    return a.head < b.head;
  });
  for (std::size_t at = 0; at < unknown.size();) {
    std::size_t end = at + 1;
    while (end < unknown.size() && unknown[end].tail == unknown[at].tail) ++end;
    replace_weakest(table, unknown.data() + at, unknown.data() + end);
    at = end;
  }
  std::sort(changed.begin(), changed.end());
  changed.erase(std::unique(changed.begin(), changed.end()), changed.end());
  return changed;
}

Links links_of(const std::vector<std::int64_t>& sizes, const std::vector<std::int64_t>& numbers,
               const std::uint8_t* linked, std::size_t window, const Links& followed) {
  Links out;
  std::size_t total = followed.tails.size();
  for (std::size_t row = 0; row < sizes.size(); ++row) {
    if (linked[row] != 0) total += 2 * window * static_cast<std::size_t>(sizes[row]);
  }
  out.tails.reserve(total);
  out.heads.reserve(total);
  out.rows.reserve(total);
  const auto link = [&out](std::int64_t tail, std::int64_t head, std::int64_t row) {
    out.tails.push_back(tail);
    out.heads.push_back(head);
    out.rows.push_back(row);
  };
  std::size_t begin = 0;
  std::size_t next = 0;
  for (std::size_t row = 0; row < sizes.size(); ++row) {
    const auto size = static_cast<std::size_t>(sizes[row]);
    const std::int64_t* keys = numbers.data() + begin;
    begin += size;
    const auto of = static_cast<std::int64_t>(row);
    if (linked[row] != 0) {
      for (std::size_t gap = 1; gap <= window && gap < size; ++gap) {
        for (std::size_t i = 0; i + gap < size; ++i) {
          if (keys[i] < 0 || keys[i + gap] < 0) continue;
          link(keys[i], keys[i + gap], of);
          link(keys[i + gap], keys[i], of);
        }
      }
    }
    for (; next < followed.rows.size() && followed.rows[next] == of; ++next) {
      link(followed.tails[next], followed.heads[next], of);
    }
  }
  if (next != followed.rows.size()) throw BadInput("followed links are not ordered by their rows");
  return out;
}

}  // namespace stoker
