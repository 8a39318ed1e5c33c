// Envelopes of events scanned into columns: numbers and text slices instead of objects.
//
// The scanner is sound, not complete: a row that it calls ready is one that a full decoder accepts,
// with the same values; whatever it is not sure of stays undecided, for that decoder to settle.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace stoker {

// A slice of a batch's text.
struct Text {
  std::uint64_t offset = 0;
  std::uint32_t size = 0;
};

enum class RowState : std::uint8_t { kUndecided = 0, kReady = 1, kOut = 2 };

struct EventRow {
  double time_s = 0;
  Text id, tenant, session;
  std::uint64_t first_key = 0;  // into EventBatch::keys
  std::uint32_t key_count = 0;
  std::uint8_t kind = 0;        // the place of its type in EnvelopeRules::types
  RowState state = RowState::kUndecided;
  bool has_session = false;
};

// What a well-formed envelope is. Lengths are in characters; the scanner takes no text with more
// bytes than that, so that it never takes one with more characters.
struct EnvelopeRules {
  std::vector<std::string> types;
  std::vector<std::uint32_t> keys_min;  // per type
  std::vector<std::string> content_types;
  std::size_t payload_bytes_max = 0;
  std::size_t id_max = 0;
  std::size_t source_max = 0;
  std::size_t name_max = 0;
  std::size_t key_max = 0;
  std::size_t query_max = 0;
  std::size_t keys_max = 0;
};

// Rows in the order of their payloads. Invariant: every slice lies within `text`, and every row's
// keys within `keys`.
struct EventBatch {
  std::vector<EventRow> rows;
  std::vector<Text> keys;
  std::string text;

  std::string_view view(Text slice) const {
    return std::string_view(text.data() + slice.offset, slice.size);
  }

  // Scans one payload into a new row.
  void scan(std::string_view payload, const EnvelopeRules& rules);

  // Settles row `at` with values that a full decoder found.
  void put(std::size_t at, std::uint8_t kind, double time_s, std::string_view id,
           std::string_view tenant, const std::string_view* session,
           const std::vector<std::string_view>& row_keys);

 private:
  Text keep(std::string_view value);
};

}  // namespace stoker
