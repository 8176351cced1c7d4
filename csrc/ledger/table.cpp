#include <array>
#include <cstdio>
#include <string>

#include "reef/bytes.h"
#include "reef/ledger.h"

namespace reef {
namespace {

std::string row(const std::string& first, const std::string& alive, const std::string& at_peak,
                const std::string& own_peak) {
  std::array<char, 128> line{};
  std::snprintf(line.data(), line.size(), "%-22s %12s %12s %12s\n", first.c_str(), alive.c_str(),
                at_peak.c_str(), own_peak.c_str());
  return line.data();
}

}  // namespace

std::string Ledger::table() const {
  std::string text;
  for (const c10::Device device : devices()) {
    const CategoryBytes alive = live(device);
    const Peak highest = peak(device);
    const CategoryBytes own = peak_by_category(device);
    if (!text.empty()) text += "\n";
    text += row(device.str(), "alive", "at the peak", "own peak");
    for (std::size_t i = 0; i < kCategories; ++i) {
      const auto category = static_cast<Category>(i);
      text += row(std::string("  ") + name(category), format_bytes(alive[category]),
                  format_bytes(highest.bytes[category]), format_bytes(own[category]));
    }
    text += row("  total", format_bytes(alive.total()), format_bytes(highest.bytes.total()), "");
    if (!highest.op.empty()) text += "  peak reached in " + highest.op + "\n";
  }
  return text;
}

}  // namespace reef
