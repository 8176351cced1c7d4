#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <fstream>
#include <string>

namespace bytelm {

/// One JSON object a line: {"step": 1, "loss": 5.545...} with every digit, and at the end the parameters'
/// checksum. Two runs computed the same if their logs are the same. Throws reef::FileError.
class RunLog {
 public:
  explicit RunLog(const std::string& path);  ///< "": writes nothing
  void step(std::int64_t step, double loss);
  void finish(const std::vector<at::Tensor>& parameters);

 private:
  void line(const std::string& text);

  std::string path_;
  std::ofstream file_;
};

}  // namespace bytelm
