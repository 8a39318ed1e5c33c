// Numbers for grouped text keys, what followed what inside a session, and ids seen lately: the
// tables that a batch of events is looked up in.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <list>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "stoker/byte_hash.hpp"
#include "stoker/event_batch.hpp"

namespace stoker {

struct BytesHash {
  std::size_t operator()(std::string_view bytes) const {
    return static_cast<std::size_t>(hash_bytes(bytes, process_hash_seed()));
  }
};

// A number for (group, key) that is the same in every process and may be stored. Two keys may share
// one; whoever minds compares the keys themselves.
std::int64_t content_hash(std::string_view group, std::string_view key);

// (group, key) -> 0, 1, 2, ... in the order in which they were added.
//
// Invariants: every key has one number; the slots are at most half full.
class KeyTable {
 public:
  static constexpr std::int64_t kAbsent = -1;

  KeyTable();

  std::size_t size() const { return entries_.size(); }
  std::size_t bytes_used() const;

  std::int64_t find(std::string_view group, std::string_view key) const;
  std::int64_t add(std::string_view group, std::string_view key);
  std::string_view group_of(std::size_t number) const { return groups_[entry(number).group]; }
  std::string_view key_of(std::size_t number) const;
  // Numbers of one group's keys, rising.
  std::vector<std::int64_t> members(std::string_view group) const;
  // Keeps only `numbers` (rising), renumbered 0, 1, 2, ...; throws BadInput for one out of range.
  void keep(const std::int64_t* numbers, std::size_t count);

  struct Interned {
    std::size_t stop = 0;               // first row that was not taken
    std::vector<std::int64_t> rows;     // those that name keys and take part
    std::vector<std::int64_t> sizes;    // how many keys each
    std::vector<std::int64_t> numbers;  // all their keys, kAbsent where `grow` is false

    // Where a number is absent: its place among `numbers`, its place among `rows`, and the key's
    // content_hash.
    struct Outside {
      std::vector<std::int64_t> places, owners, hashes;
    };
    Outside outside(const EventBatch& batch) const;
    // The key at a place among `numbers`.
    std::pair<std::string_view, std::string_view> name(const EventBatch& batch, std::size_t owner,
                                                       std::size_t place) const;
    // Keeps the first `count` rows, fewer than there are; `stop` becomes the one after them.
    void cut(std::size_t count);
  };

  // Looks up the keys of the ready rows from `start` on whose kind is below `kinds_end`, adding
  // the unknown ones if `grow`. Stops at a row of kind `stop_kind`, and, where a row has unknown
  // keys, before it if the table could then exceed `keys_max`; an empty table takes any row.
  Interned intern(const EventBatch& batch, std::size_t start, std::uint8_t kinds_end,
                  std::uint8_t stop_kind, std::size_t keys_max, bool grow);

 private:
  struct Entry {
    std::uint64_t hash;
    std::uint64_t offset;
    std::uint32_t size;
    std::uint32_t group;
  };
  struct Slot {
    std::uint32_t tag;
    std::uint32_t number;  // plus 1; 0 is empty
  };

  const Entry& entry(std::size_t number) const;
  std::int64_t group_number(std::string_view group) const;
  std::uint32_t group_made(std::string_view group);
  std::uint64_t hash_of(std::uint32_t group, std::string_view key) const;
  std::int64_t find_hashed(std::uint64_t hash, std::uint32_t group, std::string_view key) const;
  std::int64_t add_hashed(std::uint64_t hash, std::uint32_t group, std::string_view key);
  void place(std::uint64_t hash, std::uint32_t number);
  void resize(std::size_t slots);

  std::uint64_t seed_;
  std::deque<std::string> groups_;
  std::unordered_map<std::string_view, std::uint32_t, BytesHash> group_numbers_;
  std::vector<Entry> entries_;
  std::string text_;
  std::vector<Slot> slots_;
  std::size_t mask_ = 0;
};

// The first keys of each session's last row, for at most so many sessions, the least recent going
// first.
class SessionTable {
 public:
  struct Session {
    std::string group, name;
    double time_s;
    std::vector<std::int64_t> numbers;
  };
  struct Followed {
    std::vector<std::int64_t> tails, heads, rows;  // `rows`: places in the run of rows given
  };

