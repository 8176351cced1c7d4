#include "run_log.h"

#include <boost/crc.hpp>
#include <cerrno>
#include <charconv>
#include <cstring>

#include "reef/error.h"

namespace bytelm {

RunLog::RunLog(const std::string& path) : path_(path) {
  if (path_.empty()) return;
  file_.open(path_);
  if (!file_) line("");
}

void RunLog::line(const std::string& text) {
  if (path_.empty()) return;
  file_ << text << std::endl;
  if (!file_) {
    throw reef::FileError(
        "cannot write " + path_ + ": " + std::strerror(errno) + "; choose another --losses file", path_,
        errno);
  }
}

void RunLog::step(std::int64_t step, double loss) {
  char digits[32];  // the shortest that reads back as the same number
  const auto end = std::to_chars(digits, digits + sizeof digits, loss).ptr;
  line("{\"step\": " + std::to_string(step) + ", \"loss\": " + std::string(digits, end) + "}");
}

void RunLog::finish(const std::vector<at::Tensor>& parameters) {
  if (path_.empty()) return;
  boost::crc_32_type crc;
  for (const auto& parameter : parameters) {
    const auto values = parameter.detach().cpu().clone();
    crc.process_bytes(values.const_data_ptr(), values.nbytes());
  }
  line("{\"parameters_crc32\": " + std::to_string(crc.checksum()) + "}");
}

}  // namespace bytelm
