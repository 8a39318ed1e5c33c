// Native errors; bindings.cpp turns each into the class of the same meaning in stoker.errors.
#pragma once

#include <stdexcept>
#include <string>

namespace stoker {

// A file cannot be opened, read or mapped as stated.
struct StoreError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Stored bytes are not what was written.
struct CorruptData : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The caller's arguments cannot be taken.
struct BadInput : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

}  // namespace stoker