  std::size_t size() const { return places_.size(); }
  const std::list<Session>& sessions() const { return order_; }
  // Appends as the most recent one; throws BadInput where it is there.
  void load(Session session);
  void clear();
  // Renumbers: `number[old]` is the new one, negative for keys that are gone.
  void renumber(const std::int64_t* number, std::size_t count);

  // Notes the first `width` keys of each row of kind `kind` that has a session, and links the
  // session's last ones to them if at most `gap_s` lies between, and not less than nothing.
  Followed follow(const EventBatch& batch, const KeyTable::Interned& run, const double* times_s,
                  std::uint8_t kind, std::size_t width, double gap_s, std::size_t sessions_max);

 private:
  static void join(std::string_view group, std::string_view name, std::string& out);

  std::list<Session> order_;  // least recent first
  std::unordered_map<std::string, std::list<Session>::iterator, BytesHash> places_;
};

// The ids seen lately, per group, in the order in which they came: 64-bit fingerprints under a
// secret seed, since nobody may be able to aim an id at another one's fingerprint. Of n that are
// held a new id is taken for one of them with probability n / 2^64.
//
// Invariants: every fingerprint that is held has one slot; at most two thirds of the slots are
// full; the marks' counts add up to `size()`.
class IdWindow {
 public:
  // So many are kept whatever their age, if there is room: a clock that jumped forgets none of
  // them.
  static constexpr std::size_t kKeptMin = 65'536;

  struct Limits {
    std::size_t bytes_max;  // 20 bytes an id
    double age_s_max;       // an older id goes, within a 256th of that
  };
  // The ids that came from a time on, until the next mark.
  struct Mark {
    double time_s;
    std::size_t count;
  };

  explicit IdWindow(std::uint64_t seed) : seed_(seed) {}

  // Puts out every ready row whose id is held; `times_s` has one time per row, when the log took
  // it. Returns how many.
  std::size_t pass(EventBatch& batch, const double* times_s, const Limits& limits);
  // Remembers one id; false where it is held.
  bool add(std::string_view group, std::string_view id, double time_s, const Limits& limits);
  // Takes over what another one held, the oldest first; throws BadInput where it does not fit.
  void load(const std::uint64_t* fingerprints, std::size_t count, const std::vector<Mark>& marks);

  std::uint64_t seed() const { return seed_; }
  std::size_t size() const { return count_; }
  std::size_t bytes_used() const {
    return (ring_.capacity() + slots_.capacity()) * sizeof(std::uint64_t);
  }
  // Seconds that the ids cover.
  double span_s() const { return marks_.empty() ? 0.0 : newest_s_ - marks_.front().time_s; }
  std::vector<std::uint64_t> fingerprints() const;  // the oldest first
  const std::deque<Mark>& marks() const { return marks_; }

 private:
  std::uint64_t fingerprint(std::string_view group, std::string_view id) const;
  bool add_hashed(std::uint64_t hash, double time_s, const Limits& limits, std::size_t ids_max);
  bool held(std::uint64_t hash) const;
  void keep(std::uint64_t hash);
  void set_capacity(std::size_t ids);
  void forget_oldest();
  void forget_old(double age_s_max);
  void place(std::uint64_t hash);
  std::size_t home_of(std::uint64_t hash) const {
    return static_cast<std::size_t>((static_cast<unsigned __int128>(hash) * slots_.size()) >> 64);
  }
  std::size_t after(std::size_t slot) const { return slot + 1 == slots_.size() ? 0 : slot + 1; }

  std::uint64_t seed_;
  std::vector<std::uint64_t> ring_;
  std::size_t oldest_ = 0;
  std::size_t count_ = 0;
  std::vector<std::uint64_t> slots_;  // fingerprints at or after their homes; 0 is empty
  std::deque<Mark> marks_;
  double newest_s_ = 0.0;
};

}  // namespace stoker
