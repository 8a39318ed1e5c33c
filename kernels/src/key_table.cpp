#include "stoker/key_table.hpp"

#include <algorithm>
#include <cstring>
#include <random>

#include "stoker/errors.hpp"

namespace stoker {

std::uint64_t process_hash_seed() {
  static const std::uint64_t seed = [] {
    std::random_device device;
    return (static_cast<std::uint64_t>(device()) << 32) | device();
  }();
  return seed;
}

namespace {

constexpr std::size_t kSlotsMin = 1024;
constexpr std::size_t kNumbersMax = 0xFFFFFFFE;

}  // namespace

KeyTable::KeyTable() : seed_(process_hash_seed()) { resize(kSlotsMin); }

std::size_t KeyTable::bytes_used() const {
  return entries_.capacity() * sizeof(Entry) + text_.capacity() + slots_.capacity() * sizeof(Slot);
}

const KeyTable::Entry& KeyTable::entry(std::size_t number) const {
  if (number >= entries_.size()) {
    throw BadInput("key number " + std::to_string(number) + " of " +
                   std::to_string(entries_.size()));
  }
  return entries_[number];
}

std::string_view KeyTable::key_of(std::size_t number) const {
  const Entry& found = entry(number);
  return std::string_view(text_.data() + found.offset, found.size);
}

std::int64_t KeyTable::group_number(std::string_view group) const {
  const auto found = group_numbers_.find(group);
  return found == group_numbers_.end() ? kAbsent : static_cast<std::int64_t>(found->second);
}

std::uint32_t KeyTable::group_made(std::string_view group) {
  const auto found = group_numbers_.find(group);
  if (found != group_numbers_.end()) return found->second;
  const auto number = static_cast<std::uint32_t>(groups_.size());
  groups_.emplace_back(group);  // a deque: the views of older ones stay
  group_numbers_.emplace(groups_.back(), number);
  return number;
}

std::uint64_t KeyTable::hash_of(std::uint32_t group, std::string_view key) const {
  return hash_bytes(key, seed_ + group * 0x9E3779B97F4A7C15u);
}

std::int64_t KeyTable::find_hashed(std::uint64_t hash, std::uint32_t group,
                                   std::string_view key) const {
  const auto tag = static_cast<std::uint32_t>(hash >> 32);
  for (std::size_t at = hash & mask_;; at = (at + 1) & mask_) {
    const Slot slot = slots_[at];
    if (slot.number == 0) return kAbsent;
    if (slot.tag != tag) continue;
    const Entry& found = entries_[slot.number - 1];
    if (found.hash == hash && found.group == group && found.size == key.size() &&
        std::memcmp(text_.data() + found.offset, key.data(), key.size()) == 0) {
      return static_cast<std::int64_t>(slot.number) - 1;
    }
  }
}

std::int64_t KeyTable::add_hashed(std::uint64_t hash, std::uint32_t group, std::string_view key) {
  if (entries_.size() >= kNumbersMax) throw BadInput("a key table holds at most 2^32 - 2 keys");
  if (2 * (entries_.size() + 1) > slots_.size()) resize(2 * slots_.size());
  const auto number = static_cast<std::uint32_t>(entries_.size());
  entries_.push_back({hash, text_.size(), static_cast<std::uint32_t>(key.size()), group});
  text_.append(key);
  place(hash, number);
  return number;
}

void KeyTable::place(std::uint64_t hash, std::uint32_t number) {
  std::size_t at = hash & mask_;
  while (slots_[at].number != 0) at = (at + 1) & mask_;
  slots_[at] = {static_cast<std::uint32_t>(hash >> 32), number + 1};
}

void KeyTable::resize(std::size_t slots) {
  slots_.assign(slots, Slot{0, 0});
  mask_ = slots - 1;
  for (std::size_t number = 0; number < entries_.size(); ++number) {
    place(entries_[number].hash, static_cast<std::uint32_t>(number));
  }
}

std::int64_t KeyTable::find(std::string_view group, std::string_view key) const {
  const std::int64_t number = group_number(group);
  if (number < 0) return kAbsent;
  const auto of = static_cast<std::uint32_t>(number);
  return find_hashed(hash_of(of, key), of, key);
}

std::int64_t KeyTable::add(std::string_view group, std::string_view key) {
  const std::uint32_t of = group_made(group);
  const std::uint64_t hash = hash_of(of, key);
  const std::int64_t found = find_hashed(hash, of, key);
  return found >= 0 ? found : add_hashed(hash, of, key);
}

std::vector<std::int64_t> KeyTable::members(std::string_view group) const {
  std::vector<std::int64_t> out;
  const std::int64_t of = group_number(group);
  if (of < 0) return out;
  for (std::size_t number = 0; number < entries_.size(); ++number) {
    if (entries_[number].group == of) out.push_back(static_cast<std::int64_t>(number));
  }
  return out;
}

void KeyTable::keep(const std::int64_t* numbers, std::size_t count) {
  KeyTable kept;
  for (std::size_t i = 0; i < count; ++i) {
    if (numbers[i] < 0) throw BadInput("key number " + std::to_string(numbers[i]));
    const auto number = static_cast<std::size_t>(numbers[i]);
    kept.add(group_of(number), key_of(number));
  }
  if (kept.size() != count) throw BadInput("a key number is given twice");
  *this = std::move(kept);
}

std::int64_t content_hash(std::string_view group, std::string_view key) {
  return static_cast<std::int64_t>(hash_bytes(key, hash_bytes(group, 0)));
}

KeyTable::Interned::Outside KeyTable::Interned::outside(const EventBatch& batch) const {
  Outside out;
  std::size_t place = 0;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const EventRow& row = batch.rows.at(static_cast<std::size_t>(rows[i]));
    const auto size = static_cast<std::size_t>(sizes[i]);
    for (std::size_t j = 0; j < size; ++j, ++place) {
      if (numbers[place] >= 0) continue;
      out.places.push_back(static_cast<std::int64_t>(place));
      out.owners.push_back(static_cast<std::int64_t>(i));
      out.hashes.push_back(
          content_hash(batch.view(row.tenant), batch.view(batch.keys.at(row.first_key + j))));
    }
  }
  return out;
}

