#include "stoker/edge_rows.hpp"

#include <algorithm>
#include <cmath>
#include <string>

#include "stoker/byte_hash.hpp"
#include "stoker/errors.hpp"

namespace stoker {

namespace {

struct Pair {
  std::int32_t tail, head;
  double weight;
};

std::size_t slot_of(std::uint64_t key, std::size_t slots) {
  return fold_product(key, 0x9E3779B97F4A7C15u) & (slots - 1);
}

// The rows lie anywhere in memory: those that come next are on their way while one is worked on.
constexpr std::size_t kAhead = 12;

void prefetch(const void* first, std::size_t bytes) {
  constexpr std::size_t kLine = 64;
  for (std::size_t at = 0; at < bytes; at += kLine) {
    __builtin_prefetch(static_cast<const char*>(first) + at, 1);
  }
}

// Sums equal pairs, in the order of their first.
std::vector<Pair> summed(const EdgeRows& table, const std::int64_t* tails,
                         const std::int64_t* heads, const double* weights, std::size_t count) {
  std::size_t slots = 16;
  while (slots < 2 * count) slots *= 2;
  std::vector<std::uint32_t> places(slots, 0);  // into `pairs`, plus 1
  std::vector<Pair> pairs;
  pairs.reserve(count);
  if (table.rows > 0x7FFFFFFF) throw BadInput("edge rows hold at most 2^31 - 1 keys");
  const auto rows = static_cast<std::int64_t>(table.rows);
  for (std::size_t i = 0; i < count; ++i) {
    const std::int64_t tail = tails[i];
    const std::int64_t head = heads[i];
    if (tail < 0 || tail >= rows || head < 0 || head >= rows) {
      throw BadInput("edge " + std::to_string(tail) + " to " + std::to_string(head) + " among " +
                     std::to_string(table.rows) + " rows");
    }
    if (std::isnan(weights[i])) throw BadInput("the weight of an edge is not a number");
    if (tail == head) continue;
    const std::uint64_t joined =
        (static_cast<std::uint64_t>(tail) << 32) | static_cast<std::uint64_t>(head);
    std::size_t at = slot_of(joined, slots);
    const auto short_tail = static_cast<std::int32_t>(tail);
    const auto short_head = static_cast<std::int32_t>(head);
    for (;; at = (at + 1) & (slots - 1)) {
      if (places[at] == 0) {
        pairs.push_back({short_tail, short_head, weights[i]});
        places[at] = static_cast<std::uint32_t>(pairs.size());
        break;
      }
      Pair& pair = pairs[places[at] - 1];
      if (pair.tail == short_tail && pair.head == short_head) {
        pair.weight += weights[i];
        break;
      }
    }
  }
  return pairs;
}

// One tail's new edges, chained by their places among the pairs.
struct Chain {
  std::int32_t tail;
  std::uint32_t first;
};

// Puts one row's new edges, strongest first, into its weakest slots.
void replace_weakest(const EdgeRows& table, std::int32_t tail, std::vector<Pair>& edges) {
  std::sort(edges.begin(), edges.end(), [](const Pair& a, const Pair& b) {
    return a.weight != b.weight ? a.weight > b.weight : a.head < b.head;
  });
  const std::size_t degree = table.degree;
  std::int32_t* targets = table.targets + static_cast<std::size_t>(tail) * degree;
  double* weights = table.weights + static_cast<std::size_t>(tail) * degree;
  const std::size_t fits = std::min(degree, edges.size());
  if (fits == 1) {
    // The first of the least: four at a time, then which it was.
    double least[4] = {weights[0], weights[0], weights[0], weights[0]};
    for (std::size_t at = 0; at < degree; ++at) {
      double& part = least[at % 4];
      part = weights[at] < part ? weights[at] : part;
    }
    const double weight = std::min(std::min(least[0], least[1]), std::min(least[2], least[3]));
    std::size_t slot = 0;
    // Bounded, since a table may come from a file: what is no number equals nothing.
    while (slot + 1 < degree && weights[slot] != weight) ++slot;
    targets[slot] = edges[0].head;
    weights[slot] = edges[0].weight;
    return;
  }
  // The weakest slots, rising; a row is short, so each finds its place among them by stepping.
  thread_local std::vector<std::pair<double, std::size_t>> weakest;
  weakest.resize(fits);
  std::size_t found = 0;
  for (std::size_t slot = 0; slot < degree; ++slot) {
    const double weight = weights[slot];
    if (found == fits && weight >= weakest[found - 1].first) continue;
    std::size_t at = found < fits ? found++ : found - 1;
    for (; at > 0 && weakest[at - 1].first > weight; --at) weakest[at] = weakest[at - 1];
    weakest[at] = {weight, slot};
  }
  for (std::size_t i = 0; i < fits; ++i) {
    const std::size_t slot = weakest[i].second;
    targets[slot] = edges[i].head;
    weights[slot] = edges[i].weight;
  }
}

}  // namespace

void add_edges(const EdgeRows& table, const std::int64_t* tails, const std::int64_t* heads,
               const double* weights, std::size_t count) {
  const std::vector<Pair> pairs = summed(table, tails, heads, weights, count);
  std::size_t slots = 16;
  while (slots < 2 * pairs.size()) slots *= 2;
  constexpr std::uint32_t kNone = 0xFFFFFFFF;
  std::vector<std::uint32_t> places(slots, kNone);  // into `chains`
  std::vector<Chain> chains;
  std::vector<std::uint32_t> next(pairs.size(), kNone);
  const auto degree = static_cast<std::int32_t>(table.degree);
  for (std::uint32_t i = 0; i < pairs.size(); ++i) {
    if (i + kAhead < pairs.size()) {
      const std::size_t row = static_cast<std::size_t>(pairs[i + kAhead].tail) * table.degree;
      prefetch(table.targets + row, table.degree * sizeof(std::int32_t));
    }
    const Pair& pair = pairs[i];
    const std::size_t row = static_cast<std::size_t>(pair.tail) * table.degree;
    const std::int32_t* targets = table.targets + row;
    const std::int32_t head = pair.head;
    std::int32_t slot = 0;  // plus 1; without a branch, so that compilers take many at once
    for (std::int32_t j = 0; j < degree; ++j) slot |= targets[j] == head ? j + 1 : 0;
    if (slot != 0) {
      table.weights[row + static_cast<std::size_t>(slot) - 1] += pair.weight;
      continue;
    }
    std::size_t at = slot_of(static_cast<std::uint64_t>(pair.tail), slots);
    while (places[at] != kNone && chains[places[at]].tail != pair.tail) at = (at + 1) & (slots - 1);
    if (places[at] == kNone) {
      places[at] = static_cast<std::uint32_t>(chains.size());
      chains.push_back({pair.tail, i});
    } else {
      next[i] = chains[places[at]].first;
      chains[places[at]].first = i;
    }
  }
  std::vector<Pair> edges;
  for (std::size_t at = 0; at < chains.size(); ++at) {
    if (at + kAhead < chains.size()) {
      const std::size_t row = static_cast<std::size_t>(chains[at + kAhead].tail) * table.degree;
      prefetch(table.weights + row, table.degree * sizeof(double));
    }
    const Chain& chain = chains[at];
    edges.clear();
    for (std::uint32_t i = chain.first; i != kNone; i = next[i]) edges.push_back(pairs[i]);
    replace_weakest(table, chain.tail, edges);
  }
}

void add_runs(double* values, std::size_t parts, std::size_t keys, const std::int64_t* numbers,
              std::size_t count, const std::int64_t* sizes, const double* grown, std::size_t runs,
              const double* amounts) {
  std::size_t total = 0;
  for (std::size_t run = 0; run < runs; ++run) {
    if (sizes[run] < 0) throw BadInput("a run has " + std::to_string(sizes[run]) + " keys");
    total += static_cast<std::size_t>(sizes[run]);
  }
  if (total != count) {
    throw BadInput("runs of " + std::to_string(total) + " keys, " + std::to_string(count) +
                   " are given");
  }
  for (std::size_t i = 0; i < count; ++i) {
    if (numbers[i] < 0 || static_cast<std::size_t>(numbers[i]) >= keys) {
      throw BadInput("key " + std::to_string(numbers[i]) + " among " + std::to_string(keys));
    }
  }
  for (std::size_t part = 0; part < parts; ++part) {
    double* row = values + part * keys;
    std::size_t at = 0;
    for (std::size_t run = 0; run < runs; ++run) {
      const double growth = grown[part * runs + run];
      for (const std::size_t end = at + static_cast<std::size_t>(sizes[run]); at < end; ++at) {
        row[numbers[at]] += growth * amounts[at];
      }
    }
  }
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
