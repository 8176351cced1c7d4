#include "reef/bytes.h"

#include <torch/library.h>

TORCH_LIBRARY_FRAGMENT(reef, m) {
  m.def("parse_bytes(str text) -> int", [](const std::string& text) { return reef::parse_bytes(text); });
  m.def("format_bytes(int bytes) -> str", [](std::int64_t bytes) { return reef::format_bytes(bytes); });
}
