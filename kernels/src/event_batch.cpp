#include "stoker/event_batch.hpp"

#include <cstring>

#include "stoker/errors.hpp"

namespace stoker {

namespace {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the scanner finds bytes from the low end");

// Deeper nesting is left to the full decoder.
constexpr int kDepthMax = 32;
// Longer numbers, and numbers with an exponent, are left to it as well: decoders differ on them.
constexpr std::size_t kNumberMax = 15;

constexpr std::uint64_t kOnes = 0x0101010101010101u;
constexpr std::uint64_t kHighs = 0x8080808080808080u;

std::uint64_t zero_bytes(std::uint64_t word) { return (word - kOnes) & ~word & kHighs; }

// Marks the bytes that end a plain run: quote, backslash, controls, and what is not ASCII. Bytes
// above a marked one may be marked wrongly; the lowest mark is right.
std::uint64_t run_ends(std::uint64_t word) {
  const std::uint64_t controls = (word - kOnes * 0x20) & ~word & kHighs;
  return controls | zero_bytes(word ^ (kOnes * '"')) | zero_bytes(word ^ (kOnes * '\\')) |
         (word & kHighs);
}

struct Slice {
  std::string_view bytes;
  bool plain = true;  // no escapes: the bytes are the value
};

// Reads JSON from front to back. Every function returns false where it is not sure.
class Scanner {
 public:
  explicit Scanner(std::string_view payload)
      : at_(payload.data()), end_(payload.data() + payload.size()) {}

  bool take(char wanted) {
    space();
    if (at_ == end_ || *at_ != wanted) return false;
    ++at_;
    return true;
  }

  bool peek(char wanted) {
    space();
    return at_ != end_ && *at_ == wanted;
  }

  bool done() {
    space();
    return at_ == end_;
  }

  bool literal(std::string_view word) {
    space();
    if (static_cast<std::size_t>(end_ - at_) < word.size() ||
        std::memcmp(at_, word.data(), word.size()) != 0) {
      return false;
    }
    at_ += word.size();
    return true;
  }

  bool string(Slice& out) {
    if (!take('"')) return false;
    const char* first = at_;
    out.plain = true;
    for (;;) {
      while (end_ - at_ >= 8) {
        std::uint64_t word;
        std::memcpy(&word, at_, 8);
        const std::uint64_t marks = run_ends(word);
        if (marks != 0) {
          at_ += __builtin_ctzll(marks) >> 3;
          break;
        }
        at_ += 8;
      }
      if (at_ == end_) return false;
      const auto byte = static_cast<unsigned char>(*at_);
      if (byte == '"') {
        out.bytes = std::string_view(first, static_cast<std::size_t>(at_ - first));
        ++at_;
        return true;
      }
      if (byte == '\\') {
        out.plain = false;
        if (!escape()) return false;
      } else if (byte < 0x20) {
        return false;
      } else if (byte < 0x80) {
        ++at_;
      } else if (!multibyte(byte)) {
        return false;
      }
    }
  }

  // A string without escapes, of 1 to `size_max` bytes.
  bool plain(std::string_view& out, std::size_t size_max) {
    Slice slice;
    if (!string(slice) || !slice.plain) return false;
    out = slice.bytes;
    return !out.empty() && out.size() <= size_max;
  }

  bool skip(int depth) {
    space();
    if (at_ == end_ || depth > kDepthMax) return false;
    Slice ignored;
    switch (*at_) {
      case '"':
        return string(ignored);
      case '{':
        ++at_;
        if (take('}')) return true;
        do {
          if (!string(ignored) || !take(':') || !skip(depth + 1)) return false;
        } while (take(','));
        return take('}');
      case '[':
        ++at_;
        if (take(']')) return true;
        do {
          if (!skip(depth + 1)) return false;
        } while (take(','));
        return take(']');
      case 't':
        return literal("true");
      case 'f':
        return literal("false");
      case 'n':
        return literal("null");
      default:
        return number();
    }
  }