std::pair<std::string_view, std::string_view> KeyTable::Interned::name(const EventBatch& batch,
                                                                       std::size_t owner,
                                                                       std::size_t place) const {
  if (owner >= rows.size()) throw BadInput("no such row in the run");
  std::size_t first = 0;
  for (std::size_t i = 0; i < owner; ++i) first += static_cast<std::size_t>(sizes[i]);
  if (place < first || place - first >= static_cast<std::size_t>(sizes[owner])) {
    throw BadInput("place " + std::to_string(place) + " is not of row " + std::to_string(owner));
  }
  const EventRow& row = batch.rows.at(static_cast<std::size_t>(rows[owner]));
  return {batch.view(row.tenant), batch.view(batch.keys.at(row.first_key + (place - first)))};
}

void KeyTable::Interned::cut(std::size_t count) {
  if (count >= rows.size()) {
    throw BadInput("cannot cut " + std::to_string(rows.size()) + " rows to " +
                   std::to_string(count));
  }
  std::size_t kept = 0;
  for (std::size_t i = 0; i < count; ++i) kept += static_cast<std::size_t>(sizes[i]);
  stop = static_cast<std::size_t>(rows[count]);
  rows.resize(count);
  sizes.resize(count);
  numbers.resize(kept);
}

KeyTable::Interned KeyTable::intern(const EventBatch& batch, std::size_t start,
                                    std::uint8_t kinds_end, std::uint8_t stop_kind,
                                    std::size_t keys_max, bool grow) {
  Interned out;
  out.stop = batch.rows.size();
  std::string_view group_name;
  std::int64_t group = kAbsent;
  std::vector<std::uint64_t> hashes;
  for (std::size_t at = start; at < batch.rows.size(); ++at) {
    const EventRow& row = batch.rows[at];
    if (row.state != RowState::kReady) continue;
    if (row.kind == stop_kind) {
      out.stop = at;
      break;
    }
    if (row.kind >= kinds_end) continue;
    const std::string_view tenant = batch.view(row.tenant);
    if (group < 0 || tenant != group_name) {
      group = grow ? static_cast<std::int64_t>(group_made(tenant)) : group_number(tenant);
      group_name = tenant;
    }
    const auto of = static_cast<std::uint32_t>(group);
    const std::size_t before = out.numbers.size();
    bool whole = true;
    hashes.clear();
    for (std::size_t i = 0; i < row.key_count; ++i) {
      hashes.push_back(hash_of(of, batch.view(batch.keys[row.first_key + i])));
      __builtin_prefetch(&slots_[hashes[i] & mask_]);
    }
    for (std::size_t i = 0; i < row.key_count; ++i) {
      const std::string_view key = batch.view(batch.keys[row.first_key + i]);
      const std::int64_t found = group < 0 ? kAbsent : find_hashed(hashes[i], of, key);
      whole = whole && found >= 0;
      out.numbers.push_back(found);
    }
    if (!whole && grow) {
      if (!entries_.empty() && entries_.size() + row.key_count > keys_max) {
        out.numbers.resize(before);
        out.stop = at;
        break;
      }
      for (std::size_t i = 0; i < row.key_count; ++i) {
        std::int64_t& number = out.numbers[before + i];
        if (number >= 0) continue;
        const std::string_view key = batch.view(batch.keys[row.first_key + i]);
        number = find_hashed(hashes[i], of, key);  // the row may name it twice
        if (number < 0) number = add_hashed(hashes[i], of, key);
      }
    }
    out.rows.push_back(static_cast<std::int64_t>(at));
    out.sizes.push_back(row.key_count);
  }
  return out;
}

