#include "userfault/frames.h"

#include <fstream>
#include <iterator>
#include <string>

namespace reef {

bool has_large_frames() {
  std::ifstream file("/sys/kernel/mm/transparent_hugepage/enabled");
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  return !text.empty() && text.find("[never]") == std::string::npos;
}

}  // namespace reef