 private:
  void space() {
    while (at_ != end_ && (*at_ == ' ' || *at_ == '\n' || *at_ == '\r' || *at_ == '\t')) ++at_;
  }

  bool digits() {
    const char* first = at_;
    while (at_ != end_ && *at_ >= '0' && *at_ <= '9') ++at_;
    return at_ != first;
  }

  bool number() {
    const char* first = at_;
    if (*at_ == '-') ++at_;
    if (at_ == end_) return false;
    if (*at_ == '0') {
      ++at_;
    } else if (!digits()) {
      return false;
    }
    if (at_ != end_ && *at_ == '.') {
      ++at_;
      if (!digits()) return false;
    }
    if (static_cast<std::size_t>(at_ - first) > kNumberMax) return false;
    // What follows must end the value: an exponent, or a digit after a leading zero, does not.
    return at_ == end_ || *at_ == ',' || *at_ == '}' || *at_ == ']' || *at_ == ' ' ||
           *at_ == '\n' || *at_ == '\r' || *at_ == '\t';
  }

  int hex4() {
    if (end_ - at_ < 4) return -1;
    int value = 0;
    for (int i = 0; i < 4; ++i, ++at_) {
      const char c = *at_;
      int digit;
      if (c >= '0' && c <= '9') digit = c - '0';
      else if (c >= 'a' && c <= 'f') digit = c - 'a' + 10;
      else if (c >= 'A' && c <= 'F') digit = c - 'A' + 10;
      else return -1;
      value = value * 16 + digit;
    }
    return value;
  }

  bool escape() {
    ++at_;  // the backslash
    if (at_ == end_) return false;
    const char c = *at_++;
    if (std::strchr("\"\\/bfnrt", c) != nullptr && c != '\0') return true;
    if (c != 'u') return false;
    const int unit = hex4();
    if (unit < 0) return false;
    if (unit < 0xD800 || unit > 0xDFFF) return true;
    if (unit > 0xDBFF || end_ - at_ < 2 || at_[0] != '\\' || at_[1] != 'u') return false;
    at_ += 2;
    const int low = hex4();
    return low >= 0xDC00 && low <= 0xDFFF;
  }

  bool continued(int count) {
    if (end_ - at_ < count) return false;
    for (int i = 0; i < count; ++i, ++at_) {
      if ((static_cast<unsigned char>(*at_) & 0xC0) != 0x80) return false;
    }
    return true;
  }

  // UTF-8 as RFC 3629 has it: no overlong forms, no surrogates, nothing above U+10FFFF.
  bool multibyte(unsigned char lead) {
    if (end_ - at_ < 2) return false;
    const auto second = static_cast<unsigned char>(at_[1]);
    ++at_;
    if (lead >= 0xC2 && lead <= 0xDF) return continued(1);
    if (lead >= 0xE0 && lead <= 0xEF) {
      if ((lead == 0xE0 && second < 0xA0) || (lead == 0xED && second > 0x9F)) return false;
      return continued(2);
    }
    if (lead >= 0xF0 && lead <= 0xF4) {
      if ((lead == 0xF0 && second < 0x90) || (lead == 0xF4 && second > 0x8F)) return false;
      return continued(3);
    }
    return false;
  }

  const char* at_;
  const char* end_;
};

// Reads RFC 3339 text; see TIME_PATTERN in prefetch/events.py, whose language this is.
class TimeReader {
 public:
  explicit TimeReader(std::string_view text) : text_(text) {}