void SessionTable::join(std::string_view group, std::string_view name, std::string& out) {
  const auto size = static_cast<std::uint32_t>(group.size());
  out.assign(reinterpret_cast<const char*>(&size), sizeof size);
  out.append(group);
  out.append(name);
}

void SessionTable::load(Session session) {
  std::string joined;
  join(session.group, session.name, joined);
  if (places_.count(joined) != 0) throw BadInput("session " + session.name + " is given twice");
  order_.push_back(std::move(session));
  places_.emplace(std::move(joined), std::prev(order_.end()));
}

void SessionTable::clear() {
  order_.clear();
  places_.clear();
}

void SessionTable::renumber(const std::int64_t* number, std::size_t count) {
  for (Session& session : order_) {
    std::vector<std::int64_t> kept;
    for (const std::int64_t old : session.numbers) {
      if (old < 0 || static_cast<std::size_t>(old) >= count) {
        throw BadInput("session key number " + std::to_string(old) + " of " +
                       std::to_string(count));
      }
      if (number[old] >= 0) kept.push_back(number[old]);
    }
    session.numbers = std::move(kept);
  }
}

SessionTable::Followed SessionTable::follow(const EventBatch& batch,
                                            const KeyTable::Interned& run, const double* times_s,
                                            std::uint8_t kind, std::size_t width, double gap_s,
                                            std::size_t sessions_max) {
  Followed out;
  if (width == 0) return out;
  std::string joined;
  std::vector<std::int64_t> first;
  std::size_t begin = 0;
  for (std::size_t i = 0; i < run.rows.size(); ++i) {
    const auto size = static_cast<std::size_t>(run.sizes[i]);
    const std::int64_t* numbers = run.numbers.data() + begin;
    begin += size;
    const EventRow& row = batch.rows.at(static_cast<std::size_t>(run.rows[i]));
    if (row.kind != kind || !row.has_session) continue;
    first.clear();
    for (std::size_t j = 0; j < std::min(width, size); ++j) {
      if (numbers[j] >= 0) first.push_back(numbers[j]);
    }
    join(batch.view(row.tenant), batch.view(row.session), joined);
    const auto place = places_.find(joined);
    if (place == places_.end()) {
      order_.push_back({std::string(batch.view(row.tenant)), std::string(batch.view(row.session)),
                        times_s[i], first});
      places_.emplace(joined, std::prev(order_.end()));
      if (places_.size() > sessions_max) {
        join(order_.front().group, order_.front().name, joined);
        places_.erase(joined);
        order_.pop_front();
      }
      continue;
    }
    Session& session = *place->second;
    const double silence_s = times_s[i] - session.time_s;
    if (silence_s >= 0 && silence_s <= gap_s) {
      for (const std::int64_t tail : session.numbers) {
        for (const std::int64_t head : first) {
          out.tails.push_back(tail);
          out.heads.push_back(head);
          out.rows.push_back(static_cast<std::int64_t>(i));
        }
      }
    }
    if (session.time_s <= times_s[i]) {
      session.time_s = times_s[i];
      session.numbers = first;
    }
    order_.splice(order_.end(), order_, place->second);
  }
  return out;
}

namespace {

constexpr std::size_t kRingMin = 1024;
constexpr std::size_t kIdsMax = 0x7FFFFFFF;
constexpr std::size_t kAhead = 8;  // rows whose memory is fetched ahead
constexpr double kMarksPerAge = 256.0;

std::size_t slots_for(std::size_t ids) { return ids + ids / 2 + 1; }

// The most ids whose places and slots fit into so many bytes.
std::size_t ids_in(std::size_t bytes) {
  if (bytes < 28) throw BadInput("ids need at least 28 bytes, not " + std::to_string(bytes));
  return std::min((bytes - 8) / 20, kIdsMax);
}

}  // namespace

std::uint64_t IdWindow::fingerprint(std::string_view group, std::string_view id) const {
  const std::uint64_t hash = hash_bytes(id, hash_bytes(group, seed_));
  return hash == 0 ? 1 : hash;
}

void IdWindow::set_capacity(std::size_t ids) {
  while (count_ > ids) forget_oldest();
  std::vector<std::uint64_t> ring(ids);
  for (std::size_t i = 0; i < count_; ++i) ring[i] = ring_[(oldest_ + i) % ring_.size()];
  ring_ = std::move(ring);
  oldest_ = 0;
  slots_ = std::vector<std::uint64_t>(slots_for(ids), 0);
  for (std::size_t i = 0; i < count_; ++i) place(ring_[i]);
}

void IdWindow::place(std::uint64_t hash) {
  std::size_t slot = home_of(hash);
  while (slots_[slot] != 0) slot = after(slot);
  slots_[slot] = hash;
}

// Takes the oldest out of its slot, and moves up what had been pushed on by it.
void IdWindow::forget_oldest() {
  const std::size_t slots = slots_.size();
  const auto behind = [slots](std::size_t slot, std::size_t other) {
    return slot >= other ? slot - other : slot + slots - other;
  };
  std::size_t hole = home_of(ring_[oldest_]);
  while (slots_[hole] != ring_[oldest_]) hole = after(hole);
  for (std::size_t slot = after(hole); slots_[slot] != 0; slot = after(slot)) {
    if (behind(slot, home_of(slots_[slot])) >= behind(slot, hole)) {
      slots_[hole] = slots_[slot];
      hole = slot;
    }
  }
  slots_[hole] = 0;
  if (++oldest_ == ring_.size()) oldest_ = 0;
  --count_;
  if (--marks_.front().count == 0) marks_.pop_front();
}

void IdWindow::forget_old(double age_s_max) {
  while (count_ > kKeptMin && marks_.size() > 1 && marks_[1].time_s < newest_s_ - age_s_max) {
    forget_oldest();
  }
}

bool IdWindow::held(std::uint64_t hash) const {
  if (slots_.empty()) return false;
  for (std::size_t slot = home_of(hash); slots_[slot] != 0; slot = after(slot)) {
    if (slots_[slot] == hash) return true;
  }
  return false;
}