  bool read(double& seconds) {
    int year, month, day, hour, minute, second;
    if (!number(4, 1970, 2250, year) || !mark('-') || !number(2, 1, 12, month) || !mark('-') ||
        !number(2, 1, 31, day) || !mark('T') || !number(2, 0, 23, hour) || !mark(':') ||
        !number(2, 0, 59, minute) || !mark(':') || !number(2, 0, 59, second)) {
      return false;
    }
    static constexpr int kDays[] = {31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31};
    const bool leap = (year % 4 == 0 && year % 100 != 0) || year % 400 == 0;
    if (day > kDays[month - 1] + (month == 2 && leap ? 1 : 0)) return false;
    std::int64_t micros = 0;
    if (at_ < text_.size() && text_[at_] == '.') {
      ++at_;
      int count = 0;
      for (; at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9'; ++at_, ++count) {
        if (count < 6) micros = micros * 10 + (text_[at_] - '0');
      }
      if (count == 0 || count > 9) return false;
      for (; count < 6; ++count) micros *= 10;
    }
    int offset_minutes = 0;
    if (!mark('Z')) {
      if (at_ == text_.size() || (text_[at_] != '+' && text_[at_] != '-')) return false;
      const int sign = text_[at_++] == '+' ? 1 : -1;
      int hours, minutes;
      if (!number(2, 0, 23, hours) || !mark(':') || !number(2, 0, 59, minutes)) return false;
      offset_minutes = sign * (hours * 60 + minutes);
    }
    if (at_ != text_.size()) return false;
    const std::int64_t total =
        ((days_from_1970(year, month, day) * 24 + hour) * 60 + minute - offset_minutes) * 60 +
        second;
    if (total < 0) return false;
    // Exact below 2^53 microseconds, so that one division rounds as the full decoder's does.
    seconds = static_cast<double>(total * 1000000 + micros) / 1e6;
    return true;
  }

 private:
  bool mark(char wanted) {
    if (at_ == text_.size() || text_[at_] != wanted) return false;
    ++at_;
    return true;
  }

  bool number(int width, int low, int high, int& out) {
    out = 0;
    for (int i = 0; i < width; ++i, ++at_) {
      if (at_ >= text_.size() || text_[at_] < '0' || text_[at_] > '9') return false;
      out = out * 10 + (text_[at_] - '0');
    }
    return out >= low && out <= high;
  }

  // Howard Hinnant's days_from_civil, for years from 1970 on.
  static std::int64_t days_from_1970(int year, int month, int day) {
    const int shifted = month <= 2 ? year - 1 : year;
    const int era = shifted / 400;
    const int of_era = shifted - era * 400;
    const int of_year = (153 * (month + (month > 2 ? -3 : 9)) + 2) / 5 + day - 1;
    const int day_of_era = of_era * 365 + of_era / 4 - of_era / 100 + of_year;
    return static_cast<std::int64_t>(era) * 146097 + day_of_era - 719468;
  }

  std::string_view text_;
  std::size_t at_ = 0;
};

// What one envelope says, as slices of the payload.
class Envelope {
 public:
  Envelope(std::string_view payload, const EnvelopeRules& rules) : scan_(payload), rules_(rules) {}

  std::string_view id, tenant, session;
  bool has_session = false;
  double time_s = 0;
  std::size_t kind = 0;
  std::vector<std::string_view>* keys = nullptr;

  bool read() {
    if (!scan_.take('{')) return false;
    do {
      Slice name;
      if (!scan_.string(name) || !name.plain || !scan_.take(':')) return false;
      if (!field(name.bytes)) return false;
    } while (scan_.take(','));
    if (!scan_.take('}') || !scan_.done()) return false;
    constexpr unsigned kRequired =
        kVersion | kId | kSource | kType | kTime | kData | kTenant | kKeys;
    return (seen_ & kRequired) == kRequired && keys->size() >= rules_.keys_min[kind];
  }

 private:
  enum : unsigned {
    kVersion = 1, kId = 2, kSource = 4, kType = 8, kTime = 16, kContent = 32, kData = 64,
    kTenant = 128, kSession = 256, kRoute = 512, kQuery = 1024, kKeys = 2048,
  };

  // A name twice: decoders take the last one, so let one decide.
  bool first(unsigned bit) {
    if ((seen_ & bit) != 0) return false;
    seen_ |= bit;
    return true;
  }

  bool field(std::string_view name) {
    std::string_view value;
    if (name == "specversion") {
      return first(kVersion) && scan_.plain(value, 3) && value == "1.0";
    }
    if (name == "id") return first(kId) && scan_.plain(id, rules_.id_max);
    if (name == "source") return first(kSource) && scan_.plain(value, rules_.source_max);
    if (name == "type") {
      if (!first(kType) || !scan_.plain(value, 256)) return false;
      for (kind = 0; kind < rules_.types.size(); ++kind) {
        if (rules_.types[kind] == value) return true;
      }
      return false;
    }
    if (name == "time") {
      return first(kTime) && scan_.plain(value, 64) && TimeReader(value).read(time_s);
    }
    if (name == "datacontenttype") {
      if (!first(kContent) || !scan_.plain(value, 256)) return false;
      for (const std::string& known : rules_.content_types) {
        if (known == value) return true;
      }
      return false;
    }
    if (name == "data") return first(kData) && data();
    return scan_.skip(1);
  }

  bool data() {
    if (!scan_.take('{') || scan_.peek('}')) return false;
    do {
      Slice name;
      if (!scan_.string(name) || !name.plain || !scan_.take(':')) return false;
      if (!member(name.bytes)) return false;
    } while (scan_.take(','));
    return scan_.take('}');
  }

  bool member(std::string_view name) {
    std::string_view value;
    if (name == "tenant") return first(kTenant) && scan_.plain(tenant, rules_.name_max);
    if (name == "session") {
      if (!first(kSession)) return false;
      if (scan_.literal("null")) return true;
      has_session = true;
      return scan_.plain(session, rules_.name_max);
    }
    if (name == "route") {
      return first(kRoute) && (scan_.literal("null") || scan_.plain(value, rules_.name_max));
    }
    if (name == "query") {
      Slice query;
      return first(kQuery) && (scan_.literal("null") || (scan_.string(query) &&
                                                         query.bytes.size() <= rules_.query_max));
    }
    if (name == "chunk_ids") return first(kKeys) && chunk_ids();
    return scan_.skip(2);
  }

  bool chunk_ids() {
    if (!scan_.take('[')) return false;
    if (scan_.take(']')) return true;
    do {
      std::string_view value;
      if (!scan_.plain(value, rules_.key_max) || keys->size() == rules_.keys_max) return false;
      keys->push_back(value);
    } while (scan_.take(','));
    return scan_.take(']');
  }

  Scanner scan_;
  const EnvelopeRules& rules_;
  unsigned seen_ = 0;
};

}  // namespace

Text EventBatch::keep(std::string_view value) {
  const Text slice{text.size(), static_cast<std::uint32_t>(value.size())};
  text.append(value);
  return slice;
}

void EventBatch::scan(std::string_view payload, const EnvelopeRules& rules) {
  rows.emplace_back();
  if (payload.size() > rules.payload_bytes_max) return;
  thread_local std::vector<std::string_view> found;
  found.clear();
  Envelope envelope(payload, rules);
  envelope.keys = &found;
  if (!envelope.read()) return;
  put(rows.size() - 1, static_cast<std::uint8_t>(envelope.kind), envelope.time_s, envelope.id,
      envelope.tenant, envelope.has_session ? &envelope.session : nullptr, found);
}

void EventBatch::put(std::size_t at, std::uint8_t kind, double time_s, std::string_view id,
                     std::string_view tenant, const std::string_view* session,
                     const std::vector<std::string_view>& row_keys) {
  if (at >= rows.size() || rows[at].state != RowState::kUndecided) {
    throw BadInput("row " + std::to_string(at) + " of " + std::to_string(rows.size()) +
                   " is not one that waits to be settled");
  }
  EventRow& row = rows[at];
  row.kind = kind;
  row.time_s = time_s;
  row.id = keep(id);
  row.tenant = keep(tenant);
  row.has_session = session != nullptr;
  if (session != nullptr) row.session = keep(*session);
  row.first_key = keys.size();
  row.key_count = static_cast<std::uint32_t>(row_keys.size());
  for (const std::string_view key : row_keys) keys.push_back(keep(key));
  row.state = RowState::kReady;
}

}  // namespace stoker