// The newest, under the last mark; there is room.
void IdWindow::keep(std::uint64_t hash) {
  ring_[(oldest_ + count_) % ring_.size()] = hash;
  place(hash);
  ++count_;
  ++marks_.back().count;
}

bool IdWindow::add_hashed(std::uint64_t hash, double time_s, const Limits& limits,
                          std::size_t ids_max) {
  if (held(hash)) return false;
  newest_s_ = marks_.empty() ? time_s : std::max(newest_s_, time_s);
  if (ring_.size() > ids_max) set_capacity(ids_max);
  if (count_ == ring_.size() && count_ < ids_max) {
    set_capacity(std::min(ids_max, std::max(kRingMin, 2 * count_)));
  }
  if (count_ == ring_.size()) forget_oldest();
  if (marks_.empty() || newest_s_ >= marks_.back().time_s + limits.age_s_max / kMarksPerAge) {
    marks_.push_back({newest_s_, 0});
    forget_old(limits.age_s_max);
  }
  keep(hash);
  return true;
}

bool IdWindow::add(std::string_view group, std::string_view id, double time_s,
                   const Limits& limits) {
  return add_hashed(fingerprint(group, id), time_s, limits, ids_in(limits.bytes_max));
}

std::size_t IdWindow::pass(EventBatch& batch, const double* times_s, const Limits& limits) {
  const std::size_t ids_max = ids_in(limits.bytes_max);
  const std::size_t rows = batch.rows.size();
  std::vector<std::uint64_t> hashes(rows, 0);
  for (std::size_t i = 0; i < rows; ++i) {
    const EventRow& row = batch.rows[i];
    if (row.state == RowState::kReady) {
      hashes[i] = fingerprint(batch.view(row.tenant), batch.view(row.id));
    }
  }
  std::size_t count = 0;
  for (std::size_t i = 0; i < rows; ++i) {
    if (i + kAhead < rows && !slots_.empty()) {
      __builtin_prefetch(&slots_[home_of(hashes[i + kAhead])]);
      if (count_ == ids_max) {  // one goes for each that comes
        __builtin_prefetch(&slots_[home_of(ring_[(oldest_ + kAhead) % ring_.size()])]);
      }
    }
    EventRow& row = batch.rows[i];
    if (row.state != RowState::kReady || add_hashed(hashes[i], times_s[i], limits, ids_max)) {
      continue;
    }
    row.state = RowState::kOut;
    ++count;
  }
  return count;
}

void IdWindow::load(const std::uint64_t* fingerprints, std::size_t count,
                    const std::vector<Mark>& marks) {
  std::size_t marked = 0;
  double newest_s = marks.empty() ? 0.0 : marks.front().time_s;
  for (const Mark& mark : marks) {
    if (mark.count == 0 || mark.count > count - marked || !(mark.time_s >= newest_s)) {
      throw BadInput("marks of ids must rise and each hold some of them");
    }
    marked += mark.count;
    newest_s = mark.time_s;
  }
  if (marked != count || count > kIdsMax) {
    throw BadInput(std::to_string(count) + " ids, of which marks hold " + std::to_string(marked));
  }
  IdWindow loaded(seed_);
  if (count > 0) loaded.set_capacity(count);
  loaded.newest_s_ = newest_s;
  for (const Mark& mark : marks) {
    loaded.marks_.push_back({mark.time_s, 0});
    for (std::size_t i = 0; i < mark.count; ++i, ++fingerprints) {
      if (*fingerprints == 0 || loaded.held(*fingerprints)) {
        throw BadInput("an id is there twice, or none");
      }
      loaded.keep(*fingerprints);
    }
  }
  *this = std::move(loaded);
}

std::vector<std::uint64_t> IdWindow::fingerprints() const {
  std::vector<std::uint64_t> out;
  out.reserve(count_);
  for (std::size_t i = 0; i < count_; ++i) out.push_back(ring_[(oldest_ + i) % ring_.size()]);
  return out;
}

}  // namespace stoker
